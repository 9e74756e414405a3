"""Generated turns on the disk: what `core.replay` remembers, as bytes with a checksum.

Knows how a turn is written. Refuses to know which turn it is (`core.replay`) and where (`disk`).
"""

from __future__ import annotations

import json
from array import array
from itertools import accumulate, pairwise
from zlib import crc32

from vllm_mlx_harmony.core.replay import Remembered, shared
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    Preamble,
    Reasoning,
    ServerCall,
    ServerResult,
)
from vllm_mlx_harmony.host.kv.disk import Disk

_KINDS = {
    kind.__name__: kind for kind in (Reasoning, Preamble, Answer, Call, ServerCall, ServerResult)
}

_CRC = 4
"""Bytes of the checksum, in front of all else."""


class Turns:
    """The archive of turns on ``disk``; see `core.replay.Archive`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def put(self, key: bytes, turn: Remembered) -> None:
        """Has ``turn`` written."""
        self._disk.put_turn(key, written(turn))

    def get(self, key: bytes) -> Remembered | None:
        """The turn; ``None`` when there is none, or it is not what was written."""
        content = self._disk.turn(key)
        if content is None:
            return None
        turn = read(content)
        if turn is None:
            self._disk.drop_turn(key)
        return turn

    def use(self, key: bytes) -> None:
        """Notes that the turn was used."""
        self._disk.use_turn(key)


def written(turn: Remembered) -> bytes:
    """Checksum, length of what follows, JSON, and the ids of all segments in four bytes each."""
    header = {
        "kinds": [kind.__name__ for kind in turn.kinds],
        "lengths": [len(segment) for segment in turn.segments],
        "content": turn.content,
        "calls": [[call.id, call.name, call.arguments] for call in turn.calls],
        **({"served": turn.served} if turn.served else {}),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    ids = b"".join(array("I", segment).tobytes() for segment in turn.segments)
    body = len(text).to_bytes(4, "little") + text + ids
    return crc32(body).to_bytes(_CRC, "little") + body


def read(content: bytes) -> Remembered | None:
    """The turn that was written; ``None`` when these are not the bytes of one."""
    body = content[_CRC:]
    if crc32(body) != int.from_bytes(content[:_CRC], "little"):
        return None
    try:
        length = int.from_bytes(body[:4], "little")
        header = json.loads(body[4 : 4 + length])
        ids = array("I", body[4 + length :])
        places = accumulate(header["lengths"], initial=0)
        return Remembered(
            tuple(_KINDS[name] for name in header["kinds"]),
            tuple(shared(ids[start:end]) for start, end in pairwise(places)),
            header["content"],
            tuple(Call(*call) for call in header["calls"]),
            header.get("served", ""),
        )
    except (ValueError, KeyError, TypeError):  # from a version that wrote it in another way
        return None
