"""Where vllm-mlx makes, loads and warms up engines: for a Harmony model, ours is made and used.

Each function takes the original and returns its replacement. The engines of other models are not
touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from functools import wraps
from pathlib import Path
from typing import TypeAlias

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine import resources
from vllm_mlx_harmony.engine.prefix_cache import SHARED_TENANT
from vllm_mlx_harmony.host import entry_points, startup_banner
from vllm_mlx_harmony.host.mount import installed_front_end
from vllm_mlx_harmony.host.server_globals import ModelManager, ModelSpec, RegisteredModel, server
from vllm_mlx_harmony.host.vllm_mlx_engine import HarmonyEngine, NotHarmonyModel, engine_of
from vllm_mlx_harmony.model_files import TOKENIZER, is_harmony_model
from vllm_mlx_harmony.server import defaults, warm_prompts
from vllm_mlx_harmony.tasks import prepare_process

logger = logging.getLogger(__name__)

Warm: TypeAlias = Callable[..., Awaitable[Mapping[str, object]]]


def load_model(original: Callable[..., object]) -> Callable[..., object]:
    """Replaces ``load_model``, which loads a server's only model: it has to be a Harmony model.

    ``use_batching`` is always set: without it the host would load an engine of its own. The model
    is loaded here, so that one that cannot be loaded ends the start; it is left out of garbage
    collection from then on (`tasks`). Raises ``NotHarmonyModel``, and ``HostError`` for files
    that are missing or damaged.
    """

    @wraps(original)
    def load(model_name: str, use_batching: bool = False, **keywords: object) -> object:
        path = str(keywords.get("model_path") or model_name)
        if is_harmony_model(path) is False:
            raise NotHarmonyModel(model_name)
        result, vllm = original(model_name, True, **keywords), server()
        if vllm._engine is not None:  # not one that is loaded when it is asked for
            trusted = bool(keywords.get("trust_remote_code"))
            engine = HarmonyEngine(model_name, model_path=path, trust_remote_code=trusted)
            try:
                engine.prepare_for_start()
            except (OSError, ValueError, RuntimeError) as error:  # what mlx, mlx-lm, … raise
                logger.debug("%s cannot be loaded", path, exc_info=True)
                raise cannot_be_loaded(path, error) from error
            vllm._engine = engine
            prepare_process()
        startup_banner.show_model(path, engine_of(vllm._engine))
        return result

    return load


def cannot_be_loaded(path: str, error: Exception) -> HostError:
    """In one line: errors of transformers are paragraphs."""
    problem = " ".join(str(error).split()) or type(error).__name__
    if is_harmony_model(path) is None:
        problem = f"it has no {TOKENIZER}"
    return HostError(f"{path} cannot be loaded: {problem}")


def ensure_model_downloaded(original: Callable[..., Path]) -> Callable[..., Path]:
    """Replaces ``ensure_model_downloaded``. Raises ``HostError`` where vllm-mlx raises
    ``RuntimeError``: the repository does not exist, or cannot be reached."""

    @wraps(original)
    def download(*arguments: object, **keywords: object) -> Path:
        try:
            return original(*arguments, **keywords)
        except RuntimeError as error:
            raise HostError(" ".join(str(error).split())) from error

    return download


def build_engine(_: object) -> Callable[[ModelSpec], HarmonyEngine]:
    """Replaces ``_build_engine``, which creates the engine of a model that is loaded on demand."""
    return lambda spec: HarmonyEngine(spec.model_name, model_path=spec.model_path)


def instantiate_model(
    original: Callable[[ModelManager, RegisteredModel, str], Awaitable[object]],
) -> Callable[[ModelManager, RegisteredModel, str], Awaitable[object]]:
    """Replaces ``ModelManager._instantiate_model``, which loads one of several models.

    A copy of the manager loads a Harmony model: its factory makes engines of ours.
    """

    @wraps(original)
    async def instantiate(
        manager: ModelManager, entry: RegisteredModel, resolved_source: str
    ) -> object:
        if await asyncio.to_thread(is_harmony_model, resolved_source):
            # On a copy: other models keep the manager's own factory.
            manager = copy(manager)
            manager._engine_factory = lambda config: HarmonyEngine(
                entry.name,
                model_path=resolved_source,
                options=resources.engine_options(config, resources.options),
            )
        return await original(manager, entry, resolved_source)

    return instantiate


def warm_prefix_cache(original: Warm) -> Warm:
    """Replaces ``warm_prefix_cache``, which caches prompt prefixes before the first request
    (``--warm-prompts``). Ours are shared by all API keys. A prompt that fails is skipped with a
    warning."""

    @wraps(original)
    async def warm(
        engine: object, prompts: Sequence[warm_prompts.Messages], *, max_tokens: int = 1
    ) -> Mapping[str, object]:
        ours = engine_of(engine)
        if ours is None:
            return await original(engine, prompts, max_tokens=max_tokens)
        options = server()._default_chat_template_kwargs or {}
        warmed = await warm_prompts.warm(
            ours,
            prompts,
            defaults.read(options, installed_front_end().settings),
            entry_points.in_use().renderer,
            SHARED_TENANT,
        )
        return {
            "count": warmed.computed,
            "skipped": warmed.skipped,
            "elapsed_ms": warmed.seconds * 1000,
            "total_prompt_tokens": warmed.tokens,
            "mode": "harmony",
        }

    return warm
