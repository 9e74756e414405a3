"""Reasoning that is cut short (semantics C5): how each API reports it, whole and streamed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")


from loops import run
from official_clients import clients
from scripted_host import KEY, MODEL, ObedientEngine, SingleEngineHost, Tracker
from starlette.testclient import TestClient
from waiting import wait_until_async

from vllm_mlx_harmony.server import enforcement, generation
from vllm_mlx_harmony.server.app import application

ANALYSIS = "<|channel|>analysis<|message|>"
GRID = ("0 " * 10 + "\n") * 10


class Counting(SingleEngineHost):
    """A host that records why reasoning was ended."""

    def __init__(self, thoughts: str) -> None:
        output = f"{ANALYSIS}{thoughts}<|end|><|start|>assistant{ObedientEngine.ANSWER}"
        super().__init__(ObedientEngine({"Hm?": output}))
        self.reasons: list[str] = []

    def max_tokens(self, requested: int | None) -> int:
        return requested or 10_000

    def tracker(self, api: str, *, stream: bool) -> Tracker:
        tracker = super().tracker(api, stream=stream)
        tracker.reasoning_ended = self.reasons.append  # type: ignore[method-assign]
        return tracker


async def by_chat(host: SingleEngineHost, stream: bool, budget: int | None) -> tuple[str, Any]:
    client, _ = clients(host)
    options: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hm?"}]}
    if budget is not None:
        options["extra_body"] = {"thinking_token_budget": budget}
    if stream:
        async with client.chat.completions.stream(**options) as events:
            message: Any = (await events.get_final_completion()).choices[0].message
    else:
        message = (await client.chat.completions.create(**options)).choices[0].message
    return str(message.content), (message.model_extra or {}).get("reasoning_ended_by")


async def by_responses(host: SingleEngineHost, stream: bool, budget: int | None) -> tuple[str, Any]:
    client, _ = clients(host)
    options: dict[str, Any] = {"model": MODEL, "input": "Hm?"}
    if budget is not None:
        options["extra_body"] = {"thinking_token_budget": budget}
    if stream:
        async with client.responses.stream(**options) as events:
            response: Any = await events.get_final_response()
    else:
        response = await client.responses.create(**options)
    stored = await client.responses.retrieve(response.id)
    reason = (response.model_extra or {}).get("reasoning_ended_by")
    assert (stored.model_extra or {}).get("reasoning_ended_by") == reason
    return response.output_text, reason


async def by_messages(host: SingleEngineHost, stream: bool, budget: int | None) -> tuple[str, Any]:
    _, client = clients(host)
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 9_000,
        "messages": [{"role": "user", "content": "Hm?"}],
    }
    if budget is not None:
        options["thinking"] = {"type": "enabled", "budget_tokens": budget}
    if stream:
        async with client.messages.stream(**options) as events:
            message: Any = await events.get_final_message()
    else:
        message = await client.messages.create(**options)
    details = message.usage.output_tokens_details
    return message.content[-1].text, (details.model_extra or {}).get("reasoning_ended_by")


ROWS: dict[str, tuple[str, int | None, str | None]] = {
    "a loop": ("Wait, what did they ask me?\n" * 400, None, "repetition"),
    "a budget": ("One, two, three, four, five, six, seven.", 4, "budget"),
    "a grid of zeros": (GRID, None, None),
    "9 equal rows": ("2025-08-05,Oslo,18.5,0.0,NW\n" * 9, None, None),
    "a dump of zeros": (("00 " * 16 + "\n") * 32, None, None),
    "a few words": ("They greet me.", None, None),
}


@pytest.mark.usefixtures("no_grammars")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
@pytest.mark.parametrize(("thoughts", "budget", "reason"), ROWS.values(), ids=ROWS)
def test_answer_log_and_metrics_say_why_reasoning_ended(
    ask: Callable[..., Any],
    stream: bool,
    thoughts: str,
    budget: int | None,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("VLLM_MLX_HARMONY_REPETITIONS", "32")
    host = Counting(thoughts)
    with caplog.at_level(logging.INFO, generation.logger.name):
        assert asyncio.run(ask(host, stream, budget)) == ("Well.", reason)
    assert host.reasons == ([reason] if reason else [])
    assert any("reasoning cut short" in message for message in caplog.messages) is bool(reason)


PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hm?"}]},
    "/v1/responses": {"input": "Hm?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hm?"}]},
}
CHOSEN: dict[str, tuple[str, dict[str, Any]]] = {
    "effort in Chat": ("/v1/chat/completions", {"reasoning_effort": "low"}),
    "OpenRouter's effort": ("/v1/chat/completions", {"reasoning": {"effort": "high"}}),
    "template": ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": True}}),
    "no limit": ("/v1/chat/completions", {"thinking_token_budget": -1}),
    "effort in Responses": ("/v1/responses", {"reasoning": {"effort": "medium"}}),
    "no limit in Responses": ("/v1/responses", {"thinking_token_budget": -1}),
    "thinking in Messages": ("/v1/messages", {"thinking": {"type": "adaptive"}}),
    "effort in Messages": ("/v1/messages", {"output_config": {"effort": "high"}}),
}
"""Requests that say how much reasoning they want."""


def probe(path: str, limit: int, **fields: Any) -> tuple[str, int]:
    """A connection test, as clients send it: the answer's JSON, and its number of tokens."""
    client = TestClient(
        application(Counting("We need to think about this one. " * 60)),
        headers={"Authorization": f"Bearer {KEY}"},
    )
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": MODEL, **PATHS[path], name: limit, **fields}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.text, usage.get("completion_tokens") or usage["output_tokens"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("limit", [16, 64, 100, 256])
def test_small_limit_leaves_room_for_answer(
    path: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(enforcement.GRAMMAR_VARIABLE, raising=False)
    text, used = probe(path, limit)
    assert "Well." in text and '"reasoning_ended_by":"budget"' in text
    assert used <= limit


@pytest.mark.parametrize(("path", "fields"), CHOSEN.values(), ids=CHOSEN)
def test_small_limit_keeps_requested_reasoning(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(enforcement.GRAMMAR_VARIABLE, raising=False)
    text, used = probe(path, 100, **fields)
    assert "Well." not in text and used == 100


TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "f"}},
    "/v1/responses": {"type": "function", "name": "f"},
    "/v1/messages": {"name": "f", "input_schema": {"type": "object"}},
}


