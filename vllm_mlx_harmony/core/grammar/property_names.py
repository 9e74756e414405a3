r"""Keywords about property names, rewritten into those that llguidance supports.

Every schema here is one that `json_schema.SchemaReader` has copied: known, well-formed keywords,
and each ``$ref`` is ``#`` or a definition at the root.

**propertyNames and unevaluatedProperties.** Both are equivalent to one more member of ``allOf``: an
object with certain ``properties`` and ``patternProperties``, and an ``additionalProperties``.

- ``propertyNames`` is supported if it allows finitely many names (``enum``, ``const``, references
  to such schemas, unions of them). Each becomes a property with any value, and no others are
  allowed.
- ``unevaluatedProperties`` applies to the names that no other keyword of the same object has
  evaluated (https://json-schema.org/draft/2020-12/json-schema-core, 11.3). ``allOf`` and ``$ref``
  always evaluate theirs; a branch of ``anyOf`` or ``oneOf`` only if it holds. The new member lists
  the names of all branches. That is exact when the branches add no names of their own, and too
  permissive otherwise.

**Escaped names.** JSON may write ``a`` as ``\u0061``. llguidance compares a declared name letter by
letter, and would accept the escaped name as an additional property, with a value that the schema
does not allow for ``a``. A name that has to match a pattern cannot contain such escapes. So
additional properties become pattern properties, for all names but the declared ones. llguidance
rejects two patterns that overlap, so this does not work where objects are merged (``allOf``) or
have patterns already. There, the option ``NO_ESCAPES`` forbids ``\u`` everywhere, in values too.

llguidance 1.9 loses the patterns of an object that is merged with one without patterns (it
intersects them with the other's ``additionalProperties``). So a member with patterns comes first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]
"""A schema other than ``true`` and ``false``."""

AnySchema: TypeAlias = Schema | bool

KEYWORDS = ("propertyNames", "unevaluatedProperties")

NO_ESCAPES: Mapping[str, str] = {"json_allowed_escapes": 'nrbtf\\"'}
"""The llguidance option that forbids ``\\u`` escapes."""

_MAX_NAMES = 200
_MAX_CHECKED = 50
_MAX_LENGTH = 80

_MAPPINGS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs"})
_SCHEMAS = frozenset(
    {
        "anyOf",
        "oneOf",
        "allOf",
        "prefixItems",
        "items",
        "additionalItems",
        "additionalProperties",
        *KEYWORDS,
    }
)


def mapped(schema: Schema, function: Callable[[Schema], object]) -> Schema:
    """A copy of ``schema`` with ``function`` applied to each of its direct subschemas.

    Subschemas that are booleans stay as they are.
    """

    def applied(each: object) -> object:
        return function(each) if isinstance(each, dict) else each

    copy: Schema = {}
    for key, content in schema.items():
        if key in _MAPPINGS_OF_SCHEMAS:
            copy[key] = {name: applied(each) for name, each in content.items()}
        elif key in _SCHEMAS:
            is_list = isinstance(content, list)
            copy[key] = [applied(each) for each in content] if is_list else applied(content)
        else:
            copy[key] = content
    return copy


def target(root: Schema, ref: str) -> AnySchema:
    """The schema that ``ref`` refers to."""
    if ref == "#":
        return root
    found: AnySchema = root.get("$defs", {}).get(ref.removeprefix("#/$defs/"), True)
    return found


def without(schema: Schema, keywords: Iterable[str]) -> Schema:
    """A copy of ``schema`` without ``keywords``, at any depth."""
    dropped = frozenset(keywords)
    remaining = {key: content for key, content in schema.items() if key not in dropped}
    return mapped(remaining, lambda each: without(each, dropped))


def rewrite(root: Schema, is_rejected: Callable[[Schema], bool]) -> tuple[Schema, list[str]]:
    """``root`` without ``KEYWORDS``, and those of them that are not fully enforced any more.

    The result accepts everything that ``root`` accepts. ``is_rejected`` tells whether llguidance
    rejects a schema, as it does when no value is valid.
    """
    rewriter = _Rewriter(root, is_rejected)
    return rewriter.schema(root), list(dict.fromkeys(rewriter.inexact))


def can_be_escaped(root: Schema) -> bool:
    """Whether some declared name, escaped, would be accepted as an additional property."""
    return any(map(_is_open, schemas(root)))


def with_pattern_properties(root: Schema) -> Schema | None:
    """``root`` with additional properties as pattern properties, which cannot be escaped.

    ``None`` when that is impossible: too many or too long names, patterns, merged objects.
    """
    for schema in schemas(root):
        members = len(schema.get("allOf", ())) + sum(map(schema.__contains__, _IN_PLACE))
        if members > 1 or (members == 1 and not _OF_OBJECTS.isdisjoint(schema)):
            return None
        names = [*schema.get("properties", ()), *schema.get("required", ())]
        too_large = len(names) > _MAX_NAMES or max(map(len, names), default=0) > _MAX_LENGTH
        if _is_open(schema) and (too_large or "patternProperties" in schema):
            return None

    def walk(schema: Schema) -> Schema:
        copy = mapped(schema, walk)
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


_IN_PLACE = ("anyOf", "oneOf", "$ref")
_OF_OBJECTS = frozenset({"properties", "patternProperties", "additionalProperties", "required"})


def _is_open(schema: Schema) -> bool:
    """Whether ``schema`` declares names and allows others beside them."""
    declares = any(schema.get(key) for key in ("properties", "patternProperties", "required"))
    return declares and schema.get("additionalProperties") is not False


def schemas(schema: Schema) -> Iterator[Schema]:
    """``schema`` and all its subschemas that are not booleans."""
    found = [schema]
    for each in found:  # which grows meanwhile
        mapped(each, found.append)
    return iter(found)


def _other_than(names: Iterable[str]) -> str:
    """A regular expression that matches every string but ``names``."""
    ends: dict[str, list[str]] = {}
    for name in names:
        ends.setdefault(name[:1], []).append(name[1:])
    firsts = [re.escape(first) for first in ends if first]
    other = rf"[^\x00{''.join(firsts)}][\s\S]*" if firsts else r"[\s\S]+"
    longer = [f"{re.escape(first)}(?:{_other_than(rest)})" for first, rest in ends.items() if first]
    return "|".join([*([] if "" in ends else [""]), other, *longer])


@dataclass
class _Evaluated:
    """Properties that keywords evaluate."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    all: bool = False
    """Whether every property is evaluated, whatever its name."""


