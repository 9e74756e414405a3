"""Where vllm-mlx makes and loads engines: for a Harmony model, ours is made in place of its own.

Each function takes the original and gives its replacement. Its own engines are made as before for
all other models; their classes are not touched.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import wraps

from vllm_mlx.model_registry import LoadedModel

from vllm_mlx_harmony.host import resources, summary
from vllm_mlx_harmony.host.engine import HarmonyEngine, engine_of
from vllm_mlx_harmony.host.models import is_harmony_model, not_harmony
from vllm_mlx_harmony.host.server_globals import ModelManager, ModelSpec, server


def load_model(original: Callable[..., object]) -> Callable[..., object]:
    """vllm-mlx's ``load_model``: of a server's only model, which has to be a Harmony model.

    With ``use_batching`` the host makes an engine and leaves the loading to its start: it is loaded
    here, so that a model that cannot be loaded ends the start. What is loaded then is not looked at
    by Python's collector of garbage again (`server.garbage`). Raises ``NotHarmony``.
    """

    @wraps(original)
    def load(model_name: str, use_batching: bool = False, **keywords: object) -> object:
        path = str(keywords.get("model_path") or model_name)
        if is_harmony_model(path) is False:
            raise not_harmony(model_name)
        result = original(model_name, True, **keywords)
        engine = server()._engine
        if isinstance(engine, HarmonyEngine):  # not one that is loaded when it is asked for
            engine.prepare_for_start()
        summary.of_model(path, engine_of(engine))
        gc.freeze()
        return result

    return load


def batched_engine(original: Callable[..., object]) -> Callable[..., object]:
    """The class that ``load_model`` makes its engine of, as a function."""

    @wraps(original, updated=())
    def engine(*, model_name: str, model_path: str | None = None, **keywords: object) -> object:
        if is_harmony_model(model_path or model_name) is False:
            return original(model_name=model_name, model_path=model_path, **keywords)
        trust = bool(keywords.get("trust_remote_code", False))
        return HarmonyEngine(model_name, model_path=model_path, trust_remote_code=trust)

    return engine


def build_engine(original: Callable[[ModelSpec], object]) -> Callable[[ModelSpec], object]:
    """``_build_engine``: of a model that is loaded when it is asked for, and unloaded again."""

    @wraps(original)
    def build(spec: ModelSpec) -> object:
        if is_harmony_model(spec.model_path or spec.model_name) is False:
            return original(spec)
        return HarmonyEngine(spec.model_name, model_path=spec.model_path)

    return build


def instantiate_model(
    original: Callable[[ModelManager, object, str], Awaitable[object]],
) -> Callable[[ModelManager, object, str], Awaitable[object]]:
    """``ModelManager._instantiate_model``: of one of several models."""

    @wraps(original)
    async def instantiate(manager: ModelManager, entry: object, resolved_source: str) -> object:
        if not is_harmony_model(resolved_source):
            return await original(manager, entry, resolved_source)
        config = manager._resolve_model_config(entry, resolved_source)
        flags = replace(
            resources.flags(),
            prefill_step_size=config.prefill_step_size,
            stream_interval=config.stream_interval,
            gpu_memory_utilization=config.gpu_memory_utilization,
        )
        engine = HarmonyEngine(resolved_source, flags=flags)
        await engine.start()
        return LoadedModel(config=config, engine=engine)

    return instantiate
