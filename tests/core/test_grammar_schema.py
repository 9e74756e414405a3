"""JSON Schema as it is enforced: rows of what tools use, and the JSON Schema test suite."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import FEW, examples
from spellings_of_json import respelled
from tool_shapes import DIALECTS, SHAPES, Dialect, changed, fitting, schema_of

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar import (
    Policy,
    any_order,
    compile_grammar,
    grammar_of,
    language,
    weakenings,
)
from vllm_mlx_harmony.core.grammar.any_order import rules_of
from vllm_mlx_harmony.core.grammar.strict import rewrite, strict_schema
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import ResponseFormat, Tool, Turn, User
from vllm_mlx_harmony.core.typescript import Object, parameters, type_of

HEADER = vocab.encoding().encode("<|channel|>final<|message|>", allowed_special="all")


def answering(schema: Any, *, strict: bool = False) -> Turn:
    return Turn((User("Hi."),), response_format=ResponseFormat(schema, strict=strict))


def taken(schema: Any, text: str, *, strict: bool = False) -> bool:
    asked = answering(schema, strict=strict)
    grammar = grammar_of(asked, Names.of(asked))
    assert grammar is not None
    assert not any("its schema" in note for note in grammar.notes)
    matcher = compile_grammar(grammar).matcher()
    ids = [token for part in cut(text) for token in vocab.encode(part)]
    return all(map(matcher.consume, [*HEADER, *ids, vocab.RETURN]))


def cut(text: str) -> list[str]:
    """As a tokenizer does it, or anywhere: a model need not write the ids that one would."""
    chance = random.Random(text)
    if chance.random() < 0.5:
        return [text]
    places = sorted(chance.sample(range(len(text) + 1), min(len(text), 9)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def is_valid(schema: Any, value: object) -> bool:
    return not any(jsonschema.Draft202012Validator(schema).iter_errors(value))


CHECKED = {"type", "properties", "required", "$ref", "nullable"}


def checked(schema: Any) -> Any:
    """``schema`` with the keywords alone that hold without ``strict`` (semantics C1)."""
    if not isinstance(schema, dict):
        return schema
    kept = {key: content for key, content in schema.items() if key in CHECKED}
    for key in ("properties", "$defs", "definitions"):
        if key in schema:
            kept[key] = {name: checked(inner) for name, inner in schema[key].items()}
    for key in ("items", "prefixItems", "additionalItems"):
        if key in schema:
            inner = schema[key]
            kept[key] = [*map(checked, inner)] if isinstance(inner, list) else checked(inner)
    rest = checked(schema.get("additionalProperties", True))
    patterns = [*map(checked, schema.get("patternProperties", {}).values())]
    kept["additionalProperties"] = {"anyOf": [*patterns, rest]}
    together = [*map(checked, schema.get("allOf", ()))]
    unions = [schema[key] for key in ("anyOf", "oneOf") if key in schema]
    together += [{"anyOf": [*map(checked, branches)]} for branches in unions]
    listed = [schema["enum"]] if "enum" in schema else []
    listed += [[schema["const"]]] if "const" in schema else []
    together += [{"anyOf": [*map(listed_as, values), False]} for values in listed]
    kept["propertyNames"] = checked(schema.get("propertyNames", True))
    return {
        **{key: schema[key] for key in ("$id", "$anchor") if key in schema},
        **kept,
        **({"allOf": together} if together else {}),
    }


def listed_as(value: Any) -> Any:
    """Of numbers, arrays and objects that an ``enum`` lists, only the type is looked at."""
    if value is None or isinstance(value, (bool, str)):
        return {"const": value}
    if isinstance(value, (int, float)):
        return {"type": "integer" if value % 1 == 0 else "number"}
    return {"type": "array" if isinstance(value, list) else "object"}


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


UNION = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]


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
    Row("a union of named objects", {"type": "object", "properties": {"next": {"discriminator":
        {"propertyName": "kind"}, "oneOf": UNION}}, "$defs": {"a": closed(kind={"const": "a"}),
        "b": {**closed(kind={"const": "b"}), "properties": {"kind": {"const": "b"}, "of": {"oneOf":
        UNION}}}}}, ('{"next":{"kind":"a"}}', '{"next":{"kind":"b","of":{"kind":"b","of":{"kind":'
        '"a"}}}}'), ('{"next":{"kind":"c"}}', '{"next":{"kind":"b","of":{"kind":"c"}}}')),
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
    Row("very many optional properties", {"type": "object", "properties": {f"p{n}": {"type":
        "null"} for n in range(1000)}, "additionalProperties": False},
        ('{"p0":null}', '{"p7":null,"p999":null}', "{}"), ('{"q":null}', '{"p0":1}')),
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
    Row("a pattern without quotes", {"type": "string", "pattern": '^[^"]+$'},
        ('"ab"', '"a\\\\b"', '"a\\nb"'), ('"a\\"b"', '"\\u0022"')),
    Row("a pattern of file names", {"type": "string", "pattern": r'^[^\\/:*?"<>|\r\n.]+\.[^.]+$'},
        ('"a b.txt"', '"é.x"'), ('"a\\\\b.c"', '"a\\"b.c"', '"a/b.c"', '"a.b.c"')),
    # names of properties
    Row("a record of an enumeration", {"type": "object", "propertyNames": {"type": "string", "enum":
        ["r", "g", 'b"']}, "additionalProperties": {"type": "number"}},
        ("{}", '{"r":1.5}', '{"g":1,"b\\"":2}'), ('{"x":1}', '{"r":"1"}', '{"":1}', '{"re":1}')),
    Row("an exhaustive record", {"type": "object", "propertyNames": {"type": "string", "enum":
        ["r", "g"]}, "additionalProperties": {"type": "number"}, "required": ["r", "g"]},
        ('{"r":1,"g":2}',), ("{}", '{"r":1}', '{"r":1,"g":2,"b":3}')),
    Row("a record of a named enumeration", {"type": "object", "properties": {"seen": {"type":
        "object", "propertyNames": {"$ref": "#/$defs/Color"}, "additionalProperties": {"type":
        "integer"}}}, "$defs": {"Color": {"title": "Color", "type": "string", "enum": ["r", "g"]}}},
        ('{"seen":{"g":1}}', "{}"), ('{"seen":{"x":1}}', '{"seen":{"r":1.5}}')),
    Row("listed names beside properties", {"type": "object", "properties": {"a": {"type": "null"},
        "x": {"type": "null"}}, "propertyNames": {"enum": ["b", "a"]}, "additionalProperties":
        {"type": "integer"}}, ('{"a":null,"b":1}', "{}"),
        ('{"x":null}', '{"a":1}', '{"b":null}', '{"c":1}')),
    Row("listed names beside patterns", {"type": "object", "patternProperties": {"^x": {"type":
        "integer"}}, "propertyNames": {"enum": ["xa", "b"]}, "additionalProperties": {"type":
        "null"}}, ('{"xa":1,"b":null}',), ('{"xa":null}', '{"xb":1}', '{"c":null}', '{"b":1}')),
    Row("listed names in all of", {"allOf": [{"type": "object", "additionalProperties": {"type":
        "integer"}}, {"propertyNames": {"enum": ["a", "b"]}}], "required": ["b"]},
        ('{"a":1,"b":2}', '{"b":2}'), ('{"a":1}', '{"b":"2"}', '{"b":2,"c":3}')),
    Row("names only of objects", {"propertyNames": {"const": "a"}},
        ("1", '["x"]', '{"a":[1]}', "{}"), ('{"b":1}',)),
    Row("no names", {"type": "object", "propertyNames": False}, ("{}",), ('{"a":1}',)),
    # a declared name in another spelling
    Row("another spelling", {"type": "object", "properties": {"a": {"type": "integer"}, "aé-😀":
        {"type": "null"}}, "required": ["é"], "additionalProperties": {"type": "string"}},
        ('{"a":1,"é":"x"}', '{"é":"x","":"","b":"b","aa":"y","aé":"z"}'),
        ('{"é":"x","\\u0061":"x"}', '{"é":"x","a\\u00e9-😀":"x"}')),
    Row("another spelling of names with quotes", {"type": "object", "properties": {'a"b\\\n':
        {"type": "null"}}}, ('{"a\\"b\\\\\\n":null,"a\\"b":1,"a\\"c":2}',), ('{"a\\"b\\\\\\n":1}',
        '{"a\\u0022b\\\\\\n":1}', '{"\\u0061\\"b\\\\\\n":1}')),
    Row("another spelling of an open object", {"type": "object", "properties": {"a": {"type":
        "integer"}}}, ('{"b":{"a":"x"}}',), ('{"\\u0061":"x"}',)),
    Row("another spelling of a pattern", {"type": "object", "patternProperties": {"^x": {"type":
        "integer"}}}, ('{"x1":1,"y":[]}',), ('{"\\u0078":"x"}',)),
    Row("another spelling in all of", {"allOf": [{"type": "object", "properties": {"a": {"type":
        "integer"}}}, {"properties": {"b": {"type": "integer"}}}]},
        ('{"a":1,"b":2,"c":"x"}',), ('{"\\u0061":"x"}', '{"\\u0062":"x"}')),
]  # fmt: skip


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row, strict: bool) -> None:
    assert (strict_schema(row.schema).unsupported if strict else rules_of(row.schema).dropped) == ()
    for text in row.valid:
        assert is_valid(row.schema, json.loads(text))
        assert taken(row.schema, text, strict=strict), text
        for indent in (None, 2):
            pretty = json.dumps(json.loads(text), ensure_ascii=False, indent=indent)
            assert taken(row.schema, pretty, strict=strict), pretty
    for text in row.invalid:
        if text != "x" and not row.is_format:
            assert not is_valid(row.schema, json.loads(text)), text
        fits = text != "x" and not strict and is_valid(checked(row.schema), json.loads(text))
        assert taken(row.schema, text, strict=strict) == fits, text


NULLABLE = {"type": "string", "nullable": True}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (of(a=NULLABLE), ('{"a":null}', '{"a":"x"}'), ('{"a":1}', "{}", "null")),
        ({**of(a=NULLABLE), "nullable": True}, ('{"a":null}',), ("null",)),
        (of(a={**NULLABLE, "enum": ["x"]}), ('{"a":null}', '{"a":"x"}'), ('{"a":"y"}',)),
        (of(a={**NULLABLE, "nullable": False}), ('{"a":"x"}',), ('{"a":null}',)),
        ({"type": "array", "items": NULLABLE}, ('["x",null]',), ("[1]", "null")),
        (
            {
                **of(a={"allOf": [{"$ref": "#/$defs/b"}], "nullable": True}),
                "$defs": {"b": of(nullable=NULLABLE)},
            },
            ('{"a":null}', '{"a":{"nullable":null}}'),
            ('{"a":{}}', '{"a":"x"}'),
        ),
        ({**of(a={"$ref": "#/$defs/b"}), "$defs": {"b": NULLABLE}}, ('{"a":null}',), ('{"a":1}',)),
    ],
)
def test_null_where_openapi_allows_it(
    schema: dict[str, Any], valid: tuple[str, ...], invalid: tuple[str, ...]
) -> None:
    """OpenAPI 3.0's keyword, which JSON Schema does not have: as the prompt shows it."""
    assert strict_schema(schema).unsupported == ()
    assert [text for text in valid if not taken(schema, text)] == []
    assert [text for text in invalid if taken(schema, text)] == []


