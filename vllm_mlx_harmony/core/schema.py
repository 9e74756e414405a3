"""Reads JSON Schema, for the prompt and for the grammar.

What the model is shown (`core.typescript`) and what it is held to (`core.grammar`) are two views of
one copy of a schema, which `SchemaReader` makes keyword by keyword: a keyword that is malformed, or
a ``$ref`` that leads nowhere, is in neither. Each ``$ref`` refers to a definition at the root, and
the tuples of drafts before 2020-12 are written as since then.

llguidance (https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md) supports most
of draft 2020-12, and rejects a schema that has any other keyword. So for a grammar:

- Annotations and unknown keywords are left out silently.
- OpenAPI's ``nullable`` becomes an ``anyOf`` with null, since the prompt shows it that way. The
  root is an exception: the prompt shows no null there.
- Malformed and unsupported keywords are dropped, and listed. Without them a schema only ever
  accepts more.

`grammar.strict` passes such a copy to llguidance, `grammar.any_order` makes rules of its own from
it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias
from urllib.parse import unquote

from vllm_mlx_harmony.core.text_limits import clean, levels

Schema: TypeAlias = dict[str, Any]
"""A schema other than ``true`` and ``false``."""

AnySchema: TypeAlias = Schema | bool

MAX_DEPTH = 100
"""Schemas within schemas; a deeper one accepts anything. Reading and rewriting are recursive: some
200 levels exceed Python's limit."""

MAX_SCHEMAS = 10_000
"""Schemas that are read of one, in some 50 ms. The rest accept anything."""


class _References:
    """What each ``$ref`` in the document ``root`` refers to."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._identified: dict[str, object] | None = None

    def target(self, ref: str) -> object:
        """The value at a JSON pointer (RFC 6901), or with this ``$anchor`` or ``$id``; ``None`` if
        there is none."""
        if ref.startswith("#/"):
            return _at(self._root, ref)
        if self._identified is None:
            self._identified = {"#": self._root}
            for value in islice(chain.from_iterable(levels(self._root)), MAX_SCHEMAS):
                if isinstance(value, dict):
                    if isinstance(value.get("$anchor"), str):
                        self._identified.setdefault(f"#{value['$anchor']}", value)
                    if isinstance(value.get("$id"), str):
                        self._identified.setdefault(value["$id"], value)
        return self._identified.get(ref)


def _at(root: object, ref: str) -> object:
    """The value at the JSON pointer ``#/a/b`` in ``root``, or ``None``."""
    value = root
    for part in ref[2:].split("/"):
        step = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and re.fullmatch(r"[0-9]{1,6}", step):
            value = value[int(step)] if int(step) < len(value) else None
        else:
            return None
    return value


class _Malformed(Exception):
    """The content of a keyword has the wrong type or value."""


def _require(content: Any, is_well_formed: bool) -> Any:
    if not is_well_formed:
        raise _Malformed
    return content


