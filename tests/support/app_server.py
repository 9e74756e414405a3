"""An ASGI application on a real socket, in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from waiting import wait_until


@contextmanager
def run_server(app: Any, **options: Any) -> Iterator[str]:
    """Serves ``app`` on a local port, in a thread. Yields its URL.

    ``buffer``: the size of the kernel's send buffer, by default the system's.
    ``server``: a class instead of uvicorn's.
    """
    server_class = options.pop("server", uvicorn.Server)
    listener = socket.socket()
    if buffer := options.pop("buffer", 0):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", options.pop("port", 0)))
    listener.listen(1024)
    config = uvicorn.Config(app, log_level="error", **options)
    server = server_class(config=config)  # as uvicorn.run creates it
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server to listen")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listener.close()
