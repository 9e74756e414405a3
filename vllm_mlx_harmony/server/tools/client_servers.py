"""MCP servers that requests name by their URL, where the operator allows it: none by default.

Each request has connections of its own, made when they are needed and closed with it: what one
client's server knows of a session is nobody else's. The list of tools alone is remembered, for
whoever comes with the same key, URL and credentials, and not for long.

Knows who may ask for what. Refuses to know how a URL is reached safely (guarded_http).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.errors import HostError, RequestError, quoted
from vllm_mlx_harmony.core.turn import Tool
from vllm_mlx_harmony.protocols.client_servers import MOST_SERVERS, ClientServer
from vllm_mlx_harmony.protocols.validation import UNSUPPORTED
from vllm_mlx_harmony.server.tools import config
from vllm_mlx_harmony.server.tools.config import ServerConfig, Use
from vllm_mlx_harmony.server.tools.mcp_server import McpServer, check_package
from vllm_mlx_harmony.server.tools.tool_server import Answer, ToolError

if TYPE_CHECKING:
    import httpx2

    from vllm_mlx_harmony.server.tools.guarded_http import UrlPattern

VARIABLE = "VLLM_MLX_HARMONY_TOOL_URLS"
"""Environment variable: patterns of the URLs that requests may name, with commas between."""

CONNECTING = 10.0
"""Seconds until a server has to have told its tools, or a connection for a call stands."""

REMEMBERED = 300.0
"""Seconds for which a list of tools is taken for the same."""

CLOSING = 5.0
"""Seconds that a connection has to end."""

_Key: TypeAlias = "tuple[str, str, bytes]"


class ClientServers:
    """What requests may name, and the tools of what they have named."""

    def __init__(self, patterns: Sequence[UrlPattern], timeout: float) -> None:
        self._patterns = tuple(patterns)
        self._timeout = timeout
        self._lists = lru.ByteLRU[_Key, tuple[tuple[Tool, ...], float]](32 * 2**20, most=1_024)

    @classmethod
    def of_environment(cls, use: Use, timeout: float) -> ClientServers:
        """What the environment allows. Raises ``HostError`` for what is no pattern, for patterns
        where the server runs no tools, and without the package ``mcp``.
        """
        given = [each.strip() for each in os.environ.get(VARIABLE, "").split(",")]
        texts = [each for each in given if each]
        if not texts:
            return cls((), timeout)
        if use is Use.OFF:
            raise HostError(f"{VARIABLE} allows nothing without {config.VARIABLE}=on")
        check_package()
        from vllm_mlx_harmony.server.tools.guarded_http import UrlPattern

        return cls([UrlPattern.read(each) for each in texts], timeout)

    @property
    def allowed(self) -> tuple[str, ...]:
        """The patterns of what may be named."""
        return tuple(map(str, self._patterns))

    async def connected(
        self, requested: Sequence[ClientServer], tenant: str
    ) -> tuple[ConnectedServer, ...]:
        """The servers that ``tenant`` has ``requested``, with their tools; all are stopped later.

        Raises ``RequestError``: 400 for one that is not allowed, and what its API has for one that
        cannot be reached.
        """
        if len(requested) > MOST_SERVERS:
            problem = f"a request names no more than {MOST_SERVERS} servers"
            raise RequestError(problem, param=requested[MOST_SERVERS].where)
        for at, each in enumerate(requested):
            if any(each.label == other.label for other in requested[:at]):
                problem = f"{each.where}: {quoted(each.label)} was asked for twice"
                raise RequestError(problem, param=each.where)
        servers = tuple(self._server(each, tenant) for each in requested)
        starting = [asyncio.ensure_future(each.start()) for each in servers]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await stop(servers)
            raise
        return servers

    def _server(self, requested: ClientServer, tenant: str) -> ConnectedServer:
        url, pattern = self._allowed(requested)
        headers = json.dumps(requested.headers).encode()
        key = tenant, requested.url, sha256(headers).digest()
        return ConnectedServer(
            requested, url, self._timeout, self._lists, key, private=pattern.names_host
        )

    def _allowed(self, requested: ClientServer) -> tuple[httpx2.URL, UrlPattern]:
        problem = (
            f"{requested.where}: a request may name servers at URLs that the operator allows, by "
            f"patterns in {VARIABLE}, and this is none of them"
        )
        refused = RequestError(problem, param=requested.where, code=UNSUPPORTED)
        if not self._patterns:
            raise refused
        import httpx2

        try:
            url = httpx2.URL(requested.url)
        except (httpx2.InvalidURL, ValueError) as error:
            raise RequestError(
                f"{requested.where} is no URL", param=requested.where, code="invalid_value"
            ) from error
        for pattern in self._patterns:
            if pattern.allows(url):
                return url.copy_with(fragment=None), pattern
        raise refused


class ConnectedServer:
    """One of them for one request, as a ``ToolServer``.

    Nothing of it is logged above debug, but that one of its tools was called, and for how long.
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
        self._tools: tuple[Tool, ...] = ()
        self._server: McpServer | None = None
        self._connecting = asyncio.Lock()

    @property
    def tools(self) -> tuple[Tool, ...]:
        """See ``ToolServer``: as they were when the request came."""
        return self._tools

    async def start(self) -> None:
        """Asks for its tools, if they are not remembered. Raises ``RequestError``."""
        known = self._lists.get(self._key)
        if known is not None and known[1] > time.monotonic():
            self._tools = known[0]
            return
        try:
            server = await self._connection()
        except ToolError as error:
            raise self._requested.unreachable(str(error)) from error
        self._tools = server.tools
        size = sum(len(json.dumps([each.description, each.parameters])) for each in self._tools)
        self._lists.put(self._key, (self._tools, time.monotonic() + REMEMBERED), size + 512)

    async def stop(self) -> None:
        """Closes the connection, if there is one."""
        server, self._server = self._server, None
        if server is not None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(server.stop(), CLOSING)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Answer:
        """See ``ToolServer``."""
        return await (await self._connection()).call(tool, arguments)

    async def _connection(self) -> McpServer:
        """Connected, for the first time when it is needed. Raises ``ToolError``."""
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
                    starting=CONNECTING,
                    log=logging.DEBUG,
                )
                self._server = server
                await server.start()
                if server.problem:
                    problem = server.problem
                    await self.stop()
                    raise ToolError(problem)
            return self._server


async def stop(servers: Sequence[ConnectedServer]) -> None:
    """Closes the connections of a request."""
    await asyncio.gather(*(each.stop() for each in servers), return_exceptions=True)
