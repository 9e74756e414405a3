"""What one client may send to be felt by all others: one row for each way, for all APIs.

A row is plain data, so that a test that checks a served answer and one that only measures what
else is held up meanwhile can use the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]

PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "ollama": "/api/chat",
    "tokenize": "/tokenize",
    "conversations": "/v1/conversations",
    "items": "/v1/conversations/{conversation}/items",
    "systemone": "/v1/systemone",
    "decisions": "/v1/decisions",
    "generate": "/api/generate",
    "show": "/api/show",
    "detokenize": "/detokenize",
    "control": "/v1/chat/completions/control",
}
APIS = tuple(PATHS)

MODEL = "m"
MIB = 2**20


@dataclass(frozen=True)
class AttackRequest:
    """A request, as each API spells it: what the user says, tools, the answer's schema, fields."""

    text: str = "Hi."
    tools: tuple[tuple[str, str, Body], ...] = ()
    schema: Body | None = None
    fields: tuple[tuple[str, Any], ...] = ()
    repeated: int = 1
    """Times that the user says it, each time in a message."""

    def body(self, api: str, model: str = MODEL) -> Body:
        """The request for ``api``."""
        messages = [{"role": "user", "content": self.text}] * self.repeated
        body: Body = {"model": model, **_prompt_fields(api, self.text * self.repeated, messages)}
        body |= dict(self.fields)
        if self.tools:
            body["tools"] = [_tool(api, *tool) for tool in self.tools]
        if self.schema is not None:
            body |= _format(api, self.schema)
        return body


def _prompt_fields(api: str, text: str, messages: list[Body]) -> Body:
    """What the user says, and what else a request of ``api`` must have."""
    few = {"options": {"num_predict": 1}, "stream": False}
    rains = {"instructions": "It rains."}
    asked: Body = {"messages": messages, "max_tokens": 1}
    bodies: dict[str, Body] = {
        "chat": asked,
        "messages": asked,
        "responses": {"input": messages, "max_output_tokens": 1},
        "ollama": {"messages": messages, **few},
        "generate": {"prompt": text, **few},
        "show": {},
        "tokenize": {"messages": messages},
        "conversations": {"items": messages},
        "items": {"items": messages},
        "systemone": {"state": text, "questions": {"q": {"type": "noul", **rains}}},
        "decisions": {"input": messages, "questions": [{"type": "predicate", **rains}]},
        "control": {"id": f"chatcmpl-{text}", "action": "reasoning_end"},
    }
    if api == "detokenize":
        return {"tokens": list(text.encode())}  # the first 256 ids
    return bodies[api]


def _tool(api: str, name: str, description: str, parameters: Body) -> Body:
    if api == "messages":
        return {"name": name, "description": description, "input_schema": parameters}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", **(function if api == "responses" else {"function": function})}


def _format(api: str, schema: Body) -> Body:
    named = {"type": "json_schema", "name": "n", "schema": schema}
    if api == "responses":
        return {"text": {"format": named}}
    if api in ("ollama", "generate"):
        return {"format": schema}
    if api == "messages":
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def described(description: str, parameters: Body | None = None) -> AttackRequest:
    """A request with one tool."""
    return AttackRequest(tools=(("f", description, parameters or {"type": "object"}),))


def _properties(**schemas: Body) -> Body:
    return {"type": "object", "properties": schemas}


def _tree(depth: int) -> Body:
    level = {
        str(at): _properties(a={"$ref": f"#/$defs/{at + 1}"}, b={"$ref": f"#/$defs/{at + 1}"})
        for at in range(depth)
    }
    leaf = {"type": "string", "description": "word " * 2_000}
    return {"type": "object", "$ref": "#/$defs/0", "$defs": {**level, str(depth): leaf}}


_TEMPLATE = "chat_template_kwargs"

ROWS: dict[str, Callable[[], AttackRequest]] = {
    # Long runs, in a message.
    "a run of letters": lambda: AttackRequest("a" * 150_000),
    "a run of marks": lambda: AttackRequest("กิ" * 40_000),
    "Thai": lambda: AttackRequest("ภาษาไทยเป็นภาษาที่เขียนโดยไม่เว้นวรรคระหว่างคำ" * 700),
    "Hindi": lambda: AttackRequest("हिन्दीविश्वकीप्रमुखभाषाओंमेंसेएकहै" * 1_000),
    "signs and line ends": lambda: AttackRequest("/\n" * 40_000),
    "white space": lambda: AttackRequest((" " * 1_024 + "!") * 1_000),
    "four bytes each": lambda: AttackRequest("\U00020000" * 100_000),
    "20 MB of letters": lambda: AttackRequest("a" * (20 * MIB)),
    # Elsewhere.
    "a description": lambda: described("a" * 150_000),
    "a parameter's name": lambda: described("", _properties(**{"a" * 150_000: {}})),
    "a value": lambda: described("", _properties(p={"enum": ["a" * 150_000]})),
    "a tool's name": lambda: AttackRequest(tools=(("กิ" * 40_000, "", {"type": "object"}),)),
    "an identity": lambda: AttackRequest(fields=((_TEMPLATE, {"model_identity": "a" * 150_000}),)),
    "what nobody reads of a tool": lambda: described("", {"type": "object", "x": "a" * (30 * MIB)}),
    "the schema of an answer": lambda: AttackRequest(
        schema={"type": "object", "x": "a" * (20 * MIB)}
    ),
    # What an answer or an error repeats.
    "a user": lambda: AttackRequest(fields=(("user", "a" * (30 * MIB)),)),
    "a model": lambda: AttackRequest(fields=(("model", "a" * (30 * MIB)),)),
    "an effort": lambda: AttackRequest(
        fields=((_TEMPLATE, {"reasoning_effort": "a" * (30 * MIB)}),)
    ),
    # What little stands for.
    "references to a description": lambda: described(
        "",
        {
            **_properties(**{f"p{at}": {"$ref": "#/$defs/d"} for at in range(2_000)}),
            "$defs": {"d": {"type": "string", "description": "word " * 2_000}},
        },
    ),
    "a tree of references": lambda: described("", _tree(11)),
    # Many.
    "names that are alike": lambda: AttackRequest(
        tools=tuple((f"a{'!' * at}b", "", {"type": "object"}) for at in range(1, 2_001))
    ),
    "messages": lambda: AttackRequest("Hi.", repeated=16_000),
    "values that nobody reads": lambda: AttackRequest(fields=(("junk", [[]] * (8 * MIB)),)),
    "keys that nobody reads": lambda: AttackRequest(
        fields=(("junk", {str(at): at for at in range(45_000)}),)
    ),
    "a long text that nobody reads": lambda: AttackRequest(fields=(("junk", "a" * (30 * MIB)),)),
    "half a pair in a long text": lambda: AttackRequest(
        fields=(("junk", "\ud800" + "a" * (30 * MIB)),)
    ),
    "escapes": lambda: AttackRequest(fields=(("junk", '"\n' * (5 * MIB)),)),
    "more than a body may be": lambda: AttackRequest(fields=(("junk", "a" * (40 * MIB)),)),
}
"""Name -> how to make it: some are too large to be kept."""

WORST = (
    "a run of marks",
    "what nobody reads of a tool",
    "an effort",
    "a tree of references",
    "messages",
)
"""One of each family: that which was felt longest before it was bounded."""


def encoded(row: str, api: str, model: str = MODEL) -> bytes:
    """The body of the request."""
    return json.dumps(ROWS[row]().body(api, model), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
