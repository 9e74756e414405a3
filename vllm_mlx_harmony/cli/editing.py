"""Changes of a user's file: by one process at a time, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from filelock import FileLock, Timeout

from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.files import write_atomically

LOCK_SECONDS = 10.0
"""How long another command may take to change a file."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other commands of this user from changing the file.

    The lock is in our own directory: beside the file, it would be left over. Raises ``UsageError``
    if another command has it for too long, and ``OSError``.
    """
    name = blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()
    lock = vocab.cache_dir() / "locks" / name
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=LOCK_SECONDS):
            yield
    except Timeout as error:
        raise UsageError(f"{path} is being changed by another command") from error


def replace_content(path: Path, content: bytes, like: os.stat_result | None = None) -> None:
    """Replaces a file, or what a link points to, by renaming. Mode and owner are those of ``like``,
    by default those of the file so far. Raises ``OSError``."""
    place = path.resolve()
    with suppress(FileNotFoundError):
        like = like or place.stat()
    write_atomically(place, content)
    if like is not None:
        os.chmod(place, like.st_mode)
        with suppress(PermissionError):
            os.chown(place, like.st_uid, like.st_gid)
