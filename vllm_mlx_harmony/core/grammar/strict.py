r"""A strict schema as llguidance's ``%json`` enforces it: completely, or not at all.

A schema that `SchemaReader` has copied may still be rejected by llguidance: for a pattern with
look-around, say, or a ``oneOf`` with branches that overlap. Then it only remains to find the
keyword that the error names. What llguidance does not have is rewritten before.

**oneOf** becomes ``anyOf`` if its branches obviously exclude each other: by their types, by their
constants, or by those of a property that both require. llguidance sees that, too, but not through
references.

**propertyNames and unevaluatedProperties.** Both are equivalent to one more member of ``allOf``: an
object with certain ``properties`` and ``patternProperties``, and an ``additionalProperties``.

- ``propertyNames`` is supported if it lists the names (``enum``). Each becomes a property with any
  value, and no others are allowed.
- ``unevaluatedProperties`` applies to the names that no other keyword of the same object has
  evaluated (https://json-schema.org/draft/2020-12/json-schema-core, 11.3). It is supported beside
  ``allOf`` and ``$ref``, but not beside branches, of which each evaluates names of its own.

**Escaped names.** JSON may write ``a`` as ``\u0061``. llguidance compares a declared name letter by
letter, and would accept the escaped name as an additional property, with a value that the schema
does not allow for ``a``. A name that has to match a pattern cannot contain such escapes. So
additional properties become pattern properties, for all names but the declared ones. llguidance
rejects two patterns that overlap, so this does not work where objects are merged (``allOf``) or
have patterns already. There, the option ``_NO_ESCAPES`` forbids ``\u`` everywhere, in values too.

llguidance 1.9 loses the patterns of an object that is merged with one without patterns (it
intersects them with the other's ``additionalProperties``). So a member with patterns comes first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, TypeAlias

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.schema import (
    KEYWORDS,
    TYPES,
    AnySchema,
    Schema,
    SchemaReader,
)

CACHE_BYTES = 8 * 2**20

_WHITE_SPACE = r"\r?\n[ \t]{0,80}|[ \t]{1,4}"
"""Between two JSON tokens: a line end with its indentation, or some blanks; at most once."""

_ESCAPES = "json_allow_general_unicode_escapes"
_OPTIONS: Mapping[str, Any] = {"whitespace_pattern": _WHITE_SPACE, _ESCAPES: True}
_SPACED = json.dumps(_OPTIONS, separators=(",", ":"))[1:-1]

_NO_ESCAPES: Mapping[str, Any] = {**_OPTIONS, "json_allowed_escapes": 'nrbtf\\"'}
"""The same without ``\\u`` escapes."""

Check: TypeAlias = "Callable[[str], str]"
"""Returns why llguidance rejects a grammar, in one line; an empty string if it accepts it.

