"""The rows of the front end, through a gateway and every kind of engine, over real sockets.

The checks are those of `tests/unit/server/test_front_end.py`, with another host.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("openai")
pytest.importorskip("anthropic")
pytest.importorskip("ollama")


from app_server import run_server
from fake_engines import KINDS, FakeEngine
from front_end_checks import (
    SCRIPTS,
    Loop,
    by_chat,
    by_messages,
    by_ollama,
    by_responses,
    check_events_over_websocket,
    check_rejections,
    check_tool_loop,
    check_tool_loop_in_conversation,
)
from gateway_in_process import MODEL, CountingGateway
from scripted_host import KEY
from starlette.testclient import TestClient

pytestmark = pytest.mark.usefixtures("no_grammars")

URGENT = "It is urgent."

WITHOUT_LOGPROBS = ("sglang", "sglang-incremental", "llamacpp")


@pytest.fixture(params=KINDS)
def host(request: pytest.FixtureRequest) -> Iterator[CountingGateway]:
    """One engine of each kind."""
    engine = FakeEngine(request.param, {**SCRIPTS, URGENT: "B<|return|>"})
    with run_server(engine.app) as url:
        yield CountingGateway(KEY, (engine, url))


@pytest.mark.nightly(sample=5)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tool_loop_in_conversation_continues_where_model_stopped(
    host: CountingGateway, stream: bool
) -> None:
    check_tool_loop_in_conversation(host, stream)


@pytest.mark.nightly(sample=5)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("loop", [by_chat, by_responses, by_messages, by_ollama])
def test_tool_loop_continues_where_model_stopped(
    host: CountingGateway, loop: Loop, stream: bool
) -> None:
    check_tool_loop(host, loop, stream)


@pytest.mark.parametrize("path", ["chat", "responses", "messages"])
def test_rejections_have_the_shape_of_their_api(host: CountingGateway, path: str) -> None:
    check_rejections(host, path)


def test_websocket_sends_valid_events(host: CountingGateway) -> None:
    check_events_over_websocket(host)


def test_decision_has_its_probability(host: CountingGateway) -> None:
    """Of the two labels, only the one that the engine writes is among its likeliest tokens."""
    question = {"type": "predicate", "instructions": URGENT}
    body = {"model": MODEL, "input": "The checkout fails.", "questions": [question] * 3}
    with TestClient(host.app, base_url="http://localhost") as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        response = client.post("/v1/decisions", json=body)
    if host.engine.kind in WITHOUT_LOGPROBS:
        assert response.status_code == 400 and "log probabilities" in response.text
        return
    assert [answer.get("probability") for answer in response.json()["answers"]] == [1.0] * 3, (
        response.text
    )
