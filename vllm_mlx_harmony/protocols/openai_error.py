"""The body of an error response in OpenAI's format, for Chat Completions and Responses."""

from __future__ import annotations

from typing import Any

from vllm_mlx_harmony.core.errors import HarmonyFailure

_CALLERS_FAULT = range(400, 500)
_ERRORS: dict[int, tuple[str, str | None]] = {
    401: ("invalid_request_error", "invalid_api_key"),
    424: ("external_connector_error", "http_error"),
    429: ("requests", "rate_limit_exceeded"),
}


def error_body(error: HarmonyFailure) -> dict[str, Any]:
    """``error`` in OpenAI's format, with the ``type`` that api.openai.com sends for its status."""
    other = "invalid_request_error" if error.status in _CALLERS_FAULT else "server_error"
    kind, code = _ERRORS.get(error.status, (other, None))
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code or code,
        }
    }
