"""Parts of answers that both of OpenAI's APIs have: errors, log probabilities, token counts."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from vllm_mlx_harmony.core.deltas import TextLogprob, Usage
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


def entries(logprobs: Iterable[TextLogprob], no_bytes: Any = None) -> list[Document]:
    """An entry for each token; ``no_bytes`` stands for the bytes of a control token."""

    def entry(token: TextLogprob) -> Document:
        content = no_bytes if token.content is None else list(token.content)
        return {"token": token.text, "logprob": token.logprob, "bytes": content}

    return [{**entry(token), "top_logprobs": [*map(entry, token.top)]} for token in logprobs]


def output_details(usage: Usage) -> Document:
    """The object in the field ``completion_tokens_details`` or ``output_tokens_details``.

    ``tool_output_tokens`` is an extension, and predictions are OpenAI's for Chat alone. They are
    absent from an answer that has none.
    """
    optional = {
        "tool_output_tokens": usage.tool_tokens,
        "accepted_prediction_tokens": usage.accepted_prediction_tokens,
        "rejected_prediction_tokens": usage.rejected_prediction_tokens,
    }
    reported = {name: tokens for name, tokens in optional.items() if tokens}
    return {"reasoning_tokens": usage.reasoning_tokens, **reported}
