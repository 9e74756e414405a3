"""Which model, layout and tenant a piece on the disk belongs to.

The key that a look-up begins with is a digest of everything that makes a piece valid:

- The weights: `config.json`, and of each file its name, size, modification time, safetensors header
  and ``SAMPLES`` blocks from the first byte to the last. This tells a fine-tune from the original
  of the same shapes, even if a copy or an archive has set its times. Hashing all of 65 GB would
  take longer than the cache saves; these reads take milliseconds.
- The layout of a piece: which windows the layers have, the format of the files.
- mlx-lm, whose caches pieces are cut from: it has no version of their format, so its own version
  counts, up to the second number.
- The tenant.

A digest that changes makes older pieces unreachable. They are evicted first.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vllm_mlx_harmony.engine.disk.index import VERSION, key_of
from vllm_mlx_harmony.model_files import CONFIG, path_of

if TYPE_CHECKING:
    from vllm_mlx_harmony.engine.pieces import Windows

logger = logging.getLogger("vllm_mlx_harmony")

T = TypeVar("T")

WEIGHTS = (".safetensors", ".npz", ".gguf")

SAMPLES = 16
"""Blocks of a file that are read, the first at its beginning, the last at its end."""

BLOCK = 1 << 12
"""Bytes of a block."""


def of_weights(model: str) -> bytes | None:
    """A digest of a model directory, or of a repository in the Hugging Face cache.

    ``None`` when there is none, or one of its weights cannot be read.
    """
    try:
        config = path_of(model, CONFIG)
        parts = [config.read_bytes()]
        for path in sorted(config.parent.iterdir()):
            if path.suffix in WEIGHTS:
                parts.extend(_content(path))
    except (OSError, ValueError):  # neither a path nor the id of a repository
        return None
    return key_of(*parts)


def _content(path: Path) -> Iterator[bytes]:
    """Name, size, time and parts of the content of a regular file; nothing of any other.

    Links are followed: a repository in the Hugging Face cache consists of them. Raises ``OSError``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe may have no writer
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            return
        yield f"{path.name} {state.st_size} {state.st_mtime_ns}".encode()
        if path.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0).ljust(8, b"\0"))
            yield os.pread(descriptor, min(length, 1 << 24), 8)  # gpt-oss-120b's largest: 64 KiB
        last = max(0, state.st_size - BLOCK)
        for place in sorted({last * n // (SAMPLES - 1) for n in range(SAMPLES)}):
            yield os.pread(descriptor, BLOCK, place)
    finally:
        os.close(descriptor)


def load_and_identify(model: str, load: Callable[[], T]) -> tuple[T, bytes | None]:
    """What ``load`` returns, and the digest of the files that it read; ``None`` if that is unknown.

    Compares the files before and after: a directory may get other weights at any moment (``hf
    download --local-dir``), and what was computed with old ones must not be found with new ones.
    """
    before = of_weights(model)
    loaded = load()
    digest = of_weights(model)
    # In the Hugging Face cache, files of a repository do not change: others are added.
    if digest != before and Path(model).is_dir():
        logger.warning(
            "prefix cache: disk cache disabled: files in %s changed during loading", model
        )
        return loaded, None
    if digest is None:
        logger.warning(
            "prefix cache: disk cache disabled: some weights in %s cannot be read", model
        )
    return loaded, digest


def of_layout(class_name: str, windows: Windows) -> bytes:
    """A digest of how pieces of models of this class are laid out."""
    version = metadata.version("mlx-lm").split(".")[:2]
    return key_of(repr((VERSION, version, class_name, windows)).encode())


def root(weights_digest: bytes, layout: bytes, tenant: str) -> bytes:
    """The key that the sequences of a tenant begin with."""
    return key_of(weights_digest, layout, tenant.encode())
