"""Dangerous grammars through a gateway, which compiles them as the front end does.

All schemas and syntaxes are in `tests/unit/server/test_grammar_limits.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("prometheus_client")


from app_server import run_server
from dangerous_grammars import FINAL, check_schema, check_syntax
from fake_engines import FakeEngine
from gateway_in_process import CountingGateway
from grammar_texts import LARK, SCHEMAS
from scripted_host import KEY
from starlette.testclient import TestClient

from vllm_mlx_harmony.server.app import application

pytestmark = pytest.mark.usefixtures("patient_checks")


@pytest.fixture
def client() -> Iterator[TestClient]:
    # Formats are shown to the model: the largest of these schemas has 133,000 tokens.
    engine = FakeEngine("vllm", {"Hello!": FINAL}, length=200_000)
    with run_server(engine.app) as url:
        web = TestClient(
            application(CountingGateway(KEY, (engine, url))), base_url="http://localhost"
        )
        web.headers["Authorization"] = f"Bearer {KEY}"
        yield web


@pytest.mark.nightly
def test_dangerous_schema_and_syntax_are_rejected(client: TestClient) -> None:
    check_schema(client, "chat", next(iter(SCHEMAS)))
    check_syntax(client, next(iter(LARK)))
