"""Every row through every API, whole and streamed, with ids one by one, a few and all at once.

In process: the official clients, the front end, a fake engine. `tests/system/served` has some
of the rows on sockets, on both of the host's engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")
pytest.importorskip("ollama")


from anthropic_checker import check_stream
from event_checker import check, from_wire
from official_clients import clients, ollama_client
from openai.lib.streaming.chat import ChatCompletionStreamState
from row_answers import (
    GENERATED,
    chat_request,
    check_chat,
    check_messages,
    check_ollama,
    check_responses,
    messages_request,
    ollama_request,
    responses_request,
)
from rows import Row
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient

from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.app import application

SCRIPTS = {f"<|message|>{row.id}<|end|>": row.output for row in GENERATED}
AT_ONCE = (1, 3)
"""Ids per step of a stream; an answer that is not streamed has only one step."""


class Front:
    """The front end over engines with steps of several sizes."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        hosts = {size: SingleEngineHost(ScriptedEngine(SCRIPTS, size)) for size in (*AT_ONCE, 1000)}
        self.clients = {size: clients(host) for size, host in hosts.items()}
        self.ollama = {size: ollama_client(host) for size, host in hosts.items()}
        self.wire = {}
        for size, host in hosts.items():
            self.wire[size] = TestClient(application(host), base_url="http://localhost")
            self.wire[size].headers["Authorization"] = f"Bearer {KEY}"

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Runs ``test`` in the event loop of the clients."""
        self._loop.run_until_complete(asyncio.wait_for(test, 60))

    def close(self) -> None:
        """Closes the clients and the loop."""
        for pair in self.clients.values():
            for client in pair:
                self._loop.run_until_complete(client.close())
        for client in self.ollama.values():
            self._loop.run_until_complete(client.close())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(enforcement.GRAMMAR_VARIABLE, "off")
        front = Front()
        yield front
        front.close()


every_row: Callable[..., Any] = pytest.mark.parametrize("row", GENERATED, ids=lambda row: row.id)


@pytest.mark.nightly(sample=3)
@every_row
def test_chat_answers_match_row(front: Front, row: Row) -> None:
    async def test() -> None:
        request = chat_request(row, MODEL)
        whole = await front.clients[1000][0].chat.completions.create(**request)
        streamed = []
        for size in AT_ONCE:
            state = ChatCompletionStreamState()
            chunks = await front.clients[size][0].chat.completions.create(
                **request, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in chunks:
                state.handle_chunk(chunk)
            streamed.append(state.current_completion_snapshot)
        check_chat(row, whole, *streamed)

    front.run(test())


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("row", [row for row in GENERATED if not row.stop], ids=lambda row: row.id)
def test_responses_match_row(front: Front, row: Row) -> None:
    """Every event of the streams is checked on the wire."""
    request = responses_request(row, MODEL)
    streamed = []
    for size in AT_ONCE:
        answer = front.wire[size].post("/v1/responses", json={**request, "stream": True})
        assert answer.status_code == 200, answer.text
        streamed.append(check(from_wire(answer.text)))

    async def test() -> None:
        whole = await front.clients[1000][0].responses.create(**request)
        check_responses(row, whole.model_dump(mode="json", exclude_unset=True), *streamed)

    front.run(test())


@pytest.mark.nightly(sample=3)
@every_row
def test_messages_match_row(front: Front, row: Row) -> None:
    """One of the streams is checked on the wire."""
    request = messages_request(row, MODEL)
    answer = front.wire[3].post("/v1/messages", json={**request, "stream": True})
    blocks = [block.split("\n") for block in answer.text.split("\n\n") if block[:1] == "e"]
    events = [(name[len("event: ") :], data[len("data: ") :]) for name, data in blocks]
    assert check_stream(events).error is None

    async def test() -> None:
        whole = await front.clients[1000][1].messages.create(**request)
        streamed = []
        for size in AT_ONCE:
            async with front.clients[size][1].messages.stream(**request) as stream:
                streamed.append(await stream.get_final_message())
        check_messages(row, whole, *streamed)

    front.run(test())


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize(
    "row", [row for row in GENERATED if not row.one_call], ids=lambda row: row.id
)
def test_ollama_answers_match_row(front: Front, row: Row) -> None:
    request = ollama_request(row, MODEL)

    async def test() -> None:
        answers = [[await front.ollama[1000].chat(**request)]]
        for size in AT_ONCE:
            lines = await front.ollama[size].chat(**request, stream=True)
            answers.append([line async for line in lines])
        check_ollama(row, *answers)

    front.run(test())
