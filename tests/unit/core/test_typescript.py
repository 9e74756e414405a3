"""The template of tools, compared with openai-harmony's. (`test_schema` has rows for it.)"""

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
# One line, since openai-harmony writes a text after one `//` or in quotes; not only spaces.
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


def with_notes(*without: str, **keywords: Any) -> Any:
    notes = {"description": LINE, **NOTES}
    return st.fixed_dictionaries(
        keywords, optional={key: notes[key] for key in notes if key not in without}
    )


# What openai-harmony prints completely: no null within null, no union in an array.
SCALAR = st.sampled_from(["string", "number", "integer", "boolean"])
ENUM = st.lists(NAME, min_size=1, max_size=3)
ITEM = with_notes("description", type=SCALAR) | with_notes("description", type=st.just("array"))
LEAVES = (
    with_notes(type=SCALAR)
    | with_notes(type=SCALAR, nullable=st.booleans())
    | with_notes()
    | with_notes(type=st.just("dict"))
    | with_notes(type=st.just("array"))
    | with_notes(type=st.permutations(["string", "number", "boolean"]))
    | with_notes(type=st.just("string"), enum=ENUM)
)


def objects(values: Any) -> Any:
    return with_notes(
        type=st.just("object"),
        properties=st.dictionaries(NAME, values, min_size=1, max_size=3),
        required=st.lists(NAME, max_size=2),
    )


def unions(values: Any) -> Any:
    """Unions of different types; either the union or its first variant has a description."""
    return st.tuples(
        with_notes("description", type=st.just("string"), enum=ENUM),
        with_notes(type=st.just("boolean")),
        with_notes(type=st.just("number")),
        objects(values),
    ).flatmap(
        lambda variants: (
            with_notes(oneOf=st.just([*variants]))
            | with_notes("description", oneOf=st.permutations(variants).map(list))
        )
    )


PROPERTIES = st.recursive(
    LEAVES,
    lambda inner: (
        with_notes(type=st.just("array"), items=ITEM | objects(inner))
        | objects(inner)
        | unions(inner)
    ),
    max_leaves=8,
)


def library_section(*tools: ToolDescription) -> str:
    content = DeveloperContent.new().with_function_tools(list(tools))
    ids = vocab.encoding().render(Message.from_role_and_content(Role.DEVELOPER, content))
    return vocab.encoding().decode_utf8(ids[ids.index(vocab.MESSAGE) + 1 : -1])


def declare_tools(*tools: tuple[str, str, Any]) -> str:
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
def test_tools_match_openai_harmony(tools: list[tuple[str, str, Any]]) -> None:
    ours = declare_tools(*tools)
    assert plain(f"# Tools\n\n{ours}") == plain(
        library_section(*(ToolDescription.new(*tool) for tool in tools))
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
    assert f"# Tools\n\n{declare_tools(('f', '', schema))}" == library_section(
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
"""Defaults in unions, some of which are printed in quotes."""


@pytest.mark.parametrize("schema", DEFAULTS.values(), ids=DEFAULTS)
def test_defaults_in_unions_match_openai_harmony(schema: dict[str, Any]) -> None:
    assert f"# Tools\n\n{declare_tools(('f', '', schema))}" == library_section(
        ToolDescription.new("f", "", schema)
    )


NUMERALS = [1e16, 123456789012345680.0, 1e21, 1.5e300, -1.5e-7, 1.25e-5, -1e-5, 1e-4, 5e-324, -0.0]


@pytest.mark.parametrize("number", [*NUMERALS, 1e15, 0.1, 2**63 - 1])
def test_numbers_match_openai_harmony(number: float) -> None:
    schema = {"type": "object", "properties": {"p": {"default": number}}}
    assert type_of(schema).text() in plain(library_section(ToolDescription.new("t", "", schema)))
