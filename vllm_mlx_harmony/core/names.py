"""Tool names: from the names that a request declares to Harmony recipients, and back.

Wherever possible, the prompt shows a tool under its declared name. In two cases it shows an alias
(A10), which is mapped back in everything that a client reads:

- A header cannot contain the name: it has spaces, dots at its ends, or characters beyond ASCII.
- gpt-oss was trained with a tool of that name: ``python``, whose input is code, ``browser.search``
  and its siblings, ``container.exec``. It sends that tool's raw text to any function of the same
  name, ignoring its JSON schema, and does so with ``bash``, too. So ``browser.search`` becomes
  ``browser_search`` and ``python`` becomes ``python_tool``.

Recipients are read with the same table (B, "Recipient").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.header import NAME_LIMIT, NOT_TOOLS
from vllm_mlx_harmony.core.turn import TRAINED, AdditionalTools, Call, Tool, Turn

FUNCTIONS = "functions"
_PREFIX = f"{FUNCTIONS}."
_VALID_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_MAX_NAME = NAME_LIMIT - len("to=") - len(_PREFIX) - 1
_SUFFIX = 8
"""Characters reserved at the end of an alias for a number, which makes it unique."""
_INVALID = re.compile(r"[^A-Za-z0-9_-]+")
_LIKE_TRAINED = frozenset({"bash"})
"""Other functions to which gpt-oss writes raw text."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one turn: ``aliases`` maps each declared name to the one in the prompt.

    ``builtin`` are the built-in namespaces that the client runs, ``server`` the recipients of the
    tools that the server runs. A client that declares ``python`` and enables the
    built-in ``python`` receives calls to both under that name; the prompt shows the declared one as
    ``functions.python_tool``.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    builtin: tuple[str, ...] = ()
    server: tuple[str, ...] = ()
    _declared: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        inverse = {alias: name for name, alias in self.aliases.items()}
        object.__setattr__(self, "_declared", inverse)

    @classmethod
    def of(cls, turn: Turn) -> Names:
        """The names of a turn's tools, and of the tools and calls in its history, in that order.

        Raises ``RequestError`` for a tool without a name, for two tools with the same name, for a
        function in the namespace of a tool that the server runs (``weather.now``, but not
        ``weather``), and for a tool choice with a name that both have.
        """
        server = tuple(name for namespace in turn.namespaces for name in namespace.recipients)
        namespaces = frozenset(namespace.name for namespace in turn.namespaces)
        builtin = tuple(name for name in turn.builtin_tools if name not in namespaces)
        tools = turn.callable_tools
        known = {tool.name for tool in tools}
        later: dict[str, bool] = {}  # names that the history calls or declares, in order
        for message in turn.messages:
            if isinstance(message, AdditionalTools):
                later.update((name, name in known) for name in _declared(message.tools))
            elif isinstance(message, Call) and _namespace(message.name) not in builtin:
                later[message.name] = message.name in known
        for tool in tools if namespaces else ():
            namespace, dot, _ = tool.name.partition(".")
            if dot and namespace in namespaces and not _is_trained(tool.name):
                problem = (
                    f"a tool cannot be named {quoted(tool.name)}: names that begin with "
                    f"{quoted(namespace + '.')} are those of the server's own tools"
                )
                raise RequestError(problem, param=tool.where)
            if tool.name in server and tool.name in (turn.tool_choice.names or ()):
                problem = (
                    f"{quoted(tool.name)} is ambiguous: it is a function of this request, and a "
                    "tool that the server runs"
                )
                raise RequestError(problem, param="tool_choice")
        return cls(_aliases(_declared(turn.tools), later), builtin, server)

    def alias(self, name: str) -> str:
        """``name`` as it appears in ``namespace functions`` of the prompt."""
        return self.aliases.get(name, name)

    def recipient(self, name: str) -> str:
        """The recipient that addresses the tool: ``functions.NAME``, or a built-in's own name."""
        is_builtin = name not in self.aliases and _namespace(name) in self.builtin
        return name if is_builtin else _PREFIX + self.alias(name)

    def addressee(self, recipient: str) -> str:
        """The declared name of the tool that ``recipient`` addresses, or an unknown recipient
        without ``functions.``. Empty for one that is never a tool (``NOT_TOOLS``)."""
        if recipient in NOT_TOOLS:
            return ""
        return self._known(recipient)[0] or recipient.removeprefix(_PREFIX) or recipient

    def is_tool(self, recipient: str) -> bool:
        """Whether ``recipient`` addresses a declared tool, or a built-in one that is enabled."""
        return bool(self._known(recipient)[0])

    def is_server_tool(self, recipient: str) -> bool:
        """Whether ``recipient`` addresses a tool that the server runs."""
        return self._known(recipient)[1]

    def _known(self, recipient: str) -> tuple[str, bool]:
        """The name of the tool that is meant, and whether the server runs it.

        The first that applies: a tool of the server by its full name; an alias; a declared name
        after ``functions.``; a built-in tool; another name in a namespace of the server; a declared
        name; a name that only differs in case or in ``_`` and ``-`` around it, if there is just
        one; a tool of the server without its namespace.
        """
        bare = recipient.removeprefix(_PREFIX) or recipient
        if recipient in self.server:
            return recipient, True
        declared = self._declared.get(bare) or self._declared.get(recipient)
        if declared is not None:
            return declared, False
        if bare != recipient and bare in self.aliases:
            return bare, False
        if _namespace(recipient) in self.builtin:
            return recipient, False
        if _namespace(bare) in map(_namespace, self.server):
            return bare, True
        if bare in self.aliases:
            return bare, False

        def bared(name: str) -> str:
            return name.casefold().removeprefix(_PREFIX).strip("_-")

        like = [name for alias, name in self._declared.items() if bared(alias) == bared(recipient)]
        if like:
            return (like[0] if len(like) == 1 else ""), False
        like = [name for name in self.server if bare and name.partition(".")[2] == bare]
        return (like[0], True) if len(like) == 1 else ("", False)


