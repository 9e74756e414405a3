"""An HTTP client that connects only to what the operator allows.

Clients could use a server that fetches their URLs to reach what they cannot reach themselves, such
as services inside its network that have no authentication (server-side request forgery,
https://owasp.org/www-community/attacks/Server_Side_Request_Forgery). Therefore:

- The same parser (httpx2's) reads a URL for the check and for the request.
- A pattern is compared part by part, not as text: ``https://*.example.com`` does not match a URL of
  ``evil.com`` that has ``.example.com`` in its path.
- A name is resolved once, and the connection goes to the address that was checked, so that a second
  DNS answer cannot change it (DNS rebinding). The certificate is still checked against the name.
- Addresses that are not public are rejected, unless the pattern names the host exactly.
- All requests of a connection go to the allowed origin; redirects elsewhere are not followed.
- Proxies and ``.netrc`` are ignored.
- At most ``MAX_TOTAL_BYTES`` are read, and no compressed response, which could expand a
  thousandfold in memory before it is counted.

httpx2, a dependency of the package ``mcp``, is imported when the first URL is used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2

from vllm_mlx_harmony.core.errors import HostError

MAX_TOTAL_BYTES, MAX_RESPONSE_BYTES = 64 * 2**20, 8 * 2**20
"""Maximum bytes of all responses of a connection, and of one response."""

CONNECT_TIMEOUT, READ_TIMEOUT = 5.0, 300.0
"""Timeouts in seconds of connecting and of reading. A call has a limit of its own."""

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class UrlPattern:
    """A pattern of URLs: ``SCHEME://HOST[:PORT][/PATH]``.

    ``*`` is any host, ``*.example.com`` any subdomain. A path that ends with ``*`` is a prefix; no
    path means any path.
    """

    scheme: str
    host: str
    port: int
    path: str | None = None

    @classmethod
    def read(cls, text: str) -> UrlPattern:
        """Parses a pattern. Raises ``HostError`` for an invalid one."""
        problem = f"{text!r} is not a URL pattern: https://HOST/PATH, where HOST may begin with *."
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise HostError(problem) from error
        above = host.removeprefix("*.")
        known = parts.scheme in _PORTS and above and (host == "*" or "*" not in above)
        if not known or parts.query or parts.fragment or parts.username is not None:
            raise HostError(problem)
        if "*" in parts.path[:-1]:
            raise HostError(f"{text!r}: * may only be at the end of a path")
        return cls(parts.scheme, host, port or _PORTS[parts.scheme], parts.path or None)

    def __str__(self) -> str:
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{self.path or ''}"

    @property
    def names_host(self) -> bool:
        """Whether it has a single host, which may then have a private address."""
        return "*" not in self.host

    def allows(self, url: httpx2.URL) -> bool:
        if url.scheme != self.scheme or port_of(url) != self.port or url.userinfo:
            return False
        below = self.host.startswith("*.") and url.host.endswith(self.host[1:])
        if self.host not in ("*", url.host) and not below:
            return False
        if self.path is None:
            return True
        raw = url.raw_path.decode("ascii", "replace").partition("?")[0].lower()
        if (
            "%2e" in raw or "%2f" in raw or "%5c" in raw or "\\" in raw
        ):  # some servers decode it again
            return False
        path = url.path or "/"
        # ";" begins parameters of a segment (RFC 3986, 3.3): Tomcat and others read "..;x" as "..".
        if {".", ".."} & {segment.partition(";")[0] for segment in path.split("/")}:
            return False
        return path.startswith(self.path[:-1]) if self.path.endswith("*") else path == self.path


def port_of(url: httpx2.URL) -> int:
    """The port, which may be the default of the scheme."""
    return url.port or _PORTS.get(url.scheme, 0)


def client(
    url: httpx2.URL, headers: Sequence[tuple[str, str]], *, private: bool
) -> httpx2.AsyncClient:
    """A client for the origin of ``url``. ``private``: private addresses are allowed."""
    return httpx2.AsyncClient(
        transport=_GuardedTransport(url, private=private),
        headers=list(headers),
        timeout=httpx2.Timeout(30.0, connect=CONNECT_TIMEOUT, read=READ_TIMEOUT),
        trust_env=False,
    )


class _GuardedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, url: httpx2.URL, *, private: bool) -> None:
        super().__init__()
        self._origin = _origin(url)
        self._private = private
        self._left = MAX_TOTAL_BYTES

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Connects to the checked addresses in turn, until one accepts."""
        if _origin(request.url) != self._origin:
            raise httpx2.ConnectError("it redirects to another origin")
        host = request.url.host
        addresses = await _addresses(host, port_of(request.url), private=self._private)
        headers = request.headers.copy()
        headers["Accept-Encoding"] = "identity"
        failure: Exception = httpx2.ConnectError("its host has no address")
        for address in addresses:
            url = request.url.copy_with(host=address)
            direct = httpx2.Request(
                request.method,
                url,
                headers=headers,
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host},
            )
            try:
                response = await super().handle_async_request(direct)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                failure = error
                continue
            if response.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
                await response.aclose()
                raise httpx2.ReadError("its response is compressed although that was not requested")
            return httpx2.Response(
                response.status_code,
                headers=response.headers,
                stream=_Bounded(response, self),
                extensions=response.extensions,
            )
        raise failure

    def count(self, size: int) -> None:
        """Raises ``httpx2.ReadError`` if all responses together are too long."""
        self._left -= size
        if self._left < 0:
            raise httpx2.ReadError("the total size of its responses is too large")


class _Bounded(httpx2.AsyncByteStream):
    """The body of a response, up to the limits."""

    def __init__(self, response: httpx2.Response, transport: _GuardedTransport) -> None:
        self._response, self._transport = response, transport

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        streams = self._response.headers.get("content-type", "").startswith("text/event-stream")
        assert isinstance(self._response.stream, httpx2.AsyncByteStream)
        async for part in self._response.stream:
            size += len(part)
            self._transport.count(len(part))
            if (
                size > MAX_RESPONSE_BYTES and not streams
            ):  # the events of a stream are bounded one by one
                raise httpx2.ReadError("its response is too long")
            yield part

    async def aclose(self) -> None:
        await self._response.aclose()


def _origin(url: httpx2.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, port_of(url)


async def _addresses(host: str, port: int, *, private: bool) -> list[str]:
    """The allowed addresses of ``host``. Raises ``httpx2.ConnectError``."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (TimeoutError, OSError, UnicodeError) as error:
        raise httpx2.ConnectError("its host name cannot be resolved") from error
    every = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    allowed = [address for address in every if private or is_public(address)]
    if not allowed:
        raise httpx2.ConnectError("its host has no public address")
    return allowed[:_TRIED]


_TRIED = 4
"""Maximum addresses of a host that are tried."""


def is_public(address: str) -> bool:
    """Whether ``address`` is global. IPv4 addresses embedded in IPv6 ones are extracted."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(str(inner))
        if any(ip in network for network in _NEVER_PUBLIC):
            return False
    return ip.is_global and not ip.is_multicast


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

_NEVER_PUBLIC = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "::/96",  # IPv4-compatible (RFC 4291, 2.5.5.1)
            "64:ff9b:1::/48",  # local-use NAT64 (RFC 8215)
            "fec0::/10",  # site-local (RFC 3879)
        ),
    )
)
"""Networks that some versions of ``ipaddress`` wrongly consider global."""
