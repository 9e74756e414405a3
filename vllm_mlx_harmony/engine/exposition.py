"""The state of loaded models, as a document, for the inspector, and as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vllm_mlx_harmony.engine import device, resources
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine

Models: TypeAlias = "Iterable[tuple[str, MlxEngine]]"
"""Engines of models that are loaded, with the models' names."""

Row: TypeAlias = "tuple[str, float | str | None, str]"
"""A name, its value and its unit (``bytes``, ``tokens`` or empty)."""


def document(models: Models) -> dict[str, Any]:
    """``GET /harmony/status``: all requests, with the progress of their prompts, and the steps."""
    documents = []
    for name, engine in models:
        memory = {
            "limit": engine.budget.limit,
            "used": device.used(),
            "weights": engine.weight_bytes,
            "longest_request": engine.context_length,
        }
        steps = {
            "speculate": engine.options.speculate,
            "relative_costs": engine.relative_costs,
            "executed": engine.totals.steps,
            "completion_tokens": engine.totals.completion_tokens,
            "accepted_prediction_tokens": engine.totals.drafts_accepted,
            "rejected_prediction_tokens": engine.totals.drafts_rejected,
        }
        requests = [asdict(status) for status in engine.status()]
        documents.append(
            {
                "model": name,
                "memory": memory,
                "steps": steps,
                "finished_requests": engine.totals.requests,
                "requests": requests,
            }
        )
    return {"models": documents}


CACHE = "harmony_prefix_reuse"
"""The name of the prefix cache in ``engine_cache``, where vllm-mlx has its own caches."""

CLEARED: dict[str, bool] = {CACHE: True}
"""``engine_cache`` after ``DELETE /v1/cache``."""


def cache_counters(engine: MlxEngine | None) -> dict[str, object]:
    """``engine_cache`` of ``GET /v1/cache/stats``; without counters unless a model is loaded."""
    counters = {} if engine is None else asdict(engine.cache.counters())
    return {CACHE: {name: value for name, value in counters.items() if value is not None}}


def sections(models: Models) -> list[tuple[str, Sequence[Row]]]:
    """For the inspector: memory and the queue of each model, and what the prefix cache holds."""
    found: list[tuple[str, Sequence[Row]]] = []
    for name, engine in models:
        requests = engine.status()
        waiting = sum(request.place > 0 for request in requests)
        rows: list[Row] = [
            ("weights", engine.weight_bytes, "bytes"),
            ("in use", device.used(), "bytes"),
            ("limit", engine.budget.limit, "bytes"),
            ("longest request", engine.context_length, "tokens"),
            ("waiting", waiting, ""),
            ("answering", len(requests) - waiting, ""),
            ("steps", engine.totals.steps, ""),
        ]
        found.append((name, rows))
    memory = resources.tree().counters()
    cache: list[Row] = [
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
    return [*found, ("Prefix cache", cache)]


DISK = "vllm_mlx_harmony_prefix_disk"

OF_DISK = (
    (GaugeMetricFamily, "bytes", "nbytes", "Bytes of the prefix cache on disk."),
    (GaugeMetricFamily, "pieces", "pieces", "Pieces of prompts on disk."),
    (GaugeMetricFamily, "turns", "turns", "Generated turns on disk."),
    (GaugeMetricFamily, "written_today_bytes", "written_today", "Bytes written since midnight."),
    (GaugeMetricFamily, "waiting_bytes", "waiting", "Bytes to be written."),
    (GaugeMetricFamily, "paused", "paused", "1 while writing is suspended."),
    (
        CounterMetricFamily,
        "hits",
        "hits",
        "Prompts with a longer cached prefix on disk than in memory.",
    ),
    (CounterMetricFamily, "misses", "misses", "Prompts with no more on disk than in memory."),
    (CounterMetricFamily, "read_bytes", "bytes_read", "Bytes read."),
    (CounterMetricFamily, "read_seconds", "read_seconds", "Seconds spent reading."),
    (CounterMetricFamily, "written_bytes", "bytes_written", "Bytes written."),
    (CounterMetricFamily, "write_seconds", "write_seconds", "Seconds spent writing."),
    (CounterMetricFamily, "dropped", "dropped", "Pieces and turns that were not written."),
    (CounterMetricFamily, "damaged", "damaged", "Pieces, turns and indexes that were damaged."),
)
"""Kind, name, field of `DiskCounters` and meaning. Counters get the suffix ``_total``."""


def disk_metrics() -> Iterator[Metric]:
    """Those of the prefix cache on disk, if there is one."""
    if resources.disk is not None:
        now = resources.disk.counters()
        for kind, name, field, about in OF_DISK:
            yield kind(f"{DISK}_{name}", about, float(getattr(now, field)))
