r"""A strict schema as llguidance's ``%json`` enforces it: completely, or not at all.

A schema that `SchemaReader` has copied may still be rejected by llguidance: for a pattern with
look-around, say, or a ``oneOf`` with branches that overlap. Then it only remains to find the
keyword that the error names. What llguidance does not have is rewritten before.

**oneOf** becomes ``anyOf`` if its branches obviously exclude each other. llguidance sees that, too,
but not through references.

**propertyNames and unevaluatedProperties.** Both are equivalent to one more member of ``allOf``: an
object with certain ``properties`` and ``patternProperties``, and an ``additionalProperties``. Which
ones is read from the schema's `alternatives`.

- ``propertyNames`` is supported if it allows finitely many names. Each becomes a property with any
  value, and no others are allowed.
- ``unevaluatedProperties`` applies to the names that no other keyword of the same object has
  evaluated (https://json-schema.org/draft/2020-12/json-schema-core, 11.3). It is supported if these
  are the same in all alternatives.

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
from decimal import localcontext
from typing import Any, TypeAlias

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.grammar import numbers
from vllm_mlx_harmony.core.grammar.alternatives import Expander, listed_strings
from vllm_mlx_harmony.core.grammar.json_schema import KEYWORDS, Schema, SchemaReader

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


# --- propertyNames and unevaluatedProperties ---

_MAX_NAMES = 200


def rewrite(root: Schema) -> tuple[Schema, list[str]]:
    """``root`` without the two keywords, and those of them that cannot be enforced."""
    rewriter = _Rewriter(root)
    with localcontext(numbers.EXACT):
        return rewriter.schema(root), [*rewriter.inexact]


class _Rewriter:
    """Rewrites one schema. ``inexact`` has keywords for which there is no equivalent."""

    def __init__(self, root: Schema) -> None:
        self.inexact: dict[str, None] = {}
        self._keyword = ""  # which is being rewritten
        self._expander = Expander(root, self._drop)
        # What it caches may accept too much, which still shows that branches exclude each other.
        self._lenient = Expander(root, lambda _: None)

    def _drop(self, _: str = "") -> None:
        self.inexact[self._keyword] = None

    def schema(self, schema: Schema) -> Schema:
        copy = _map({key: schema[key] for key in schema if key not in _REWRITTEN}, self.schema)
        if "oneOf" in schema and "anyOf" not in schema:
            branches = [self._lenient.alternatives(branch) for branch in schema["oneOf"]]
            if self._lenient.are_disjoint(branches):
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

    def property_names(self, schema: Schema) -> Schema | None:
        """The member of ``allOf`` that stands for ``propertyNames``."""
        self._keyword, requested = "propertyNames", schema["propertyNames"]
        names = listed_strings(self._expander.conjunction([requested]))
        if names is None and (requested is True or requested.keys() <= {"type"}):
            return None  # any name
        if names is None or len(names) > _MAX_NAMES:
            self._drop()
            return None
        # Properties come in the order in which they are declared.
        declared = [name for name in schema.get("properties", ()) if name in names]
        return _object([*declared, *names], (), False)

    def unevaluated_properties(self, schema: Schema) -> Schema | None:
        """The member of ``allOf`` that stands for ``unevaluatedProperties``."""
        self._keyword, rest = "unevaluatedProperties", schema["unevaluatedProperties"]
        if rest in (True, {}):
            return None
        objects = (each for each in self._expander.expand(schema) if "object" in each.types)
        evaluated = [each.evaluated for each in objects]
        if any(each != evaluated[0] for each in evaluated):
            self._drop()
        if not evaluated or evaluated[0] is None:
            return None
        rest = self.schema(rest) if isinstance(rest, dict) else rest
        # Properties come in the order of the prompt: those of other schemas first.
        names = sorted(evaluated[0].names, key=schema.get("properties", {}).__contains__)
        return _object(names, evaluated[0].patterns, rest)


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
