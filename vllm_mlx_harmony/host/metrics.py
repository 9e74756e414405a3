"""Our metrics among those of vllm-mlx (``--enable-metrics``)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from vllm_mlx_harmony.host import resources, tools
from vllm_mlx_harmony.host.server_globals import server

_COUNTERS = CollectorRegistry()

REASONING_ENDED = Counter(
    "vllm_mlx_harmony_reasoning_ended",
    "Answers whose reasoning was cut short, by reason.",
    ["reason"],
    registry=_COUNTERS,
)

GENERATED = Counter(
    "vllm_mlx_harmony_generation_tokens",
    "Generated tokens by channel; headers count as content.",
    ["channel"],
    registry=_COUNTERS,
)

PREDICTED = Counter(
    "vllm_mlx_harmony_prediction_tokens",
    "Guessed tokens that were computed ahead, by whether they were accepted or rejected.",
    ["result"],
    registry=_COUNTERS,
)

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
"""Kind, name, field of ``disk.cache.Counters`` and meaning. Counters get the suffix ``_total``."""


class _Ours(Collector):
    """Reasoning that was cut short, tokens, tool calls and the disk, whenever Prometheus asks."""

    def collect(self) -> Iterator[Metric]:
        yield from _COUNTERS.collect()
        if tools.running is not None:
            yield from tools.running.collect()
        if resources.disk is not None:
            now = resources.disk.counters()
            for kind, name, field, about in OF_DISK:
                yield kind(f"{DISK}_{name}", about, float(getattr(now, field)))


def show() -> None:
    """Adds our metrics to vllm-mlx's, if those are enabled; a second time, nothing happens."""
    metrics = server()._metrics._prom
    if metrics is not None and DISK not in metrics:
        metrics[DISK] = _Ours()
        metrics["registry"].register(metrics[DISK])
