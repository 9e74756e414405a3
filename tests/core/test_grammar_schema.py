"""JSON Schema as it is enforced: rows of what tools use, and the JSON Schema test suite."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar import Policy, compiled, grammar_of
from vllm_mlx_harmony.core.grammar.expressible import express
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import ResponseFormat, Tool, Turn, User

HEADER = vocab.encoding().encode("<|channel|>final<|message|>", allowed_special="all")


def answering(schema: Any, *, strict: bool = False) -> Turn:
    return Turn((User("Hi."),), response_format=ResponseFormat(schema, strict=strict))


def taken(schema: Any, text: str) -> bool:
    asked = answering(schema)
    grammar = grammar_of(asked, Names.of(asked))
    assert grammar is not None
    matcher = compiled(grammar).matcher()
    return all(map(matcher.consume, [*HEADER, *vocab.encode(text), vocab.RETURN]))


def is_valid(schema: Any, value: object) -> bool:
    return not any(jsonschema.Draft202012Validator(schema).iter_errors(value))


# --- what tools use ---


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def closed(**properties: Any) -> dict[str, Any]:
    return {**of(**properties), "additionalProperties": False}


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            **closed(name={"type": "string"}),
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
        }
    },
}
SHAPE = {
    "oneOf": [
        closed(kind={"const": "circle"}, radius={"type": "number", "exclusiveMinimum": 0}),
        closed(kind={"const": "square"}, side={"type": "number"}),
    ]
}


@dataclass(frozen=True)
class Row:
    id: str
    schema: Any
    valid: tuple[str, ...]
    invalid: tuple[str, ...]
    is_format: bool = False
    """jsonschema does not look at what is wrong with it."""


ROWS = [
    Row("recursion", TREE, ('{"name":"a","children":[{"name":"b","children":[]}]}',),
        ('{"name":"a","children":[{"children":[]}]}', '{"name":1}')),
    Row("a reference to the whole", {**of(v={"type": "integer"}), "properties": {"v": {"type":
        "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        ('{"v":1,"next":{"v":2,"next":null}}',), ('{"v":1,"next":{"next":null}}',)),
    Row("a discriminated union", SHAPE, ('{"kind":"circle","radius":1.5}',
        '{"kind":"square","side":-1}'),
        ('{"kind":"circle","side":1}', '{"kind":"circle","radius":0}')),
    Row("any of", {"anyOf": [{"type": "string"}, of(a={"type": "null"})]},
        ('"x"', '{"a":null}'), ("1", '{"a":1}')),
    Row("enumeration", {"enum": ["a", 1, None, True, {"b": []}]},
        ('"a"', "1", "null", "true", '{"b": []}'), ('"b"', "2", "false", "{}")),
    Row("nested arrays", {"type": "array", "minItems": 1, "items": {"type": "array", "items":
        {"type": "integer"}, "maxItems": 2}}, ("[[1,2],[]]",), ("[]", "[[1,2,3]]", "[[1.5]]")),
    Row("a tuple", {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}],
        "items": False}, ('["a",1]', '["a"]'), ('["a",1,2]', "[1]")),
    Row("a map", {"type": "object", "additionalProperties": {"type": "integer"}},
        ('{"a":1,"b c":2}', "{}"), ('{"a":"1"}',)),
    Row("bounds of numbers", {"type": "integer", "minimum": -3, "maximum": 120},
        ("-3", "0", "120"), ("-4", "121", "1.5")),
    Row("multiples", {"type": "number", "multipleOf": 0.25}, ("0.75", "2"), ("0.3",)),
    Row("lengths", {"type": "string", "minLength": 2, "maxLength": 3},
        ('"éé"', '"\\n\\""', '"\N{GRINNING FACE}a"'), ('"a"', '"abcd"')),
    Row("a pattern", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ('"AB-1"',), ('"A-1"',)),
    Row("a pattern within", {"type": "string", "pattern": "x+"}, ('"axb"',), ('"ab"',)),
    Row("date and time", {"type": "string", "format": "date-time"},
        ('"2026-11-22T05:00:00Z"',), ('"2026-11-22"', '"today"'), is_format=True),
    Row("unicode names", closed(größe={"type": "integer"}, 名={"enum": ["東京"]}),
        ('{"größe":1,"名":"東京"}',), ('{"größe":1,"名":"京都"}', '{"groesse":1}')),
    Row("names with quotes", closed(**{'a"b\\c': {"type": "integer"}}),
        ('{"a\\"b\\\\c":1}',), ('{"a":1}',)),
    Row("all of", {"allOf": [of(a={"type": "integer"}), of(b={"minimum": 3})]},
        ('{"a":1,"b":3}',), ('{"a":1,"b":2}', '{"a":1}')),
    Row("optional properties", {"type": "object", "properties": {"a": {"type": "integer"}, "b":
        {"type": "string"}}, "additionalProperties": False},
        ("{}", '{"b":"x"}', '{"a":1,"b":"x"}'), ('{"c":1}', '{"a":"x"}')),
    Row("patterns of names", {"type": "object", "patternProperties": {"^x-": {"type": "integer"}},
        "additionalProperties": False}, ('{"x-a":1}',), ('{"x-a":"1"}', '{"y":1}')),
    Row("a pointer into properties", {**of(a=of(b={"type": "integer"})), "properties": {"a":
        of(b={"type": "integer"}), "c": {"$ref": "#/properties/a/properties/b"}}},
        ('{"a":{"b":1},"c":2}',), ('{"a":{"b":1},"c":"2"}',)),
    Row("an anchor", {**of(a={"$ref": "#it"}), "$defs": {"x": {"$anchor": "it", "type": "null"}}},
        ('{"a":null}',), ('{"a":1}',)),
    Row("an older draft", {"type": "object", "properties": {"a": {"$ref": "#/definitions/n"}},
        "definitions": {"n": {"type": "integer", "minimum": 1}}}, ('{"a":1}',), ('{"a":0}',)),
    Row("annotations", {"type": "string", "title": "T", "deprecated": True, "x-order": 1,
        "examples": ["a"], "default": "b", "$comment": "c"}, ('"x"',), ("1",)),
    Row("anything", {}, ('"x"', "[1,{}]", "null"), ("x",)),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    assert express(row.schema).dropped == ()
    for text in row.valid:
        assert is_valid(row.schema, json.loads(text))
        assert taken(row.schema, text), text
        for indent in (None, 2):
            pretty = json.dumps(json.loads(text), ensure_ascii=False, indent=indent)
            assert taken(row.schema, pretty), pretty
    for text in row.invalid:
        assert not taken(row.schema, text), text
        if text != "x" and not row.is_format:
            assert not is_valid(row.schema, json.loads(text)), text


def test_white_space_is_bounded() -> None:
    assert taken({"type": "object"}, '{\n          "a": 1\r\n}')
    assert not taken({"type": "object"}, "{" + " " * 100 + "}")
    assert not taken({"type": "object"}, "{\n\n}")


def test_printable_characters_may_be_escaped() -> None:
    assert taken({"type": "string"}, '"caf\\u00e9 \\ud83d\\ude00"')
    assert not taken({"type": "string"}, '"\\ud83d"')


# --- what cannot be enforced ---

DROPPED = {
    "if": ({"if": {"type": "string"}, "then": {"minLength": 1}}, ("if", "then")),
    "not": ({"not": {"type": "string"}}, ("not",)),
    "unique": ({"type": "array", "uniqueItems": True}, ("uniqueItems",)),
    "dependent": ({"dependentRequired": {"a": ["b"]}}, ("dependentRequired",)),
    "look-around": ({"type": "string", "pattern": "^(?!x)"}, ("pattern",)),
    "overlapping": ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, ("oneOf",)),
    "contains": ({"type": "array", "contains": {"type": "null"}}, ("contains",)),
    "names": ({"type": "object", "propertyNames": {"maxLength": 3}}, ("propertyNames",)),
    "foreign": ({"$ref": "https://example.com/schema"}, ("$ref as it stands there",)),
    "malformed": ({"type": "str"}, ("type as it stands there",)),
    "no schema": ({"properties": {"a": 3}}, ("a schema that is neither object nor boolean",)),
    "minProperties": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        ("minProperties",),
    ),
}


@pytest.mark.parametrize("case", DROPPED)
def test_dropped(case: str) -> None:
    schema, dropped = DROPPED[case]
    assert express(schema).dropped == dropped
    wrapped = {"type": "object", "properties": {"v": schema, "w": {"type": "integer"}}}
    tool = Tool("lookup", parameters=wrapped)
    asked = Turn((User("Hi."),), tools=(tool,))
    grammar = grammar_of(asked, Names.of(asked))
    assert grammar is not None
    assert len(grammar.notes) == 1
    assert "'lookup'" in grammar.notes[0] and dropped[0] in grammar.notes[0]
    with pytest.raises(RequestError, match=rf"'lookup'.*{dropped[0].lstrip('$')}") as raised:
        grammar_of(asked, Names.of(asked), Policy.STRICT)
    assert raised.value.param == "tools"
    assert not taken(wrapped, '{"w":"x"}')  # the rest is enforced


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}},
        {"type": "string", "format": "regex"},
        {"unevaluatedProperties": True},
    ],
)
def test_what_says_nothing_is_left_out_silently(schema: dict[str, Any]) -> None:
    assert express(schema).dropped == ()


def test_nothing_is_valid() -> None:
    assert express({"enum": []}).dropped == ("enum",)
    optional = {"type": "object", "properties": {"a": {"enum": []}}}
    assert express(optional).dropped == ()
    assert taken(optional, "{}")
    assert not taken(optional, '{"a":1}')


def test_one_pattern_of_two_stays() -> None:
    schema = of(a={"type": "string", "pattern": "(?=x)"}, b={"type": "string", "pattern": "^b$"})
    assert express(schema).dropped == ("pattern",)
    assert taken(schema, '{"a":"y","b":"b"}')
    assert not taken(schema, '{"a":"x","b":"c"}')


KEYS = st.sampled_from(
    ["type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "properties", "required", "items",
     "additionalProperties", "patternProperties", "minimum", "maxLength", "pattern", "format",
     "minItems", "not", "$defs", "a", "prefixItems", "multipleOf", "$id"]
)  # fmt: skip
LEAVES = st.sampled_from(
    [None, True, False, 0, -1, 3, 0.5, 1e400, 10**30, "object", "string", "array", "#", "#/$defs/a",
     "#/a", "(", "[", "\ud800", "é", "date", [], {}]
)  # fmt: skip
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4)
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=5))
def test_whatever_a_schema_is_it_has_a_grammar(schema: dict[str, Any]) -> None:
    asked = answering(schema)
    grammar = grammar_of(asked, Names.of(asked))
    assert grammar is not None
    compiled(grammar)


def test_depth_and_size_are_bounded() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(10_500)}}
    for schema in (deep, wide):
        assert express(schema).dropped


# --- the JSON Schema test suite ---

SUITE = Path(__file__).with_name("json_schema_suite.json")
"""Draft 2020-12 of https://github.com/json-schema-org/JSON-Schema-Test-Suite at 44401e0, without
`$schema` and without what needs other documents. MIT: LICENSE-json-schema-suite.txt."""


@lru_cache(maxsize=1)
def suite() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(SUITE.read_text())
    return cases


def whole(value: Any) -> Any:
    """``value`` with its integers written as such: ``1.0`` is one, and not in the grammar."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [whole(one) for one in value] if isinstance(value, list) else value


REORDERED = frozenset({"allOf", "const", "unevaluatedProperties"})
"""Keywords in whose cases objects stand in an order other than that of the schema: refused."""


@pytest.mark.parametrize("keyword", sorted({case["keyword"] for case in suite()}))
def test_suite(keyword: str) -> None:
    for case in suite():
        if case["keyword"] != keyword:
            continue
        schema = case["schema"]
        for description, value, valid in case["tests"]:
            took = taken(schema, json.dumps(whole(value), ensure_ascii=False))
            where = f"{case['description']}: {description}"
            if valid:
                assert took or keyword in REORDERED, where
            elif not express(schema).dropped:
                assert not took, where
