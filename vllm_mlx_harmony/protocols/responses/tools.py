"""Responses' tools: what a client declares, what the model is shown, and back again.

Knows functions, freeform tools, namespaces and which of them a request allows.
Refuses to know what a header can carry (core.names) and how a call is written (responses_output).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Call, Tool
from vllm_mlx_harmony.protocols.body import UNSUPPORTED, required
from vllm_mlx_harmony.protocols.freeform import freeform_tool, unwrapped, wrap
from vllm_mlx_harmony.protocols.responses.body import (
    AllowedTool,
    Format,
    NamespacedTool,
    ResponsesTool,
    ToolChoice,
)


class Declared(NamedTuple):
    """A tool as the client knows it: what a call must be called to reach it."""

    name: str
    namespace: str = ""
    freeform: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request. ``shown`` are those the model may call, under their unique names."""

    shown: tuple[Tool, ...] = ()
    _declared: Mapping[str, Declared] = field(default_factory=dict)
    """Every spelling a model calls a tool by, and the tool."""
    _names: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def declared(self, called: str) -> Declared:
        """The tool that a call to ``called`` is for; an undeclared one is what it is called."""
        return self._declared.get(called) or Declared(called)

    def echoed(self, call: Call) -> Call:
        """``call``, however the model spelled it, as a client's echo of its item is read."""
        tool = self.declared(call.name)
        arguments = wrap(unwrapped(call.arguments)) if tool.freeform else call.arguments
        return replace(call, name=self.name(tool.name, tool.namespace), arguments=arguments)

    def name(self, name: str, namespace: str = "") -> str:
        """What the model is shown the tool ``name`` of ``namespace`` as, declared or not."""
        return self._names.get((namespace, name)) or joined(namespace, name)


def joined(namespace: str, name: str) -> str:
    """``crm``, ``find`` as ``crm__find``; so does a namespace that already ends in ``__``."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def read_tools(tools: Sequence[ResponsesTool], choice: ToolChoice | None) -> Tools:
    """The tools of a request and which of them ``choice`` leaves to the model.

    Raises ``RequestError`` naming the tool for one without a name or declared twice, and naming
    ``tool_choice`` for a choice that would force a call.
    """
    found = list(_all(tools))
    names = _unique(declared for declared, _ in found)
    allowed = _allowed(choice, [declared for declared, _ in found])
    shown = (replace(tool, name=names[each]) for each, tool in found if each in allowed)
    return Tools(
        shown=tuple(shown),
        _declared=_spellings(names),
        _names={(each.namespace, each.name): name for each, name in names.items()},
    )


# --- What is declared.


def _all(tools: Sequence[ResponsesTool]) -> Iterator[tuple[Declared, Tool]]:
    seen: set[tuple[str, str]] = set()
    for declared, tool in _flat(tools):
        key = declared.namespace, declared.name
        if key in seen:
            raise RequestError(f"two tools are named {tool.name!r}", param=tool.where)
        seen.add(key)
        yield declared, tool


def _flat(tools: Sequence[ResponsesTool]) -> Iterator[tuple[Declared, Tool]]:
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type == "namespace":
            yield from _namespace(tool, where)
        else:
            yield from _read(tool, where)


def _namespace(tool: ResponsesTool, where: str) -> Iterator[tuple[Declared, Tool]]:
    """The namespace's own description stands before that of its first tool."""
    namespace = _named(tool, where)
    if tool.tools is None:
        raise required(f"{where}.tools")
    about = f"{namespace}: {tool.description}\n\n" if tool.description else ""
    for index, inner in enumerate(tool.tools):
        for declared, read in _read(inner, f"{where}.tools[{index}]"):
            described = replace(read, description=about + read.description)
            yield declared._replace(namespace=namespace), described
            about = ""


def _read(tool: NamespacedTool, where: str) -> Iterator[tuple[Declared, Tool]]:
    """Nothing for a tool that the server would have to run: it is left out of the prompt."""
    if tool.type == "function":
        name = _named(tool, where)
        yield Declared(name), Tool(name, tool.description or "", tool.parameters, where)
    elif tool.type == "custom":
        name = _named(tool, where)
        form = tool.format or Format(type="text")
        shown = freeform_tool(name, tool.description or "", where, form.syntax, form.definition)
        yield Declared(name, freeform=True), shown


def _named(tool: NamespacedTool, where: str) -> str:
    if tool.name is None:
        raise required(f"{where}.name")
    return tool.name


# --- What the model is shown, and what it may call it.


def _unique(declared: Iterable[Declared]) -> dict[Declared, str]:
    """A name of its own for each tool. Those without namespace keep theirs."""
    tools = list(declared)
    names = {tool: tool.name for tool in tools if not tool.namespace}
    taken = set(names.values())
    for tool in tools:
        if tool.namespace:
            names[tool] = _free(joined(tool.namespace, tool.name), taken)
    return names


def _free(name: str, taken: set[str]) -> str:
    free, count = name, 1
    while free in taken:
        count += 1
        free = f"{name}_{count}"
    taken.add(free)
    return free


def _spellings(names: Mapping[Declared, str]) -> dict[str, Declared]:
    """The names shown; then, where they are nobody else's, ``crm.find``, and ``find`` alone."""
    spellings = {shown: tool for tool, shown in names.items()}
    for tool in names:
        if tool.namespace:
            spellings.setdefault(f"{tool.namespace}.{tool.name}", tool)
    bare = [tool.name for tool in names]
    for tool in names:
        if bare.count(tool.name) == 1:
            spellings.setdefault(tool.name, tool)
    return spellings


# --- What may be called.


def _allowed(choice: ToolChoice | None, declared: Sequence[Declared]) -> set[Declared]:
    if choice is None or choice.type == "auto":
        return set(declared)
    if choice.type == "none":
        return set()
    if choice.type != "allowed_tools" or choice.mode not in (None, "auto"):
        raise RequestError(
            "tool_choice: only 'auto', 'none' and allowed_tools in mode 'auto' are available: "
            "a call cannot be forced",
            param="tool_choice",
            code=UNSUPPORTED,
        )
    return _listed(choice.tools or (), declared)


def _listed(allowed: Sequence[AllowedTool], declared: Sequence[Declared]) -> set[Declared]:
    found: set[Declared] = set()
    for index, tool in enumerate(allowed):
        if tool.type not in ("function", "custom", "namespace"):
            continue
        matching = {each for each in declared if _is_listed(each, tool)}
        if not matching:
            where = f"tool_choice.tools[{index}]"
            raise RequestError(f"{where} is not among the tools", param=where, code="invalid_value")
        found |= matching
    return found


def _is_listed(declared: Declared, tool: AllowedTool) -> bool:
    if tool.type == "namespace":
        return declared.namespace == tool.name
    return (declared.namespace, declared.name) == (tool.namespace or "", tool.name)
