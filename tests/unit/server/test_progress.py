"""How far a prompt is: who is shown it, how often, and who must not see it.

The engine of these tests reports its progress and moves the clock of the event loop between two
reports, so that no test waits.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")
pytest.importorskip("httpx_sse")

import httpx
from fakes import KEY, MODEL, Alone, ScriptedEngine
from httpx_sse import aconnect_sse
from official_clients import clients
from openai.lib.streaming.chat import ChatCompletionStreamState

from vllm_mlx_harmony.core.deltas import Progress
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Step, Steps
from vllm_mlx_harmony.server.app import application

T = TypeVar("T")
Reports = Sequence[tuple[float, Progress]]
"""Progress, each after so many seconds."""

SCRIPT = {"Hello!": "<|channel|>final<|message|>Good day.<|return|>"}
SAID = "Good day."


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock is put forward; by itself it hardly moves."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() / 50 + self.ahead


def run(coming: Coroutine[Any, Any, T]) -> T:
    loop = Loop()
    try:
        return loop.run_until_complete(coming)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@dataclass(eq=False)
class Reporting(ScriptedEngine):
    """Reports its progress, then answers; ``late`` is reported behind the first ids."""

    scripts: dict[str, str] = field(default_factory=lambda: SCRIPT)
    reports: Reports = ()
    late: Progress | None = None

    async def generate(self, request: GenerationRequest) -> Steps:
        """The reports, and the ids of the script."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        for seconds, progress in self.reports:
            loop.ahead += seconds
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            yield Step((), progress=progress)
        async for step in super().generate(request):
            yield step
            if self.late is not None:
                loop.ahead += 10
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


