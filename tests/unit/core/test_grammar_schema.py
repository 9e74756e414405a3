"""JSON Schema as it is enforced: rows of what tools use, and the JSON Schema test suite."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar_texts import OBJECT, SCHEMAS, chain
from harmony_text import ids_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import FEW, examples
from spellings_of_json import respelled
from tool_shapes import DIALECTS, SHAPES, Dialect, Shape, changed, drawn, fitting, schema_of

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
from vllm_mlx_harmony.core.grammar.strict import strict_schema
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import ResponseFormat, Syntax, Tool, Turn, User
from vllm_mlx_harmony.core.typescript import Object, parameters, type_of

HEADER = ids_of("<|channel|>final<|message|>")


def turn_with_format(schema: Any, *, strict: bool = False) -> Turn:
    return Turn((User("Hi."),), response_format=ResponseFormat(schema, strict=strict))


def accepted(schema: Any, text: str, *, strict: bool = False) -> bool:
    turn = turn_with_format(schema, strict=strict)
    grammar = grammar_of(turn, Names.of(turn))
    assert grammar is not None
    assert not any("its schema" in note for note in grammar.notes)
    matcher = compile_grammar(grammar).matcher()
    ids = [token for part in cut(text) for token in vocab.encode(part)]
    return all(map(matcher.consume, [*HEADER, *ids, vocab.RETURN]))


def cut(text: str) -> list[str]:
    """``text`` whole, or cut anywhere: a model need not choose the ids that a tokenizer would."""
    chance = random.Random(text)
    if chance.random() < 0.5:
        return [text]
    places = sorted(chance.sample(range(len(text) + 1), min(len(text), 9)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


DATES = jsonschema.FormatChecker(("date",))


def is_valid(schema: Any, value: object) -> bool:
    return jsonschema.Draft202012Validator(schema, format_checker=DATES).is_valid(value)


ALWAYS_ENFORCED = {"type", "properties", "required", "$ref", "nullable"}


def always_enforced(schema: Any) -> Any:
    """``schema`` with only the keywords that are enforced without ``strict`` (semantics C1)."""
    if not isinstance(schema, dict):
        return schema
    enforced = {key: content for key, content in schema.items() if key in ALWAYS_ENFORCED}
    for key in ("properties", "$defs", "definitions"):
        if key in schema:
            enforced[key] = {name: always_enforced(inner) for name, inner in schema[key].items()}
    for key in ("items", "prefixItems", "additionalItems"):
        if key in schema:
            inner = schema[key]
            enforced[key] = (
                [*map(always_enforced, inner)]
                if isinstance(inner, list)
                else always_enforced(inner)
            )
    rest = always_enforced(schema.get("additionalProperties", True))
    patterns = [*map(always_enforced, schema.get("patternProperties", {}).values())]
    enforced["additionalProperties"] = {"anyOf": [*patterns, rest]}
    together = [*map(always_enforced, schema.get("allOf", ()))]
    unions = [schema[key] for key in ("anyOf", "oneOf") if key in schema]
    together += [{"anyOf": [*map(always_enforced, branches)]} for branches in unions]
    listed = [schema["enum"]] if "enum" in schema else []
    listed += [[schema["const"]]] if "const" in schema else []
    together += [{"anyOf": [*map(schema_of_listed, values), False]} for values in listed]
    enforced["propertyNames"] = always_enforced(schema.get("propertyNames", True))
    return {
        **{key: schema[key] for key in ("$id", "$anchor") if key in schema},
        **enforced,
        **({"allOf": together} if together else {}),
    }


def schema_of_listed(value: Any) -> Any:
    """Of the numbers, arrays and objects in an ``enum``, only the type is checked."""
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


UNION = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]


@dataclass(frozen=True)
class Row:
    id: str
    schema: Any
    valid: tuple[str, ...]
    invalid: tuple[str, ...]


ROWS = [
    Row("a union of named objects", {"type": "object", "properties": {"next": {"discriminator":
        {"propertyName": "kind"}, "oneOf": UNION}}, "$defs": {"a": closed(kind={"const": "a"}),
        "b": {**closed(kind={"const": "b"}), "properties": {"kind": {"const": "b"}, "of": {"oneOf":
        UNION}}}}}, ('{"next":{"kind":"a"}}', '{"next":{"kind":"b","of":{"kind":"b","of":{"kind":'
        '"a"}}}}'), ('{"next":{"kind":"c"}}', '{"next":{"kind":"b","of":{"kind":"c"}}}')),
    Row("lengths", {"type": "string", "minLength": 2, "maxLength": 3},
        ('"éé"', '"\\n\\""', '"\N{GRINNING FACE}a"'), ('"a"', '"abcd"')),
    Row("very many optional properties", {"type": "object", "properties": {f"p{n}": {"type":
        "null"} for n in range(1000)}, "additionalProperties": False},
        ('{"p0":null}', '{"p7":null,"p999":null}', "{}"), ('{"q":null}', '{"p0":1}')),
    Row("a date", {"type": "string", "format": "date"}, ('"2026-11-22"',), ('"2026-1"', '"today"')),
    Row("anything", {}, ('"x"', "[1,{}]", "null"), ("x",)),
    Row("a pattern without quotes", {"type": "string", "pattern": '^[^"]+$'},
        ('"ab"', '"a\\\\b"', '"a\\nb"'), ('"a\\"b"', '"\\u0022"')),
    Row("a pattern of file names", {"type": "string", "pattern": r'^[^\\/:*?"<>|\r\n.]+\.[^.]+$'},
        ('"a b.txt"', '"é.x"'), ('"a\\\\b.c"', '"a\\"b.c"', '"a/b.c"', '"a.b.c"')),
    # names of properties
    Row("an exhaustive record", {"type": "object", "propertyNames": {"type": "string", "enum":
        ["r", "g"]}, "additionalProperties": {"type": "number"}, "required": ["r", "g"]},
        ('{"r":1,"g":2}',), ("{}", '{"r":1}', '{"r":1,"g":2,"b":3}')),
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
    Row("nothing is valid", {"type": "object", "properties": {"a": {"enum": []}}}, ("{}",),
        ('{"a":1}',)),
    Row("escaped letters", {"type": "string"}, ('"caf\\u00e9 \\ud83d\\ude00"',), ("1",)),
    Row("what says nothing", {"type": "object", "uniqueItems": False, "propertyNames": {"type":
        "string"}, "unevaluatedProperties": True, "format": "regex"}, ('{"a":1}',), ("1",)),
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
def test_only_valid_texts_are_accepted(row: Row, strict: bool) -> None:
    assert (strict_schema(row.schema).unsupported if strict else rules_of(row.schema).dropped) == ()
    for text in row.valid:
        assert is_valid(row.schema, json.loads(text))
        assert accepted(row.schema, text, strict=strict), text
        for indent in (None, 2):
            pretty = json.dumps(json.loads(text), ensure_ascii=False, indent=indent)
            assert accepted(row.schema, pretty, strict=strict), pretty
    for text in row.invalid:
        assert text == "x" or not is_valid(row.schema, json.loads(text)), text
        fits = (
            text != "x" and not strict and is_valid(always_enforced(row.schema), json.loads(text))
        )
        assert accepted(row.schema, text, strict=strict) == fits, text


NULLABLE = {"type": "string", "nullable": True}
NULLABLES = [
    (of(a=NULLABLE), ('{"a":null}', '{"a":"x"}'), ('{"a":1}', "{}", "null")),
    ({**of(a=NULLABLE), "nullable": True}, ('{"a":null}',), ("null",)),
    (of(a={**NULLABLE, "enum": ["x"]}), ('{"a":null}', '{"a":"x"}'), ('{"a":"y"}',)),
    (of(a={**NULLABLE, "nullable": False}), ('{"a":"x"}',), ('{"a":null}',)),
    ({"type": "array", "items": NULLABLE}, ('["x",null]',), ("[1]", "null")),
    ({**of(a={"allOf": [{"$ref": "#/$defs/b"}], "nullable": True}), "$defs": {"b": of(nullable=
        NULLABLE)}}, ('{"a":null}', '{"a":{"nullable":null}}'), ('{"a":{}}', '{"a":"x"}')),
    ({**of(a={"$ref": "#/$defs/b"}), "$defs": {"b": NULLABLE}}, ('{"a":null}',), ('{"a":1}',)),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), NULLABLES)
def test_nullable_value_may_be_null(
    schema: dict[str, Any], valid: tuple[str, ...], invalid: tuple[str, ...]
) -> None:
    """``nullable`` is a keyword of OpenAPI 3.0, not of JSON Schema; the prompt shows it, too."""
    assert strict_schema(schema).unsupported == ()
    assert [text for text in valid if not accepted(schema, text)] == []
    assert [text for text in invalid if accepted(schema, text)] == []


# --- the tools of agents, as libraries write them ---


def check(
    shape: Shape, dialect: Dialect, chance: random.Random, most: int, *, ordered: bool
) -> None:
    """Check that the grammar accepts what the schema allows, with and without ``strict``: a value
    that fits ``shape``, and at most ``most`` changed ones. ``ordered``: changed values that still
    fit have their members in the schema's order.
    """
    schema = schema_of(shape, dialect)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert strict_schema(schema, of_object=True).unsupported == ()
    assert rules_of(schema, of_object=True).dropped == ()
    is_exact = ordered and '"format"' not in json.dumps(schema)  # an annotation without strict
    value = fitting(shape, dialect, chance)
    assert is_valid(schema, value)
    assert accepted(schema, json.dumps(value, ensure_ascii=False), strict=True), value
    assert accepted(schema, respelled(value, chance)), value
    others = [*changed(value)]
    for other in chance.sample(others, min(len(others), most)):
        accepts = accepted(schema, json.dumps(other, ensure_ascii=False), strict=True)
        assert accepts == is_valid(schema, other) or not (accepts or is_exact), (schema, other)
        fits = is_valid(always_enforced(schema), other)
        assert accepted(schema, respelled(other, chance)) == fits, (schema, other)


@pytest.mark.nightly(sample=14)
@pytest.mark.once
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("name", SHAPES)
def test_schema_of_agent_tool_is_enforced(name: str, dialect: Dialect) -> None:
    chance = random.Random(f"{name} {dialect.name}")
    for _ in range(1 if FEW else 3):
        check(SHAPES[name], dialect, chance, 10, ordered=True)


@pytest.mark.once
@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32))
def test_only_valid_values_are_accepted(seed: int) -> None:
    chance = random.Random(seed)
    shape = {"v": drawn(chance), "w?": drawn(chance)}
    check(shape, chance.choice(DIALECTS), chance, 3, ordered=False)


def test_shapes_and_dialects_give_hundreds_of_schemas() -> None:
    assert (
        len(
            {
                json.dumps(schema_of(shape, dialect))
                for shape in SHAPES.values()
                for dialect in DIALECTS
            }
        )
        > 350
    )


def test_required_name_is_reached_after_invented_ones() -> None:
    schema = of(a={"type": "integer"})
    others = {str(number): None for number in range(200)}
    assert accepted(schema, json.dumps({"a": 1, **others}))
    assert accepted(schema, json.dumps({**dict(list(others.items())[:64]), "a": 1, "b": 2}))
    assert not accepted(schema, json.dumps({**others, "a": 1}))
    assert accepted({"type": "object"}, json.dumps(others))


def test_white_space_is_bounded() -> None:
    most = any_order.MAX_WHITE_SPACE
    for count, fits in ((most, True), (most + 1, False)):
        space = (" \t\r\n" * most)[:count]
        for text in (f"{{{space}}}", f'{{"a":{space}1}}', f'{{"a"{space}:1}}', f"{{}}{space}"):
            assert accepted({"type": "object"}, text) == fits, text
    accepted_strictly = partial(
        accepted, {"type": "object", "additionalProperties": {}}, strict=True
    )
    assert accepted_strictly('{\n          "a": 1\r\n}')
    assert not accepted_strictly("{" + " " * 100 + "}")
    assert not accepted_strictly("{\n\n}")


# --- without strict: other spellings of the same value ---

NEVER = {
    "type": "object",
    "properties": {"v": {"$ref": "#/$defs/never"}, "w": {"$ref": "#/$defs/list"}},
    "$defs": {
        "never": of(x={"$ref": "#/$defs/list"}, y=False),
        "list": {"type": "array", "items": {"$ref": "#/$defs/never"}},
    },
}

SPELLINGS = [
    Row("a schema that no value fits and that refers to itself", NEVER, ("{}", '{"w":[]}'),
        ('{"w":[{"x":[],"y":1}]}', '{"v":{"x":[]}}', '{"w":[1]}')),
    Row("integers", {"type": "integer"},
        ("1", "-0", "1.0", "1e3", "1E+03", "1.50e1", "100e-2", "-2.5e1", "0e-9", "12345678901e0",
         "9" * 400, "9" * 100 + "e200", "1.5E308", "7.0", *(f"9.5e+{n}" for n in range(1, 308))),
        ("1.5", "1e-1", "15e-1", "1.25e1", "01", "1.", "+1", "1e", "1e400", "9" * 101 + "E210",
         "9" * 400 + ".0", "9" * 400 + "0e-1", "9" * 300 + ".5e20")),
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
    Row("others between", {**of(a={"type": "null"}, b={"type": "null"}), "additionalProperties":
        {"type": "integer"}}, ('{"x":1,"b":null,"y":2,"a":null,"z":3}', '{"b":null,"a":null}'),
        ('{"x":1,"b":null}', '{"x":null,"a":null,"b":null}', '{"a":null,"b":null,}')),
]  # fmt: skip


@pytest.mark.parametrize("row", SPELLINGS, ids=lambda row: row.id)
def test_every_spelling_is_accepted(row: Row) -> None:
    assert rules_of(row.schema).dropped == ()
    assert [text for text in row.valid if not accepted(row.schema, text)] == []
    assert [text for text in row.invalid if accepted(row.schema, text)] == []
    assert all(is_valid(row.schema, json.loads(text)) for text in row.valid)


@pytest.mark.parametrize("text", ['"\\ud83d"', '"\\udc00\\ud83dx"', '"\\/"', '"\x7f"', '"\u2028"'])
def test_escapes_of_json_parsers_are_accepted(text: str) -> None:
    json.loads(text)
    assert accepted({"type": "string"}, text)
    assert accepted({}, text)
    assert accepted({"type": "object"}, f"{{{text}: {text}}}")
    assert not (text.startswith('"\\ud') and accepted({"type": "string"}, text, strict=True)), (
        "half"
    )


# --- what cannot be enforced ---


# fmt: off
UNENFORCED: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "minimum": ({"type": "integer", "minimum": 1}, "0", ()),
    "maximum": ({"type": "number", "exclusiveMaximum": 1}, "1.0", ()),
    "multipleOf": ({"type": "integer", "multipleOf": 999_999_937}, "3", ()),
    "listed numbers": ({"enum": [1, 2]}, "3", ()),
    "listed objects": ({"const": {"a": 1}}, '{"b": 2}', ()),
    "maxLength": ({"type": "string", "maxLength": 2}, '"abc"', ()),
    "pattern": ({"type": "string", "pattern": r"^(\s*\S+){1,300}$"}, '""', ()),
    "look-around": ({"type": "string", "pattern": "^(?!x)"}, '"x"', ("pattern",)),
    "format": ({"type": "string", "format": "date"}, '"today"', ()),
    "minItems": ({"type": "array", "minItems": 1}, "[]", ()),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "[1, 1]", ("uniqueItems",)),
    "contains": ({"type": "array", "contains": {"type": "null"}}, "[]", ("contains",)),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a": 1, "b": 2}', ()),
    "minProperties": ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties":
        2}, "{}", ("minProperties",)),
    "patterns of names": ({"patternProperties": {"^a": {"type": "null"}}}, '{"a": 1}', ()),
    "overlapping patterns": ({"patternProperties": {"^a": {}, "b$": False}}, '{"ab": 1}',
        ("patternProperties",)),
    "names of a pattern": ({"propertyNames": {"pattern": "^a", "maxLength": 3}}, '{"b": 1}',
        ("propertyNames",)),
    "listed names of a length": ({"propertyNames": {"enum": ["a", "bb"], "minLength": 2}},
        '{"a": 1}', ("propertyNames",)),
    "names, not": ({"propertyNames": {"not": {"const": "a"}}}, '{"a": 1}', ("not",)),
    "names of one of two": ({"propertyNames": {"anyOf": [{"const": "a"}, {"enum": ["b", "c"]}]}},
        "", ("propertyNames",)),
    "too many names": ({"propertyNames": {"enum": [f"n{n}" for n in range(201)]}}, "",
        ("propertyNames",)),
    "unevaluatedProperties": ({"properties": {"a": {}}, "unevaluatedProperties": False}, '{"b":1}',
        ("unevaluatedProperties",)),
    "not": ({"not": {"type": "null"}}, "null", ("not",)),
    "if": ({"if": {"type": "string"}, "then": {"const": "a"}}, '"b"', ("if", "then")),
    "more than one of": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1", ("oneOf",)),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, '{"a": 1}', ("dependentRequired",)),
    "foreign": ({"$ref": "https://example.com/schema"}, "", ("a $ref that leads nowhere",)),
    "malformed": ({"type": "str"}, "", ("a malformed type",)),
    "no schema": ({"properties": {"a": 3}}, "", ("a schema that is neither object nor boolean",)),
}
# fmt: on
"""What is not enforced without ``strict``, as docs/semantics.md lists it: a schema, an invalid
text, and why the schema is refused with ``strict``."""

UNREADABLE = {"foreign", "malformed", "no schema"}
"""These become notes; keywords that only ``strict`` enforces do not."""


@pytest.mark.parametrize("case", UNENFORCED)
def test_keywords_that_only_strict_enforces(case: str) -> None:
    schema, invalid, refused = UNENFORCED[case]
    wrapped = {"type": "object", "properties": {"v": schema, "w": {"type": "integer"}}}
    turn = Turn((User("Hi."),), tools=(Tool("lookup", parameters=wrapped),))
    grammar = next(weakenings(turn, Names.of(turn)))
    assert not grammar.trials
    assert len(grammar.notes) == (case in UNREADABLE)
    assert all("'lookup'" in note and refused[0] in note for note in grammar.notes)
    if invalid:
        assert not is_valid(schema, json.loads(invalid))
        assert accepted(wrapped, f'{{"v":{invalid}}}')
    assert not accepted(wrapped, '{"w":"x"}')  # the rest is enforced
    assert strict_schema(schema).unsupported == refused
    if refused:
        with pytest.raises(RequestError, match=rf"'lookup'.*{re.escape(refused[0])}") as raised:
            grammar_of(turn, Names.of(turn), Policy.STRICT)
        assert raised.value.param == "tools"


@pytest.mark.parametrize("prefill", [None, "{"])
def test_trials_lead_to_the_parts_of_a_client(prefill: str | None) -> None:
    schema = of(a={"type": "integer"})
    tools = (
        Tool("strict", parameters=schema, strict=True),
        Tool("relaxed", parameters=schema),
        Tool("freeform", syntax=Syntax("lark", 'start: "a"')),
    )
    turn = Turn((User("Hi."),), tools, response_format=ResponseFormat(schema, strict=True))
    turn = replace(turn, prefill=prefill)
    grammar = next(weakenings(turn, Names.of(turn)))
    headers = ["final", "commentary to=functions.strict", "commentary to=functions.freeform"]
    starts = [f"<|channel|>{header}<|message|>" for header in headers]
    assert [*map(vocab.encoding().decode, grammar.trials)] == ([prefill] if prefill else starts)
    for trial in grammar.trials:
        assert all(map(compile_grammar(grammar).matcher().consume, () if prefill else trial))


def test_strict_schema_without_values_or_too_large_is_rejected() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(400):
        deep = of(a=deep)
    too_large = ("a schema that is too large",)
    assert strict_schema(deep).unsupported == too_large
    assert strict_schema(of(**{name: {} for name in MANY[:10_500]})).unsupported == too_large
    assert strict_schema({"enum": []}).unsupported == ("enum",)


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
    **{f"{word} twice": {"propertyNames": (ref := {"$ref": "#/$defs/d0"}), **ref, "oneOf": [ref] *
        2, "$defs": chain(60, lambda ref, word=word: {word: [ref] * 2})["$defs"]}
        for word in ("anyOf", "allOf")},
}  # fmt: skip


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("case", ENDLESS)
def test_adversarial_schema_is_read_in_bounded_time(case: str) -> None:
    """Schemas are read in the server's process, which a slow ``re`` pattern would block."""
    rules = rules_of(ENDLESS[case])
    assert rules.size <= any_order.MAX_TEXT
    strict_schema(ENDLESS[case], check=lambda _: "")


