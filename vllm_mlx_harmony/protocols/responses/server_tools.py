"""Responses: the tools of a request that the server runs, and which calls need approval.

``mcp`` names one of the operator's tool servers by its ``server_label`` or, if the operator allows
it, any server by its ``server_url``. ``code_interpreter`` is the server named ``python``,
``web_search`` the one named ``browser``. Tools of these types are not available if the server runs
no tools, or has no server with that name: agents declare them whether or not there is one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.turn import BROWSER, PYTHON, Namespace, Tool, WebLimits
from vllm_mlx_harmony.protocols.client_servers import ClientServer, headers_of
from vllm_mlx_harmony.protocols.responses.schema import (
    SEARCH,
    WEB_SEARCH,
    AllowedTool,
    ClientTool,
    McpTool,
    NamespaceTool,
    PredefinedTool,
    ResponsesTool,
    ToolFilter,
    WebFilters,
    WebSearchTool,
)
from vllm_mlx_harmony.protocols.server_calls import recipients_of
from vllm_mlx_harmony.protocols.validation import invalid, required, unsupported

Kind: TypeAlias = Literal["mcp", "code_interpreter", "web_search"]

_NAMESPACES: Mapping[str, tuple[Kind, str]] = {
    "code_interpreter": ("code_interpreter", PYTHON),
    **dict.fromkeys(WEB_SEARCH, ("web_search", BROWSER)),
}
"""Types of tools that stand for a namespace which gpt-oss was trained with."""


@dataclass(frozen=True, slots=True)
class ServerTools:
    """The tools that the server runs for a request: ``namespaces``.

    ``mcp`` are those that the request declares as such, even if they have no tools now: their tools
    are listed in the response. ``available`` are all that the server could run.
    """

    namespaces: tuple[Namespace, ...] = ()
    mcp: tuple[Namespace, ...] = ()
    available: tuple[Namespace, ...] = ()
    _kinds: Mapping[str, Kind] = field(default_factory=dict)

    @property
    def recipients(self) -> tuple[str, ...]:
        return tuple(name for namespace in self.namespaces for name in namespace.recipients)

    @property
    def kinds(self) -> frozenset[Kind]:
        """The types of the tools that the server runs."""
        return frozenset(
            self._kinds[namespace.name]
            for namespace in self.namespaces
            if namespace.name in self._kinds
        )

    def kind(self, recipient: str) -> Kind:
        """How the request declares the tool at ``recipient``, which need not exist."""
        exists = any(recipient in namespace.by_recipient for namespace in self.namespaces)
        return self._kinds.get(recipient.partition(".")[0], "mcp") if exists else "mcp"

    def chosen(self, requested: AllowedTool, where: str) -> tuple[str, ...]:
        """The recipients of the ``requested`` tools that the server runs. Raises ``RequestError``.

        They are all tools of an MCP server, or one of them, or those of a type of their own.
        """
        if requested.type == "mcp" and self.namespaces:
            label = requested.server_label or ""
            recipients = recipients_of(self.namespaces, label, requested.name)
            if not recipients:
                raise invalid(where, f"{where}: {quoted(label)} has no such tool in this request")
            return recipients
        kind, name = _NAMESPACES.get(requested.type, (None, ""))
        namespace = next(
            (namespace for namespace in self.namespaces if namespace.name == name), None
        )
        return namespace.recipients if namespace and self._kinds.get(name) == kind else ()


def read_server_tools(
    tools: Sequence[ResponsesTool], available: tuple[Namespace, ...]
) -> ServerTools:
    """The ``available`` namespaces that ``tools`` declare.

    Raises ``RequestError`` for an unknown server, and for what only another server could do.
    """
    if not available:
        return ServerTools()
    chosen: dict[str, Namespace] = {}
    mcp: list[Namespace] = []
    kinds: dict[str, Kind] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        kind, name = _NAMESPACES.get(tool.type, ("mcp", ""))
        if isinstance(tool, McpTool):
            declared = [_mcp(tool, where, available)]
            if any(namespace.label == declared[0].label for namespace in (*mcp, *chosen.values())):
                problem = f"{where}: {quoted(declared[0].label)} is a duplicate server_label"
                raise RequestError(problem, param=where)
            mcp += declared
        else:
            declared = [namespace for namespace in available if namespace.name == name]
            if isinstance(tool, WebSearchTool):
                declared = [_limited(tool, where, namespace) for namespace in declared]
                if tool.external_web_access is False:  # there is no index here
                    declared = []
        for namespace in declared:
            if namespace.tools:
                known = chosen.setdefault(namespace.name, namespace)
                if namespace.limits not in (None, WebLimits()):  # also of one that was named before
                    chosen[namespace.name] = replace(known, limits=namespace.limits)
                kinds.setdefault(namespace.name, kind)
    return ServerTools(tuple(chosen.values()), tuple(mcp), available, kinds)


def _limited(tool: WebSearchTool, where: str, browser: Namespace) -> Namespace:
    """The ``browser`` with what ``tool`` permits."""
    filters = tool.filters or WebFilters()
    allowed, blocked = filters.allowed_domains or (), filters.blocked_domains or ()
    if not (allowed or blocked):
        return browser
    if browser.limits is None:
        problem = f"{where}.filters: this server's browser cannot be limited to domains"
        raise unsupported(f"{where}.filters", problem)
    return replace(browser, limits=WebLimits(tuple(allowed), tuple(blocked)))


HOSTED_TOOLS: Mapping[str, str] = {
    **{kind: name for kind, (name, _) in _NAMESPACES.items()},
    "file_search": "file_search",
    "image_generation": "image_generation",
    "programmatic_tool_calling": "programmatic_tool_calling",
    "shell": "shell",
}
"""The types of tools that OpenAI's servers run, each with its name without a version.

