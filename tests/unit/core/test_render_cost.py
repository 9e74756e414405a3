"""A turn costs what is new in it: messages that were rendered before are not encoded again.

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


def clear_caches() -> None:
    caches = [value for value in vars(module).values() if hasattr(value, "cache_clear")]
    assert len(caches) == 4  # one in another module would have to be cleared, too
    for cache in caches:
        cache.cache_clear()


class Counts:
    """Expensive work: the texts that were encoded, and the number of declared tools."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.declarations = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Counts from empty caches."""
    clear_caches()
    counts, encode, declare = Counts(), vocab.encode, typescript.section

    def counting(text: str) -> list[int]:
        if text != "assistant":  # the opening, in every prompt
            counts.texts.append(text)
        return encode(text)

    def declaring(*args: Any) -> str:
        counts.declarations += 1
        return declare(*args)

    monkeypatch.setattr(vocab, "encode", counting)
    monkeypatch.setattr(typescript, "section", declaring)
    yield counts
    clear_caches()


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
    """A conversation of new objects, as if from the JSON of another request."""
    messages = [Instructions("".join(list(rules))), User("Go."), *step(1), *step(2, where)]
    tools = (Tool("read", "Reads.", parameters("n", "m")), Tool("write", "Writes."))
    fields = {"tools": tools, "date": "2026-01-01", **changes}
    return Turn((*messages, Answer("Done."), User("More."), *more), **fields)


def file_tools(description: str = "Reads.", **changes: Any) -> tuple[Tool, ...]:
    fields = {"parameters": parameters("n", "m"), **changes}
    return Tool("read", description, **fields), Tool("write", "Writes.")


STEP_3 = ["I need 3.", "Reading 3.", '{"n":3}', "This is 3."]
# name: the next turn, how the texts begin that are encoded for it, the sections of tools.
COSTS: dict[str, tuple[Turn, list[str], int]] = {
    "the same": (turn(), [], 0),
    "one step more": (turn(*step(3)), STEP_3, 0),
    "a step that was there, and its reasoning was not": (turn(*step(2)), ["I need 2."], 0),
    "at another place in the request": (turn(where="input[9]"), [], 0),
    "another effort": (turn(effort=Effort.HIGH), ["You are ChatGPT"], 0),
    "another date": (turn(date="2026-01-02"), ["You are ChatGPT"], 0),
    "other instructions": (turn(rules="Refuse."), ["# Instructions\n\nRefuse.\n\n# Tools"], 0),
    "a response format": (turn(response_format=ResponseFormat()), ["# Instructions"], 0),
    "another description": (turn(tools=file_tools("Reads!")), ["# Instructions"], 1),
    "another type": (
        turn(tools=file_tools(parameters=parameters("n", "o"))),
        ["# Instructions"],
        1,
    ),
    "another order": (
        turn(tools=file_tools(parameters=parameters("m", "n"))),
        ["# Instructions"],
        1,
    ),
    "no tools": (turn(tools=()), ["You are ChatGPT", "# Instructions\n\nObey."], 0),
}


@pytest.mark.parametrize(("after", "texts", "templates"), COSTS.values(), ids=COSTS.keys())
def test_only_new_texts_of_turn_are_encoded(
    counts: Counts, after: Turn, texts: list[str], templates: int
) -> None:
    render(Turn((User("Go."), Reasoning("Headers are texts too."))))
    render(turn())
    counts.texts, counts.declarations = [], 0
    warm = render(after)
    assert [text[: len(start)] for text, start in zip(counts.texts, texts, strict=True)] == texts
    assert counts.declarations == templates
    clear_caches()
    assert render(after) == warm


# Parameters that are equal in Python, but not in JSON.
ALIKE = [
    ({"default": True}, {"default": 1}),
    ({"default": 1}, {"default": 1.0}),
    ({"default": 0}, {"default": False}),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_tools_that_are_equal_only_in_python_differ(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    def prompt(more: dict[str, Any]) -> tuple[int, ...]:
        schema = {"type": "object", "properties": {"a": {"description": "A.", **more}}}
        return render(turn(tools=(Tool("f", "F.", schema),))).ids

    clear_caches()
    warm = [prompt(one), prompt(other)]
    clear_caches()
    assert [prompt(other), prompt(one)] == warm[::-1]


def test_tools_with_other_types_are_rendered_each_time(counts: Counts) -> None:
    plain = render(turn(tools=file_tools()))
    frozen = turn(tools=file_tools(parameters=MappingProxyType(parameters("n", "m"))))
    assert render(frozen) == render(frozen) == plain
    assert counts.declarations == 1 + 2


def test_alias_is_part_of_cache_key() -> None:
    """The header of a tool's result contains it, too."""
    tools = (Tool("do it"), Tool("do_it"))
    call, result = Call("c", "do it", "{}"), Result("c", "ok")
    clear_caches()
    both = render(Turn((User("Go."), call, result), tools))
    single = render(Turn((User("Go."), call, result), tools[:1]))
    clear_caches()
    assert single == render(Turn((User("Go."), call, result), tools[:1]))
    assert single.ids != both.ids


def test_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = module.lru.ByteLRU[Any, Any](20_000)
    monkeypatch.setattr(module, "_messages", cache)
    for number in range(200):
        render(Turn((User(f"{number} " * 50),)))
        assert cache.size <= 20_000
    assert 10 < len(cache) < 200


def test_counted_size_is_close_to_real_memory() -> None:
    clear_caches()
    text = "word " * 10_000
    ids = render(Turn((User(text),))).ids
    size = module._messages.size
    assert 8 * len(ids) + sys.getsizeof(text) - 5_000 < size
    assert size < 8 * len(ids) + sys.getsizeof(text) + 5_000
    clear_caches()


def test_cache_of_one_tenant_does_not_speed_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the time of a prompt would tell one tenant what another has sent."""
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
        work.append(
            sum(any(secret in encoded_text for secret in secrets) for encoded_text in encoded)
        )
    assert work == [4, 0, 4, 0]
