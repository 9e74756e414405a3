"""Probes of engines: whether they can be reached, and generate (`routing_policy`)."""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import ClientSession

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.gateway.engines.detection import detect, first_id, get
from vllm_mlx_harmony.gateway.engines.http import EngineSilent, EngineUnavailable, HttpEngine
from vllm_mlx_harmony.gateway.fleet import Backend, Fleet
from vllm_mlx_harmony.gateway.routing_policy import Health

logger = logging.getLogger("vllm_mlx_harmony")

TICK = 0.1
"""Seconds between two checks for engines whose probe is due."""


async def watch(http: ClientSession, fleet: Fleet) -> None:
    """Probes engines concurrently, each when it is due."""
    probes: dict[Backend, asyncio.Future[None]] = {}
    try:
        while True:
            fleet.drained()
            probes = {backend: task for backend, task in probes.items() if not task.done()}
            for backend in fleet.routing.due(time.monotonic(), probes):
                probes[backend] = asyncio.ensure_future(probe(http, backend, fleet.model))
            await asyncio.sleep(TICK)
    finally:
        for task in probes.values():
            task.cancel()


async def probe(http: ClientSession, backend: Backend, model: str) -> None:
    """Checks the health of an engine. One that is doubted, or was down, must generate an id; one
    that was down may have been replaced, and is detected again."""
    if backend not in backend.routing.engines:
        return  # removed since it was due
    try:
        if backend.routing.doubted(backend) and backend.engine is not None:
            await _check_generation(backend, backend.engine)
        if backend.routing.health(backend) not in (Health.UP, Health.DRAINING):
            backend.found(await detect(http, backend.spec, model))
        elif backend.routing.doubted(backend):
            backend.probed("")
        else:
            await get(http, backend.spec, "/health")
            if not backend.routing.doubted(backend):
                backend.probed("")
    except EngineUnavailable as error:
        if not (error.is_full and backend.up):
            backend.probed(error.message)
    except HostError as error:
        backend.probed(error.message)
    except Exception as error:  # whatever it is, the engine is probed again
        logger.exception("engine %s could not be probed", backend.spec.url)
        backend.probed(str(error) or type(error).__name__)


async def _check_generation(backend: Backend, engine: HttpEngine) -> None:
    """Raises ``EngineSilent`` if no id comes for the probe, and neither ids nor progress for any
    other request. Other failures are raised unless the engine is down: another one may have taken
    its place."""
    began = time.monotonic()
    seconds = max(backend.routing.rule.min_silence / 2, backend.expected())
    try:
        await first_id(engine, seconds)
    except EngineSilent:
        if backend.alive_at <= began:
            raise
    except EngineUnavailable:
        if backend.routing.health(backend) in (Health.UP, Health.DRAINING):
            raise
