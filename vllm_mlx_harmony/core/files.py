"""Files that are there whole or not at all, whoever else writes or reads them."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Puts ``content`` at ``path``, readable by its owner alone; makes the directory if need be.

    Several processes may do so at once: a reader sees one of the files, never a part of one.
    Without ``replace`` the file that is there already stays. Raises ``OSError``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        if replace:
            os.replace(draft, path)
            return
        with suppress(FileExistsError):
            os.link(draft, path)
        os.unlink(draft)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
