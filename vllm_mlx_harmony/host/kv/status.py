"""Prefix reuse where vllm-mlx shows and empties its caches: `/v1/cache/stats`, `DELETE /v1/cache`.

Both routes of vllm-mlx import mlx_vlm to ask after its caches, and with it torch: for seconds no
other request is answered. A Harmony model has nothing in those caches. So they are asked only when
somebody else has imported mlx_vlm already; what is answered otherwise is vllm-mlx's own answer for
when there is no mlx_vlm. Drop when vllm-mlx no longer imports it there.

Knows those routes and the methods behind them. Refuses to know what is remembered (`prefix`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.host.kv import prefix
from vllm_mlx_harmony.host.models import is_harmony
from vllm_mlx_harmony.host.mount import Route, forward_to_host
from vllm_mlx_harmony.host.server_globals import server

logger = logging.getLogger(__name__)

VISION = "mlx_vlm.utils"
"""The module that takes seconds to import."""

NAME = "harmony_prefix_reuse"
"""Of our counters among vllm-mlx's."""

Method = Callable[[Any], Any]


def with_counters(original: Method) -> Method:
    """``get_cache_stats`` of an engine, with our counters beside vllm-mlx's on a Harmony engine."""

    @wraps(original)
    def get_cache_stats(self: Any) -> Any:
        stats = original(self)
        if not is_harmony(getattr(self, "tokenizer", None)):
            return stats
        disk = prefix.disk()
        below = {} if disk is None else {"disk": asdict(disk.counters())}
        return {**(stats or {}), NAME: {**prefix.status(model_of(self)), **below}}

    return get_cache_stats


def with_ours(original: Method) -> Method:
    """What empties the caches of an engine or a scheduler, ours for the same model as well."""

    @wraps(original)
    def clear(self: Any) -> Any:
        model = model_of(self)
        if model is not None:
            prefix.forget(model)
        return original(self)

    return clear


def model_of(holder: Any) -> Any:
    """The module of an engine or a scheduler; ``None`` when it is not loaded.

    A scheduler has it itself, the simple engine has vllm-mlx's wrapper of it. A batched engine has
    the scheduler, two objects down.
    """
    core = getattr(getattr(holder, "_engine", None), "engine", None)
    if core is not None:
        return core.scheduler.model
    return getattr(getattr(holder, "_model", holder), "model", None)


async def cache_stats(request: Request) -> Response:
    """``GET /v1/cache/stats``."""
    engine = _harmony_alone()
    if engine is None:
        return await forward_to_host(request)
    try:
        stats = engine.get_cache_stats()
    except Exception as error:  # noqa: BLE001 - as vllm-mlx answers
        stats = {"error": f"engine cache stats failed: {error}"}
    missing = "Cache stats not available (mlx_vlm not loaded)"
    return JSONResponse({"engine_cache": stats, "error": missing})


async def clear_cache(request: Request) -> Response:
    """``DELETE /v1/cache``."""
    await _empty_disk()
    engine = _harmony_alone()
    if engine is None:
        return await forward_to_host(request)
    try:
        owned = getattr(engine, "_clear_runtime_caches_on_owner", None)
        cleared = engine.clear_runtime_caches() if owned is None else await owned()
    except Exception as error:
        logger.exception("the engine's caches could not be emptied")
        cleared = {"error": str(error)}
    missing = "Cache clear not available (mlx_vlm not loaded)"
    return JSONResponse({"status": "cleared", "engine_cache": cleared, "error": missing})


async def clear_prefix_cache(request: Request) -> Response:
    """``DELETE /v1/cache/prefix``: vllm-mlx's, and the disk."""
    await _empty_disk()
    return await forward_to_host(request)


async def _empty_disk() -> None:
    """Of all models, and first of all what would be written anew: somebody wants it gone."""
    disk = prefix.disk()
    if disk is not None:
        prefix.memory().forget(lambda _: True)
        await asyncio.to_thread(disk.clear)


def _harmony_alone() -> Any:
    """The server's engine, when it is Harmony's and nobody here uses mlx_vlm; else ``None``."""
    engine = server()._engine
    alone = VISION not in sys.modules and is_harmony(getattr(engine, "tokenizer", None))
    return engine if alone else None


_WHY = "vllm-mlx imports mlx_vlm, and torch, on the event loop"

ROUTES: tuple[Route, ...] = (
    Route("/v1/cache/stats", ("GET",), cache_stats, _WHY),
    Route("/v1/cache", ("DELETE",), clear_cache, _WHY),
    Route(
        "/v1/cache/prefix", ("DELETE",), clear_prefix_cache, "what is on the disk is emptied, too"
    ),
)
