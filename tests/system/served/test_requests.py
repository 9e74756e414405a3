"""The host's routes for cancellation and caches, with the plugin's ids and engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest
from server_process import FLAG, HARMONY, IS_LIGHT
from sse import arriving

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

TOKENS = 1500

SCRIPTS = [
    Script("Slow", "<|channel|>final<|message|>" + "la " * TOKENS + "<|return|>", delay_ms=20),
    Script("Quick", "<|channel|>final<|message|>Done.<|return|>"),
]


@pytest.fixture(scope="module")
def server(start: Start, standin_dir: Path) -> Iterator[Server]:
    standin.rescript(standin_dir, SCRIPTS)
    host_flags = () if IS_LIGHT else ("--prefix-cache-size", "9")
    server = start(*FLAG, *host_flags, "--cache-memory-mb", "64", command=HARMONY)
    yield server
    server.stop()


def body(path: str, text: str, *, stream: bool, model: str) -> dict[str, Any]:
    if path == "/v1/responses":
        return {"model": model, "input": text, "stream": stream}
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "stream": stream, "max_tokens": 2000}


APIS = {
    "/v1/chat/completions": lambda event: event["id"],
    "/v1/responses": lambda event: event["response"]["id"],
    "/v1/messages": lambda event: event["message"]["id"],
}


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("path", APIS)
def test_running_answer_is_cancelled(server: Server, path: str, method: str) -> None:
    model = str(server.model)
    with server.client() as client:
        slow = body(path, "Slow", stream=True, model=model)
        with client.stream("POST", path, json=slow) as stream:
            events = arriving(stream.iter_lines())
            request_id = APIS[path](next(events))
            target = f"/v1/requests/{request_id}" + ("/cancel" if method == "POST" else "")
            response = httpx.request(method, server.base_url + target, timeout=20)
            rest = list(events)
        assert response.status_code == 200
        expected = {"object": "request.cancel", "id": request_id, "cancelled": True, "model": model}
        assert response.json() == expected
        assert "the request was cancelled" in json.dumps(rest[-1])
        assert len(rest) < TOKENS
        server.wait_for_requests()
        quick = client.post(path, json=body(path, "Quick", stream=False, model=model))
        assert "Done." in quick.text
        repeated = httpx.request(method, server.base_url + target, timeout=20)
        assert repeated.status_code == 404


def open_stream(api: str, url: str, model: str) -> tuple[str, Iterator[Any], type[Exception]]:
    """The id of a streamed answer, the rest of its events, and its client's exception."""
    if api == "messages":
        anthropic_client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        message = {"role": "user", "content": "Slow"}
        events = iter(
            anthropic_client.messages.create(
                max_tokens=2000, messages=[message], model=model, stream=True
            )  # type: ignore[list-item]
        )
        return next(events).message.id, events, anthropic.APIError  # type: ignore[union-attr]
    openai_client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    if api == "responses":
        stream = iter(openai_client.responses.create(input="Slow", model=model, stream=True))
        return next(stream).response.id, stream, openai.APIError  # type: ignore[union-attr]
    messages: Any = [{"role": "user", "content": "Slow"}]
    chunks = iter(
        openai_client.chat.completions.create(messages=messages, model=model, stream=True)
    )
    return next(chunks).id, chunks, openai.APIError


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_client_receives_error_on_cancellation(server: Server, api: str) -> None:
    """Chat and Messages raise; Responses has an event, as OpenAI's does."""
    request_id, rest, error = open_stream(api, server.base_url, str(server.model))
    url = f"{server.base_url}/v1/requests/{request_id}/cancel"
    owner = {"Authorization": "Bearer none"}  # only the owner can cancel the answer
    assert httpx.post(url, headers=owner, timeout=20).json()["cancelled"] is True
    if api == "responses":
        last = list(rest)[-1]
        assert last.type == "response.failed"
        assert "the request was cancelled" in last.response.error.message
        return
    with pytest.raises(error, match="the request was cancelled"):
        list(rest)


@pytest.mark.of_vllm_mlx
@pytest.mark.parametrize("key", ["chatcmpl-0", "resp_ab", "msg_xyz", "what"])
def test_unknown_id_is_answered_by_host(server: Server, key: str) -> None:
    response = httpx.post(f"{server.base_url}/v1/requests/{key}/cancel", timeout=20)
    assert response.status_code == 404
    expected = f"Request not found or cancellation is unsupported: {key}"
    assert response.json() == {"detail": expected}


@pytest.mark.of_vllm_mlx
def test_caches_are_shown_and_cleared_without_importing_torch(server: Server) -> None:
    """The host imports mlx_vlm on the event loop for this, which blocks it for seconds."""
    for _ in range(2):
        stats = httpx.get(f"{server.base_url}/v1/cache/stats", timeout=60).json()
        assert stats["engine_cache"]["harmony_prefix_reuse"]["budget"] == 64 << 20
        assert stats["error"] == "Cache stats not available (mlx_vlm not loaded)"
    result = httpx.delete(f"{server.base_url}/v1/cache", timeout=60).json()
    assert result["status"] == "cleared"
    stats = httpx.get(f"{server.base_url}/v1/cache/stats", timeout=60).json()
    assert stats["engine_cache"]["harmony_prefix_reuse"]["nbytes"] == 0


@pytest.mark.of_vllm_mlx
def test_startup_log_has_engine_cache_and_access(server: Server) -> None:
    log = server.log
    assert "\nvllm-mlx-harmony 0." in log
    for expected in (
        f"  model         {server.model}",
        "  engine        up to 32 concurrent answers",
        "  context       131,072 tokens",
        "  prefix cache  up to 64 MiB in memory",
        "  access        local only; no API key: any local client has access",
        f"  next          vllm-mlx-harmony launch codex --url {server.base_url}",
        "  no effect     --prefix-cache-size: the prefix cache is bounded in bytes, not in entries",
    ):
        assert expected in log
