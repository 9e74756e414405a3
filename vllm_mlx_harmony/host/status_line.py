"""The last line of the server's terminal: how far the prompt is that is computed, and who waits.

    prompt 14,336 of 36,102 tokens (40 %), 1,513 tokens/s, 14 s left · 2 waiting · 1 answering

It is there only while a request waits, only on a terminal that the server is in the foreground of,
and never when logs are JSON. What is logged or printed meanwhile appears above it: for as long as
the line is shown, the streams of the logging handlers are replaced by ones that erase the line,
write, and draw it again. ``VLLM_MLX_HARMONY_STATUS_LINE=0`` switches it off.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TextIO

from vllm_mlx_harmony.engine.engine import RequestStatus

VARIABLE = "VLLM_MLX_HARMONY_STATUS_LINE"
"""Environment variable: ``0`` switches the line off."""

SECONDS = 0.5
"""Seconds between two looks."""

PATIENCE = 1.0
"""Seconds that a request has to wait before it is shown."""

Status = Callable[[], "list[tuple[str, list[RequestStatus]]]"]
"""The requests of each model that is loaded, by its name."""

ERASE = "\r\x1b[K"


def text(models: Sequence[tuple[str, Sequence[RequestStatus]]]) -> str:
    """The line; empty when nothing waits. A model has its name in it when there are several."""
    parts = []
    for name, requests in models:
        waiting = [each for each in requests if each.place]
        if any(each.seconds >= PATIENCE for each in waiting):
            answering = len(requests) - len(waiting)
            part = _of_prompt(waiting[0])
            part += f" · {len(waiting) - 1} waiting" if len(waiting) > 1 else ""
            part += f" · {answering} answering" if answering else ""
            parts.append(f"{name}: {part}" if len(models) > 1 else part)
    return " | ".join(parts)


def _of_prompt(request: RequestStatus) -> str:
    total, computed = request.total, request.computed
    if request.state == "waiting":
        return f"prompt of {total:,} tokens waits"
    facts = [f"prompt {computed:,} of {total:,} tokens ({100 * computed // total} %)"]
    if request.speed:
        facts.append(f"{request.speed:,.0f} tokens/s")
    if request.expected is not None:
        facts.append(f"{request.expected:,.0f} s left")
    return ", ".join(facts)


class StatusLine:
    """One line below everything else that ``terminal`` shows."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._lock = threading.RLock()
        self._text = ""
        self._at_start = True  # of a line: no other text stands before the cursor
        self._replaced: list[tuple[Callable[[Any], object], TextIO]] = []

    def show(self, text: str) -> None:
        """Shows ``text``, as much of it as the terminal is wide; an empty one ends the line."""
        with self._erased():
            self._text = text
            if text:
                self._redirect()
            while self._replaced and not text:
                restore, stream = self._replaced.pop()
                restore(stream)

    def write_above(self, stream: TextIO, text: str) -> int:
        """Writes ``text`` to ``stream``, which is this terminal, above the line."""
        with self._erased():
            written = stream.write(text)
            stream.flush()
            if text:
                self._at_start = text.endswith("\n")
            return written

    @contextmanager
    def _erased(self) -> Iterator[None]:
        """The line is not there meanwhile, and drawn again at the end."""
        with self._lock:
            if self._text and self._at_start:
                self._terminal.write(ERASE)
                self._terminal.flush()
            yield
            if self._text and self._at_start:
                with suppress(OSError):
                    width = os.get_terminal_size(self._terminal.fileno()).columns
                    self._terminal.write(self._text[: max(width - 1, 0)])
                    self._terminal.flush()

    def _redirect(self) -> None:
        """Handlers that are there by now write above the line, and so does ``print``."""
        # Not the stream of a handler that looks up ``sys.stderr``.
        streams = [(each.setStream, vars(each).get("stream")) for each in _handlers()]
        of_print = ("stdout", "stderr")
        streams.extend((partial(setattr, sys, each), getattr(sys, each)) for each in of_print)
        for replace, stream in streams:
            if stream is not None and _is_terminal(stream):
                self._replaced.append((replace, stream))
                replace(_Above(stream, self))


class _Above:
    """A stream to the terminal whose text appears above the line."""

    def __init__(self, stream: TextIO, line: StatusLine) -> None:
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        return self._line.write_above(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    known = list(logging.root.manager.loggerDict.values())
    for logger in (logging.root, *(each for each in known if isinstance(each, logging.Logger))):
        yield from (each for each in logger.handlers if isinstance(each, logging.StreamHandler))


def _is_terminal(stream: Any) -> bool:
    """Whether ``stream`` writes to a terminal by itself."""
    try:
        return not isinstance(stream, _Above) and bool(stream.isatty())
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _logs_json() -> bool:
    return any("json" in type(each.formatter).__name__.lower() for each in _handlers())


_started = threading.Lock()


def start(status: Status) -> None:
    """Shows what waits from now on, where there is a terminal to show it on. Once for a process."""
    terminal = sys.stderr
    off = os.environ.get(VARIABLE, "").strip() == "0" or os.environ.get("TERM") == "dumb"
    if off or not _is_terminal(terminal) or not _started.acquire(blocking=False):
        return
    line = StatusLine(terminal)
    threading.Thread(
        target=_watch, args=(line, terminal, status), name="status line", daemon=True
    ).start()
    atexit.register(line.show, "")


def _watch(line: StatusLine, terminal: TextIO, status: Status) -> None:
    pause, shown = threading.Event(), ""
    while not pause.wait(SECONDS):
        with suppress(OSError, RuntimeError):  # no terminal any more; a model was loaded just now
            in_foreground = os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
            now = text(status()) if in_foreground and not _logs_json() else ""
            if now or shown:
                line.show(now)
            shown = now
