"""429 and 503 have a Retry-After header, which the SDKs of OpenAI and Anthropic read.

An error event on a WebSocket has no headers of its own; Codex reads them from a field ``headers``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")


from official_clients import clients
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine_api.engine import Steps

USER = [{"role": "user", "content": "Hello!"}]


class Refusing(SingleEngineHost):
    """A host that raises ``refusal`` for each request."""

    refusal: Exception

    async def acquire(self, *_: Any) -> Any:
        raise self.refusal


@asynccontextmanager
async def refusing(refusal: Exception) -> AsyncIterator[SingleEngineHost]:
    host = Refusing(ScriptedEngine({}))
    host.refusal = refusal
    yield host


@asynccontextmanager
async def full() -> AsyncIterator[SingleEngineHost]:
    """A host whose engine has a full queue."""

    def generate(*_: Any) -> Steps:
        raise HostError("32 requests are waiting already", code="queue_full")

    engine = ScriptedEngine({})
    engine.generate = generate  # type: ignore[method-assign]
    yield SingleEngineHost(engine)


@asynccontextmanager
async def ending() -> AsyncIterator[SingleEngineHost]:
    """A host that is shutting down."""
    host = SingleEngineHost(ScriptedEngine({}))
    host.answers.reject_new(True)
    yield host


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
def test_rejection_has_retry_after_header(
    cause: Callable[[], Any], status: int, expected: str | None, stream: bool
) -> None:
    async def send_requests() -> None:
        async with cause() as host:
            openai, anthropic = clients(host)
            requests: list[Any] = [
                openai.chat.completions.create(model=MODEL, messages=USER, stream=stream),
                openai.responses.create(model=MODEL, input="Hello!", stream=stream),
                anthropic.messages.create(model=MODEL, messages=USER, max_tokens=10, stream=stream),
            ]
            for client, request in zip((openai, openai, anthropic), requests, strict=True):
                with pytest.raises(Exception, match=str(status)) as caught:
                    await request
                answer = caught.value.response  # type: ignore[attr-defined]
                assert answer.status_code == status
                assert answer.headers.get("retry-after") == expected
                if expected is not None:
                    seconds = client._parse_retry_after_header(answer.headers)
                    assert seconds == float(expected)

    asyncio.run(send_requests())


ONCE_OPEN = {name: cause for name, cause in CAUSES.items() if name != "the server ends"}
"""A server that shuts down opens no WebSocket: it refuses the handshake like any request."""


@pytest.mark.parametrize(("cause", "status", "expected"), ONCE_OPEN.values(), ids=ONCE_OPEN)
def test_websocket_error_event_has_retry_after_header(
    cause: Callable[[], Any], status: int, expected: str | None
) -> None:
    async def check_event() -> None:
        async with cause() as host:
            event = await asyncio.to_thread(_first_event, host)
            assert (event["type"], event["status"]) == ("error", status)
            headers = None if expected is None else {"Retry-After": expected}
            assert event.get("headers") == headers
            assert host.leases == 0

    asyncio.run(check_event())


def _first_event(host: SingleEngineHost) -> Any:
    bearer = {"Authorization": f"Bearer {KEY}", "host": "localhost"}
    create = {"type": "response.create", "model": MODEL, "input": "Hello!"}
    with TestClient(host.app).websocket_connect("/v1/responses", headers=bearer) as socket:
        socket.send_json(create)
        return socket.receive_json()
