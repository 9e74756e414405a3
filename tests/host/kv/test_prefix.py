"""Where prompts are cut, how much may be remembered, and whose it is."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
from rows import ids

pytest.importorskip("openai_harmony")

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.host.kv import prefix
from vllm_mlx_harmony.host.kv.tree import Counters, Tree, pack

LONG = " word" * 40
SYSTEM = f"<|start|>system<|message|>You are ChatGPT.{LONG}<|end|>"
DEVELOPER = f"<|start|>developer<|message|># Instructions{LONG}<|end|>"
ASKED = f"<|start|>user<|message|>Weather?{LONG}<|end|>"
CALLED = "<|start|>assistant<|channel|>commentary to=functions.x<|message|>{}<|call|>"
RESULT = f"<|start|>functions.x to=assistant<|channel|>commentary<|message|>{LONG}<|end|>"
ANSWERED = f"<|start|>assistant<|channel|>final<|message|>Rain.{LONG}<|end|>"
OPENING = "<|start|>assistant"


HI = "<|start|>user<|message|>Hi<|end|>"


def cuts(*parts: str, after: int = 0) -> list[str]:
    """The pieces as text, instead of where they end."""
    prompt = ids("".join(parts))
    places = [after, *prefix.marks(prompt, after)]
    assert places == sorted(set(places))
    decode = vocab.encoding().decode
    return [decode(prompt[start:end]) for start, end in pairwise(places)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((ASKED, OPENING), [ASKED + "<|start|>"]),
        ((SYSTEM, ASKED, OPENING), [SYSTEM, ASKED + "<|start|>"]),
        ((SYSTEM, DEVELOPER, ASKED, OPENING), [SYSTEM + DEVELOPER, ASKED + "<|start|>"]),
        (
            (SYSTEM, ASKED, ANSWERED, ASKED, OPENING),
            [SYSTEM, ASKED + ANSWERED, ASKED + "<|start|>"],
        ),
        (
            (SYSTEM, ASKED, CALLED, RESULT, OPENING),
            [SYSTEM, ASKED + CALLED + RESULT + "<|start|>"],
        ),
        # A later developer message belongs to the conversation.
        ((SYSTEM, ASKED, DEVELOPER, OPENING), [SYSTEM, ASKED + DEVELOPER + "<|start|>"]),
        # No piece too short to be worth it.
        (("<|start|>system<|message|>Hi<|end|>", ASKED, OPENING), None),
        (("<|start|>system<|message|>Hi<|end|>", HI, OPENING), None),
        ((SYSTEM, ASKED, ANSWERED, HI, OPENING), [SYSTEM, ASKED + ANSWERED + HI + "<|start|>"]),
        # What many conversations share is, however short the rest.
        ((SYSTEM, HI, OPENING), [SYSTEM, HI + "<|start|>"]),
        ((SYSTEM, OPENING), [SYSTEM, "<|start|>"]),
        ((OPENING,), ["<|start|>"]),
    ],
)
def test_prompts_are_cut_where_another_may_leave_them(
    parts: tuple[str, ...], expected: list[str] | None
) -> None:
    whole = "".join(parts).removesuffix("assistant")
    assert cuts(*parts) == (expected or [whole])


def test_only_what_follows_the_known_is_cut() -> None:
    known = len(ids(SYSTEM + ASKED + CALLED))
    pieces = cuts(SYSTEM, ASKED, CALLED, RESULT, OPENING, after=known)
    assert pieces == [RESULT + "<|start|>"]
    prompt = ids(SYSTEM + ASKED + OPENING)
    assert prefix.marks(prompt, after=len(prompt) - 1) == []
    assert prefix.marks([vocab.START], after=0) == []


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


class Piece:
    nbytes = 1


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Tree[Any]:
    tree: Tree[Any] = Tree(1000)
    monkeypatch.setattr(prefix, "memory", lambda: tree)
    return tree


def add(tree: Tree[Any], owner: prefix.Owner) -> None:
    tree.add(owner, pack([1, 2, 3]), lambda start, end: Piece())


def known(tree: Tree[Any], owner: prefix.Owner) -> int:
    return tree.find(owner, pack([1, 2, 3, 4]))[0]


def test_tenants_and_models_are_apart(tree: Tree[Any]) -> None:
    one, other = Model(), Model()
    add(tree, prefix.owner(one, "alice"))
    assert known(tree, prefix.owner(one, "alice")) == 3
    assert known(tree, prefix.owner(one, "bob")) == 0
    assert known(tree, prefix.owner(other, "alice")) == 0


def test_a_model_that_is_gone_takes_everything_with_it(tree: Tree[Any]) -> None:
    model = Model()
    owner = prefix.owner(model, "alice")
    add(tree, owner)
    add(tree, prefix.owner(model, "bob"))
    del model
    assert tree.counters().nbytes == 0 and known(tree, owner) == 0
    assert owner[0] not in prefix._models


def test_forget_keeps_other_models(tree: Tree[Any]) -> None:
    one, other = Model(), Model()
    add(tree, prefix.owner(one, ""))
    add(tree, prefix.owner(other, ""))
    prefix.forget(one)
    assert (known(tree, prefix.owner(one, "")), known(tree, prefix.owner(other, ""))) == (0, 3)


def test_switched_off_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tree: Tree[Any] = Tree(0)
    monkeypatch.setattr(prefix, "memory", lambda: tree)
    assert not prefix.enabled() and not prefix.reusable(Model())
    assert prefix.resume(Model(), prefix.TenantPrompt([1, 2])) == (0, None)
    assert tree.counters() == Counters()


def test_a_failure_costs_only_the_reuse(tree: Tree[Any], caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mlx_lm")
    model = Model()
    add(tree, prefix.owner(model, ""))  # what it holds are no keys and values
    prompt = prefix.TenantPrompt([1, 2, 3, 4])
    with caplog.at_level(logging.ERROR):
        assert prefix.resume(model, prompt) == (0, None)
        prefix.remember(model, "", [7, 8], cache=[object()])
    assert prompt.cached == 0 and len(caplog.records) == 2
    assert known(tree, prefix.owner(model, "")) == 3


def test_known_is_a_list_of_ids() -> None:
    prompt = prefix.TenantPrompt((1, 2, 3), "alice")
    assert prompt == [1, 2, 3] and (prompt.tenant, prompt.cached) == ("alice", 0)
    assert type(prompt[1:]) is list
