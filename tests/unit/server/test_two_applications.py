"""Two applications in one process: neither has, or ends, anything of the other."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import Any

import pytest

pytest.importorskip("starlette")

import httpx
from fakes import KEY, MODEL, Alone, ScriptedEngine, ids
from starlette.testclient import TestClient

from vllm_mlx_harmony.core.turn import Answer, User
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Step, Steps
from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.answers import SHUTTING_DOWN, shutting_down
from vllm_mlx_harmony.server.front_end import installed_in

SCRIPTS = {"Hello!": "<|channel|>final<|message|>Good day.<|return|>"}
HEADERS = {"Authorization": f"Bearer {KEY}"}
INPUT: dict[str, Any] = {"model": MODEL, "input": "Hello!"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]}


@pytest.fixture(autouse=True)
def _no_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, "off")


class Gated(ScriptedEngine):
    """Ends its answers when the gate is open."""

    def __init__(self) -> None:
        super().__init__(SCRIPTS)
        self.gate = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Steps:
        yield Step(ids("<|channel|>final<|message|>Good"))
        await self.gate.wait()
        yield Step(ids(" day.<|return|>"), "stop")


def client(host: Alone) -> TestClient:
    return TestClient(host.app, base_url="http://localhost", headers=HEADERS)


def loop_client(host: Alone) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(host.app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS)


def test_stored_responses_are_found_in_their_application() -> None:
    one, other = (client(Alone(ScriptedEngine(SCRIPTS))) for _ in range(2))
    path = f"/v1/responses/{one.post('/v1/responses', json=INPUT).json()['id']}"
    assert (one.get(path).status_code, other.get(path).status_code) == (200, 404)
    assert (other.delete(path).status_code, one.delete(path).status_code) == (404, 200)


def test_conversations_are_found_in_their_application() -> None:
    one, other = (client(Alone(ScriptedEngine(SCRIPTS))) for _ in range(2))
    key = one.post("/v1/conversations", json={}).json()["id"]
    path = f"/v1/conversations/{key}"
    assert (one.get(path).status_code, other.get(path).status_code) == (200, 404)
    asked = {**INPUT, "conversation": key}
    answered = [each.post("/v1/responses", json=asked).status_code for each in (one, other)]
    assert answered == [200, 404]
    assert (other.delete(path).status_code, one.delete(path).status_code) == (404, 200)


def test_generated_turns_are_reused_in_their_application() -> None:
    hosts = [Alone(ScriptedEngine(SCRIPTS)) for _ in range(2)]
    client(hosts[0]).post("/v1/chat/completions", json=CHAT)
    tenant = sha256(KEY.encode()).hexdigest()
    reused = []
    for host in hosts:
        turns = installed_in(host.app).turns
        assert turns is not None
        history = turns.view(f"{MODEL}\0{tenant}").history((User("Hello!"), Answer("Good day.")))
        reused.append([turn is not None for _, turn in history])
    assert any(reused[0]) and not any(reused[1])


def test_background_responses_belong_to_their_application() -> None:
    async def test() -> None:
        one, other = Alone(Gated()), Alone(Gated())
        async with loop_client(one) as here, loop_client(other) as there:
            created = await here.post("/v1/responses", json={**INPUT, "background": True})
            path = f"/v1/responses/{created.json()['id']}"
            assert (await here.get(path)).json()["status"] in ("queued", "in_progress")
            for method, end in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
                assert (await there.request(method, path + end)).status_code == 404
            assert (len(one.answers.running), len(other.answers.running)) == (1, 0)
            assert (await here.post(f"{path}/cancel")).json()["status"] == "cancelled"

    asyncio.run(asyncio.wait_for(test(), 60))


def test_shutdown_ends_only_answers_of_its_application() -> None:
    async def test() -> None:
        hosts = Alone(Gated()), Alone(Gated())
        ended, running = hosts
        async with loop_client(ended) as here, loop_client(running) as there:
            answers = [
                asyncio.ensure_future(each.post("/v1/chat/completions", json=CHAT))
                for each in (here, there)
            ]
            while not all(host.answers.running for host in hosts):
                await asyncio.sleep(0.01)
            (key,) = ended.answers.running
            assert not running.answers.cancel(key)
            ended.answers.reject_new(True)
            ended.answers.end_all(shutting_down())
            failed = await answers[0]
            assert failed.json()["error"]["code"] == SHUTTING_DOWN
            assert (await here.get("/v1/models")).status_code == 503
            assert (await there.get("/v1/models")).status_code == 200
            assert not answers[1].done()
            for host in hosts:
                host.engine.gate.set()  # type: ignore[attr-defined]
            assert (await answers[1]).json()["choices"][0]["message"]["content"] == "Good day."

    asyncio.run(asyncio.wait_for(test(), 60))
