"""What a server says of its model and its prefix cache when it starts, in vllm-mlx or alone."""

from __future__ import annotations

from vllm_mlx_harmony.engine import resources
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine
from vllm_mlx_harmony.sizes import format_size


def memory(engine: MlxEngine) -> str:
    return f"{format_size(engine.weight_bytes)} of {format_size(engine.budget.limit)} used"


def context(engine: MlxEngine | None, window: int | None) -> str:
    """The tokens of a request, given the ``window`` of the model's configuration, if it has one."""
    fits = None if engine is None else engine.context_length
    if window is None:
        return "unknown: no config.json"
    if fits is not None and fits < window:
        return f"{fits:,} tokens fit in memory, of {window:,}"
    return f"{window:,} tokens"


def prefix_cache() -> list[str]:
    """Its limits, and what is on disk."""
    size, disk = resources.cache_bytes(), resources.disk
    parts = [f"up to {format_size(size)} in memory" if size else "off"]
    if disk is not None:
        found = disk.counters()
        conversations = f"{found.conversations:,} conversation{'s' * (found.conversations != 1)}"
        held = f"{format_size(found.nbytes)}, {conversations}, from {disk.directory}"
        parts.append(f"up to {format_size(disk.budget)} on disk: {held}")
    return parts