class _Rewriter:
    """Rewrites one schema. ``inexact`` lists keywords that are enforced only in part."""

    def __init__(self, root: Schema, is_rejected: Callable[[Schema], bool]) -> None:
        self._root = root
        self._is_rejected = is_rejected
        self._names_of_ref: dict[str, list[str] | None] = {}
        self.inexact: list[str] = []

    def schema(self, schema: Schema) -> Schema:
        rest = {key: content for key, content in schema.items() if key not in KEYWORDS}
        copy = mapped(rest, self.schema)
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
        requested = schema["propertyNames"]
        names = self.finite_names(requested)
        keywords = requested.keys() if isinstance(requested, dict) else set()
        if names is None and keywords <= {"type"}:
            return None  # any name
        is_list = keywords <= {"type", "enum"}
        if names is None or len(names) > (_MAX_NAMES if is_list else _MAX_CHECKED):
            self.inexact.append("propertyNames")
            return None
        if not is_list:  # there may be other keywords, which exclude some of the names
            definitions = {"$defs": self._root["$defs"]} if "$defs" in self._root else {}
            names = [
                name
                for name in names
                if not self._is_rejected({"allOf": [{"const": name}, requested], **definitions})
            ]
        # Properties come in the order in which they are declared.
        declared = [name for name in schema.get("properties", ()) if name in names]
        return _object([*declared, *names], (), False)

    def finite_names(self, schema: object) -> list[str] | None:
        """Names that include all that ``schema`` allows; ``None`` if there are infinitely many."""
        if not isinstance(schema, dict):
            return [] if schema is False else None
        if "string" not in schema.get("type", "string"):
            return []
        if "const" in schema or "enum" in schema:
            listed = [schema["const"]] if "const" in schema else schema["enum"]
            return [name for name in listed if isinstance(name, str)]
        found = [self.finite_names(each) for each in schema.get("allOf", ())]
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref not in self._names_of_ref:
                self._names_of_ref[ref] = None  # for references that lead back here
                self._names_of_ref[ref] = self.finite_names(target(self._root, ref))
            found.append(self._names_of_ref[ref])
        for keyword in ("anyOf", "oneOf"):
            branches = [self.finite_names(each) for each in schema.get(keyword, ())]
            finite = [names for names in branches if names is not None]
            if branches and len(finite) == len(branches):
                found.append(list(dict.fromkeys(name for names in finite for name in names)))
        return next((names for names in found if names is not None), None)

    def unevaluated_properties(self, schema: Schema) -> Schema | None:
        """The member of ``allOf`` that stands for ``unevaluatedProperties``."""
        always, maybe = _Evaluated(), _Evaluated()
        followed: set[tuple[str, int]] = set()

        def evaluate(each: object, always: _Evaluated) -> None:
            if not isinstance(each, dict):
                return
            for branch in (*each.get("anyOf", ()), *each.get("oneOf", ())):
                evaluate(branch, maybe)
            ref = each.get("$ref")
            if ref is not None and (ref, id(always)) not in followed:
                followed.add((ref, id(always)))
                evaluate(target(self._root, ref), always)
            for member in each.get("allOf", ()):
                evaluate(member, always)
            always.names.update(dict.fromkeys(each.get("properties", ())))
            always.patterns.update(dict.fromkeys(each.get("patternProperties", ())))
            always.all |= "additionalProperties" in each or "unevaluatedProperties" in each

        unevaluated = schema["unevaluatedProperties"]
        evaluate({k: v for k, v in schema.items() if k != "unevaluatedProperties"}, always)
        if unevaluated in (True, {}) or always.all:
            return None
        only_maybe = maybe.names.keys() - always.names or maybe.patterns.keys() - always.patterns
        if maybe.all or only_maybe:
            self.inexact.append("unevaluatedProperties")
        if maybe.all:
            return None
        rest = self.schema(unevaluated) if isinstance(unevaluated, dict) else unevaluated
        return _object(always.names | maybe.names, always.patterns | maybe.patterns, rest)


def _object(names: Iterable[str], patterns: Iterable[str], additional: object) -> Schema:
    """An object with any value for ``names`` and ``patterns``, and ``additional`` for others."""
    schema: Schema = {"additionalProperties": additional}
    if properties := dict.fromkeys(names, True):
        schema["properties"] = properties
    if of_patterns := dict.fromkeys(patterns, True):
        schema["patternProperties"] = of_patterns
    return schema
