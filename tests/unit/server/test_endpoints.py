"""docs/api.md lists all endpoints, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from vllm_mlx_harmony.server.app import ENDPOINTS, SOCKETS

REPOSITORY = Path(__file__).resolve().parents[3]


def test_page_lists_all_endpoints() -> None:
    """Those of an engine are vllm-mlx's, and are read from the file that mounts them."""
    page = (REPOSITORY / "docs" / "api.md").read_text("utf-8")
    section = page.partition("\n## Endpoints\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    served = {f"{method} {route.path}" for route in ENDPOINTS for method in route.methods}
    served |= {f"WebSocket {route.path}" for route in SOCKETS}
    source = (REPOSITORY / "vllm_mlx_harmony/host/engine_routes.py").read_text("utf-8")
    routed = re.findall(r'\("(/[^"]+)", "([A-Z]+)",', source)
    assert len(routed) == 4
    served |= {f"{method} {path}" for path, method in routed}
    served.add("DELETE /v1/cache/prefix")  # vllm-mlx's own route, which clears our cache, too
    assert sorted(listed) == sorted(re.sub(r":\w+}", "}", endpoint) for endpoint in served)
