"""Responses: the tools that a client declares, under the names that the model sees.

Tools are declared in two places. Those of the request's ``tools`` are at the beginning of the
prompt. Those of an ``additional_tools`` or a ``tool_search_output`` item are at the place of the
item, so that the prompt before it does not change (semantics A12). Names are assigned in that
order and do not change.

A client that searches for tools itself declares ``tool_search`` with ``execution: client``. The
model sees it as a function, whose description lists the names of the tools that can be found
(``defer_loading``) until an output declares them. Where the server would have to search, it
declares all tools at once: https://developers.openai.com/api/docs/guides/tools-tool-search.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.turn import AdditionalTools, Call, Message, Tool, ToolChoice
from vllm_mlx_harmony.protocols.freeform import freeform_tool, unwrap, wrap
from vllm_mlx_harmony.protocols.responses import schema
from vllm_mlx_harmony.protocols.responses.local_tools import (
    LOCAL_TOOLS,
    described,
    types_chosen,
)
from vllm_mlx_harmony.protocols.responses.schema import SEARCH, ResponsesTool
from vllm_mlx_harmony.protocols.responses.server_tools import ServerTools
from vllm_mlx_harmony.protocols.validation import invalid, required, unsupported

Key: TypeAlias = tuple[str, str, str]


class DeclaredTool(NamedTuple):
    """A tool as the client knows it."""

    name: str
    namespace: str = ""
    kind: str = "function"  # or custom, tool_search, or one of ``LOCAL_TOOLS``

    @property
    def key(self) -> Key:
        """Identifies the tool: a function may be named like one of the ``LOCAL_TOOLS``."""
        return self.namespace, self.name, self.kind if self.kind in LOCAL_TOOLS else ""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request: ``shown`` at the beginning of the prompt, under unique names.

    ``builtin_tools`` are the built-in namespaces. ``choice`` says which tools may be called. With
    ``none``, no tool may be called, and none is shown (A9).
    """

    _reader: ToolReader = field(compare=False, repr=False)
    _spellings: Mapping[str, DeclaredTool]
    """The tool for every name that a model may call it by."""
    shown: tuple[Tool, ...] = ()
    builtin_tools: tuple[str, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    none: bool = False

    def tool(self, called: str) -> DeclaredTool:
        """The tool that the model calls ``called``, which need not have been declared."""
        return self._spellings.get(called) or DeclaredTool(called)

    def as_sent_back(self, call: Call) -> Call:
        """``call`` of the model, as it is read when the client sends its item back."""
        tool = self.tool(call.name)
        arguments = wrap(unwrap(call.arguments)) if tool.kind == "custom" else call.arguments
        if (local := LOCAL_TOOLS.get(tool.kind)) and (item := local.item(call.arguments)):
            arguments = local.arguments(item) or arguments
        return replace(call, name=self._reader.shown(tool), arguments=arguments)

    def shown_name(self, tool: DeclaredTool) -> str:
        """The name of ``tool`` for the model."""
        return self._reader.shown(tool)


def joined(namespace: str, name: str) -> str:
    """``crm``, ``find`` as ``crm__find``; the same if the namespace already ends in ``__``."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


class ToolReader:
    """Reads what a request declares, in the order of the prompt, and gives each tool its name."""

    def __init__(self) -> None:
        self._tools: dict[Key, DeclaredTool] = {}
        self._names: dict[Key, str] = {}
        self._taken: set[str] = set()
        self._numbers: Counter[str] = Counter()  # the last suffix of each name
        self._shown: dict[str, Tool] = {}  # as declared, without the description of its namespace
        self._described: set[tuple[str, str]] = set()  # the namespaces described in the prompt

    def declare(
        self, tools: Sequence[ResponsesTool], where: str, *, found: bool = False
    ) -> tuple[Tool, ...]:
        """Reads ``tools``. Returns those that the prompt shows here for the first time.

        ``found``: they are the result of a search. Raises ``RequestError`` for a tool that is
        declared twice in the list at ``where``.
        """
        read = [entry for at, tool in enumerate(tools) for entry in _read(tool, f"{where}[{at}]")]
        seen: set[Key] = set()
        for entry in read:
            if entry.declared.key in seen:
                problem = f"duplicate tool name {quoted(entry.tool.name)}"
                raise RequestError(problem, param=entry.tool.where)
            seen.add(entry.declared.key)
        # Functions come first, and those of namespaces last, so that the client's names are kept.
        for tool in sorted(
            (entry.declared for entry in read),
            key=lambda tool: (bool(tool.namespace), tool.kind in LOCAL_TOOLS),
        ):
            self._take(tool, self._names.get(tool.key) or self._free(tool))
        searches = not found and any(entry.declared.kind == SEARCH for entry in read)
        later = [entry for entry in read if searches and entry.deferred]
        shown = [entry for entry in read if not (searches and entry.deferred)]
        return tuple(tool for entry in shown for tool in self._new(entry, later))

    def known(self, messages: Iterable[Message]) -> None:
        """Reads the tools that earlier requests of the conversation declared, with their names."""
        for message in messages:
            for tool in message.tools if isinstance(message, AdditionalTools) else ():
                self._take(DeclaredTool(*tool.origin or (tool.name,)), tool.name)
                self._shown[tool.name] = replace(tool, where="")

    def name(self, name: str, namespace: str = "") -> str:
        """The name in the prompt of the tool ``name`` of ``namespace``, declared or not."""
        return self.shown(DeclaredTool(name, namespace))

    def shown(self, tool: DeclaredTool) -> str:
        return self._names.get(tool.key) or joined(tool.namespace, tool.name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tools, including those that a search has yet to find."""
        return tuple(self._names.values())

    @property
    def search(self) -> str:
        return self.of_kind(SEARCH) or SEARCH

    def of_kind(self, *kinds: str) -> str | None:
        """The name in the prompt of the first tool of the first of ``kinds`` that has one."""
        tools = ((kind, key) for kind in kinds for key in self._tools)
        names = (self._names[key] for kind, key in tools if self._tools[key].kind == kind)
        return next(names, None)

    @property
    def only(self) -> str | None:
        return self.names[0] if len(self._names) == 1 else None

    def tools(
        self,
        shown: tuple[Tool, ...],
        choice: schema.ToolChoice | None,
        server: ServerTools,
        builtin_tools: tuple[str, ...],
    ) -> Tools:
        """All tools that were read, and which of them may be called.

        ``server`` has the tools that the server runs. Raises ``RequestError`` for a ``choice`` that
        cannot be made.
        """
        names = {tool: self._names[key] for key, tool in self._tools.items()}
        # A tool may also be called `crm.find`, or `find` where no other has that name.
        spellings = {shown: tool for tool, shown in names.items()}
        for tool in names:
            if tool.namespace:
                spellings.setdefault(f"{tool.namespace}.{tool.name}", tool)
        bare = Counter(tool.name for tool in names)
        for tool in names:
            if bare[tool.name] == 1:
                spellings.setdefault(tool.name, tool)
        if choice is not None and choice.type == "none":
            return Tools(self, spellings, none=True)
        read = Tools(self, spellings, shown, builtin_tools)
        known = {tool: name for tool, name in names.items() if name in self._shown}
        return replace(read, choice=_choice(choice, read, known, set(names), server))

    def _take(self, tool: DeclaredTool, name: str) -> None:
        self._tools[tool.key], self._names[tool.key] = tool, name
        self._taken.add(name)

    def _free(self, tool: DeclaredTool) -> str:
        name = free = joined(tool.namespace, tool.name)
        while free in self._taken:
            self._numbers[name] += 1
            free = f"{name}_{self._numbers[name] + 1}"
        return free

    def _new(self, read: _ReadTool, later: Sequence[_ReadTool]) -> Iterator[Tool]:
        """The tool, unless it was shown; a search lists the tools that it can find, ``later``.

        They have the client's own names there, aliases or not (A10): the client receives the
        arguments of a search as the model writes them.
        """
        declared = read.declared
        tool = replace(read.tool, name=self._names[declared.key], origin=tuple(declared))
        if declared.kind == SEARCH and later:
            sources = [
                (entry.declared.namespace, entry.about)
                if entry.declared.namespace
                else (entry.declared.name, entry.tool.description)
                for entry in later
            ]
            named = [f"- {name}: {about}" if about else f"- {name}" for name, about in sources]
            text = "\n".join((f"{tool.description}\n\nThere are:", *dict.fromkeys(named)))
            tool = replace(tool, description=text)
        if self._shown.get(tool.name) == replace(tool, where=""):
            return
        self._shown[tool.name] = replace(tool, where="")
        about = declared.namespace, read.about
        if read.about and about not in self._described:
            self._described.add(about)
            tool = replace(tool, description=f"{': '.join(about)}\n\n{tool.description}")
        yield tool


class _ReadTool(NamedTuple):
    """A tool that was read; ``about`` is the description of its namespace."""

    declared: DeclaredTool
    tool: Tool
    deferred: bool
    about: str = ""


_SEARCHES = "Finds tools that are not declared yet. They can be called when they were found."

_PATHS: Mapping[str, object] = {
    "type": "object",
    "properties": {
        "paths": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Names of the tools, or of the namespaces, to declare.",
        }
    },
    "required": ["paths"],
    "additionalProperties": False,
}
"""The parameters of a search that has none of its own: those of OpenAI's Agents SDK."""


