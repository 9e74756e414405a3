"""Requests of one client that may delay all others: one row per kind, for all APIs.

A row is plain data, so that tests of the answer and tests of the delay can share it.
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
    """A request of any API: the user's text, tools, the answer's schema, other fields."""

    text: str = "Hi."
    tools: tuple[tuple[str, str, Body], ...] = ()
    schema: Body | None = None
    fields: tuple[tuple[str, Any], ...] = ()
    repetitions: int = 1
    """The number of messages with ``text``."""

    def body(self, api: str, model: str = MODEL) -> Body:
        """The request for ``api``."""
        messages = [{"role": "user", "content": self.text}] * self.repetitions
        body: Body = {"model": model, **_prompt_fields(api, self.text * self.repetitions, messages)}
        body |= dict(self.fields)
        if self.tools:
            body["tools"] = [_tool(api, *tool) for tool in self.tools]
        if self.schema is not None:
            body |= _format(api, self.schema)
        return body


def _prompt_fields(api: str, text: str, messages: list[Body]) -> Body:
    """The user's text, and the other required fields of ``api``."""
    limits = {"options": {"num_predict": 1}, "stream": False}
    statement = {"instructions": "It rains."}
    fields: Body = {"messages": messages, "max_tokens": 1}
    bodies: dict[str, Body] = {
        "chat": fields,
        "messages": fields,
        "responses": {"input": messages, "max_output_tokens": 1},
        "ollama": {"messages": messages, **limits},
        "generate": {"prompt": text, **limits},
        "show": {},
        "tokenize": {"messages": messages},
        "conversations": {"items": messages},
        "items": {"items": messages},
        "systemone": {"state": text, "questions": {"q": {"type": "noul", **statement}}},
        "decisions": {"input": messages, "questions": [{"type": "predicate", **statement}]},
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
    json_schema = {"type": "json_schema", "name": "n", "schema": schema}
    if api == "responses":
        return {"text": {"format": json_schema}}
    if api in ("ollama", "generate"):
        return {"format": schema}
    if api == "messages":
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def with_tool(description: str, parameters: Body | None = None) -> AttackRequest:
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
    # Long runs in a message.
    "a run of letters": lambda: AttackRequest("a" * 150_000),
    "a run of marks": lambda: AttackRequest("กิ" * 40_000),
    "Thai": lambda: AttackRequest("ภาษาไทยเป็นภาษาที่เขียนโดยไม่เว้นวรรคระหว่างคำ" * 700),
    "Hindi": lambda: AttackRequest("हिन्दीविश्वकीप्रमुखभाषाओंमेंसेएकहै" * 1_000),
    "signs and line ends": lambda: AttackRequest("/\n" * 40_000),
    "white space": lambda: AttackRequest((" " * 1_024 + "!") * 1_000),
    "four bytes each": lambda: AttackRequest("\U00020000" * 100_000),
    "20 MB of letters": lambda: AttackRequest("a" * (20 * MIB)),
    # Long runs elsewhere.
    "a description": lambda: with_tool("a" * 150_000),
    "a parameter's name": lambda: with_tool("", _properties(**{"a" * 150_000: {}})),
    "a value": lambda: with_tool("", _properties(p={"enum": ["a" * 150_000]})),
    "a tool's name": lambda: AttackRequest(tools=(("กิ" * 40_000, "", {"type": "object"}),)),
    "an identity": lambda: AttackRequest(fields=((_TEMPLATE, {"model_identity": "a" * 150_000}),)),
    "what nobody reads of a tool": lambda: with_tool("", {"type": "object", "x": "a" * (30 * MIB)}),
    "the schema of an answer": lambda: AttackRequest(
        schema={"type": "object", "x": "a" * (20 * MIB)}
    ),
    # Fields that an answer or an error repeats.
    "a user": lambda: AttackRequest(fields=(("user", "a" * (30 * MIB)),)),
    "a model": lambda: AttackRequest(fields=(("model", "a" * (30 * MIB)),)),
    "an effort": lambda: AttackRequest(
        fields=((_TEMPLATE, {"reasoning_effort": "a" * (30 * MIB)}),)
    ),
    # Short text that expands.
    "references to a description": lambda: with_tool(
        "",
        {
            **_properties(**{f"p{at}": {"$ref": "#/$defs/d"} for at in range(2_000)}),
            "$defs": {"d": {"type": "string", "description": "word " * 2_000}},
        },
    ),
    "a tree of references": lambda: with_tool("", _tree(11)),
    # Many values.
    "names that are alike": lambda: AttackRequest(
        tools=tuple((f"a{'!' * at}b", "", {"type": "object"}) for at in range(1, 2_001))
    ),
    "messages": lambda: AttackRequest("Hi.", repetitions=16_000),
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
"""Functions by name, since some requests are too large to keep."""

WORST = (
    "a run of marks",
    "what nobody reads of a tool",
    "an effort",
    "a tree of references",
    "messages",
)
"""The worst of each family: the one with the longest delay before there were limits."""


def encode_request(row: str, api: str, model: str = MODEL) -> bytes:
    """The body of the request."""
    return json.dumps(ROWS[row]().body(api, model), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
