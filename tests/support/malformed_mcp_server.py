"""An MCP server with output that the official package never sends.

``malformed_mcp_server.py [PORT]``: over stdio, or with a port over streamable HTTP. Some of its
tools are valid.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

OBJECT = {"type": "object"}
TOOLS: list[Any] = [
    {"name": "type", "inputSchema": {"type": 5}},
    {"name": "good", "description": "Half \ud83d of it.", "inputSchema": OBJECT},
    {"name": "schema", "inputSchema": "x"},
    {"name": "none"},
    {"name": 7, "inputSchema": OBJECT},
    {"name": "", "inputSchema": OBJECT},
    {"inputSchema": OBJECT},
    "no tool",
    None,
    {"name": "array", "inputSchema": {"type": "array"}},
    {"name": "properties", "inputSchema": {**OBJECT, "properties": 5}},
    {"name": "description", "description": 5, "inputSchema": OBJECT},
    {"name": "better", "inputSchema": OBJECT},
]
TEXT = "\ud83d of it, \ud83d\ude00 whole, \\ud83d written out \udc00"


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The response to one request."""
    if request["method"] == "initialize":
        version = request["params"]["protocolVersion"]
        info = {"name": "raw", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif request["method"] == "tools/list":
        result = {"tools": TOOLS}
    elif request["method"] == "tools/call":
        result = {"content": [{"type": "text", "text": TEXT}]}
    else:
        error = {"code": -32601, "message": "there is no such method"}
        return {"jsonrpc": "2.0", "id": request["id"], "error": error}
    return {"jsonrpc": "2.0", "id": request["id"], "result": result}


class Http(BaseHTTPRequestHandler):
    """Streamable HTTP without streams."""

    def do_POST(self) -> None:
        """One message."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps(answer(request)).encode() if "id" in request else b""
        self.send_response(200 if body else 202)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """There is no stream of notifications."""
        self.send_response(405)
        self.send_header("content-length", "0")
        self.end_headers()

    do_DELETE = do_GET  # noqa: N815


def main() -> None:
    if len(sys.argv) > 1:
        HTTPServer(("127.0.0.1", int(sys.argv[1])), Http).serve_forever()
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            print(json.dumps(answer(request)), flush=True)


if __name__ == "__main__":
    main()
