"""JSON Schema, reduced to what llguidance accepts.

llguidance (https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md) supports most
of draft 2020-12, and rejects a schema that has any other keyword. So a schema is copied keyword by
keyword (`SchemaReader`):

- Annotations and unknown keywords are left out silently.
- Keywords about the names of properties are rewritten (`property_names`).
- OpenAPI's ``nullable`` becomes an ``anyOf`` with null, since the prompt shows it that way. The
  root is an exception: the prompt shows no null there.
- Malformed and unsupported keywords are dropped, and listed. Without them a schema only ever
  accepts more.

`unordered` makes its rules from such a copy. `strict_schema` passes it to llguidance's ``%json``,
which may still reject it: for a pattern with look-around, say, or a ``oneOf`` with branches that
overlap. A strict schema is enforced completely or not at all, so it only remains to find the
keyword that the error names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.grammar import property_names
from vllm_mlx_harmony.core.grammar.property_names import AnySchema, Schema
from vllm_mlx_harmony.core.typescript import pointed
from vllm_mlx_harmony.core.vocab import clean

MAX_DEPTH = 100
MAX_SCHEMAS = 10_000
CACHE_BYTES = 8 * 2**20

_WHITE_SPACE = r"\r?\n[ \t]{0,80}|[ \t]{1,4}"
"""Between two JSON tokens: a line end with its indentation, or some blanks; at most once."""

_ESCAPES = "json_allow_general_unicode_escapes"
_OPTIONS: Mapping[str, Any] = {"whitespace_pattern": _WHITE_SPACE, _ESCAPES: True}
_SPACED = json.dumps(_OPTIONS, separators=(",", ":"))[1:-1]

Check: TypeAlias = "Callable[[str], str]"
"""Returns why llguidance rejects a grammar, in one line; an empty string if it accepts it.

