"""Real MCP servers for the tests, each in a process of its own.

``python mcp_servers.py KIND [PORT]``: over stdio, or with a port over streamable HTTP (``--sse``:
over server-sent events).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer

BIG = 5 * 2**20
"""Bytes of the result of `big`."""


def weather(server: MCPServer) -> None:
    """Answers."""

    @server.tool(annotations={"readOnlyHint": True})
    def now(city: str) -> str:
        """Tells the weather of a city."""
        return f"{city}: 20 °C"

    @server.tool()
    def fails(why: str) -> str:
        """Raises an error."""
        raise ValueError(why)

    @server.tool()
    def nothing() -> None:
        """Returns nothing."""

    @server.tool()
    def pid() -> str:
        """The number of this process."""
        return str(os.getpid())


def slow(server: MCPServer) -> None:
    """Sleeps, and writes to a file, if one is named, when it starts and when it is cancelled."""

    @server.tool()
    async def sleep(seconds: float, note: str = "") -> str:
        """Sleeps."""
        note_file = Path(note or os.devnull)
        note_file.write_text("begun")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            note_file.write_text("cancelled")
            raise
        return f"slept {seconds}"


def crash(server: MCPServer) -> None:
    """Dies in the middle of a call."""

    @server.tool()
    def die(code: int = 3) -> str:
        """Ends the process."""
        os._exit(code)

    @server.tool()
    async def hang() -> str:
        """Blocks the process."""
        while True:
            time.sleep(1)

    @server.tool()
    def live() -> str:
        """Does not."""
        return "alive"


def big(server: MCPServer) -> None:
    """Returns 5 MB."""

    @server.tool()
    def big() -> str:
        """Returns a lot."""
        return "0123456789abcdef" * (BIG // 16)


def changing(server: MCPServer) -> None:
    """Has another tool after the first call."""

    @server.tool()
    async def grow(context: Context) -> str:
        """Adds a tool."""

        def grown() -> str:
            """Was not there before."""
            return "grown"

        server.add_tool(grown)
        await context.notify_tools_changed()
        await context.session.send_tool_list_changed()  # to clients of before 2026-07-28
        return "there is another tool now"


def python(server: MCPServer) -> None:
    """As gpt-oss's own: code in, its output back."""

    @server.tool()
    def python(code: str) -> str:
        """Evaluates an expression."""
        return repr(eval(code, {"__builtins__": {}}))


def browser(server: MCPServer) -> None:
    """As gpt-oss's own."""

    @server.tool()
    def search(query: str, topn: int = 10, source: str | None = None) -> str:
        """Searches."""
        return f"[0] Results for {query}"

    @server.tool(name="open")
    def open_(id: int | str = -1, cursor: int = -1, loc: int = -1, num_lines: int = -1) -> str:  # noqa: A002
        """Opens."""
        return f"[1] Page {id}"

    @server.tool()
    def find(pattern: str, cursor: int = -1) -> str:
        """Finds."""
        return f"[2] Found {pattern}"


def caller(server: MCPServer) -> None:
    """Returns the credentials of the caller."""

    @server.tool()
    def who(context: Context) -> str:
        """Tells the credentials of this call."""
        headers = context.headers or {}
        return f"{headers.get('authorization')} {headers.get('x-team')} {headers.get('host')}"


KINDS = {
    register.__name__: register
    for register in (weather, slow, crash, big, changing, python, browser, caller)
}


def main() -> None:
    server = MCPServer(sys.argv[1])
    KINDS[sys.argv[1]](server)
    if len(sys.argv) == 2:
        server.run()
    elif "--sse" in sys.argv:
        server.run("sse", port=int(sys.argv[2]))
    else:
        server.run("streamable-http", port=int(sys.argv[2]))


if __name__ == "__main__":
    main()
