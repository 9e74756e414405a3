"""Ends running answers with an error when a native library aborts the process.

mlx throws errors of the GPU in Metal's completion handler, on a thread where nobody can catch them,
so C++ calls ``abort`` (https://github.com/ml-explore/mlx/issues/2670). A supervisor starts the
server again (`cli.supervise`, launchd, systemd), but without more, clients see a stream that breaks
off, and some take what they have for the whole answer.

``abort`` raises SIGABRT on its own thread and ends the process when the handler returns. Until then
all other threads run, so the handler tells the event loop to end the answers, and waits. It has to
be a C function, made by ctypes: Python would run a handler of its own later, on the main thread,
after the C handler has returned and the process has ended.

The process ends soon in any case: by SIGALRM if the interpreter is stuck, and immediately if the
event loop's thread is the one that gets the signal. The handler needs the interpreter lock, which
mlx's functions release while they wait for the GPU.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from math import ceil
from typing import Any

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_libc = ctypes.CDLL(None)
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.signal.restype = ctypes.c_void_p

_handlers: list[object] = []
"""All handlers: one that has been replaced may still be running, so none is freed."""


def before_abort(
    work: Callable[[], Coroutine[Any, Any, None]], seconds: float
) -> Callable[[], None]:
    """Runs ``work`` on the current event loop, for ``seconds`` at most, before an abort ends the
    process. Returns a function that restores the previous handler.
    """
    loop = asyncio.get_running_loop()
    thread = threading.get_ident()

    def handle(_: int) -> None:
        signal.alarm(ceil(seconds) + 1)
        if threading.get_ident() != thread:
            with suppress(RuntimeError, TimeoutError):  # the loop is closed, or stuck
                asyncio.run_coroutine_threadsafe(work(), loop).result(seconds)
        _libc.signal(signal.SIGABRT, None)
        signal.raise_signal(signal.SIGABRT)  # ends the process when this handler returns

    handler = _Handler(handle)
    _handlers.append(handler)
    previous = _libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    return lambda: _libc.signal(signal.SIGABRT, previous)