# --- the tools of agents, as libraries write them ---


@pytest.mark.nightly(sample=3)
@pytest.mark.once
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("name", SHAPES)
def test_tool(name: str, dialect: Dialect) -> None:
    shape = SHAPES[name]
    schema = schema_of(shape, dialect)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert strict_schema(schema, of_object=True).unsupported == ()
    assert rules_of(schema, of_object=True).dropped == ()
    has_formats = '"format"' in json.dumps(schema)  # those are annotations, but under strict
    chance = random.Random(f"{name} {dialect.name}")
    for _ in range(1 if FEW else 3):
        value = fitting(shape, dialect, chance)
        assert is_valid(schema, value)
        assert taken(schema, json.dumps(value, ensure_ascii=False), strict=True), value
        assert taken(schema, respelled(value, chance)), value
        others = [*changed(value)]
        for other in chance.sample(others, min(len(others), 10)):
            took = taken(schema, json.dumps(other, ensure_ascii=False), strict=True)
            assert took == is_valid(schema, other) or (has_formats and not took), other
            fits = is_valid(checked(schema), other)
            assert taken(schema, respelled(other, chance)) == fits, other


def test_there_are_some_hundreds_of_them() -> None:
    schemas = {json.dumps(schema_of(s, dialect)) for s in SHAPES.values() for dialect in DIALECTS}
    assert len(schemas) > 350


