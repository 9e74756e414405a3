"""MCP servers that requests name by URL, where the operator allows it. The default is none.

`host` and `gateway` make the ``ClientServers``; a request finds them as ``Toolbox.clients``. Each
request has connections of its own, which are made when they are needed and closed with the request,
so no session is shared between clients. Only lists of tools are cached for a short time, by tenant,
URL and headers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.errors import HostError, RequestError, quoted
from vllm_mlx_harmony.core.turn import Tool
from vllm_mlx_harmony.protocols.client_servers import MAX_SERVERS, ClientServer
from vllm_mlx_harmony.protocols.validation import UNSUPPORTED, invalid
from vllm_mlx_harmony.server.settings import ServerSettings, ToolsMode, variable
from vllm_mlx_harmony.server.tools import config
from vllm_mlx_harmony.server.tools.config import ServerConfig
from vllm_mlx_harmony.server.tools.mcp_server import McpServer, check_package
from vllm_mlx_harmony.server.tools.tool_server import ToolError, ToolResult, ToolServer

if TYPE_CHECKING:
    import httpx2

    from vllm_mlx_harmony.server.tools.guarded_http import UrlPattern

TOOL_URLS_VARIABLE = variable("tool_urls")

START_TIMEOUT = 10.0
"""Seconds within which a server must be connected and have listed its tools."""

LIST_MAX_AGE = 300.0
"""Seconds for which a list of tools is cached."""

CACHE_BYTES, MAX_LISTS = 32 * 2**20, 1_024
"""Size of the cache of lists, and their number: each tenant, URL and set of headers has its own.
The least recently used one is fetched again."""

CLOSE_TIMEOUT = 5.0
"""Seconds within which a connection must close."""

_Key: TypeAlias = "tuple[str, str, bytes]"


class ClientServers:
    """The URLs that requests may name, and a cache of the tools there."""

    def __init__(self, patterns: Sequence[UrlPattern], timeout: float) -> None:
        self._patterns = tuple(patterns)
        self._timeout = timeout
        self._lists = lru.ByteLRU[_Key, tuple[tuple[Tool, ...], float]](CACHE_BYTES, MAX_LISTS)

    @classmethod
    def of(cls, settings: ServerSettings, timeout: float = 0.0) -> ClientServers:
        """Raises ``HostError`` for an invalid pattern, for patterns while tools are disabled,
        and if the package ``mcp`` is missing."""
        texts = settings.tool_urls
        if not texts:
            return cls((), timeout)
        if settings.tools is ToolsMode.OFF:
            raise HostError(
                f"{TOOL_URLS_VARIABLE} has no effect without {config.TOOLS_VARIABLE}=on"
            )
        check_package()
        from vllm_mlx_harmony.server.tools.guarded_http import UrlPattern

        return cls([UrlPattern.read(text) for text in texts], timeout)

    @property
    def allowed(self) -> tuple[str, ...]:
        return tuple(map(str, self._patterns))

    async def connected(
        self, requested: Sequence[ClientServer], tenant: str
    ) -> tuple[ToolServer, ...]:
        """The ``requested`` servers with their tools, to be passed to ``stop`` later.

        Raises ``RequestError``: 400 for a URL that is not allowed, and the error that its API has
        for a server that cannot be reached.
        """
        if len(requested) > MAX_SERVERS:
            problem = f"a request can name at most {MAX_SERVERS} servers"
            raise RequestError(problem, param=requested[MAX_SERVERS].where)
        for at, server in enumerate(requested):
            if any(server.label == other.label for other in requested[:at]):
                problem = f"{server.where}: {quoted(server.label)} is used twice"
                raise RequestError(problem, param=server.where)
        servers = []
        for server in requested:
            url, pattern = self._allowed(server)
            key = tenant, server.url, sha256(json.dumps(server.headers).encode()).digest()
            servers.append(
                ConnectedServer(
                    server, url, self._timeout, self._lists, key, private=pattern.names_host
                )
            )
        starting = [asyncio.ensure_future(server.start()) for server in servers]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.stop(servers)
            raise
        return tuple(servers)

    async def stop(self, servers: Sequence[ToolServer]) -> None:
        await asyncio.gather(*(server.stop() for server in servers), return_exceptions=True)

    def _allowed(self, requested: ClientServer) -> tuple[httpx2.URL, UrlPattern]:
        problem = (
            f"{requested.where}: this URL matches none of the patterns that the operator "
            f"allows ({TOOL_URLS_VARIABLE})"
        )
        refused = RequestError(problem, param=requested.where, code=UNSUPPORTED)
        if not self._patterns:
            raise refused
        import httpx2

        try:
            url = httpx2.URL(requested.url)
        except (httpx2.InvalidURL, ValueError) as error:
            raise invalid(requested.where, f"{requested.where} is not a URL") from error
        for pattern in self._patterns:
            if pattern.allows(url):
                return url.copy_with(fragment=None), pattern
        raise refused


class ConnectedServer:
    """A server that one request names, as a ``ToolServer``.

    Above debug level, only the durations of its calls are logged.
    """

    def __init__(
        self,
        requested: ClientServer,
        url: httpx2.URL,
        timeout: float,
        lists: lru.ByteLRU[_Key, tuple[tuple[Tool, ...], float]],
        key: _Key,
        *,
        private: bool,
    ) -> None:
        self.label = requested.label
        self.description = ""
        self.timeout = timeout
        self.problem = ""
        self._requested, self._url, self._private = requested, url, private
        self._lists, self._key = lists, key
        self.tools: tuple[Tool, ...] = ()
        """Do not change during the request."""
        self._server: McpServer | None = None
        self._connecting = asyncio.Lock()

    async def start(self) -> None:
        """Lists the tools, unless they are cached. Raises ``RequestError``."""
        known = self._lists.get(self._key)
        if known is not None and known[1] > time.monotonic():
            self.tools = known[0]
            return
        try:
            server = await self._connection()
        except ToolError as error:
            raise self._requested.unreachable(str(error)) from error
        self.tools = server.tools
        size = sum(len(json.dumps([tool.description, tool.parameters])) for tool in self.tools)
        self._lists.put(self._key, (self.tools, time.monotonic() + LIST_MAX_AGE), size + 512)

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await server.stop()

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        return await (await self._connection()).call(tool, arguments)

    def call_timed_out(self) -> None:
        if self._server is not None:
            self._server.call_timed_out()

    async def _connection(self) -> McpServer:
        """The connection, which is made when it is first needed. Raises ``ToolError``."""
        async with self._connecting:
            if self._server is None:
                from vllm_mlx_harmony.server.tools import guarded_http

                headers = self._requested.headers
                sse = self._url.path.rstrip("/").endswith("/sse")
                server = McpServer(
                    "of a request",
                    ServerConfig(transport="sse" if sse else "streamable-http", url=str(self._url)),
                    self.timeout,
                    http=lambda: guarded_http.client(self._url, headers, private=self._private),
                    start_timeout=START_TIMEOUT,
                    log=logging.DEBUG,
                )
                self._server = server
                await server.start()
                if server.problem:
                    problem = server.problem
                    await self.stop()
                    raise ToolError(problem)
            return self._server
