"""Where conversations go, and which engines are up: tables, no sockets and no clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import Answer, Instructions, Message, Turn, User
from vllm_mlx_harmony.gateway.routing_policy import (
    ASSISTANT,
    Choice,
    Health,
    Routing,
    Rule,
    conversation,
)

ENGINES = ("a", "b", "c", "d")
RULE = Rule(
    balance_abs_threshold=4,
    home_abs_threshold=2,
    balance_rel_threshold=1.5,
    failure_threshold=3,
    open_seconds=1.0,
    max_open_seconds=8.0,
    probe_interval=10.0,
)


def new_routing() -> Routing[str]:
    return Routing(ENGINES, RULE)


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


# --- What a conversation is


def prompt(*messages: Message, instructions: str = "Be brief.") -> tuple[int, ...]:
    return tuple(render(Turn(messages=(Instructions(instructions), *messages))).ids)


def test_all_turns_belong_to_one_conversation() -> None:
    first = prompt(User("2+2?"))
    later = prompt(User("2+2?"), Answer("4"), User("And 3+3?"))
    assert conversation(first, "me") == conversation(later, "me")


@pytest.mark.parametrize(
    ("other", "tenant"),
    [
        (prompt(User("2+3?")), "me"),
        (prompt(User("2+2?"), instructions="Be long."), "me"),
        (prompt(User("2+2?")), "you"),
    ],
    ids=["another question", "other instructions", "another tenant"],
)
def test_other_prompts_are_other_conversations(other: tuple[int, ...], tenant: str) -> None:
    assert conversation(prompt(User("2+2?")), "me") != conversation(other, tenant)


def test_word_assistant_in_a_text_does_not_end_the_prefix() -> None:
    first = prompt(User("assistant one"))
    assert ASSISTANT in first
    assert conversation(first, "") != conversation(prompt(User("assistant two")), "")


def test_prompts_without_an_answer_differ() -> None:
    assert conversation((1, 2, 3), "") != conversation((1, 2), "") != conversation((), "")


# --- Where it goes


@pytest.mark.parametrize(
    ("loads", "excluded", "expected"),
    [
        ({}, (), ("LAST", "prefix")),
        ({"LAST": 4}, (), ("LAST", "prefix")),  # not more than the spread above the least
        ({"LAST": 5}, (), ("OTHER", "moved")),
        ({"LAST": 20, "OTHERS": 14}, (), ("LAST", "prefix")),  # 6 more, but not 1.5 times as many
        ({"LAST": 22, "OTHERS": 14}, (), ("OTHER", "moved")),
        ({}, ("LAST",), ("OTHER", "moved")),
        ({}, ENGINES, None),
    ],
)
def test_known_conversation_moves_only_from_an_overloaded_engine(
    loads: dict[str, int], excluded: tuple[str, ...], expected: tuple[str, str] | None
) -> None:
    """Whichever engine it is on; `OTHER` is any but that one."""
    for last in ENGINES:
        routing = new_routing()
        routing.record_turn(digest(1), last)
        engine_loads = {
            name: loads.get("LAST" if name == last else "OTHERS", 0) for name in ENGINES
        }
        avoided = tuple(last if name == "LAST" else name for name in excluded)
        choice = routing.choose(digest(1), engine_loads, avoided)
        if expected is None:
            assert choice is None
            continue
        assert choice is not None and choice.why == expected[1]
        assert (choice.engine == last) is (expected[0] == "LAST")


def test_gateways_agree_on_homes_without_sharing() -> None:
    first, second = Routing(ENGINES, RULE), Routing(tuple(reversed(ENGINES)), RULE)
    homes = [first.choose(digest(number), {}) for number in range(400)]
    assert homes == [second.choose(digest(number), {}) for number in range(400)]
    counts = [homes.count(Choice(name, "new")) for name in ENGINES]
    assert sum(counts) == 400 and min(counts) > 70


def test_lost_engine_moves_only_its_conversations() -> None:
    routing = new_routing()
    homes = {number: routing.choose(digest(number), {}) for number in range(400)}
    routing.remove("b")
    for number, home in homes.items():
        assert home is not None
        now = routing.choose(digest(number), {})
        assert (now == home) is (home.engine != "b")


def test_overloaded_home_is_avoided() -> None:
    routing = new_routing()
    home = routing.choose(digest(1), {})
    assert home is not None
    assert routing.choose(digest(1), {home.engine: 2}) == home
    elsewhere = routing.choose(digest(1), {home.engine: 3})
    assert elsewhere is not None and elsewhere.engine != home.engine and elsewhere.why == "new"


def test_moved_conversation_stays() -> None:
    routing = new_routing()
    routing.record_turn(digest(1), "a")
    moved = routing.choose(digest(1), {"a": 9})
    assert moved is not None and moved.engine != "a"
    routing.record_turn(digest(1), moved.engine)
    assert routing.choose(digest(1), {}) == Choice(moved.engine, "prefix")


def test_new_engine_takes_only_new_conversations() -> None:
    routing = new_routing()
    for number in range(100):
        routing.record_turn(digest(number), "a")
    routing.add("e")
    assert all(routing.choose(digest(n), {}) == Choice("a", "prefix") for n in range(100))
    new = [routing.choose(digest(n), {}) for n in range(100, 200)]
    assert 5 < new.count(Choice("e", "new")) < 45


def test_conversations_are_remembered_within_a_bound() -> None:
    routing = Routing(ENGINES, Rule(max_conversations=10))
    homes = [routing.choose(digest(number), {}) for number in range(11)]
    others = [next(name for name in ENGINES if home and name != home.engine) for home in homes]
    for number, other in enumerate(others):
        routing.record_turn(digest(number), other)
    assert routing.choose(digest(0), {}) == homes[0]  # forgotten: it goes home again
    assert routing.choose(digest(10), {}) == Choice(others[10], "prefix")


# --- Which engines are up


FAIL, FINE, DRAIN, RESTORE, SILENT = "fail", "fine", "drain", "restore", "silent"
WELL, ILL = "well", "ill"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], Health.UP),
        ([FAIL, FAIL], Health.UP),
        ([FAIL, FAIL, FINE, FAIL, FAIL], Health.UP),  # not in a row
        ([FAIL, FAIL, FAIL], Health.DOWN),
        ([FAIL, FAIL, ILL], Health.DOWN),  # a probe is as good as a request
        ([FAIL, WELL, FAIL, FAIL], Health.UP),
        ([FAIL, FAIL, FAIL, FINE], Health.DOWN),  # a request from before does not count
        ([FAIL, FAIL, FAIL, ILL], Health.DOWN),
        ([FAIL, FAIL, FAIL, WELL], Health.UP),
        ([FAIL, FAIL, FAIL, WELL, FAIL, FAIL], Health.UP),  # counted from the beginning
        ([SILENT], Health.DOWN),  # which says more than a failure
        ([SILENT, FINE], Health.DOWN),
        ([SILENT, WELL], Health.UP),
        ([DRAIN, SILENT], Health.DRAINING_DOWN),
        ([DRAIN], Health.DRAINING),
        ([DRAIN, FINE, WELL, FAIL], Health.DRAINING),
        ([DRAIN, RESTORE], Health.UP),
        ([DRAIN, FAIL, FAIL, FAIL], Health.DRAINING_DOWN),
        ([DRAIN, FAIL, FAIL, FAIL, WELL], Health.DRAINING),
        ([FAIL, FAIL, FAIL, DRAIN], Health.DRAINING_DOWN),
        ([FAIL, FAIL, FAIL, DRAIN, RESTORE], Health.DOWN),
        ([FAIL, FAIL, FAIL, DRAIN, WELL, RESTORE], Health.UP),
    ],
)
def test_events_change_the_health(events: list[str], expected: Health) -> None:
    routing = new_routing()
    actions = {
        FAIL: lambda: routing.record_failure("a", 0.0),
        FINE: lambda: routing.record_success("a"),
        SILENT: lambda: routing.record_silence("a", 0.0),
        WELL: lambda: routing.record_probe("a", True, 0.0),
        ILL: lambda: routing.record_probe("a", False, 0.0),
        DRAIN: lambda: routing.drain("a"),
        RESTORE: lambda: routing.restore("a"),
    }
    for event in events:
        actions[event]()
    assert routing.health("a") is expected
    for number in range(50):  # only one that is up is sent anything
        routing.record_turn(digest(number), "a")
        choice = routing.choose(digest(number), {})
        assert choice is not None and (choice.engine == "a") is (expected is Health.UP)


def test_probes_of_failed_engine_back_off() -> None:
    routing = Routing(("a",), RULE)
    assert routing.due(0.0) == ["a"]
    assert routing.due(9.9) == [] and routing.due(10.0) == ["a"]
    for _ in range(3):
        routing.record_failure("a", 100.0)
    assert routing.choose(digest(1), {}) is None
    now, pauses = 100.0, []
    for _ in range(6):
        pause = routing.retry_after(now)
        assert pause is not None
        pauses.append(pause)
        now += pause
        assert routing.due(now - 0.01) == [] and routing.due(now) == ["a"]
        routing.record_probe("a", False, now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    routing.record_probe("a", True, now)
    assert routing.health("a") is Health.UP and routing.retry_after(now) is None
    assert routing.due(now + 9.9) == [] and routing.due(now + 10.0) == ["a"]


# --- Engines that are silent

LAPTOP, SERVER = 0.003, 0.00003
"""Seconds per token of a prompt."""


def paced(
    paces: dict[str, float], requests: int = 32, tokens: int = 700, **rule: Any
) -> Routing[str]:
    """Engines that have computed ``requests`` prompts of ``tokens`` each."""
    routing = Routing(ENGINES, replace(RULE, **rule))
    for name, pace in paces.items():
        for _ in range(requests):
            routing.record_latency(name, 0.05 + pace * tokens, tokens)
    return routing


@pytest.mark.parametrize(
    ("paces", "requests", "tokens", "at_least", "at_most"),
    [
        # Seconds that the prompt itself takes, and seconds that would certainly be silence.
        ({"a": SERVER, "b": SERVER}, 32, 700, 0.02, 3),
        ({"a": SERVER, "b": SERVER}, 32, 50_000, 1.5, 60),
        ({"a": LAPTOP, "b": SERVER}, 32, 700, 2.1, 30),  # slow among quick ones
        ({"a": LAPTOP, "b": SERVER}, 32, 50_000, 150.0, 2000),
        ({"a": SERVER, "b": LAPTOP, "c": LAPTOP, "d": LAPTOP}, 32, 50_000, 150.0, 2000),
        ({"a": LAPTOP, "b": SERVER}, 1, 50_000, 150.0, 2000),  # too few have been measured
        ({"b": SERVER}, 32, 50_000, 150.0, 2000),  # nothing has been measured
        ({"b": SERVER}, 32, 100, 0.3, 5),
        ({}, 0, 50_000, 150.0, 2000),
    ],
)
def test_expected_silence_depends_on_the_pace(
    paces: dict[str, float], requests: int, tokens: int, at_least: float, at_most: float
) -> None:
    assert at_least < paced(paces, requests).expected("a", tokens) < at_most


def test_legitimate_prompt_is_never_silence() -> None:
    """Whatever share of the prompts was cached before, and whatever else the engine computes."""
    for pace, measured, tokens in product(
        (LAPTOP, SERVER), (0, 20, 700, 9_000), (10, 9_000, 120_000)
    ):
        for others in ({}, {"b": SERVER, "c": SERVER}, {"b": LAPTOP}):
            routing = paced({**others, "a": pace}, tokens=measured)
            assert routing.expected("a", tokens) > pace * tokens, (pace, measured, tokens, others)


def test_unknown_cache_hits_do_not_shorten_the_timeout() -> None:
    """The engine does not report what was cached: of 9,000 tokens perhaps all."""
    routing = new_routing()
    for _ in range(8):
        routing.record_latency("a", 2.0, 0)
    assert routing.expected("a", 9_000) > 9_000 * LAPTOP


def test_failed_engine_is_doubted_until_an_id_comes() -> None:
    routing = Routing(("a", "b"), RULE)
    assert routing.due(0.0) == ["a", "b"] and not routing.doubted("a")
    routing.record_failure("a", 1.0)
    assert routing.doubted("a") and routing.due(1.0, probed=["a"]) == []
    assert routing.due(1.0) == ["a"] and routing.due(1.1) == []
    routing.record_probe("a", True, 1.5)
    assert not routing.doubted("a") and routing.health("a") is Health.UP
    routing.doubt("b", 2.0)
    assert routing.due(2.0) == ["b"] and routing.doubted("b")
    routing.record_success("b")
    assert not routing.doubted("b")
    for _ in range(3):
        routing.doubt("b", 3.0)  # a doubt is no failure
    assert routing.health("b") is Health.UP


def test_failed_conversation_moves_once() -> None:
    routing = new_routing()
    routing.record_turn(digest(1), "a")
    routing.avoid(digest(1), "a")
    moved = routing.choose(digest(1), {})
    assert moved is not None and moved.engine != "a" and moved.why == "moved"
    only = routing.choose(digest(1), {}, [name for name in ENGINES if name != "a"])
    assert only is not None and only.engine == "a"  # there is no other
    routing.record_turn(digest(1), "a")
    assert routing.choose(digest(1), {}) == Choice("a", "prefix")


def test_records_of_removed_engine_are_ignored() -> None:
    routing = new_routing()
    routing.remove("a")
    routing.record_failure("a", 0.0)
    routing.record_success("a")
    routing.record_probe("a", False, 0.0)
    routing.record_latency("a", 1.0, 10)
    routing.record_silence("a", 0.0)
    routing.doubt("a", 0.0)
    assert not routing.doubted("a")
    assert routing.engines == ("b", "c", "d")


def test_replacement_inherits_conversations_but_not_health() -> None:
    """An engine whose key was changed: records of the old one do not count for the new one."""
    routing: Routing[tuple[str, int]] = Routing(
        [("a", 1), ("b", 1)], RULE, name=lambda engine: engine[0]
    )
    routing.record_turn(digest(1), ("a", 1))
    homes = {number: routing.choose(digest(number), {}) for number in range(2, 100)}
    routing.drain(("a", 1))
    routing.add(("a", 2), up=False)
    routing.record_probe(("a", 1), True, 0.0)
    assert routing.health(("a", 2)) is Health.DOWN
    routing.record_probe(("a", 2), True, 0.0)
    routing.record_failure(("a", 1), 0.0)
    routing.remove(("a", 1))
    assert routing.health(("a", 2)) is Health.UP
    assert routing.choose(digest(1), {}) == Choice(("a", 2), "prefix")
    for number, home in homes.items():
        now = routing.choose(digest(number), {})
        assert home is not None and now is not None
        assert now.engine[0] == home.engine[0]
