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
        sections.append(
            (
                name,
                [
                    ("weights", engine.weights, "bytes"),
                    ("in use", device.used(), "bytes"),
                    ("limit", budget.limit, "bytes"),
                    ("longest request", engine.context_length, "tokens"),
                    ("waiting", waiting, ""),
                    ("answering", len(requests) - waiting, ""),
                    ("steps", engine.totals.steps, ""),
                ],
            )
        )
    counters, disk = resources.tree().counters(), resources.disk
    cache: Section = (
        "Prefix cache",
        [
            ("in memory", counters.nbytes, "bytes"),
            ("limit in memory", counters.budget, "bytes"),
            ("evictions", counters.evictions, ""),
        ],
    )
    if disk is not None:
        held = disk.counters()
        cache[1].extend(
            [
                ("on disk", held.nbytes, "bytes"),
                ("limit on disk", held.budget, "bytes"),
                ("read from disk", held.bytes_read, "bytes"),
                ("hits on disk", held.hits, ""),
            ]
        )
    return [*sections, cache]
