"""Where a prompt is cut into pieces: the places at which another prompt may leave it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from vllm_mlx_harmony.core import vocab

SHORTEST = 32
"""Fewest ids of a piece, as a rule: each piece costs a pass of its own."""


def boundaries(ids: Sequence[int], after: int = 0) -> list[int]:
    """Where a prompt is cut, ascending: the places behind ``after``, up to before its last id.

    Behind the system and developer messages, which conversations share; before the last message of
    the user, which may be edited; before the last id, so that the prompt can be repeated, and since
    a later turn may drop the reasoning that follows (semantics A6). No piece is too short to be
    worth a pass, except that the one after the system and developer messages may be.
    """
    last = len(ids) - 1
    found, before = [], after
    system, developer, user = (vocab.encode(role)[0] for role in ("system", "developer", "user"))
    others = (place for place, role in _messages(ids) if role not in (system, developer))
    preamble = next(others, 0)
    asked = max((place for place, role in _messages(ids, after) if role == user), default=0)
    for place in sorted({preamble, asked}):
        rest = 1 if place == preamble else SHORTEST
        if before + SHORTEST <= place <= last - rest:
            found.append(place)
            before = place
    return [*found, last] if last > after else found


def _messages(ids: Sequence[int], after: int = 0) -> Iterator[tuple[int, int]]:
    """Where each message begins, and the first id of its role."""
    place = after - 1
    with suppress(ValueError):  # no message is left
        while True:
            place = ids.index(vocab.START, place + 1, len(ids) - 1)
            yield place, ids[place + 1]
