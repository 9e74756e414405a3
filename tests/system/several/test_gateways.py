"""Two gateway processes that share a real Redis and two engines that replay ids."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_server import run_server
from fake_engines import FakeEngine
from harmony_text import ids_of
from real_redis import RedisServer
from sse import arriving, documents
from waiting import wait_until
from websockets.sync.client import connect

from vllm_mlx_harmony.cli.process import free_port

MODEL = "gpt-oss-20b"
KEYS = {"Authorization": "Bearer key-of-alice"}
THINKING = "<|channel|>analysis<|message|>Tools, then.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>'
ANSWER = "<|channel|>analysis<|message|>Sum.<|end|><|start|>assistant<|channel|>final<|message|>"
LONG = "word " * 300
SCRIPTS = {
    "use f": THINKING + CALL,
    "result of f": f"{ANSWER}Done.<|return|>",
    "Hello": f"{ANSWER}Good day.<|return|>",
    "And more": f"{ANSWER}More.<|return|>",
    "Count": f"{ANSWER}{LONG}<|return|>",
}


class Gateway:
    """A gateway process."""

    def __init__(self, redis: str, engines: list[str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm_mlx_harmony", "gateway", "--model", MODEL]
        command += ["--port", str(port), "--key", "key-of-alice", "--key", "key-of-bob"]
        command += ["--log-level", "warning"]
        for url in engines:
            command += ["--engine", f"vllm={url}"]
        environment = {**os.environ, "VLLM_MLX_HARMONY_STORE": redis}
        self.process = subprocess.Popen(command, env=environment)

    def ready(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None
            try:
                return httpx.get(f"{self.url}/ready", timeout=180).status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(answers, "the gateway to be ready", 180.0)

    def post(self, path: str, headers: dict[str, str] = KEYS, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, **fields}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=180)

    def respond(self, text: Any, **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/responses", input=text, **fields)
        assert response.status_code == 200, response.text
        document: dict[str, Any] = response.json()
        return document

    def send(
        self, method: str, path: str, headers: dict[str, str] = KEYS, **query: Any
    ) -> httpx.Response:
        url = f"{self.url}/v1/responses/{path}"
        return httpx.request(method, url, headers=headers, params=query, timeout=180)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(180)


class Cluster:
    """A Redis, two engines and two gateways."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.redis = stack.enter_context(RedisServer(directory))
        self.engines = [FakeEngine("vllm", SCRIPTS) for _ in range(2)]
        self.urls = [stack.enter_context(run_server(engine.app)) for engine in self.engines]
        self.gateways = [self.gateway(stack) for _ in range(2)]
        for gateway in self.gateways:
            gateway.ready()

    def gateway(self, stack: ExitStack) -> Gateway:
        gateway = Gateway(self.redis.url, self.urls)
        stack.callback(gateway.kill)
        return gateway

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [prompt for engine in self.engines for prompt in engine.prompts]

    @property
    def aborted(self) -> int:
        return sum(engine.aborted for engine in self.engines)

    def forget(self) -> None:
        for engine in self.engines:
            engine.prompts.clear()
            engine.held = False


@pytest.fixture(scope="module")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path_factory.mktemp("redis"))


@pytest.fixture
def cluster(_cluster: Cluster) -> Cluster:
    _cluster.forget()
    return _cluster


def content(document: dict[str, Any]) -> str:
    (message,) = [item for item in document["output"] if item["type"] == "message"]
    return str(message["content"][0]["text"])


# --- Clients that switch gateways


def test_conversation_continues_at_the_other_gateway(cluster: Cluster) -> None:
    first, second = cluster.gateways
    response = first.respond("Hello")
    assert content(response) == "Good day."
    assert second.send("GET", response["id"]).json() == response
    items = second.send("GET", f"{response['id']}/input_items").json()["data"]
    assert items[0]["content"][0]["text"] == "Hello"
    continuation = second.respond("And more", previous_response_id=response["id"])
    assert content(continuation) == "More."
    assert ids_of("Good day.") == _within(cluster.prompts[-1], ids_of("Good day."))