async def posted(engine: Reporting, api: str, **fields: Any) -> str:
    """The body of an answer."""
    path, body = PATHS[api]
    transport = httpx.ASGITransport(application(Alone(engine)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        headers = {"authorization": f"Bearer {KEY}"}
        response = await client.post(path, json={"model": MODEL, **body, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return response.text


def lines(body: str, prefix: str) -> list[str]:
    return [line.removeprefix(prefix) for line in body.splitlines() if line.startswith(prefix)]


def comments(body: str) -> list[dict[str, int]]:
    return [json.loads(each) for each in lines(body, ": prompt_progress ")]


def chunks(body: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in lines(body, "data: ") if each != "[DONE]"]


def shown(body: str) -> list[tuple[int, int]]:
    """Place and what is processed, of everything that a client is shown of the progress."""
    found = [chunk["prompt_progress"] for chunk in chunks(body) if "prompt_progress" in chunk]
    return [(each.get("place", 0), each["processed"]) for each in [*found, *comments(body)]]


ASKED: dict[str, Any] = {"return_progress": True}

ROWS: dict[str, tuple[Reports, list[tuple[int, int]], list[tuple[int, int]]]] = {
    # What is reported; what chunks show where they are asked for; what comments show.
    "slow": (SLOW, [(2, 10), (1, 10), (0, 30), (0, 70), (0, 100)], [(1, 10), (0, 30), (0, 70)]),
    "quick": (QUICK, [(0, 10), (0, 100)], []),
    "twice a second": (TWICE, [(0, 10), (0, 12), (0, 14)], [(0, 12), (0, 14)]),
    "nothing": ([], [], []),
    "cached": ([(0.0, at(99)), (0.0, at(100))], [(0, 99), (0, 100)], []),
}


@pytest.mark.parametrize("row", ROWS)
def test_chunks_have_the_progress_on_request(row: str) -> None:
    reports, asked, _ = ROWS[row]
    body = run(posted(Reporting(reports=reports), "chat", stream=True, **ASKED))
    assert shown(body) == asked and not comments(body)


@pytest.mark.parametrize("api", ["responses", "messages"])
@pytest.mark.parametrize("row", ROWS)
def test_comments_show_the_progress_in_the_other_streams(row: str, api: str) -> None:
    reports, _, commented = ROWS[row]
    body = run(posted(Reporting(reports=reports), api, stream=True))
    assert shown(body) == commented and "prompt_progress" not in "".join(lines(body, "data: "))


@pytest.mark.parametrize("fields", [ASKED, {}], ids=str)
@pytest.mark.parametrize("api", PATHS)
def test_at_most_two_a_second(api: str, fields: dict[str, Any]) -> None:
    body = run(posted(Reporting(reports=DENSE), api, stream=True, **fields))
    assert len(shown(body)) == (0 if api == "chat" and not fields else 4 + (api == "chat"))


def test_the_fields_are_those_of_llama_cpp() -> None:
    """Every chunk is one of the stream, without a delta; usage stays where it was."""
    options = {"include_usage": True}
    engine = Reporting(reports=SLOW)
    body = run(posted(engine, "chat", stream=True, stream_options=options, **ASKED))
    found = chunks(body)
    last = next(each for each in reversed(found) if "prompt_progress" in each)
    assert last["prompt_progress"] == {"total": 100, "cache": 10, "processed": 100, "time_ms": 1500}
    choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
    assert last["choices"] == [choice] and last["usage"] is None
    assert {key: last[key] for key in ("id", "object", "created", "model")} == {
        key: found[0][key] for key in ("id", "object", "created", "model")
    }
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    at_place = next(each for each in found if "prompt_progress" in each)["prompt_progress"]
    assert at_place == {"total": 100, "cache": 10, "processed": 10, "time_ms": 0, "place": 2}


UNASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, not asked": ("chat", {"stream": True}),
    "chat, false": ("chat", {"stream": True, "return_progress": False}),
    "chat, null": ("chat", {"stream": True, "return_progress": None}),
    "chat, whole": ("chat", ASKED),
    "responses, whole": ("responses", ASKED),
    "messages, whole": ("messages", ASKED),
}


@pytest.mark.parametrize(("api", "fields"), UNASKED.values(), ids=UNASKED)
def test_streams_are_unchanged_without_the_flag(api: str, fields: dict[str, Any]) -> None:
    def normalized(engine: Reporting) -> str:
        """An answer without its ids and times."""
        return re.sub(r"[0-9a-f]{20,}|\b\d{9,}(\.\d+)?", "", run(posted(engine, api, **fields)))

    assert normalized(Reporting(reports=SLOW)) == normalized(Reporting())


@pytest.mark.parametrize("api", PATHS)
def test_no_progress_is_sent_after_the_first_token(api: str) -> None:
    engine = Reporting(reports=SLOW, late=at(100, 9.9))
    body = run(posted(engine, api, stream=True, **ASKED))
    expected = ROWS["slow"][1 if api == "chat" else 2]
    assert shown(body) == expected
    assert body.rindex("prompt_progress") < body.index("Good")


@pytest.mark.parametrize("refused", [1, "yes", {}])
def test_the_flag_is_a_boolean(refused: object) -> None:
    async def status() -> int:
        transport = httpx.ASGITransport(application(Alone(Reporting())))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            path, body = PATHS["chat"]
            asked = {"model": MODEL, **body, "return_progress": refused}
            headers = {"authorization": f"Bearer {KEY}"}
            return (await client.post(path, json=asked, headers=headers)).status_code

    assert run(status()) == 400


def test_pings_come_between_the_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment is no event for a client that waits for one: silence is measured without them."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_PING_SECONDS", "2")
    reports = [(0.6, at(place, 0.0, 20 - place)) for place in range(20)]
    body = run(posted(Reporting(reports=reports), "messages", stream=True))
    pings = body.count("event: ping")
    assert 4 <= pings <= 6 and len(comments(body)) == 19


def documents(body: str) -> list[dict[str, Any]]:
    """The events of a stream."""
    lines = body.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_silence_has_events_that_clients_parse(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients give up on a stream in which they find none (semantics E1), and proxies on a
    connection on which nothing comes."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_PING_SECONDS", "2")
    reports = [(0.6, at(place, 0.0, 20 - place)) for place in range(20)]
    silent = documents(run(posted(Reporting(reports=reports), api, stream=True)))
    plain = documents(run(posted(Reporting(), api, stream=True)))
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


# --- Clients do not notice


async def by_chat(engine: Reporting) -> str | None:
    client, _ = clients(Alone(engine))
    state = ChatCompletionStreamState()
    messages: list[Any] = [{"role": "user", "content": "Hello!"}]
    async for chunk in await client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, extra_body=ASKED
    ):
        state.handle_chunk(chunk)
    message = state.get_final_completion().choices[0].message
    assert message.role == "assistant"
    return message.content


async def by_responses(engine: Reporting) -> str | None:
    client, _ = clients(Alone(engine))
    async with client.responses.stream(model=MODEL, input="Hello!", store=False) as events:
        numbers = [event.sequence_number async for event in events]
        assert numbers == sorted(numbers)
        return (await events.get_final_response()).output_text


async def by_messages(engine: Reporting) -> str | None:
    _, client = clients(Alone(engine))
    messages: list[Any] = [{"role": "user", "content": "Hello!"}]
    async with client.messages.stream(model=MODEL, messages=messages, max_tokens=99) as events:
        async for _ in events:
            pass
        return await events.get_final_text()


@pytest.mark.parametrize("client", [by_chat, by_responses, by_messages])
def test_official_clients_do_not_notice(client: Any) -> None:
    assert run(client(Reporting(reports=SLOW))) == SAID


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_other_readers_of_event_streams_skip_comments(api: str) -> None:
    """httpx-sse reads as the specification has it: no event for a comment and its empty line."""

    async def events(engine: Reporting) -> list[str]:
        path, body = PATHS[api]
        transport = httpx.ASGITransport(application(Alone(engine)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"authorization": f"Bearer {KEY}"}
            asked = {"model": MODEL, **body, "stream": True}
            connecting = aconnect_sse(client, "POST", path, json=asked, headers=headers)
            async with connecting as source:
                return [event.event async for event in source.aiter_sse()]

    found = run(events(Reporting(reports=SLOW)))
    assert found == run(events(Reporting())) and len(found) > 5
