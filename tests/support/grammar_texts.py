"""Schemas and grammars that are meant to kill a server, or to use up its time or memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]


def chain(length: int, link: Callable[[Schema], Schema]) -> Schema:
    """An object with one property, whose schema is ``length`` references long; each but the last
    definition is ``link`` of a reference to the next one."""
    definitions = {f"d{index}": link({"$ref": f"#/$defs/d{index + 1}"}) for index in range(length)}
    definitions[f"d{length}"] = {"type": "string"}
    first = {"$ref": "#/$defs/d0"}
    return {"type": "object", "properties": {"x": first}, "$defs": definitions}


def multiple_of(divisor: int) -> Schema:
    """An object with one integer."""
    integer = {"type": "integer", "multipleOf": divisor}
    return {"type": "object", "properties": {"x": integer}}


def pattern(regex: str) -> Schema:
    """An object with one string."""
    return {"type": "object", "properties": {"x": {"type": "string", "pattern": regex}}}


def rules(length: int, first: str = '"a" ') -> str:
    """A Lark grammar of rules each naming the next."""
    lines = [f"start: r0\nr{length}: /b/"]
    lines += [f"r{index}: {first}r{index + 1}" for index in range(length)]
    return "\n".join(lines)


def terminals(levels: int, width: int) -> str:
    """A Lark grammar whose terminals name the one below them ``width`` times."""
    lines = [f"start: T{levels}", 'T0: "a"']
    lines += [f"T{level}: {' '.join([f'T{level - 1}'] * width)}" for level in range(1, levels + 1)]
    return "\n".join(lines)


NULL, OBJECT = {"type": "null"}, {"type": "object"}

SCHEMAS: dict[str, Schema] = {
    "700 references of oneOf": chain(700, lambda ref: {"oneOf": [ref, NULL]}),
    "3500 references of objects": chain(3_500, lambda ref: {"properties": {"x": ref}, **OBJECT}),
    "9000 references": chain(9_000, lambda ref: ref),
    "4500 references of allOf": chain(4_500, lambda ref: {"allOf": [ref]}),
    "4500 references of anyOf": chain(4_500, lambda ref: {"anyOf": [ref, NULL]}),
    "multiples of 99999989": multiple_of(99_999_989),
    "multiples of a year's seconds": multiple_of(31_536_000),
    "multiples of 2^24": multiple_of(2**24),
    "multiples of 2^30": multiple_of(2**30),
    "multiples of 999999937": multiple_of(999_999_937),
}
"""Each of them killed a server or filled its memory with llguidance 1.9."""

LARK: dict[str, str] = {
    "5000 rules": rules(5_000),
    "5000 rules without text": rules(5_000, ""),
    "terminals, 9 levels of 8": terminals(9, 8),
    "terminals, 7 levels of 8": terminals(7, 8),
    "terminals, 20 levels of 2": terminals(20, 2),
}
"""The same for the syntax of a freeform tool or of an answer."""


def grammar(schema: Schema) -> str:
    """A grammar of texts that are valid for ``schema``."""
    return json.dumps({"grammars": [{"json_schema": schema}]})
