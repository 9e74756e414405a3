"""MCP servers that a request names by URL, with the client's credentials for them.

`server.tools.client_servers` decides whether a server is allowed and connects to it. Credentials
are sent only to the server they are for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols.validation import invalid


@dataclass(frozen=True, slots=True)
class ClientServer:
    """A server at ``url`` that a request calls ``label``; ``where`` is the path of its URL.

    ``headers`` go with every request to it. ``unreachable`` turns the reason why there are no tools
    into the API's error.
    """

    label: str
    url: str
    where: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    unreachable: Callable[[str], RequestError] = field(default=RequestError, repr=False)


MAX_SERVERS = 20
"""Maximum per request, the same as in Anthropic's API."""


def headers_of(
    raw: object, token: object, where: str, token_where: str
) -> tuple[tuple[str, str], ...]:
    """The ``raw`` headers, and ``token`` as ``Authorization``.

    Raises ``RequestError`` for an invalid header; it names the field but never quotes the value.
    """
    if raw is not None and not isinstance(raw, Mapping):
        raise RequestError(f"{where} must be an object", param=where, code="invalid_type")
    headers: dict[str, str] = {}
    for name, value in (raw or {}).items():
        if not (isinstance(name, str) and _NAME.fullmatch(name) and _is_value(value)):
            raise invalid(where, f"{where} contains an invalid header name or value")
        if name.lower() in _CONNECTION_HEADERS:
            raise invalid(where, f"{where}: {name} cannot be set: it is a header of the connection")
        headers[name.lower()] = value
    if token is not None:
        if not _is_value(token):
            raise RequestError(
                f"{token_where} must be a string of printable ASCII characters", param=token_where
            )
        headers["authorization"] = f"Bearer {token}"
    if len(headers) > _MAX_HEADERS:
        raise RequestError(f"{where} has more than {_MAX_HEADERS} headers", param=where)
    return tuple(headers.items())


_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_MAX_HEADERS, _MAX_VALUE = 64, 16_384
"""Headers for one server, and characters of each value. Servers accept no more: Node.js, for
example, 16 KiB for all headers together."""

_CONNECTION_HEADERS = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer"}
)


def _is_value(value: object) -> bool:
    if not isinstance(value, str) or len(value) > _MAX_VALUE:
        return False
    return value.isascii() and value.isprintable()
