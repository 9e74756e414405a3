"""The states of an answer: where each trigger leads, and how an answer ends from each state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from loops import run

from vllm_mlx_harmony.core.deltas import Delta, Finished, Started, Usage
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server.answer import TRANSITIONS, Answer, State, Trigger, after
from vllm_mlx_harmony.server.answers import Answers
from vllm_mlx_harmony.server.generation import Job
from vllm_mlx_harmony.server.host import Deadline

TABLE = """
            begin       last_delta  leave     fail     written   released  close
waiting     generating  -           -         failing  -         -         complete
generating  -           finishing   stopping  failing  -         -         complete
finishing   -           -           stopping  -        finished  -         complete
finished    -           -           finished  -        -         complete  complete
stopping    -           -           -         failing  -         complete  complete
failing     -           -           failing   -        complete  -         complete
complete    -           -           complete  -        complete  -         complete
"""
TRIGGERS, *ROWS = [line.split() for line in TABLE.strip().splitlines()]
PAIRS = [
    (State(state), Trigger(trigger), cell)
    for state, *cells in ROWS
    for trigger, cell in zip(TRIGGERS, cells, strict=True)
]


def test_table_covers_all_pairs() -> None:
    assert {(state, trigger) for state, trigger, _ in PAIRS} == {
        (state, trigger) for state in State for trigger in Trigger
    }


@pytest.mark.parametrize(("state", "trigger", "following"), PAIRS)
def test_transitions_match_table(state: State, trigger: Trigger, following: str) -> None:
    if following == "-":
        assert trigger not in TRANSITIONS[state]
        with pytest.raises(RuntimeError, match=f"{state.value}: {trigger.value} is impossible"):
            after(state, trigger)
    else:
        assert after(state, trigger) is State(following)


# --- An answer is paused in each of its states; then it is ended, or its reader leaves.


async def release_nothing() -> None:
    """There is no engine."""


def lease(release: Callable[[], Awaitable[None]] = release_nothing) -> Any:
    return SimpleNamespace(
        engine=SimpleNamespace(remote=False),
        deadline=Deadline(300, time.monotonic() + 300),
        tenant="somebody",
        release=release,
    )


class Held:
    """An answer that pauses in one state: while generating, in its last events or on release."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.gate = asyncio.Event()
        self.released = False
        self.interrupted = False
        self.results: list[str] = []
        self.last: list[str] = []
        tracker: Any = SimpleNamespace(finish=lambda result, _: self.results.append(result))
        job = Job(lease(self._release), None, None, self, stream=True, id_seed="s")  # type: ignore[arg-type]
        job = replace(job, write_last=self._write_last)
        self.answer = Answer(job, tracker, Answers(), announced=True, deltas=self._deltas())

    def feed(self, delta: Delta) -> list[Event]:
        return [Event(type(delta).__name__)]

    def keep_alive(self) -> Event:
        raise AssertionError("nobody waits that long")

    def result(self) -> dict[str, Any]:
        raise AssertionError("it is streamed")

    async def _hold(self, *states: State) -> None:
        if self.state in states:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.interrupted = True
                raise

    async def _deltas(self) -> AsyncGenerator[list[Delta], None]:
        yield [Started(3)]
        await self._hold(State.GENERATING)
        if self.state in (State.STOPPING, State.FAILING):
            raise OutputError("the engine failed")
        yield [Finished("stop", None, Usage(3))]

    async def _write_last(self, delta: Any) -> list[Event]:
        self.last.append(type(delta).__name__)
        await self._hold(State.FINISHING, State.FAILING)
        return [Event("last")]

    async def _release(self) -> None:
        await self._hold(State.STOPPING, State.FINISHED)
        self.released = True


async def wait_for_state(held: Held) -> None:
    while held.answer._state is not held.state:
        await asyncio.sleep(0)


async def ended(held: Held) -> None:
    held.answer.end(OutputError("ended", status=504))