def _within(prompt: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...]:
    """``part`` if ``prompt`` contains it, else an empty tuple."""
    for at in range(len(prompt)):
        if prompt[at : at + len(part)] == part:
            return part
    return ()


def test_deleted_response_is_gone_at_the_other_gateway(cluster: Cluster) -> None:
    first, second = cluster.gateways
    response_id = first.respond("Hello")["id"]
    bob = {"Authorization": "Bearer key-of-bob"}
    assert second.send("GET", response_id, bob).status_code == 404
    assert second.send("DELETE", response_id, bob).status_code == 404
    assert second.send("DELETE", response_id).json()["deleted"]
    assert first.send("GET", response_id).status_code == 404
    continuation = first.post("/v1/responses", input="And more", previous_response_id=response_id)
    assert continuation.status_code == 404


def test_turn_of_the_other_gateway_is_replayed(cluster: Cluster) -> None:
    """With its reasoning, which a Chat Completions client never sends back."""
    first, second = cluster.gateways
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Please use f."}]
    chat = "/v1/chat/completions"
    message = first.post(chat, messages=messages, tools=tools).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    call = {**call, "function": {"name": "f", "arguments": '{ "a": 1 }'}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "result of f"},
    ]
    assert second.post(chat, messages=messages, tools=tools).status_code == 200
    first_prompt, second_prompt = cluster.prompts
    assert second_prompt[: len(first_prompt)] == first_prompt
    generated = ids_of(THINKING + CALL)
    assert second_prompt[len(first_prompt) : len(first_prompt) + len(generated)] == generated


def test_both_gateways_route_conversation_to_same_engine(cluster: Cluster) -> None:
    for number in range(6):
        cluster.forget()
        messages = [{"role": "user", "content": f"Hello, {number} times"}]
        for gateway in (*cluster.gateways, *cluster.gateways):
            completion = gateway.post("/v1/chat/completions", messages=messages).json()
            messages += [
                {"role": "assistant", "content": completion["choices"][0]["message"]["content"]},
                {"role": "user", "content": "And more"},
            ]
        assert sorted(len(engine.prompts) for engine in cluster.engines) == [0, 4]


def test_reasoning_encrypted_by_one_gateway_is_read_by_the_other(cluster: Cluster) -> None:
    first, second = cluster.gateways
    fields = {"store": False, "include": ["reasoning.encrypted_content"]}
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    response = first.respond("Please use f.", tools=tools, **fields)
    items = [
        {"role": "user", "content": "Now use f, another conversation"},
        *response["output"],
        {
            "type": "function_call_output",
            "call_id": response["output"][-1]["call_id"],
            "output": "result of f",
        },
    ]
    for item in items[1:-1]:
        item.pop("id", None)
        if item["type"] == "reasoning":
            item["summary"] = []
            item.pop("content", None)
    items[-2] |= {"call_id": "call_another"}
    items[-1] |= {"call_id": "call_another"}
    second.respond(items, tools=tools, **fields)
    assert any(_within(prompt, ids_of("Tools, then.")) for prompt in cluster.prompts)


# --- Answers in the background


def hold(cluster: Cluster, held: bool = True) -> None:
    """Pauses answers after their first piece, or resumes them."""
    for engine in cluster.engines:
        engine.held = held


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    return documents(response.text)


