"""Where vllm-mlx makes and loads engines: for a Harmony model, ours is made in place of its own.

Each function takes the original and returns its replacement. The engines of other models are not
touched.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from copy import copy
from functools import wraps

from vllm_mlx_harmony.host import flags, resources, summary
from vllm_mlx_harmony.host.engine import HarmonyEngine, NotHarmony, engine_of
from vllm_mlx_harmony.host.server_globals import ModelManager, ModelSpec, server
from vllm_mlx_harmony.server.model_files import is_harmony_model


def load_model(original: Callable[..., object]) -> Callable[..., object]:
    """Replaces ``load_model``, which loads a server's only model: it has to be a Harmony model.

    ``use_batching`` is always set: without it the host would load an engine of its own. The model
    is loaded here, so that one that cannot be loaded ends the start; it is left out of garbage
    collection from then on (`server.tasks`). Raises ``NotHarmony``.
    """

    @wraps(original)
    def load(model_name: str, use_batching: bool = False, **keywords: object) -> object:
        path = str(keywords.get("model_path") or model_name)
        if is_harmony_model(path) is False:
            raise NotHarmony(model_name)
        result, vllm = original(model_name, True, **keywords), server()
        if vllm._engine is not None:  # not one that is loaded when it is asked for
            trusted = bool(keywords.get("trust_remote_code"))
            engine = HarmonyEngine(model_name, model_path=path, trust_remote_code=trusted)
            engine.prepare_for_start()
            vllm._engine = engine
        summary.show_model(path, engine_of(vllm._engine))
        gc.freeze()
        return result

    return load


def build_engine(_: object) -> Callable[[ModelSpec], HarmonyEngine]:
    """``_build_engine``: of a model that ``load_model`` leaves to be loaded when it is needed."""
    return lambda spec: HarmonyEngine(spec.model_name, model_path=spec.model_path)


def instantiate_model(
    original: Callable[[ModelManager, object, str], Awaitable[object]],
) -> Callable[[ModelManager, object, str], Awaitable[object]]:
    """Replaces ``ModelManager._instantiate_model``, which loads one of several models.

    A copy of the manager loads a Harmony model: its factory makes engines of ours.
    """

    @wraps(original)
    async def instantiate(manager: ModelManager, entry: object, resolved_source: str) -> object:
        if await asyncio.to_thread(is_harmony_model, resolved_source):
            manager = copy(manager)
            manager._engine_factory = lambda config: HarmonyEngine(
                resolved_source, options=flags.engine_options(config, resources.options)
            )
        return await original(manager, entry, resolved_source)

    return instantiate
