"""The endpoint for token ids: off by default; if it is on, it has what a gateway needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sse import documents

pytest.importorskip("starlette")
pytest.importorskip("httpx")

import httpx
from harmony_text import ids_of
from loops import run
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient
from waiting import wait_until_async

from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Step, Steps
from vllm_mlx_harmony.server.ids import ID_ENDPOINT_VARIABLE, PATH

SCRIPT = "<|channel|>final<|message|>Good day.<|return|>"
SETTINGS = {"max_tokens": 100, "temperature": 0.0, "top_p": 1.0}
PROMPT = list(ids_of("<|start|>user<|message|>Hello!<|end|><|start|>assistant"))


class Waits(ScriptedEngine):
    """Generates one id, once ``until`` is true."""

    def __init__(self, scripts: dict[str, str], until: Callable[[], bool]) -> None:
        super().__init__(scripts)
        self._until = until

    async def generate(self, request: GenerationRequest) -> Steps:
        while not self._until():
            await asyncio.sleep(0.01)
        yield Step(ids_of("<|return|>"), "stop")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SingleEngineHost:
    """A server with the endpoint."""
    monkeypatch.setenv(ID_ENDPOINT_VARIABLE, "1")
    return SingleEngineHost(ScriptedEngine({"Hello!": SCRIPT}))


def client(host: SingleEngineHost) -> TestClient:
    test_client = TestClient(host.app, base_url="http://localhost")
    test_client.headers["Authorization"] = f"Bearer {KEY}"
    return test_client


def test_endpoint_is_off_by_default(
    host: SingleEngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ID_ENDPOINT_VARIABLE)
    body = {"prompt": PROMPT, "settings": SETTINGS}
    for answer in (client(host).get(PATH), client(host).post(PATH, json=body)):
        assert answer.status_code == 404
        assert ID_ENDPOINT_VARIABLE in answer.json()["error"]["message"]
    assert host.leases == 0


@pytest.mark.parametrize("requested", [False, True])
def test_origins_are_sent_on_request(host: SingleEngineHost, requested: bool) -> None:
    class Reporting(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> Steps:
            async for step in super().generate(request):
                yield step._replace(origins="m" * len(step.ids) if request.settings.origins else "")

    host.engine = Reporting({"Hello!": SCRIPT}, at_once=2)
    settings = {**SETTINGS, "origins": True} if requested else SETTINGS
    answer = client(host).post(PATH, json={"model": MODEL, "prompt": PROMPT, "settings": settings})
    for event in documents(answer.text):
        assert event.get("origins", "") == "m" * len(event["ids"]) * requested


def test_all_generated_ids_are_sent(host: SingleEngineHost) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "settings": SETTINGS}
    answer = client(host).post(PATH, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    stream = documents(answer.text)
    assert tuple(token for event in stream for token in event["ids"]) == ids_of(SCRIPT)
    assert [event["finish"] for event in stream if event["finish"]] == ["stop"]
    assert host.engine.prompts == [tuple(PROMPT)]  # type: ignore[attr-defined]
    assert (host.leases, host.trackers[0].results[0]) == (0, "success")


def test_token_limit_finishes_with_length(host: SingleEngineHost) -> None:
    body = {"prompt": PROMPT, "settings": {**SETTINGS, "max_tokens": 3}}
    stream = documents(client(host).post(PATH, json=body).text)
    assert stream[-1]["finish"] == "length"
    assert tuple(token for event in stream for token in event["ids"]) == ids_of(SCRIPT)[:3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": "text"}, "prompt"),
        ({"prompt": [300_000]}, "prompt"),
        ({"settings": {}}, "settings.max_tokens"),
        ({"settings": {**SETTINGS, "max_tokens": "many"}}, "settings.max_tokens"),
        ({"settings": {**SETTINGS, "prediction": [5, 2**31]}}, "settings.prediction"),
        ({"settings": {**SETTINGS, "prediction": [-1]}}, "settings.prediction"),
        ({"settings": {**SETTINGS, "prediction": [5] * 131_073}}, "settings.prediction"),
        ({"settings": {**SETTINGS, "logit_bias": [[1.5, 1.0]]}}, "settings.logit_bias[0][0]"),
        ({"settings": {**SETTINGS, "logit_bias": [[1]]}}, "settings.logit_bias[0][1]"),
        ({"messages": []}, "messages"),
        ({"grammar": "start: ("}, "grammar"),
        ({"model": "nobody"}, "model"),
    ],
)
def test_invalid_field_is_named(host: SingleEngineHost, fields: dict[str, Any], param: str) -> None:
    body = {"prompt": PROMPT, "settings": SETTINGS, **fields}
    answer = client(host).post(PATH, json=body)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param
    assert (host.leases, host.trackers) == (
        0,
        [],
    )  # a tracker that never finishes would count as running


def test_endpoint_requires_key_and_identifies_itself(host: SingleEngineHost) -> None:
    assert "harmony" in client(host).get(PATH).json()
    without = TestClient(host.app, base_url="http://localhost")
    assert without.get(PATH).status_code == 401
    assert without.post(PATH, json={}).status_code == 401


MANY = 100_000


@pytest.mark.parametrize("limit", ["", "60000"], ids=["by default", "as the operator wants"])
def test_prompt_may_fill_context(
    host: SingleEngineHost, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of 50,000 JSON values in a body does not include the ids of a prompt."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_MAX_VALUES", limit)
    host.engine.context_length = 131_072  # type: ignore[misc]
    prompt = [PROMPT[0]] * (MANY - len(PROMPT)) + PROMPT
    answer = client(host).post(PATH, json={"prompt": prompt, "settings": SETTINGS})
    assert answer.status_code == 200
    assert host.engine.prompts == [tuple(prompt)]  # type: ignore[attr-defined]
    too_long = client(host).post(PATH, json={"prompt": prompt * 2, "settings": SETTINGS})
    assert too_long.status_code == 400


def test_prediction_is_passed_on_and_counted(host: SingleEngineHost) -> None:
    predictions: list[tuple[int, ...]] = []

    class Predicting(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> Steps:
            predictions.append(request.settings.prediction)
            async for step in super().generate(request):
                yield step._replace(accepted=2, rejected=1)

    host.engine = Predicting({"Hello!": SCRIPT}, context_length=131_072)
    predicted = [5] * MANY
    prompt = [PROMPT[0]] * (MANY - len(PROMPT)) + PROMPT
    body = {"prompt": prompt, "settings": {**SETTINGS, "prediction": predicted}}
    for event in documents(client(host).post(PATH, json=body).text):
        counts = {name: event[name] for name in ("accepted", "rejected") if name in event}
        assert counts == ({"accepted": 2, "rejected": 1} if event["ids"] else {})
    assert predictions == [tuple(predicted)]
    assert "prediction" in client(host).get(PATH).json()["settings"]


@pytest.mark.parametrize(("path", "status"), [(PATH, 200), ("/v1/chat/completions", 413)])
def test_ids_sent_to_other_apis_count_as_values(
    host: SingleEngineHost, path: str, status: int
) -> None:
    host.engine.context_length = 131_072  # type: ignore[misc]
    body = {"prompt": PROMPT[:1] * MANY + PROMPT, "settings": SETTINGS}
    assert client(host).post(path, json=body).status_code == status


def test_all_answers_of_tenant_are_running(host: SingleEngineHost) -> None:
    """A shutdown ends those that are running, of which one tenant may have many."""
    running: list[int] = []
    host.engine = Waits({}, until=lambda: len(running) > 2)

    async def post(http: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT, "settings": SETTINGS}
        request = asyncio.ensure_future(http.post(PATH, json=body))
        await wait_until_async(lambda: len(host.answers.running) == 3, "three answers")
        running.append(len(host.answers.running))
        await request

    async def test() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(host.app),
            base_url="http://localhost",
            headers=headers,
        ) as http:
            await asyncio.gather(*(post(http) for _ in range(3)))

    run(test())
    assert running == [3, 3, 3]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_endpoint_answers_get_and_head(host: SingleEngineHost, method: str) -> None:
    assert client(host).request(method, PATH).status_code == 200
