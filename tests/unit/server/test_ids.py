"""The endpoint of ids: off unless it is switched on; then what a gateway needs of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

import httpx
from fakes import KEY, MODEL, Alone, ScriptedEngine, ids
from starlette.testclient import TestClient

from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Step, Steps
from vllm_mlx_harmony.server.ids import ID_ENDPOINT_VARIABLE, PATH

SCRIPT = "<|channel|>final<|message|>Good day.<|return|>"
SETTINGS = {"max_tokens": 100, "temperature": 0.0, "top_p": 1.0}
PROMPT = list(ids("<|start|>user<|message|>Hello!<|end|><|start|>assistant"))


class Waits(ScriptedEngine):
    """Says one id, when ``until`` is true."""

    def __init__(self, scripts: dict[str, str], until: Callable[[], bool]) -> None:
        super().__init__(scripts)
        self._until = until

    async def generate(self, request: GenerationRequest) -> Steps:
        while not self._until():
            await asyncio.sleep(0.01)
        yield Step(ids("<|return|>"), "stop")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Alone:
    """A server with the endpoint."""
    monkeypatch.setenv(ID_ENDPOINT_VARIABLE, "1")
    return Alone(ScriptedEngine({"Hello!": SCRIPT}))


def client(host: Alone) -> TestClient:
    asking = TestClient(host.app, base_url="http://localhost")
    asking.headers["Authorization"] = f"Bearer {KEY}"
    return asking


def events(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


def test_it_is_off(host: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ID_ENDPOINT_VARIABLE)
    asked = {"prompt": PROMPT, "settings": SETTINGS}
    for answer in (client(host).get(PATH), client(host).post(PATH, json=asked)):
        assert answer.status_code == 404
        assert ID_ENDPOINT_VARIABLE in answer.json()["error"]["message"]
    assert host.lent == 0


@pytest.mark.parametrize("asked", [False, True])
def test_origins_come_with_the_ids(host: Alone, asked: bool) -> None:
    class Reporting(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> Steps:
            async for step in super().generate(request):
                yield step._replace(origins="m" * len(step.ids) if request.settings.origins else "")

    host.engine = Reporting({"Hello!": SCRIPT}, at_once=2)
    settings = {**SETTINGS, "origins": True} if asked else SETTINGS
    answer = client(host).post(PATH, json={"model": MODEL, "prompt": PROMPT, "settings": settings})
    for event in events(answer.text):
        assert event.get("origins", "") == "m" * len(event["ids"]) * asked


def test_ids_in_and_every_id_out(host: Alone) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "settings": SETTINGS}
    answer = client(host).post(PATH, json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    stream = events(answer.text)
    assert tuple(token for event in stream for token in event["ids"]) == ids(SCRIPT)
    assert [event["finish"] for event in stream if event["finish"]] == ["stop"]
    assert host.engine.prompts == [tuple(PROMPT)]  # type: ignore[attr-defined]
    assert (host.lent, host.trackers[0].results[0]) == (0, "success")


def test_a_limit_is_a_length(host: Alone) -> None:
    asked = {"prompt": PROMPT, "settings": {**SETTINGS, "max_tokens": 3}}
    stream = events(client(host).post(PATH, json=asked).text)
    assert stream[-1]["finish"] == "length"
    assert tuple(token for event in stream for token in event["ids"]) == ids(SCRIPT)[:3]


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
def test_invalid_field_is_named(host: Alone, fields: dict[str, Any], param: str) -> None:
    asked = {"prompt": PROMPT, "settings": SETTINGS, **fields}
    answer = client(host).post(PATH, json=asked)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
    assert (host.lent, host.trackers) == (0, [])  # one that never ends would count as running


def test_it_asks_for_a_key_and_says_who_it_is(host: Alone) -> None:
    assert "harmony" in client(host).get(PATH).json()
    without = TestClient(host.app, base_url="http://localhost")
    assert without.get(PATH).status_code == 401
    assert without.post(PATH, json={}).status_code == 401


MANY = 100_000


@pytest.mark.parametrize("limit", ["", "60000"], ids=["by default", "as the operator wants"])
def test_a_prompt_may_be_as_long_as_the_context(
    host: Alone, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body may have 50,000 JSON values, in which the ids of a prompt are not counted."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_MAX_VALUES", limit)
    host.engine.context_length = 131_072  # type: ignore[misc]
    prompt = [PROMPT[0]] * (MANY - len(PROMPT)) + PROMPT
    answer = client(host).post(PATH, json={"prompt": prompt, "settings": SETTINGS})
    assert answer.status_code == 200
    assert host.engine.prompts == [tuple(prompt)]  # type: ignore[attr-defined]
    too_long = client(host).post(PATH, json={"prompt": prompt * 2, "settings": SETTINGS})
    assert too_long.status_code in (400, 413)


def test_prediction_is_passed_on_and_counted(host: Alone) -> None:
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
    for event in events(client(host).post(PATH, json=body).text):
        counts = {name: event[name] for name in ("accepted", "rejected") if name in event}
        assert counts == ({"accepted": 2, "rejected": 1} if event["ids"] else {})
    assert predictions == [tuple(predicted)]
    assert "prediction" in client(host).get(PATH).json()["settings"]


@pytest.mark.parametrize(("path", "status"), [(PATH, 200), ("/v1/chat/completions", 413)])
def test_ids_of_other_apis_are_counted(host: Alone, path: str, status: int) -> None:
    host.engine.context_length = 131_072  # type: ignore[misc]
    body = {"prompt": PROMPT[:1] * MANY + PROMPT, "settings": SETTINGS}
    assert client(host).post(path, json=body).status_code == status


def test_each_answer_can_be_ended(host: Alone) -> None:
    """The answers of one tenant, which has many: a shutdown ends all of them."""
    running: list[int] = []
    host.engine = Waits({}, until=lambda: len(running) > 2)

    async def ask(asking: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT, "settings": SETTINGS}
        sent = asyncio.ensure_future(asking.post(PATH, json=body))
        await asyncio.sleep(0.1)
        running.append(len(host.answers.running))
        await sent

    async def test() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(host.app),
            base_url="http://localhost",
            headers=headers,
        ) as asking:
            await asyncio.gather(*(ask(asking) for _ in range(3)))

    asyncio.run(test())
    assert running == [3, 3, 3]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_version(host: Alone, method: str) -> None:
    assert client(host).request(method, PATH).status_code == 200
