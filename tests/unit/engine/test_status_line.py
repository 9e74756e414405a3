"""The status line: its text, when it is shown, and logs written above it."""

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
def test_line_summarizes_requests(models: list[list[RequestStatus]], expected: str) -> None:
    named = [(f"m{number}", requests) for number, requests in enumerate(models)]
    assert status_line.text(named) == expected


class Terminal:
    """A pseudo-terminal that records everything written to it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        tty.setraw(slave)
        self.stream: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(self._master, 4096):
                self._written += data

    def written(self) -> str:
        """Closes the terminal and returns everything written to it."""
        self.stream.close()
        self._reader.join(10)
        os.close(self._master)
        return self._written.decode()


def screen(written: str) -> list[str]:
    """The lines that remain visible on a terminal, where text after ``\\r`` overwrites the line."""
    lines, column = [""], 0
    for character in written.replace("\r\n", "\n"):
        if character == "\n":
            lines.append("")
        elif character != "\r":
            lines[-1] = lines[-1][:column] + character + lines[-1][column + 1 :]
        column = 0 if character in "\r\n" else column + 1
    return [line.rstrip() for line in lines]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    terminal = Terminal()
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((40, 10)))
    yield terminal
    if not terminal.stream.closed:
        terminal.written()


@pytest.fixture
def logger(terminal: Terminal) -> Iterator[logging.Logger]:
    logger = logging.Logger("of a terminal")
    logging.root.manager.loggerDict["of a terminal"] = logger
    logger.addHandler(logging.StreamHandler(terminal.stream))
    yield logger
    del logging.root.manager.loggerDict["of a terminal"]


Show = Callable[[str], None]


def show_on(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Show:
    """Makes ``terminal`` this process's stderr; returns what shows a line on it."""
    monkeypatch.setattr(sys, "stderr", terminal.stream)  # pytest replaces it after the fixtures
    return StatusLine(terminal.stream).show


def test_log_appears_above_line(
    terminal: Terminal, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = list(logger.handlers)
    show = show_on(terminal, monkeypatch)
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


def test_log_file_is_unchanged(
    terminal: Terminal, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = io.StringIO()
    logger.addHandler(logging.StreamHandler(log))
    show = show_on(terminal, monkeypatch)
    show("10 %")
    logger.warning("one")
    show("")
    assert (log.getvalue(), screen(terminal.written())) == ("one\n", ["one", ""])


def test_line_stays_last_and_fits_terminal(
    terminal: Terminal, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = show_on(terminal, monkeypatch)
    show("x" * 100)
    logger.warning("logged")
    logger.warning("again")
    assert screen(terminal.written()) == ["logged", "again", "x" * 39]
    show("")


def test_logs_of_many_threads_stay_whole(
    terminal: Terminal, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = show_on(terminal, monkeypatch)
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
    lines = screen(terminal.written())
    assert sorted(lines) == sorted(["", *(f"{name} {n}" for name in "abcd" for n in range(50))])


class JsonFormatter(logging.Formatter):
    """Is recognized by its name."""


NONE = {
    "switched off": ({}, False, True),
    "a terminal that cannot": ({"TERM": "dumb"}, True, True),
    "no terminal": ({}, True, False),
}


@pytest.mark.parametrize(("variables", "enabled", "on_terminal"), NONE.values(), ids=NONE)
def test_line_is_off_without_terminal(
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
def test_line_survives_failing_poll(
    terminal: Terminal, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls, shown = iter([error, [("m", [COMPUTING])], Ended()]), []

    def status() -> Any:
        result = next(polls)
        if isinstance(result, BaseException):
            raise result
        return result

    line = StatusLine(terminal.stream)
    monkeypatch.setattr(line, "show", shown.append)
    monkeypatch.setattr(status_line, "SECONDS", 0.001)
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
    with pytest.raises(Ended):
        status_line._watch(line, terminal.stream, status)
    assert shown == [PROMPT]


def test_json_logs_are_detected(logger: logging.Logger) -> None:
    before = status_line._logs_json()
    logger.handlers[0].setFormatter(JsonFormatter())
    assert (before, status_line._logs_json()) == (False, True)