def _namespace(name: str) -> str:
    return name.partition(".")[0]


def _declared(tools: Iterable[Tool]) -> list[str]:
    names: dict[str, None] = {}
    for tool in tools:
        if not tool.name:
            raise RequestError("a tool must have a name", param=tool.where)
        if tool.name in names:
            raise RequestError(f"duplicate tool name {quoted(tool.name)}", param=tool.where)
        names[tool.name] = None
    return list(names)


def _aliases(declared: Sequence[str], later: Mapping[str, bool]) -> dict[str, str]:
    """Maps names to aliases. A later name never changes an earlier alias (A12).

    ``later`` maps each name to whether it is declared now. If it is not, an earlier call used it
    unchanged.
    """
    unchanged = {name for name in declared if _is_valid(name) and not _is_trained(name)}
    taken = set(unchanged)
    numbers: dict[str, int] = {}
    aliases: dict[str, str] = {}
    for name, declares in (*((name, True) for name in declared), *later.items()):
        if name in aliases:
            continue
        similar = name
        if declares and _is_trained(name):
            similar = name.replace(".", "_") if "." in name else f"{name}_tool"
        aliases[name] = name if name in unchanged else valid_name(similar, taken, numbers)
    return aliases


def _is_trained(name: str) -> bool:
    """Whether gpt-oss would mistake a function of that name for a tool it was trained with."""
    return _namespace(name) in TRAINED or name in _LIKE_TRAINED


def valid_name(name: str, taken: set[str], numbers: dict[str, int] | None = None) -> str:
    """``name``, or a similar one that fits a header and is free; it is added to ``taken``.

    ``numbers`` has the last number for each beginning of a name. Otherwise each of thousands of
    similar names would try all earlier numbers.
    """
    numbers = {} if numbers is None else numbers
    stem = name if _is_valid(name) else _INVALID.sub("_", name).strip("_") or "tool"
    alias, start = stem[:_MAX_NAME], stem[: _MAX_NAME - _SUFFIX]
    while alias in taken:
        numbers[start] = number = numbers.get(start, 1) + 1
        end = f"_{number}"
        alias = stem[: _MAX_NAME - len(end)] + end
    taken.add(alias)
    return alias


def _is_valid(name: str) -> bool:
    return len(name) <= _MAX_NAME and _VALID_NAME.fullmatch(name) is not None
