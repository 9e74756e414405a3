"""Grammars of turns: rows of outputs that are accepted or rejected id by id.

`tests/unit/host/test_enforcement.py` generates random outputs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from harmony_text import ids_of

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Opened
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar import (
    Compiled,
    Mask,
    Policy,
    compile_grammar,
    grammar_of,
    with_compact_json,
)
from vllm_mlx_harmony.core.header import CHANNELS
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.turn import (
    AdditionalTools,
    FormatUpdate,
    ResponseFormat,
    Tool,
    ToolChoice,
    Turn,
    User,
)

WEATHER: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Köln"]},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
ANSWER: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        "score": {"type": ["number", "null"]},
    },
    "required": ["title", "tags"],
    "additionalProperties": False,
}
TOOLS = (Tool("weather", parameters=WEATHER), Tool("weather_now"), Tool("last.one", parameters={}))


def make_turn(**fields: Any) -> Turn:
    return Turn(messages=(User("Hi."),), **fields)


def compile_turn(turn: Turn, policy: Policy = Policy.AUTO) -> Compiled:
    grammar = grammar_of(turn, Names.of(turn), policy)
    assert grammar is not None
    return compile_grammar(grammar)


# --- rows ---

AUTO = make_turn(tools=TOOLS)
NAMED = make_turn(tools=TOOLS, tool_choice=ToolChoice(required=True, names=("weather",)))
TYPED = make_turn(response_format=ResponseFormat(ANSWER))
TYPED_TOOLS = make_turn(tools=TOOLS, response_format=ResponseFormat(ANSWER))
CHOICES = {
    "plain": make_turn(),
    "silent": make_turn(thinking=False),
    "auto": AUTO,
    "silent auto": make_turn(tools=TOOLS, thinking=False),
    "required": make_turn(tools=TOOLS, tool_choice=ToolChoice(required=True)),
    "named": NAMED,
    "allowed": make_turn(tools=TOOLS, tool_choice=ToolChoice(names=("weather_now",))),
    "typed": TYPED,
    "object": make_turn(response_format=ResponseFormat()),
    "typed with tools": TYPED_TOOLS,
    "typed, required": replace(TYPED_TOOLS, tool_choice=ToolChoice(required=True)),
    "built-in": make_turn(builtin_tools=("browser", "python")),
}

ARGS = '{"city":"Rome"}'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
BLANK_THOUGHT, BLANK_PREAMBLE = THOUGHT.replace("Hm.", ""), PREAMBLE.replace("Wait.", "")
FINAL = "<|channel|>final<|message|>Hi.<|return|>"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGS}<|call|>"
JSON = '{"title":"t","tags":["a"]}'
TYPED_FINAL = f"<|channel|>final<|message|>{JSON}<|return|>"

NONE = frozenset[str]()
CALLERS = NONE | {"auto", "silent auto", "required", "named", "typed with tools", "typed, required"}
TALKERS = NONE | {"plain", "silent", "auto", "silent auto", "allowed", "built-in"}
ANSWERERS = TALKERS | {"typed", "object", "typed with tools"}
THINKERS = NONE | {name for name in CHOICES if not name.startswith("silent")}


@dataclass(frozen=True)
class Row:
    id: str
    output: str
    choices: frozenset[str]
    """The choices that accept all of the output; any other rejects some of it."""


NAMES = ("functions.weather", "weather")
TYPES = (
    "", " json", " code", "<|constrain|>json", " <|constrain|>json", " <|constrain|>code",
)  # fmt: skip
HEADERS = [
    f"{header}{kind}<|message|>{ARGS}<|call|>"
    for header in (
        *(f"<|channel|>{channel} to={name}" for channel, name in product(sorted(CHANNELS), NAMES)),
        *(
            f" to={name}{space}<|channel|>{channel}"
            for name, space, channel in product(NAMES, ("", " "), sorted(CHANNELS))
        ),
        " to=functions.weather",
    )
    for kind in TYPES
]

OUTPUTS = [
    *(Row(f"header: {header}", header, CALLERS) for header in HEADERS),
    Row("an answer", FINAL, TALKERS),
    Row("an answer with a type", FINAL.replace("final", "final <|constrain|>json"), TALKERS),
    Row("an empty answer", "<|channel|>final<|message|><|return|>", TALKERS),
    Row("thought, an answer", THOUGHT + FINAL, TALKERS & THINKERS),
    Row("thought often", THOUGHT * 3 + CALL, CALLERS & THINKERS),
    Row("said, a call", PREAMBLE + CALL, CALLERS),
    Row("said and thought, a call", (PREAMBLE + THOUGHT) * 2 + CALL, CALLERS & THINKERS),
    Row("said, an answer", PREAMBLE + FINAL, TALKERS - {"silent"}),
    Row("typed", TYPED_FINAL, ANSWERERS),
    Row("typed, pretty", "<|channel|>final<|message|>" + '{\n  "title": "t",\n  "tags": [\n    "a"'
        "\n  ]\n}<|return|>", ANSWERERS),
    Row("typed with a type", TYPED_FINAL.replace("final", "final<|constrain|>json"), ANSWERERS),
    Row("thought, typed", THOUGHT + TYPED_FINAL, ANSWERERS & THINKERS),
    Row("said, typed", PREAMBLE + TYPED_FINAL, TALKERS - {"silent"}),
    Row("other JSON", '<|channel|>final<|message|>{"x":[1,null]}<|return|>', TALKERS | {"object"}),
    # A blank message is followed by one that is not blank, or by the last message.
    Row("blank thought, an answer", BLANK_THOUGHT + FINAL, TALKERS & THINKERS),
    Row("blank thoughts between others", (BLANK_THOUGHT + THOUGHT) * 3 + BLANK_THOUGHT + CALL,
        CALLERS & THINKERS),
    Row("blank thoughts, typed", (BLANK_THOUGHT + THOUGHT) * 2 + BLANK_THOUGHT + TYPED_FINAL,
        ANSWERERS & THINKERS),
    Row("white space thought", THOUGHT.replace("Hm.", " \n") + FINAL, TALKERS & THINKERS),
    Row("said nothing, a call", BLANK_PREAMBLE + CALL, CALLERS),
    Row("said nothing, thought, said nothing, a call",
        BLANK_PREAMBLE + THOUGHT + BLANK_PREAMBLE + CALL, CALLERS & THINKERS),
    Row("said nothing, thought, said, a call", BLANK_PREAMBLE + THOUGHT + PREAMBLE + CALL,
        CALLERS & THINKERS),
    Row("blank thought, said, a call", BLANK_THOUGHT + PREAMBLE + CALL, CALLERS & THINKERS),
    Row("two blank thoughts", BLANK_THOUGHT * 2 + FINAL, NONE),
    Row("said nothing twice", BLANK_PREAMBLE * 2 + CALL, NONE),
    Row("white space twice", THOUGHT.replace("Hm.", " ") * 2 + FINAL, NONE),
    Row("nothing said and thought", BLANK_PREAMBLE + BLANK_THOUGHT + CALL, NONE),
    Row("nothing thought and said", THOUGHT + BLANK_THOUGHT + BLANK_PREAMBLE + CALL, NONE),
    Row("an answer with a lone word", FINAL.replace("final", "final json"), NONE),
    Row("JSON, and no object", "<|channel|>final<|message|>[1]<|return|>", TALKERS),
    Row("another tool", "<|channel|>commentary to=functions.weather_now<|message|>{}<|call|>",
        CALLERS - {"named"} | {"allowed"}),
    Row("a tool with dots", '<|channel|>commentary to=last.one<|message|>{"a":1}<|call|>',
        CALLERS - {"named"}),
    Row("an undeclared tool", "<|channel|>commentary to=functions.rain<|message|>{}<|call|>", NONE),
    Row("nobody", "<|channel|>commentary to=user<|message|>Hi.<|end|>", NONE),
    Row("no parameters, but an argument",
        '<|channel|>commentary to=functions.weather_now<|message|>{"a":1}<|call|>', NONE),
    Row("a wrong argument", CALL.replace("Rome", "R" * 21), NONE),
    Row("one argument too many", CALL.replace("}", ',"x":1}'), NONE),
    Row("no JSON", CALL.replace(ARGS, "Rome"), NONE),
    Row("a call without its end", CALL.replace("<|call|>", "<|end|>"), NONE),
    Row("an answer that calls", FINAL.replace("<|return|>", "<|call|>"), NONE),
    Row("thought that ends the turn", "<|channel|>analysis<|message|>Hm.<|return|>", NONE),
    Row("no channel", "<|message|>Hi.<|return|>", NONE),
    Row("no header", "Hi.<|return|>", NONE),
    Row("another role", THOUGHT.replace("assistant", "user") + FINAL, NONE),
    Row("a search", '<|channel|>analysis to=browser.search code<|message|>{"query":"x"}<|call|>',
        NONE | {"built-in"}),
    Row("code", "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        NONE | {"built-in"}),
    Row("no browser", "<|channel|>analysis to=browser.buy code<|message|>{}<|call|>", NONE),
]  # fmt: skip


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("row", OUTPUTS, ids=lambda row: row.id)
def test_output_is_accepted_under_its_choices(row: Row) -> None:
    ids = ids_of(row.output)
    for choice, turn in CHOICES.items():
        matcher = compile_turn(turn).matcher()
        accepted = [matcher.consume(token) for token in ids]
        assert all(accepted) == (choice in row.choices), choice
        assert matcher.done == all(accepted)
        assert bool(matcher.error) == (not all(accepted))


@pytest.mark.parametrize("output", [PREAMBLE + THOUGHT + CALL, THOUGHT + TYPED_FINAL, FINAL, CALL])
@pytest.mark.parametrize("choice", ["named", "typed", "plain"])
def test_mask_and_consume_agree(choice: str, output: str) -> None:
    matcher, mask = compile_turn(CHOICES[choice]).matcher(), Mask()
    for token in ids_of(output):
        allowed = matcher.fill(mask) and token in mask
        assert matcher.consume(token) == allowed
        if not allowed:
            break


def allowed_ids(mask: Mask) -> list[int]:
    words = enumerate(mask.words)
    return [32 * at + bit for at, word in words if word for bit in range(32) if word >> bit & 1]


# --- errors and edges ---


def test_later_declared_tools_are_enforced() -> None:
    messages = (User("Hi."), AdditionalTools(TOOLS), FormatUpdate(ResponseFormat(ANSWER)))
    later = Turn(messages, response_format=ResponseFormat())
    assert grammar_of(later, Names.of(later)) == grammar_of(TYPED_TOOLS, Names.of(TYPED_TOOLS))
    plain = Turn((*messages, FormatUpdate(None)))
    assert grammar_of(plain, Names.of(plain)) == grammar_of(AUTO, Names.of(AUTO))


SIMILAR = [
    "x", "functions.x", "functions.functions.x", "functions", "X", "x_", "_x", "x-", "python",
    "browser", "user", "assistant", "all", "final", "json", "x.y", "functions.x.y", "y",
]  # fmt: skip


@pytest.mark.nightly(sample=8)
@pytest.mark.once
@pytest.mark.parametrize("first", SIMILAR)
@pytest.mark.parametrize("builtin", [(), ("python", "browser")], ids=["", "built-in"])
def test_call_is_constrained_by_schema_of_its_tool(first: str, builtin: tuple[str, ...]) -> None:
    chance = random.Random(first)
    for second in (*SIMILAR[:3], *chance.sample(SIMILAR, 3)):
        names = (first,) if first == second else (first, second)
        tools = tuple(
            Tool(name, parameters={**WEATHER, "properties": {f"p{at}": {}}, "required": [f"p{at}"]})
            for at, name in enumerate(names)
        )
        turn = make_turn(tools=tools, builtin_tools=builtin)
        grammar = compile_turn(turn)
        recipients = {*SIMILAR, *(f"functions.{name}" for name in SIMILAR)}
        recipients |= {Names.of(turn).recipient(name) for name in names}
        recipients = {
            candidate for candidate in recipients if candidate.partition(".")[0] not in builtin
        }
        reached = set()
        for recipient in sorted(recipients):
            head = chance.choice((" to=", "<|channel|>analysis to="))
            for at in range(len(names)):
                ids = ids_of(f'{head}{recipient}<|message|>{{"p{at}":1}}<|call|>')
                matcher = grammar.matcher()
                if all(map(matcher.consume, ids)):
                    deltas = Parser(Names.of(turn)).feed(ids)
                    called = [delta.name for delta in deltas if isinstance(delta, Opened)]
                    assert called == [names[at]], recipient
                    reached.add(names[at])
        assert reached == {*names}, second


def test_policy_off_gives_no_grammar() -> None:
    assert grammar_of(AUTO, Names.of(AUTO), Policy.OFF) is None


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        (make_turn(tool_choice=ToolChoice(required=True)), "tool_choice", "no tool"),
        (
            make_turn(tools=TOOLS, tool_choice=ToolChoice(True), prefill="I"),
            "tool_choice",
            "begins",
        ),
        (
            make_turn(tools=TOOLS, tool_choice=ToolChoice(True, ("nobody",))),
            "tool_choice",
            "no tool",
        ),
        (replace(TYPED, prefill="I think"), "messages", "beginning of the answer"),
    ],
)
def test_impossible_choices_are_rejected(asked: Turn, param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as raised:
        compile_turn(asked)
    assert raised.value.param == param


def test_equal_turns_share_compiled_grammar() -> None:
    assert compile_turn(AUTO) is compile_turn(make_turn(tools=TOOLS))


@pytest.mark.parametrize(
    ("recipient", "accepted"),
    [("functions.python_tool", True), ("python_tool", True), ("functions.x", False)],
)
@pytest.mark.parametrize("builtin", [(), ("python",)], ids=["alone", "beside the built-in"])
def test_function_named_like_trained_tool_can_be_chosen(
    recipient: str, accepted: bool, builtin: tuple[str, ...]
) -> None:
    turn = make_turn(
        tools=(Tool("python"), Tool("x")),
        builtin_tools=builtin,
        tool_choice=ToolChoice(required=True, names=("python",)),
    )
    call = f"<|channel|>commentary to={recipient} <|constrain|>json<|message|>{{}}<|call|>"
    assert all(map(compile_turn(turn).matcher().consume, ids_of(call))) is accepted


def test_matcher_survives_rejected_id() -> None:
    matcher, mask = compile_turn(NAMED).matcher(), Mask()
    assert not matcher.consume(vocab.RETURN)
    assert matcher.error
    assert not matcher.fill(mask)
    assert not matcher.consume(vocab.CHANNEL)
    assert not matcher.done


def test_complete_typed_answer_can_only_end() -> None:
    for strict in (True, False):
        typed = make_turn(response_format=ResponseFormat(ANSWER, strict=strict))
        matcher, mask = compile_turn(typed).matcher(), Mask()
        for token in ids_of('<|channel|>final<|message|>{"title":"t","tags":[]}'):
            assert matcher.consume(token)
        assert matcher.fill(mask)
        texts = [vocab.encoding().decode([token]) for token in allowed_ids(mask)]
        assert vocab.RETURN in mask
        assert {"<|return|>"} == {text.strip() for text in texts} - {""}
        assert not strict or texts == ["<|return|>"]


@pytest.mark.parametrize(
    ("rest", "accepted"),
    [(FINAL, True), (PREAMBLE, True), (THOUGHT, False), (BLANK_THOUGHT, False)],
)
def test_ended_reasoning_is_not_resumed(rest: str, accepted: bool) -> None:
    """Engines that enforce the grammar themselves begin again with another grammar."""
    turn = make_turn(tools=TOOLS)
    grammar = grammar_of(turn, Names.of(turn))
    assert grammar is not None
    free = compile_grammar(grammar).matcher()
    assert all(map(free.consume, ids_of(THOUGHT + rest)))
    matcher = compile_grammar(replace(grammar, text=grammar.without_analysis)).matcher()
    assert all(map(matcher.consume, ids_of(rest))) is accepted


def test_compact_json_rejects_white_space() -> None:
    """For llguidance 1.7, which lacks the option for white space."""
    grammar = compile_turn(make_turn(response_format=ResponseFormat(ANSWER, strict=True))).grammar
    compact = compile_grammar(replace(grammar, text=with_compact_json(grammar.text)))
    head = "<|channel|>final<|message|>"
    for text, accepted in (('{"title":"t","tags":[]}', True), ('{"title": "t","tags":[]}', False)):
        assert all(map(compile_turn(TYPED).matcher().consume, ids_of(head + text)))
        assert all(map(compact.matcher().consume, ids_of(head + text))) is accepted


@pytest.mark.parametrize(
    ("asked", "rest"),
    [
        (make_turn(tools=TOOLS, prefill="I think"), " so.<|return|>"),
        (make_turn(tools=TOOLS, prefill='{"title":'), '"t","tags":[]}<|return|>'),
        (replace(TYPED, prefill='{"title":'), '"t","tags":[]}<|return|>'),
    ],
)
def test_prefilled_answer_is_completed(asked: Turn, rest: str) -> None:
    matcher = compile_turn(asked).matcher()
    assert all(map(matcher.consume, ids_of(rest)))
    assert matcher.done


LOOKALIKES = f"<|end|><|start|>assistant{CALL}"


@pytest.mark.parametrize("choice", ["plain", "auto", "typed", "required"])
def test_control_token_spelled_as_text_is_text(choice: str) -> None:
    matcher, mask = compile_turn(CHOICES[choice]).matcher(), Mask()
    assert all(map(matcher.consume, ids_of("<|channel|>analysis<|message|>")))
    assert all(map(matcher.consume, vocab.encode(LOOKALIKES)))
    assert matcher.fill(mask)
    assert [token for token in allowed_ids(mask) if token >= vocab.STARTOFTEXT] == [vocab.END]