def test_schema_that_no_value_fits_may_refer_to_itself() -> None:
    never = {**of(x={"$ref": "#/$defs/list"}, y=False)}
    definitions = {"never": never, "list": {"type": "array", "items": {"$ref": "#/$defs/never"}}}
    properties = {"v": {"$ref": "#/$defs/never"}, "w": {"$ref": "#/$defs/list"}}
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    for text in ("{}", '{"w":[]}'):
        assert is_valid(schema, json.loads(text)) and taken(schema, text), text
    for text in ('{"w":[{"x":[],"y":1}]}', '{"v":{"x":[]}}', '{"w":[1]}'):
        assert not is_valid(schema, json.loads(text)) and not taken(schema, text), text


MOST = any_order.MAX_WHITE_SPACE


def test_a_model_that_keeps_inventing_names_reaches_a_required_one() -> None:
    schema = of(a={"type": "integer"})
    others = {str(number): None for number in range(200)}
    assert taken(schema, json.dumps({"a": 1, **others}))
    assert taken(schema, json.dumps({**dict(list(others.items())[:64]), "a": 1, "b": 2}))
    assert not taken(schema, json.dumps({**others, "a": 1}))
    assert taken({"type": "object"}, json.dumps(others))


def test_white_space_is_bounded() -> None:
    for count, fits in ((MOST, True), (MOST + 1, False)):
        space = (" \t\r\n" * MOST)[:count]
        for text in (f"{{{space}}}", f'{{"a":{space}1}}', f'{{"a"{space}:1}}', f"{{}}{space}"):
            assert taken({"type": "object"}, text) == fits, text
    strictly = partial(taken, {"type": "object", "additionalProperties": {}}, strict=True)
    assert strictly('{\n          "a": 1\r\n}')
    assert not strictly("{" + " " * 100 + "}")
    assert not strictly("{\n\n}")