It may ask another process, so a call is expensive. Raises `CheckUnavailable`."""


class CheckUnavailable(Exception):
    """It is not known, at least not in time, whether a grammar can be compiled."""


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
    strict = _cache.get(key)
    if strict is None:
        reader = SchemaReader(schema)
        copy = reader.root(of_object)
        rewritten, inexact = rewrite(copy)
        unsupported = tuple(dict.fromkeys([*reader.dropped, *inexact]))
        if not unsupported and _is_rejected(rewritten, check):
            unsupported = _rejected_keywords(copy, check)
        strict = StrictSchema("" if unsupported else _json_text(rewritten, check), unsupported)
        _cache.put(key, strict, 2 * (len(key) + len(strict.text)) + 512)
    return strict


def _is_rejected(schema: Schema, check: Check) -> bool:
    with_options = {"x-guidance": _OPTIONS, **schema}
    return bool(check(json.dumps({"grammars": [{"json_schema": with_options}]})))


def _json_text(schema: Schema, check: Check) -> str:
    """``schema``, which is not rejected, with the options for white space and escapes."""
    options = _OPTIONS
    if any(map(_is_open, _schemas(schema))):
        unescaped = _with_pattern_properties(schema)
        if unescaped is None or _is_rejected(unescaped, check):
            options = _NO_ESCAPES
        else:
            schema = unescaped
    return json.dumps({"x-guidance": options, **schema}, separators=(",", ":"))


def _rejected_keywords(copy: Schema, check: Check) -> tuple[str, ...]:
    """The keywords for which llguidance rejects ``copy``; a single one if that is enough."""
    used = {keyword for schema in _schemas(copy) for keyword in schema}
    present = [key for key in KEYWORDS if key in used and key not in _NEVER_REJECTED]
    attempts = [[key] for key in present] + [present[:end] for end in range(2, len(present) + 1)]
    for keywords in attempts:
        rewritten, _ = rewrite(_without(copy, keywords))
        if not _is_rejected(rewritten, check):
            return tuple(keywords)
    return ("the schema as a whole",)


_NEVER_REJECTED = frozenset({"type", "properties", "additionalProperties"})
_NEVER_REJECTED |= {"items", "prefixItems", "additionalItems"}


# --- all schemas within a schema ---

_REWRITTEN = ("propertyNames", "unevaluatedProperties")

_MAPPINGS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs"})
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalItems"})
_SCHEMAS |= {"additionalProperties", *_REWRITTEN}


def _map(schema: Schema, function: Callable[[Schema], object]) -> Schema:
    """A copy of ``schema`` with ``function`` applied to each of its direct subschemas.

    Subschemas that are booleans stay as they are.
    """

    def apply(inner: object) -> object:
        return function(inner) if isinstance(inner, dict) else inner

    copy: Schema = {}
    for key, content in schema.items():
        if key in _MAPPINGS_OF_SCHEMAS:
            copy[key] = {name: apply(inner) for name, inner in content.items()}
        elif key in _SCHEMAS:
            copy[key] = [*map(apply, content)] if isinstance(content, list) else apply(content)
        else:
            copy[key] = content
    return copy


def _without(schema: Schema, keywords: Iterable[str]) -> Schema:
    """A copy of ``schema`` without ``keywords``, at any depth."""
    remaining = {key: content for key, content in schema.items() if key not in keywords}
    return _map(remaining, lambda inner: _without(inner, keywords))


def _schemas(schema: Schema) -> Iterator[Schema]:
    """``schema`` and all its subschemas that are not booleans."""
    schemas = [schema]
    for inner in schemas:  # which grows meanwhile
        _map(inner, schemas.append)
    return iter(schemas)


# --- oneOf, propertyNames and unevaluatedProperties ---

_MAX_NAMES = 200

_MAX_PAIRS = 5_000
"""Branches that are compared with each other, of all ``oneOf`` of a schema."""

_MAX_FOLLOWED = 64
"""References in a row, or members of ``allOf`` within each other."""


def rewrite(root: Schema) -> tuple[Schema, list[str]]:
    """``root`` without the three keywords, and those of them that cannot be enforced."""
    rewriter = _Rewriter(root)
    return rewriter.schema(root), [*rewriter.inexact]


class _Rewriter:
    """Rewrites one schema. ``inexact`` has keywords for which there is no equivalent."""

    def __init__(self, root: Schema) -> None:
        self.inexact: dict[str, None] = {}
        self._root = root
        self._pairs_left = _MAX_PAIRS

    def schema(self, schema: Schema) -> Schema:
        copy = _map({key: schema[key] for key in schema if key not in _REWRITTEN}, self.schema)
        if "oneOf" in schema and "anyOf" not in schema and self.are_disjoint(schema["oneOf"]):
            copy = {"anyOf" if key == "oneOf" else key: copy[key] for key in copy}
        added = []
        if "propertyNames" in schema:
            added.append(self.property_names(schema))
        if "unevaluatedProperties" in schema:
            added.append(self.unevaluated_properties(schema))
        kind = {"type": schema["type"]} if "type" in schema else {}
        members = [{**kind, **each} for each in added if each is not None]
        first = [each for each in members if "patternProperties" in each]
        last = [each for each in members if "patternProperties" not in each]
        if not members:
            return copy
        all_of = [*first, *copy.pop("allOf", ()), *last]
        return {"allOf": all_of, **copy} if first else {**copy, "allOf": all_of}

    def followed(self, schema: AnySchema) -> AnySchema:
        """``schema``, or what it refers to if it is nothing but a reference."""
        for _ in range(_MAX_FOLLOWED):
            if isinstance(schema, bool) or schema.keys() - {"$defs"} != {"$ref"}:
                break
            schema = self.target(schema)
        return schema

    def target(self, schema: Schema) -> AnySchema:
        if schema["$ref"] == "#":
            return self._root
        target: AnySchema = self._root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        return target

    def are_disjoint(self, branches: Iterable[AnySchema]) -> bool:
        """Whether no value satisfies two of ``branches``, as far as that is obvious."""
        alternatives = [[*self.alternatives(branch)] for branch in branches]
        self._pairs_left -= sum(len(a) * len(b) for a, b in combinations(alternatives, 2))
        return self._pairs_left >= 0 and all(
            self.excludes(one, other, levels=3)
            for some, others in combinations(alternatives, 2)
            for one, other in product(some, others)
        )

    def alternatives(self, branch: AnySchema, depth: int = 0) -> Iterator[AnySchema]:
        """The branches of ``branch``, if it is nothing but another union."""
        branch = self.followed(branch)
        unions = [] if isinstance(branch, bool) else [branch.get("anyOf"), branch.get("oneOf")]
        union = next(filter(None, unions), None)
        if union and len(branch) == 1 and depth < _MAX_FOLLOWED:  # type: ignore[arg-type]
            for inner in union:
                yield from self.alternatives(inner, depth + 1)
        else:
            yield branch

    def excludes(self, one: AnySchema, other: AnySchema, levels: int) -> bool:
        """Whether nothing satisfies both, looking ``levels`` deep into objects."""
        one, other = self.followed(one), self.followed(other)
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        if _types(one).isdisjoint(_types(other)):
            return True
        some, others = _listed(one), _listed(other)
        if some is not None and others is not None:
            return not any(value in others for value in some)
        if not levels or not _types(one) & _types(other) <= {"object"}:
            return False
        both = set(one.get("required", ())).intersection(other.get("required", ()))
        return any(
            self.excludes(one["properties"][name], other["properties"][name], levels - 1)
            for name in both
            if name in one.get("properties", ()) and name in other.get("properties", ())
        )

    def property_names(self, schema: Schema) -> Schema | None:
        """The member of ``allOf`` that stands for ``propertyNames``."""
        names = self.followed(schema["propertyNames"])
        if names in (True, {}, {"type": "string"}):
            return None
        texts: list[str] = []
        if "string" in _types(names):
            listed = _listed(names)
            if (
                isinstance(names, bool)
                or listed is None
                or not names.keys() <= {"type", "enum", "const"}
            ):
                self.inexact["propertyNames"] = None
                return None
            texts = [name for name in listed if isinstance(name, str)]
        if len(texts) > _MAX_NAMES:
            self.inexact["propertyNames"] = None
            return None
        # Properties come in the order in which they are declared.
        declared = [name for name in schema.get("properties", ()) if name in texts]
        return _object([*declared, *texts], (), False)

    def unevaluated_properties(self, schema: Schema) -> Schema | None:
        """The member of ``allOf`` that stands for ``unevaluatedProperties``."""
        rest = schema["unevaluatedProperties"]
        if rest in (True, {}):
            return None
        names: dict[str, None] = {}
        patterns: dict[str, None] = {}
        parts: list[AnySchema] = [schema]
        for part in parts:  # which grows meanwhile
            if isinstance(part, bool):
                continue
            if {"anyOf", "oneOf"} & part.keys() or len(parts) > _MAX_FOLLOWED:
                self.inexact["unevaluatedProperties"] = None
                return None
            if "additionalProperties" in part or (
                "unevaluatedProperties" in part and part is not schema
            ):
                return None  # every name is evaluated
            names.update(dict.fromkeys(part.get("properties", ())))
            patterns.update(dict.fromkeys(part.get("patternProperties", ())))
            parts += part.get("allOf", ())
            if "$ref" in part:
                parts.append(self.target(part))
        rest = self.schema(rest) if isinstance(rest, dict) else rest
        # Properties come in the order of the prompt: those of other schemas first.
        ordered = sorted(names, key=schema.get("properties", {}).__contains__)
        return _object(ordered, patterns, rest)


def _types(schema: AnySchema) -> set[str]:
    """The types of JSON that ``schema`` allows, of those that its constants have, too."""
    if schema is False:
        return set()
    named = schema.get("type", TYPES) if isinstance(schema, dict) else TYPES
    types = {named} if isinstance(named, str) else set(named)
    types |= {"integer"} if "number" in types else set()
    listed = _listed(schema)
    return types if listed is None else types & {kind for value in listed for kind in _kinds(value)}


def _kinds(value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, (int, float)):
        return ("number", "integer")
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return (names[type(value)],)


def _listed(schema: AnySchema) -> list[object] | None:
    """The values of ``const`` or ``enum``."""
    if isinstance(schema, bool):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _object(names: Iterable[str], patterns: Iterable[str], additional: object) -> Schema:
    """An object with any value for ``names`` and ``patterns``, and ``additional`` for others."""
    schema: Schema = {"additionalProperties": additional}
    if properties := dict.fromkeys(names, True):
        schema["properties"] = properties
    if of_patterns := dict.fromkeys(patterns, True):
        schema["patternProperties"] = of_patterns
    return schema


# --- escaped names ---

_MAX_LENGTH = 80
_IN_PLACE = ("anyOf", "oneOf", "$ref")
_OF_OBJECTS = frozenset({"properties", "patternProperties", "additionalProperties", "required"})


def _is_open(schema: Schema) -> bool:
    """Whether ``schema`` declares names and allows others beside them."""
    declares = any(schema.get(key) for key in ("properties", "patternProperties", "required"))
    return declares and schema.get("additionalProperties") is not False


def _with_pattern_properties(root: Schema) -> Schema | None:
    """``root`` with additional properties as pattern properties, which cannot be escaped.

    ``None`` when that is impossible: too many or too long names, patterns, merged objects.
    """
    for schema in _schemas(root):
        members = len(schema.get("allOf", ())) + sum(map(schema.__contains__, _IN_PLACE))
        if members > 1 or (members == 1 and not _OF_OBJECTS.isdisjoint(schema)):
            return None
        names = [*schema.get("properties", ()), *schema.get("required", ())]
        too_large = len(names) > _MAX_NAMES or max(map(len, names), default=0) > _MAX_LENGTH
        if _is_open(schema) and (too_large or "patternProperties" in schema):
            return None

    def walk(schema: Schema) -> Schema:
        copy = _map(schema, walk)
        if _is_open(copy):
            additional = copy.get("additionalProperties", True)
            properties = copy.get("properties", {})
            others = (name for name in copy.get("required", ()) if name not in properties)
            copy["properties"] = {**properties, **dict.fromkeys(others, additional)}
            pattern = f"^(?:{_other_than(copy['properties'])})$"
            copy["patternProperties"] = {pattern: additional}
            copy["additionalProperties"] = False
        return copy

    return walk(root)


def _other_than(names: Iterable[str]) -> str:
    """A regular expression that matches every string but ``names``."""
    ends: dict[str, list[str]] = {}
    for name in names:
        ends.setdefault(name[:1], []).append(name[1:])
    firsts = [re.escape(first) for first in ends if first]
    other = rf"[^\x00{''.join(firsts)}][\s\S]*" if firsts else r"[\s\S]+"
    longer = [f"{re.escape(first)}(?:{_other_than(rest)})" for first, rest in ends.items() if first]
    return "|".join([*([] if "" in ends else [""]), other, *longer])