def test_strict_properties_come_in_shown_order() -> None:
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
    assert accepted(schema, json.dumps(dict.fromkeys(order, 1)), strict=True)
    backwards = json.dumps(dict.fromkeys(reversed(order), 1))
    assert not accepted(schema, backwards, strict=True)
    assert accepted(schema, backwards)


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
    "a tuple of an older draft": ({"type": "array", "items": [{"type": "string"}],
        "additionalItems": {"type": "integer"}}, "[string, ...number[]]",
        ("[]", '["a"]', '["a",1]'), ("[1]", '["a","b"]')),
    "a reference that leads nowhere": ({"$ref": "#/$defs/x", "type": "null"}, "null",
        ("null",), ("1",)),
}  # fmt: skip


@pytest.mark.parametrize("case", SHOWN)
def test_shown_types_match_enforced_types(case: str) -> None:
    schema, shown, valid, invalid = SHOWN[case]
    assert type_of(schema).text() == shown
    assert all(accepted(schema, text) for text in valid)
    assert not any(accepted(schema, text) for text in invalid)


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
def test_any_schema_has_a_grammar(schema: dict[str, Any]) -> None:
    turn = turn_with_format(schema)
    grammar = grammar_of(turn, Names.of(turn))
    assert grammar is not None
    compile_grammar(grammar)
    strict_schema(schema, check=lambda _: "")


