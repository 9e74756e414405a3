"""Another vllm-mlx with this plugin: its own id endpoint, ``POST /harmony/v1/generate``.

What it takes and gives is this project's (`server.ids`): the request's fields are those of
``Settings``, an event has ``ids``, ``finish`` and ``cached_tokens``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm_mlx_harmony.gateway.engines.dialect import (
    Capabilities,
    Chunk,
    EngineRequest,
    count_of,
    failure_in,
    finish_of,
    ids_of,
    parsed,
)

CAPABILITIES = Capabilities(
    grammar=True, grammar_white_space=True, cached_tokens=True, tenant_salt=True
)


@dataclass(frozen=True, slots=True)
class Plugin:
    """This project's id endpoint."""

    capabilities: Capabilities = CAPABILITIES
    name: str = "vllm-mlx"
    path: str = "/harmony/v1/generate"

    def body(self, request: EngineRequest) -> dict[str, Any]:
        """See ``Dialect``."""
        return {
            "model": request.model,
            "prompt": request.prompt,
            "settings": asdict(request.settings),
            "tenant": request.salt,
            "grammar": request.grammar,
            "min_tokens": request.min_tokens,
        }

    def reader(self) -> PluginReader:
        """See ``Dialect``."""
        return PluginReader()


class PluginReader:
    """Events with new ids."""

    def read(self, data: str) -> Chunk:
        """See ``Reader``."""
        event = parsed(data)
        if "error" in event:
            raise failure_in(event)
        finish = finish_of(event.get("finish"))
        return Chunk(ids_of(event.get("ids")), finish, count_of(event.get("cached_tokens")))
