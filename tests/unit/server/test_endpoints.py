"""docs/api.md lists the endpoints that there are, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from vllm_mlx_harmony.server.app import ENDPOINTS, SOCKETS

REPOSITORY = Path(__file__).resolve().parents[3]


def test_every_endpoint_has_a_row() -> None:
    """Those of an engine are vllm-mlx's: they are read from the file that mounts them."""
    page = (REPOSITORY / "docs" / "api.md").read_text("utf-8")
    section = page.partition("\n## Endpoints\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    served = {f"{method} {each.path}" for each in ENDPOINTS for method in each.methods}
    served |= {f"WebSocket {each.path}" for each in SOCKETS}
    status = (REPOSITORY / "vllm_mlx_harmony/host/engine_routes.py").read_text("utf-8")
    routed = re.findall(r'\("(/[^"]+)", "([A-Z]+)",', status)
    assert len(routed) == 4
    served |= {f"{method} {path}" for path, method in routed}
    served.add("DELETE /v1/cache/prefix")  # vllm-mlx's own, which empties ours too
    assert sorted(listed) == sorted(re.sub(r":\w+}", "}", each) for each in served)
