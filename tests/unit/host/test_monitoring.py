"""The dashboard of a server: its panels query metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm_mlx")

from vllm_mlx.metrics import MetricsCollector

from vllm_mlx_harmony.engine import exposition
from vllm_mlx_harmony.host import metrics

DASHBOARD = Path(__file__).resolve().parents[3] / "examples" / "monitoring" / "server.json"
EXPRESSIONS = [
    target["expr"]
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    for target in panel["targets"]
]
LABELS = {
    "result": "vllm_mlx_inference_requests",
    "kind": "vllm_mlx_metal_memory_bytes",
    "reason": metrics.REASONING_ENDED._name,
    "channel": metrics.GENERATED._name,
    "status_code": "vllm_mlx_http_requests",
}


@pytest.fixture(name="names", scope="module")
def _names() -> dict[str, tuple[str, ...]]:
    """The labels of all metrics, by name."""
    collector = MetricsCollector()
    collector.configure(enabled=True)
    assert collector._prom is not None
    labelled = [metric for metric in collector._prom.values() if hasattr(metric, "_labelnames")]
    disk = {f"{exposition.DISK}_{name}": () for _, name, *_ in exposition.OF_DISK}
    labelled += [metrics.REASONING_ENDED, metrics.GENERATED, metrics.PREDICTED]
    return {metric._name: metric._labelnames for metric in labelled} | disk


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expression_has_metrics_and_labels(
    expression: str, names: dict[str, tuple[str, ...]]
) -> None:
    for name in re.findall(r"vllm_mlx_\w+", expression):
        assert {name, re.sub(r"_(total|bucket)$", "", name)} & names.keys(), name
    for label in re.findall(r"by \((\w+)\)", expression):
        assert label == "le" or label in names[LABELS[label]]