def test_printable_characters_may_be_escaped() -> None:
    for strict in (False, True):
        assert taken({"type": "string"}, '"caf\\u00e9 \\ud83d\\ude00"', strict=strict)
    assert not taken({"type": "string"}, '"\\ud83d"', strict=True)


# --- what was not asked to be strict: the same value in other words ---

SPELLED = [
    Row("integers", {"type": "integer"},
        ("1", "-0", "1.0", "1e3", "1E+03", "1.50e1", "100e-2", "-2.5e1", "0e-9", "12345678901e0"),
        ("1.5", "1e-1", "15e-1", "1.25e1", "01", "1.", "+1", "1e", "1e400")),
    Row("numbers", {"type": "number"},
        ("1", "-0.0", "1e-7", "1.7976931348623157e+308", "5E-324", "0.1e1"), (".5", "1.", "0x1")),
    Row("names", closed(a={"type": "integer"}, **{"é/😀\"": {"type": "null"}}),
        ('{"\\u0061":1,"é/😀\\"":null}', '{"\\u00e9\\/\\ud83d\\uDE00\\u0022":null,"a":1.0}'),
        ('{"\\u0062":1,"é/😀\\"":null}', '{"\\u0061":"1","é/😀\\"":null}', '{"a":1,"\\u0061":1}')),
    Row("a name that comes twice", closed(a={}, b={}), ('{"b":1,"a":2}',),
        ('{"a":1,"a":1,"b":2}', '{"a":1,"b":2,"a":1}')),
    Row("enumerated texts", {"enum": ["a/b", 'q"', "\n", "é"]},
        ('"a\\/b"', '"\\u0061/b"', '"q\\u0022"', '"\\u000a"', '"\\n"', '"\\u00E9"'),
        ('"a"', '"A/b"', '"\\u00ea"')),
    Row("any order at every level", closed(a=closed(b={}, c={"type": "array", "items": closed(d={},
        e={})}), f={}), ('{"f":1,"a":{"c":[{"e":1,"d":2}],"b":3}}',),
        ('{"f":1,"a":{"c":[{"e":1}],"b":3}}', '{"f":1}')),
    Row("others between", {**of(a={"type": "null"}, b={"type": "null"}), "additionalProperties":
        {"type": "integer"}}, ('{"x":1,"b":null,"y":2,"a":null,"z":3}', '{"b":null,"a":null}'),
        ('{"x":1,"b":null}', '{"x":null,"a":null,"b":null}', '{"a":null,"b":null,}')),
]  # fmt: skip


@pytest.mark.parametrize("row", SPELLED, ids=lambda row: row.id)
def test_another_spelling(row: Row) -> None:
    assert rules_of(row.schema).dropped == ()
    assert [text for text in row.valid if not taken(row.schema, text)] == []
    assert [text for text in row.invalid if taken(row.schema, text)] == []
    assert all(is_valid(row.schema, json.loads(text)) for text in row.valid)


# fmt: off
UNCHECKED: dict[str, tuple[Any, str]] = {
    "minimum": ({"type": "integer", "minimum": 1}, "0"),
    "maximum": ({"type": "number", "exclusiveMaximum": 1}, "1.0"),
    "multipleOf": ({"type": "integer", "multipleOf": 999_999_937}, "3"),
    "listed numbers": ({"enum": [1, 2]}, "3"),
    "listed objects": ({"const": {"a": 1}}, '{"b": 2}'),
    "maxLength": ({"type": "string", "maxLength": 2}, '"abc"'),
    "pattern": ({"type": "string", "pattern": r"^(\s*\S+){1,300}$"}, '""'),
    "format": ({"type": "string", "format": "date"}, '"today"'),
    "minItems": ({"type": "array", "minItems": 1}, "[]"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "[1, 1]"),
    "contains": ({"type": "array", "contains": {"type": "null"}}, "[]"),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a": 1, "b": 2}'),
    "patterns of names": ({"patternProperties": {"^a": {"type": "null"}}}, '{"a": 1}'),
    "names of a pattern": ({"propertyNames": {"pattern": "^a"}}, '{"b": 1}'),
    "unevaluatedProperties": ({"properties": {"a": {}}, "unevaluatedProperties": False}, '{"b":1}'),
    "not": ({"not": {"type": "null"}}, "null"),
    "if": ({"if": {"type": "string"}, "then": {"const": "a"}}, '"b"'),
    "more than one of": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
}
# fmt: on


@pytest.mark.parametrize("keyword", UNCHECKED)
def test_keyword_is_left_to_the_caller(keyword: str) -> None:
    """Semantics C1, and the list in docs/semantics.md."""
    schema, invalid = UNCHECKED[keyword]
    assert keyword == "format" or not is_valid(schema, json.loads(invalid))
    assert rules_of(schema).dropped == ()
    assert taken(schema, invalid)
    asked = answering(schema)
    assert [grammar.untrusted for grammar in weakenings(asked, Names.of(asked))][:1] == [False]


