"""Schemas and syntaxes that would kill a server, through the front end: strict ones are refused,
others ignored, and no error has a message of the library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

from dangerous_grammars import APIS, FINAL, check_schema, check_syntax, request
from grammar_texts import LARK, OBJECT, SCHEMAS, pattern
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient

from vllm_mlx_harmony.server import grammar_checks
from vllm_mlx_harmony.server.app import application

pytestmark = pytest.mark.usefixtures("patient_checks")


@pytest.fixture
def client() -> Iterator[TestClient]:
    engine = ScriptedEngine({"Hello!": FINAL}, 1_000, context_length=None)
    host = SingleEngineHost(engine, seconds=900.0)
    test_client = TestClient(application(host), base_url="http://localhost")
    test_client.headers["Authorization"] = f"Bearer {KEY}"
    yield test_client
    assert host.leases == 0


@pytest.mark.nightly(sample=12)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_dangerous_schema_is_rejected(client: TestClient, api: str, name: str) -> None:
    check_schema(client, api, name)


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("name", LARK)
def test_dangerous_syntax_is_rejected(client: TestClient, name: str) -> None:
    check_syntax(client, name)


def test_only_strict_schemas_and_syntaxes_start_process(client: TestClient) -> None:
    grammar_checks.POOL.close()
    schemas = [*SCHEMAS.values(), pattern(r"^(\s*\S+){1,300}$"), {"type": "object"}]
    for schema in schemas:
        for api in ("chat", "messages", "text"):
            path, body = request(api, schema, False)
            answer = client.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 200, answer.text
    assert not grammar_checks.POOL.idle
    path, body = request("chat", {**OBJECT, "properties": {}, "additionalProperties": False}, True)
    assert client.post(path, json={"model": MODEL, **body}).status_code == 200
    assert grammar_checks.POOL.idle


def test_grammar_is_omitted_while_process_is_busy(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strict request is to be sent again; for others, any arguments will do this time."""

    def busy(*_: Any) -> None:
        raise grammar_checks.CheckUnavailable("timed out waiting for the checker")

    monkeypatch.setattr(grammar_checks.WorkerPool, "trial", busy)
    schema = {"type": "object", "properties": {"unseen": {"type": "integer"}}}
    strict_schema = {**schema, "required": ["unseen"], "additionalProperties": False}
    path, body = request("chat", strict_schema, True)
    answer = client.post(path, json={"model": MODEL, **body})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    path, body = request("chat", schema, False)
    assert client.post(path, json={"model": MODEL, **body}).status_code == 200
    monkeypatch.undo()
    path, body = request("chat", strict_schema, True)
    assert client.post(path, json={"model": MODEL, **body}).status_code == 200
