"""``Toolbox``: all tools that this server can run, and the execution of a call.

A call always has a result for the model. Any failure - an unknown tool, invalid arguments, a server
that is slow, rejects the call, dies or returns nothing - is described in its text, and the model
continues.

Results are data: they become ordinary text in the prompt (semantics A7), truncated to the
operator's limits of bytes and tokens. Arguments and results are logged at ``debug`` only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import ToolFailure, ToolFinished
from vllm_mlx_harmony.core.errors import HostError, RequestError
from vllm_mlx_harmony.core.names import valid_name
from vllm_mlx_harmony.core.pages import Page
from vllm_mlx_harmony.core.text_limits import is_quick_to_parse
from vllm_mlx_harmony.core.turn import BROWSER, PYTHON, Namespace, ServerCall, Tool, Turn, WebLimits
from vllm_mlx_harmony.protocols.validation import repair
from vllm_mlx_harmony.server.settings import ServerSettings, ToolsMode
from vllm_mlx_harmony.server.tools.client_servers import ClientServers
from vllm_mlx_harmony.server.tools.config import ToolsConfig
from vllm_mlx_harmony.server.tools.mcp_server import McpServer, check_package
from vllm_mlx_harmony.server.tools.tool_server import (
    GROUP,
    Conversational,
    Monitored,
    ToolError,
    ToolServer,
)
from vllm_mlx_harmony.tasks import in_thread

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily

logger = logging.getLogger(__name__)

BROWSER_TOOLS = frozenset({"search", "open", "find"})
"""The tools of the namespace ``browser`` that gpt-oss was trained with."""

CODE = "code"
"""The parameter that takes the code, if a tool has several."""


@dataclass(slots=True)
class Counts:
    """Counters of one tool since the start of the server."""

    calls: int = 0
    errors: int = 0
    seconds: float = 0.0


class Toolbox:
    """Tool servers, which are started and stopped together. ``use`` says for which requests.

    ``clients`` connects to servers that requests name by URL.
    """

    def __init__(
        self,
        servers: Sequence[ToolServer],
        config: ToolsConfig | None = None,
        use: ToolsMode = ToolsMode.ON,
        clients: ClientServers | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.servers = tuple(servers)
        self.notes = tuple(notes)
        """What the operator should know about them."""
        self.config = config or ToolsConfig()
        self.use = use
        self.clients = clients or ClientServers((), self.config.default_timeout)
        self.counts: dict[tuple[str, str], Counts] = {}
        """By label and tool name."""
        self._free = asyncio.Semaphore(self.config.max_concurrent_calls)
        repeated = [label for label, times in Counter(self.labels).items() if times > 1]
        if repeated:
            raise ValueError(f"two tool servers are named {repeated[0]!r}")
        reserved = set(_RESERVED)
        self._names = {
            server.label: valid_name(server.label.replace(".", "_"), reserved)
            for server in self.servers
        }
        self._namespaces: dict[str, tuple[tuple[Tool, ...], Namespace]] = {}

    @classmethod
    def of(cls, config: ToolsConfig, settings: ServerSettings) -> Toolbox:
        """The browser, the MCP servers of ``config``, and the tool servers of other packages.

        If tools are off but for web search, it is the browser alone. Raises ``HostError`` if a
        package is missing or too old, for a label that two servers have, and for an invalid URL
        pattern in the settings.
        """
        clients = ClientServers.of(settings, config.default_timeout)
        if config.servers:
            check_package()
        web: list[ToolServer] = []
        notes: list[str] = []
        if settings.web_search:
            from vllm_mlx_harmony.server.tools import browser

            web = [made := browser.of(settings)]
            notes = [f"the web is searched with {made.engine.name}, and pages are opened from here"]
        if settings.tools is ToolsMode.OFF:
            return cls(web, config, ToolsMode.ON, clients, notes)
        servers: list[ToolServer] = [
            McpServer(label, server, config.default_timeout)
            for label, server in config.servers.items()
            if server.enabled
        ]
        servers += [entry.load()() for entry in entry_points(group=GROUP)]
        repeated = {server.label for server in web} & {server.label for server in servers}
        if repeated:
            name = repeated.pop()
            raise HostError(f"--web-search and another tool server are both named {name!r}")
        return cls([*web, *servers], config, settings.tools, clients, notes)

    async def start(self) -> None:
        """Starts all servers concurrently. Failures are logged, and retried in the background."""
        await asyncio.gather(*(server.start() for server in self.servers))

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop() for server in self.servers), return_exceptions=True)

    @property
    def labels(self) -> list[str]:
        return [server.label for server in self.servers]

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """The current tools. A turn has the same tools from its beginning to its end."""
        namespaces = []
        for server in self.servers:
            name, tools = self._names[server.label], server.tools
            if not tools:
                problem = server.problem or "it has no tools"
                namespaces.append(Namespace(name, (), label=server.label, problem=problem))
                continue
            known = self._namespaces.get(server.label)
            if known is None or known[0] is not tools:
                known = self._namespaces[server.label] = tools, _namespace_of(name, server, tools)
            namespaces.append(known[1])
        return tuple(namespaces)

    @property
    def lines(self) -> list[str]:
        """A description with one line per server, and one for URLs that requests may name."""
        lines = []
        for namespace in self.namespaces:
            names = ", ".join(tool.origin[-1] for tool in namespace.tools)
            lines.append(f"{namespace.label}: {names or namespace.problem}")
        lines += self.notes
        if self.clients.allowed:
            lines.append(f"requests may name {', '.join(self.clients.allowed)}")
        return lines

    def request_namespaces(self, servers: Sequence[ToolServer]) -> tuple[Namespace, ...]:
        """The tools of ``servers`` that a request names by URL."""
        taken = {*_RESERVED, *self._names.values()}
        return tuple(
            replace(
                _namespace_of(
                    valid_name(server.label.replace(".", "_"), taken), server, server.tools
                ),
                from_request=True,
            )
            for server in servers
        )

    def sessions(self, turn: Turn, pages: Mapping[int, Page]) -> dict[str, ToolServer]:
        """By label, the servers whose calls depend on the conversation, whose prompt shows
        ``pages``."""
        limits = {namespace.label: namespace.limits for namespace in turn.namespaces}
        return {
            server.label: server.session(pages, turn.tenant, limits[server.label])
            for server in self.servers
            if server.label in limits and isinstance(server, Conversational)
        }

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Counters of calls: the toolbox is a Prometheus collector."""
        from prometheus_client.core import CounterMetricFamily

        for field, about in (
            ("calls", "Tool calls that the server ran."),
            ("errors", "Calls that failed, timed out or were cancelled."),
            ("seconds", "Seconds spent on tool calls, including the wait for a free slot."),
        ):
            name, labels = f"vllm_mlx_harmony_tool_{field}", ["server", "tool"]
            family = CounterMetricFamily(name, about, labels=labels)
            for label, counts in list(self.counts.items()):
                family.add_metric(label, float(getattr(counts, field)))
            yield family

    # --- One call

    async def execute(
        self,
        call: ServerCall,
        namespaces: Sequence[Namespace],
        seconds: float,
        room: int,
        request_servers: Sequence[ToolServer] = (),
        *,
        sessions: Mapping[str, ToolServer] | None = None,
    ) -> ToolFinished:
        """Runs ``call`` of a turn that has ``namespaces``, some of them of ``request_servers``.

        ``sessions`` are those of the turn (`sessions`). Takes ``seconds`` at most. The result has
        ``room`` tokens at most.
        """
        began = time.monotonic()
        found = [namespace for namespace in namespaces if call.name in namespace.by_recipient]
        if not found:
            known = ", ".join(name for namespace in namespaces for name in namespace.by_recipient)
            return _failed(call, f"unknown tool {call.name}; available tools: {known or 'none'}")
        namespace, tool = found[0], found[0].by_recipient[call.name]
        label, name = tool.origin
        server = next(
            server
            for server in (request_servers if namespace.from_request else self.servers)
            if server.label == label
        )
        if sessions is not None and not namespace.from_request:
            server = sessions.get(label, server)
        counted = REQUEST_SERVERS if namespace.from_request else (label, name)
        counts = self.counts.setdefault(counted, Counts())
        counts.calls += 1
        result: ToolFinished | None = None
        try:
            arguments = _arguments(call.arguments, namespace, tool)
            if isinstance(arguments, str):
                result = _failed(call, arguments)
                return result
            logger.debug("%s: %s %s", call.id, call.name, call.arguments)
            result = await self._call(server, name, arguments, seconds)
            result = await self._cut(result, room)
            logger.debug("%s: %s", call.id, result.text)
            return result
        finally:
            failed = result is None or result.failure is not None
            counts.errors += failed
            took = time.monotonic() - began
            counts.seconds += took
            outcome = "cancelled" if result is None else "failed" if failed else "answered"
            logger.info("%s: %s %s in %.2f s", call.id, call.name, outcome, took)

    async def _call(
        self, server: ToolServer, name: str, arguments: Mapping[str, Any], seconds: float
    ) -> ToolFinished:
        limit = min(server.timeout, seconds)
        try:
            async with asyncio.timeout(limit) as timeout, self._free:
                began = time.monotonic()
                try:
                    answer = await server.call(name, arguments)
                finally:
                    # Not if the call has waited for its turn for most of the time.
                    slow = timeout.expired() and time.monotonic() - began > limit / 2
                    if slow and isinstance(server, Monitored):
                        server.call_timed_out()
            text = str(repair(answer.text)) if answer.text.strip() else NOTHING
            failure = ToolFailure(text, by_tool=True) if answer.failed else None
            return ToolFinished(text, failure)
        except TimeoutError:
            text = f"the tool did not answer within {limit:.0f} seconds"
        except ToolError as error:
            text, code = str(error) or "the tool failed", error.code
            return ToolFinished(f"Error: {text}", ToolFailure(text, code=code))
        except Exception:
            logger.exception("a tool server failed")
            text = "the tool failed"
        return ToolFinished(f"Error: {text}", ToolFailure(text))

    async def _cut(self, result: ToolFinished, room: int) -> ToolFinished:
        """``result``, truncated to the limits of bytes and tokens."""
        tokens = max(0, min(self.config.max_output_tokens, room))
        text = result.text
        if len(text) <= min(
            tokens, self.config.max_output_bytes // 4
        ):  # a token has at least one byte, a character at most four
            return result
        start = await in_thread(_truncated, text, self.config.max_output_bytes, tokens)
        if len(start) == len(text):
            return result
        note = f"[… {len(text) - len(start)} more characters were cut off]"
        text = f"{start}\n{note}" if start else note
        failure = result.failure
        return ToolFinished(text, None if failure is None else replace(failure, text=text))


