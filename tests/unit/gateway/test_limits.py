"""The limits of API keys: what counts, what is rejected, and what clients get to know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

import httpx
import openai
from app_server import run_server
from fake_engines import FakeEngine
from gateway_in_process import MODEL
from waiting import wait_until
from websockets.sync.client import connect

from vllm_mlx_harmony.gateway import access_log, app
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.limits import DAY, Counts, KeyLimits, Quota, digest, headers
from vllm_mlx_harmony.gateway.settings import GatewaySettings, Key
from vllm_mlx_harmony.server.app import application

SCRIPTS = {"Hello": "<|channel|>final<|message|>Good day to you.<|return|>"}
CHAT = "/v1/chat/completions"
APIS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50},
}
CREATE = json.dumps({"type": "response.create", "model": MODEL, "input": "Hello"})
MIDNIGHT = 500.0 * DAY
"""The beginning of a day, and of a minute."""


# --- Counting

PER_MINUTE, PER_DAY = Quota("requests", 60, 4, 1), Quota("requests", DAY, 4, 1)


@pytest.mark.parametrize(
    ("counter", "rows"),
    [
        (PER_MINUTE, [(10, 3, 0), (10, 2, 0), (10, 1, 0), (10, 0, 0), (10, 0, 60)]),
        # Half of the four requests of the previous minute count: there is room for two.
        (PER_MINUTE, [*[(10, None, 0)] * 4, (90, 1, 0), (90, 0, 0), (90, 0, 15), (300, 3, 0)]),
        (PER_DAY, [*[(10, None, 0)] * 4, (70, 0, DAY - 70), (DAY - 1, 0, 1), (DAY, 3, 0)]),
        (Quota("tokens", 60, 4, 0), [(10, 4, 0), (10, 4, 0)]),
        (Quota("tokens", 60, 4, 3), [(10, 1, 0), (10, 0, 60)]),
        (Quota("tokens", DAY, 4, 4), [(10, 0, DAY - 10)]),
    ],
    ids=["full", "sliding", "day", "no tokens", "tokens", "tokens of a day"],
)
def test_quota_limits_requests_and_tokens(
    counter: Quota, rows: list[tuple[float, int | None, float]]
) -> None:
    """Each row: the second, what remains after it, and how long to wait. Requests that have to wait
    are not counted, as in the gateway."""
    counts, back = Counts(), Quota(counter.unit, counter.seconds, counter.limit, -counter.amount)
    for second, remaining, wait in rows:
        (budget,) = counts.add("a", [counter], MIDNIGHT + second)
        assert remaining is None or (budget.remaining, pytest.approx(budget.wait)) == (
            remaining,
            wait,
        )
        if budget.wait and counter.unit == "requests":
            counts.add("a", [back], MIDNIGHT + second)
    assert counts.add("b", [PER_MINUTE], MIDNIGHT)[0].remaining == 3


@pytest.mark.parametrize("limit", [1, 2, 7, 100])
@pytest.mark.parametrize("unit", ["requests", "tokens"])
@pytest.mark.parametrize("seconds", [60, DAY])
def test_waiting_as_long_as_retry_after_is_enough(limit: int, unit: Any, seconds: int) -> None:
    """Limits per day need one wait, those per minute at most two: SDKs retry no more often."""
    now, counts = MIDNIGHT + 0.37 * seconds, Counts()

    def wait(amount: int) -> float:
        return counts.add("a", [Quota(unit, seconds, limit, amount)], now)[0].wait

    for _ in range(3 * limit):
        waits = 0
        while delay := wait(1 if unit == "requests" else 0):
            wait(-1 if unit == "requests" else 0)
            now, waits = now + delay + 1e-6, waits + 1
            assert delay <= seconds
        assert waits <= (2 if seconds == 60 else 1)
        now += 0.001
        if unit == "tokens":
            wait(3)


@pytest.mark.parametrize(
    ("limits", "now", "expected"),
    [
        ({}, 0, {}),
        ({"concurrent_requests": 3}, 0, {}),
        (
            {"requests_per_minute": 60},
            15,
            {"limit-requests": "60", "remaining-requests": "59", "reset-requests": "45s"},
        ),
        (  # the smaller of the two
            {"requests_per_minute": 60, "requests_per_day": 10, "tokens_per_day": 1000},
            15,
            {
                "limit-requests": "10",
                "remaining-requests": "9",
                "reset-requests": "23h59m45s",
                "limit-tokens": "1000",
                "remaining-tokens": "1000",
                "reset-tokens": "23h59m45s",
            },
        ),
        (
            {"requests_per_day": 10},
            DAY - 90,
            {"limit-requests": "10", "remaining-requests": "9", "reset-requests": "1m30s"},
        ),
    ],
)
def test_headers_have_the_limit_that_is_reached_first(
    limits: dict[str, int], now: float, expected: dict[str, str]
) -> None:
    budgets = Counts().add("a", KeyLimits(**limits).quotas(requests=1), MIDNIGHT + now)
    sent = {name.decode(): value.decode() for name, value in headers(budgets)}
    assert sent == {f"x-ratelimit-{name}": value for name, value in expected.items()}


# --- A gateway


@contextmanager
def limited_gateway(engine: FakeEngine, log: Any = "off", **limits: int) -> Iterator[str]:
    """A gateway with the ``limits`` for the key ``key-of-alice`` and none for ``key-of-bob``."""
    keys = (Key("alice", digest("key-of-alice"), limits), Key("bob", digest("key-of-bob")))
    with ExitStack() as stack:
        url = stack.enter_context(run_server(engine.app))
        settings = GatewaySettings(
            engines=(Spec(url),), model=MODEL, keys=keys, access_log=log, metrics_by_key=True
        )
        yield stack.enter_context(run_server(gateway(settings)))


def ask(base: str, path: str = CHAT, key: str = "key-of-alice", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, **APIS[path], **fields}
    header = {"Authorization": f"Bearer {key}"}
    return httpx.post(base + path, json=body, headers=header, timeout=180)


@pytest.mark.nightly(sample=5)
@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("limits", "served_first", "problem"),
    [
        ({"requests_per_minute": 2}, 2, "2 requests per minute"),
        ({"requests_per_day": 1, "requests_per_minute": 9}, 1, "1 requests per day"),
        ({"tokens_per_minute": 10}, 1, "10 tokens per minute"),
        ({"tokens_per_day": 150, "tokens_per_minute": 10**6}, 2, "150 tokens per day"),
    ],
)
def test_key_has_limits_of_its_own(
    path: str, limits: dict[str, int], served_first: int, problem: str
) -> None:
    with limited_gateway(FakeEngine("vllm", SCRIPTS), **limits) as base:
        answers = [ask(base, path) for _ in range(served_first + 1)]
        assert [answer.status_code for answer in answers] == [200] * served_first + [429]
        refused = answers[-1]
        assert refused.json()["error"]["message"] == f"Rate limit exceeded ({problem})"
        seconds = int(refused.headers["retry-after"])
        assert 0 < seconds <= (120 if "minute" in problem else DAY)
        # SDKs would ignore a longer wait, and try again within a second.
        assert refused.headers.get("x-should-retry") == ("false" if seconds > 60 else None)
        assert [ask(base, path, "key-of-bob").status_code for _ in range(3)] == [200] * 3


def test_concurrent_answers_are_limited() -> None:
    engine = FakeEngine("vllm", SCRIPTS, held=True)
    with limited_gateway(engine, concurrent_requests=2) as base, ThreadPoolExecutor() as threads:
        running = [threads.submit(ask, base, stream=stream) for stream in (True, False)]
        wait_until(lambda: engine.running == 2, "two answers to run")
        refused = ask(base)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) < 60
        assert "2 concurrent requests" in refused.json()["error"]["message"]
        others = threads.submit(ask, base, key="key-of-bob")
        wait_until(lambda: engine.running == 3, "an answer for another key")
        engine.held = False
        assert others.result().status_code == 200
        assert [future.result().status_code for future in running] == [200, 200]
        assert [ask(base).status_code for _ in range(5)] == [200] * 5


def test_answer_of_vanished_client_is_not_counted() -> None:
    """Invalid requests are not counted either."""
    engine = FakeEngine("vllm", SCRIPTS, held=True)
    with limited_gateway(engine, concurrent_requests=1) as base:
        for _ in range(3):
            body = {"model": MODEL, **APIS[CHAT], "stream": True}
            header = {"Authorization": "Bearer key-of-alice"}
            with httpx.stream(
                "POST", base + CHAT, json=body, headers=header, timeout=180
            ) as stream:
                next(stream.iter_lines())
            wait_until(lambda: engine.running == 0, "the engine to be free")
            wait_until(lambda: ask(base, messages="nonsense").status_code == 400, "room")
        engine.held = False
        wait_until(lambda: ask(base).status_code == 200, "room")


def test_stored_response_is_readable_beyond_the_limit() -> None:
    with limited_gateway(FakeEngine("vllm", SCRIPTS), tokens_per_day=1) as base:
        stored = ask(base, "/v1/responses").json()["id"]
        assert ask(base, "/v1/responses").status_code == 429
        header = {"Authorization": "Bearer key-of-alice"}
        fetched = httpx.get(f"{base}/v1/responses/{stored}", headers=header, timeout=180)
        assert (fetched.status_code, fetched.json()["status"]) == (200, "completed")


def test_openai_client_reads_the_headers() -> None:
    limits = {"requests_per_minute": 5, "tokens_per_minute": 1000}
    with limited_gateway(FakeEngine("vllm", SCRIPTS), **limits) as base:
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="key-of-alice", max_retries=0)
        create: Any = client.chat.completions.with_raw_response.create
        remaining = []
        for stream in (False, True):
            answer = create(model=MODEL, **APIS[CHAT], stream=stream)
            for _ in answer.parse() if stream else ():
                pass
            name = "x-ratelimit-remaining-"
            remaining.append([int(answer.headers[name + unit]) for unit in ("requests", "tokens")])
        assert [requests for requests, _ in remaining] == [4, 3]
        assert remaining[0][1] == 1000 > remaining[1][1] > 800
        client.chat.completions.create(model=MODEL, **APIS[CHAT])
        for _ in range(2):
            create(model=MODEL, **APIS[CHAT])
        with pytest.raises(openai.RateLimitError, match="5 requests per minute"):
            create(model=MODEL, **APIS[CHAT])
        assert "x-ratelimit-limit-requests" not in ask(base, key="key-of-bob").headers


def test_websocket_is_limited_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", access_log.logger.name)
    limits = {"requests_per_minute": 2}
    with limited_gateway(FakeEngine("vllm", SCRIPTS), "json", **limits) as base:
        header = {"Authorization": "Bearer key-of-alice"}
        with connect(f"ws{base[4:]}/v1/responses", additional_headers=header) as socket:
            ends = []
            for _ in range(3):
                socket.send(
                    json.dumps({"type": "response.create", "model": MODEL, "input": "Hello"})
                )
                event = json.loads(socket.recv(180))
                while event["type"] not in ("response.completed", "error"):
                    event = json.loads(socket.recv(180))
                ends.append(event)
        assert [last["type"] for last in ends] == ["response.completed"] * 2 + ["error"]
        assert ends[-1]["status"] == 429 and int(ends[-1]["headers"]["Retry-After"]) > 0
        metrics = httpx.get(f"{base}/metrics", timeout=180).text
    lines = [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == access_log.logger.name  # an earlier test's session may be collected now
    ]
    assert [(line["method"], line["key"], line["status"], line["result"]) for line in lines] == [
        *[("WEBSOCKET", "alice", 101, "success")] * 2,
        ("WEBSOCKET", "alice", 429, None),
    ]
    assert all(line["output"] > 0 for line in lines[:2])
    used = sum(line["output"] for line in lines)
    counted = re.findall(r'generation_tokens_total{channel="\w+",key="alice"} (.*)', metrics)
    assert len(counted) == 3 and sum(map(float, counted)) == used
    assert 'key="alice",result="success",stream="true"} 2.0' in metrics


def test_metrics_have_no_keys_by_default() -> None:
    with ExitStack() as stack:
        url = stack.enter_context(run_server(FakeEngine("vllm", SCRIPTS).app))
        keys = (Key("alice", digest("key-of-alice")),)
        settings = GatewaySettings(engines=(Spec(url),), model=MODEL, keys=keys)
        base = stack.enter_context(run_server(gateway(settings)))
        assert ask(base).status_code == 200
        metrics = httpx.get(f"{base}/metrics", timeout=180).text
    assert 'generation_tokens_total{channel="content"}' in metrics and "alice" not in metrics


def test_revoked_key_is_rejected_on_an_open_websocket() -> None:
    engine = FakeEngine("vllm", SCRIPTS)
    alice, bob = Key("alice", digest("key-of-alice")), Key("bob", digest("key-of-bob"))
    with ExitStack() as stack:
        url = stack.enter_context(run_server(engine.app))
        settings = GatewaySettings(engines=(Spec(url),), model=MODEL, keys=(alice, bob))
        host = app.Gateway(settings)
        base = stack.enter_context(run_server(app._GatewayApp(host, application(host))))
        header = {"Authorization": "Bearer key-of-alice"}
        with connect(f"ws{base[4:]}/v1/responses", additional_headers=header) as socket:
            host.reload(GatewaySettings(engines=(Spec(url),), model=MODEL, keys=(bob,)))
            socket.send(CREATE)
            assert json.loads(socket.recv(180))["status"] == 401
    assert not engine.prompts


def test_without_keys_all_clients_share_a_limit() -> None:
    """A header that nobody checks gives nobody a limit of its own."""
    with ExitStack() as stack:
        url = stack.enter_context(run_server(FakeEngine("vllm", SCRIPTS).app))
        settings = GatewaySettings(engines=(Spec(url),), model=MODEL, requests_per_minute=2)
        base = stack.enter_context(run_server(gateway(settings)))
        assert [ask(base, key=key).status_code for key in "abc"] == [200, 200, 429]
