"""Prometheus counters of tool calls: how many, how many failed, and how long they took."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily

from vllm_mlx_harmony.server.tools.toolbox import Toolbox

PREFIX = "vllm_mlx_harmony_tool"


class ToolMetrics:
    """A Prometheus collector of the counters of ``toolbox``."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Three counters, labelled with ``server`` and ``tool``."""
        for field, name, about in (
            ("calls", "calls", "Calls of tools that the server ran."),
            ("errors", "errors", "Calls that failed, timed out or were cancelled."),
            ("seconds", "seconds", "Seconds that calls took, including the wait for a free place."),
        ):
            family = CounterMetricFamily(f"{PREFIX}_{name}", about, labels=["server", "tool"])
            for (server, tool), counts in list(self._toolbox.counts.items()):
                family.add_metric([server, tool], float(getattr(counts, field)))
            yield family