DEEP = {
    **{name: schema for name, schema in SCHEMAS.items() if "references" in name},
    "objects, all of them members": {
        **(deep := chain(2000, lambda ref: {**OBJECT, "properties": {"n": ref}})),
        "properties": {f"a{n}": {"$ref": f"#/$defs/d{n}"} for n in range(2000)},
    },
    "anyOf that branches": chain(4500, lambda ref: {"anyOf": [ref, ref, {"const": 1}]}),
    "a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [
        {"$ref": "#/$defs/a"}, {"type": "object"}]}}},
    "a long enumeration": of(v={"enum": [f"value number {n}" for n in range(5000)]}),
}  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize("case", DEEP)
def test_deep_or_large_schema_becomes_a_note(case: str) -> None:
    tool = Tool("lookup", parameters=DEEP[case])
    turn = Turn((User("Hi."),), tools=(tool,))
    grammar = grammar_of(turn, Names.of(turn))
    assert grammar is not None
    assert len(grammar.notes) == 1 and "'lookup'" in grammar.notes[0]
    assert len(grammar.text) < 300_000
    matcher = compile_grammar(grammar).matcher()
    call = "<|channel|>commentary to=functions.lookup<|message|>{"
    assert all(map(matcher.consume, ids_of(call)))


@pytest.mark.nightly(sample=2)
@pytest.mark.once
@pytest.mark.parametrize(("count", "parameters"), [(500, 30), (1500, 2)])
def test_many_tools_are_weakened_not_rejected(count: int, parameters: int) -> None:
    kind = {"type": "string"}
    properties = [{f"p_{n}_{at}": kind for at in range(parameters)} for n in range(count)]
    tools = tuple(Tool(f"t{n}", parameters=of(**fields)) for n, fields in enumerate(properties))
    turn = Turn((User("Hi."),), tools=tools)
    grammar = grammar_of(turn, Names.of(turn))
    assert grammar is not None
    assert all("any JSON object" in note for note in grammar.notes)
    assert len(grammar.notes) < count - 20
    call = "<|channel|>commentary to=functions.t%d<|message|>{}<|call|>"
    new_matcher = compile_grammar(grammar).matcher
    sampled = range(0, count, 100)
    weakened = {n for n in sampled if all(map(new_matcher().consume, ids_of(call % n)))}
    noted = {number for number in range(count) if any(f"'t{number}'" in n for n in grammar.notes)}
    assert weakened == {number for number in noted if number % 100 == 0}
    assert bool(weakened) == bool(noted)


