"""The error of every command, and the reading of input files."""

from __future__ import annotations

import sys
from pathlib import Path

STDIN = "-"


class UsageError(Exception):
    """A command cannot run. The user sees the message; the exit code is 2."""


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
    """The name of the file in error messages."""
    return "standard input" if name == STDIN else name
