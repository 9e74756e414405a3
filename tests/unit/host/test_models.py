"""How the host loads Harmony models, and that others keep its own engines."""

from __future__ import annotations

import asyncio
import importlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="needs the host")

from vllm_mlx_harmony import model_files
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host import engine_factories
from vllm_mlx_harmony.host.vllm_mlx_engine import HarmonyEngine, NotHarmonyModel
from vllm_mlx_harmony.model_files import is_harmony_model


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A directory with a tokenizer that is not Harmony's."""
    tokenizers = importlib.import_module("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_directory_of_another_model_is_not_loaded(other: Path) -> None:
    loaded: list[str] = []
    load = engine_factories.load_model(lambda model_name, *_, **__: loaded.append(model_name))
    with pytest.raises(NotHarmonyModel, match="org/name"):
        load("org/name", model_path=str(other))
    with pytest.raises(NotHarmonyModel):
        load(str(other))
    assert loaded == []


def test_other_models_get_the_hosts_own_engines(other: Path) -> None:
    path = str(other)

    async def instantiate(*arguments: Any) -> Any:
        return arguments

    engine = engine_factories.instantiate_model(instantiate)(None, "entry", path)
    assert asyncio.run(engine) == (None, "entry", path)


def test_one_of_several_models_has_its_configured_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files may be in a snapshot, whose path means nothing to clients."""

    async def theirs(manager: Any, *_: object) -> Any:
        return manager._engine_factory(SimpleNamespace())

    monkeypatch.setattr(engine_factories, "is_harmony_model", lambda _: True)
    entry: Any = SimpleNamespace(name="small", source="org/name")
    manager: Any = SimpleNamespace()
    engine = asyncio.run(engine_factories.instantiate_model(theirs)(manager, entry, str(tmp_path)))
    assert isinstance(engine, HarmonyEngine)
    assert (engine.model_name, engine.path) == ("small", str(tmp_path))
    assert vars(manager) == {}, "its own factory stays"


def test_tokenizer_is_read_once_in_a_thread(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes a second. A model that is not there yet is not remembered."""
    readers = []

    def record(_: object) -> bool:
        readers.append(threading.current_thread())
        return False

    async def theirs(*_: object) -> str:
        return "theirs"

    monkeypatch.setattr(model_files, "is_harmony", record)
    assert is_harmony_model(str(tmp_path)) is None
    path = str(request.getfixturevalue("other"))
    for _ in range(2):
        engine = engine_factories.instantiate_model(theirs)(None, "entry", path)  # type: ignore[arg-type]
        assert asyncio.run(engine) == "theirs"
    assert len(readers) == 1 and threading.current_thread() not in readers


def test_unreadable_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(HostError, match=r"tokenizer\.json"):
        is_harmony_model(str(tmp_path))
