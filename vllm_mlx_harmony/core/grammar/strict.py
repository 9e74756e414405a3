r"""A strict schema as llguidance's ``%json`` enforces it: completely, or not at all.

A schema that `SchemaReader` has copied may still be rejected by llguidance: for a pattern with
look-around, say, or a ``oneOf`` with branches that overlap. Then it only remains to find the
keyword that the error names. Two keywords are rewritten before:

**oneOf** becomes ``anyOf`` if its branches obviously exclude each other: by their types, by their
constants, or by those of a property that both require. llguidance sees that, too, but not through
references.

**propertyNames** is supported if it lists the names (``enum``). It is equivalent to one more member
of ``allOf``: an object with these properties, each with any value, and no others.

**Escaped names.** JSON may write ``a`` as ``\u0061``. llguidance compares a declared name letter by
letter, and would accept the escaped name as an additional property, with a value that the schema
does not allow for ``a``. So if an object of the schema has names and allows others beside them,
``\u`` is forbidden everywhere, in values too. OpenAI's strict schemas have no such objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.schema import (
    KEYWORDS,
    AnySchema,
    Schema,
    SchemaReader,
    cache_key,
    followed,
    kinds,
    literals,
)

CACHE_BYTES = 8 * 2**20
"""Bytes of the cache of strict schemas. One that was evicted is read and compiled again."""

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
    does not support are reported before those that llguidance rejects. Never raises. Cached, since
    every turn of a conversation asks for it.
    """
    key = cache_key(schema, of_object, tenant)
    if key is None:
        return StrictSchema("", ("a schema that is not JSON",))
    strict = _cache.get(key)
    if strict is None:
        reader = SchemaReader(schema)
        copy = reader.root(of_object)
        rewritten = rewrite(copy)
        unsupported = tuple(reader.dropped)
        if not unsupported and _is_rejected(rewritten, check):
            unsupported = _rejected_keywords(copy, check)
        options = _NO_ESCAPES if any(map(_is_open, _schemas(rewritten))) else _OPTIONS
        text = json.dumps({"x-guidance": options, **rewritten}, separators=(",", ":"))
        strict = StrictSchema("" if unsupported else text, unsupported)
        _cache.put(key, strict, 2 * (len(key) + len(strict.text)) + 512)
    return strict


def _is_rejected(schema: Schema, check: Check) -> bool:
    with_options = {"x-guidance": _OPTIONS, **schema}
    return bool(check(json.dumps({"grammars": [{"json_schema": with_options}]})))


def _is_open(schema: Schema) -> bool:
    """Whether ``schema`` declares names and allows others beside them."""
    declares = any(schema.get(key) for key in ("properties", "patternProperties", "required"))
    return declares and schema.get("additionalProperties") is not False


def _rejected_keywords(copy: Schema, check: Check) -> tuple[str, ...]:
    """The keywords for which llguidance rejects ``copy``; a single one if that is enough."""
    used = {keyword for schema in _schemas(copy) for keyword in schema}
    present = [key for key in KEYWORDS if key in used and key not in _NEVER_REJECTED]
    attempts = [[key] for key in present] + [present[:end] for end in range(2, len(present) + 1)]
    for keywords in attempts:
        if not _is_rejected(rewrite(_without(copy, keywords)), check):
            return tuple(keywords)
    return ("the schema as a whole",)


_NEVER_REJECTED = ("type", "properties", "additionalProperties", "items", "prefixItems")


# --- all schemas within a schema ---

_MAPPINGS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs"})
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalProperties"})
_SCHEMAS |= {"propertyNames"}


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


# --- oneOf and propertyNames ---

MAX_NAMES = 200
"""Names of one ``propertyNames``, each of which becomes a property. With more, the keyword is
unsupported."""

MAX_PAIRS = 5_000
"""Branches that are compared with each other, of all ``oneOf`` of a schema: 70 of one, in 20 ms.
What exceeds it remains ``oneOf``, which llguidance may reject."""


def rewrite(root: Schema) -> Schema:
    """``root`` without the two keywords, as far as they can be expressed."""
    return _Rewriter(root).schema(root)


class _Rewriter:
    """Rewrites one schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._pairs_left = MAX_PAIRS

    def schema(self, schema: Schema) -> Schema:
        copy = _map(schema, self.schema)
        if "oneOf" in schema and "anyOf" not in schema and self.are_disjoint(schema["oneOf"]):
            copy = {"anyOf" if key == "oneOf" else key: copy[key] for key in copy}
        if "propertyNames" in schema and (equivalent := self.property_names(schema)) is not None:
            del copy["propertyNames"]
            copy["allOf"] = [*copy.get("allOf", ()), equivalent]
        return copy

    def are_disjoint(self, branches: Sequence[AnySchema]) -> bool:
        """Whether no value satisfies two of ``branches``, as far as that is obvious."""
        self._pairs_left -= len(branches) ** 2
        pairs = combinations((followed(branch, self._root) for branch in branches), 2)
        return self._pairs_left >= 0 and all(self.excludes(one, other) for one, other in pairs)

    def excludes(self, one: AnySchema, other: AnySchema) -> bool:
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        common = kinds(one) & kinds(other)
        if not common or _are_different(one, other):
            return True
        left, right = one.get("properties", {}), other.get("properties", {})
        both = {*one.get("required", ())}.intersection(other.get("required", ()), left, right)
        return common == {"object"} and any(
            _are_different(followed(left[name], self._root), followed(right[name], self._root))
            for name in both
        )

    def property_names(self, schema: Schema) -> Schema | None:
        """The member of ``allOf`` that stands for ``propertyNames``; ``None`` if there is none."""
        names = followed(schema["propertyNames"], self._root)
        if isinstance(names, bool):
            names = {} if names else {"enum": []}
        if not names:
            return {}
        values = _enum_values(names)
        if values is None or len(values) > MAX_NAMES or names.keys() - {"type", "enum", "const"}:
            return None
        texts = [name for name in values if isinstance(name, str) and "string" in kinds(names)]
        # Properties come in the order in which they are declared.
        declared = [name for name in schema.get("properties", ()) if name in texts]
        allowed = dict.fromkeys([*declared, *texts], True)
        kind = {"type": schema["type"]} if "type" in schema else {}
        return {**kind, "properties": allowed, "additionalProperties": False}


def _are_different(one: AnySchema, other: AnySchema) -> bool:
    """Whether both list values, none of them the same."""
    left, right = _enum_values(one), _enum_values(other)
    return left is not None and right is not None and not any(value in right for value in left)


def _enum_values(schema: AnySchema) -> Sequence[object] | None:
    """The values of ``const`` or ``enum``."""
    return None if isinstance(schema, bool) else next(iter(literals(schema)), None)