async def closed(held: Held) -> None:
    asyncio.get_running_loop().call_later(0.01, held.gate.set)
    await held.answer.aclose()


async def left(held: Held) -> None:
    """The answer is left alone."""


ENDINGS: list[tuple[State, Callable[[Held], Awaitable[None]], str, list[str], bool]] = [
    # state, action, result in the metrics, last event written, whether the task is cancelled
    (State.WAITING, left, "success", ["Finished"], False),
    (State.WAITING, ended, "timeout", ["Failed"], False),
    (State.WAITING, closed, "client_closed", [], False),
    (State.GENERATING, left, "success", ["Finished"], False),
    (State.GENERATING, ended, "timeout", ["Failed"], True),
    (State.GENERATING, closed, "client_closed", [], True),
    (State.FINISHING, left, "success", ["Finished"], False),
    (State.FINISHING, ended, "success", ["Finished"], False),
    (State.FINISHING, closed, "success", ["Finished"], True),
    (State.FINISHED, left, "success", ["Finished"], False),
    (State.FINISHED, ended, "success", ["Finished"], False),
    (State.FINISHED, closed, "success", ["Finished"], False),
    (State.STOPPING, left, "error", ["Failed"], False),
    (State.STOPPING, ended, "timeout", ["Failed"], False),
    (State.STOPPING, closed, "client_closed", [], False),
    (State.FAILING, left, "error", ["Failed"], False),
    (State.FAILING, ended, "error", ["Failed"], False),
    (State.FAILING, closed, "error", ["Failed"], False),
    (State.COMPLETE, left, "success", ["Finished"], False),
    (State.COMPLETE, ended, "success", ["Finished"], False),
    (State.COMPLETE, closed, "success", ["Finished"], False),
]


@pytest.mark.parametrize(("state", "action", "result", "last", "interrupted"), ENDINGS)
def test_action_in_each_state_has_expected_result(
    state: State,
    action: Callable[[Held], Awaitable[None]],
    result: str,
    last: list[str],
    interrupted: bool,
) -> None:
    async def test() -> None:
        held = Held(state)
        await wait_for_state(held)
        await action(held)
        await asyncio.sleep(0)
        held.gate.set()
        read = [event.data async for event in held.answer]
        await held.answer.aclose()
        for _ in range(9):
            await asyncio.sleep(0)
        assert held.answer._state is State.COMPLETE and held.released
        assert (held.results, held.last, held.interrupted) == ([result], last, interrupted)
        assert (read[-1:] == ["last"]) == (action is not closed)

    run(test())


# --- The last events cannot be written


class FailingEmitter:
    """An emitter that fails at the last delta."""

    def feed(self, delta: Delta) -> list[Event]:
        if isinstance(delta, Finished):
            raise ArithmeticError
        return [Event(type(delta).__name__)]

    def keep_alive(self) -> Event:
        raise AssertionError("nobody waits that long")

    def result(self) -> dict[str, Any]:
        raise AssertionError("the answer has failed")


async def start_failing(*, stream: bool) -> Answer:
    job = Job(lease(), None, None, FailingEmitter(), stream, id_seed="s")  # type: ignore[arg-type]
    tracker: Any = SimpleNamespace(finish=lambda result, _: None)
    return Answer(job, tracker, Answers(), deltas=finishing())


async def finishing() -> AsyncGenerator[list[Delta], None]:
    yield [Started(3)]
    yield [Finished("stop", None, Usage(3))]


def test_stream_without_last_events_ends_with_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        answer = await start_failing(stream=True)
        assert [event.data async for event in answer] == ["Started", "Failed"]

    run(test())
    assert "ArithmeticError" in caplog.text


def test_document_without_last_events_raises_failure() -> None:
    async def test() -> None:
        answer = await start_failing(stream=False)
        with pytest.raises(ArithmeticError):
            await answer.document()

    run(test())
