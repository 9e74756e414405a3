"""Generated turns as bytes with a checksum, for archives outside of memory."""

from __future__ import annotations

import json
from array import array
from itertools import accumulate, pairwise
from zlib import crc32

from vllm_mlx_harmony.core.replay import ASSISTANT_KINDS, GeneratedTurn, shared
from vllm_mlx_harmony.core.turn import Call

_KINDS = {kind.__name__: kind for kind in ASSISTANT_KINDS}

_CRC = 4
"""Bytes of the checksum, which comes first."""


def written(turn: GeneratedTurn) -> bytes:
    """Serializes ``turn``: a checksum, the length of the JSON, the JSON, each id (four bytes,
    in the machine's order)."""
    header = {
        "kinds": [kind.__name__ for kind in turn.kinds],
        "lengths": [len(span) for span in turn.spans],
        "content": turn.content,
        "calls": [[call.id, call.name, call.arguments] for call in turn.calls],
        **({"served": turn.served} if turn.served else {}),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    ids = b"".join(array("I", span).tobytes() for span in turn.spans)
    body = len(text).to_bytes(4, "little") + text + ids
    return crc32(body).to_bytes(_CRC, "little") + body


def read(content: bytes) -> GeneratedTurn | None:
    """The turn in ``content``; ``None`` if the bytes are damaged or from another version."""
    body = content[_CRC:]
    if crc32(body) != int.from_bytes(content[:_CRC], "little"):
        return None
    try:
        length = int.from_bytes(body[:4], "little")
        header = json.loads(body[4 : 4 + length])
        ids = array("I", body[4 + length :])
        places = accumulate(header["lengths"], initial=0)
        return GeneratedTurn(
            tuple(_KINDS[name] for name in header["kinds"]),
            tuple(shared(ids[start:end]) for start, end in pairwise(places)),
            header["content"],
            tuple(Call(*call) for call in header["calls"]),
            header.get("served", ""),
        )
    except (ValueError, KeyError, TypeError):  # written by a version with another format
        return None
