"""Which ids are drafted for an answer, without a model."""

from __future__ import annotations

import random
import time

import pytest

pytest.importorskip("mlx_lm")  # the rest of the directory needs it

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine.drafts import Drafts
from vllm_mlx_harmony.engine.step_costs import ASSUMED, Costs

FREE = Costs((1, 2, 4, 8, 16), (1.0,) * 5)
WORDS = list(range(100, 160))

ROWS = [
    ("nothing occurred before", WORDS, [7, 8, 9], []),
    ("a copy", WORDS, WORDS[10:14], WORDS[14:29]),
    ("two ids are not enough", WORDS, WORDS[10:12], []),
    ("the last of several", [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 9], [1, 2, 3], [6, 7, 9, 1, 2, 3]),
    ("the longest of several", [8, 1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7], [8, 1, 2, 3], [4, 5, 9]),
    ("an id is replaced", WORDS, [*WORDS[:9], 7, *WORDS[10:12]], WORDS[12:27]),
    ("an id is inserted", WORDS, [*WORDS[:9], 7, *WORDS[9:11]], WORDS[11:26]),
    ("some are left out", WORDS, [*WORDS[:9], *WORDS[15:17]], WORDS[17:32]),
    ("the answer repeats itself", [50], [1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 3]),
    ("control ids are not drafted", [1, 2, 3, 4, vocab.END, 5], [1, 2, 3], [4]),
    ("an empty prompt", [], [1, 2], []),
]


@pytest.mark.parametrize(
    ("source", "answer", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_draft_continues_best_match(
    source: list[int], answer: list[int], expected: list[int]
) -> None:
    drafts = Drafts(source)
    drafts.extend(answer)
    assert drafts.next(FREE, 15)[: len(expected)] == expected[:15]
    assert bool(drafts.next(FREE, 15)) is bool(expected)
    assert drafts.next(FREE, 1) == expected[:1]
    assert drafts.next(FREE, 0) == []


def test_prompt_is_indexed_as_single_ids() -> None:
    luck = random.Random(3)
    for length in (0, 1, 3, 4, 5, 50, 400):
        ids = [luck.randrange(1, 9) for _ in range(length)]
        whole, single = Drafts(ids), Drafts([])
        single.extend(ids)
        more = [luck.randrange(1, 9) for _ in range(5)]
        whole.extend(more)
        single.extend(more)
        assert whole._ids == single._ids
        assert whole._table == single._table
        assert whole._previous_place == single._previous_place


@pytest.mark.parametrize(
    ("seconds", "accuracy", "most", "expected"),
    [
        ((1.0, 1.1, 1.2, 1.4, 1.8), 0.98, 15, 15),
        ((1.0, 1.1, 1.2, 1.4, 1.8), 0.98, 14, 7),
        ((1.0, 1.1, 1.2, 1.4, 1.8), 0.5, 15, 3),
        ((1.0, 1.1, 1.2, 1.4, 1.8), 0.05, 15, 0),
        ((1.0, 1.1, 1.2, 1.4, 1.8), 1.0, 15, 15),
        ((1.0, 2.0, 4.0, 8.0, 16.0), 0.99, 15, 0),  # where steps cost as much as their ids
        ((1.0, 2.0, 2.0, 2.0, 2.0), 0.9, 15, 15),
    ],
)
def test_draft_is_as_long_as_pays(
    seconds: tuple[float, ...], accuracy: float, most: int, expected: int
) -> None:
    assert Costs((1, 2, 4, 8, 16), seconds).best_draft_length(accuracy, most) == expected


@pytest.mark.parametrize(
    ("costs", "most", "expected"),
    [
        (Costs(), 15, 0),
        (ASSUMED, 15, 15),
        (ASSUMED, 3, 3),
        (FREE, 15, 15),
        (Costs((1, 2, 4, 8, 16), (1.0, 2.0, 4.0, 8.0, 16.0)), 15, 15),
        (Costs((1, 2, 4, 8, 16), (1.0, 1.9, 4.1, 8.2, 16.3)), 15, 1),
        (Costs((1, 2, 4), (1.0, 2.5, 3.0)), 15, 3),
        (Costs((1, 2, 4), (1.0, 4.0, 16.0)), 15, 0),
    ],
)
def test_known_ids_are_computed_together_where_faster(
    costs: Costs, most: int, expected: int
) -> None:
    assert costs.max_known_ids(most) == expected


def test_misleading_source_is_dropped() -> None:
    """Its accuracy is known although no draft was tried."""
    costs = Costs((1, 2, 4, 8, 16), (1.0, 1.3, 1.5, 1.9, 2.6))
    source, luck = list(range(100, 5000)), random.Random(1)
    drafts = Drafts([*WORDS, *source])
    for _ in range(100):  # three ids of the source, then another one
        at = luck.randrange(100, 4000)
        drafts.extend([*source[at : at + 3], 7 + luck.randrange(50)])
    drafts.extend(WORDS[10:13])
    assert drafts.next(costs, 15) == []
    drafts.extend(WORDS[13:40])  # a longer copy is another matter
    assert drafts.next(costs, 15) == WORDS[40:55]


@pytest.mark.once
def test_time_and_memory_per_id_are_constant() -> None:
    """In the worst cases: equal ids, or two at random."""
    luck = random.Random(2)
    for ids in ([5] * 100_000, [luck.randrange(2) for _ in range(100_000)]):
        times = []
        for length in (1_000, 100_000):
            drafts, started = Drafts(ids[:length]), time.process_time()
            drafts.extend(ids[:2_000])
            drafts.next(FREE, 15)
            times.append(time.process_time() - started)
            assert drafts._table.itemsize * len(drafts._table) <= 1 << 18
        assert times[1] < 5 * times[0] + 0.05
