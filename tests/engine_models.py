"""Models without their tokenizers, which take a second to load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_lm import utils

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.engine.disk.cache import DiskCache
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache


def load_module(directory: Path) -> Any:
    """The model in ``directory``, with mlx-lm 0.31 and 0.32."""
    if not standin.is_standin(directory):
        return utils.load_model(directory)[0]
    try:
        return utils.load_model(directory, trust_remote_code=True)[0]
    except TypeError:  # 0.31 always runs the code of the directory
        return utils.load_model(directory)[0]


def loading(
    model: Callable[[], Any], cache: Callable[[Any], PrefixCache] = PrefixCache
) -> Callable[[], tuple[Any, PrefixCache]]:
    """What ``MlxEngine.load`` takes."""

    def load() -> tuple[Any, PrefixCache]:
        module = model()
        return module, cache(module)

    return load


def flushed(disk: DiskCache, patience: float = 10) -> bool:
    """Waits until everything is written, at most ``patience`` seconds; whether it is."""
    with (done := disk._queue.all_tasks_done):
        return done.wait_for(lambda: not disk._queue.unfinished_tasks, patience)
