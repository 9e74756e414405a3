"""OpenAI's conversations through the official client, in memory and in a file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")

import front_end_checks
import openai
from front_end_checks import check_tool_loop_in_conversation, create_response
from loops import run
from official_clients import clients
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.server import settings
from vllm_mlx_harmony.server.front_end import installed_in
from vllm_mlx_harmony.server.storage import conversations
from vllm_mlx_harmony.server.storage.store import ResourceKey

pytestmark = pytest.mark.usefixtures("no_grammars")

SCRIPTS = {
    **front_end_checks.SCRIPTS,
    "Hello!": "<|channel|>analysis<|message|>They greet.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Good day.<|return|>",
    "And now?": "<|channel|>final<|message|>Still here.<|return|>",
}
SYSTEM = {"type": "message", "role": "developer", "content": "Be brief."}


@pytest.fixture(params=["memory", "file"], autouse=True)
def _stored(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if request.param == "file":
        monkeypatch.setenv(settings.variable("store"), str(tmp_path / "responses.db"))


@pytest.fixture
def host() -> SingleEngineHost:
    return SingleEngineHost(ScriptedEngine(SCRIPTS, 3))


@pytest.fixture
def wire(host: SingleEngineHost) -> Iterator[TestClient]:
    with TestClient(host.app, base_url="http://localhost") as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


def run_with_client(
    test: Callable[[Any], Awaitable[None]], host: SingleEngineHost, key: str = KEY
) -> None:
    """Runs ``test`` with the official client."""

    async def call_test() -> None:
        client, _ = clients(host, key)
        await test(client)

    run(call_test())


def test_items_are_added_listed_and_deleted(host: SingleEngineHost) -> None:
    async def test(client: Any) -> None:
        conversation = await client.conversations.create(metadata={"topic": "demo"}, items=[SYSTEM])
        assert conversation.object == "conversation"
        assert await client.conversations.retrieve(conversation.id) == conversation
        changed = await client.conversations.update(conversation.id, metadata={"topic": "other"})
        assert changed.metadata == {"topic": "other"}
        assert (changed.id, changed.created_at) == (conversation.id, conversation.created_at)

        user = {"type": "message", "role": "user", "content": "Hello!"}
        added = await client.conversations.items.create(conversation.id, items=[user, user])
        assert [item.content[0].text for item in added.data] == ["Hello!"] * 2
        assert added.first_id != added.last_id
        items = [item async for item in client.conversations.items.list(conversation.id, limit=1)]
        assert [item.role for item in items] == ["user", "user", "developer"]
        assert items[0].id == added.last_id
        retrieved = await client.conversations.items.retrieve(
            added.last_id, conversation_id=conversation.id
        )
        assert retrieved == added.data[1]
        shortened = await client.conversations.items.delete(
            added.last_id, conversation_id=conversation.id
        )
        assert shortened == changed
        page = await client.conversations.items.list(conversation.id, order="asc")
        assert [item.id for item in page.data] == [items[2].id, added.first_id]

        deletion = await client.conversations.delete(conversation.id)
        assert (deletion.id, deletion.deleted, deletion.object) == (
            conversation.id,
            True,
            "conversation.deleted",
        )
        with pytest.raises(openai.NotFoundError) as missing:
            await client.conversations.retrieve(conversation.id)
        assert missing.value.code == "conversation_not_found"

    run_with_client(test, host)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_responses_are_added_to_conversation(host: SingleEngineHost, stream: bool) -> None:
    """Each response sees the conversation so far and is added to it, reasoning included."""

    async def test(client: Any) -> None:
        conversation = await client.conversations.create(items=[SYSTEM])
        first = await create_response(
            client, stream=stream, input="Hello!", conversation=conversation.id
        )
        assert first.conversation.id == conversation.id
        assert first.output_text == "Good day."
        again = await create_response(
            client,
            stream=stream,
            input="And now?",
            conversation={"id": conversation.id},
            store=False,
        )
        assert again.output_text == "Still here."
        page = await client.conversations.items.list(conversation.id, order="asc")
        assert [item.type for item in page.data] == [
            *("message", "message", "reasoning", "message"),
            *("message", "message"),
        ]
        texts = [item.content[0].text for item in page.data if item.type == "message"]
        assert texts == ["Be brief.", "Hello!", "Good day.", "And now?", "Still here."]
        assert [item.id for item in page.data[2:4]] == [item.id for item in first.output]
        own = await client.responses.input_items.list(first.id)
        assert [item.content[0].text for item in own.data] == ["Hello!"]

    run_with_client(test, host)
    prompt = vocab.encoding().decode(list(host.engine.prompts[-1]))  # type: ignore[attr-defined]
    assert "Be brief." in prompt
    assert prompt.endswith(
        "<|start|>user<|message|>Hello!<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Good day.<|end|>"
        "<|start|>user<|message|>And now?<|end|><|start|>assistant"
    )
    assert host.leases == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tool_loop_in_conversation_continues_where_model_stopped(
    host: SingleEngineHost, stream: bool
) -> None:
    check_tool_loop_in_conversation(host, stream)


def test_input_is_optional(host: SingleEngineHost) -> None:
    async def test(client: Any) -> None:
        user = {"type": "message", "role": "user", "content": "Hello!"}
        conversation = await client.conversations.create(items=[user])
        assert (
            await create_response(client, stream=False, conversation=conversation.id)
        ).output_text == "Good day."
        empty = await client.conversations.create()
        with pytest.raises(openai.BadRequestError, match="input"):
            await create_response(client, stream=False, conversation=empty.id)

    run_with_client(test, host)


def test_conversations_of_other_tenants_are_not_found(host: SingleEngineHost) -> None:
    """Nor is the id of a conversation accepted as that of a response."""
    host.authenticate = _accept_any_key  # type: ignore[method-assign]

    async def test(client: Any) -> None:
        conversation = await client.conversations.create(items=[SYSTEM])
        other = client.with_options(api_key="other")
        for request in (
            other.conversations.retrieve(conversation.id),
            other.conversations.items.create(conversation.id, items=[SYSTEM]),
            other.conversations.delete(conversation.id),
            other.responses.create(model=MODEL, input="Hello!", conversation=conversation.id),
            client.responses.retrieve(conversation.id),
            client.responses.create(
                model=MODEL, input="Hello!", previous_response_id=conversation.id
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await request
        assert len((await client.conversations.items.list(conversation.id)).data) == 1

    run_with_client(test, host)


async def _accept_any_key(connection: Any) -> None:
    """Every key is valid."""


def test_failed_response_is_not_added(host: SingleEngineHost) -> None:
    async def test(client: Any) -> None:
        conversation = await client.conversations.create()
        with pytest.raises(openai.BadRequestError):
            await create_response(
                client, stream=False, conversation=conversation.id, input="Hello!", top_p=2
            )
        assert (await client.conversations.items.list(conversation.id)).data == []
        first = await create_response(client, stream=False, input="Hello!")
        with pytest.raises(openai.BadRequestError, match="cannot be combined") as both:
            await create_response(
                client,
                stream=False,
                conversation=conversation.id,
                previous_response_id=first.id,
                input="And now?",
            )
        assert both.value.param == "conversation"

    run_with_client(test, host)


def test_append_does_not_recreate_deleted_conversation(host: SingleEngineHost) -> None:
    """As when it is deleted during a response, which ends all the same."""
    stored = installed_in(host.app).responses.conversations
    key = ResourceKey("conv_1", "tenant")
    stored.append(key, [{"id": "msg_1", "type": "message"}])
    with pytest.raises(RequestError) as missing:
        stored.find(key)
    assert missing.value.status == 404


def test_conversation_size_is_limited(wire: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_ITEMS", 2)
    key = wire.post("/v1/conversations", json={"items": [SYSTEM, SYSTEM]}).json()["id"]
    response = wire.post(f"/v1/conversations/{key}/items", json={"items": [SYSTEM]})
    assert response.status_code == 413
    body = {"model": MODEL, "input": "Hello!", "conversation": key}
    assert wire.post("/v1/responses", json=body).status_code == 200
    assert len(wire.get(f"/v1/conversations/{key}/items").json()["data"]) == 2


def test_wrong_key_and_method_are_rejected(wire: TestClient) -> None:
    for path in ("/v1/conversations", "/v1/conversations/conv_1/items"):
        refused = wire.post(path, json={}, headers={"Authorization": "Bearer wrong"})
        assert refused.status_code == 401
        put = wire.put(path)
        assert (put.status_code, put.json()["error"]["code"]) == (405, "method_not_allowed")


OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "x"}
ERRORS: list[tuple[object, str | None]] = [
    ({"items": "x"}, "items"),
    ({"items": [{"type": "message", "role": "user"}]}, "items[0].content"),
    ({"items": [SYSTEM, {"type": "message", "role": "nobody"}]}, "items[1].role"),
    ({"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0]"),
    ({"items": [SYSTEM, {"type": "compaction_trigger"}]}, "items[1]"),
    ([], None),
]


@pytest.mark.parametrize(("body", "param"), ERRORS)
def test_errors_name_the_field(wire: TestClient, body: Any, param: str | None) -> None:
    key = wire.post("/v1/conversations", json={}).json()["id"]
    for path in ("/v1/conversations", f"/v1/conversations/{key}/items"):
        response = wire.post(path, json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
    assert wire.post(f"/v1/conversations/{key}", json={}).status_code == 400
    missing = wire.get(f"/v1/conversations/{key}/items/msg_1")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "item_id")
    reference = {"model": MODEL, "input": "Hello!", "conversation": {}}
    assert wire.post("/v1/responses", json=reference).json()["error"]["param"] == "conversation.id"


def test_response_errors_name_their_own_input(wire: TestClient) -> None:
    key = wire.post("/v1/conversations", json={"items": [SYSTEM]}).json()["id"]
    body = {"model": MODEL, "input": [OUTPUT], "conversation": key}
    assert wire.post("/v1/responses", json=body).json()["error"]["param"] == "input[0]"
    trigger = [{"role": "user", "content": "x"}, {"type": "compaction_trigger"}]
    refused = wire.post("/v1/responses", json={**body, "input": trigger}).json()["error"]
    assert (refused["param"], refused["code"]) == ("conversation", "unsupported_value")
