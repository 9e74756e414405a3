"""What commands have in common: their error, numbers among their arguments, and input files."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

STDIN = "-"

LAST_PORT = 65_535


class UsageError(Exception):
    """A command cannot run. The user sees the message; the exit code is 2."""


def number(what: str, least: int = 1, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A ``type`` for ``add_argument``: a number from ``least``, 1 or more, to ``most``."""

    def read(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else 0
        if not least <= value <= most:
            raise ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


port = number(f"a port: 1 to {LAST_PORT}", most=LAST_PORT)


def read_text(name: str) -> str:
    """The text of a file, or of standard input for ``-``, without a byte order mark.

    Raises ``UsageError``.
    """
    if name == STDIN and sys.stdin is None:
        raise UsageError("standard input is closed")
    try:
        content = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{called(name)} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise UsageError(f"{called(name)} is not UTF-8 text: {where}") from error
    except ValueError as error:  # a name with a null character
        raise UsageError(f"{name!r} is not a file name: {error}") from error


def called(name: str) -> str:
    return "standard input" if name == STDIN else name