A ``shell`` is one of them in a container.
"""


def unavailable_tools(
    tools: Iterable[ResponsesTool], server: ServerTools | None = None
) -> tuple[str, ...]:
    """The names of those of ``tools`` that nobody runs; ``server`` has those that this one runs."""
    kinds = frozenset[Kind]() if server is None else server.kinds
    names: dict[str, None] = {}
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            names.update(dict.fromkeys(unavailable_tools(tool.tools)))
        elif isinstance(tool, McpTool):
            if server is None or not server.available:  # otherwise, unknown servers are errors
                names[tool.server_label or tool.type] = None
        elif not (isinstance(tool, (ClientTool, PredefinedTool)) or tool.type == SEARCH):
            name = HOSTED_TOOLS.get(tool.type, tool.type)
            if name not in kinds:
                names[name] = None
    return tuple(names)


def chosen_name(requested: AllowedTool) -> str | None:
    """The name of the ``requested`` tool in ``unavailable_tools``, if it could be one of them."""
    if requested.type == "mcp":
        return requested.server_label
    return HOSTED_TOOLS.get(requested.type)


_UNSUPPORTED = ("connector_id", "tunnel_id")
_CREDENTIALS = ("authorization", "headers")


def client_servers(body: object, labels: Collection[str]) -> tuple[ClientServer, ...]:
    """The servers that ``body``, not read yet, names by their URLs; the operator's have ``labels``.

    Malformed entries are skipped; validation reports them later. Raises ``RequestError``
    naming the field.
    """
    tools = body.get("tools") if isinstance(body, dict) else None
    found: list[ClientServer] = []
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not (isinstance(tool, dict) and tool.get("type") == "mcp"):
            continue
        where = f"tools[{index}]"
        label, url = tool.get("server_label"), tool.get("server_url")
        if not (isinstance(label, str) and label and isinstance(url, str)):
            continue
        if label in labels:
            problem = f"{where}: {quoted(label)} is configured by the operator: omit server_url"
            raise invalid(f"{where}.server_url", problem)
        token_where = f"{where}.authorization"
        headers = headers_of(
            tool.get("headers"), tool.get("authorization"), f"{where}.headers", token_where
        )
        unreachable = partial(_unreachable, label)
        found.append(ClientServer(label, url, f"{where}.server_url", headers, unreachable))
    return tuple(found)


def _unreachable(label: str, why: str) -> RequestError:
    """The error that api.openai.com returns for an unreachable server, with the reason."""
    problem = f"Error retrieving tool list from MCP server: {quoted(label)}. {why}"
    return RequestError(problem, status=424, param="tools", code="http_error")


def without_secrets(tool: Mapping[str, object]) -> dict[str, object]:
    """``tool`` as a response repeats it: credentials are only for its server.

    As on api.openai.com, only the scheme and host of the URL are shown; of a URL without a scheme,
    nothing is.
    """
    shown = {name: value for name, value in tool.items() if name not in _CREDENTIALS}
    url = tool.get("server_url")
    if url is not None:
        scheme, mark, rest = str(url).partition("://")
        host = re.split(r"[/?#\\]", rest, maxsplit=1)[0].rpartition("@")[2]
        is_url = mark and scheme.isalpha()
        shown["server_url"] = f"{scheme}://{host}/<redacted>" if is_url else "<redacted>"
    return {**shown, "headers": None} if "headers" in tool else shown


def _mcp(tool: McpTool, where: str, available: Iterable[Namespace]) -> Namespace:
    by_url = bool(tool.raw.get("server_url"))
    for name in _UNSUPPORTED if by_url else (*_UNSUPPORTED, *_CREDENTIALS):
        if tool.raw.get(name):
            problem = f"{where}.{name} is not supported: use a server of the operator's"
            raise unsupported(f"{where}.{name}", problem)
    if tool.server_label is None:
        raise required(f"{where}.server_label")
    for namespace in available:
        if namespace.label == tool.server_label and namespace.from_request == by_url:
            break
    else:
        if by_url:
            problem = f"{where}.server_url: only servers that the operator allows are used"
            raise unsupported(f"{where}.server_url", problem)
        known = (
            ", ".join(namespace.label for namespace in available if not namespace.from_request)
            or "none"
        )
        problem = f"unknown tool server {quoted(tool.server_label)}; available: {known}"
        raise invalid(f"{where}.server_label", problem)
    allowed = _allowed(tool, where, namespace)
    approval = frozenset(function.name for function in allowed if _needs_approval(tool, function))
    return replace(namespace, tools=allowed, approval=approval)


def _allowed(tool: McpTool, where: str, namespace: Namespace) -> tuple[Tool, ...]:
    wanted = tool.allowed_tools
    if wanted is None:
        return namespace.tools
    known = {tool.origin[-1] for tool in namespace.tools}
    unknown = [name for name in wanted.tool_names or () if name not in known]
    if unknown and namespace.tools:
        problem = f"{where}.allowed_tools: {namespace.label} has no tool {quoted(unknown[0])}"
        raise invalid(f"{where}.allowed_tools", problem)
    return tuple(function for function in namespace.tools if _fits(wanted, function))


def _fits(wanted: ToolFilter, tool: Tool) -> bool:
    named = wanted.tool_names is None or tool.origin[-1] in wanted.tool_names
    return named and (wanted.read_only is None or tool.read_only is wanted.read_only)


def _needs_approval(declared: McpTool, tool: Tool) -> bool:
    """Whether calls of ``tool`` need approval: as at OpenAI, unless the request says otherwise."""
    rule = declared.require_approval
    if rule is None or isinstance(rule, str):
        return rule != "never"
    if rule.always is not None and _fits(rule.always, tool):
        return True
    if rule.never is not None:
        return not _fits(rule.never, tool)
    return rule.always is None  # if only ``always`` is given, no other call needs approval
