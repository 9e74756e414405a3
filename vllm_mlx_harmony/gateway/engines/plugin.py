"""Another vllm-mlx with this plugin: its own id endpoint, ``POST /harmony/v1/generate``.

The format is this project's own (`server.ids`): the request has the fields of
``GenerationSettings``, an event has ``ids``, ``finish`` and ``cached_tokens``, and ``origins`` and
``logprobs`` if they are requested, or ``prompt_progress`` before the first id. Servers reject
settings that they do not know, and those after 0.2.0 list those that they do.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from vllm_mlx_harmony.engine_api.engine import Step
from vllm_mlx_harmony.gateway.engines.dialect import (
    Capabilities,
    Dialect,
    EngineRequest,
    Json,
    count_of,
    finish_of,
    ids_of,
    logprobs_of,
    progress_of,
)


def _body(request: EngineRequest) -> Json:
    settings = asdict(request.settings)
    for name, absent in (("origins", False), ("prediction", ()), ("top_logprobs", None)):
        if settings[name] == absent:
            del settings[name]
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
    ids, progress = ids_of(event.get("ids")), progress_of(event.get("prompt_progress"))
    entries = (
        (logprob.get("logprob"), logprob.get("top")) for logprob in event.get("logprobs") or ()
    )
    logprobs, origins = logprobs_of(ids, entries), str(event.get("origins") or "")
    accepted, rejected = count_of(event.get("accepted")), count_of(event.get("rejected"))
    return Step(ids, finish, cached, progress, origins, accepted, rejected, logprobs)


def capabilities_of(about: Json) -> Capabilities:
    """Those of a server whose id endpoint responds with ``about`` to GET."""
    if not isinstance(settings := about.get("settings"), list):
        settings = []
    return replace(
        PLUGIN.capabilities,
        logprobs="top_logprobs" in settings,
        prediction="prediction" in settings,
    )


PLUGIN = Dialect(
    "vllm-mlx",
    "/harmony/v1/generate",
    Capabilities(
        grammar=True,
        grammar_white_space=True,
        cached_tokens=True,
        tenant_salt=True,
        logprobs=True,
        prediction=True,
    ),
    _body,
    _step,
)