@pytest.mark.parametrize("text", ['"\\ud83d"', '"\\udc00\\ud83dx"', '"\\/"', '"\x7f"', '"\u2028"'])
def test_whatever_parsers_take(text: str) -> None:
    json.loads(text)
    assert taken({"type": "string"}, text)
    assert taken({}, text)
    assert taken({"type": "object"}, f"{{{text}: {text}}}")


# --- schemas drawn at random ---


def drawn_schema(chance: random.Random, depth: int = 0) -> tuple[Any, Callable[[], Any]]:
    """A schema, and what makes a value that is probably valid."""

    def scalar() -> tuple[Any, Callable[[], Any]]:
        low, high = sorted((chance.randrange(-50, 2000), chance.randrange(-50, 2000)))
        return chance.choice(
            [
                ({"type": "string"}, lambda: chance.choice(["", "a", 'é"\n', "x" * 9, "😀"])),
                ({"type": "integer"}, lambda: chance.choice([0, -7, 3000, 10**12])),
                (
                    {"type": "integer", "minimum": low, "maximum": high},
                    lambda: chance.choice([low, high, high + 1, (low + high) // 2]),
                ),
                (
                    {"type": "number", "exclusiveMinimum": low / 8, "maximum": high},
                    lambda: chance.choice([low / 8, (low + high) / 4, high, high + 0.5]),
                ),
                ({"type": ["boolean", "null"]}, lambda: chance.choice([True, False, None])),
                ({"enum": ["a", "b/c", 1, 2.5, None]}, lambda: chance.choice(["b/c", 1, 2.5, "c"])),
                (
                    {"type": "string", "minLength": 1, "maxLength": 3},
                    lambda: chance.choice(["", "ab", "😀é", "abcd"]),
                ),
                (
                    {"type": "string", "pattern": "^[a-z]+(-[0-9]{2})?$"},
                    lambda: chance.choice(["ab", "ab-12", "ab-1", "A"]),
                ),
                ({"type": "number", "multipleOf": 0.5}, lambda: chance.choice([2, 2.5, 2.25])),
            ]
        )

    kind = chance.choice(["scalar", "array", "tuple", "object", "object", "union", "merged"])
    if depth > 2 or kind == "scalar":
        return scalar()
    if kind == "array":
        schema, make = drawn_schema(chance, depth + 1)
        most = chance.choice([1, 3])
        array = {"type": "array", "items": schema, "minItems": 1, "maxItems": most}
        return array, lambda: [make() for _ in range(chance.randint(1, most))]
    if kind == "tuple":
        parts = [drawn_schema(chance, depth + 1) for _ in range(2)]
        array = {"prefixItems": [one for one, _ in parts], "items": False, "type": "array"}
        return array, lambda: [make() for _, make in parts][: chance.randint(1, 2)]
    if kind == "union":
        parts = [drawn_schema(chance, depth + 1) for _ in range(2)]
        return {"anyOf": [one for one, _ in parts]}, lambda: chance.choice(parts)[1]()  # noqa: PLW0108 - another one each time
    if kind == "merged":
        schema, make = drawn_schema(chance, depth + 1)
        return {"allOf": [schema], "description": "as it is"}, make
    names = chance.sample(["a", "b", "é", 'q"', "long name", "/"], chance.randint(1, 5))
    parts = {name: drawn_schema(chance, depth + 1) for name in names}
    required = [name for name in names if chance.random() < 0.5]
    schema = {"type": "object", "properties": {name: one for name, (one, _) in parts.items()}}
    schema["required"] = required
    rest = chance.choice([None, False, {"type": "integer"}])
    if rest is not None:
        schema["additionalProperties"] = rest

    def members() -> Any:
        value = {
            n: make() for n, (_, make) in parts.items() if n in required or chance.random() < 0.5
        }
        if rest is not False and chance.random() < 0.5:
            value |= {"other": 5, "": chance.choice([1, "x"])}
        return value

    return schema, members


@pytest.mark.once
@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32))
def test_what_is_valid_is_taken_and_nothing_else(seed: int) -> None:
    chance = random.Random(seed)
    schema, make = drawn_schema(chance)
    assert rules_of(schema).dropped == ()
    for _ in range(4):
        value = make()
        others = [*changed(value)]
        for one in (value, *chance.sample(others, min(len(others), 2))):
            text = respelled(one, chance)
            assert taken(schema, text) == is_valid(checked(schema), one), (schema, text)


# --- what cannot be enforced ---