It may ask another process, so a call is expensive."""


def compile_error(grammar: str) -> str:
    """The `Check` that compiles the grammar in this process."""
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(grammar).partition("\n")[0]


def with_compact_json(grammar: str) -> str:
    """``grammar`` for a remote engine with llguidance 1.7, without white space between JSON tokens.

    That version lacks the option for escapes, and it lets the white space pattern match any number
    of times in a row: a model that loops there never ends.
    """
    return grammar.replace(_SPACED, '"whitespace_flexible":false')


@dataclass(frozen=True, slots=True)
class StrictSchema:
    """A schema as JSON for ``%json``, or the keywords that cannot be enforced."""

    text: str
    unsupported: tuple[str, ...] = ()


_cache: lru.ByteLRU[str, StrictSchema] = lru.ByteLRU(CACHE_BYTES)


def strict_schema(
    schema: Mapping[str, Any],
    *,
    of_object: bool = False,
    tenant: str = "",
    check: Check = compile_error,
) -> StrictSchema:
    """``schema`` for ``%json``, with an empty text if not all of it can be enforced.

    With ``of_object`` it describes an object even if it does not say so. Keywords that the reader
    does not support are reported before those that llguidance rejects. Never raises. Cached per
    ``tenant``, since every turn of a conversation asks for it.
    """
    try:
        key = json.dumps([tenant, of_object, schema], separators=(",", ":"))
    except (RecursionError, TypeError, ValueError):
        return StrictSchema("", ("a schema that is not JSON",))
    found = _cache.get(key)
    if found is None:
        reader = SchemaReader(schema)
        copy = reader.root(of_object)
        rewritten, inexact = property_names.rewrite(copy, lambda one: _is_rejected(one, check))
        unsupported = tuple(dict.fromkeys([*reader.dropped, *inexact]))
        if not unsupported and _is_rejected(rewritten, check):
            unsupported = _rejected_keywords(copy, check)
        found = StrictSchema("" if unsupported else _json_text(rewritten, check), unsupported)
        _cache.put(key, found, 2 * (len(key) + len(found.text)) + 512)
    return found


def _is_rejected(schema: Schema, check: Check) -> bool:
    with_options = {"x-guidance": _OPTIONS, **schema}
    return bool(check(json.dumps({"grammars": [{"json_schema": with_options}]})))


def _json_text(schema: Schema, check: Check) -> str:
    """``schema``, which is not rejected, with the options for white space and escapes."""
    options = _OPTIONS
    if property_names.can_be_escaped(schema):
        unescaped = property_names.with_pattern_properties(schema)
        if unescaped is None or _is_rejected(unescaped, check):
            options = {**_OPTIONS, **property_names.NO_ESCAPES}
        else:
            schema = unescaped
    return json.dumps({"x-guidance": options, **schema}, separators=(",", ":"))


def _rejected_keywords(copy: Schema, check: Check) -> tuple[str, ...]:
    """The keywords for which llguidance rejects ``copy``; a single one if that is enough."""
    used = {keyword for schema in property_names.schemas(copy) for keyword in schema}
    present = [one for one in _KEYWORDS if one in used and one not in _NEVER_REJECTED]
    attempts = [[one] for one in present] + [present[:end] for end in range(2, len(present) + 1)]
    for keywords in attempts:
        remaining = property_names.without(copy, keywords)
        rewritten, _ = property_names.rewrite(remaining, lambda one: _is_rejected(one, check))
        if not _is_rejected(rewritten, check):
            return tuple(keywords)
    return ("the schema as a whole",)


# --- copying: any JSON value -> known, well-formed keywords ---


class _Malformed(Exception):
    """The content of a keyword has the wrong type or value."""


def _checked(content: Any, is_well_formed: bool) -> Any:
    if not is_well_formed:
        raise _Malformed
    return content


class SchemaReader:
    """Copies one schema. What a ``$ref`` refers to becomes a definition of its own at the root.

    ``dropped`` has the keywords that are not in the copy, in order. The copy is bounded in depth
    and size.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = MAX_SCHEMAS
        self._definitions: dict[str, str] = {}
        self._waiting: list[tuple[str, Callable[[], AnySchema]]] = []
        self._identified: dict[str, object] | None = None
        self.dropped: dict[str, None] = {}

    def drop(self, what: str) -> None:
        """Notes that ``what`` is not enforced."""
        self.dropped[what] = None

    def root(self, of_object: bool) -> Schema:
        """The copy of the whole schema."""
        copy = self.schema(self._root)
        if isinstance(copy, bool):
            copy = {} if copy else {"not": {}}
        if of_object and copy.get("type") != "object":
            copy = {"type": "object", **copy}
        definitions: dict[str, AnySchema] = {}
        while self._waiting:
            name, copied = self._waiting.pop()
            definitions[name] = copied()
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
        if "patternProperties" not in value:  # see `property_names` on patterns
            # llguidance asks for properties in the order of keywords. The prompt shows those of
            # these keywords first (`core.typescript`).
            first = ("anyOf", "oneOf", "$ref", "allOf")
            items.sort(key=lambda item: first.index(item[0]) if item[0] in first else len(first))
        for key, content in items:
            if key in _MEANINGLESS and content in _MEANINGLESS[key]:
                continue
            if key == "format" and content not in FORMATS:
                continue
            if key in _UNSUPPORTED:
                self.drop(key)
            elif key in _KEYWORDS:
                try:
                    copy[key] = _KEYWORDS[key](self, content, depth + 1)
                except _Malformed:
                    what = "a $ref that leads nowhere" if key == "$ref" else f"a malformed {key}"
                    self.drop(what)
        if value.get("nullable") is True and value is not self._root:
            return {"anyOf": [copy, {"type": "null"}]}
        return copy

    # One method for each kind of content, which returns the copy.

    def plain(self, content: object, _: int) -> object:
        return content

    def number(self, content: object, _: int) -> object:
        return _checked(content, isinstance(content, (int, float)))

    def count(self, content: object, _: int) -> object:
        if isinstance(content, float) and content.is_integer():
            content = int(content)
        return _checked(content, isinstance(content, int) and content >= 0)

    def pattern(self, content: object, _: int) -> str:
        return _without_nul(clean(_checked(content, isinstance(content, str))))

    def texts(self, content: object, _: int) -> list[str]:
        names = _checked(content, isinstance(content, list))
        return [clean(_checked(each, isinstance(each, str))) for each in names]

    def values(self, content: object, _: int) -> object:
        return _checked(content, isinstance(content, list))

    def types(self, content: object, _: int) -> object:
        names = [content] if isinstance(content, str) else content
        is_known = isinstance(names, list) and all(name in TYPES for name in names)
        return _checked(content, bool(names) and is_known)

    def subschemas(self, content: object, depth: int) -> list[AnySchema]:
        branches = _checked(content, isinstance(content, list) and bool(content))
        return [self.schema(each, depth) for each in branches]

    def items(self, content: object, depth: int) -> object:
        is_prefix = isinstance(content, list)  # in drafts before 2020-12
        return self.subschemas(content, depth) if is_prefix else self.schema(content, depth)

    def named(self, content: object, depth: int) -> dict[str, AnySchema]:
        found = _checked(content, isinstance(content, Mapping))
        return {clean(str(name)): self.schema(each, depth) for name, each in found.items()}

    def patterned(self, content: object, depth: int) -> dict[str, AnySchema]:
        named = self.named(content, depth)
        return {_without_nul(pattern): each for pattern, each in named.items()}

    def reference(self, content: object, _: int) -> str:
        if content == "#":
            return "#"
        ref = str(_checked(content, isinstance(content, str)))
        target = self.target(ref)
        return self.definition(ref, partial(self.schema, _checked(target, target is not None)))

    def one_of(self, content: object, depth: int) -> list[AnySchema]:
        """llguidance can tell that two objects exclude each other, but not through references. So
        branches that are references become a definition in which they are expanded."""
        if isinstance(content, list) and any(map(_is_reference, content)):
            copied = partial(self.inlined, content)
            return [{"$ref": self.definition(json.dumps(content), copied)}]
        return self.subschemas(content, depth)

    def inlined(self, branches: Sequence[Any]) -> Schema:
        copies = []
        for each in branches:
            target = self.target(each["$ref"]) if _is_reference(each) else None
            if isinstance(target, Mapping) and each.get("nullable") is True:
                target = {**target, "nullable": True}
            copies.append(self.schema(each if target is None else target))
        return {"oneOf": copies}

    def definition(self, key: str, copied: Callable[[], AnySchema]) -> str:
        """A reference to the definition that ``key`` identifies and ``copied`` makes, later."""
        if key not in self._definitions:
            self._definitions[key] = f"d{len(self._definitions)}"
            self._waiting.append((self._definitions[key], copied))
        return f"#/$defs/{self._definitions[key]}"

    def target(self, ref: str) -> object:
        """What ``ref`` refers to: a JSON pointer, an ``$anchor`` or an ``$id``."""
        if ref.startswith("#/"):
            return pointed(self._root, ref)
        if self._identified is None:
            self._identified = {}
            waiting: list[object] = [self._root]
            for _ in range(MAX_SCHEMAS):
                if not waiting:
                    break
                value = waiting.pop()
                if isinstance(value, Mapping):
                    if isinstance(value.get("$anchor"), str):
                        self._identified[f"#{value['$anchor']}"] = value
                    if isinstance(value.get("$id"), str):
                        self._identified[value["$id"]] = value
                    waiting += value.values()
                elif isinstance(value, list):
                    waiting += value
        return self._identified.get(ref)


