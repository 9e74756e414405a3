"""What the inspector shows of vllm-mlx's server."""

from __future__ import annotations

from vllm_mlx_harmony.engine import device
from vllm_mlx_harmony.host import resources
from vllm_mlx_harmony.host.engine import serving
from vllm_mlx_harmony.inspector.routes import Section


def status() -> list[Section]:
    """Memory and the queue of each model, and what the prefix cache holds."""
    sections: list[Section] = []
    for name, engine, budget in serving():
        requests = engine.status()
        waiting = sum(each.place > 0 for each in requests)
        rows = [
            ("weights", engine.weights, "bytes"),
            ("in use", device.used(), "bytes"),
            ("limit", budget.limit, "bytes"),
            ("longest request", engine.context_length, "tokens"),
            ("waiting", waiting, ""),
            ("answering", len(requests) - waiting, ""),
            ("steps", engine.totals.steps, ""),
        ]
        sections.append((name, rows))
    memory = resources.tree().counters()
    cache = [
        ("in memory", memory.nbytes, "bytes"),
        ("limit in memory", memory.budget, "bytes"),
        ("evictions", memory.evictions, ""),
    ]
    if resources.disk is not None:
        disk = resources.disk.counters()
        cache += [
            ("on disk", disk.nbytes, "bytes"),
            ("limit on disk", disk.budget, "bytes"),
            ("read from disk", disk.bytes_read, "bytes"),
            ("hits on disk", disk.hits, ""),
        ]
    return [*sections, ("Prefix cache", cache)]
