"""Dangerous grammars through a gateway, which compiles them as the front end does.

All schemas and syntaxes are in `tests/unit/server/test_grammar_limits.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("prometheus_client")


import test_grammar_limits as front_end_tests
from app_server import run_server
from fake_engines import FakeEngine
from gateway_in_process import Watched
from grammar_texts import LARK, SCHEMAS
from starlette.testclient import TestClient
from test_grammar_limits import FINAL, KEY

from vllm_mlx_harmony.server.app import application

pytestmark = pytest.mark.usefixtures("patient_checks")


@pytest.fixture
def client() -> Iterator[TestClient]:
    # Formats are shown to the model: the largest of these schemas has 133,000 tokens.
    engine = FakeEngine("vllm", {"Hello!": FINAL}, length=200_000)
    with run_server(engine.app) as url:
        web = TestClient(application(Watched(KEY, (engine, url))), base_url="http://localhost")
        web.headers["Authorization"] = f"Bearer {KEY}"
        yield web


def test_dangerous_schema_and_syntax_are_refused(client: TestClient) -> None:
    front_end_tests.test_dangerous_schema_is_refused(client, "chat", next(iter(SCHEMAS)))
    front_end_tests.test_dangerous_syntax_is_refused(client, next(iter(LARK)))
