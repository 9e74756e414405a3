"""``POST /v1/responses/compact``: summarizes a conversation (`protocols.responses.compaction`)."""

from __future__ import annotations

from typing import Any

from vllm_mlx_harmony.core.deltas import Delta
from vllm_mlx_harmony.core.turn import ResponseInfo
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.protocols.responses import ResponsesRequest
from vllm_mlx_harmony.server.responses.references import References, read
from vllm_mlx_harmony.server.serving import Api


class _CompactionEmitter:
    """Makes the document from the response that contains the summary."""

    def __init__(self, parsed: ResponsesRequest, info: ResponseInfo, *_: Any) -> None:
        self._parsed, self._info = parsed, info
        self._emitter = parsed.emitter(info)

    def feed(self, delta: Delta) -> list[Event]:
        """Implements ``Emitter``."""
        return self._emitter.feed(delta)

    def result(self) -> dict[str, Any]:
        """The document. Raises ``OutputError`` if the model wrote no summary."""
        document: dict[str, Any] = self._parsed.compacted(self._emitter.result(), self._info)
        return document


COMPACT = Api(
    "responses_compact",
    lambda body, defaults, tenant: read(body, defaults, References(tenant)).compaction(),
    blocks=True,
    servers=responses.client_servers,
    emitter=_CompactionEmitter,
)
