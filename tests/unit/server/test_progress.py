"""Prompt progress: which clients get it, how often, and which must not.

No test waits: the clock of its event loop jumps.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from sse import documents

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")
pytest.importorskip("httpx_sse")

import httpx
from httpx_sse import aconnect_sse
from loops import run_in_virtual_time as run
from official_clients import clients
from openai.lib.streaming.chat import ChatCompletionStreamState
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost

from vllm_mlx_harmony.core.deltas import Progress
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Step, Steps
from vllm_mlx_harmony.server.app import application

Reports = Sequence[tuple[float, Progress]]
"""Progress, each with the seconds before it."""

SCRIPT = {"Hello!": "<|channel|>final<|message|>Good day.<|return|>"}
REPLY = "Good day."


@dataclass(eq=False)
class Reporting(ScriptedEngine):
    """Reports its progress, then answers; ``late`` is reported after the first ids."""

    scripts: dict[str, str] = field(default_factory=lambda: SCRIPT)
    reports: Reports = ()
    late: Progress | None = None

    async def generate(self, request: GenerationRequest) -> Steps:
        """The reports, and the ids of the script."""
        for seconds, progress in self.reports:
            await asyncio.sleep(seconds)
            yield Step((), progress=progress)
        async for step in super().generate(request):
            yield step
            if self.late is not None:
                await asyncio.sleep(10)
                yield Step((), progress=self.late)


def at(processed: int, seconds: float = 0.0, place: int = 0) -> Progress:
    return Progress(100, 10, processed, seconds, place)


SLOW: Reports = [
    (0.0, at(10, place=2)),
    (0.6, at(10, place=1)),
    (0.3, at(10, 0.0)),
    (0.3, at(30, 0.3)),
    (0.1, at(50, 0.4)),
    (1.0, at(70, 1.4)),
    (0.1, at(100, 1.5)),
]
"""A prompt that waits, and is then computed in 1.5 seconds."""

QUICK: Reports = [(0.0, at(10)), (0.01, at(50, 0.01)), (0.01, at(100, 0.02))]
DENSE: Reports = [(0.0, at(10)), *((0.001, at(11, 0.001)) for _ in range(2400)), (0.0, at(99))]
"""2400 reports within 2.4 seconds."""

TWICE: Reports = [(0.0, at(10)), (0.25, at(11)), (0.25, at(12)), (0.25, at(13)), (0.25, at(14))]

PATHS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}),
    "responses": ("/v1/responses", {"input": "Hello!", "store": False}),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 99},
    ),
}


async def post(engine: Reporting, api: str, **fields: Any) -> str:
    """The body of an answer."""
    path, body = PATHS[api]
    transport = httpx.ASGITransport(application(SingleEngineHost(engine)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        headers = {"authorization": f"Bearer {KEY}"}
        response = await client.post(path, json={"model": MODEL, **body, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return response.text


def lines(body: str, prefix: str) -> list[str]:
    return [line.removeprefix(prefix) for line in body.splitlines() if line.startswith(prefix)]


def comments(body: str) -> list[dict[str, int]]:
    return [json.loads(comment) for comment in lines(body, ": prompt_progress ")]


def progress_of(body: str) -> list[tuple[int, int]]:
    """Place and processed ids of all reports that a client gets."""
    reports = [chunk["prompt_progress"] for chunk in documents(body) if "prompt_progress" in chunk]
    return [(report.get("place", 0), report["processed"]) for report in [*reports, *comments(body)]]


RETURN_PROGRESS: dict[str, Any] = {"return_progress": True}

ROWS: dict[str, tuple[Reports, list[tuple[int, int]], list[tuple[int, int]]]] = {
    # reports of the engine; progress in chunks, if it is requested; progress in comments
    "slow": (SLOW, [(2, 10), (1, 10), (0, 30), (0, 70), (0, 100)], [(1, 10), (0, 30), (0, 70)]),
    "quick": (QUICK, [(0, 10), (0, 100)], []),
    "twice a second": (TWICE, [(0, 10), (0, 12), (0, 14)], [(0, 12), (0, 14)]),
    "nothing": ([], [], []),
    "cached": ([(0.0, at(99)), (0.0, at(100))], [(0, 99), (0, 100)], []),
}


@pytest.mark.parametrize("row", ROWS)
def test_chunks_have_progress_on_request(row: str) -> None:
    reports, expected, _ = ROWS[row]
    body = run(post(Reporting(reports=reports), "chat", stream=True, **RETURN_PROGRESS))
    assert progress_of(body) == expected and not comments(body)


@pytest.mark.parametrize("api", ["responses", "messages"])
@pytest.mark.parametrize("row", ROWS)
def test_other_streams_have_progress_in_comments(row: str, api: str) -> None:
    reports, _, expected = ROWS[row]
    body = run(post(Reporting(reports=reports), api, stream=True))
    assert progress_of(body) == expected and "prompt_progress" not in "".join(lines(body, "data: "))


@pytest.mark.parametrize("fields", [RETURN_PROGRESS, {}], ids=str)
@pytest.mark.parametrize("api", PATHS)
def test_progress_is_sent_at_most_twice_a_second(api: str, fields: dict[str, Any]) -> None:
    body = run(post(Reporting(reports=DENSE), api, stream=True, **fields))
    assert len(progress_of(body)) == (0 if api == "chat" and not fields else 4 + (api == "chat"))


def test_progress_has_fields_of_llama_cpp() -> None:
    """Its chunks are like the others, but without a delta; usage stays in the last chunk."""
    options = {"include_usage": True}
    engine = Reporting(reports=SLOW)
    body = run(post(engine, "chat", stream=True, stream_options=options, **RETURN_PROGRESS))
    parsed = documents(body)
    last = next(chunk for chunk in reversed(parsed) if "prompt_progress" in chunk)
    assert last["prompt_progress"] == {"total": 100, "cache": 10, "processed": 100, "time_ms": 1500}
    choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
    assert last["choices"] == [choice] and last["usage"] is None
    assert {key: last[key] for key in ("id", "object", "created", "model")} == {
        key: parsed[0][key] for key in ("id", "object", "created", "model")
    }
    assert parsed[0]["choices"][0]["delta"]["role"] == "assistant"
    at_place = next(chunk for chunk in parsed if "prompt_progress" in chunk)["prompt_progress"]
    assert at_place == {"total": 100, "cache": 10, "processed": 10, "time_ms": 0, "place": 2}


WITHOUT_PROGRESS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, not asked": ("chat", {"stream": True}),
    "chat, false": ("chat", {"stream": True, "return_progress": False}),
    "chat, null": ("chat", {"stream": True, "return_progress": None}),
    "chat, whole": ("chat", RETURN_PROGRESS),
    "responses, whole": ("responses", RETURN_PROGRESS),
    "messages, whole": ("messages", RETURN_PROGRESS),
}


@pytest.mark.parametrize(("api", "fields"), WITHOUT_PROGRESS.values(), ids=WITHOUT_PROGRESS)
def test_streams_are_unchanged_without_flag(api: str, fields: dict[str, Any]) -> None:
    def normalized(engine: Reporting) -> str:
        """An answer without its ids and times."""
        return re.sub(r"[0-9a-f]{20,}|\b\d{9,}(\.\d+)?", "", run(post(engine, api, **fields)))

    assert normalized(Reporting(reports=SLOW)) == normalized(Reporting())


@pytest.mark.parametrize("api", PATHS)
def test_no_progress_is_sent_after_first_token(api: str) -> None:
    engine = Reporting(reports=SLOW, late=at(100, 9.9))
    body = run(post(engine, api, stream=True, **RETURN_PROGRESS))
    expected = ROWS["slow"][1 if api == "chat" else 2]
    assert progress_of(body) == expected
    assert body.rindex("prompt_progress") < body.index("Good")


@pytest.mark.parametrize("refused", [1, "yes", {}])
def test_flag_must_be_boolean(refused: object) -> None:
    async def status() -> int:
        transport = httpx.ASGITransport(application(SingleEngineHost(Reporting())))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            path, body = PATHS["chat"]
            payload = {"model": MODEL, **body, "return_progress": refused}
            headers = {"authorization": f"Bearer {KEY}"}
            return (await client.post(path, json=payload, headers=headers)).status_code

    assert run(status()) == 400


def test_pings_are_sent_despite_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments are not events: they do not break the silence that pings must break."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_PING_SECONDS", "2")
    reports = [(0.6, at(place, 0.0, 20 - place)) for place in range(20)]
    body = run(post(Reporting(reports=reports), "messages", stream=True))
    pings = body.count("event: ping")
    assert 4 <= pings <= 6 and len(comments(body)) == 19


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_silence_is_filled_with_valid_events(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients give up on a stream without events (semantics E1), and proxies on a silent
    connection."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_PING_SECONDS", "2")
    reports = [(0.6, at(place, 0.0, 20 - place)) for place in range(20)]
    silent = documents(run(post(Reporting(reports=reports), api, stream=True)))
    plain = documents(run(post(Reporting(), api, stream=True)))
    assert 4 <= len(silent) - len(plain) <= 6
    if api == "chat":
        empty = [event for event in silent if event["choices"][0]["delta"] == {}]
        assert len(empty) - 1 == len(silent) - len(plain)
        assert {event["choices"][0]["finish_reason"] for event in empty} == {None, "stop"}
    else:
        numbers = [event["sequence_number"] for event in silent]
        assert numbers == list(range(len(silent)))
        kinds = [event["type"] for event in silent]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds.count("response.in_progress") - 1 == len(silent) - len(plain)
        created, *pings = silent[: len(silent) - len(plain) + 2]
        assert all(ping["response"] == created["response"] for ping in pings)


# --- Clients ignore progress


async def by_chat(engine: Reporting) -> str | None:
    client, _ = clients(SingleEngineHost(engine))
    state = ChatCompletionStreamState()
    messages: list[Any] = [{"role": "user", "content": "Hello!"}]
    async for chunk in await client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, extra_body=RETURN_PROGRESS
    ):
        state.handle_chunk(chunk)
    message = state.get_final_completion().choices[0].message
    assert message.role == "assistant"
    return message.content


async def by_responses(engine: Reporting) -> str | None:
    client, _ = clients(SingleEngineHost(engine))
    async with client.responses.stream(model=MODEL, input="Hello!", store=False) as events:
        numbers = [event.sequence_number async for event in events]
        assert numbers == sorted(numbers)
        return (await events.get_final_response()).output_text


async def by_messages(engine: Reporting) -> str | None:
    _, client = clients(SingleEngineHost(engine))
    messages: list[Any] = [{"role": "user", "content": "Hello!"}]
    async with client.messages.stream(model=MODEL, messages=messages, max_tokens=99) as events:
        async for _ in events:
            pass
        return await events.get_final_text()


@pytest.mark.parametrize("client", [by_chat, by_responses, by_messages])
def test_official_clients_ignore_progress(client: Any) -> None:
    assert run(client(Reporting(reports=SLOW))) == REPLY


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_httpx_sse_skips_comments(api: str) -> None:
    """It follows the specification, in which a comment and its empty line are no event."""

    async def events(engine: Reporting) -> list[str]:
        path, body = PATHS[api]
        transport = httpx.ASGITransport(application(SingleEngineHost(engine)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"authorization": f"Bearer {KEY}"}
            payload = {"model": MODEL, **body, "stream": True}
            connecting = aconnect_sse(client, "POST", path, json=payload, headers=headers)
            async with connecting as source:
                return [event.event async for event in source.aiter_sse()]

    names = run(events(Reporting(reports=SLOW)))
    assert names == run(events(Reporting())) and len(names) > 5
