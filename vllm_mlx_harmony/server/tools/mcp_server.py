"""``McpServer``: the client of one MCP server, which stays connected to it.

It uses the official package ``mcp``, which is imported when the first server is made
(https://modelcontextprotocol.io/specification).

A connection lives in a task of its own (`_keep_connected`), because the package requires that the
task which opens a connection also closes it. It ends when the process of the server does, when a
server over HTTP stops answering, and with `stop`. A lost connection is replaced, after a pause that
doubles each time. Calls come from other tasks.

URLs of servers may contain secrets of the operator, so they are removed from errors, which clients
and models can see, and from the log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from vllm_mlx_harmony.core import typescript
from vllm_mlx_harmony.core.attachments import placeholder
from vllm_mlx_harmony.core.errors import HostError, RequestError, quoted
from vllm_mlx_harmony.core.turn import Tool
from vllm_mlx_harmony.protocols.validation import repair
from vllm_mlx_harmony.server.tools.config import ServerConfig
from vllm_mlx_harmony.server.tools.tool_server import ToolError, ToolResult

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

logger = logging.getLogger(__name__)

FIRST_PAUSE, MAX_PAUSE = 0.5, 60.0
"""Seconds before the first attempt to reconnect, and the most before any later one; the pause
doubles each time."""

STEADY_SECONDS = 30.0
"""Duration of a connection in seconds, once its tools are listed, after which the pause starts at
``FIRST_PAUSE`` again."""

START_TIMEOUT = 60.0
"""Seconds within which a server must be ready. Its command may download it first."""

MAX_PAGES = 100
"""Maximum pages of a list of tools, in case it never ends."""

NO_RESPONSE = "it does not respond"
CONNECTION_LOST = "its connection was lost"


class State(Enum):
    STOPPED = "stopped"
    """Not started, or stopped."""
    CONNECTING = "connecting"
    """An attempt to connect runs."""
    READY = "ready"
    """The tools can be called."""
    UNRESPONSIVE = "unresponsive"
    """A call has timed out, and the tools are listed again to find out whether the server lives."""
    LOST = "lost"
    """The connection has ended, or the attempt has failed; the next one begins after a pause."""


class Trigger(Enum):
    """Causes a transition. Several tasks do, so most triggers may come when it is too late."""

    CONNECT = "connect"
    """An attempt to connect begins."""
    LISTED = "listed"
    """The server has listed its tools."""
    TIMED_OUT = "timed_out"
    """A call has timed out."""
    LOSE = "lose"
    """The connection ends, or the attempt fails."""
    STOP = "stop"
    """Nothing is to be connected any more."""


TRANSITIONS: dict[State, dict[Trigger, State]] = {
    State.STOPPED: {
        Trigger.CONNECT: State.CONNECTING,
    },
    State.CONNECTING: {
        Trigger.LISTED: State.READY,
        Trigger.LOSE: State.LOST,
        Trigger.STOP: State.STOPPED,
    },
    State.READY: {
        Trigger.LISTED: State.READY,
        Trigger.TIMED_OUT: State.UNRESPONSIVE,
        Trigger.LOSE: State.LOST,
        Trigger.STOP: State.STOPPED,
    },
    State.UNRESPONSIVE: {
        Trigger.LISTED: State.READY,
        Trigger.LOSE: State.LOST,
        Trigger.STOP: State.STOPPED,
    },
    State.LOST: {
        Trigger.CONNECT: State.CONNECTING,
        Trigger.STOP: State.STOPPED,
    },
}
"""The state that each trigger leads to. Any other trigger comes too late, and has no effect."""


def check_package() -> None:
    """Raises ``HostError`` unless the package ``mcp`` 2.x is installed.

    Does not import it, because its dependency sse-starlette replaces a method of uvicorn.
    """
    try:
        found = metadata.version("mcp")
    except metadata.PackageNotFoundError:
        found = "none"
    if found.partition(".")[0] != "2":
        needed = "tool servers need the package mcp 2.x"
        fix = "pip install 'vllm-mlx-harmony-server[tools]'"
        raise HostError(f"{needed} ({found} is installed): {fix}")


class McpServer:
    """An MCP server as a ``ToolServer``.

    ``http`` makes the HTTP client, in place of the package's own. ``start_timeout`` is that of a
    connection attempt, in seconds. ``log`` is the level of all log records, if given.
    """

    def __init__(
        self,
        label: str,
        config: ServerConfig,
        default_timeout: float,
        *,
        http: Callable[[], httpx2.AsyncClient] | None = None,
        start_timeout: float = START_TIMEOUT,
        log: int | None = None,
    ) -> None:
        self.label = label
        self.description = config.description
        self.timeout = config.timeout or default_timeout
        self._config = config
        self._http, self._start_timeout = http, start_timeout
        self._info, self._warning = log or logging.INFO, log or logging.WARNING
        self.tools: tuple[Tool, ...] = ()
        self._state = State.STOPPED
        self._reason = "it is not started"  # why there is no connection
        self._client: Client | None = None
        self._check = asyncio.Event()  # the tools may have changed, or the server may have died
        self._version = ""  # of the protocol, once it is negotiated
        self._malformed: set[str] = set()  # problems of its tools that have been logged
        self._tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._own_urls: re.Pattern[str] | None = None
        if config.transport != "stdio":
            # At ``info`` httpx2 logs every URL. The package logs URLs and responses, and otherwise
            # only errors that are reported here as well.
            logging.getLogger("httpx2").setLevel(logging.WARNING)
            logging.getLogger("mcp").setLevel(logging.CRITICAL)
            host = re.escape(urlsplit(config.url).hostname or "")
            self._own_urls = re.compile(rf"https?://([^\s/@]*@)?\[?{host}[^\s'\"]*", re.IGNORECASE)

    @property
    def problem(self) -> str:
        match self._state:
            case State.READY:
                return ""
            case State.UNRESPONSIVE:
                return NO_RESPONSE
            case _:
                return self._reason

    async def start(self) -> None:
        """Connects for the first time, and then stays connected in the background."""
        self._task = asyncio.create_task(self._keep_connected(), name=f"mcp {self.label}")
        await self._tried.wait()

    async def stop(self) -> None:
        """Closes the connection, and ends the process of a server over stdio."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            self._disconnect(Trigger.STOP, "it is stopped")
            self._tried.set()

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        from mcp import MCPError

        client = self._client
        if client is None:
            raise ToolError(f"the tool server {self.label} is not available now: {self.problem}")
        try:
            result = await client.call_tool(tool, dict(arguments))
        except MCPError as error:
            self._check.set()
            raise ToolError(self._without_urls(error.message)) from error
        except Exception as error:
            self._check.set()
            raise ToolError(self._without_urls(_reason(error))) from error
        return ToolResult(text_of(result), bool(result.is_error))

    def call_timed_out(self) -> None:
        if self._move(Trigger.TIMED_OUT):
            self._check.set()

    def _without_urls(self, text: str) -> str:
        return text if self._own_urls is None else self._own_urls.sub("its URL", text)

    # --- The connection

    def _move(self, trigger: Trigger) -> bool:
        """Takes the transition of ``trigger``; returns whether there is one."""
        following = TRANSITIONS[self._state].get(trigger)
        self._state = following or self._state
        return following is not None

    def _disconnect(self, trigger: Trigger, reason: str) -> None:
        if self._move(trigger):
            self._client, self.tools, self._reason = None, (), reason

    async def _keep_connected(self) -> None:
        pause = FIRST_PAUSE
        loop = asyncio.get_running_loop()
        while True:
            self._move(Trigger.CONNECT)
            ready = loop.create_future()
            connection = asyncio.create_task(
                self._connected(ready), name=f"mcp {self.label} connection"
            )
            try:
                await asyncio.wait(
                    {connection, ready},
                    timeout=self._start_timeout,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not (connection.done() or ready.done()):
                    self._disconnect(Trigger.LOSE, NO_RESPONSE)
                    self._tried.set()  # it may take long to close
                    connection.cancel()
                await asyncio.wait({connection})
            finally:
                connection.cancel()
                await asyncio.wait({connection})
            error = None if connection.cancelled() else connection.exception()
            self._disconnect(Trigger.LOSE, CONNECTION_LOST)
            if error is not None:
                self._reason = self._without_urls(_reason(error))
            self._tried.set()
            if ready.done() and loop.time() - ready.result() > STEADY_SECONDS:
                pause = FIRST_PAUSE
            message = "tool server %s: %s; reconnecting in %.1f s"
            logger.log(self._warning, message, self.label, self.problem, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    async def _connected(self, ready: asyncio.Future[float]) -> None:
        """One connection, until it is lost. Sets ``ready`` to the time when it is ``READY``."""
        from mcp import Client
        from mcp_types import ToolListChangedNotification

        async def on_message(message: object) -> None:
            if isinstance(message, ToolListChangedNotification):
                self._check.set()

        async def listen() -> None:  # protocol versions from 2026-07-28 on have a stream of changes
            with suppress(Exception):
                async with client.listen(tools_list_changed=True) as changes:
                    async for _ in changes:
                        self._check.set()

        accept_half_surrogates()
        self._version = ""
        self._check.clear()
        async with Client(self._watched(), message_handler=on_message, cache=None) as client:
            self._version = client.protocol_version
            tools = await self._list_tools(client)
            if not self._move(Trigger.LISTED):  # the server has closed the connection meanwhile
                return
            self._client, self.tools = client, tools
            names = ", ".join(tool.name for tool in tools)
            logger.log(self._info, "tool server %s: %s", self.label, names or "no tools")
            ready.set_result(asyncio.get_running_loop().time())
            self._tried.set()
            listening = asyncio.create_task(listen())
            try:
                await self._check.wait()
                while self._client is client:
                    self._check.clear()
                    await self._list_again(client)
                    await self._check.wait()
            finally:
                self._disconnect(Trigger.LOSE, CONNECTION_LOST)
                listening.cancel()
                await asyncio.wait({listening})

    async def _list_again(self, client: Client) -> None:
        """Updates the tools. Raises if the server does not answer any more."""
        async with asyncio.timeout(self.timeout):
            tools = await self._list_tools(client)
        if self._move(Trigger.LISTED) and tools != self.tools:
            self.tools = tools
            names = ", ".join(tool.name for tool in tools) or "none"
            changed = "the tools of the tool server %s have changed: %s"
            logger.log(self._info, changed, self.label, names)

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[Any]:
        """The transport, which notices when the server closes the connection."""
        import anyio

        async with AsyncExitStack() as stack:
            received, sent = await self._streams(stack)
            passed_on, incoming = anyio.create_memory_object_stream[Any](0)

            async def pass_on() -> None:
                with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                    async with passed_on:
                        async for message in received:
                            await self._leave_out_malformed_tools(message)
                            await passed_on.send(message)
                self._disconnect(Trigger.LOSE, CONNECTION_LOST)
                self._check.set()

            async with anyio.create_task_group() as group:
                group.start_soon(pass_on)
                try:
                    yield incoming, sent
                finally:
                    group.cancel_scope.cancel()
                    incoming.close()

    async def _leave_out_malformed_tools(self, message: Any) -> None:
        """Removes malformed tools from a ``message`` that has a list of tools."""
        result: Any = getattr(getattr(message, "message", None), "result", None)
        if not (self._version and isinstance(result, dict) and "tools" in result):
            return
        # In a thread, since a list of thousands takes seconds.
        problems = await asyncio.to_thread(lambda: dict(malformed_tools(result, self._version)))
        for place in sorted(problems, reverse=True):
            del result["tools"][place]
        for problem in problems.values():
            if problem not in self._malformed:  # the list is read again after every failed call
                ignored = "tool server %s: the tool %s is malformed and left out"
                logger.log(self._warning, ignored, self.label, self._without_urls(problem))
        self._malformed.update(problems.values())

    async def _streams(self, stack: AsyncExitStack) -> Any:
        """The streams of messages from and to the server, which end with ``stack``."""
        config, http = self._config, self._http
        if config.transport == "stdio":
            from mcp import StdioServerParameters, stdio_client

            parameters = StdioServerParameters(
                command=config.command, args=list(config.args), env=config.env, cwd=config.cwd
            )
            return await stack.enter_async_context(stdio_client(parameters))
        if config.transport == "sse":
            from mcp.client.sse import sse_client

            sse = (
                sse_client(config.url, headers=config.headers, timeout=self.timeout)
                if http is None
                else sse_client(config.url, httpx_client_factory=lambda **_: http())
            )
            return await stack.enter_async_context(sse)
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        client = await stack.enter_async_context(
            http() if http else create_mcp_http_client(headers=config.headers)
        )
        return await stack.enter_async_context(
            streamable_http_client(config.url, http_client=client)
        )

    async def _list_tools(self, client: Client) -> tuple[Tool, ...]:
        """All tools of the server that the operator allows."""
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += [
                Tool(
                    name=tool.name,
                    description=tool.description or "",
                    parameters=tool.input_schema,
                    where=f"tool server {self.label}",
                    read_only=None if tool.annotations is None else tool.annotations.read_only_hint,
                )
                for tool in page.tools
                if self._config.tools is None or tool.name in self._config.tools
            ]
            cursor = page.next_cursor
            if not cursor:
                break
        return tuple(tools)


def _reason(error: BaseException) -> str:
    """A description of ``error``, which may be an exception group of anyio's."""
    inner = getattr(error, "exceptions", ())
    if inner:
        return _reason(inner[0])
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return NO_RESPONSE
    response = getattr(error, "response", None)  # httpx2's, whose message contains the URL
    if response is not None:
        return f"it responds with {response.status_code} {response.reason_phrase}".rstrip()
    return f"{error}" or type(error).__name__


def text_of(result: Any) -> str:
    """The text of a tool's result, with placeholders for images and the like."""
    texts = []
    for part in result.content:
        if part.type == "text":
            texts.append(str(part.text))
        elif part.type == "resource":
            text = getattr(part.resource, "text", None)
            texts.append(placeholder("file") if text is None else str(text))
        elif part.type == "resource_link":
            texts.append(f"{part.name}: {part.uri}")
        else:
            texts.append(placeholder(part.type))
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


# --- Messages that the package ``mcp`` would reject
#
# It validates a message as a whole. A single malformed tool would cost all other tools of the
# server. A lone surrogate, which a server in JavaScript produces by truncating a string, would cost
# the whole message, and the call that it answers would wait until its timeout.


def accept_half_surrogates() -> None:
    """Makes the package read lone surrogates as U+FFFD, in messages over every transport.

    All transports parse messages with the same object of the package. Drop when pydantic's JSON
    parser accepts lone surrogates.
    """
    from mcp_types import jsonrpc_message_adapter

    if "validate_json" in vars(jsonrpc_message_adapter):
        return
    strict = jsonrpc_message_adapter.validate_json

    def lenient(data: str | bytes, /, **options: Any) -> object:
        try:
            return strict(data, **options)
        except ValueError:
            try:
                body = json.dumps(repair(json.loads(data)))
            except (ValueError, RecursionError, RequestError):
                body = None
            if body is None:
                raise
            return strict(body, **options)

    vars(jsonrpc_message_adapter)["validate_json"] = lenient


def malformed_tools(result: object, version: str) -> Iterator[tuple[int, str]]:
    """The indices of malformed tools in ``result``, each with a description of the problem.

    ``result`` is that of any request in the protocol's ``version``; only that of a ``tools/list``
    has tools. Takes about a millisecond per tool.
    """
    fields = result if isinstance(result, dict) else {}
    tools = fields.get("tools")
    # The tools are validated one by one, with the short fields beside them.
    short = {key: value for key, value in fields.items() if not isinstance(value, (dict, list))}
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        try:
            _check({**short, "tools": [tool]}, version)
        except (ValueError, RequestError, RecursionError) as error:
            name = tool.get("name") if isinstance(tool, dict) else None
            which = quoted(name) if isinstance(name, str) and name else f"number {place + 1}"
            problem = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                problem = f"{'.'.join(map(str, first['loc'][2:])) or 'tool'}: {first['msg']}"
            yield place, f"{which} ({problem})"


def _check(result: dict[str, Any], version: str) -> None:
    """Raises ``ValueError`` or ``RequestError`` if the only tool of ``result`` is malformed."""
    from mcp_types import ListToolsResult, methods

    methods.validate_server_result("tools/list", version, result)
    (tool,) = ListToolsResult.model_validate(result, by_name=False).tools
    if not tool.name:
        raise ValueError("it has no name")
    typescript.parameters(Tool(tool.name, parameters=tool.input_schema), typescript.SizeBudget())