def test_largest_schemas_are_weakened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """First as many as are needed to make the rest fit; then all of them."""
    monkeypatch.setattr(language, "MAX_SCHEMAS", 2_000)
    properties = [{f"p{n}_{at}": {} for at in range(9 - n)} for n in range(6)]
    tools = tuple(Tool(f"t{n}", parameters=of(**fields)) for n, fields in enumerate(properties))
    turn = Turn((User("Hi."),), tools=tools)
    ladder = [*weakenings(turn, Names.of(turn))]
    noted = [[note.split(":")[0].split("'")[1] for note in grammar.notes] for grammar in ladder]
    six = [f"t{n}" for n in range(6)]
    assert noted == [six[: len(noted[0])], six, six]
    assert 0 < len(noted[0]) < 6
    assert all("any JSON object" in note for grammar in ladder[:-1] for note in grammar.notes)
    assert all("(anything is accepted)" in note for note in ladder[-1].notes)
    for grammar in ladder:
        compile_grammar(grammar)


# --- the JSON Schema test suite ---

SUITE: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("json_schema_suite.json").read_text()
)
"""Draft 2020-12 of https://github.com/json-schema-org/JSON-Schema-Test-Suite at 44401e0, without
`$schema` and without what needs other documents. MIT: LICENSE-json-schema-suite.txt."""


