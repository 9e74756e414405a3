"""Many clients at once, in one thread: each asks for a stream and reads as much as it likes.

Plain sockets, so that a client can go in the middle of an event, or read nothing at all.
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
"""Bytes that a line of a stream may have."""


@dataclass
class Seen:
    """What a client saw: the status, how the answer ended (``left``: it went), and the text."""

    status: int = 0
    end: str = ""
    text: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""

    def read(self, way: str, data: str) -> None:
        """An event's data."""
        self.text += apis.text_of_event(way, data)
        if data != "[DONE]":
            self.events.append(json.loads(data))
        self.end = self.end or apis.ends(way, data)


async def ask(url: str, way: str, body: dict[str, Any], leaves_after: int | None = None) -> Seen:
    """Reads the answer to its end, or is gone after ``leaves_after`` events."""
    seen = Seen()
    try:
        if way == apis.WEBSOCKET:
            await _converse(url, body, leaves_after, seen)
        else:
            await _post(url, way, body, leaves_after, seen)
    except (OSError, ConnectionClosed, asyncio.IncompleteReadError) as error:
        seen.problem = repr(error)
    return seen


async def _post(
    url: str, way: str, body: dict[str, Any], leaves_after: int | None, seen: Seen
) -> None:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=LINE)
    try:
        writer.write(request(address.netloc, apis.PATHS[way], body))
        seen.status = int((await reader.readline()).split()[1])
        if seen.status != 200:
            seen.problem = (await reader.read()).decode("utf-8", "replace")[-500:]
            return
        while line := await reader.readline():
            if line.startswith(b"data: "):
                seen.read(way, line[6:].decode().strip())
            if leaves_after is not None and len(seen.events) >= leaves_after:
                seen.end = "left"
                writer.transport.abort()
                return
            if line == b"0\r\n" or (not line.strip() and seen.end and way == "messages"):
                return
    finally:
        writer.close()


def request(host: str, path: str, body: dict[str, Any]) -> bytes:
    """A POST as it goes over the wire."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def _converse(url: str, body: dict[str, Any], leaves_after: int | None, seen: Seen) -> None:
    path = url.replace("http", "ws", 1) + apis.PATHS["responses"]
    async with connect(path, max_size=None, compression=None, open_timeout=60) as connection:
        seen.status = 200
        await connection.send(json.dumps(body))
        while not seen.end:
            seen.read(apis.WEBSOCKET, str(await connection.recv()))
            if leaves_after is not None and len(seen.events) >= leaves_after:
                seen.end = "left"
                connection.transport.abort()


def stalled(url: str, way: str, body: dict[str, Any]) -> socket.socket:
    """A connection whose client has asked and reads nothing, with as small buffers as it can have.

    Small segments keep the server's own small, too.
    """
    address = urlsplit(url)
    connection = socket.socket()
    connection.settimeout(60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    if hasattr(socket, "TCP_MAXSEG"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.connect((address.hostname or "", address.port or 80))
    if way != apis.WEBSOCKET:
        connection.sendall(request(address.netloc, apis.PATHS[way], body))
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
    """A text message as a client sends it, with a mask of zeros."""
    return b"\x81\xfe" + len(text).to_bytes(2, "big") + bytes(4) + text
