"""Two applications in one process: neither sees or ends anything of the other."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import Any

import pytest

pytest.importorskip("starlette")

import httpx
from harmony_text import ids_of
from loops import run
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient
from waiting import wait_until_async

from vllm_mlx_harmony.core.turn import Answer, User
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Step, Steps
from vllm_mlx_harmony.server.answers import SHUTTING_DOWN, shutdown_error
from vllm_mlx_harmony.server.front_end import installed_in

pytestmark = pytest.mark.usefixtures("no_grammars")

SCRIPTS = {"Hello!": "<|channel|>final<|message|>Good day.<|return|>"}
HEADERS = {"Authorization": f"Bearer {KEY}"}
INPUT: dict[str, Any] = {"model": MODEL, "input": "Hello!"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]}


class Gated(ScriptedEngine):
    """Ends its answers once the gate is open."""

    def __init__(self) -> None:
        super().__init__(SCRIPTS)
        self.gate = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Steps:
        yield Step(ids_of("<|channel|>final<|message|>Good"))
        await self.gate.wait()
        yield Step(ids_of(" day.<|return|>"), "stop")


def client(host: SingleEngineHost) -> TestClient:
    return TestClient(host.app, base_url="http://localhost", headers=HEADERS)


def async_client(host: SingleEngineHost) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(host.app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS)


def test_stored_responses_are_found_in_their_application() -> None:
    first, second = (client(SingleEngineHost(ScriptedEngine(SCRIPTS))) for _ in range(2))
    path = f"/v1/responses/{first.post('/v1/responses', json=INPUT).json()['id']}"
    assert (first.get(path).status_code, second.get(path).status_code) == (200, 404)
    assert (second.delete(path).status_code, first.delete(path).status_code) == (404, 200)


def test_conversations_are_found_in_their_application() -> None:
    first, second = (client(SingleEngineHost(ScriptedEngine(SCRIPTS))) for _ in range(2))
    key = first.post("/v1/conversations", json={}).json()["id"]
    path = f"/v1/conversations/{key}"
    assert (first.get(path).status_code, second.get(path).status_code) == (200, 404)
    body = {**INPUT, "conversation": key}
    statuses = [http.post("/v1/responses", json=body).status_code for http in (first, second)]
    assert statuses == [200, 404]
    assert (second.delete(path).status_code, first.delete(path).status_code) == (404, 200)


def test_generated_turns_are_reused_in_their_application() -> None:
    hosts = [SingleEngineHost(ScriptedEngine(SCRIPTS)) for _ in range(2)]
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
        first, second = SingleEngineHost(Gated()), SingleEngineHost(Gated())
        async with async_client(first) as first_client, async_client(second) as second_client:
            created = await first_client.post("/v1/responses", json={**INPUT, "background": True})
            path = f"/v1/responses/{created.json()['id']}"
            assert (await first_client.get(path)).json()["status"] in ("queued", "in_progress")
            for method, end in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
                assert (await second_client.request(method, path + end)).status_code == 404
            assert (len(first.answers.running), len(second.answers.running)) == (1, 0)
            assert (await first_client.post(f"{path}/cancel")).json()["status"] == "cancelled"

    run(test())


def test_shutdown_ends_only_answers_of_its_application() -> None:
    async def test() -> None:
        hosts = SingleEngineHost(Gated()), SingleEngineHost(Gated())
        stopped, running = hosts
        async with async_client(stopped) as stopped_client, async_client(running) as running_client:
            answers = [
                asyncio.ensure_future(http.post("/v1/chat/completions", json=CHAT))
                for http in (stopped_client, running_client)
            ]
            await wait_until_async(
                lambda: all(host.answers.running for host in hosts), "both answers"
            )
            (key,) = stopped.answers.running
            assert not running.answers.cancel(key)
            stopped.answers.reject_new(True)
            stopped.answers.end_all(shutdown_error())
            failed = await answers[0]
            assert failed.json()["error"]["code"] == SHUTTING_DOWN
            assert (await stopped_client.get("/v1/models")).status_code == 503
            assert (await running_client.get("/v1/models")).status_code == 200
            assert not answers[1].done()
            for host in hosts:
                host.engine.gate.set()  # type: ignore[attr-defined]
            assert (await answers[1]).json()["choices"][0]["message"]["content"] == "Good day."

    run(test())
