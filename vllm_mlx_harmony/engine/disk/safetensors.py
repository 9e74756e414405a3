"""Writes a piece as a safetensors file out of plain memory, and reads it back into it.

The format (https://github.com/huggingface/safetensors#format): the length of the header in 8 bytes,
the header in JSON, the tensors one after the other. Neither mlx nor the library is used, because of
which thread may wait: ``mx.save_safetensors`` takes arrays, which belong to the engine's thread,
and keeps it until the last byte is written; the library copies each tensor; and numpy, between the
two, has no bfloat16. Both read what is written here.
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

WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes of an element, by the format's name of its type."""

SLICE = 1 << 20
"""Bytes that are written, or checked, in one go."""


_DAMAGED = (errno.EIO, errno.EISDIR, errno.ELOOP)
"""Errors that prove that a file is not what was written, or will never be read again."""


class Damaged(ValueError):
    """A file is not what was written."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Elements of type ``dtype`` (a key of ``WIDTHS``) in row-major order, as bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


Tensors: TypeAlias = Mapping[str, Tensor]


def encoded(tensors: Tensors, metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of the file, in slices. Tensors are not copied."""
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
        for start in range(0, tensor.data.nbytes, SLICE):
            yield tensor.data[start : start + SLICE]


def verified(path: Path, size: int, crc: int) -> dict[str, Tensor]:
    """The tensors in a file of ``size`` bytes with the checksum ``crc``.

    Raises ``Damaged`` if it is another file, and ``OSError`` if it cannot be read now.
    """
    at = found = 0
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(opened, "rb", buffering=0) as file:
            view = memoryview(bytearray(size if os.fstat(opened).st_size == size else 0))
            while count := file.readinto(view[at : at + SLICE]):
                found = crc32(view[at : at + count], found)
                at += count
    except OSError as error:
        if error.errno in _DAMAGED:
            raise Damaged(str(error)) from error
        raise
    if at < size or found != crc:
        raise Damaged("its size or its checksum differs")
    return decoded(view)


def decoded(content: memoryview) -> dict[str, Tensor]:
    """The tensors of a file, as parts of its ``content``, whose checksum is right.

    Raises ``Damaged`` for anything but a safetensors file.
    """
    try:
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(bytes(content[8 : 8 + length]))
        header.pop("__metadata__", None)
        body, found = content[8 + length :], {}
        for name, entry in header.items():
            data = body[slice(*entry["data_offsets"])]
            found[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data)
    except (struct.error, ValueError, TypeError, AttributeError, KeyError) as error:
        raise Damaged(f"not a safetensors file: {error}") from error
    return found
