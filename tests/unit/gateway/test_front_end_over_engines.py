"""The rows of the front end, through a gateway and every kind of engine, over real sockets.

The tests are those of `tests/unit/server/test_front_end.py`, with another host.
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
from gateway_in_process import MODEL, Watched
from starlette.testclient import TestClient
from test_conversations import test_a_tool_loop_in_a_conversation  # noqa: F401
from test_front_end import (  # noqa: F401
    KEY,
    SCRIPTS,
    test_a_tool_loop,
    test_refusals_have_the_shape_of_their_api,
    test_the_same_events_over_a_websocket,
)

pytestmark = pytest.mark.usefixtures("no_grammars")

URGENT = "It is urgent."

WITHOUT_LOGPROBS = ("sglang", "sglang-incremental", "llamacpp")


@pytest.fixture(params=KINDS)
def host(request: pytest.FixtureRequest) -> Iterator[Watched]:
    """One engine of each kind."""
    engine = FakeEngine(request.param, {**SCRIPTS, URGENT: "B<|return|>"})
    with run_server(engine.app) as url:
        yield Watched(KEY, (engine, url))


def test_decision_has_its_probability(host: Watched) -> None:
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
