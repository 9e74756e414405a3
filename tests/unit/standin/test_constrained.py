"""A stand-in whose script the grammar forbids: its answers still end and obey the grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jsonschema
import pytest
from openai_harmony import Role

pytest.importorskip("mlx_lm", reason="comes with the host")

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.grammar import Mask, compile_grammar, grammar_of
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import ResponseFormat, Tool, ToolChoice, Turn, User

Encode = Callable[[str], list[int]]

PERSON: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "nick": {"type": ["string", "null"]},
        "age": {"type": "integer"},
        "kind": {"enum": ["human", "robot"]},
        "born": {"const": "2026-11-27"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "boss": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "nick", "age", "kind", "born", "tags", "boss", "ok"],
    "additionalProperties": False,
}
TREE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "weight": {"type": "number"},
        "children": {"type": "array", "items": {"$ref": "#"}},
    },
}
SCHEMAS = {"person": PERSON, "tree": TREE, "anything": {"type": "object"}}
TOOLS = tuple(Tool(name, parameters=schema) for name, schema in SCHEMAS.items())
CALL = ToolChoice(required=True)

OUTPUTS = {
    "prose": "<|channel|>analysis<|message|>What do they want?<|end|><|start|>assistant"
    "<|channel|>final<|message|>I would rather talk about the sea, which is blue.<|return|>",
    "a tool that is not there": "<|channel|>commentary to=functions.delete <|constrain|>json"
    '<|message|>{"path":"/","sure":"yes, of course"}<|call|>',
    "JSON of its own": "<|channel|>final<|message|>Here:\n```json\n"
    '{"name": "Ada", "age": "old"}\n```\nAnything else?<|return|>',
    "nothing but thoughts": f"<|channel|>analysis<|message|>{'Wait, wait. ' * 20}<|end|>",
}

TURNS: Mapping[str, Mapping[str, Any]] = {
    "a call": {"tools": TOOLS, "tool_choice": CALL},
    "a call of tree": {"tools": TOOLS, "tool_choice": ToolChoice(required=True, names=("tree",))},
    "a call without thinking": {"tools": TOOLS, "tool_choice": CALL, "thinking": False},
    "no call": {"tools": TOOLS, "tool_choice": ToolChoice(names=())},
    "no thinking": {"thinking": False},
    "a person": {"response_format": ResponseFormat(PERSON)},
    "a tree": {"response_format": ResponseFormat(TREE)},
    "JSON": {"response_format": ResponseFormat(None)},
    "a call or JSON": {"tools": TOOLS, "response_format": ResponseFormat(PERSON)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    scripts = [standin.Script(f"{want}?", output) for want, output in OUTPUTS.items()]
    return load_model(standin.write(tmp_path_factory.mktemp("model"), scripts))[0]


@lru_cache(maxsize=1)
def ids_in_words() -> mx.array:
    return mx.arange(32, dtype=mx.uint32)


def generate(model: Any, prompt: list[int], turn: Turn) -> list[int]:
    """What the model generates at temperature 1, constrained to the grammar of the turn."""
    grammar = grammar_of(turn, Names.of(turn))
    assert grammar is not None
    matcher, mask = compile_grammar(grammar).matcher(), Mask()
    cache, output, following = make_prompt_cache(model), [], prompt
    mx.random.seed(7)
    while len(output) < 300 and matcher.fill(mask):
        logits = model(mx.array([following]), cache=cache)[0, -1]
        bits = mx.array(list(mask.words), dtype=mx.uint32)[:, None] >> ids_in_words() & 1
        logits = mx.where(bits.reshape(-1) > 0, logits, -mx.inf)
        following = [int(mx.random.categorical(logits))]
        output += following
        assert matcher.consume(*following), matcher.error
    assert matcher.done, vocab.encoding().decode(output)
    return output


@pytest.mark.nightly(sample=12)
@pytest.mark.parametrize("want", OUTPUTS)
@pytest.mark.parametrize("kind", TURNS)
def test_constrained_answer_ends_and_obeys(
    model: Any, encode: Encode, kind: str, want: str
) -> None:
    turn = Turn(messages=(User("Hi."),), **TURNS[kind])
    prompt = encode(f"<|start|>user<|message|>{want}?<|end|><|start|>assistant")
    *_, last = vocab.encoding().parse_messages_from_completion_tokens(
        generate(model, prompt, turn), Role.ASSISTANT
    )
    output = last.content[0].text
    if last.recipient is not None:
        name = last.recipient.removeprefix("functions.")
        assert turn.tool_choice.names is None or name in turn.tool_choice.names
        jsonschema.validate(json.loads(output), SCHEMAS[name])
        return
    assert not turn.tool_choice.required
    if turn.response_format is not None:
        schema = turn.response_format.schema or {"type": "object"}
        jsonschema.validate(json.loads(output), schema)
