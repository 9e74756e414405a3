"""vllm-mlx's server as the ``Host`` of the front end."""

from __future__ import annotations

import asyncio
import datetime
import secrets
import time
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response

from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.core.replay import Archive
from vllm_mlx_harmony.core.turn import Defaults, Sampling
from vllm_mlx_harmony.engine import resources
from vllm_mlx_harmony.engine_api.engine import Engine
from vllm_mlx_harmony.host import entry_points, metrics, tools
from vllm_mlx_harmony.host.mount import (
    forward_to_host,
    installed_front_end,
    reject_non_ascii_key,
)
from vllm_mlx_harmony.host.server_globals import InferenceTracker, server
from vllm_mlx_harmony.host.vllm_mlx_engine import engine_of
from vllm_mlx_harmony.model_files import (
    GENERATION,
    configuration,
    is_harmony_model,
    length_of,
)
from vllm_mlx_harmony.server import defaults, shutdown
from vllm_mlx_harmony.server.connections import with_connection_limits
from vllm_mlx_harmony.server.host import (
    ContextFactory,
    Deadline,
    Lease,
    NotHarmony,
    Renderer,
    Tracker,
    tenant_of,
)
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.tools.toolbox import Toolbox


class VllmMlx:
    """The ``Host``, over the globals and flags of vllm-mlx's server."""

    def __init__(self, settings: ServerSettings) -> None:
        self.server_settings = settings
        self._defaults: dict[str | None, Defaults] = {}  # by model, of one day
        self._day = datetime.date.min

    @property
    def toolbox(self) -> Toolbox | None:
        """The tool servers of ``--mcp-config``."""
        return tools.running

    @property
    def model_name(self) -> str | None:
        vllm = server()
        return None if vllm._model_manager is not None else str(vllm._model_name or "")

    async def models(self) -> dict[str, Any]:
        """vllm-mlx's list, with ``max_model_len`` as in vLLM, which clients configure."""
        vllm = server()
        document = (await vllm.list_models()).model_dump(mode="json")
        ours = engine_of(vllm._engine)  # None while it is unloaded
        for entry in document["data"]:
            path = vllm._model_path if entry["id"] == vllm._model_name else None
            length = length_of(path) if path is not None else None
            if length is not None and ours is not None:
                length = ours.context_length
            if length is not None:
                entry["max_model_len"] = length
        return document

    async def must_load(self, model: str | None) -> bool:
        vllm = server()
        manager = vllm._model_manager
        if manager is None:
            return vllm._engine is None and model in (None, vllm._model_name)
        if model is None or model in manager._loaded or model not in manager._registry:
            return False
        source = manager._registry[model].source
        return bool(await asyncio.to_thread(is_harmony_model, source))

    async def acquire(self, request: Request, model: str | None, deadline: Deadline) -> Lease:
        """Leases an engine from vllm-mlx, which tracks it by request."""
        vllm = server()
        if model is not None:
            vllm._validate_model_name(model)
        engine = await vllm._acquire_default_engine_for_request(
            request, total_timeout=deadline.total, deadline=deadline.at, model=model
        )
        if engine is None:
            raise ClientDisconnect
        give_back = partial(vllm._release_engine_for_request, request)
        if (ours := engine_of(engine)) is None:
            await give_back()
            raise NotHarmony
        return Lease(ours, tenant_of(request), deadline, give_back)

    async def forward(self, request: Request) -> Response:
        return await forward_to_host(request)

    def deadline(self, timeout: float | None) -> Deadline:
        """From the request, or else from ``--timeout``."""
        seconds = timeout or server()._default_timeout
        return Deadline(seconds, time.monotonic() + seconds)

    def defaults(self, engine: Engine | None) -> Defaults:
        """From the flags, and the model's ``generation_config.json``."""
        if self._day != (today := datetime.date.today()):
            self._day, self._defaults = today, {}
        model = None if engine is None else engine.model
        if model not in self._defaults:
            vllm = server()
            flags = Sampling(
                temperature=vllm._default_temperature,
                top_p=vllm._default_top_p,
                top_k=vllm._default_top_k,
                min_p=vllm._default_min_p,
                presence_penalty=vllm._default_presence_penalty,
                repetition_penalty=vllm._default_repetition_penalty,
            )
            read = defaults.read(vllm._default_chat_template_kwargs or {}, self.server_settings)
            own = {} if model is None else configuration(model, GENERATION)
            self._defaults[model] = replace(read, sampling=defaults.read_sampling(flags, own))
        return self._defaults[model]

    def max_tokens(self, requested: int | None) -> int:
        vllm = server()
        if requested is None:
            return vllm._default_max_tokens
        return min(requested, vllm._max_request_tokens)

    @property
    def reasoning_tokens(self) -> int | None:
        """``--default-thinking-token-budget``."""
        return server()._default_thinking_token_budget

    @property
    def archive(self) -> Archive | None:
        """Turns on disk, in ``--ssd-cache-dir``."""
        return resources.disk

    @property
    def requires_key(self) -> bool:
        return bool(server()._api_key)

    def is_key(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), str(server()._api_key).encode())

    async def authenticate(self, connection: HTTPConnection) -> None:
        reject_non_ascii_key(connection)
        vllm = server()
        await vllm.verify_api_key(await vllm.security(connection))

    async def check_rate_limit(self, connection: HTTPConnection) -> None:
        await server().check_rate_limit(connection)

    def tracker(self, api: str, *, stream: bool) -> Tracker:
        return _Tracker(server()._metrics.track_inference(api, stream=stream))

    @property
    def renderer(self) -> Renderer:
        return entry_points.in_use().renderer

    @property
    def context(self) -> ContextFactory:
        return entry_points.in_use().context


class _Tracker:
    """vllm-mlx's metrics of a request, and our own counters."""

    def __init__(self, tracker: InferenceTracker) -> None:
        self.observe_ttft = tracker.observe_ttft
        self._finish = tracker.finish

    def finish(self, result: str, usage: Usage) -> None:
        prompt, output = usage.prompt_tokens, usage.completion_tokens
        self._finish(result=result, prompt_tokens=prompt, completion_tokens=output)
        for channel, tokens in usage.by_channel.items():
            metrics.GENERATED.labels(channel).inc(tokens)
        metrics.PREDICTED.labels("accepted").inc(usage.accepted_prediction_tokens)
        metrics.PREDICTED.labels("rejected").inc(usage.rejected_prediction_tokens)

    def reasoning_ended(self, reason: str) -> None:
        metrics.REASONING_ENDED.labels(reason=reason).inc()


def with_graceful_shutdown(original: type[uvicorn.Server]) -> type[uvicorn.Server]:
    """uvicorn's server, which ends after our answers: they have at most ``--timeout`` seconds. Its
    connections are limited, and the prefix cache on disk is written to its end."""
    return shutdown.with_graceful_shutdown(
        with_connection_limits(original),
        lambda: installed_front_end().answers,
        lambda: min(shutdown.MAX_GRACE, float(server()._default_timeout)),
        resources.close,
    )
