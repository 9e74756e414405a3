"""Two gateway processes behind one address, a real Redis, and engines that replay ids."""

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
from fake_engines import FakeEngine, ids, served, until
from real_redis import RedisServer
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

        until(answers, "the gateway to be ready", 180.0)

    def post(self, path: str, headers: dict[str, str] = KEYS, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, **fields}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=180)

    def respond(self, text: Any, **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/responses", input=text, **fields)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
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


class Setting:
    """A Redis, two engines and two gateways."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.redis = stack.enter_context(RedisServer(directory))
        self.engines = [FakeEngine("vllm", SCRIPTS) for _ in range(2)]
        self.urls = [stack.enter_context(served(engine.app)) for engine in self.engines]
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

    def forget(self) -> None:
        for engine in self.engines:
            engine.prompts.clear()
            engine.held = False


@pytest.fixture(scope="module")
def _started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    with ExitStack() as stack:
        yield Setting(stack, tmp_path_factory.mktemp("redis"))


@pytest.fixture
def setting(_started: Setting) -> Setting:
    _started.forget()
    return _started


def content(document: dict[str, Any]) -> str:
    (message,) = [item for item in document["output"] if item["type"] == "message"]
    return str(message["content"][0]["text"])


# --- The same clients


def test_conversation_continues_at_the_other_gateway(setting: Setting) -> None:
    one, other = setting.gateways
    first = one.respond("Hello")
    assert content(first) == "Good day."
    assert other.send("GET", first["id"]).json() == first
    items = other.send("GET", f"{first['id']}/input_items").json()["data"]
    assert items[0]["content"][0]["text"] == "Hello"
    second = other.respond("And more", previous_response_id=first["id"])
    assert content(second) == "More."
    assert tuple(ids("Good day.")) == _within(setting.prompts[-1], ids("Good day."))


def _within(prompt: tuple[int, ...], part: list[int]) -> tuple[int, ...]:
    """``part``, where it stands in ``prompt``; empty when it does not."""
    for at in range(len(prompt)):
        if list(prompt[at : at + len(part)]) == part:
            return prompt[at : at + len(part)]
    return ()


def test_deleted_response_is_gone_at_the_other_gateway(setting: Setting) -> None:
    one, other = setting.gateways
    stored = one.respond("Hello")["id"]
    bob = {"Authorization": "Bearer key-of-bob"}
    assert other.send("GET", stored, bob).status_code == 404
    assert other.send("DELETE", stored, bob).status_code == 404
    assert other.send("DELETE", stored).json()["deleted"]
    assert one.send("GET", stored).status_code == 404
    gone = one.post("/v1/responses", input="And more", previous_response_id=stored)
    assert gone.status_code == 404


def test_turn_of_the_other_gateway_is_replayed(setting: Setting) -> None:
    """Reasoning and all, which the client of Chat Completions never sent back."""
    one, other = setting.gateways
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Please use f."}]
    chat = "/v1/chat/completions"
    answered = one.post(chat, messages=messages, tools=tools).json()["choices"][0]["message"]
    (call,) = answered["tool_calls"]
    call = {**call, "function": {"name": "f", "arguments": '{ "a": 1 }'}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "result of f"},
    ]
    assert other.post(chat, messages=messages, tools=tools).status_code == 200
    first, second = setting.prompts
    assert second[: len(first)] == first
    generated = ids(THINKING + CALL)
    assert list(second[len(first) : len(first) + len(generated)]) == generated


def test_both_gateways_send_a_conversation_to_the_same_engine(setting: Setting) -> None:
    for number in range(6):
        setting.forget()
        messages = [{"role": "user", "content": f"Hello, {number} times"}]
        for gateway in (*setting.gateways, *setting.gateways):
            answer = gateway.post("/v1/chat/completions", messages=messages).json()
            messages += [
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                {"role": "user", "content": "And more"},
            ]
        assert sorted(len(engine.prompts) for engine in setting.engines) == [0, 4]


def test_reasoning_that_one_gateway_encrypted_the_other_reads(setting: Setting) -> None:
    one, other = setting.gateways
    fields = {"store": False, "include": ["reasoning.encrypted_content"]}
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    first = one.respond("Please use f.", tools=tools, **fields)
    asked = [
        {"role": "user", "content": "Now use f, another conversation"},
        *first["output"],
        {
            "type": "function_call_output",
            "call_id": first["output"][-1]["call_id"],
            "output": "result of f",
        },
    ]
    for item in asked[1:-1]:
        item.pop("id", None)
        if item["type"] == "reasoning":
            item["summary"] = []
            item.pop("content", None)
    asked[-2] |= {"call_id": "call_another"}
    asked[-1] |= {"call_id": "call_another"}
    other.respond(asked, tools=tools, **fields)
    assert any(_within(prompt, ids("Tools, then.")) for prompt in setting.prompts)


# --- Answers in the background


def hold(setting: Setting, held: bool = True) -> None:
    """Makes answers wait behind their beginning, or go on."""
    for engine in setting.engines:
        engine.held = held


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_background_response_is_followed_at_the_other_gateway(setting: Setting) -> None:
    hold(setting)
    one, other = setting.gateways
    begun = one.respond("Count", background=True)
    assert other.send("GET", begun["id"]).json()["status"] in ("queued", "in_progress")
    early = other.post("/v1/responses", input="And more", previous_response_id=begun["id"])
    assert early.json()["error"]["code"] == "previous_response_not_ready"
    hold(setting, False)
    received = events_of(other.send("GET", begun["id"], stream="true"))
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    assert received[-1]["type"] == "response.completed"
    assert content(received[-1]["response"]) == LONG
    assert other.send("GET", begun["id"]).json() == received[-1]["response"]
    rest = events_of(
        other.send("GET", begun["id"], stream="true", starting_after=len(received) - 3)
    )
    assert rest == received[-2:]
    assert events_of(one.send("GET", begun["id"], stream="true")) == received


def test_background_response_is_cancelled_at_the_other_gateway(setting: Setting) -> None:
    hold(setting)
    one, other = setting.gateways
    aborted = sum(engine.aborted for engine in setting.engines)
    begun = one.respond("Count", background=True)["id"]
    assert other.send("POST", f"{begun}/cancel").json()["status"] == "cancelled"
    assert one.send("GET", begun).json()["status"] == "cancelled"
    until(lambda: sum(engine.aborted for engine in setting.engines) == aborted + 1, "a free engine")
    received = events_of(other.send("GET", begun, stream="true"))
    assert received[-1]["response"]["status"] == "cancelled"


def test_an_answer_is_cancelled_at_the_other_gateway(setting: Setting) -> None:
    hold(setting)
    one, other = setting.gateways
    aborted = sum(engine.aborted for engine in setting.engines)
    body = {
        "model": MODEL,
        "stream": True,
        "messages": [{"role": "user", "content": "Count"}],
    }
    bob = {"Authorization": "Bearer key-of-bob"}
    url = f"{one.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=KEYS, timeout=180) as stream:
        lines = stream.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        path = f"/v1/requests/{first['id']}/cancel"
        assert other.post(path, headers=bob).status_code == 404
        cancelled = other.post(path)
        assert cancelled.status_code == 200, cancelled.text
        assert cancelled.json()["cancelled"] is True
        rest = [line for line in lines if line]
    assert '"code":"cancelled"' in "".join(rest[-2:]).replace(" ", "")
    until(lambda: sum(engine.aborted for engine in setting.engines) == aborted + 1, "a free engine")
    assert other.post(path).status_code == 404  # it has ended


def test_conversation_continues_over_a_websocket_at_the_other(setting: Setting) -> None:
    def converse(gateway: Gateway, **fields: Any) -> dict[str, Any]:
        url = f"{gateway.url.replace('http', 'ws')}/v1/responses"
        with connect(url, additional_headers=KEYS) as socket:
            socket.send(json.dumps({"type": "response.create", "model": MODEL, **fields}))
            while True:
                event = json.loads(socket.recv(180))
                if event["type"] in ("response.completed", "error"):
                    return dict(event)

    one, other = setting.gateways
    first = converse(one, input="Hello")["response"]
    second = converse(other, input="And more", previous_response_id=first["id"])["response"]
    assert (content(first), content(second)) == ("Good day.", "More.")
    before, after = setting.prompts[-2:]
    assert after[: len(before)] == before
    unstored = converse(one, input="Hello", store=False)["response"]
    refused = converse(other, input="And more", previous_response_id=unstored["id"])
    assert refused["error"]["code"] == "previous_response_not_found"


def test_background_response_is_deleted_at_the_other_gateway(setting: Setting) -> None:
    hold(setting)
    one, other = setting.gateways
    begun = one.respond("Count", background=True)["id"]
    assert other.send("DELETE", begun).json()["deleted"]
    for gateway in setting.gateways:
        assert gateway.send("GET", begun).status_code == 404
        assert gateway.send("GET", begun, stream="true").status_code == 404
    setting.forget()
    ended = one.respond("Hello", background=True)["id"]
    until(lambda: one.send("GET", ended).json()["status"] == "completed", "the end")
    assert other.send("DELETE", ended).json()["deleted"]
    for gateway in setting.gateways:
        assert gateway.send("GET", ended).status_code == 404


# --- Faults


def test_redis_away_takes_no_answer_away(setting: Setting) -> None:
    """What could not be stored says so, and afterwards all is as before."""
    one, other = setting.gateways
    stored = one.respond("Hello")["id"]
    setting.redis.stop()
    for _ in range(10):
        for gateway in setting.gateways:
            document = gateway.respond("Hello")
            assert content(document) == "Good day." and document["store"] is False
            messages = [{"role": "user", "content": "Hello"}]
            assert gateway.post("/v1/chat/completions", messages=messages).status_code == 200
    refused = other.send("GET", stored)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    setting.redis.start()

    def both_store() -> bool:
        return all(gateway.respond("Hello")["store"] for gateway in setting.gateways)

    until(both_store, "the gateways to find Redis again", 180)
    again = one.respond("Hello")
    assert other.send("GET", again["id"]).json() == again


def test_one_gateway_is_killed_while_the_other_serves_on(setting: Setting) -> None:
    _, other = setting.gateways
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        killed = setting.gateway(stack)
        killed.ready()
        stored = killed.respond("Hello")
        hold(setting)
        begun = killed.respond("Count", background=True)["id"]
        streamed = threads.submit(
            other.post,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "Count"}],
            stream=True,
        )
        until(lambda: sum(engine.running for engine in setting.engines) == 2, "both answers")
        killed.kill()
        hold(setting, False)
        assert other.send("GET", stored["id"]).json() == stored
        more = other.respond("And more", previous_response_id=stored["id"])
        assert content(more) == "More."
        answer = streamed.result()
        answered = "".join(
            choice["delta"].get("content") or ""
            for event in events_of(answer)
            for choice in event["choices"]
        )
        assert answered == LONG

        def lost() -> bool:
            return bool(other.send("GET", begun).json()["status"] == "failed")

        until(lost, "the answer to be given up", 180)
        error = other.send("GET", begun).json()["error"]
        assert error["code"] == "server_error" and "has stopped" in error["message"]
        received = events_of(other.send("GET", begun, stream="true"))
        assert received[-1]["type"] == "response.failed"


def test_conversation_survives_the_death_of_its_engine(tmp_path: Path) -> None:
    """On the other engine, which computes all of it; nobody hears of it."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(tmp_path))
        engines = [FakeEngine("vllm", SCRIPTS) for _ in range(2)]
        stacks = [stack.enter_context(ExitStack()) for _ in engines]
        urls = [
            each.enter_context(served(engine.app))
            for each, engine in zip(stacks, engines, strict=True)
        ]
        gateway = Gateway(redis.url, urls)
        stack.callback(gateway.kill)
        gateway.ready()
        first = gateway.respond("Hello")
        home = next(number for number, engine in enumerate(engines) if engine.prompts)
        stacks[home].close()
        for _ in range(5):
            second = gateway.respond("And more", previous_response_id=first["id"])
            assert content(second) == "More."
        other = engines[1 - home]
        assert len(other.prompts) == 5 and _within(other.prompts[-1], ids("Good day."))
        metrics = httpx.get(f"{gateway.url}/metrics", timeout=180).text
        assert 'vllm_mlx_harmony_routed_total{why="moved"} 1.0' in metrics
        assert 'vllm_mlx_harmony_routed_total{why="prefix"} ' in metrics