class SchemaReader:
    """Copies one schema. What a ``$ref`` refers to becomes a definition of its own at the root.

    ``dropped`` has the keywords that are not in the copy, in order. The copy is bounded in depth
    and size. With ``annotations`` it has those that the prompt shows, as they are.
    """

    def __init__(self, root: object, *, annotations: bool = False) -> None:
        self._root = root
        self._annotations = ANNOTATIONS if annotations else ()
        self._left = MAX_SCHEMAS
        self._definitions: dict[str, str] = {}
        self._waiting: list[tuple[str, object]] = []
        self._references = _References(root)
        self.dropped: dict[str, None] = {}

    def drop(self, what: str) -> None:
        """Notes that ``what`` is not enforced."""
        self.dropped[what] = None

    def read(self) -> tuple[AnySchema, dict[str, AnySchema]]:
        """The copy, and the definitions to which its references ``#/$defs/…`` refer."""
        copy = self.schema(self._root)
        definitions: dict[str, AnySchema] = {}
        while self._waiting:
            name, target = self._waiting.pop()
            definitions[name] = self.schema(target)
        return copy, definitions

    def root(self, of_object: bool) -> Schema:
        """The copy for a grammar, with its definitions."""
        copy, definitions = self.read()
        if isinstance(copy, bool):
            copy = {} if copy else {"not": {}}
        if of_object and copy.get("type") != "object":
            copy = {"type": "object", **copy}
        return {**copy, "$defs": definitions} if definitions else copy

    def schema(  # noqa: C901 - one case per keyword
        self, value: object, depth: int = 0
    ) -> AnySchema:
        self._left -= 1
        if isinstance(value, bool):
            return value
        if not isinstance(value, Mapping):
            self.drop("a schema that is neither object nor boolean")
            return True
        if depth >= MAX_DEPTH or self._left < 0:
            self.drop("a schema that is too large")
            return True
        copy: Schema = {}
        items = list(value.items())
        if "patternProperties" not in value:  # see `strict` on patterns
            # llguidance asks for properties in the order of keywords. The prompt shows those of
            # these keywords first (`core.typescript`).
            first = ("anyOf", "oneOf", "$ref", "allOf")
            items.sort(key=lambda item: first.index(item[0]) if item[0] in first else len(first))
        renamed: Mapping[str, str] = _SINCE_2020 if isinstance(value.get("items"), list) else {}
        for written, content in items:
            key = renamed.get(written, written)
            if key in self._annotations:
                copy[key] = content
                continue
            if written in _MEANINGLESS and content in _MEANINGLESS[written]:
                continue
            if key == "format" and content not in FORMATS:
                continue
            if key in UNSUPPORTED:
                self.drop(key)
            elif key in KEYWORDS:
                try:
                    copy[key] = KEYWORDS[key](self, content, depth + 1)
                except _Malformed:
                    is_lost = key == "$ref"
                    self.drop("a $ref that leads nowhere" if is_lost else f"a malformed {written}")
        is_nullable = value.get("nullable") is True and "nullable" not in copy
        if is_nullable and value is not self._root:
            return {"anyOf": [copy, {"type": "null"}]}
        return copy

    # One method for each kind of content, which returns the copy.

    def plain(self, content: object, _: int) -> object:
        return content

    def number(self, content: object, _: int) -> object:
        return _require(content, isinstance(content, (int, float)))

    def count(self, content: object, _: int) -> object:
        if isinstance(content, float) and content.is_integer():
            content = int(content)
        return _require(content, isinstance(content, int) and content >= 0)

    def pattern(self, content: object, _: int) -> str:
        return _without_nul(clean(_require(content, isinstance(content, str))))

    def texts(self, content: object, _: int) -> list[str]:
        names = _require(content, isinstance(content, list))
        texts = [clean(name) for name in names if isinstance(name, str)]
        if len(texts) < len(names):
            self.drop("a malformed required")
        return texts

    def values(self, content: object, _: int) -> object:
        return _require(content, isinstance(content, list))

    def types(self, content: object, _: int) -> object:
        names = [content] if isinstance(content, str) else content
        is_known = isinstance(names, list) and all(name in TYPES for name in names)
        return _require(content, bool(names) and is_known)

    def subschemas(self, content: object, depth: int) -> list[AnySchema]:
        branches = _require(content, isinstance(content, list) and bool(content))
        return [self.schema(branch, depth) for branch in branches]

    def named(self, content: object, depth: int) -> dict[str, AnySchema]:
        schemas = _require(content, isinstance(content, Mapping))
        return {clean(str(name)): self.schema(schema, depth) for name, schema in schemas.items()}

    def patterned(self, content: object, depth: int) -> dict[str, AnySchema]:
        named = self.named(content, depth)
        return {_without_nul(pattern): schema for pattern, schema in named.items()}

    def reference(self, content: object, _: int) -> str:
        ref = str(_require(content, isinstance(content, str)))
        if ref == "#":
            return ref
        if ref not in self._definitions:
            target = self._references.target(ref)
            name = f"d{len(self._definitions)}"
            self._waiting.append((name, _require(target, target is not None)))
            self._definitions[ref] = name
        return f"#/$defs/{self._definitions[ref]}"


def _without_nul(pattern: str) -> str:
    """``pattern``, with U+0000 excluded by every negated class.

    llguidance 1.9 accepts a quote for ``[^"]``, and a backslash for ``[^\\]``, if the class allows
    U+0000.
    """
    return _NEGATED.sub(lambda at: at[0] + (r"\x00" if at[0] == "[^" else ""), pattern)


_NEGATED = re.compile(r"\\.|\[\^", re.DOTALL)


