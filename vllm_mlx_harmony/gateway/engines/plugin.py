"""Another vllm-mlx with this plugin: its own id endpoint, ``POST /harmony/v1/generate``.

The format is this project's own (`server.ids`): the request has the fields of ``Settings``, an
event has ``ids``, ``finish`` and ``cached_tokens``, or ``prompt_progress`` before the first id.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm_mlx_harmony.gateway.engines.dialect import (
    Capabilities,
    Chunk,
    Dialect,
    EngineRequest,
    count_of,
    finish_of,
    ids_of,
    parsed,
    progress_of,
)


def _body(request: EngineRequest) -> dict[str, Any]:
    return {
        "model": request.model,
        "prompt": request.prompt,
        "settings": asdict(request.settings),
        "tenant": request.salt,
        "grammar": request.grammar,
        "min_tokens": request.min_tokens,
    }


class PluginReader:
    """Events with new ids."""

    def read(self, data: str) -> Chunk:
        event = parsed(data)
        finish = finish_of(event.get("finish"))
        cached, progress = event.get("cached_tokens"), event.get("prompt_progress")
        return Chunk(ids_of(event.get("ids")), finish, count_of(cached), progress_of(progress))


PLUGIN = Dialect(
    "vllm-mlx",
    "/harmony/v1/generate",
    Capabilities(grammar=True, grammar_white_space=True, cached_tokens=True, tenant_salt=True),
    _body,
    PluginReader,
)
