"""The body of an error response in OpenAI's format, for Chat Completions and Responses."""

from __future__ import annotations

from http import HTTPStatus

from vllm_mlx_harmony.core.errors import HarmonyFailure
from vllm_mlx_harmony.protocols.events import Document

_ERRORS: dict[int, tuple[str, str | None]] = {
    401: ("invalid_request_error", "invalid_api_key"),
    424: ("external_connector_error", "http_error"),
    429: ("requests", "rate_limit_exceeded"),
}


def error_body(error: HarmonyFailure) -> Document:
    """``error`` in OpenAI's format, with the ``type`` that api.openai.com sends for its status."""
    is_client_error = error.status < HTTPStatus.INTERNAL_SERVER_ERROR
    other = "invalid_request_error" if is_client_error else "server_error"
    kind, code = _ERRORS.get(error.status, (other, None))
    body = {"message": error.message, "type": kind, "param": error.param}
    return {"error": {**body, "code": error.code or code}}