def test_background_response_is_followed_at_the_other_gateway(cluster: Cluster) -> None:
    hold(cluster)
    first, second = cluster.gateways
    response = first.respond("Count", background=True)
    assert second.send("GET", response["id"]).json()["status"] in ("queued", "in_progress")
    continuation = second.post(
        "/v1/responses", input="And more", previous_response_id=response["id"]
    )
    assert continuation.json()["error"]["code"] == "previous_response_not_ready"
    hold(cluster, False)
    events = events_of(second.send("GET", response["id"], stream="true"))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    assert content(events[-1]["response"]) == LONG
    assert second.send("GET", response["id"]).json() == events[-1]["response"]
    last_events = events_of(
        second.send("GET", response["id"], stream="true", starting_after=len(events) - 3)
    )
    assert last_events == events[-2:]
    assert events_of(first.send("GET", response["id"], stream="true")) == events


@pytest.mark.parametrize("route", ["responses", "requests"])
def test_background_response_is_cancelled_at_the_other_gateway(
    cluster: Cluster, route: str
) -> None:
    hold(cluster)
    first, second = cluster.gateways
    aborted = cluster.aborted
    response_id = first.respond("Count", background=True)["id"]
    if route == "responses":
        assert second.send("POST", f"{response_id}/cancel").json()["status"] == "cancelled"
    else:
        assert second.post(f"/v1/requests/{response_id}/cancel").json()["cancelled"] is True
    assert first.send("GET", response_id).json()["status"] == "cancelled"
    wait_until(lambda: cluster.aborted == aborted + 1, "a free engine")
    events = events_of(second.send("GET", response_id, stream="true"))
    assert events[-1]["response"]["status"] == "cancelled"


def test_streamed_answer_is_cancelled_at_the_other_gateway(cluster: Cluster) -> None:
    hold(cluster)
    first, second = cluster.gateways
    aborted = cluster.aborted
    body = {
        "model": MODEL,
        "stream": True,
        "messages": [{"role": "user", "content": "Count"}],
    }
    bob = {"Authorization": "Bearer key-of-bob"}
    url = f"{first.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=KEYS, timeout=180) as stream:
        lines = stream.iter_lines()
        chunk = next(arriving(lines))
        path = f"/v1/requests/{chunk['id']}/cancel"
        assert second.post(path, headers=bob).status_code == 404
        response = second.post(path)
        assert response.status_code == 200, response.text
        assert response.json()["cancelled"] is True
        rest = [line for line in lines if line]
    assert '"code":"cancelled"' in "".join(rest[-2:]).replace(" ", "")
    wait_until(lambda: cluster.aborted == aborted + 1, "a free engine")
    assert second.post(path).status_code == 404  # it has ended


def test_websocket_conversation_continues_at_the_other_gateway(cluster: Cluster) -> None:
    def converse(gateway: Gateway, **fields: Any) -> dict[str, Any]:
        url = f"{gateway.url.replace('http', 'ws')}/v1/responses"
        with connect(url, additional_headers=KEYS) as socket:
            socket.send(json.dumps({"type": "response.create", "model": MODEL, **fields}))
            while True:
                event = json.loads(socket.recv(180))
                if event["type"] in ("response.completed", "error"):
                    return dict(event)

    first, second = cluster.gateways
    first_response = converse(first, input="Hello")["response"]
    second_response = converse(second, input="And more", previous_response_id=first_response["id"])[
        "response"
    ]
    assert (content(first_response), content(second_response)) == ("Good day.", "More.")
    before, after = cluster.prompts[-2:]
    assert after[: len(before)] == before
    unstored_response = converse(first, input="Hello", store=False)["response"]
    event = converse(second, input="And more", previous_response_id=unstored_response["id"])
    assert event["error"]["code"] == "previous_response_not_found"


def test_background_response_is_deleted_at_the_other_gateway(cluster: Cluster) -> None:
    hold(cluster)
    first, second = cluster.gateways
    running_id = first.respond("Count", background=True)["id"]
    assert second.send("DELETE", running_id).json()["deleted"]
    for gateway in cluster.gateways:
        assert gateway.send("GET", running_id).status_code == 404
        assert gateway.send("GET", running_id, stream="true").status_code == 404
    cluster.forget()
    completed_id = first.respond("Hello", background=True)["id"]
    wait_until(lambda: first.send("GET", completed_id).json()["status"] == "completed", "the end")
    assert second.send("DELETE", completed_id).json()["deleted"]
    for gateway in cluster.gateways:
        assert gateway.send("GET", completed_id).status_code == 404