# fmt: off
DROPPED = {
    "if": ({"if": {"type": "string"}, "then": {"minLength": 1}}, ("if", "then")),
    "not": ({"not": {"type": "string"}}, ("not",)),
    "unique": ({"type": "array", "uniqueItems": True}, ("uniqueItems",)),
    "dependent": ({"dependentRequired": {"a": ["b"]}}, ("dependentRequired",)),
    "look-around": ({"type": "string", "pattern": "^(?!x)"}, ("pattern",)),
    "overlapping": ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, ("oneOf",)),
    "contains": ({"type": "array", "contains": {"type": "null"}}, ("contains",)),
    "names": ({"type": "object", "propertyNames": {"pattern": "x", "maxLength": 3}},
        ("propertyNames",)),
    "too many names": ({"type": "object", "propertyNames": {"enum": [f"n{n}" for n in range(201)]}},
        ("propertyNames",)),
    "names of one of two": ({"propertyNames": {"anyOf": [{"const": "a"}, {"enum": ["b", "c"]}]}},
        ("propertyNames",)),
    "listed names of a length": ({"propertyNames": {"enum": ["a", "bb"], "minLength": 2}},
        ("propertyNames",)),
    "unevaluated": ({"properties": {"a": {}}, "unevaluatedProperties": False},
        ("unevaluatedProperties",)),
    "names, not": ({"propertyNames": {"not": {"const": "a"}}}, ("not",)),
    "overlapping patterns": ({"patternProperties": {"^a": {}, "b$": {}}}, ("patternProperties",)),
    "foreign": ({"$ref": "https://example.com/schema"}, ("a $ref that leads nowhere",)),
    "malformed": ({"type": "str"}, ("a malformed type",)),
    "no schema": ({"properties": {"a": 3}}, ("a schema that is neither object nor boolean",)),
    "minProperties": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        ("minProperties",),
    ),
}
# fmt: on


NOTED = {"foreign", "malformed", "no schema"}
"""What cannot be read is noted; keywords that only ``strict`` holds are not."""


@pytest.mark.parametrize("case", DROPPED)
def test_dropped(case: str) -> None:
    schema, dropped = DROPPED[case]
    assert strict_schema(schema).unsupported == dropped
    wrapped = {"type": "object", "properties": {"v": schema, "w": {"type": "integer"}}}
    tool = Tool("lookup", parameters=wrapped)
    asked = Turn((User("Hi."),), tools=(tool,))
    grammar = grammar_of(asked, Names.of(asked))
    assert grammar is not None
    assert len(grammar.notes) == (case in NOTED)
    assert all("'lookup'" in note and dropped[0] in note for note in grammar.notes)
    with pytest.raises(RequestError, match=rf"'lookup'.*{re.escape(dropped[0])}") as raised:
        grammar_of(asked, Names.of(asked), Policy.STRICT)
    assert raised.value.param == "tools"
    assert not taken(wrapped, '{"w":"x"}')  # the rest is enforced


MANY = [f"n{number}" for number in range(100_000)]
ENDLESS: dict[str, dict[str, Any]] = {
    "a pattern of names": {"required": ["a" * 60], "patternProperties": {"^(a+)+b$": {}}},
    "a pattern of literals": {"enum": ["a" * 60], "pattern": "^(a|a)*b$"},
    "a pattern of listed names": {"propertyNames": {"enum": ["a" * 60], "pattern": "^(a+)+b$"}},
    "branches": {"oneOf": [{"const": "a" * 60}, {"pattern": "^(a+)+b$"}]},
    "literals": {"enum": MANY},
    "literals twice": {"allOf": [{"enum": MANY}, {"enum": MANY}]},
    "literals in branches": {"oneOf": [{"enum": MANY[:1_000]}] * 60},
    "branches of branches": of(**{name: {"oneOf": [of(k={"const": k}) for k in range(50)]}
        for name in MANY[:9]}),
    "names": {"required": MANY},
    "a long text": {"const": "é" * 4_000_000},
    "a long name": {"properties": {"é" * 4_000_000: {}}},
    "names of many schemas": {"allOf": [{"required": MANY[at : at + 100]} for at in range(0, 9_000,
        100)]},
    "unions of unions": {"allOf": [{"anyOf": [of(**{name: {}}) for name in MANY[:90]]}] * 90},
    "unions within unions": {"$ref": "#/$defs/d0", "$defs": {f"d{n}": {"anyOf": [{"type": "array",
        "items": {"$ref": f"#/$defs/d{n + 1}"}}, {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, of(a={})]
        }] * 9} for n in range(60)}},
}  # fmt: skip


@pytest.mark.parametrize("case", ENDLESS)
def test_no_schema_takes_forever(case: str) -> None:
    """They are read in the server's process, which a pattern of Python would stop meanwhile."""
    rules = rules_of(ENDLESS[case])
    assert rules.size <= any_order.MAX_TEXT
    strict_schema(ENDLESS[case], check=lambda _: "")


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
    assert strict_schema(schema).unsupported == ()


