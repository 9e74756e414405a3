"""Writes the output of a server to a file of limited size: ``serve --log-file``.

launchd, and a shell that starts a process in the background, open a file for standard output, which
the process inherits. `newsyslog` could rotate such a file, but only as root and with a signal that
the host does not handle. So the process does it itself: it renames the file, opens a new one, and
makes that the standard output and standard error. The file gets all output of Python, loggers and
libraries, and no line is lost.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

LARGEST = 10_000_000
"""Size in bytes at which the file is renamed."""

OLDER = 3
"""Number of older files; `server.log.1` is the newest of them. All together take 40 MB."""

INTERVAL = 5.0
"""Seconds between two checks of the size, which grows beyond ``LARGEST`` meanwhile."""


def redirect(path: Path, largest: int = LARGEST, interval: float = INTERVAL) -> None:
    """Appends the output of this process to ``path``, and rotates it from a thread.

    Raises ``OSError`` if the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    files = RotatingFileHandler(path, backupCount=OLDER, encoding="utf-8")

    def put_in_place() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if files.stream is not None:
            for descriptor in (1, 2):
                os.dup2(files.stream.fileno(), descriptor)

    def rotate() -> None:
        while True:
            time.sleep(interval)
            if os.fstat(1).st_size >= largest:
                with suppress(OSError):  # a full disk: it is tried again
                    files.doRollover()
                    put_in_place()

    put_in_place()
    threading.Thread(target=rotate, name="log-file", daemon=True).start()
