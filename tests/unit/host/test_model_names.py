"""Aliases of the model: which are listed, which are found, and which name an answer has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm_mlx")

from starlette.testclient import TestClient
from vllm_mlx import server

from vllm_mlx_harmony.host import contract
from vllm_mlx_harmony.host.adapter import VllmMlx
from vllm_mlx_harmony.server.errors import CLIENT_CLOSED
from vllm_mlx_harmony.server.model_names import ModelNames
from vllm_mlx_harmony.server.settings import ServerSettings

NAMES_VARIABLE = "VLLM_MLX_HARMONY_MODEL_NAMES"


Activate = Callable[[str], None]


@pytest.fixture
def activate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Activate]:
    """Activates the plugin with these names."""

    def start(names: str) -> None:
        contract.deactivate()
        monkeypatch.setenv(NAMES_VARIABLE, names)
        contract.activate(ServerSettings.read())

    monkeypatch.setattr(server, "_model_name", "gpt-oss-20b")
    yield start
    contract.deactivate()


ROWS = [
    # setting, requested name, whether it is an alias
    ("none", "gpt-4o", False),
    ("", "gpt-4o", True),
    ("", "claude-opus-4-5-20251101", True),
    ("", "gpt-5.2-codex", True),
    ("", "o4-mini", True),
    ("", "gpt-oss:20b", True),
    ("", "openai/gpt-oss-20b", True),
    ("", "gpt-oss:120b", False),
    ("", "gpt-oss-120b", False),
    ("", "openai/gpt-oss-120b", False),
    ("", "ollama", False),
    ("", "llama-3", False),
    ("", "", False),
    ("gpt-4o", "gpt-4o", True),
    ("gpt-4o", "gpt-4o-mini", False),
    ("claude-*, gpt-*", "claude-opus-4", True),
    ("claude-*, gpt-*", "gpt-4o", True),
    ("claude-*, gpt-*", "claude-*", True),
    ("claude-*, gpt-*", "GPT-4o", False),
    ("claude-*, gpt-*", "gpt-oss-20b", False),
    (" , *", "anything/at all", True),
]


@pytest.mark.parametrize(("setting", "name", "is_alias"), ROWS)
def test_model_answers_to_its_aliases(
    setting: str, name: str, is_alias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAMES_VARIABLE, setting)
    names = ModelNames("gpt-oss-20b", ServerSettings.read().model_names)
    assert names.is_alias(name) is is_alias
    assert names.canonical_name(name) == ("gpt-oss-20b" if is_alias else name)
    assert names.echoed_name(name) == (name if is_alias else "gpt-oss-20b")


def test_several_models_have_no_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_model_manager", object())
    assert VllmMlx(ServerSettings.read()).model_name is None
    several = ModelNames(None, ("*",))
    assert several.aliases == ()
    assert several.canonical_name("gpt-4o") == several.echoed_name("gpt-4o") == "gpt-4o"


def get(path: str) -> httpx.Response:
    async def fetch() -> httpx.Response:
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return await client.get(path)

    return asyncio.run(fetch())


def ids(listed: Any) -> list[str]:
    return [entry["id"] for entry in listed["data"]]


def test_configured_names_are_listed(activate: Activate) -> None:
    activate("")  # the common names are no models of their own
    assert ids(get("/v1/models").json()) == ["gpt-oss-20b"]
    activate("claude-*,gpt-4o,gpt-4o,gpt-oss-20b")
    for path in ("/v1/models", "/v1/models/"):
        listed = get(path).json()
        assert ids(listed) == ["gpt-oss-20b", "claude-*", "gpt-4o"]
        assert {entry["object"] for entry in listed["data"]} == {"model"}


@pytest.mark.parametrize("name", ["claude-opus-4", "claude-*", "gpt-oss-20b"])
def test_matching_name_is_found(name: str, activate: Activate) -> None:
    activate("claude-*")
    model = get(f"/v1/models/{name}").json()
    assert model["id"] == name
    assert model.keys() == get("/v1/models").json()["data"][0].keys()
    assert get("/v1/models/gpt-4o").status_code == 404


def test_engine_is_leased_under_aliases(
    activate: Activate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host gets its own name, and requests for unknown names are refused."""
    lent: list[str | None] = []

    async def lend(*_: object, model: str | None, **__: object) -> None:
        lent.append(model)

    activate("claude-*")
    monkeypatch.setattr(server, "_acquire_default_engine_for_request", lend)
    for name, status in (("claude-opus-4", CLIENT_CLOSED), ("gpt-4o", 404)):
        body = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
        assert TestClient(server.app).post("/v1/chat/completions", json=body).status_code == status
    assert lent == ["gpt-oss-20b"]