def with_integers(value: Any) -> Any:
    """``value`` with ``1`` for ``1.0``: an integer, too, but the grammar does not accept it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [with_integers(item) for item in value] if isinstance(value, list) else value


def in_some_order(value: Any) -> Iterator[Any]:
    """``value`` with up to five properties in every order; the grammar accepts the schema's."""
    if not isinstance(value, dict) or len(value) > 5:
        yield value
    else:
        yield from map(dict, permutations(value.items()))


@pytest.mark.parametrize("keyword", sorted({case["keyword"] for case in SUITE}))
def test_json_schema_suite_is_enforced(keyword: str) -> None:
    """Without ``strict`` in any order and spelling; with it in the schema's order only."""
    for case in SUITE:
        if case["keyword"] != keyword:
            continue
        schema = case["schema"]
        chance = random.Random(case["description"])
        is_enforceable = not strict_schema(schema).unsupported
        for description, value, valid in case["tests"]:
            where = f"{case['description']}: {description}"
            text = respelled(value, chance)
            # `always_enforced` drops the definitions inside keywords that are not enforced.
            is_whole = "example.com" not in json.dumps(schema) and not rules_of(schema).dropped
            if valid or is_whole:
                fits = valid or is_valid(always_enforced(schema), value)
                assert accepted(schema, text) == fits, (where, text)
            if is_enforceable:
                texts = map(
                    partial(json.dumps, ensure_ascii=False), in_some_order(with_integers(value))
                )
                assert (
                    any(accepted(schema, spelling, strict=True) for spelling in texts) == valid
                ), where
