"""Atomic writes: other processes see a whole file or none."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Writes ``content`` to ``path`` with mode 0600, and creates missing directories. Several
    processes may do so at once. Without ``replace``, an existing file stays. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        if replace:
            os.replace(draft, path)
        else:
            with suppress(FileExistsError):
                os.link(draft, path)
    finally:
        with suppress(OSError):
            os.unlink(draft)
