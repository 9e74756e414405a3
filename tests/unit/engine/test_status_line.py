"""The line of the terminal: what it says, when it is there, and what is logged meanwhile."""

from __future__ import annotations

import io
import logging
import os
import pty
import sys
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TextIO

import pytest

pytest.importorskip("mlx_lm")

from vllm_mlx_harmony.engine import status_line
from vllm_mlx_harmony.engine.mlx_engine import RequestStatus
from vllm_mlx_harmony.engine.status_line import StatusLine


def request(state: Any, place: int, **changed: Any) -> RequestStatus:
    """A prompt of 36,102 tokens, 9 seconds old."""
    values = {"total": 36_102, "cached": 0, "computed": 14_336, "generated": 0, "seconds": 9.0}
    values |= {"speed": 1512.6, "expected": 14.2, **changed}
    return RequestStatus(state, place, **values)


COMPUTING = request("computing", 1)
WAITING = request("waiting", 2, computed=0, speed=0.0)
GENERATING = request("generating", 0, generated=7)
NEW = request("computing", 1, seconds=0.9)
PROMPT = "prompt 14,336 of 36,102 tokens (39 %), 1,513 tokens/s, 14 s left"

LINES: dict[str, tuple[list[list[RequestStatus]], str]] = {
    "no model": ([], ""),
    "nothing to do": ([[]], ""),
    "answers alone": ([[GENERATING, GENERATING]], ""),
    "a prompt": ([[COMPUTING]], PROMPT),
    "one that has just come": ([[NEW]], ""),
    "others": ([[GENERATING, COMPUTING, WAITING, WAITING]], f"{PROMPT} · 2 waiting · 1 answering"),
    "no speed yet": (
        [[request("computing", 1, computed=0, speed=0.0, expected=None)]],
        "prompt 0 of 36,102 tokens (0 %)",
    ),
    "not begun": ([[request("waiting", 1)]], "prompt of 36,102 tokens queued"),
    "two models": ([[COMPUTING], []], f"m0: {PROMPT}"),
    "two models at work": ([[COMPUTING], [COMPUTING]], f"m0: {PROMPT} | m1: {PROMPT}"),
}


@pytest.mark.parametrize(("models", "expected"), LINES.values(), ids=LINES)
def test_the_line(models: list[list[RequestStatus]], expected: str) -> None:
    named = [(f"m{number}", requests) for number, requests in enumerate(models)]
    assert status_line.text(named) == expected


class Terminal:
    """A pseudo-terminal, and everything that was written to it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        tty.setraw(slave)
        self.stream: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the other side is closed
            while data := os.read(self._master, 4096):
                self._written += data

    def written(self) -> str:
        """All of it; the terminal is closed."""
        self.stream.close()
        self._reader.join(10)
        os.close(self._master)
        return self._written.decode()


def screen(written: str) -> list[str]:
    """The lines that are left to see, on a terminal that overwrites what follows a ``\\r``."""
    lines, column = [""], 0
    for each in written.replace("\r\n", "\n"):
        if each == "\n":
            lines.append("")
        elif each != "\r":
            lines[-1] = lines[-1][:column] + each + lines[-1][column + 1 :]
        column = 0 if each in "\r\n" else column + 1
    return [line.rstrip() for line in lines]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    found = Terminal()
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((40, 10)))
    yield found
    if not found.stream.closed:
        found.written()


@pytest.fixture
def logger(terminal: Terminal) -> Iterator[logging.Logger]:
    found = logging.Logger("of a terminal")
    logging.root.manager.loggerDict["of a terminal"] = found
    found.addHandler(logging.StreamHandler(terminal.stream))
    yield found
    del logging.root.manager.loggerDict["of a terminal"]


Show = Callable[[str], None]


def shown(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Show:
    """Shows a line on ``terminal``, which is this process's from now on."""
    monkeypatch.setattr(sys, "stderr", terminal.stream)  # pytest replaces it after the fixtures
    return StatusLine(terminal.stream).show


def test_log_appears_above_the_line(
    terminal: Terminal, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = list(logger.handlers)
    show = shown(terminal, monkeypatch)
    logger.warning("before")
    show("10 %")
    logger.warning("one\ntwo")
    show("20 %")
    logger.warning("three")
    assert logger.handlers != handlers
    show("")
    logger.warning("after")
    assert logger.handlers == handlers
    assert screen(terminal.written()) == ["before", "one", "two", "three", "after", ""]


def test_a_log_file_is_left_alone(
    terminal: Terminal, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = io.StringIO()
    logger.addHandler(logging.StreamHandler(log))
    show = shown(terminal, monkeypatch)
    show("10 %")
    logger.warning("one")
    show("")
    assert (log.getvalue(), screen(terminal.written())) == ("one\n", ["one", ""])


def test_the_line_stays_below_and_within_the_terminal(
    terminal: Terminal, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = shown(terminal, monkeypatch)
    show("x" * 100)
    logger.warning("logged")
    logger.warning("again")
    assert screen(terminal.written()) == ["logged", "again", "x" * 39]
    show("")


def test_many_threads_leave_every_line_whole(
    terminal: Terminal, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = shown(terminal, monkeypatch)
    show("0 %")

    def log(name: str) -> None:
        for number in range(50):
            logger.warning("%s %d", name, number)

    threads = [threading.Thread(target=log, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for percent in range(100):
        show(f"{percent} %")
    for thread in threads:
        thread.join()
    show("")
    found = screen(terminal.written())
    assert sorted(found) == sorted(["", *(f"{name} {n}" for name in "abcd" for n in range(50))])


class JsonFormatter(logging.Formatter):
    """By its name."""


NONE = {
    "switched off": ({}, False, True),
    "a terminal that cannot": ({"TERM": "dumb"}, True, True),
    "no terminal": ({}, True, False),
}


@pytest.mark.parametrize(("variables", "enabled", "on_terminal"), NONE.values(), ids=NONE)
def test_line_is_off_without_a_terminal(
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    enabled: bool,
    on_terminal: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", terminal.stream if on_terminal else io.StringIO())
    status_line.start(lambda: [("m", [COMPUTING])], enabled=enabled)
    assert "status line" not in {thread.name for thread in threading.enumerate()}


class Ended(BaseException):
    """Ends the thread of the line."""


@pytest.mark.parametrize("error", [KeyError("a tenant"), OSError("no terminal")])
def test_the_line_survives_a_poll_that_fails(
    terminal: Terminal, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls, shown = iter([error, [("m", [COMPUTING])], Ended()]), []

    def status() -> Any:
        found = next(polls)
        if isinstance(found, BaseException):
            raise found
        return found

    line = StatusLine(terminal.stream)
    monkeypatch.setattr(line, "show", shown.append)
    monkeypatch.setattr(status_line, "SECONDS", 0.001)
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
    with pytest.raises(Ended):
        status_line._watch(line, terminal.stream, status)
    assert shown == [PROMPT]


def test_json_is_left_alone(logger: logging.Logger) -> None:
    before = status_line._logs_json()
    logger.handlers[0].setFormatter(JsonFormatter())
    assert (before, status_line._logs_json()) == (False, True)
