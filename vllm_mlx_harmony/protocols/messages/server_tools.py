"""The Messages API: tools that a server runs, in a request and in its history.

A request names MCP servers in ``mcp_servers``, in tools of the type ``mcp_toolset``, or in both,
depending on the version of the beta API. A history may have calls of MCP servers and, if it began
at Anthropic, calls of tools that Anthropic's servers run (``server_tool_use``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from json import dumps

from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.names import valid_name
from vllm_mlx_harmony.core.turn import BROWSER, PYTHON, Namespace
from vllm_mlx_harmony.protocols.client_servers import ClientServer, headers_of
from vllm_mlx_harmony.protocols.messages.schema import (
    TOOL_SEARCH,
    AnthropicTool,
    ClientTool,
    MessagesBody,
    PredefinedTool,
    Toolset,
    WebTool,
)
from vllm_mlx_harmony.protocols.messages.tool_types import SERVER_TOOLS, WEB_FETCH
from vllm_mlx_harmony.protocols.messages.web import limits_of
from vllm_mlx_harmony.protocols.server_calls import code_in, recipient_of
from vllm_mlx_harmony.protocols.validation import unsupported

# --- The tools that a request asks for.


def requested_namespaces(
    body: MessagesBody, available: Sequence[Namespace]
) -> tuple[Namespace, ...]:
    """The namespaces that ``body`` names, each with those of its tools that may be called.

    Empty if the server runs no tools. Raises ``RequestError`` naming the field for a server that
    cannot be used.
    """
    if not available:
        return ()
    servers = {namespace.label: namespace for namespace in available}
    chosen: dict[str, Namespace] = {}
    for index, server in enumerate(body.mcp_servers or ()):
        namespace = servers.get(server.name)
        if namespace is None:
            raise _unknown(server.name, f"mcp_servers[{index}].name", servers)
        # https://docs.claude.com/en/docs/agents-and-tools/mcp-connector, as it was in 2025-04-04.
        wanted = server.tool_configuration
        enabled = wanted is None or wanted.enabled is not False
        names = None if wanted is None else wanted.allowed_tools
        allowed = (
            tool
            for tool in namespace.tools
            if enabled and (names is None or tool.origin[-1] in names)
        )
        chosen[server.name] = replace(namespace, tools=tuple(allowed))
    for index, toolset in enumerate(body.tools or ()):
        if not isinstance(toolset, Toolset):
            continue
        label = toolset.mcp_server_name
        namespace = chosen.get(label) or servers.get(label)
        if namespace is None:
            raise _unknown(label, f"tools[{index}].mcp_server_name", servers)
        # The version of 2025-11-20: `configs` for single tools, `default_config` for the rest.
        default = toolset.default_config is None or toolset.default_config.enabled is not False
        switches = {
            name: switch.enabled
            for name, switch in (toolset.configs or {}).items()
            if switch is not None and switch.enabled is not None
        }
        on = (tool for tool in namespace.tools if switches.get(tool.origin[-1], default))
        chosen[namespace.label] = replace(namespace, tools=tuple(on))
    web = [
        (f"tools[{index}]", tool)
        for index, tool in enumerate(body.tools or ())
        if isinstance(tool, WebTool)
    ]
    browser = next((namespace for namespace in available if namespace.name == BROWSER), None)
    if web and browser is not None:
        known = chosen.get(browser.label, browser)  # a toolset may have named it
        chosen[browser.label] = replace(known, limits=limits_of(web, browser.limits))
    return tuple(namespace for namespace in chosen.values() if namespace.tools)


def declares_web(body: MessagesBody) -> bool:
    """Whether ``body`` declares Anthropic's web search or web fetch."""
    return any(isinstance(tool, WebTool) for tool in body.tools or ())


def unavailable_tools(
    body: MessagesBody, available: Sequence[Namespace], namespaces: Iterable[Namespace]
) -> tuple[str, ...]:
    """The names of the declared tools that nobody runs for ``body``.

    ``available`` are the namespaces that the server could run, and ``namespaces`` those that it
    runs for this request.
    """
    enabled = {namespace.name for namespace in namespaces}
    names: dict[str, None] = {}
    for tool in body.tools or ():
        on_client = isinstance(tool, (ClientTool, PredefinedTool))
        if on_client or (tool.type or "").startswith(TOOL_SEARCH):
            continue
        name = unavailable_name(tool)
        similar = _LIKE[name][0].partition(".")[0] if name in _LIKE else ""
        if not (available if isinstance(tool, Toolset) else similar in enabled):
            names[name] = None
    if not available:  # otherwise, unknown servers are errors
        names.update((server.name, None) for server in body.mcp_servers or ())
    return tuple(names)


