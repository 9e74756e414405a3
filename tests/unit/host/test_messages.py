"""The routes of the Messages API without a model: who is admitted, and how others are refused."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm_mlx")

from starlette.requests import Request
from vllm_mlx import server

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.engine_api.engine import GenerationSettings
from vllm_mlx_harmony.host import contract
from vllm_mlx_harmony.host.adapter import VllmMlx
from vllm_mlx_harmony.protocols.messages import error_body
from vllm_mlx_harmony.server import messages
from vllm_mlx_harmony.server.front_end import Caller, FrontEnd
from vllm_mlx_harmony.server.host import tenant_of
from vllm_mlx_harmony.server.sampling import limited_to_context
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.storage.single_server import SingleServer
from vllm_mlx_harmony.server.storage.store import MemoryStore

KEY = "sesame"
PATHS = ["/v1/messages", "/v1/messages/count_tokens"]
OURS = [*PATHS, "/v1/chat/completions", "/v1/responses"]
HELLO = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is no model: admitted requests get 503."""
    monkeypatch.setattr(server, "_engine", None)
    monkeypatch.setattr(server, "_model_name", None)
    monkeypatch.setattr(server, "_api_key", KEY)
    contract.activate(ServerSettings.read())
    yield
    contract.deactivate()


def post(path: str, headers: dict[str, Any]) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return await client.post(path, json=HELLO, headers=headers)

    return asyncio.run(send())


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


PAIRS: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"x-api-key": KEY}, True),
    ({"Authorization": bearer(KEY)}, True),
    ({"Authorization": bearer(KEY) + b"\xa0"}, True),  # FastAPI strips it: no other tenant
    ({"x-api-key": KEY, "Authorization": bearer(KEY)}, True),
    ({"x-api-key": KEY, "Authorization": bearer("wrong")}, True),
    ({"x-api-key": KEY, "Authorization": bearer("fälsch")}, True),
    ({"x-api-key": KEY, "Authorization": b"Basic c2VzYW1l"}, True),
    ({"x-api-key": "wrong", "Authorization": bearer(KEY)}, True),
    ({"x-api-key": "sécret".encode(), "Authorization": bearer(KEY)}, True),
    ({"x-api-key": "wrong", "Authorization": bearer("other")}, False),
    ({"x-api-key": "wrong"}, False),
    ({"x-api-key": ""}, False),
    ({"x-api-key": "sécret".encode()}, False),
    ({"Authorization": bearer("sécret")}, False),
    ({"x-api-key": "sécret".encode(), "Authorization": bearer("sécret")}, False),
]


@pytest.mark.nightly(sample=5)
@pytest.mark.parametrize(("headers", "admitted"), PAIRS)
@pytest.mark.parametrize("path", PATHS)
def test_one_right_key_is_enough(path: str, headers: dict[str, Any], admitted: bool) -> None:
    response = post(path, headers)
    document = response.json()
    kind = "overloaded_error" if admitted else "authentication_error"
    assert (response.status_code, document["error"]["type"]) == (503 if admitted else 401, kind)
    assert re.fullmatch(r"req_[0-9a-f]{24}", document["request_id"])
    assert response.headers["request-id"] == document["request_id"]


@pytest.mark.parametrize("headers", [{}, {"Authorization": bearer("sécret")}])
def test_server_without_a_key_requires_none(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, Any]
) -> None:
    monkeypatch.setattr(server, "_api_key", None)
    for path in OURS:
        assert post(path, headers).status_code == 503


@pytest.mark.parametrize("path", OURS)
def test_non_ascii_key_is_a_wrong_key(path: str) -> None:
    odd, wrong = (post(path, {"Authorization": bearer(key)}) for key in ("sécret", "wrong"))
    assert odd.status_code == 401
    assert odd.json()["error"] == wrong.json()["error"]


def test_internal_error_is_not_a_wrong_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(server._rate_limiter, "is_allowed", broken)
    assert post(PATHS[0], {"x-api-key": KEY}).status_code == 500


def test_rate_limit_error_has_a_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = server.RateLimiter(requests_per_minute=1, enabled=True)
    monkeypatch.setattr(server, "_rate_limiter", limiter)
    first, second, third = (post(PATHS[0], {"x-api-key": KEY}) for _ in range(3))
    assert [response.status_code for response in (first, second, third)] == [503, 429, 429]
    assert second.json()["error"]["type"] == "rate_limit_error"
    assert int(second.headers["retry-after"]) > 0
    ids = [response.headers["request-id"] for response in (first, second, third)]
    assert ids == [response.json()["request_id"] for response in (first, second, third)]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("headers", [headers for headers, admitted in PAIRS if admitted])
def test_same_key_is_the_same_tenant(headers: dict[str, Any]) -> None:
    raw = [(name.lower().encode(), _bytes(value)) for name, value in headers.items()]
    request = Request({"type": "http", "headers": raw, "app": server.app})
    asyncio.run(messages.bearer(request))
    alone = Request({"type": "http", "headers": [(b"authorization", bearer(KEY))]})
    assert tenant_of(request) == tenant_of(alone)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def test_unavailable_tools_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    front_end = FrontEnd(VllmMlx(ServerSettings()), SingleServer(MemoryStore()))
    with caplog.at_level(logging.INFO, logger="vllm_mlx_harmony"):
        messages.MESSAGES.read({**HELLO, "tools": tools}, Defaults(), Caller(front_end, "tenant"))
    assert [record.getMessage() for record in caplog.records] == [
        "messages: tools that are not available: 'web_search'"
    ]


CLAUDE_CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
"""What Claude Code searches for to learn that it must shorten the conversation, and by how much."""


@pytest.mark.parametrize("prompt_tokens", [131_072, 131_073, 1_000_000])
def test_claude_code_reads_both_numbers(prompt_tokens: int) -> None:
    with pytest.raises(RequestError) as caught:
        limited_to_context(GenerationSettings(1, 1.0, 1.0), prompt_tokens, 131_072)
    found = CLAUDE_CODE.search(json.dumps(error_body(caught.value)))
    assert found is not None
    assert found.groups() == (str(prompt_tokens), "131072")
