"""Whoever looks for what others want cancelled looks on as long as there may be something."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette")

from vllm_mlx_harmony.server import answer, cancellations

ANSWER = ("abc", "somebody")


@pytest.mark.parametrize("when", ["while it looks", "after it looked"])
def test_an_answer_that_begins_at_the_last_look_is_watched(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was prepared just then, and runs when it is looked for again."""
    looks = 0
    cancelled: list[tuple[str, ...]] = []

    def running() -> list[tuple[str, str]]:
        nonlocal looks
        looks += 1
        if looks == 2 and when == "while it looks":
            cancellations.watch()
        return [] if looks < 3 else [ANSWER] if not cancelled else []

    class Loop(asyncio.SelectorEventLoop):
        """Has something else to do while a thread works."""

        def run_in_executor(self, *given: Any) -> Any:  # type: ignore[override]
            if looks == 2 and when == "after it looked":
                cancellations.watch()
            return super().run_in_executor(*given)

    async def test() -> None:
        cancellations.watch()
        watching = cancellations._watching
        assert watching is not None
        await asyncio.wait_for(watching, 5)

    monkeypatch.setattr(cancellations, "BEAT", 0.001)
    monkeypatch.setattr(cancellations, "server_shared", lambda: "a Redis")
    monkeypatch.setattr(cancellations, "_watching", None)
    monkeypatch.setattr(cancellations, "_requested", lambda shared, answers: list(answers))
    monkeypatch.setattr(answer, "running", running)
    monkeypatch.setattr(answer, "cancel", lambda *answer: cancelled.append(answer))
    loop = Loop()
    try:
        loop.run_until_complete(test())
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    assert cancelled == [ANSWER]
