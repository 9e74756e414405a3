"""The queue before an engine: order, places, time, and nobody's turn lost."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.server.queue import (
    DEFAULT_PLACES,
    PLACES_VARIABLE,
    RETRY_SECONDS,
    Queue,
    places,
    queue_before,
)

LONG = 30.0


class Room:
    """Where one at a time is let in, with a protocol of who came when."""

    def __init__(self, places: int = DEFAULT_PLACES) -> None:
        self.line = Queue(places)
        self.entered: list[str] = []
        self.inside = 0
        self.most_inside = 0

    def visit(self, name: str, stay: float = 0.0, patience: float = LONG) -> asyncio.Task[None]:
        return asyncio.ensure_future(self._visit(name, stay, patience))

    async def _visit(self, name: str, stay: float, patience: float) -> None:
        async with self.line.slot(patience):
            self.entered.append(name)
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            try:
                await asyncio.sleep(stay)
            finally:
                self.inside -= 1


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LONG))


async def settled() -> None:
    """Lets every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def refusal(visit: asyncio.Task[None]) -> HostError:
    error = visit.exception()
    assert isinstance(error, HostError)
    return error


def test_one_at_a_time_in_the_order_they_came() -> None:
    async def test() -> None:
        room = Room()
        names = [f"guest {n}" for n in range(10)]
        await asyncio.gather(*(room.visit(name, stay=0.001) for name in names))
        assert room.entered == names
        assert room.most_inside == 1

    run(test())


@pytest.mark.parametrize("room_for", [0, 1, 3])
def test_a_full_line_refuses_at_once_and_says_when_to_come_back(room_for: int) -> None:
    async def test() -> None:
        room = Room(room_for)
        visits = [room.visit(str(n), stay=0.01) for n in range(room_for + 1)]
        await settled()
        assert room.line.waiting == room_for
        late = room.visit("late")
        await asyncio.wait({late}, timeout=0.005)
        assert (refusal(late).status, refusal(late).retry_after) == (503, RETRY_SECONDS)
        assert refusal(late).code == "queue_full"
        await asyncio.gather(*visits)
        await room.visit("later")  # and then there is room again
        assert room.entered[-1] == "later"

    run(test())


def test_whoever_runs_out_of_time_frees_the_place() -> None:
    async def test() -> None:
        room = Room(1)
        first = room.visit("first", stay=0.05)
        await settled()
        hasty = room.visit("hasty", patience=0.01)
        await asyncio.wait({hasty})
        assert (refusal(hasty).status, refusal(hasty).code) == (504, "timeout")
        assert room.line.waiting == 0
        await asyncio.gather(first, room.visit("next"))
        assert room.entered == ["first", "next"]

    run(test())


def test_whoever_is_cancelled_while_waiting_frees_the_place() -> None:
    async def test() -> None:
        room = Room()
        visits = [room.visit(name, stay=0.01) for name in ("a", "b", "c")]
        await settled()
        visits[1].cancel()
        await asyncio.gather(*visits, return_exceptions=True)
        assert visits[1].cancelled()
        assert room.entered == ["a", "c"]

    run(test())


def test_a_turn_that_comes_just_when_its_owner_is_cancelled_is_passed_on() -> None:
    async def test() -> None:
        room = Room()
        turn = room.line.slot(LONG)
        await turn.__aenter__()
        unlucky, next_one = room.visit("unlucky"), room.visit("next")
        await settled()
        await turn.__aexit__(None, None, None)  # the turn is the unlucky one's now,
        unlucky.cancel()  # who has not run since
        await asyncio.wait({unlucky, next_one})
        assert room.entered == ["next"]
        assert unlucky.cancelled()
        await room.visit("after")

    run(test())


def test_an_error_inside_ends_the_turn() -> None:
    async def fails(room: Room) -> None:
        async with room.line.slot(LONG):
            raise LookupError

    async def test() -> None:
        room = Room()
        with pytest.raises(LookupError):
            await fails(room)
        await room.visit("next")

    run(test())


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_line_ends_empty_and_free(seed: int) -> None:
    """Visits that give up, are cancelled or fail at any moment leave nothing behind."""

    async def test() -> None:
        room = Room(4)
        visits = []
        for n in range(12):
            visits.append(
                room.visit(str(n), stay=(n * seed % 5) / 1000, patience=(n + seed) % 7 / 500)
            )
            await asyncio.sleep((n * 7 + seed) % 3 / 2000)
            if (n + seed) % 3 == 0:
                visits[(n * seed) % len(visits)].cancel()
        await asyncio.gather(*visits, return_exceptions=True)
        assert room.line.waiting == 0
        assert room.most_inside <= 1
        await asyncio.wait_for(room.visit("last"), 1.0)

    run(test())


@pytest.mark.parametrize(
    ("value", "expected"),
    [("7", 7), ("0", 0), ("-3", DEFAULT_PLACES), ("", DEFAULT_PLACES), ("many", DEFAULT_PLACES)],
)
def test_places_are_set_by_the_environment(
    value: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACES_VARIABLE, value)
    assert places() == expected


class Engine:
    """Anything that can be referred to weakly."""


def test_each_engine_has_one_line_and_takes_it_with_it() -> None:
    one, other = Engine(), Engine()
    assert queue_before(one) is queue_before(one)
    assert queue_before(one) is not queue_before(other)
    line = weakref.ref(queue_before(one))
    del one
    gc.collect()
    assert line() is None
