"""The buffer between an answer and its reader: what is read when, and when a writer has to wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette")

from loops import run_in_virtual_time as run

from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server.event_buffer import HIGH_WATER, PIECE, EventBuffer

A, B, C = Event("a"), Event("b"), Event("c")
COMMENT = Event("comment", comment=True)
PING = Event("ping")
CLOSE = None

KIB = 1024


def buffer(capacity: int = 0, ping_seconds: float = 0) -> EventBuffer:
    return EventBuffer(capacity, ping_seconds, lambda: PING)


def sized(kib: int) -> Event:
    return Event("x" * kib * KIB)


def read(events: EventBuffer, count: int) -> None:
    for _ in range(count):
        assert run(events.get()) is not None


READS: dict[str, tuple[float, float, dict[int, Any], list[tuple[int, Event | None]]]] = {
    # ping_seconds, seconds the reader is busy after an event, events by time of put, expected reads
    "nothing": (0, 0, {3: CLOSE}, [(3, None)]),
    "in order": (0, 0, {1: [A, B], 4: [C], 6: CLOSE}, [(1, A), (1, B), (4, C), (6, None)]),
    "nothing is put": (0, 0, {1: [], 2: [A], 3: CLOSE}, [(2, A), (3, None)]),
    "behind": (0, 2, {0: [A, B], 1: CLOSE}, [(0, A), (2, B), (4, None)]),
    "no pings": (0, 0, {0: [A], 900: CLOSE}, [(0, A), (900, None)]),
    "a silence": (5, 0, {0: [A], 12: CLOSE}, [(0, A), (5, PING), (10, PING), (12, None)]),
    "before all": (5, 0, {7: [A], 8: CLOSE}, [(5, PING), (7, A), (8, None)]),
    "since the last event": (5, 0, {3: [A], 9: CLOSE}, [(3, A), (8, PING), (9, None)]),
    "comments": (
        *(5, 0, {0: [A], 3: [COMMENT], 7: [B], 8: CLOSE}),
        [(0, A), (3, COMMENT), (5, PING), (7, B), (8, None)],
    ),
    "an event waits": (5, 6, {0: [A], 1: [B], 2: CLOSE}, [(0, A), (6, B), (12, None)]),
    "an event waits behind a comment": (
        *(5, 6, {0: [A], 1: [COMMENT, B], 2: CLOSE}),
        [(0, A), (6, COMMENT), (12, B), (18, None)],
    ),
    "only a comment waits": (
        *(5, 6, {0: [A], 1: [COMMENT], 8: [B], 9: CLOSE}),
        [(0, A), (6, PING), (12, COMMENT), (18, B), (24, None)],
    ),
    "the end waits": (5, 6, {0: [A], 1: CLOSE}, [(0, A), (6, None)]),
}


@pytest.mark.parametrize(("ping_seconds", "busy", "puts", "reads"), READS.values(), ids=READS)
def test_events_and_pings_are_read_on_time(
    ping_seconds: float, busy: float, puts: Any, reads: Any
) -> None:
    async def test() -> list[tuple[float, Event | None]]:
        clock = asyncio.get_running_loop().time
        events = buffer(ping_seconds=ping_seconds)

        async def write() -> None:
            for at, put in puts.items():
                await asyncio.sleep(at - clock())
                events.close() if put is CLOSE else events.put(put)

        writing = asyncio.ensure_future(write())
        await asyncio.sleep(0)
        timeline: list[tuple[float, Event | None]] = []
        while not events.read_to_end:
            event = await events.get()
            timeline.append((round(clock(), 6), event))
            await asyncio.sleep(busy)
        await writing
        return timeline

    assert run(test()) == reads


def test_discard_cancels_ping_timer() -> None:
    async def test() -> None:
        events = buffer(ping_seconds=5)
        events.put([A])
        assert await events.get() == A
        reading = asyncio.ensure_future(events.get())
        await asyncio.sleep(1)
        events.discard()
        assert await reading is None
        assert events._ping_timer is None

    run(test())


@pytest.mark.parametrize("how", ["put", "close", "discard"])
def test_changed_waits_for_change(how: str) -> None:
    async def test() -> None:
        events = buffer()
        waiting = asyncio.ensure_future(events.changed())
        await asyncio.sleep(1)
        assert not waiting.done()
        events.put([]) if how == "put" else getattr(events, how)()
        await waiting

    run(test())


def test_discarded_buffer_is_empty() -> None:
    events = buffer()
    events.put([A, B])
    events.discard()
    assert (events.bytes, events.readable(), run(events.get())) == (0, [], None)


READABLE: list[tuple[list[int], list[int]]] = [
    # sizes of events in KiB, numbers of events that are sent together
    ([], []),
    ([1, 1, 1], [3]),
    ([20, 20, 20], [2, 1]),
    ([32, 1], [1, 1]),
    ([100, 1, 100], [1, 2]),
]


@pytest.mark.parametrize(("sizes", "pieces"), READABLE)
def test_small_events_are_sent_together(sizes: list[int], pieces: list[int]) -> None:
    assert PIECE == 32 * KIB
    events = buffer()
    events.put(map(sized, sizes))
    counts = []
    while more := events.readable():
        counts.append(len(more))
    assert counts == pieces and events.bytes == 0


CAPACITY: dict[str, tuple[int, list[tuple[int, int]], list[bool]]] = {
    # capacity in KiB, size in KiB of each group and events read before it, whether it is exceeded
    "the first group does not count": (1, [(500, 0)], [False]),
    "what fits": (4, [(500, 0), (4, 0)], [False, False]),
    "one more": (4, [(500, 0), (4, 0), (1, 0)], [False, False, True]),
    "room by reading": (4, [(2, 0), (4, 0), (2, 1), (1, 0)], [False, False, False, True]),
    "read to its end": (4, [(2, 0), (4, 0), (6, 2), (1, 0)], [False, False, False, True]),
    "none": (0, [(2, 0), (0, 0), (1, 0)], [False, False, True]),
}


@pytest.mark.parametrize(("capacity", "groups", "exceeded"), CAPACITY.values(), ids=CAPACITY)
def test_exceeded_capacity_is_reported(
    capacity: int, groups: list[tuple[int, int]], exceeded: list[bool]
) -> None:
    events = buffer(capacity * KIB)
    results = []
    for size, reads in groups:
        read(events, reads)
        events.put([sized(size)])
        results.append(events.exceeds_capacity())
    assert results == exceeded


ROOM: list[tuple[list[int], int | None]] = [
    # sizes of unread events in KiB, number of reads until there is room, or None
    ([], None),
    ([64, 64], None),
    ([64, 64, 64], 2),
    ([129], 1),
    ([1] * 129, 65),
]


@pytest.mark.parametrize(("sizes", "reads"), ROOM)
def test_writer_waits_for_room(sizes: list[int], reads: int | None) -> None:
    async def test() -> int | None:
        assert HIGH_WATER == 128 * KIB
        events = buffer()
        events.put(map(sized, sizes))
        waiting = asyncio.ensure_future(events.room())
        await asyncio.sleep(1)
        count = 0
        while not waiting.done():
            await events.get()
            await asyncio.sleep(1)
            count += 1
        return count or None

    assert run(test()) == reads
