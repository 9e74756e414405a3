"""A turn costs what is new in it: what was rendered before is not encoded again, and is the same.

Counted, not timed: `benchmarks/bench_render.py` has the milliseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest

from vllm_mlx_harmony.core import render as module
from vllm_mlx_harmony.core import typescript, vocab
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    Effort,
    Instructions,
    Message,
    Preamble,
    Reasoning,
    ResponseFormat,
    Result,
    Tool,
    Turn,
    User,
)


def forget() -> None:
    for value in vars(module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


class Counted:
    """What is expensive: the texts that were encoded, and the tools that were declared."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.declarations = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Counts from where everything is forgotten."""
    forget()
    counted, encode, declare = Counted(), vocab.encode, typescript.section

    def counting(text: str) -> list[int]:
        if text != "assistant":  # the opening, in every prompt
            counted.texts.append(text)
        return encode(text)

    def declaring(*args: Any) -> str:
        counted.declarations += 1
        return declare(*args)

    monkeypatch.setattr(vocab, "encode", counting)
    monkeypatch.setattr(typescript, "section", declaring)
    yield counted
    forget()


def parameters(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}}


def step(number: int, where: str = "messages[3]") -> list[Message]:
    key = f"c{number}"
    return [
        Reasoning(f"I need {number}."),
        Preamble(f"Reading {number}."),
        Call(key, "read", f'{{"n":{number}}}'),
        Result(key, f"This is {number}.", where),
    ]


def turn(*more: Message, rules: str = "Obey.", where: str = "messages[3]", **changes: Any) -> Turn:
    """A conversation, of values made anew as from another request's JSON."""
    messages = [Instructions("".join(list(rules))), User("Go."), *step(1), *step(2, where)]
    tools = (Tool("read", "Reads.", parameters("n", "m")), Tool("write", "Writes."))
    given = {"tools": tools, "date": "2026-01-01", **changes}
    return Turn((*messages, Answer("Done."), User("More."), *more), **given)


def read(description: str = "Reads.", **changes: Any) -> tuple[Tool, ...]:
    given = {"parameters": parameters("n", "m"), **changes}
    return Tool("read", description, **given), Tool("write", "Writes.")


STEP_3 = ["I need 3.", "Reading 3.", '{"n":3}', "This is 3."]
# What the next turn is -> how the texts begin that are encoded for it, tools declared or not.
COSTS: dict[str, tuple[Turn, list[str], int]] = {
    "the same": (turn(), [], 0),
    "one step more": (turn(*step(3)), STEP_3, 0),
    "a step that was there, and its reasoning was not": (turn(*step(2)), ["I need 2."], 0),
    "at another place in the request": (turn(where="input[9]"), [], 0),
    "another effort": (turn(effort=Effort.HIGH), ["You are ChatGPT"], 0),
    "another date": (turn(date="2026-01-02"), ["You are ChatGPT"], 0),
    "other instructions": (turn(rules="Refuse."), ["# Instructions\n\nRefuse.\n\n# Tools"], 0),
    "a response format": (turn(response_format=ResponseFormat()), ["# Instructions"], 0),
    "another description": (turn(tools=read("Reads!")), ["# Instructions"], 1),
    "another type": (turn(tools=read(parameters=parameters("n", "o"))), ["# Instructions"], 1),
    "another order": (turn(tools=read(parameters=parameters("m", "n"))), ["# Instructions"], 1),
    "no tools": (turn(tools=()), ["You are ChatGPT", "# Instructions\n\nObey."], 0),
}


@pytest.mark.parametrize(("after", "texts", "templates"), COSTS.values(), ids=COSTS.keys())
def test_a_turn_costs_what_is_new(
    counted: Counted, after: Turn, texts: list[str], templates: int
) -> None:
    render(Turn((User("Go."), Reasoning("Headers are texts too."))))
    render(turn())
    counted.texts, counted.declarations = [], 0
    warm = render(after)
    assert [text[: len(start)] for text, start in zip(counted.texts, texts, strict=True)] == texts
    assert counted.declarations == templates
    forget()
    assert render(after) == warm


# Parameters that Python takes for equal and JSON does not.
ALIKE = [
    ({"default": True}, {"default": 1}),
    ({"default": 1}, {"default": 1.0}),
    ({"default": 0}, {"default": False}),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_tools_that_only_look_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    def prompt(more: dict[str, Any]) -> tuple[int, ...]:
        schema = {"type": "object", "properties": {"a": {"description": "A.", **more}}}
        return render(turn(tools=(Tool("f", "F.", schema),))).ids

    forget()
    warm = [prompt(one), prompt(other)]
    forget()
    assert [prompt(other), prompt(one)] == warm[::-1]


def test_tools_with_other_types_are_rendered_each_time(counted: Counted) -> None:
    plain = render(turn(tools=read()))
    frozen = turn(tools=read(parameters=MappingProxyType(parameters("n", "m"))))
    assert render(frozen) == render(frozen) == plain
    assert counted.declarations == 1 + 2


def test_an_alias_is_part_of_what_is_remembered() -> None:
    """Of a tool, and of a tool's result, whose header has it."""
    tools = (Tool("do it"), Tool("do_it"))
    call, result = Call("c", "do it", "{}"), Result("c", "ok")
    forget()
    two = render(Turn((User("Go."), call, result), tools))
    one = render(Turn((User("Go."), call, result), tools[:1]))
    forget()
    assert one == render(Turn((User("Go."), call, result), tools[:1]))
    assert one.ids != two.ids


def test_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    small = module.lru.ByteLRU[Any, Any](20_000)
    monkeypatch.setattr(module, "_messages", small)
    for number in range(200):
        render(Turn((User(f"{number} " * 50),)))
        assert small.size <= 20_000
    assert 10 < len(small) < 200


def test_counted_size_is_close_to_real_memory() -> None:
    forget()
    text = "word " * 10_000
    ids = render(Turn((User(text),))).ids
    counted = module._messages.size
    assert 8 * len(ids) + sys.getsizeof(text) - 5_000 < counted
    assert counted < 8 * len(ids) + sys.getsizeof(text) + 5_000
    forget()


def test_cache_of_one_tenant_does_not_speed_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the time that a prompt takes tells one of them what the other has said."""
    text = "Nobody has ever said this to anybody before."
    tool = Tool("never_declared_before", "Does what nothing has ever done.")
    call = Call("c", tool.name, "{}")
    secrets = (text, tool.description, f"to=functions.{tool.name} ", f"{tool.name} to=assistant")
    encoded: list[str] = []
    encode = vocab.encode

    def counting(text: str) -> Iterator[int]:
        encoded.append(text)
        return encode(text)

    monkeypatch.setattr(vocab, "encode", counting)
    work = []
    for tenant in ("one", "one", "another", "another"):
        encoded.clear()
        render(Turn((User(text), call, Result("c", "ok")), (tool,), tenant=tenant))
        work.append(sum(any(secret in each for secret in secrets) for each in encoded))
    assert work == [4, 0, 4, 0]
