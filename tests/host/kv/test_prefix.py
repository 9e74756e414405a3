"""How much memory the prefix caches of this process may take together, and when it is freed."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

from mlx_lm.models.cache import KVCache

from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.host.kv import prefix


@pytest.mark.parametrize(("given", "expected"), [("0", 0), ("1.5 GiB", 3 << 29)])
def test_budget_is_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, given: str, expected: int
) -> None:
    monkeypatch.setenv(prefix.VARIABLE, given)
    assert prefix.budget() == expected


@pytest.mark.parametrize("given", ["", None, "lots", "-1", "2X", "1G2"])
def test_otherwise_it_is_a_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str | None
) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1 << 20}.get)
    if given is None:
        monkeypatch.delenv(prefix.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(prefix.VARIABLE, given)
    with caplog.at_level(logging.WARNING):
        assert prefix.budget() == 1 << 30  # of 16 GiB
    assert bool(caplog.records) == bool(given)


class Model(dict[str, Any]):
    """As mlx's modules are: a dictionary, and so not hashable."""

    def make_cache(self) -> list[Any]:
        return [KVCache()]


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> PrefixTree[Any]:
    tree: PrefixTree[Any] = PrefixTree(1_000_000)
    monkeypatch.setattr(prefix, "memory", lambda: tree)
    return tree


def fill(model: Model, tenant: str) -> None:
    import mlx.core as mx

    layers = model.make_cache()
    layers[0].update_and_fetch(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)))
    prefix.remember(model, tenant, [1, 2, 3], layers)


def known(model: Model, tenant: str = "") -> int:
    return prefix.resume(model, prefix.TenantPrompt([1, 2, 3, 4], tenant))[0]


def soon(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 5
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def test_a_model_that_is_gone_takes_everything_with_it(tree: PrefixTree[Any]) -> None:
    model, other = Model(), Model()
    for tenant in ("alice", "bob"):
        fill(model, tenant)
    fill(other, "alice")
    assert known(model, "alice") == 3 and tree.counters().segments == 3
    del model
    gc.collect()
    assert soon(lambda: tree.counters().segments == 1) and known(other, "alice") == 3


def test_forget_keeps_other_models(tree: PrefixTree[Any]) -> None:
    one, other = Model(), Model()
    fill(one, "")
    fill(other, "")
    prefix.forget(one)
    assert (known(one), known(other)) == (0, 3)


def test_switched_off_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tree: PrefixTree[Any] = PrefixTree(0)
    monkeypatch.setattr(prefix, "memory", lambda: tree)
    model = Model()
    assert not prefix.enabled() and not prefix.reusable(model)
    fill(model, "")
    assert known(model) == 0 and prefix.status(model)["misses"] == 0
