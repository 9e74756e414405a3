"""Many concurrent clients in one thread, each of which reads as much of a stream as it likes.

They use plain sockets, so that a client can disconnect within an event, or read nothing at all.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import apis
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

LINE = 2**22
"""The most bytes of a line of a stream."""


@dataclass
class StreamResult:
    """What a client received: the status, the text, and how it ended (``left``: disconnected)."""

    status: int = 0
    end: str = ""
    text: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""

    def add_event(self, endpoint: str, data: str) -> None:
        """Adds an event, given its data."""
        self.text += apis.text_of_event(endpoint, data)
        if data != "[DONE]":
            self.events.append(json.loads(data))
        self.end = self.end or apis.end_of(endpoint, data)


async def read_stream(
    url: str, endpoint: str, body: dict[str, Any], disconnect_after: int | None = None
) -> StreamResult:
    """Reads an answer to its end, or disconnects after ``disconnect_after`` events."""
    result = StreamResult()
    try:
        if endpoint == apis.WEBSOCKET:
            await _converse(url, body, disconnect_after, result)
        else:
            await _post(url, endpoint, body, disconnect_after, result)
    except (OSError, ConnectionClosed, asyncio.IncompleteReadError) as error:
        result.problem = repr(error)
    return result


async def _post(
    url: str,
    endpoint: str,
    body: dict[str, Any],
    disconnect_after: int | None,
    result: StreamResult,
) -> None:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=LINE)
    try:
        writer.write(http_request(address.netloc, apis.PATHS[endpoint], body))
        result.status = int((await reader.readline()).split()[1])
        if result.status != 200:
            result.problem = (await reader.read()).decode("utf-8", "replace")[-500:]
            return
        while line := await reader.readline():
            if line.startswith(b"data: "):
                result.add_event(endpoint, line[6:].decode().strip())
            if disconnect_after is not None and len(result.events) >= disconnect_after:
                result.end = "left"
                writer.transport.abort()
                return
            if line == b"0\r\n" or (not line.strip() and result.end and endpoint == "messages"):
                return
    finally:
        writer.close()


def http_request(host: str, path: str, body: dict[str, Any]) -> bytes:
    """A POST request as sent over the wire."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def _converse(
    url: str, body: dict[str, Any], disconnect_after: int | None, result: StreamResult
) -> None:
    path = url.replace("http", "ws", 1) + apis.PATHS["responses"]
    async with connect(path, max_size=None, compression=None, open_timeout=60) as connection:
        result.status = 200
        await connection.send(json.dumps(body))
        while not result.end:
            result.add_event(apis.WEBSOCKET, str(await connection.recv()))
            if disconnect_after is not None and len(result.events) >= disconnect_after:
                result.end = "left"
                connection.transport.abort()


def open_stalled_stream(url: str, endpoint: str, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request and reads nothing, with the smallest possible buffers.

    Small segments keep the server's buffers small, too.
    """
    address = urlsplit(url)
    connection = socket.socket()
    connection.settimeout(60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    if hasattr(socket, "TCP_MAXSEG"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.connect((address.hostname or "", address.port or 80))
    if endpoint != apis.WEBSOCKET:
        connection.sendall(http_request(address.netloc, apis.PATHS[endpoint], body))
        return connection
    upgrade = (
        f"GET {apis.PATHS['responses']} HTTP/1.1\r\nHost: {address.netloc}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    connection.sendall(upgrade.encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    connection.sendall(_masked(json.dumps(body).encode()))
    return connection


def _masked(text: bytes) -> bytes:
    """A client's text message, with a mask of zeros."""
    return b"\x81\xfe" + len(text).to_bytes(2, "big") + bytes(4) + text
