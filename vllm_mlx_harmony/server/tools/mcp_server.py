"""One MCP server: started or connected to, kept that way, asked for its tools, called.

https://modelcontextprotocol.io/specification, by the official package ``mcp``, which is imported
when the first server is made and not before.

A connection lives in a task of its own (`_keep_connected`), because the package's connections can
be left only by the task that entered them. It ends when the server's process does, when a server
over HTTP no longer answers, and with `stop`; after an end that nobody wanted another is made, each
time after twice the pause of the time before. Calls come from other tasks.

An operator may have a secret in a server's URL. What goes wrong is told to clients and models, so
neither that nor the log has it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_mlx_harmony.core.attachments import left_out
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.turn import Tool
from vllm_mlx_harmony.server.tools.config import ServerConfig
from vllm_mlx_harmony.server.tools.mcp_messages import accept_half_surrogates, malformed_tools
from vllm_mlx_harmony.server.tools.tool_server import Answer, ToolError

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds before a server is started again, and the most that doubling them comes to."""

STEADY = 30.0
"""Seconds of a connection after which the next pause is the first one again."""

STARTING = 60.0
"""Seconds until a server has to be there: a command may download it first."""

MOST_PAGES = 100
"""Of a list of tools: one that never ends must not hold anybody up."""


def check_package() -> None:
    """Raises ``HostError`` that says what to install, where the package ``mcp`` is not 2.x.

    It is not imported for that: it brings sse-starlette, which replaces a method of uvicorn's.
    """
    try:
        found = metadata.version("mcp")
    except metadata.PackageNotFoundError:
        found = "none"
    if found.partition(".")[0] != "2":
        needed = "tool servers need the package mcp 2.x"
        raise HostError(f"{needed} ({found} is installed): pip install 'vllm-mlx-harmony[tools]'")