def unavailable_name(tool: AnthropicTool) -> str:
    """The name of a tool that Anthropic's servers would run, for the model and for the client."""
    if isinstance(tool, Toolset):
        return tool.mcp_server_name
    return SERVER_TOOLS.get(tool.type or "", tool.type or "")


def client_servers(body: object, labels: Collection[str]) -> tuple[ClientServer, ...]:
    """The servers that ``body`` names, except for those with one of the operator's ``labels``.

    Called before ``body`` is validated. Malformed entries are skipped; validation reports them
    later. Raises ``RequestError`` naming the field.
    """
    servers = body.get("mcp_servers") if isinstance(body, dict) else None
    named: list[ClientServer] = []
    for index, server in enumerate(servers if isinstance(servers, list) else ()):
        if not isinstance(server, dict):
            continue
        name, url = server.get("name"), server.get("url")
        if not (isinstance(name, str) and name and isinstance(url, str)) or name in labels:
            continue
        where = f"mcp_servers[{index}]"
        token_where = f"{where}.authorization_token"
        headers = headers_of(None, server.get("authorization_token"), where, token_where)
        named.append(ClientServer(name, url, f"{where}.url", headers, partial(_unreachable, name)))
    return tuple(named)


def _unreachable(name: str, why: str) -> RequestError:
    """The error that api.anthropic.com returns for an unreachable server, with the reason."""
    problem = f"Connection error while communicating with MCP server {quoted(name)}: {why}"
    return RequestError(problem, param="mcp_servers")


def _unknown(name: str, where: str, known: Iterable[str]) -> RequestError:
    problem = (
        f"{where}: there is no tool server {quoted(name)}; the servers are: {', '.join(known)}"
    )
    return unsupported(where, problem)


# --- The calls and results of a history.

_LIKE: Mapping[str, tuple[str, str, str]] = {
    "web_search": ("browser.search", "query", "query"),
    "web_fetch": ("browser.open", "url", "id"),
    "code_execution": (PYTHON, "code", "code"),
}
"""Anthropic's tools: the most similar recipient of gpt-oss, Anthropic's name of the parameter, and
the one here."""


def translated_call(
    namespaces: Sequence[Namespace],
    label: str | None,
    name: str,
    tool_input: Mapping[str, object],
    arguments: str,
) -> tuple[str, str] | None:
    """The recipient and the arguments with which the prompt shows a call of a server's tool.

    ``label`` is that of an MCP server, or ``None`` for a tool of Anthropic's. ``tool_input`` is
    the object in the call's block, and ``arguments`` the same as JSON. Returns ``None`` for a call
    that means nothing to the model.
    """
    if label is not None:
        recipient = recipient_of(namespaces, label, name)
        return recipient, code_in(arguments) if recipient == PYTHON else arguments
    if name.startswith("tool_search"):
        return None
    if name not in _LIKE:
        return valid_name(name, set()), arguments
    recipient, there, here = _LIKE[name]
    if name == WEB_FETCH and isinstance(tool_input.get("pattern"), str):
        return f"{BROWSER}.find", arguments
    value = tool_input.get(there)
    if not isinstance(value, str):
        return recipient, arguments
    if recipient == PYTHON:
        return recipient, value
    return recipient, dumps({here: value}, ensure_ascii=False, separators=(",", ":"))


def found_tools(content: object) -> Iterator[str]:
    """The names of the tools that a search of Anthropic's servers has found."""
    references = content.get("tool_references") if isinstance(content, dict) else None
    for reference in references if isinstance(references, list) else ():
        if isinstance(reference, dict) and isinstance(reference.get("tool_name"), str):
            yield reference["tool_name"]


def result_text(content: object, where: str, attachments: Attachments, depth: int = 0) -> str:
    """The text in a result of Anthropic's tools, at ``where``; each tool has its own format."""
    if isinstance(content, str):
        return content
    if depth > _MAX_DEPTH:
        return ""
    if isinstance(content, list):
        texts = (result_text(part, where, attachments, depth + 1) for part in content)
        return "\n".join(text for text in texts if text)
    if not isinstance(content, dict):
        return ""
    if isinstance(content.get("error_code"), str):
        return f"Error: {content['error_code']}"
    if content.get("type") == "base64":
        return attachments.line("file", "base64", where)
    fields = {key: text for key, text in content.items() if isinstance(text, str) and text}
    lines = [f"{name}: {fields[key]}" for name, key in _HEADING.items() if key in fields]
    lines += [fields[key] for key in ("text", "data", "stdout", "stderr") if key in fields]
    nested = (content[key] for key in ("source", "content") if key in content)
    lines += [result_text(part, where, attachments, depth + 1) for part in nested]
    return "\n".join(line for line in lines if line)


_HEADING = {"Title": "title", "Source": "url"}

_MAX_DEPTH = 8
"""Values within values that are read: the result of a fetch has its text in the fourth."""
