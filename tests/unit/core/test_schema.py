"""Semantics A9, row by row: a schema on the left, the type that is printed on the right."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sizes import examples

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import AdditionalTools, Tool, Turn, User
from vllm_mlx_harmony.core.typescript import MAX_DEPTH, Type, declaration, parameters, type_of
from vllm_mlx_harmony.core.vocab import clean


def printed(argument: Type | None) -> str:
    """The type of a tool that takes ``argument``."""
    return declaration("t", "", argument).removeprefix("type t = ").removesuffix(";\n")


def printed_property(schema: object, **around: object) -> str:
    """What is printed for the property ``p`` with this schema."""
    closed = {"type": "object", "properties": {"p": schema}, "additionalProperties": False}
    whole = printed(type_of({**closed, **around}))
    return whole.removeprefix("(_: {\n").removesuffix("}) => any").removesuffix("\n")


NODE = {
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/Node"}, "n": {"type": "integer"}},
        },
        "name": {"type": "string", "description": "A name."},
        "a/b~c d": {"type": "boolean"},
        "anchored": {"$anchor": "it", "type": "boolean"},
        "identified": {"$id": "https://example.com/it", "type": "integer"},
        "ping": {"$ref": "#/$defs/pong"},
        "pong": {"$ref": "#/$defs/ping"},
    },
    "definitions": {"Old": {"type": "number"}},
}

PROPERTIES: dict[str, tuple[object, str]] = {
    # types
    "string": ({"type": "string"}, "p?: string,"),
    "number": ({"type": "number"}, "p?: number,"),
    "integer": ({"type": "integer"}, "p?: number,"),
    "boolean": ({"type": "boolean"}, "p?: boolean,"),
    "null": ({"type": "null"}, "p?: null,"),
    "any": ({}, "p?: any,"),
    "true": (True, "p?: any,"),
    "false": (False, ""),
    "unknown type": ({"type": "quaternion"}, "p?: any,"),
    "type of the wrong type": ({"type": 7}, "p?: any,"),
    "type list": ({"type": ["string", "integer"]}, "p?: string | number,"),
    "type list, one TypeScript type": ({"type": ["number", "integer"]}, "p?: number,"),
    "type list with null": ({"type": ["string", "null"]}, "p?: string | null,"),
    "type list with two and null": (
        {"type": ["string", "integer", "null"]},
        "p?: string | number | null,",
    ),
    "type list keeps properties": (
        {"type": ["object", "null"], "properties": {"a": {"type": "string"}}},
        "p?: {\n    a?: string,\n    } | null,",
    ),
    "type list with an array": (
        {"type": ["string", "array"], "items": {"type": "string"}},
        "p?:\n | string\n | string[]\n,",
    ),
    "OpenAPI's nullable": ({"type": "string", "nullable": True}, "p?: string | null,"),
    # values
    "string enum": ({"type": "string", "enum": ["a", "b"]}, 'p?: "a" | "b",'),
    "string enum without type": ({"enum": ["a"]}, 'p?: "a",'),
    "number enum": ({"type": "integer", "enum": [1, 2]}, "p?: 1 | 2,"),
    "boolean enum": ({"enum": [True, False]}, "p?: true | false,"),
    "mixed enum": ({"enum": ["a", 1.5, None, {"k": []}]}, 'p?: "a" | 1.5 | {"k": []} | null,'),
    "enum with quotes": ({"enum": ['say "hi"', "a\nb"]}, r'p?: "say \"hi\"" | "a\nb",'),
    "enum that spells null": ({"enum": ["nullable", None]}, 'p?: "nullable" | null,'),
    "enum of null": ({"enum": [None]}, "p?: null,"),
    "enum of nothing": ({"enum": []}, ""),
    "enum with default": (
        {"type": "string", "enum": ["a", "b"], "default": "a"},
        'p?: "a" | "b", // default: a',
    ),
    "enum of the wrong type": ({"type": "string", "enum": "a"}, "p?: string,"),
    "const": ({"const": "a"}, 'p?: "a",'),
    "const number": ({"type": "integer", "const": 3}, "p?: 3,"),
    "const null": ({"const": None}, "p?: null,"),
    # defaults
    "default string": ({"type": "string", "default": "x"}, 'p?: string, // default: "x"'),
    "default false": ({"type": "boolean", "default": False}, "p?: boolean, // default: false"),
    "default null": (
        {"type": ["string", "null"], "default": None},
        "p?: string | null, // default: null",
    ),
    "default object": (
        {"type": "object", "default": {"a": [1, "é"]}},
        'p?: object, // default: {"a":[1,"é"]}',
    ),
    "default of two lines": (
        {"type": "string", "default": "a\nb"},
        r'p?: string, // default: "a\nb"',
    ),
    "default no JSON has": (
        {"type": "number", "default": float("inf")},
        'p?: number, // default: "a number beyond 64 bits"',
    ),
    "default beyond 64 bits": (
        {"type": "number", "default": 10**400},
        'p?: number, // default: "a number beyond 64 bits"',
    ),
    # comments
    "description": ({"type": "string", "description": "It."}, "// It.\np?: string,"),
    "description of two lines": (
        {"type": "string", "description": "One.\nTwo.\r\nThree.\u2028Four."},
        "// One.\n// Two.\n// Three.\n// Four.\np?: string,",
    ),
    "empty description": ({"type": "string", "description": ""}, "p?: string,"),
    "description of the wrong type": ({"type": "string", "description": ["x"]}, "p?: string,"),
    "title": ({"type": "string", "title": "A\nB"}, "// A\n// B\n//\np?: string,"),
    "examples": (
        {"type": "string", "examples": ["a\nb", 3]},
        '// Examples:\n// - "a\\nb"\np?: string,',
    ),
    "format": (
        {"type": "string", "format": "date-time", "description": "When."},
        "// When.\n// format: date-time\np?: string,",
    ),
    "lone surrogates": (
        {"type": "string", "description": "\ud800", "default": "\udfff"},
        '// \ufffd\np?: string, // default: "\ufffd"',
    ),
    "surrogate pair": ({"description": "\ud83d\ude00"}, "// 😀\np?: any,"),
    # unions
    "anyOf": (
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "p?:\n | string\n | number\n,",
    ),
    "oneOf": (
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        "p?:\n | string\n | number\n,",
    ),
    "anyOf with null": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "p?: string | null,"),
    "anyOf of two and null": (
        {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "integer"}]},
        "p?:\n | string\n | number\n | null\n,",
    ),
    "anyOf with any": ({"anyOf": [{"type": "string"}, {}]}, "p?: any,"),
    "anyOf with false": ({"anyOf": [{"type": "string"}, False]}, "p?: string,"),
    "anyOf of one twice": ({"anyOf": [{"type": "string"}, {"type": "string"}]}, "p?: string,"),
    "anyOf of two with one TypeScript type": (
        {"anyOf": [{"type": "integer"}, {"type": "number"}, {"items": {"type": "integer"}}]},
        "p?:\n | number\n | number[]\n,",
    ),
    "null in a union in a union, described with null": (
        {
            "anyOf": [
                {"type": ["string", "null"], "description": "Or null."},
                {"type": "integer"},
            ]
        },
        "p?:\n | string // Or null.\n | number\n | null\n,",
    ),
    "anyOf of nothing": ({"type": "string", "anyOf": []}, "p?: string,"),
    "anyOf in anyOf": (
        {"anyOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "integer"}]},
        "p?:\n | string\n | number\n | null\n,",
    ),
    "anyOf of constants": (
        {
            "type": "string",
            "oneOf": [{"const": "a", "description": "Ä\nÖ"}, {"const": "b", "default": "b"}],
        },
        'p?:\n | "a" // Ä Ö\n | "b" // default: b\n,',
    ),
    "anyOf that only restricts": (
        {"type": "string", "anyOf": [{"pattern": "a"}, {"minLength": 1}]},
        "p?: string,",
    ),
    "descriptions of a union and its variants": (
        {
            "description": "Whole.",
            "anyOf": [
                {"type": "string", "description": "First."},
                {"type": "integer", "description": "Second."},
            ],
        },
        "// Whole.\n// First.\np?:\n | string\n | number // Second.\n,",
    ),
    "equal descriptions of a union and its first variant": (
        {
            "description": "It.",
            "anyOf": [{"type": "string", "description": "It."}, {"type": "integer"}],
        },
        "// It.\np?:\n | string\n | number\n,",
    ),
    "descriptions of an optional and its type": (
        {
            "description": "Outer.",
            "anyOf": [{"type": "string", "description": "Inner."}, {"type": "null"}],
        },
        "// Outer.\n// Inner.\np?: string | null,",
    ),
    "description of a union in a union": (
        {
            "anyOf": [
                {"type": "boolean"},
                {"description": "Id.", "anyOf": [{"type": "string"}, {"type": "integer"}]},
            ]
        },
        "p?:\n | boolean\n | string // Id.\n | number\n,",
    ),
    "union of objects": (
        {
            "anyOf": [
                {"type": "object", "properties": {"a": {"type": "string", "description": "A."}}},
                {"properties": {"b": {"type": "string"}}, "required": ["b"]},
            ]
        },
        "p?:\n | {\n   // A.\n   a?: string,\n   }\n | {\n   b: string,\n   }\n,",
    ),
    "object with variants": (
        {
            "properties": {"a": {"type": "string"}},
            "anyOf": [
                {"properties": {"b": {"type": "string"}}},
                {"properties": {"b": {"type": "integer"}}, "required": ["a"]},
            ],
        },
        "p?: {\n    b?:\n     | string\n     | number\n    ,\n    a?: string,\n    },",
    ),
    "nullable where null already reads": (
        {
            "anyOf": [
                {"type": "object", "properties": {"a": {"type": ["string", "null"]}}},
                {"type": "null"},
            ]
        },
        "p?:\n | {\n   a?: string | null,\n   }\n | null\n,",
    ),
    "nullable object described with null": (
        {
            "description": "May be null.",
            "type": ["object", "null"],
            "properties": {"a": {"type": "string"}},
        },
        "// May be null.\np?:\n | {\n   a?: string,\n   }\n | null\n,",
    ),
    # allOf
    "allOf": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"properties": {"b": {"type": "string"}}, "required": ["b"]},
            ],
            "properties": {"c": {"type": "string"}},
        },
        "p?: {\n    a: string,\n    b: string,\n    c?: string,\n    },",
    ),
    "allOf of one reference": (
        {"allOf": [{"$ref": "#/$defs/name"}], "description": "Mine.", "default": "x"},
        '// Mine.\np?: string, // default: "x"',
    ),
    "allOf with a shared property": (
        {
            "allOf": [
                {"properties": {"a": {"type": "string"}}},
                {"properties": {"a": {"description": "A.", "enum": ["x"]}}},
                {"properties": {"a": {"default": "x"}}},
            ]
        },
        'p?: {\n    // A.\n    a?: "x", // default: x\n    },',
    ),
    "allOf with the same property": (
        {"allOf": [{"properties": {"a": {"enum": [1]}}}, {"properties": {"a": {"enum": [1]}}}]},
        "p?: {\n    a?: 1,\n    },",
    ),
    # references
    "reference": ({"$ref": "#/$defs/name"}, "// A name.\np?: string,"),
    "reference with description": (
        {"$ref": "#/$defs/name", "description": "His."},
        "// His.\np?: string,",
    ),
    "reference to definitions": ({"$ref": "#/definitions/Old"}, "p?: number,"),
    "reference with escapes": ({"$ref": "#/$defs/a~1b~0c%20d"}, "p?: boolean,"),
    "reference into a list": ({"$ref": "#/x-list/1"}, "p?: string,"),
    "recursive reference": (
        {"$ref": "#/$defs/Node"},
        "p?: {\n    next?: any,\n    n?: number,\n    },",
    ),
    "reference to an anchor": ({"$ref": "#it"}, "p?: boolean,"),
    "reference to an identifier": ({"$ref": "https://example.com/it"}, "p?: number,"),
    "recursive reference to the root": ({"$ref": "#"}, "p?: any,"),
    "references in a circle": ({"$ref": "#/$defs/ping"}, "p?: any,"),
    "reference to nothing": ({"$ref": "#/$defs/none"}, "p?: any,"),
    "reference into nothing": ({"$ref": "#/x-list/7/a"}, "p?: any,"),
    "reference elsewhere": ({"$ref": "https://example.org/x.json"}, "p?: any,"),
    "reference of the wrong type": ({"$ref": 7, "type": "string"}, "p?: string,"),
    "the same reference twice": (
        {"properties": {"a": {"$ref": "#/$defs/name"}, "b": {"$ref": "#/$defs/name"}}},
        "p?: {\n    // A name.\n    a?: string,\n    // A name.\n    b?: string,\n    },",
    ),
    # arrays
    "array": ({"type": "array"}, "p?: Array<any>,"),
    "array of strings": ({"type": "array", "items": {"type": "string"}}, "p?: string[],"),
    "array of arrays": (
        {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "p?: number[][],",
    ),
    "array without type": ({"items": {"type": "string"}}, "p?: string[],"),
    "array of an enum": (
        {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        'p?: ("a" | "b")[],',
    ),
    "array of one value": ({"type": "array", "items": {"const": "a"}}, 'p?: "a"[],'),
    "array of two types": (
        {"type": "array", "items": {"type": ["string", "integer"]}},
        "p?: (string | number)[],",
    ),
    "array of nullables": (
        {"type": "array", "items": {"type": ["string", "null"]}},
        "p?: (string | null)[],",
    ),
    "array of an array of a union": (
        {"items": {"items": {"anyOf": [{"type": "string"}, {"items": {"type": "number"}}]}}},
        "p?: (string | number[])[][],",
    ),
    "array of objects": (
        {
            "type": "array",
            "description": "List.",
            "items": {
                "type": "object",
                "description": "One.",
                "properties": {"k": {"type": "string", "description": "Key."}},
            },
        },
        "// List.\np?:     // One.\n{\n    // Key.\n    k?: string,\n    }[],",
    ),
    "array of described items": (
        {"type": "array", "description": "Ids.", "items": {"type": "string", "description": "Id."}},
        "// Ids.\n// Id.\np?: string[],",
    ),
    "array of different objects": (
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"properties": {"a": {"const": 1}}},
                    {"properties": {"b": {"type": "string"}}},
                ]
            },
        },
        "// Items of these types may be mixed.\np?:\n | {\n   a?: 1,\n   }[]\n"
        " | {\n   b?: string,\n   }[]\n,",
    ),
    "nullable array of different objects": (
        {
            "type": ["array", "null"],
            "items": {"anyOf": [{"properties": {"a": {}}}, {"type": "string"}]},
        },
        "// Items of these types may be mixed.\np?:\n | {\n   a?: any,\n   }[]\n"
        " | string[]\n | null\n,",
    ),
    "nullable array": (
        {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "p?: string[] | null,",
    ),
    "tuple": (
        {"prefixItems": [{"type": "string"}, {"type": ["number", "null"]}], "items": False},
        "p?: [string, number | null],",
    ),
    "tuple with more": (
        {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}},
        "p?: [string, ...number[]],",
    ),
    "tuple of draft 4": ({"items": [{"type": "string"}, {}]}, "p?: [string, any],"),
    "tuple of draft 4 with more": (
        {"items": [{"type": "string"}], "additionalItems": {"type": "integer"}},
        "p?: [string, ...number[]],",
    ),
    "tuple of draft 4 with anything": (
        {"items": [{"type": "string"}], "additionalItems": True},
        "p?: [string],",
    ),
    "tuple with an object": (
        {"prefixItems": [{"type": "string"}, {"properties": {"a": {"type": "string"}}}]},
        "// Items of these types may be mixed.\np?:\n | string[]\n | {\n   a?: string,\n   }[]\n,",
    ),
    # objects
    "object": ({"type": "object"}, "p?: object,"),
    "object with nothing": ({"type": "object", "additionalProperties": False}, "p?: {\n    },"),
    "nested objects": (
        {"properties": {"a": {"properties": {"b": {"type": "string"}}, "required": ["b"]}}},
        "p?: {\n    a?: {\n        b: string,\n        },\n    },",
    ),
    "map": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        "p?: {\n    [key: string]: number,\n    },",
    ),
    "map of anything": (
        {"type": "object", "additionalProperties": True},
        "p?: {\n    [key: string]: any,\n    },",
    ),
    "properties and more": (
        {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
        "p?: {\n    a?: string,\n    [key: string]: number,\n    },",
    ),
    "properties and anything": (
        {"properties": {"a": {"type": "string"}}, "additionalProperties": True},
        "p?: {\n    a?: string,\n    },",
    ),
    "listed names": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", 'b"']},
            "additionalProperties": {"type": "number"},
        },
        'p?: {\n    [key in "a" | "b\\""]?: number,\n    },',
    ),
    "listed names, all required": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "propertyNames": {"allOf": [{"type": "string"}, {"enum": ["a", "b", 1]}]},
            "additionalProperties": {"type": "number"},
            "required": ["b"],
        },
        'p?: {\n    a?: string,\n    [key in "b"]: number,\n    },',
    ),
    "no name at all": (
        {"type": "object", "propertyNames": False, "additionalProperties": {"type": "number"}},
        "p?: object,",
    ),
    "names of a form": (
        {"propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "number"}},
        "p?: {\n    [key: string]: number,\n    },",
    ),
    "pattern properties": (
        {"patternProperties": {"^x-": {"type": "string"}}},
        "p?: {\n    [key: string]: string,\n    },",
    ),
    "names": (
        {"properties": {"$a": {}, "b-c": {}, "d e": {}, "f?": {}, "é": {}, "": {}, 'g"\n': {}}},
        'p?: {\n    $a?: any,\n    b-c?: any,\n    "d e"?: any,\n    "f?"?: any,\n'
        '    é?: any,\n    ""?: any,\n    "g\\"\\n"?: any,\n    },',
    ),
    "required name in quotes": (
        {"properties": {"a b": {"type": "string"}}, "required": ["a b", 7]},
        'p?: {\n    "a b": string,\n    },',
    ),
    "a property named like a keyword": (
        {"properties": {"$ref": {"type": "string"}, "type": {"type": "string"}}},
        "p?: {\n    $ref?: string,\n    type?: string,\n    },",
    ),
    "properties of the wrong type": ({"type": "object", "properties": ["a"]}, "p?: object,"),
    "not a schema": ("string", "p?: any,"),
}


@pytest.mark.parametrize(("schema", "expected"), PROPERTIES.values(), ids=PROPERTIES.keys())
def test_property_is_printed_as_type(schema: object, expected: str) -> None:
    around = {**NODE, "x-list": [{}, {"type": "string"}]}
    assert printed_property(schema, **around) == expected


@pytest.mark.parametrize(("schema", "_"), PROPERTIES.values(), ids=PROPERTIES.keys())
def test_schema_is_not_modified(schema: object, _: str) -> None:
    whole = {**NODE, "type": "object", "properties": {"p": schema}}
    before = copy.deepcopy(whole)
    type_of(whole)
    assert whole == before


def test_required_is_printed_without_question_mark() -> None:
    assert printed_property({"type": "string"}, required=["p"]) == "p: string,"


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {},
        {"$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {}, "additionalProperties": False, "required": []},
        {"type": ["object", "null"]},
    ],
    ids=json.dumps,
)
def test_schema_without_properties_has_no_parameters(schema: dict[str, Any] | None) -> None:
    assert parameters(Tool("t", "", schema)) is None


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (
            {"properties": {"a": {"type": "string"}}},
            "(_: {\na?: string,\n}) => any",
        ),
        (
            {"type": ["object", "null"], "properties": {"a": {"type": "string"}}},
            "(_: {\na?: string,\n}) => any",
        ),
        (
            {"type": "dict", "properties": {"a": {"type": "string"}}},
            "(_: {\na?: string,\n}) => any",
        ),
        (
            {"type": "object", "additionalProperties": True},
            "(_: {\n[key: string]: any,\n}) => any",
        ),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"$ref": "#/$defs/A"}}}}},
            "(_: {\na?: any,\n}) => any",
        ),
        (
            {"description": "x\ny", "properties": {"a": {"type": "string"}}},
            "(_: // x\n// y\n{\na?: string,\n}) => any",
        ),
        (
            {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
            "(_: \n | {\n   a?: any,\n   }\n | {\n   b?: any,\n   }) => any",
        ),
        (
            {
                "description": "Either.",
                "anyOf": [{"items": {}, "description": "A."}, {"type": "object"}],
            },
            "(_: \n | any[] // A.\n | object) => any",
        ),
    ],
)
def test_parameters_are_printed_as_type(schema: dict[str, Any], expected: str) -> None:
    assert printed(parameters(Tool("t", "", schema))) == expected


@pytest.mark.parametrize(
    "schema",
    ["{}", [], 7, True, False, {"type": "string"}, {"type": "array", "items": {}}],
    ids=repr,
)
def test_error_of_parameters_without_object_names_the_tool(schema: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parameters(Tool("weather", "", schema, where="tools[2]"))
    assert caught.value.param == "tools[2]"
    assert caught.value.status == 400
    assert "'weather'" in caught.value.message


def nested(depth: int, kind: str) -> dict[str, Any]:
    """A schema of ``depth`` levels of this kind."""
    around = {
        "properties": lambda inner: {"type": "object", "properties": {"a": inner}},
        "items": lambda inner: {"type": "array", "items": inner},
        "anyOf": lambda inner: {"anyOf": [inner, {"type": "null"}, {"properties": {"b": inner}}]},
        "allOf": lambda inner: {"allOf": [{"properties": {"a": inner}}, inner], "description": "x"},
        "default": lambda inner: {"type": "object", "default": {"a": [inner]}},
        "prefixItems": lambda inner: {"prefixItems": [inner, inner]},
        "widened": lambda inner: {
            "properties": {"a": inner},
            "anyOf": [{"properties": {"a": inner}}],
        },
    }[kind]
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = around(schema)
    return schema


KINDS = ["properties", "items", "anyOf", "allOf", "default", "prefixItems", "widened"]


@pytest.mark.once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH, 1_000, 20_000])
def test_deep_schemas_are_cut_not_rejected(kind: str, depth: int) -> None:
    whole = type_of({"type": "object", "properties": {"p": nested(depth, kind)}})
    assert printed(whole).startswith("(_: ")


def test_depth_up_to_limit_is_kept() -> None:
    whole = type_of(nested(MAX_DEPTH - 1, "properties"))
    assert printed(whole).count("a?: ") == MAX_DEPTH - 1
    assert "string" in printed(whole)


def test_references_that_multiply_are_bounded() -> None:
    defs = {
        f"d{n}": {"properties": {key: {"$ref": f"#/$defs/d{n + 1}"} for key in "abcd"}}
        for n in range(20)
    }
    text = printed(type_of({"$ref": "#/$defs/d0", "$defs": defs}))
    assert text.count(": any") < 4_000
    assert text.count("\n") < 20_000


def test_many_variants_of_one_property_stay_shallow() -> None:
    parts = [{"properties": {"p": {"enum": [n]}}} for n in range(1_500)]
    assert printed(type_of({"allOf": parts})) == "(_: {\np?: 1499,\n}) => any"


# Mostly keywords: values that are nearly schemas, with anything in the wrong place.
KEYWORDS = [
    "type", "enum", "const", "properties", "required", "items", "prefixItems", "anyOf", "oneOf",
    "allOf", "$ref", "$defs", "additionalProperties", "patternProperties", "description", "title",
    "default", "examples", "format", "nullable", "a",
]  # fmt: skip
WORDS = ["string", "integer", "object", "array", "null", "#", "#/$defs/a", "#/properties/a", "a"]
TEXT = st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=()), max_size=6)
# Of up to 15 digits: openai-harmony's own JSON parser reads some longer ones a digit off.
FLOATS = st.integers(-(10**9), 10**9).map(lambda n: n / 64) | st.sampled_from(
    [float("nan"), float("inf"), float("-inf"), -0.0]
)
SCALARS = st.none() | st.booleans() | st.integers() | FLOATS | TEXT
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYWORDS) | TEXT, inner, max_size=5)
    ),
    max_leaves=40,
)


@given(JSON)
@example({"type": ["null"], "default": float("nan")})
@example({"properties": {"\ud800": {"enum": ["\ud800"]}}, "required": ["\ud800"]})
@example({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#"}]}}})
@settings(max_examples=examples(300), deadline=None)
def test_any_json_value_has_a_type(value: object) -> None:
    before = copy.deepcopy(value)
    text = printed(type_of(value))
    assert repr(value) == repr(before)
    assert text.endswith("=> any")
    assert text.encode()


@given(JSON)
@settings(max_examples=examples(150), deadline=None)
def test_property_stays_on_its_lines(value: object) -> None:
    """Whatever its schema contains, the next property is printed on a line of its own."""
    whole = type_of({"type": "object", "properties": {"p": value, "end": {"type": "string"}}})
    lines = printed(whole).splitlines()
    assert lines[-2:] == ["end?: string,", "}) => any"]


@given(st.text(st.characters(exclude_categories=()), max_size=20))
def test_every_line_of_a_description_is_a_comment(text: str) -> None:
    lines = printed_property({"type": "string", "description": text}).split("\n")
    assert lines[-1] == "p?: string,"
    assert all(line.startswith("//") for line in lines[:-1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "a"),
        ("é", "é"),
        ("\ud800", "\ufffd"),
        ("\ud83d\ude00", "😀"),
        ("a\udc00é", "a\ufffdé"),
    ],
)
def test_lone_surrogates_are_replaced(text: str, expected: str) -> None:
    assert clean(text) == expected


# --- Bounds: short schemas that stand for long texts


def param_of_refusal(*tools: Tool) -> str | None:
    with pytest.raises(RequestError) as caught:
        render(Turn((User("?"),), tools))
    assert "too large" in caught.value.message
    return caught.value.param


def referring(target: object, count: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"p{at}": {"$ref": "#/$defs/a"} for at in range(count)},
        "$defs": {"a": target},
    }


def tree(depth: int, leaf: object) -> dict[str, Any]:
    """Two references to the next level, on each."""
    levels: dict[str, Any] = {
        str(at): {"properties": {side: {"$ref": f"#/$defs/{at + 1}"} for side in "ab"}}
        for at in range(depth)
    }
    return {"type": "object", "$ref": "#/$defs/0", "$defs": {**levels, str(depth): leaf}}


LONG_TEXT = {"type": "string", "description": "word " * 2_000}
TOO_LARGE: dict[str, dict[str, Any]] = {
    "references to a long description": referring(LONG_TEXT, 2_000),
    "a tree of references": tree(11, LONG_TEXT),
    "references to a long enum": referring({"enum": ["value"] * 2_000}, 2_000),
    "references to a long default": referring({"default": {"a": ["value"] * 2_000}}, 2_000),
    "references to a long list": referring({"required": ["value"] * 2_000}, 2_000),
    "references to long names": referring({"properties": {"n" * 10_000: {}}}, 2_000),
    "a long title that is not ASCII": referring({"title": "é" * 10_000}, 2_000),
}


@pytest.mark.once
@pytest.mark.parametrize("parameters", TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_tools_with_too_large_schemas_are_rejected(parameters: dict[str, Any]) -> None:
    small = Tool("a", parameters=referring({"type": "string"}, 2), where="tools[0]")
    assert param_of_refusal(small, Tool("b", parameters=parameters, where="tools[1]")) == "tools[1]"


def test_sizes_of_tools_add_up() -> None:
    schema = referring(LONG_TEXT, 20)
    tools = [Tool(f"t{at}", parameters=schema, where=f"tools[{at}]") for at in range(20)]
    assert param_of_refusal(*tools) == "tools[5]"  # read and printed: each counts
    render(Turn((User("?"),), tuple(tools[:5])))


def test_size_of_later_tools_counts() -> None:
    """Also if they are cached from another request."""
    schema = referring(LONG_TEXT, 20)
    later = [
        AdditionalTools((Tool(f"t{at}", parameters=schema, where=f"input[{at}].tools[0]"),))
        for at in range(8)
    ]
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            render(Turn((User("?"), *later)))
        assert "too large" in caught.value.message
        assert caught.value.param == "input[5].tools[0]"
    render(Turn((User("?"), *later[:5])))


def test_size_of_descriptions_counts() -> None:
    text = "word " * 300_000
    tools = [Tool(name, text, where=f"tools.{name}") for name in "ab"]
    assert param_of_refusal(*tools) == "tools.b"


@pytest.mark.once
def test_size_of_many_small_schemas_counts() -> None:
    schema = referring({"type": "string"}, 3_000)
    tools = [Tool(f"t{at}", parameters=schema, where=f"tools[{at}]") for at in range(20)]
    assert param_of_refusal(*tools) is not None