def _read(tool: ResponsesTool, where: str) -> Iterator[_ReadTool]:
    """The tool, or those of a namespace. Tools that another server would run are left out."""
    if isinstance(tool, schema.NamespaceTool):
        for at, inner in enumerate(tool.tools):
            for read in _read(inner, f"{where}.tools[{at}]"):
                declared = read.declared._replace(namespace=tool.name)
                deferred = read.deferred or bool(tool.defer_loading)
                yield _ReadTool(declared, read.tool, deferred, tool.description or "")
        return
    if isinstance(tool, schema.PredefinedTool):
        local = LOCAL_TOOLS[tool.type]
        shown = Tool(local.name, described(tool.type, tool.raw), local.parameters, where)
        yield _ReadTool(DeclaredTool(local.name, kind=tool.type), shown, deferred=False)
        return
    if not isinstance(tool, schema.ClientTool):
        return
    description, deferred = tool.description or "", bool(tool.defer_loading)
    match tool:
        case schema.FunctionTool(name=name):
            function = Tool(name, description, tool.parameters, where, tool.strict is True)
            yield _ReadTool(DeclaredTool(name), function, deferred)
        case schema.CustomTool(name=name):
            syntax, definition = None, None
            if isinstance(tool.format, schema.GrammarFormat):
                syntax, definition = tool.format.syntax, tool.format.definition
            shown = freeform_tool(name, description, where, syntax, definition)
            yield _ReadTool(DeclaredTool(name, kind="custom"), shown, deferred)
        case _:
            parameters = _PATHS if tool.parameters is None else tool.parameters
            search = Tool(SEARCH, description or _SEARCHES, parameters, where)
            yield _ReadTool(DeclaredTool(SEARCH, kind=SEARCH), search, deferred=False)