@pytest.mark.parametrize("path", PATHS)
def test_small_limit_keeps_reasoning_before_tool_calls(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without reasoning, the model would answer where it should call."""
    monkeypatch.delenv(enforcement.GRAMMAR_VARIABLE, raising=False)
    text, used = probe(path, 100, tools=[TOOLS[path]])
    assert "Well." not in text and used == 100
    choice = {"type": "none"} if path == "/v1/messages" else "none"
    text, used = probe(path, 100, tools=[TOOLS[path]], tool_choice=choice)
    assert "Well." in text and used <= 100


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("variable", "limit"),
    [("VLLM_MLX_HARMONY_REASONING_BUDGET", 100), (enforcement.GRAMMAR_VARIABLE, 100), ("", 257)],
)
def test_reasoning_is_kept_without_budgets_or_small_limit(
    path: str, variable: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(enforcement.GRAMMAR_VARIABLE, raising=False)
    if variable:
        monkeypatch.setenv(variable, "off")
    text, used = probe(path, limit)
    assert "Well." not in text and used == limit


# --- Control requests.

THOUGHTS = "One, two, three. " * 400
CONTROL = "/v1/chat/completions/control"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hm?"}]},
    "/v1/responses": {"input": "Hm?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hm?"}], "max_tokens": 9_000},
}


async def end_reasoning(
    host: SingleEngineHost, path: str, key: str = KEY
) -> tuple[dict[str, Any], str]:
    """The response to a control request during the reasoning of a stream, and the stream."""
    headers = {"Authorization": f"Bearer {KEY}"}
    transport = httpx.ASGITransport(host.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        response: dict[str, Any] = {}

        async def end() -> None:
            await wait_until_async(lambda: bool(host.answers.running), "an answer")
            (running,) = host.answers.running
            body = {"id": f"chatcmpl-{running.seed}", "action": "reasoning_end"}
            bearer = {"Authorization": f"Bearer {key}"}
            response.update((await http.post(CONTROL, json=body, headers=bearer)).json())

        body = {"model": MODEL, "stream": True, **BODIES[path]}
        answer, _ = await asyncio.gather(http.post(path, json=body, headers=headers), end())
    return response, answer.text


@pytest.mark.usefixtures("no_grammars")
@pytest.mark.parametrize("path", BODIES)
def test_control_request_ends_reasoning(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id may be that of any API; the answer says that a request ended its reasoning."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_REPETITIONS", "1000")
    host = Counting(THOUGHTS)
    verdict, text = run(end_reasoning(host, path))
    assert verdict == {"success": True}
    assert "Well." in text and '"reasoning_ended_by":"request"' in text
    assert host.reasons == ["request"]
    assert host.leases == 0


@pytest.mark.usefixtures("no_grammars")
def test_control_request_fails_if_reasoning_is_unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MLX_HARMONY_REPETITIONS", "0")
    host = Counting(THOUGHTS)
    verdict, text = run(end_reasoning(host, "/v1/chat/completions"))
    assert verdict["success"] is False
    assert "cannot be ended" in verdict["message"]
    assert "Well" in text and "reasoning_ended_by" not in text


@pytest.mark.usefixtures("no_grammars")
def test_control_request_with_other_key_finds_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def anybody(connection: Any) -> None:
        """Every key is valid."""

    monkeypatch.setenv("VLLM_MLX_HARMONY_REPETITIONS", "1000")
    host = Counting(THOUGHTS)
    host.authenticate = anybody  # type: ignore[method-assign]
    request = end_reasoning(host, "/v1/chat/completions", key="other")
    verdict, text = run(request)
    assert verdict == {"success": False, "message": "no answer with this id is being generated"}
    assert "reasoning_ended_by" not in text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"id": "chatcmpl-00", "action": "reasoning_end"}, 200),
        ({"id": "x", "action": "reasoning_end"}, 200),
        ({"id": "chatcmpl-00", "action": "stop"}, 400),
        ({"action": "reasoning_end"}, 400),
        ([], 400),
    ],
)
def test_control_requests_are_validated(body: object, status: int) -> None:
    http = TestClient(Counting("x").app, headers={"Authorization": f"Bearer {KEY}"})
    response = http.post(CONTROL, json=body, headers={"host": "localhost"})
    assert response.status_code == status
    if status == 200:
        assert response.json()["success"] is False
    assert (
        http.post(CONTROL, headers={"Authorization": "x", "host": "localhost"}).status_code == 401
    )
