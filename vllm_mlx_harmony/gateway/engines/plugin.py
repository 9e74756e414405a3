"""Another vllm-mlx with this plugin: its own id endpoint, ``POST /harmony/v1/generate``.

The format is this project's own (`server.ids`): the request has the fields of ``Settings``, an
event has ``ids``, ``finish``, ``cached_tokens`` and ``origins``, or ``prompt_progress`` before the
first id.
"""

from __future__ import annotations

from dataclasses import asdict

from vllm_mlx_harmony.gateway.engines.dialect import (
    Capabilities,
    Dialect,
    EngineRequest,
    Json,
    count_of,
    finish_of,
    ids_of,
    progress_of,
)
from vllm_mlx_harmony.server.engine import Step


def _body(request: EngineRequest) -> Json:
    settings = asdict(request.settings)
    del settings["prediction"]  # older servers reject fields that they do not know
    if not settings["origins"]:
        del settings["origins"]
    return {
        "model": request.model,
        "prompt": request.prompt,
        "settings": settings,
        "tenant": request.salt,
        "grammar": request.grammar,
        "min_tokens": request.min_tokens,
    }


def _step(event: Json, seen: int) -> Step:
    finish, cached = finish_of(event.get("finish")), count_of(event.get("cached_tokens"))
    progress, origins = progress_of(event.get("prompt_progress")), event.get("origins")
    return Step(ids_of(event.get("ids")), finish, cached, progress, str(origins or ""))


PLUGIN = Dialect(
    "vllm-mlx",
    "/harmony/v1/generate",
    Capabilities(grammar=True, grammar_white_space=True, cached_tokens=True, tenant_salt=True),
    _body,
    _step,
)
