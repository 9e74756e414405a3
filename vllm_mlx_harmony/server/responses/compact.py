"""``POST /v1/responses/compact``: the summary of a conversation as a document of its own.

What is asked of the model, and what becomes of its answer: ``protocols.responses.compaction``.
"""

from __future__ import annotations

from typing import Any

from vllm_mlx_harmony.core.deltas import Delta
from vllm_mlx_harmony.core.turn import Defaults, ResponseInfo
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.protocols.responses import ResponsesRequest
from vllm_mlx_harmony.server.responses.background import read
from vllm_mlx_harmony.server.serving import Api


def _read(body: object, defaults: Defaults, tenant: str) -> ResponsesRequest:
    return read(body, defaults, tenant).compaction()


class _CompactionEmitter:
    """Writes the document out of the response that has the summary."""

    def __init__(self, parsed: ResponsesRequest, info: ResponseInfo, *_: Any) -> None:
        self._parsed, self._info = parsed, info
        self._emitter = parsed.emitter(info)

    def feed(self, delta: Delta) -> list[Event]:
        """Nothing goes on the wire before the end."""
        return self._emitter.feed(delta)

    def result(self) -> dict[str, Any]:
        """The document. Raises ``OutputError`` when the model wrote no summary."""
        document: dict[str, Any] = self._parsed.compacted(self._emitter.result(), self._info)
        return document


COMPACT = Api(
    "responses_compact",
    _read,
    responses.error_body,
    blocks=True,
    servers=responses.client_servers,
    emitter=_CompactionEmitter,
)
