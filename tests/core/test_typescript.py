"""The template of tools, held against openai-harmony's own. (`test_schema` does so row by row.)"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai_harmony import DeveloperContent, Message, Role, ToolDescription
from sizes import examples

from vllm_mlx_harmony.core import typescript, vocab

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8) | st.sampled_from(
    ["null", "a\r\nb\n\n", "\r", "\n", "<|end|>", '"']
)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.integers(-(10**6), 10**6).map(lambda n: n / 8)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NOTES = {
    "title": TEXT,
    "description": TEXT,
    "default": VALUES,
    "examples": st.lists(TEXT, max_size=2),
    "nullable": st.booleans(),
}


def noted(**keywords: Any) -> Any:
    return st.fixed_dictionaries(keywords, optional=NOTES)


NAMES = st.lists(TEXT, max_size=2)
SCHEMAS = st.recursive(
    noted()
    | noted(type=st.sampled_from(["string", "number", "integer", "boolean", "array", "dict"]))
    | noted(type=st.lists(TEXT | st.just("integer"), max_size=2))
    | noted(type=st.just("string"), enum=NAMES),
    lambda inner: (
        noted(type=st.just("array"), items=inner)
        | noted(oneOf=st.lists(inner, max_size=3))
        | noted(
            type=st.just("object"),
            properties=st.dictionaries(TEXT, inner, max_size=3),
            required=NAMES,
        )
    ),
    max_leaves=8,
)


def library(*tools: ToolDescription) -> str:
    content = DeveloperContent.new().with_function_tools(list(tools))
    ids = vocab.encoding().render(Message.from_role_and_content(Role.DEVELOPER, content))
    return vocab.encoding().decode_utf8(ids[ids.index(vocab.MESSAGE) + 1 : -1])


def plain(text: str) -> str:
    """``text`` with ``1e+16`` as ``1e16``: openai-harmony writes the one, oss-harmony the other."""
    return re.sub(r"(?<=\d)e\+(?=\d)", "e", text)


@pytest.mark.once
@given(st.lists(st.tuples(TEXT, TEXT, st.none() | SCHEMAS), min_size=1, max_size=3))
@settings(max_examples=examples(400), deadline=None)
@example([("a", "x", {"oneOf": [{"type": "string", "enum": ["b"], "default": "b"}]})])
def test_as_the_library(tools: list[tuple[str, str, Any]]) -> None:
    ours = typescript.section("functions", [typescript.tool(*one) for one in tools])
    assert plain(f"# Tools\n\n{ours}") == plain(
        library(*(ToolDescription.new(*one) for one in tools))
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
    ours = typescript.section("functions", [typescript.tool("f", "", schema)])
    assert f"# Tools\n\n{ours}" == library(ToolDescription.new("f", "", schema))


NUMERALS = [1e16, 123456789012345680.0, 1e21, 1.5e300, -1.5e-7, 1.25e-5, -1e-5, 1e-4, 5e-324, -0.0]


@pytest.mark.parametrize("number", [*NUMERALS, 1e15, 0.1, 2**63 - 1])
def test_numbers_as_the_library(number: float) -> None:
    test = {"type": "object", "properties": {"p": {"default": number}}}
    assert typescript.of(test) in plain(library(ToolDescription.new("t", "", test)))
