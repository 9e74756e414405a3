"""Our metrics among those of vllm-mlx (``--enable-metrics``)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.registry import Collector

from vllm_mlx_harmony.engine.exposition import DISK, disk_metrics
from vllm_mlx_harmony.host import tools
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


class _Ours(Collector):
    """Reasoning that was cut short, tokens, tool calls and the disk, whenever Prometheus asks."""

    def collect(self) -> Iterator[Metric]:
        yield from _COUNTERS.collect()
        if tools.running is not None:
            yield from tools.running.collect()
        yield from disk_metrics()


def show() -> None:
    """Adds our metrics to vllm-mlx's, if those are enabled; a second time, nothing happens."""
    metrics = server()._metrics._prom
    if metrics is not None and DISK not in metrics:
        metrics[DISK] = _Ours()
        metrics["registry"].register(metrics[DISK])
