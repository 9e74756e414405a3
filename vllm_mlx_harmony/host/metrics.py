"""Metrics of ours among those that vllm-mlx shows with ``--enable-metrics``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Counter, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from vllm_mlx_harmony.host import resources, tools
from vllm_mlx_harmony.host.server_globals import server

REASONING_ENDED = Counter(
    "vllm_mlx_harmony_reasoning_ended",
    "Answers that the model was made to begin, by what ended its reasoning.",
    ["reason"],
    registry=None,
)

DISK = "vllm_mlx_harmony_prefix_disk"

OF_DISK = (
    ("bytes", "nbytes", "Bytes of the prefix cache on disk."),
    ("pieces", "pieces", "Pieces of prompts on disk."),
    ("turns", "turns", "Generated turns on disk."),
    ("waiting_bytes", "waiting", "Bytes to be written."),
    ("hits", "hits", "Prompts that continued from the disk."),
    ("misses", "misses", "Prompts of which the disk had no more than memory."),
    ("read_bytes", "bytes_read", "Bytes read."),
    ("read_seconds", "read_seconds", "Seconds spent reading."),
    ("written_bytes", "bytes_written", "Bytes written."),
    ("write_seconds", "write_seconds", "Seconds spent writing."),
    ("dropped", "dropped", "Pieces that were not written in time."),
    ("damaged", "damaged", "Pieces and turns that could not be read."),
    ("paused", "paused", "1 while the disk is not used after a failure."),
)
"""Name, field of ``Counters`` and meaning."""


class _Ours(Collector):
    """What there is of ended reasoning, tool calls and the disk when Prometheus asks."""

    def collect(self) -> Iterator[Metric]:
        yield from REASONING_ENDED.collect()
        if tools.running is not None:
            yield from tools.running.collect()
        if resources.disk is not None:
            now = resources.disk.counters()
            for name, field, about in OF_DISK:
                yield GaugeMetricFamily(f"{DISK}_{name}", about, float(getattr(now, field)))


def show() -> None:
    """Adds them to vllm-mlx's, if these are enabled; a second time, nothing happens."""
    metrics = server()._metrics._prom
    if metrics is not None and DISK not in metrics:
        metrics[DISK] = _Ours()
        metrics["registry"].register(metrics[DISK])
