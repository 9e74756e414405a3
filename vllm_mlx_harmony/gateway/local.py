"""A gateway whose engine is a model in its own process: the server without vllm-mlx.

``--engine mlx:MODEL`` names a directory or a repository on Hugging Face. The weights are loaded
with mlx-lm, on the one thread that computes with them (`engine.thread`); the tokenizer is that of
the front end, since every Harmony model has the same. Everything else is what a gateway has.

What only vllm-mlx has, such as several models beside each other, embeddings and its own flags, is
not here: `vllm-mlx-harmony serve`, with vllm-mlx installed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.errors import HostError, RequestError
from vllm_mlx_harmony.core.replay import Archive
from vllm_mlx_harmony.core.turn import Sampling
from vllm_mlx_harmony.engine import (
    device,
    exposition,
    loading,
    mlx_lm_names,
    resources,
    startup_lines,
    status_line,
)
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine
from vllm_mlx_harmony.engine.prefix_cache import SHARED_TENANT
from vllm_mlx_harmony.engine_api.engine import Engine
from vllm_mlx_harmony.gateway.engines.detection import LOCAL
from vllm_mlx_harmony.gateway.fleet import NAMESPACE
from vllm_mlx_harmony.gateway.host import Gateway
from vllm_mlx_harmony.gateway.settings import GatewaySettings
from vllm_mlx_harmony.inspector.routes import Section
from vllm_mlx_harmony.model_files import (
    GENERATION,
    configuration,
    length_of,
    lists_harmony,
)
from vllm_mlx_harmony.required_names import check
from vllm_mlx_harmony.server import defaults, warm_prompts
from vllm_mlx_harmony.server.endpoint import OpenAIEndpoint
from vllm_mlx_harmony.server.host import Deadline
from vllm_mlx_harmony.standin import is_standin

logger = logging.getLogger("vllm_mlx_harmony")


ONLY_VLLM_MLX = (
    *("/v1/completions", "/v1/embeddings", "/v1/rerank"),
    *("/v1/audio/transcriptions", "/v1/audio/speech"),
)
"""Paths at which vllm-mlx serves other models, or text without messages."""


class LocalGateway(Gateway):
    """Loads the model when it is created; ``serving`` unloads it at the end.

    Raises ``HostError`` if it cannot be loaded, or is no Harmony model.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        super().__init__(settings)
        self._source = str(settings.local_model)
        resources.configure(
            resources.engine_options(settings, resources.configured_options(self.server_settings)),
            self.server_settings.cache
            if settings.cache_memory_mb is None
            else settings.cache_memory_mb << 20,
            settings.ssd_cache_dir,
            settings.ssd_cache_max_gb,
            self.server_settings.ssd_writes,
        )
        self.archive: Archive | None = resources.disk
        file = settings.warm_prompts
        self._warm_prompts = [] if file is None else warm_prompts.read(file)
        self.model = _loaded(self._source)
        self.metrics.registry.register(_Metrics(self))
        self.endpoints = (
            OpenAIEndpoint("/harmony/status", ("GET",), self._status, "lists the requests"),
            OpenAIEndpoint("/v1/cache/stats", ("GET",), self._cache, "counts the prefix cache"),
            OpenAIEndpoint("/v1/cache", ("DELETE",), self._clear, "empties the prefix cache"),
            *(OpenAIEndpoint(path, ("POST",), _only_vllm_mlx) for path in ONLY_VLLM_MLX),
        )

    @property
    def context_length(self) -> int | None:
        return self.model.context_length

    @property
    def healthy(self) -> bool:
        return self.model.healthy

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        logger.info("engine %s", start_line(self._source, self.model))
        status_line.start(
            lambda: [(name, model.status()) for name, model in self._models],
            enabled=self.server_settings.status_line,
        )
        try:
            if self._warm_prompts:
                await self._warm()
            yield
        finally:
            await asyncio.to_thread(self.model.close)
            await asyncio.to_thread(resources.close)

    async def _warm(self) -> None:
        defaults = self.defaults(self.model)
        warmed = await warm_prompts.warm(
            self.model, self._warm_prompts, defaults, self.renderer, SHARED_TENANT
        )
        logger.info(
            "warm prompts: %d tokens of %d in %.1f s, %d skipped",
            *(warmed.tokens, warmed.computed, warmed.seconds, warmed.skipped),
        )

    def engine_for(self, deadline: Deadline) -> Engine:
        return self.model

    def sampling(self, flags: Sampling) -> Sampling:
        """From the flags, or else from the model's ``generation_config.json``."""
        own = configuration(str(self.settings.local_model), GENERATION)
        return defaults.read_sampling(flags, own)

    def states(self) -> list[dict[str, Any]]:
        up = self.model.healthy
        problem = "" if up else "the engine's thread has died: restart the server"
        health = "up" if up else "down"
        return [{"url": f"{LOCAL}{self._source}", "up": up, "health": health, "problem": problem}]

    def sections(self) -> list[Section]:
        return [*exposition.sections(self._models)]

    @property
    def _models(self) -> list[tuple[str, MlxEngine]]:
        return [(self.settings.model, self.model)]

    async def _status(self, _: Request) -> Response:
        return JSONResponse(exposition.document(self._models))

    async def _cache(self, _: Request) -> Response:
        return JSONResponse({"engine_cache": exposition.cache_counters(self.model)})

    async def _clear(self, _: Request) -> Response:
        await resources.clear()
        return JSONResponse({"status": "cleared", "engine_cache": exposition.CLEARED})


def start_line(source: str, engine: MlxEngine) -> str:
    """The description of a loaded model for the log."""
    context = startup_lines.context(engine, length_of(source))
    return (
        f"{LOCAL}{source}: {startup_lines.memory(engine)}; context: {context}; "
        f"prefix cache: {', '.join(startup_lines.prefix_cache())}"
    )


async def _only_vllm_mlx(request: Request) -> Response:
    raise RequestError(
        f"{request.url.path} is only served by vllm-mlx: pip install vllm-mlx-harmony, and then "
        "vllm-mlx-harmony serve MODEL",
        status=404,
        code="not_found",
    )


def _loaded(source: str) -> MlxEngine:
    """The engine of a model. Raises ``HostError``."""
    check(mlx_lm_names.NAMES)
    engine = MlxEngine(source, resources.options)
    try:
        directory = loading.directory_of(source)
        if not lists_harmony(source):
            raise HostError(
                f"{source} is not a gpt-oss (Harmony) model: its tokenizer is not o200k_harmony"
            )
        trusted = is_standin(directory)
        engine.load(partial(loading.load, source, directory, trust_remote_code=trusted))
    except BaseException as error:
        engine.close()
        if isinstance(error, (OSError, ValueError)):  # of mlx-lm, for what it cannot load
            raise HostError(f"{source} cannot be loaded: {error}") from error
        raise
    return engine


class _Metrics(Collector):
    """The memory of the model, and its prefix cache, whenever Prometheus asks."""

    def __init__(self, host: LocalGateway) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        engine = self._host.model
        for name, value, about in (
            ("engine_healthy", engine.healthy, "1 while the model's thread is alive."),
            ("memory_bytes", device.used(), "Bytes in use by the model."),
            ("memory_limit_bytes", engine.budget.limit, "Bytes that the model may use."),
            ("prefix_cache_bytes", resources.tree().counters().nbytes, "Bytes in memory."),
        ):
            yield GaugeMetricFamily(f"{NAMESPACE}_{name}", about, float(value))
        yield from exposition.disk_metrics()
