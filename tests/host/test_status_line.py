"""The line of the terminal: what it says, when it is there, and what is logged meanwhile."""

from __future__ import annotations

import io
import logging
import os
import pty
import sys
import threading
import tty
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TextIO

import pytest

pytest.importorskip("vllm_mlx")

from vllm_mlx_harmony.engine.engine import RequestStatus
from vllm_mlx_harmony.host import status_line
from vllm_mlx_harmony.host.status_line import ERASE, StatusLine


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
    "not begun": ([[request("waiting", 1)]], "prompt of 36,102 tokens waits"),
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
    """The lines that are left to see."""
    lines = [""]
    for piece in written.replace(ERASE, "\0").replace("\r\n", "\n"):
        if piece == "\n":
            lines.append("")
        else:
            lines[-1] = "" if piece == "\0" else lines[-1] + piece
    return lines


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


def test_what_is_logged_appears_above_the_line(
    terminal: Terminal, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    handler = logger.handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    line = StatusLine(terminal.stream)
    logger.warning("before")
    line.show("10 %")
    logger.warning("one\ntwo")
    line.show("20 %")
    print("pri", end="")
    line.show("30 %")
    print("nted")
    line.show("40 %")
    logger.warning("three")
    assert handler.stream is not terminal.stream
    line.show("")
    logger.warning("after")
    assert handler.stream is terminal.stream and sys.stdout is terminal.stream
    assert screen(terminal.written()) == ["before", "one", "two", "printed", "three", "after", ""]


def test_the_line_stays_below_and_within_the_terminal(
    terminal: Terminal, logger: logging.Logger
) -> None:
    line = StatusLine(terminal.stream)
    line.show("x" * 100)
    logger.warning("logged")
    logger.warning("again")
    assert screen(terminal.written()) == ["logged", "again", "x" * 39]


def test_many_threads_leave_every_line_whole(terminal: Terminal, logger: logging.Logger) -> None:
    line = StatusLine(terminal.stream)
    line.show("0 %")

    def log(name: str) -> None:
        for number in range(50):
            logger.warning("%s %d", name, number)

    threads = [threading.Thread(target=log, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for percent in range(100):
        line.show(f"{percent} %")
    for thread in threads:
        thread.join()
    line.show("")
    found = screen(terminal.written())
    assert sorted(found) == sorted(["", *(f"{name} {n}" for name in "abcd" for n in range(50))])


class JsonFormatter(logging.Formatter):
    """By its name."""


NONE = {
    "switched off": ({status_line.VARIABLE: "0"}, True),
    "a terminal that cannot": ({"TERM": "dumb"}, True),
    "no terminal": ({}, False),
}


@pytest.mark.parametrize(("variables", "on_terminal"), NONE.values(), ids=NONE)
def test_where_there_is_none(
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    on_terminal: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", terminal.stream if on_terminal else io.StringIO())
    status_line.start(lambda: [("m", [COMPUTING])])
    assert "status line" not in {thread.name for thread in threading.enumerate()}


def test_json_is_left_alone(logger: logging.Logger) -> None:
    before = status_line._logs_json()
    logger.handlers[0].setFormatter(JsonFormatter())
    assert (before, status_line._logs_json()) == (False, True)