def cache_key(schema: Mapping[str, object], of_object: bool, tenant: str) -> str | None:
    """A key for what is made of ``schema``; ``None`` if that is not JSON. It has the ``tenant``, so
    that no timing reveals another tenant's tools."""
    try:
        return json.dumps([tenant, of_object, schema], separators=(",", ":"))
    except (RecursionError, TypeError, ValueError):
        return None


# --- what a copy says ---

MAX_FOLLOWED = 64
"""References in a row."""

KINDS: Mapping[str, tuple[str, ...]] = {
    "null": ("null",),
    "boolean": ("true", "false"),
    "integer": ("integer",),
    "number": ("integer", "fraction"),
    "string": ("string",),
    "array": ("array",),
    "object": ("object",),
}
"""The kinds of values of each type."""

TYPES = (*KINDS,)


def resolve(ref: str, root: Schema) -> AnySchema:
    """What ``ref`` refers to in the copy ``root``: the root, or one of its definitions."""
    schema: AnySchema = root if ref == "#" else root["$defs"][ref.removeprefix("#/$defs/")]
    return schema


def followed(schema: AnySchema, root: Schema) -> AnySchema:
    """``schema``, or what it refers to if it is nothing but a reference."""
    for _ in range(MAX_FOLLOWED):
        if isinstance(schema, bool) or schema.keys() - {"$defs"} != {"$ref"}:
            break
        schema = resolve(schema["$ref"], root)
    return schema


def literals(schema: Schema) -> list[Sequence[object]]:
    """The lists of values of which one of each is allowed."""
    lists: list[Sequence[object]] = [[schema["const"]]] if "const" in schema else []
    return [*lists, schema["enum"]] if "enum" in schema else lists


def kinds(schema: Schema) -> set[str]:
    """The kinds of values that the types and literals of ``schema`` allow."""
    named = schema.get("type", [*KINDS])
    names = [named] if isinstance(named, str) else named
    allowed = {kind for name in names for kind in KINDS[name]}
    return allowed.intersection(*({*map(_kind, values)} for values in literals(schema)))


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (int, float)):
        return "integer" if value % 1 == 0 else "fraction"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


# --- keywords ---

FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
"""The formats that are enforced. Others are annotations, as JSON Schema allows for any format."""

KEYWORDS: Mapping[str, Callable[[SchemaReader, object, int], object]] = {
    "propertyNames": SchemaReader.schema,
    "pattern": SchemaReader.pattern,
    "oneOf": SchemaReader.subschemas,
    "patternProperties": SchemaReader.patterned,
    "minProperties": SchemaReader.count,
    "maxProperties": SchemaReader.count,
    "multipleOf": SchemaReader.number,
    "format": SchemaReader.plain,
    "minLength": SchemaReader.count,
    "maxLength": SchemaReader.count,
    "minimum": SchemaReader.number,
    "maximum": SchemaReader.number,
    "exclusiveMinimum": SchemaReader.number,
    "exclusiveMaximum": SchemaReader.number,
    "minItems": SchemaReader.count,
    "maxItems": SchemaReader.count,
    "const": SchemaReader.plain,
    "enum": SchemaReader.values,
    "allOf": SchemaReader.subschemas,
    "required": SchemaReader.texts,
    "anyOf": SchemaReader.subschemas,
    "$ref": SchemaReader.reference,
    "type": SchemaReader.types,
    "properties": SchemaReader.named,
    "additionalProperties": SchemaReader.schema,
    "items": SchemaReader.schema,
    "prefixItems": SchemaReader.subschemas,
}
"""How the content of each supported keyword is copied; the likeliest to be rejected come first."""

_SINCE_2020 = {"items": "prefixItems", "additionalItems": "items"}
"""The names that two keywords have since draft 2020-12, if ``items`` is a list."""

ANNOTATIONS = ("title", "description", "examples", "default", "format", "nullable")
"""What the prompt shows beside the keywords."""

UNSUPPORTED = frozenset(
    {
        "not",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
        "unevaluatedProperties",
        "dependentRequired",
        "if",
        "then",
        "else",
        "dependentSchemas",
        "dependencies",
        "$dynamicRef",
        "$recursiveRef",
    }
)
"""Keywords of any draft that llguidance does not have."""

_MEANINGLESS: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "not": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "additionalItems": (True, {}),
}
"""Contents with which a keyword has no effect."""
