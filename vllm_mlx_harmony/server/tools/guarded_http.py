"""HTTP to where a client points, and to nowhere else: what is checked, and when.

A server that fetches what clients name can be used to reach what they cannot reach themselves
(server-side request forgery, https://owasp.org/www-community/attacks/Server_Side_Request_Forgery):
services inside its network that trust whoever is there. Therefore:

- One parser reads a URL for the check and for the request (httpx2's).
- A pattern is compared part by part, not as text: ``https://*.example.com`` is no ``evil.com``
  that has ``.example.com`` in its path.
- A name is resolved once, and what is connected to is the address that was checked, so that no
  second answer of the DNS can be another (DNS rebinding). The certificate is still the name's.
- Addresses that are not public are refused, unless the pattern names that host as it is.
- Every request of a connection is for the origin that was allowed: no redirect leads elsewhere.
- No proxy, no ``.netrc``: nothing of the environment.
- No more bytes than ``MOST``, and none that are compressed: a thousand times as many could be in
  them, in memory before anybody has counted them.

Imports httpx2, which the package ``mcp`` brings: it is imported when the first URL is asked for.
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

MOST, MOST_AT_ONCE = 64 * 2**20, 8 * 2**20
"""Bytes of all answers to one connection's requests, and of one of them."""

CONNECTING, READING = 5.0, 300.0
"""Seconds until a connection stands, and that one may be silent: a call has its own limit."""

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class UrlPattern:
    """URLs that clients may name: ``SCHEME://HOST[:PORT][/PATH]``.

    ``*`` is any host, ``*.example.com`` any below that one. A path that ends with ``*`` is any that
    begins so; without a path it is any.
    """

    scheme: str
    host: str
    port: int
    path: str | None = None

    @classmethod
    def read(cls, text: str) -> UrlPattern:
        """Raises ``HostError`` for a text that is none."""
        problem = f"{text!r} is no pattern of URLs: https://HOST/PATH, where HOST may begin with *."
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise HostError(problem) from error
        above = host.removeprefix("*.") if host.startswith("*.") else host
        known = parts.scheme in _PORTS and above and (host == "*" or "*" not in above)
        if not known or parts.query or parts.fragment or parts.username is not None:
            raise HostError(problem)
        if "*" in parts.path[:-1]:
            raise HostError(f"{text!r}: * in a path stands at its end")
        return cls(parts.scheme, host, port or _PORTS[parts.scheme], parts.path or None)

    def __str__(self) -> str:
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{self.path or ''}"

    @property
    def names_host(self) -> bool:
        """Whether it has one host, which the operator knows: it may be at a private address."""
        return "*" not in self.host

    def allows(self, url: httpx2.URL) -> bool:
        """Whether ``url`` is one of them."""
        if url.scheme != self.scheme or port_of(url) != self.port or url.userinfo:
            return False
        below = self.host.startswith("*.") and url.host.endswith(self.host[1:])
        if self.host not in ("*", url.host) and not below:
            return False
        if self.path is None:
            return True
        raw = url.raw_path.decode("ascii", "replace").partition("?")[0].lower()
        if "%2e" in raw or "%2f" in raw or "%5c" in raw or "\\" in raw:  # some would read it anew
            return False
        path = url.path or "/"
        # What stands behind ";" is a parameter of its segment (RFC 3986, 3.3): to Tomcat and others
        # "..;x" is "..".
        if {".", ".."} & {segment.partition(";")[0] for segment in path.split("/")}:
            return False
        return path.startswith(self.path[:-1]) if self.path.endswith("*") else path == self.path


def port_of(url: httpx2.URL) -> int:
    """The port, also where it is the scheme's own."""
    return url.port or _PORTS.get(url.scheme, 0)


def client(
    url: httpx2.URL, headers: Sequence[tuple[str, str]], *, private: bool
) -> httpx2.AsyncClient:
    """For requests to the origin of ``url``. ``private``: it may be at any address."""
    return httpx2.AsyncClient(
        transport=_GuardedTransport(url, private=private),
        headers=list(headers),
        timeout=httpx2.Timeout(30.0, connect=CONNECTING, read=READING),
        trust_env=False,
    )


class _GuardedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, url: httpx2.URL, *, private: bool) -> None:
        super().__init__()
        self._origin = _origin(url)
        self._private = private
        self._left = MOST

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Connects to an address that was checked, one after the other as far as need be."""
        if _origin(request.url) != self._origin:
            raise httpx2.ConnectError("it leads to another server")
        host = request.url.host
        addresses = await _addresses(host, port_of(request.url), private=self._private)
        headers = request.headers.copy()
        headers["Accept-Encoding"] = "identity"
        for left in range(len(addresses) - 1, -1, -1):
            url = request.url.copy_with(host=addresses[-1 - left])
            direct = httpx2.Request(
                request.method,
                url,
                headers=headers,
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host},
            )
            try:
                response = await super().handle_async_request(direct)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                if not left:
                    raise
                continue
            if response.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
                await response.aclose()
                raise httpx2.ReadError("its answer is compressed, which it was not asked for")
            return httpx2.Response(
                response.status_code,
                headers=response.headers,
                stream=_Bounded(response, self),
                extensions=response.extensions,
            )
        raise httpx2.ConnectError("it has no address")

    def count(self, size: int) -> None:
        """Raises when all answers together are too long."""
        self._left -= size
        if self._left < 0:
            raise httpx2.ReadError("it has sent too much")


class _Bounded(httpx2.AsyncByteStream):
    """The bytes of an answer, as long as there are not too many."""

    def __init__(self, response: httpx2.Response, transport: _GuardedTransport) -> None:
        self._response, self._transport = response, transport

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        streams = self._response.headers.get("content-type", "").startswith("text/event-stream")
        assert isinstance(self._response.stream, httpx2.AsyncByteStream)
        async for part in self._response.stream:
            size += len(part)
            self._transport.count(len(part))
            if size > MOST_AT_ONCE and not streams:  # of a stream each event is bounded
                raise httpx2.ReadError("its answer is too long")
            yield part

    async def aclose(self) -> None:
        await self._response.aclose()


def _origin(url: httpx2.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, port_of(url)


async def _addresses(host: str, port: int, *, private: bool) -> list[str]:
    """Where ``host`` is, as far as it may be reached. Raises ``httpx2.ConnectError``."""
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.wait_for(
            loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), CONNECTING
        )
    except (OSError, UnicodeError, asyncio.TimeoutError) as error:
        raise httpx2.ConnectError("its host cannot be found") from error
    every = list(dict.fromkeys(str(each[4][0]) for each in found))
    allowed = [each for each in every if private or is_public(each)]
    if not allowed:
        raise httpx2.ConnectError("its host has no public address")
    return allowed[:_TRIED]


_TRIED = 4
"""Addresses of one host that are tried."""


def is_public(address: str) -> bool:
    """Whether anybody could reach it; an IPv4 address within an IPv6 one is looked at as such."""
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
            "64:ff9b:1::/48",  # a network's own NAT64 (RFC 8215): where it leads, only that knows
            "fec0::/10",  # site-local (RFC 3879)
        ),
    )
)
"""What ``ipaddress`` takes for global, before some release or still, and is not."""
