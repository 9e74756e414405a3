"""The last line of the server's terminal: the progress of the current prompt, and the queue.

    prompt 14,336 of 36,102 tokens (40 %), 1,513 tokens/s, 14 s left · 2 waiting · 1 answering

It is shown only while a request waits, only if the server runs in the foreground of a terminal, and
never if logs are JSON. Log lines appear above it: tqdm draws the line, and while it is shown
replaces the handlers that log to the terminal.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from vllm_mlx_harmony.engine.mlx_engine import RequestStatus

SECONDS = 0.5
"""Seconds between two updates."""

SHOWN_AFTER_SECONDS = 1.0
"""Seconds that a request has to wait before it is shown."""

Statuses = Callable[[], "list[tuple[str, list[RequestStatus]]]"]
"""The requests of each model that is loaded, by its name."""


def text(models: Sequence[tuple[str, Sequence[RequestStatus]]]) -> str:
    """The line; empty when nothing waits. A model has its name in it when there are several."""
    parts = []
    for name, requests in models:
        waiting = [request for request in requests if request.place]
        if any(request.seconds >= SHOWN_AFTER_SECONDS for request in waiting):
            answering = len(requests) - len(waiting)
            part = _of_prompt(waiting[0])
            part += f" · {len(waiting) - 1} waiting" if len(waiting) > 1 else ""
            part += f" · {answering} answering" if answering else ""
            parts.append(f"{name}: {part}" if len(models) > 1 else part)
    return " | ".join(parts)


def _of_prompt(request: RequestStatus) -> str:
    total, computed = request.total, request.computed
    if request.state == "waiting":
        return f"prompt of {total:,} tokens queued"
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
        self._shown = ExitStack()
        self._bar: Any = None

    def show(self, text: str) -> None:
        """Shows ``text``, as much of it as the terminal is wide; an empty one ends the line."""
        if not text:
            self._shown.close()
            self._bar = None
            return
        width = os.get_terminal_size(self._terminal.fileno()).columns
        if self._bar is None:
            # Only loggers with such a handler: tqdm gives one to each of them.
            streams = (sys.stdout, sys.stderr)
            loggers = [logger for logger, handler in _handlers() if handler.stream in streams]
            self._bar = tqdm(file=self._terminal, bar_format="{desc}", leave=False, position=0)
            self._shown.enter_context(self._bar)
            self._shown.enter_context(logging_redirect_tqdm(loggers))
        self._bar.set_description_str(text[: max(width - 1, 0)])


def _handlers() -> Iterator[tuple[logging.Logger, logging.StreamHandler[Any]]]:
    known = list(logging.root.manager.loggerDict.values())
    for logger in (
        logging.root,
        *(logger for logger in known if isinstance(logger, logging.Logger)),
    ):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                yield logger, handler


def _logs_json() -> bool:
    return any("json" in type(handler.formatter).__name__.lower() for _, handler in _handlers())


_started = threading.Lock()


def start(statuses: Statuses, *, enabled: bool) -> None:
    """Shows what waits from now on, if that is ``enabled`` and there is a terminal to show it on.
    Once for a process."""
    terminal = sys.stderr
    if not enabled or terminal is None or not terminal.isatty() or os.environ.get("TERM") == "dumb":
        return
    if not _started.acquire(blocking=False):
        return
    line = StatusLine(terminal)
    threading.Thread(
        target=_watch, args=(line, terminal, statuses), name="status line", daemon=True
    ).start()
    atexit.register(line.show, "")


def _watch(line: StatusLine, terminal: TextIO, statuses: Statuses) -> None:
    pause, shown = threading.Event(), ""
    while not pause.wait(SECONDS):
        with suppress(Exception):  # the terminal may be gone; one failed poll must not end the line
            in_foreground = os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
            now = text(statuses()) if in_foreground and not _logs_json() else ""
            if now or shown:
                line.show(now)
            shown = now
