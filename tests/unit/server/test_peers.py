"""A server sends heartbeats as long as it has answers that other servers may cancel."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette")

from vllm_mlx_harmony.server.answers import AnswerKey, Answers
from vllm_mlx_harmony.server.peers import directory as answer_directory
from vllm_mlx_harmony.server.peers.directory import Command, Heartbeat

ANSWER = AnswerKey("abc", "somebody")


@pytest.mark.parametrize("when", ["during a heartbeat", "after a heartbeat"])
def test_answer_between_heartbeats_can_be_cancelled(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is begun at that moment, and runs at the next heartbeat."""
    beats = 0
    cancelled: list[AnswerKey] = []

    class Directory:
        def beat(self, running: list[Any], background: Any) -> dict[Any, Command]:
            return dict.fromkeys(running, Command.CANCEL)

        def ended(self, name: Any) -> None:
            assert name == ANSWER

    class ObservedAnswers(Answers):
        @property
        def running(self) -> list[AnswerKey]:
            nonlocal beats
            beats += 1
            if beats == 2 and when == "during a heartbeat":
                heartbeat.answer_begins()
            return [] if beats < 3 else [ANSWER] if not cancelled else []

        def cancel(self, key: AnswerKey) -> bool:
            cancelled.append(key)
            return True

    directory: Any = Directory()
    heartbeat = Heartbeat(directory, ObservedAnswers())

    class Loop(asyncio.SelectorEventLoop):
        """Begins the answer while a thread sends the heartbeat."""

        def run_in_executor(self, *arguments: Any) -> Any:  # type: ignore[override]
            if beats == 2 and when == "after a heartbeat":
                heartbeat.answer_begins()
            return super().run_in_executor(*arguments)

    async def test() -> None:
        heartbeat.answer_begins()
        assert heartbeat._task is not None
        await asyncio.wait_for(heartbeat._task, 60)

    monkeypatch.setattr(answer_directory, "REPORT_SECONDS", 0.001)
    loop = Loop()
    try:
        loop.run_until_complete(test())
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    assert cancelled == [ANSWER]
