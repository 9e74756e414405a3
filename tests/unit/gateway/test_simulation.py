"""The simulation of routing, with fewer requests: it is deterministic, and loses no turn."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
from simulate_routing import (
    POLICIES,
    PREFILL,
    Result,
    Simulation,
    between,
    conversations,
    share,
)

SECONDS = 600.0
CONVERSATIONS = conversations(120, 14, SECONDS)
TURNS = sum(len(conversation.turns) for conversation in CONVERSATIONS)


def simulate(policy: str, **options: Any) -> Result:
    return Simulation(CONVERSATIONS, POLICIES[policy], engines=8, **options).run()


def test_same_seed_gives_the_same_result() -> None:
    assert conversations(120, 14, SECONDS) == CONVERSATIONS != conversations(120, 15, SECONDS)
    runs = [simulate("prefix", gateways=2, lose_at=300.0, join_at=450.0) for _ in range(2)]
    assert astuple(runs[0]) == astuple(runs[1])


@pytest.mark.parametrize("gateways", [1, 4])
def test_routing_by_prefix_computes_a_fraction(gateways: int) -> None:
    results = {policy: simulate(policy, gateways=gateways) for policy in POLICIES}
    assert {result.turns for result in results.values()} == {TURNS}
    assert len({result.prompts for result in results.values()}) == 1  # the same questions
    computed = {policy: result.computed for policy, result in results.items()}
    assert computed["prefix"] < 0.5 * min(computed["round robin"], computed["least loaded"])
    assert results["prefix"].hit_rate > 0.9
    p99 = {
        policy: share([first for _, first in result.first_tokens], 0.99)
        for policy, result in results.items()
    }
    assert p99["prefix"] <= min(p99.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_lost_engine_loses_no_turn(policy: str) -> None:
    result = simulate(policy, lose_at=300.0, join_at=450.0)
    sent_again = result.turns - TURNS - result.repeated
    assert 0 <= sent_again <= result.retried
    assert between(result.waits, 0.0, 1e9) == [wait for _, wait in result.waits]


def test_lost_engine_recomputes_only_its_conversations() -> None:
    without, with_loss = simulate("prefix"), simulate("prefix", lose_at=300.0)
    more = with_loss.computed - without.computed
    assert 0 < more < with_loss.prompts / 8


@pytest.mark.parametrize("gateways", [1, 2])
def test_silent_engine_is_taken_down_but_no_slow_one(gateways: int) -> None:
    """Quickly, by each gateway that has sent it a request; other engines never are."""
    result = simulate("prefix", gateways=gateways, silent_at=300.0, slow=PREFILL / 20)
    assert [well for *_, well in result.silences] == [False] * gateways
    assert all(at < 300.0 + 90.0 for at, *_ in result.silences)
    assert result.closest < 0.5
    assert result.turns - TURNS - result.repeated == 0  # each turn has its answer