def test_references_that_branch_are_followed_once() -> None:
    for keyword in ("anyOf", "allOf"):
        each = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
        definitions = {**each, "d60": {"properties": {"a": {}}, "enum": ["a"]}}
        assert rewrite(
            {
                "propertyNames": {"$ref": "#/$defs/d0"},
                "$ref": "#/$defs/d0",
                "oneOf": [{"$ref": "#/$defs/d0"}] * 2,
                "$defs": definitions,
            }
        )


def test_properties_come_as_the_prompt_shows_them() -> None:
    schema = {
        "properties": {"own": {}},
        "type": "object",
        "allOf": [{"properties": {"base": {}}}],
        "anyOf": [{"properties": {"variant": {}}}],
        "required": ["own", "base", "variant"],
    }
    shown = parameters(Tool("f", parameters=schema))
    assert isinstance(shown, Object)
    order = [name for name, _ in shown.properties]
    assert taken(schema, json.dumps(dict.fromkeys(order, 1)), strict=True)
    backwards = json.dumps(dict.fromkeys(reversed(order), 1))
    assert not taken(schema, backwards, strict=True)
    assert taken(schema, backwards)


SHOWN: dict[str, tuple[Any, str, tuple[str, ...], tuple[str, ...]]] = {
    "types of a base": ({"allOf": [{"type": "string"}], "type": ["string", "null"]}, "string",
        ('"a"',), ("null",)),
    "texts of a base": ({"allOf": [{"enum": ["a", "b"]}], "enum": ["b", "c"]}, '"b"',
        ('"b"',), ('"a"', '"c"')),
    "items of a base": ({"allOf": [{"type": "array", "items": {"enum": ["a", "b"]}}], "items":
        {"enum": ["b", "c"]}}, '"b"[]', ('["b"]',), ('["a"]', '["c"]')),
    "null of a reference": ({"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {"type":
        ["string", "null"]}}}, "string", ('"a"',), ("null",)),
    "a type that is none": ({"type": "list", "items": {"type": "integer"}}, "number[]",
        ("[1]",), ('["a"]',)),
    "one type that is none": ({"type": ["string", "file"]}, "any", ('"a"', "1"), ()),
    "a name that is none": ({"properties": {"a": {}}, "required": [7, "a"]}, "{\na: any,\n}",
        ('{"a":1}',), ("{}",)),
    "a reference that leads nowhere": ({"$ref": "#/$defs/x", "type": "null"}, "null",
        ("null",), ("1",)),
}  # fmt: skip


@pytest.mark.parametrize("case", SHOWN)
def test_what_the_prompt_shows_is_what_holds(case: str) -> None:
    schema, shown, valid, invalid = SHOWN[case]
    assert type_of(schema).text() == shown
    assert all(taken(schema, text) for text in valid)
    assert not any(taken(schema, text) for text in invalid)


def test_nothing_is_valid() -> None:
    assert strict_schema({"enum": []}).unsupported == ("enum",)
    optional = {"type": "object", "properties": {"a": {"enum": []}}}
    assert strict_schema(optional).unsupported == ()
    assert taken(optional, "{}")
    assert not taken(optional, '{"a":1}')


KEYS = st.sampled_from(
    ["type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "properties", "required", "items",
     "additionalProperties", "patternProperties", "minimum", "maxLength", "pattern", "format",
     "minItems", "not", "$defs", "a", "prefixItems", "multipleOf", "$id", "propertyNames",
     "unevaluatedProperties", "$anchor"]
)  # fmt: skip
LEAVES = st.sampled_from(
    [None, True, False, 0, -1, 3, 0.5, 1e400, 10**30, 3e-300, "object", "string", "array", "#",
     "#/$defs/a", "#/a", "(", "[", "\ud800", "é", "date", [], {}]
)  # fmt: skip
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4)
)


@settings(max_examples=examples(100), deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=5))
def test_whatever_a_schema_is_it_has_a_grammar(schema: dict[str, Any]) -> None:
    asked = answering(schema)
    grammar = grammar_of(asked, Names.of(asked))
    assert grammar is not None
    compile_grammar(grammar)
    strict_schema(schema, check=lambda _: "")


@pytest.mark.once
def test_depth_and_size_are_bounded() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(10_500)}}
    for schema in (deep, wide):
        assert strict_schema(schema).unsupported


def chain(length: int, link: Callable[[Any], Any]) -> dict[str, Any]:
    """A tool's parameters in which every definition refers to the next."""
    definitions = {f"d{n}": link({"$ref": f"#/$defs/d{n + 1}"}) for n in range(length)}
    definitions[f"d{length}"] = {"type": "integer"}
    return {**of(v={"$ref": "#/$defs/d0"}), "$defs": definitions}