# --- What may be called.


def _choice(
    requested: schema.ToolChoice | None,
    tools: Tools,
    known: Mapping[DeclaredTool, str],
    declared: Collection[DeclaredTool],
    server: ServerTools,
) -> ToolChoice:
    """Which tools may be called. ``known`` are those of the ``declared`` ones that are shown."""
    if requested is None or requested.type == "auto":
        return ToolChoice()
    if requested.type == "required":
        chosen = ToolChoice(required=True)
    elif requested.type in ("function", "custom") or types_chosen(requested.type):
        chosen = ToolChoice(True, _named(requested, tools, known))
    elif requested.type == "allowed_tools" and requested.mode in (None, "auto", "required"):
        allowed = requested.tools or ()
        allowed_tools = _find_allowed(allowed, declared)
        names = [name for tool, name in known.items() if tool in allowed_tools]
        for index, allowed_tool in enumerate(allowed):
            names += server.chosen(allowed_tool, f"tool_choice.tools[{index}]")
        chosen = ToolChoice(requested.mode == "required", tuple(names))
    elif of_server := server.chosen(requested, "tool_choice"):
        chosen = ToolChoice(True, of_server)
    else:
        raise unsupported(
            "tool_choice",
            "tool_choice must be 'auto', 'none', 'required', a function or custom tool, or "
            "allowed_tools, or a tool that the server runs for this request",
        )
    everything = (*known, *tools.builtin_tools, *server.recipients)
    if chosen.required and not (everything if chosen.names is None else chosen.names):
        problem = "tool_choice: a call is required, but there is no tool to call"
        raise invalid("tool_choice", problem)
    return chosen


def _named(
    requested: schema.ToolChoice, tools: Tools, known: Mapping[DeclaredTool, str]
) -> tuple[str, ...]:
    """The names of the client's tools of which one must be called."""
    if kinds := types_chosen(requested.type):
        names = tuple(name for tool, name in known.items() if tool.kind in kinds)
    elif requested.name is None:
        raise required("tool_choice.name")
    else:
        tool = tools.tool(joined(requested.namespace or "", requested.name))
        names = (known[tool],) if tool in known else ()
    if not names:
        name = quoted(requested.name or requested.type)
        problem = f"tool_choice: {name} is not among the tools that can be called"
        raise invalid("tool_choice", problem)
    return names


def _find_allowed(
    allowed: Sequence[schema.AllowedTool], declared: Collection[DeclaredTool]
) -> set[DeclaredTool]:
    """The tools that are ``allowed``. Raises ``RequestError`` for one that is not ``declared``."""
    found: set[DeclaredTool] = set()
    known: defaultdict[tuple[str | None, ...], set[DeclaredTool]] = defaultdict(set)
    for declared_tool in declared:
        known[declared_tool.namespace,].add(declared_tool)
        known[declared_tool.namespace, declared_tool.name].add(declared_tool)
    for index, tool in enumerate(allowed):
        kinds = (SEARCH,) if tool.type == SEARCH else types_chosen(tool.type)
        if kinds:
            found |= {declared_tool for declared_tool in declared if declared_tool.kind in kinds}
        elif tool.type in ("function", "custom", "namespace"):
            key = (tool.name,) if tool.type == "namespace" else (tool.namespace or "", tool.name)
            if key not in known:
                where = f"tool_choice.tools[{index}]"
                raise invalid(where, f"{where} is not among the tools")
            found |= known[key]
    return found
