"""Ids that an answer may copy: where its last ids occurred before, and what followed there.

An agent that edits code repeats most of what it has read: the rest of a file, the context lines of
a patch, an earlier call. What followed the last ids where they occurred before is a *draft* of what
comes next (Yang et al., "Inference with Reference", 2023, https://arxiv.org/abs/2304.04487;
https://github.com/apoorvumang/prompt-lookup-decoding). The model computes all of a draft in one
step, and each id is sampled as if it had been computed alone (`sampler`): a draft changes the speed
of an answer, never its content.

**Look-up.** A hash table maps the last ``GRAM`` ids to the place of their last occurrence, and each
place to the one before it with the same hash: adding an id takes constant time and eight bytes.
Of ``CANDIDATES`` places the one with the longest common text wins. From there, a pointer advances
with the answer while both agree. After a mismatch (an edit), two consecutive ids of the source
within ``NEARBY`` are enough to resume.

**Whether it pays.** Each id that is generated, drafted or not, tells whether the pointer would have
been right: its accuracy is known without trying, for short and long common texts separately. With
the cost of wider steps, which was measured on this machine (`Costs`), that makes the expected ids
per second of every length of draft; the best one may be none.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine.step_costs import Costs

GRAM = 3
"""Length of the text that is looked up, in ids."""

CANDIDATES = 8
"""Earlier places of the same gram that are compared."""

MAX_MATCH = 32
"""Ids of common text that are compared at each of them: as many as the last class of
``PRIOR_ACCURACY`` needs."""

NEARBY = 48
"""Ids after an edit within which the source usually continues."""

AVERAGED_IDS = 64
"""Ids over which the accuracy of the pointer is averaged."""

PRIOR_ACCURACY = (0.6, 0.75, 0.85, 0.9, 0.98)
"""Prior accuracy of the pointer after a match of 2–3, 4–7, 8–15, … ids, measured on the edits of
``benchmarks/bench_speculate.py``."""

PRIOR_IDS = 8.0
"""Weight of this prior, in ids."""

_FACTORS = (0x9E37_79B1, 0x85EB_CA6B, 0xC2B2_AE35)
"""An odd factor for each id of a gram: Knuth's, and those of MurmurHash3's last step."""

_BITS = 16
"""The table has ``2**_BITS`` slots."""


class Drafts:
    """The ids of one sequence so far, ``source`` and then its answer, and what may come next."""

    def __init__(self, source: Sequence[int]) -> None:
        self._ids = array("i", source)
        # As a place, 0 means none: no id precedes it, so that it is never looked up.
        self._table = array("i", bytes(4 << _BITS))
        self._previous_place = array("i", bytes(4 * len(source)))
        self._index()
        self._pointer = 0  # the place from which the next id may be copied
        self._match_length = 0  # ids of common text before the pointer, at least 2
        self._departed_from = 0  # the pointer when it was wrong last
        self._departed_at = 0
        self._hits = [PRIOR_IDS * share for share in PRIOR_ACCURACY]
        self._trials = [PRIOR_IDS] * len(PRIOR_ACCURACY)

    def _index(self) -> None:
        """Enters all ids at once, as ``extend`` would one by one."""
        ids = np.frombuffer(self._ids, dtype=np.int32).astype(np.uint32)
        if len(ids) <= GRAM:
            return
        grams = len(ids) - GRAM
        hashes = np.zeros(grams, dtype=np.uint32)
        for place, factor in enumerate(_FACTORS):
            hashes += ids[place : place + grams] * np.uint32(factor)
        hashes >>= 32 - _BITS
        places = np.arange(GRAM, len(ids), dtype=np.int32)
        order = np.argsort(hashes, kind="stable")
        same = hashes[order[1:]] == hashes[order[:-1]]
        before = np.frombuffer(self._previous_place, dtype=np.int32)
        before[places[order[1:]][same]] = places[order[:-1]][same]
        np.frombuffer(self._table, dtype=np.int32)[hashes] = places

    def extend(self, tokens: Sequence[int]) -> None:
        """Records the next ids of the answer."""
        ids = self._ids
        for token in tokens:
            if at := self._pointer:
                right = ids[at] == token
                match_class = self._match_class
                self._trials[match_class] += 1 - self._trials[match_class] / AVERAGED_IDS
                self._hits[match_class] += right - self._hits[match_class] / AVERAGED_IDS
                self._match_length += 1
                self._pointer = at + 1 if right else 0
                if not right:
                    self._departed_from, self._departed_at = at, len(ids)
            place = len(ids)
            if place >= GRAM:
                slot = self._slot()
                self._previous_place.append(self._table[slot])
                self._table[slot] = place
            else:
                self._previous_place.append(0)
            ids.append(token)
            if not self._pointer and len(ids) > GRAM:
                self._look_up()

    @property
    def _match_class(self) -> int:
        """The index in ``PRIOR_ACCURACY`` of matches that are as long as this one."""
        return min(self._match_length.bit_length() - 2, len(PRIOR_ACCURACY) - 1)

    def _slot(self) -> int:
        """Where the table has the last ``GRAM`` ids."""
        last = self._ids[-GRAM:]
        mixed = sum(factor * token for factor, token in zip(_FACTORS, last, strict=True))
        return (mixed & 0xFFFF_FFFF) >> (32 - _BITS)

    def _look_up(self) -> None:
        ids, place = self._ids, self._table[self._slot()]
        tail = ids[-1 : -1 - MAX_MATCH : -1]
        best = (GRAM - 1, 0)
        for _ in range(CANDIDATES):
            if not place:
                break
            common, most = 0, min(place, len(tail))
            while common < most and ids[place - 1 - common] == tail[common]:
                common += 1
            # Of equals the nearest to where the answer left its source, or else the last.
            score = (common, -abs(place - self._departed_from) if self._departed_from else 0)
            if common >= GRAM and score > best:
                best, self._pointer, self._match_length = score, place, common
            place = self._previous_place[place]
        if not self._pointer and self._departed_from and len(ids) - self._departed_at <= NEARBY:
            first, last = ids[-2:]
            near = self._departed_from
            # The edit may have replaced a little of what precedes the mismatch.
            for place in range(max(2, near - 4), min(near + NEARBY, self._departed_at)):
                if ids[place - 1] == last and ids[place - 2] == first:
                    self._pointer, self._match_length = place, 2
                    break

    def next(self, costs: Costs, most: int) -> list[int]:
        """The ids to try in the next step, no more than ``most``; empty where none would pay.

        No control id is among them: they are few, and each changes what is being written.
        """
        if not self._pointer:
            return []
        accuracy = self._hits[self._match_class] / self._trials[self._match_class]
        draft: list[int] = []
        for _ in range(costs.best_draft_length(accuracy, most)):
            at = self._pointer + len(draft)
            token = self._ids[at] if at < len(self._ids) else draft[at - len(self._ids)]
            if token >= vocab.CONTROL.start:
                break
            draft.append(token)
        return draft
