"""Starts the server of `launch` again when a signal has ended it.

mlx throws errors of the GPU in Metal's completion handler, where nobody can catch them: the process
ends with SIGABRT (https://github.com/ml-explore/mlx/issues/2670). launchd and systemd restart a
service; this process does it for a server in the background. It imports nothing of the server, and
holds the lock that says that one is running (`background`).

The server is not started again if it ended by itself (a usage error, a model that cannot be
loaded), if it was told to end, or if it has crashed too often.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from types import FrameType

PAUSES = (1.0, 5.0, 15.0, 60.0)
"""Seconds before each restart; after as many crashes in a row, there is none."""

STEADY = 600.0
"""Seconds that a server must run for its earlier crashes not to count."""


def main(arguments: Sequence[str]) -> int:
    """Runs the server: ``LOG COMMAND…``. Returns its exit code."""
    log, *command = arguments
    crashes = 0
    stopping = Event()
    server: subprocess.Popen[bytes] | None = None

    def stop(sign: int, _: FrameType | None) -> None:
        stopping.set()
        if server is not None:
            server.send_signal(sign)

    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, stop)
    while True:
        began = time.monotonic()
        server = subprocess.Popen(command)
        if stopping.is_set():  # the signal came before there was a server
            server.terminate()
        code = server.wait()
        crashes = 1 if time.monotonic() - began > STEADY else crashes + 1
        if code >= 0 or stopping.is_set():
            return abs(code)
        ended = f"the server was ended by {signal.Signals(-code).name}"
        if crashes > len(PAUSES):
            _note(log, f"{ended} again; it is not started again")
            return 128 - code
        _note(log, f"{ended}; starting it again in {PAUSES[crashes - 1]:.0f} s")
        if stopping.wait(PAUSES[crashes - 1]):
            return 0


def _note(log: str, text: str) -> None:
    """Appends a line to the log, which the server rotates."""
    with Path(log).open("a", encoding="utf-8") as file:
        file.write(f"vllm-mlx-harmony: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