def _is_reference(schema: object) -> bool:
    """Whether ``schema`` consists of a ``$ref``."""
    if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
        return False
    return all(key == "$ref" or key not in {*_KEYWORDS, *_UNSUPPORTED} for key in schema)


def _without_nul(pattern: str) -> str:
    """``pattern``, with U+0000 excluded by every negated class.

    llguidance 1.9 accepts a quote for ``[^"]``, and a backslash for ``[^\\]``, if the class allows
    U+0000.
    """
    return _NEGATED.sub(lambda at: at[0] + (r"\x00" if at[0] == "[^" else ""), pattern)


_NEGATED = re.compile(r"\\.|\[\^", re.DOTALL)

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")

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

_KEYWORDS: Mapping[str, Callable[[SchemaReader, object, int], object]] = {
    **dict.fromkeys(property_names.KEYWORDS, SchemaReader.schema),
    "pattern": SchemaReader.pattern,
    "oneOf": SchemaReader.one_of,
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
    "items": SchemaReader.items,
    "prefixItems": SchemaReader.subschemas,
    "additionalItems": SchemaReader.schema,
}
"""How the content of each supported keyword is copied; the likeliest to be rejected come first."""

_NEVER_REJECTED = frozenset({"type", "properties", "additionalProperties"})
_NEVER_REJECTED |= {"items", "prefixItems", "additionalItems"}

EVALUATING_NOTHING = frozenset(
    {
        "not",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
        "dependentRequired",
    }
)
"""Unsupported keywords that evaluate no properties: ``unevaluatedProperties`` stays exact without
them."""

_UNSUPPORTED = EVALUATING_NOTHING | {
    "if",
    "then",
    "else",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
}
"""Keywords of any draft that llguidance does not have."""

_MEANINGLESS: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "not": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "additionalItems": (True, {}),
}
"""Contents with which a keyword has no effect."""