class McpServer:
    """An MCP server as a ``ToolServer``.

    ``http`` makes what speaks HTTP to it, in place of the package's own. ``starting`` seconds may
    a connection take. ``log`` is the level for what becomes of it, where less is to be said.
    """

    def __init__(
        self,
        label: str,
        config: ServerConfig,
        default_timeout: float,
        *,
        http: Callable[[], httpx2.AsyncClient] | None = None,
        starting: float = STARTING,
        log: int | None = None,
    ) -> None:
        self.label = label
        self.description = config.description
        self.timeout = config.timeout or default_timeout
        self._config = config
        self._http, self._starting = http, starting
        self._info, self._warning = log or logging.INFO, log or logging.WARNING
        self._tools: tuple[Tool, ...] = ()
        self._problem = "it has not been started"
        self._client: Client | None = None
        self._look = asyncio.Event()  # something may have changed: the tools, or that it answers
        self._lost = False
        self._version = ""  # of the protocol, once it is agreed on
        self._malformed: set[str] = set()  # what the log has said of its tools
        self._ready, self._tried = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._own_urls: re.Pattern[str] | None = None
        if config.transport != "stdio":
            # At ``info`` httpx2 writes every URL. Of a server over HTTP the package has nothing to
            # say that is not a problem here, too, but URLs and what was answered.
            logging.getLogger("httpx2").setLevel(logging.WARNING)
            logging.getLogger("mcp").setLevel(logging.CRITICAL)
            host = re.escape(urlsplit(config.url).hostname or "")
            self._own_urls = re.compile(rf"https?://([^\s/@]*@)?\[?{host}[^\s'\"]*", re.IGNORECASE)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """See ``ToolServer``."""
        return self._tools

    @property
    def problem(self) -> str:
        """See ``ToolServer``."""
        return self._problem

    async def start(self) -> None:
        """Connects for the first time; from then on the connection is kept in the background."""
        self._task = asyncio.create_task(self._keep_connected(), name=f"mcp {self.label}")
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._tried.wait(), self._starting + 1.0)

    async def stop(self) -> None:
        """Closes the connection, and ends the process of a server over stdio."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Answer:
        """See ``ToolServer``."""
        from mcp import MCPError

        client = self._client
        if client is None:
            raise ToolError(f"the tool server {self.label} is not available now: {self._problem}")
        try:
            result = await client.call_tool(tool, dict(arguments))
        except MCPError as error:
            self._look.set()  # it may be that it has died, or that its tools are others now
            raise ToolError(self._without_urls(error.message)) from error
        except Exception as error:
            self._look.set()
            raise ToolError(self._without_urls(_reason(error))) from error
        return Answer(text_of(result), bool(result.is_error))

    def _without_urls(self, text: str) -> str:
        """``text`` for whoever may not know where the server is."""
        return text if self._own_urls is None else self._own_urls.sub("its URL", text)

    # The connection

    async def _keep_connected(self) -> None:
        pause = FIRST_PAUSE
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            connection = asyncio.create_task(self._connected(), name=f"mcp {self.label} connection")
            ready = asyncio.create_task(self._ready.wait())
            try:
                first = asyncio.FIRST_COMPLETED
                await asyncio.wait({connection, ready}, timeout=self._starting, return_when=first)
                late = not (ready.done() or connection.done())
                if late:
                    connection.cancel()
                await asyncio.wait({connection})
            finally:
                connection.cancel()
                ready.cancel()
                await asyncio.wait({connection, ready})
                self._client, self._tools = None, ()
                self._ready.clear()
            error = None if connection.cancelled() else connection.exception()
            lost = "it does not answer" if late else "its connection was lost"
            self._problem = lost if error is None else self._without_urls(_reason(error))
            self._tried.set()
            if loop.time() - began > STEADY:
                pause = FIRST_PAUSE
            told = "tool server %s: %s; next try in %.1f s"
            logger.log(self._warning, told, self.label, self._problem, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _connected(self) -> None:
        """One connection, until it is lost."""
        from mcp import Client
        from mcp_types import ToolListChangedNotification

        async def noticed(message: Any) -> None:
            if isinstance(message, ToolListChangedNotification):
                self._look.set()

        accept_half_surrogates()
        self._lost, self._version = False, ""
        self._look.clear()
        async with Client(self._watched(), message_handler=noticed, cache=None) as client:
            self._version = client.protocol_version
            self._tools = await self._listed(client)
            self._client, self._problem = client, ""
            names = ", ".join(each.name for each in self._tools)
            logger.log(self._info, "tool server %s: %s", self.label, names or "no tools")
            self._ready.set()
            self._tried.set()
            listening = asyncio.create_task(self._listen(client))
            try:
                while not self._lost:
                    await self._look.wait()
                    self._look.clear()
                    if not self._lost:
                        await self._list_again(client)
            finally:
                self._client = None
                listening.cancel()
                await asyncio.wait({listening})

    async def _list_again(self, client: Client) -> None:
        """Raises when the server does not answer any more."""
        tools = await asyncio.wait_for(self._listed(client), self.timeout)
        if tools != self._tools:
            self._tools = tools
            names = ", ".join(each.name for each in tools)
            told = "tool server %s has other tools now: %s"
            logger.log(self._info, told, self.label, names or "none")

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[Any]:
        """The transport, which notices that the other side has hung up."""
        import anyio

        async with self._transport() as (received, sent):
            passed_on, incoming = anyio.create_memory_object_stream[Any](0)

            async def pass_on() -> None:
                with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                    async with passed_on:
                        async for message in received:
                            await self._leave_out_malformed_tools(message)
                            await passed_on.send(message)
                self._lost = True
                self._look.set()

            async with anyio.create_task_group() as group:
                group.start_soon(pass_on)
                try:
                    yield incoming, sent
                finally:
                    group.cancel_scope.cancel()
                    incoming.close()

    async def _leave_out_malformed_tools(self, message: Any) -> None:
        """In place, in the message of a list of tools. The others are served."""
        result: Any = getattr(getattr(message, "message", None), "result", None)
        if not (self._version and isinstance(result, dict) and "tools" in result):
            return
        # In a thread: a list of thousands takes seconds.
        problems = await asyncio.to_thread(lambda: dict(malformed_tools(result, self._version)))
        for place in sorted(problems, reverse=True):
            del result["tools"][place]
        for problem in problems.values():
            if problem not in self._malformed:  # a list is read again after every failed call
                left_out = "tool server %s: the tool %s is malformed and left out"
                logger.log(self._warning, left_out, self.label, self._without_urls(problem))
        self._malformed.update(problems.values())

    def _transport(self) -> Any:
        config = self._config
        if config.transport == "stdio":
            from mcp import StdioServerParameters, stdio_client

            return stdio_client(
                StdioServerParameters(
                    command=config.command, args=list(config.args), env=config.env, cwd=config.cwd
                )
            )
        if config.transport == "sse":
            from mcp.client.sse import sse_client

            if self._http is None:
                return sse_client(config.url, headers=config.headers, timeout=self.timeout)
            http = self._http
            return sse_client(config.url, httpx_client_factory=lambda **_: http())
        return self._streamable_http()

    @asynccontextmanager
    async def _streamable_http(self) -> AsyncIterator[Any]:
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        made = (
            create_mcp_http_client(headers=self._config.headers) if not self._http else self._http()
        )
        async with (
            made as http,
            streamable_http_client(self._config.url, http_client=http) as streams,
        ):
            yield streams

    async def _listed(self, client: Client) -> tuple[Tool, ...]:
        """All its tools that the operator wants used, page by page."""
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += [
                Tool(
                    name=each.name,
                    description=each.description or "",
                    parameters=each.input_schema,
                    where=f"tool server {self.label}",
                    read_only=None if each.annotations is None else each.annotations.read_only_hint,
                )
                for each in page.tools
                if self._config.tools is None or each.name in self._config.tools
            ]
            cursor = page.next_cursor
            if not cursor:
                break
        return tuple(tools)

    async def _listen(self, client: Client) -> None:
        """Hears of changes where the protocol has a stream for them (from 2026-07-28 on)."""
        with suppress(Exception):  # a server that has none tells of them in notifications, or never
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self._look.set()


def _reason(error: BaseException) -> str:
    """What went wrong, out of the groups that anyio's tasks raise."""
    inner = getattr(error, "exceptions", ())
    if inner:
        return _reason(inner[0])
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return "it does not answer"
    response = getattr(error, "response", None)  # httpx2's: its own words have the URL twice
    if response is not None:
        return f"it answers {response.status_code} {response.reason_phrase}".rstrip()
    return f"{error}" or type(error).__name__


def text_of(result: Any) -> str:
    """What a model can read of a tool's result; of images and the like, that they were there."""
    texts = [_text_of_part(part) for part in result.content]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _text_of_part(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        text = getattr(part.resource, "text", None)
        return left_out("file") if text is None else str(text)
    if part.type == "resource_link":
        return f"{part.name}: {part.uri}"
    return left_out(part.type)
