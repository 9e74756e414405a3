"""429 and 503 say when to come back, in the header that the SDKs of OpenAI and Anthropic read."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts test directories nowhere

from fakes import MODEL, Alone, ScriptedEngine
from official_clients import clients
from starlette.exceptions import HTTPException

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.server import generation
from vllm_mlx_harmony.server.queue import queue_before

USER = [{"role": "user", "content": "Hello!"}]


class Refusing(Alone):
    """A host that raises ``refusal`` for each request."""

    refusal: Exception

    async def acquire(self, *_: Any) -> Any:
        raise self.refusal


@asynccontextmanager
async def refusing(refusal: Exception) -> AsyncIterator[Alone]:
    host = Refusing(ScriptedEngine({}))
    host.refusal = refusal
    yield host


@asynccontextmanager
async def full() -> AsyncIterator[Alone]:
    """Every place in the queue is taken."""
    host = Alone(ScriptedEngine({}, one_at_a_time=True))
    queue = queue_before(host.engine)
    queue._places = 0
    async with queue.slot(1.0):
        yield host


@asynccontextmanager
async def ending() -> AsyncIterator[Alone]:
    """The server shuts down."""
    generation.reject_new(HostError("the server is shutting down", code="shutting_down"))
    try:
        yield Alone(ScriptedEngine({}))
    finally:
        generation.reject_new(None)


CAUSES: dict[str, tuple[Callable[[], Any], int, str | None]] = {
    "the queue is full": (full, 503, "5"),
    "the server ends": (ending, 503, "5"),
    "429 without a time": (lambda: refusing(HTTPException(429, "too many")), 429, "5"),
    "429 with a time": (
        lambda: refusing(HTTPException(429, "too many", {"Retry-After": "37"})),
        429,
        "37",
    ),
    "503 of the host": (lambda: refusing(HTTPException(503, "not loaded")), 503, "5"),
    "503 with a time": (lambda: refusing(HostError("busy", retry_after=2)), 503, "2"),
    "404": (lambda: refusing(HTTPException(404, "no such model")), 404, None),
    "500": (lambda: refusing(RuntimeError("a bug")), 500, None),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("cause", "status", "expected"), CAUSES.values(), ids=CAUSES)
def test_a_refusal_says_when_to_come_back(
    cause: Callable[[], Any], status: int, expected: str | None, stream: bool
) -> None:
    async def refused() -> None:
        async with cause() as host:
            openai, anthropic = clients(host)
            asking: list[Any] = [
                openai.chat.completions.create(model=MODEL, messages=USER, stream=stream),
                openai.responses.create(model=MODEL, input="Hello!", stream=stream),
                anthropic.messages.create(model=MODEL, messages=USER, max_tokens=10, stream=stream),
            ]
            for client, request in zip((openai, openai, anthropic), asking, strict=True):
                with pytest.raises(Exception, match=str(status)) as caught:
                    await request
                answer = caught.value.response  # type: ignore[attr-defined]
                assert answer.status_code == status
                assert answer.headers.get("retry-after") == expected
                if expected is not None:
                    read = client._parse_retry_after_header(answer.headers)
                    assert read == float(expected)

    asyncio.run(refused())