DEEP = {
    "unions": chain(700, lambda next_: {"oneOf": [next_, {"type": "null"}]}),
    "objects": chain(3500, lambda next_: {"type": "object", "properties": {"n": next_}}),
    "objects, all of them members": {
        **(deep := chain(2000, lambda next_: {"type": "object", "properties": {"n": next_}})),
        "properties": {f"a{n}": {"$ref": f"#/$defs/d{n}"} for n in range(2000)},
        "required": [],
    },
    "references": chain(9000, lambda next_: next_),
    "allOf": chain(4500, lambda next_: {"allOf": [next_]}),
    "anyOf": chain(4500, lambda next_: {"anyOf": [next_]}),
    "anyOf that branches": chain(4500, lambda next_: {"anyOf": [next_, next_, {"const": 1}]}),
    "a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [
        {"$ref": "#/$defs/a"}, {"type": "object"}]}}},
    "a long enumeration": of(v={"enum": [f"value number {n}" for n in range(5000)]}),
}  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize("case", DEEP)
def test_what_is_deep_or_large_becomes_a_note(case: str) -> None:
    tool = Tool("lookup", parameters=DEEP[case])
    asked = Turn((User("Hi."),), tools=(tool,))
    grammar = grammar_of(asked, Names.of(asked))
    assert grammar is not None
    assert len(grammar.notes) == 1 and "'lookup'" in grammar.notes[0]
    assert len(grammar.text) < 300_000
    matcher = compile_grammar(grammar).matcher()
    call = "<|channel|>commentary to=functions.lookup<|message|>{"
    assert all(map(matcher.consume, vocab.encoding().encode(call, allowed_special="all")))


def small(number: int) -> Tool:
    return Tool(f"t{number}", parameters=of(path={"type": "string"}, **{f"x{number}": {}}))


def many(number: int) -> Tool:
    kinds = ("string", "integer", "boolean")
    return Tool(
        f"t{number}",
        parameters=of(**{f"p_{number}_{n}": {"type": kinds[n % 3]} for n in range(30)}),
    )


@pytest.mark.nightly(sample=2)
@pytest.mark.once
@pytest.mark.parametrize(("make", "count"), [(many, 500), (small, 1500)])
def test_many_tools_are_not_refused(make: Callable[[int], Tool], count: int) -> None:
    asked = Turn((User("Hi."),), tools=tuple(map(make, range(count))))
    grammar = grammar_of(asked, Names.of(asked))
    assert grammar is not None
    assert all("any JSON object" in note for note in grammar.notes)
    loose = count - len(grammar.notes)
    assert loose > 20
    taken_calls = 0
    for number in range(0, count, 100):
        call = f"<|channel|>commentary to=functions.t{number}<|message|>{{}}<|call|>"
        matcher = compile_grammar(grammar).matcher()
        took = all(map(matcher.consume, vocab.encoding().encode(call, allowed_special="all")))
        noted = any(f"'t{number}'" in note for note in grammar.notes)
        assert took == noted
        taken_calls += took
    assert (taken_calls > 0) == bool(grammar.notes)


def test_largest_schemas_are_weakened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are too large together; then all of them."""
    monkeypatch.setattr(language, "MAX_SCHEMAS", 2_000)
    properties = [{f"p{n}_{at}": {} for at in range(9 - n)} for n in range(6)]
    tools = tuple(Tool(f"t{n}", parameters=of(**each)) for n, each in enumerate(properties))
    asked = Turn((User("Hi."),), tools=tools)
    ladder = [*weakenings(asked, Names.of(asked))]
    noted = [[note.split(":")[0].split("'")[1] for note in grammar.notes] for grammar in ladder]
    six = [f"t{n}" for n in range(6)]
    assert noted == [six[: len(noted[0])], six, six]
    assert 0 < len(noted[0]) < 6
    assert all("any JSON object" in note for grammar in ladder[:-1] for note in grammar.notes)
    assert all("(anything is accepted)" in note for note in ladder[-1].notes)
    for grammar in ladder:
        compile_grammar(grammar)


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


def in_some_order(value: Any) -> Iterator[Any]:
    """``value``, its properties in any order: the schema's is the one that is taken."""
    if not isinstance(value, dict) or len(value) > 5:
        yield value
    else:
        yield from map(dict, permutations(value.items()))


@pytest.mark.parametrize("keyword", sorted({case["keyword"] for case in suite()}))
def test_suite(keyword: str) -> None:
    """In any order and spelling; and, in the order that a strict schema has, as it is written."""
    for case in suite():
        if case["keyword"] != keyword:
            continue
        schema = case["schema"]
        chance = random.Random(case["description"])
        strictly = not strict_schema(schema).unsupported
        for description, value, valid in case["tests"]:
            where = f"{case['description']}: {description}"
            text = respelled(value, chance)
            # `checked` leaves out what keywords define that are not checked.
            is_whole = "example.com" not in json.dumps(schema) and not rules_of(schema).dropped
            if valid or is_whole:
                fits = valid or is_valid(checked(schema), value)
                assert taken(schema, text) == fits, (where, text)
            if strictly:
                texts = map(partial(json.dumps, ensure_ascii=False), in_some_order(whole(value)))
                assert any(taken(schema, one, strict=True) for one in texts) == valid, where