def _failed(call: ServerCall, text: str) -> ToolFinished:
    logger.debug("%s: %s", call.id, text)
    return ToolFinished(f"Error: {text}", ToolFailure(text))


REQUEST_SERVERS = ("(of a request)", "")
"""The counter of all servers that requests name by URL, whose names are unbounded."""

NOTHING = "[the tool returned nothing]"
"""The text of an empty result."""


def _truncated(text: str, max_bytes: int, max_tokens: int) -> str:
    start = text.encode("utf-8", "replace")[:max_bytes].decode("utf-8", "ignore")
    start = start[: max_tokens * _MAX_TOKEN_LENGTH]
    ids = vocab.encode(start)
    if len(ids) <= max_tokens:
        return start
    return b"".join(map(vocab.token_bytes, ids[:max_tokens])).decode("utf-8", "ignore")


_MAX_TOKEN_LENGTH = 128
"""Maximum characters of a token of the vocabulary."""


def _arguments(text: str, namespace: Namespace, tool: Tool) -> Mapping[str, Any] | str:
    """The arguments of a call, or an error message. Those of ``python`` are code."""
    if namespace.name == PYTHON:
        return {code_parameter(tool) or CODE: text}
    if not is_quick_to_parse(text):
        return "the arguments are too long"
    try:
        arguments = repair(json.loads(text or "{}"))
    except (ValueError, RecursionError, RequestError) as error:
        return f"the arguments are not valid JSON ({error}): call the tool again"
    if not isinstance(arguments, dict):
        return "the arguments are not a JSON object: call the tool again"
    return arguments