# --- Faults


def test_gateways_answer_while_redis_is_down(cluster: Cluster) -> None:
    """Responses that cannot be stored have ``store`` false; later ones are stored again."""
    first, second = cluster.gateways
    response_id = first.respond("Hello")["id"]
    cluster.redis.stop()
    for _ in range(10):
        for gateway in cluster.gateways:
            document = gateway.respond("Hello")
            assert content(document) == "Good day." and document["store"] is False
            messages = [{"role": "user", "content": "Hello"}]
            assert gateway.post("/v1/chat/completions", messages=messages).status_code == 200
    response = second.send("GET", response_id)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "store_unavailable")
    cluster.redis.start()

    def both_store() -> bool:
        return all(gateway.respond("Hello")["store"] for gateway in cluster.gateways)

    wait_until(both_store, "the gateways to find Redis again", 180)
    stored_response = first.respond("Hello")
    assert second.send("GET", stored_response["id"]).json() == stored_response


def test_other_gateway_serves_on_when_one_is_killed(cluster: Cluster) -> None:
    _, survivor = cluster.gateways
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        killed = cluster.gateway(stack)
        killed.ready()
        stored_response = killed.respond("Hello")
        hold(cluster)
        running_id = killed.respond("Count", background=True)["id"]
        stream_future = threads.submit(
            survivor.post,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "Count"}],
            stream=True,
        )
        wait_until(lambda: sum(engine.running for engine in cluster.engines) == 2, "both answers")
        killed.kill()
        hold(cluster, False)
        assert survivor.send("GET", stored_response["id"]).json() == stored_response
        continuation = survivor.respond("And more", previous_response_id=stored_response["id"])
        assert content(continuation) == "More."
        stream = stream_future.result()
        text = "".join(
            choice["delta"].get("content") or ""
            for event in events_of(stream)
            for choice in event["choices"]
        )
        assert text == LONG

        def has_failed() -> bool:
            return bool(survivor.send("GET", running_id).json()["status"] == "failed")

        wait_until(has_failed, "the answer to be given up", 180)
        error = survivor.send("GET", running_id).json()["error"]
        assert error["code"] == "server_error" and "has stopped" in error["message"]
        events = events_of(survivor.send("GET", running_id, stream="true"))
        assert events[-1]["type"] == "response.failed"


def test_conversation_survives_death_of_its_engine(tmp_path: Path) -> None:
    """The other engine computes the whole prompt; clients do not notice."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(tmp_path))
        engines = [FakeEngine("vllm", SCRIPTS) for _ in range(2)]
        stacks = [stack.enter_context(ExitStack()) for _ in engines]
        urls = [
            engine_stack.enter_context(run_server(engine.app))
            for engine_stack, engine in zip(stacks, engines, strict=True)
        ]
        gateway = Gateway(redis.url, urls)
        stack.callback(gateway.kill)
        gateway.ready()
        response = gateway.respond("Hello")
        home = next(number for number, engine in enumerate(engines) if engine.prompts)
        stacks[home].close()
        for _ in range(5):
            continuation = gateway.respond("And more", previous_response_id=response["id"])
            assert content(continuation) == "More."
        other_engine = engines[1 - home]
        assert len(other_engine.prompts) == 5 and _within(
            other_engine.prompts[-1], ids_of("Good day.")
        )
        metrics = httpx.get(f"{gateway.url}/metrics", timeout=180).text
        assert 'vllm_mlx_harmony_routed_total{why="moved"} 1.0' in metrics
        assert 'vllm_mlx_harmony_routed_total{why="prefix"} ' in metrics
