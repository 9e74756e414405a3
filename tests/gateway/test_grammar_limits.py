"""What would end a server, through a gateway: it compiles grammars as the front end does.

The tests are those of `tests/server/test_grammar_limits.py`; only what they ask is another host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts test directories nowhere
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from fake_engines import FakeEngine, served
from in_process import Watched
from starlette.testclient import TestClient
from test_grammar_limits import (  # noqa: F401
    FINAL,
    KEY,
    _patient,
    test_a_schema_that_would_end_the_server,
    test_a_syntax_that_would_end_the_server,
)

from vllm_mlx_harmony.server.app import application


@pytest.fixture
def client() -> Iterator[TestClient]:
    # Formats are shown to the model: the largest of these schemas has 133,000 tokens.
    engine = FakeEngine("vllm", {"Hello!": FINAL}, length=200_000)
    with served(engine.app) as url:
        one = TestClient(application(Watched(KEY, (engine, url))), base_url="http://localhost")
        one.headers["Authorization"] = f"Bearer {KEY}"
        yield one