# --- The tools as the model sees them


def code_parameter(tool: Tool) -> str | None:
    """The parameter of ``tool`` that takes the code; ``None`` if there is none."""
    schema = tool.parameters or {}
    properties = schema.get("properties", {})
    texts = [name for name, schema in properties.items() if schema.get("type") == "string"]
    if CODE in texts:
        return CODE
    needed = [name for name in texts if name in schema.get("required", ())]
    return needed[0] if len(needed) == 1 else None


def _namespace_of(name: str, server: ToolServer, tools: Sequence[Tool]) -> Namespace:
    """The namespace of ``server``.

    It has a built-in name only if the server has that built-in's tools.
    """
    if name == PYTHON:
        code = [tool for tool in tools if tool.name == PYTHON] or (tools if len(tools) == 1 else [])
        if code and code_parameter(code[0]):
            runs = replace(code[0], origin=(server.label, code[0].name))
            return Namespace(name, (runs,), server.description, server.label)
    elif name == BROWSER:
        chosen = tuple(
            replace(tool, origin=(server.label, tool.name))
            for tool in tools
            if tool.name in BROWSER_TOOLS
        )
        if len(chosen) == len(BROWSER_TOOLS):
            limits = WebLimits() if isinstance(server, Conversational) else None
            return Namespace(name, chosen, server.description, server.label, limits=limits)
    if name in (PYTHON, BROWSER):
        name = f"{name}_tools"
        logger.warning(
            "tool server %s is shown to the model as %s, because it does not have the tools that "
            "gpt-oss knows by its name",
            server.label,
            name,
        )
    taken: set[str] = set()
    named = tuple(
        replace(tool, name=valid_name(tool.name, taken), origin=(server.label, tool.name))
        for tool in tools
    )
    return Namespace(name, named, server.description, server.label)


_RESERVED = frozenset(
    {"functions", "assistant", "user", "system", "developer", "tool", "all", "multi_tool_use"}
)
