"""Writes a piece as a safetensors file out of plain memory, and reads the file back, verified.

The format (https://github.com/huggingface/safetensors#format): the length of the header in 8 bytes,
the header in JSON, the tensors one after the other. ``mx.save_safetensors`` would keep the engine's
thread, to which arrays belong, until the last byte is written; the library copies each tensor.
``mx.load`` reads it (`pieces.imported`).
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

_DAMAGED = (errno.EIO, errno.EISDIR, errno.ELOOP)
"""Errors that prove that a file is not what was written, or will never be read again."""


class Damaged(ValueError):
    """A file is not what was written."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Elements of type ``dtype`` (a name of the format: ``BF16``) in row-major order, as bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


Tensors: TypeAlias = Mapping[str, Tensor]


def encoded(tensors: Tensors, metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of the file, in slices of a megabyte. Tensors are not copied."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at an aligned address
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        for start in range(0, tensor.data.nbytes, 1 << 20):
            yield tensor.data[start : start + (1 << 20)]


def verified(path: Path, size: int, crc: int) -> bytes:
    """The content of a file of ``size`` bytes with the checksum ``crc``.

    Raises ``Damaged`` if it is another file, and ``OSError`` if it cannot be read now.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(size + 1)
    except OSError as error:
        if error.errno in _DAMAGED:
            raise Damaged(str(error)) from error
        raise
    if len(content) != size or crc32(content) != crc:
        raise Damaged("its size or its checksum differs")
    return content
