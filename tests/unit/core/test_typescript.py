"""The template of tools, held against openai-harmony's own. (`test_schema` does so row by row.)"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import DeveloperContent, Message, Role, ToolDescription
from sizes import examples

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.typescript import declaration, section, type_of

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8) | st.sampled_from(
    ["null", "a\r\nb\n\n", "\r", "\n", "<|end|>", '"']
)
NUMBERS = st.integers(1 - 2**63, 2**63 - 1) | st.integers(-(10**6), 10**6).map(lambda n: n / 8)
# Of one line, as openai-harmony writes texts behind one `//` and in quotes, and not only of space.
LINE = st.from_regex(r"[a-zé<|>/{} ]{0,6}[a-zé<|>]", fullmatch=True)
NAME = st.from_regex(r"[a-zA-Z_$][\w$.@/-]{0,6}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | LINE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NOTES: dict[str, Any] = {
    "title": LINE,
    "default": VALUES,
    "examples": st.lists(LINE, max_size=2),
}


def noted(*without: str, **keywords: Any) -> Any:
    notes = {"description": LINE, **NOTES}
    return st.fixed_dictionaries(
        keywords, optional={key: notes[key] for key in notes if key not in without}
    )


# What openai-harmony prints whole and right: no null within null, no union in an array.
SCALAR = st.sampled_from(["string", "number", "integer", "boolean"])
ENUM = st.lists(NAME, min_size=1, max_size=3)
ITEM = noted("description", type=SCALAR) | noted("description", type=st.just("array"))
LEAVES = (
    noted(type=SCALAR)
    | noted(type=SCALAR, nullable=st.booleans())
    | noted()
    | noted(type=st.just("dict"))
    | noted(type=st.just("array"))
    | noted(type=st.permutations(["string", "number", "boolean"]))
    | noted(type=st.just("string"), enum=ENUM)
)


def objects(values: Any) -> Any:
    return noted(
        type=st.just("object"),
        properties=st.dictionaries(NAME, values, min_size=1, max_size=3),
        required=st.lists(NAME, max_size=2),
    )


def unions(values: Any) -> Any:
    """Of different types; the whole is described, or the first variant."""
    return st.tuples(
        noted("description", type=st.just("string"), enum=ENUM),
        noted(type=st.just("boolean")),
        noted(type=st.just("number")),
        objects(values),
    ).flatmap(
        lambda variants: (
            noted(oneOf=st.just([*variants]))
            | noted("description", oneOf=st.permutations(variants).map(list))
        )
    )


PROPERTIES = st.recursive(
    LEAVES,
    lambda inner: (
        noted(type=st.just("array"), items=ITEM | objects(inner)) | objects(inner) | unions(inner)
    ),
    max_leaves=8,
)


def library(*tools: ToolDescription) -> str:
    content = DeveloperContent.new().with_function_tools(list(tools))
    ids = vocab.encoding().render(Message.from_role_and_content(Role.DEVELOPER, content))
    return vocab.encoding().decode_utf8(ids[ids.index(vocab.MESSAGE) + 1 : -1])


def declared(*tools: tuple[str, str, Any]) -> str:
    return section(
        "functions",
        [
            declaration(name, description, None if schema is None else type_of(schema))
            for name, description, schema in tools
        ],
    )


def plain(text: str) -> str:
    """``text`` with ``1e+16`` as ``1e16``: openai-harmony writes the one, oss-harmony the other."""
    return re.sub(r"(?<=\d)e\+(?=\d)", "e", text)


@pytest.mark.once
@given(st.lists(st.tuples(TEXT, TEXT, st.none() | objects(PROPERTIES)), min_size=1, max_size=3))
@settings(max_examples=examples(150), deadline=None)
def test_as_the_library(tools: list[tuple[str, str, Any]]) -> None:
    ours = declared(*tools)
    assert plain(f"# Tools\n\n{ours}") == plain(
        library(*(ToolDescription.new(*one) for one in tools))
    )


PLAIN: dict[str, dict[str, Any]] = {
    "of the guide": {
        "type": "object",
        "properties": {
            "location": {
                "type": "string",
                "description": "The city and state, e.g. San Francisco, CA",
            },
            "format": {
                "type": "string",
                "enum": ["celsius", "fahrenheit"],
                "default": "celsius",
            },
        },
        "required": ["location"],
    },
    "nested": {
        "type": "object",
        "description": "All of it.",
        "properties": {
            "edits": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "old": {"type": "string", "description": "Old."},
                        "count": {"type": "integer", "default": 1, "title": "Count"},
                    },
                    "required": ["old"],
                },
            },
            "options": {
                "type": "object",
                "description": "Options.",
                "properties": {"deep": {"type": "boolean", "nullable": True}},
            },
            "id": {"type": ["string", "number"], "examples": ["a", "b"]},
            "target": {
                "description": "Where.",
                "oneOf": [{"type": "string"}, {"type": "number", "description": "A line."}],
            },
        },
        "required": ["edits"],
    },
}


@pytest.mark.parametrize("schema", PLAIN.values(), ids=PLAIN)
def test_schema_matches_openai_harmony(schema: dict[str, Any]) -> None:
    assert f"# Tools\n\n{declared(('f', '', schema))}" == library(
        ToolDescription.new("f", "", schema)
    )


DEFAULTS: dict[str, Any] = {
    "of a property": {
        "type": "object",
        "properties": {
            "p": {
                "default": "b",
                "oneOf": [
                    {"type": "string", "enum": ["a", "b"], "default": "a"},
                    {"type": "number", "default": 1},
                ],
            }
        },
    },
    "of a parameter": {
        "oneOf": [
            {"type": "string", "enum": ["b"], "default": "b"},
            {"type": "string", "default": "b"},
        ]
    },
}
"""Where it is in quotes and where it is not, in unions."""


@pytest.mark.parametrize("schema", DEFAULTS.values(), ids=DEFAULTS)
def test_defaults_in_unions_as_the_library(schema: dict[str, Any]) -> None:
    assert f"# Tools\n\n{declared(('f', '', schema))}" == library(
        ToolDescription.new("f", "", schema)
    )


NUMERALS = [1e16, 123456789012345680.0, 1e21, 1.5e300, -1.5e-7, 1.25e-5, -1e-5, 1e-4, 5e-324, -0.0]


@pytest.mark.parametrize("number", [*NUMERALS, 1e15, 0.1, 2**63 - 1])
def test_numbers_as_the_library(number: float) -> None:
    test = {"type": "object", "properties": {"p": {"default": number}}}
    assert type_of(test).text() in plain(library(ToolDescription.new("t", "", test)))
