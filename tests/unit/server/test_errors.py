"""Exceptions as error responses: their status, code and headers."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("starlette")

from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient

from vllm_mlx_harmony.core.errors import HostError, RequestError
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.server.errors import CLIENT_CLOSED, error_response, failure_of

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def client(kind: type[SingleEngineHost] = SingleEngineHost) -> TestClient:
    headers = {"Authorization": f"Bearer {KEY}"}
    app = kind(ScriptedEngine({})).app
    return TestClient(app, "http://localhost", raise_server_exceptions=False, headers=headers)


def test_disconnect_while_sending_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    answer = error_response(chat.error_body, ClientDisconnect())
    assert answer.status_code == CLIENT_CLOSED
    assert not caplog.records


ERRORS = [
    pytest.param(HTTPException(404, "no model"), 404, "model_not_found", "model", None, id="404"),
    pytest.param(HTTPException(504, "late"), 504, "timeout", None, None, id="504"),
    pytest.param(HTTPException(503, "not yet"), 503, "server_unavailable", None, "5", id="503"),
    pytest.param(
        HTTPException(429, "slow down", {"Retry-After": "7"}), 429, None, None, "7", id="429"
    ),
    pytest.param(
        HTTPException(503, {"error": "busy", "message": "later"}),  # type: ignore[arg-type]
        503,
        "server_unavailable",
        None,
        "5",
        id="a detail with parts",
    ),
    pytest.param(RequestError("x", param="y"), 400, None, "y", None, id="ours"),
    pytest.param(HostError("x", retry_after=3), 503, "server_unavailable", None, "3", id="later"),
]


@pytest.mark.parametrize(("error", "status", "code", "param", "retry_after"), ERRORS)
def test_error_is_mapped_to_status_and_headers(
    error: Any, status: int, code: str | None, param: str | None, retry_after: str | None
) -> None:
    failure = failure_of(error)
    assert (failure.status, failure.code, failure.param) == (status, code, param)
    response = error_response(chat.error_body, failure)
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry_after
    assert json.loads(response.body)["error"]["message"]


def test_internal_error_is_a_response() -> None:
    class Broken(SingleEngineHost):
        async def acquire(self, *_: Any) -> Any:
            raise LookupError("a bug")

    response = client(Broken).post(CHAT, json={"model": MODEL, "messages": []})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "a bug" not in response.text


HALF = b"\\ud83d"
"""Half of a surrogate pair, escaped as in JSON."""


@pytest.mark.parametrize("half", [HALF, b"\xed\xa0\xbd"])
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, b'{"model":"HALF","messages":[{"role":"user","content":"Hi"}]}', 404),
        ("/v1/messages", b'{"model":"HALF","max_tokens":9,"messages":[]}', 404),
        (RESPONSES, b'{"model":"HALF","input":"Hi"}', 404),
        (RESPONSES, b'{"model":"gpt-oss-20b","previous_response_id":"HALF","input":""}', 404),
        (RESPONSES, b'{"model":"gpt-oss-20b","input":[{"type":"HALF"}]}', 400),
        (
            RESPONSES,
            b'{"model":"gpt-oss-20b","input":[{"type":"item_reference","id":"HALF"}]}',
            400,
        ),
        (
            RESPONSES,
            b'{"model":"gpt-oss-20b","input":"","tools":[{"type":"function","name":[]}],"user":"HALF"}',
            400,
        ),
        ("/v1/responses/compact", b'{"model":"HALF","input":"Hi"}', 404),
        ("/v1/responses/input_tokens", b'{"model":"HALF","input":"Hi"}', 404),
        (CHAT, b'{"model":"gpt-oss-20b","messages":[{"role":"HALF"}]}', 400),
        (CHAT, b'{"model":"gpt-oss-20b","HALF":1e999,"messages":[]}', 400),
    ],
)
def test_half_a_surrogate_pair_gets_an_error_response(
    path: str, body: bytes, status: int, half: bytes
) -> None:
    """It is read as U+FFFD: a response that repeated it could not be encoded."""
    response = client().post(path, content=body.replace(b"HALF", half))
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]
