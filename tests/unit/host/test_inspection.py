"""The inspector in vllm-mlx's application: it is there only if it is enabled."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_mlx")

from starlette.testclient import TestClient
from vllm_mlx import server

from vllm_mlx_harmony.host import contract, entry_points, mount
from vllm_mlx_harmony.host.adapter import VllmMlx
from vllm_mlx_harmony.required_names import Requirement
from vllm_mlx_harmony.server.settings import ServerSettings

KEY = "sesame"
DATA = "/harmony/inspector/server"


def inspector_rows() -> list[Requirement]:
    rows = contract.table(entry_points.find("harmony"), ServerSettings.read())
    return [row for row in rows if row.label == "GET /harmony"]


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("0", False), ("1", True)])
def test_inspector_requires_the_variable(
    value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_MLX_HARMONY_INSPECT", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_MLX_HARMONY_INSPECT", value)
    assert bool(inspector_rows()) is expected


def test_inspector_requires_the_key_and_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_api_key", KEY)
    before = list(server.app.router.routes), list(server.app.user_middleware)
    stack = server.app.middleware_stack
    monkeypatch.setenv("VLLM_MLX_HARMONY_INSPECT", "1")
    (row,) = inspector_rows()
    undo_front_end = mount.front_end(VllmMlx(ServerSettings.read())).apply()
    assert row.problem() is None
    undo = row.apply()
    try:
        client = TestClient(server.app, base_url="http://localhost")
        assert client.get("/harmony").status_code == 200
        assert client.get(DATA).status_code == 401
        assert (
            client.get(DATA, headers={"authorization": "Bearer schlüssel".encode()}).status_code
            == 401
        )
        assert client.post("/harmony/inspector/login", json={"key": KEY}).status_code == 200
        titles = [title for title, _ in client.get(DATA).json()["sections"]]
        assert titles == ["Requests", "Prefix cache"]
    finally:
        undo()
        undo_front_end()
    assert before == (list(server.app.router.routes), list(server.app.user_middleware))
    assert server.app.middleware_stack is stack
