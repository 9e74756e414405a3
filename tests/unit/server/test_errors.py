"""Exceptions as error responses: their status, code and headers."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from vllm_mlx_harmony.core.errors import HostError, RequestError
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.server.endpoint import CLIENT_CLOSED, error_response, failure_of


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
