"""What a server has loaded is set aside from collections, until the engine is stopped."""

from __future__ import annotations

import asyncio
import gc
import importlib
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType

import pytest

from vllm_mlx_harmony.host import collector
from vllm_mlx_harmony.server import garbage


class Engine:
    """Refers to itself, as the host's batched one does."""

    def __init__(self) -> None:
        self.itself = self

    async def stop(self) -> None:
        del _ENGINES[:]


_ENGINES: list[Engine] = []


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "_set_aside", False)
    yield
    gc.unfreeze()


def test_it_is_on_again() -> None:
    """It is off while a function runs, and stays off where the server has switched it off."""
    assert garbage.without_collections(gc.isenabled) is False
    assert gc.isenabled()
    gc.disable()
    try:
        garbage.without_collections(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_loaded_is_set_aside() -> None:
    assert collector.before_serving(lambda name: name)("a model") == "a model"
    assert gc.get_freeze_count() > 0


def test_the_hosts_streams_are_bound_without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    found = collector.only_loaded(importlib)
    assert found.import_module("colorsys").__name__ == "colorsys"
    monkeypatch.delitem(sys.modules, collector.VISION, raising=False)
    with pytest.raises(ImportError):
        found.import_module(collector.VISION)
    there = ModuleType(collector.VISION)
    monkeypatch.setitem(sys.modules, "mlx_vlm", ModuleType("mlx_vlm"))
    monkeypatch.setitem(sys.modules, collector.VISION, there)
    assert found.import_module(collector.VISION) is there


def test_an_engine_that_is_stopped_can_be_collected() -> None:
    _ENGINES.append(Engine())
    engine = weakref.ref(_ENGINES[0])
    garbage.without_collections(lambda: None)
    gc.collect()
    assert engine() is not None
    stop = collector.giving_back(Engine.stop)
    asyncio.run(stop(_ENGINES[0]))
    gc.collect()
    assert engine() is None
    garbage.without_collections(lambda: None)
    assert gc.get_freeze_count() > 0  # the next one is set aside, too
