r"""What a schema says of the names of an object's properties, in the words that llguidance has.

Knows how JSON Schema's applicators go together. Refuses to know what is told about it
(`expressible`). Everything here takes and gives schemas as `expressible` copies them: known,
well-formed keywords, every ``$ref`` to ``#`` or to a definition at the root. Pure.

**propertyNames and unevaluatedProperties** are both a conjunct: an object that has these names and
no others. So each becomes a member of ``allOf`` with ``properties``, ``patternProperties`` and
``additionalProperties``, and what it means beside the other keywords is what ``allOf`` means.

- ``propertyNames`` with finitely many names (``enum``, ``const``, references to such and unions)
  has those as properties of which nothing is asked; with a pattern, or lengths, it has the pattern.
  A ``format`` beside a pattern is an annotation, as for JSON Schema it may be.
- ``unevaluatedProperties`` is about the names that no other keyword in place has looked at
  (https://json-schema.org/draft/2020-12/json-schema-core, 11.3). Those of ``allOf`` and ``$ref``
  are evaluated always; those of a branch of ``anyOf`` or ``oneOf`` when the branch holds. The
  conjunct has them all: what it allows is exact when the branches evaluate nothing of their own,
  and too much otherwise.

**Names in another spelling.** JSON may write ``a`` as ``\u0061``. llguidance knows a declared name
by its letters, and takes the escaped one for an additional property, so that a value could come in
for which the schema says something else. What matches a pattern it takes without such escapes: so
additional properties become those whose name matches a pattern, of all names but the declared ones.
Two of those patterns must not meet, nor one the schema's own, because they overlap. So a schema in
which objects are laid over one another loses escapes altogether, in values, too.

llguidance 1.9 loses the patterns of an object that is laid over one without (they are intersected
with its own ``additionalProperties``). So a conjunct with patterns comes first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Schema: TypeAlias = "dict[str, Any]"

KEYWORDS = ("propertyNames", "unevaluatedProperties")
"""Those that are rewritten, in the order in which they are given up."""

NO_ESCAPES: Mapping[str, Any] = {"json_allowed_escapes": 'nrbtf\\"'}
"""An option of llguidance's: no character is written as ``\\u`` and four digits."""

_MAX_NAMES = 200
_MAX_CHECKED = 50
_MAX_LENGTH = 80


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """``value`` with ``function`` of each schema that stands in it; a boolean as it is."""
    if not isinstance(value, dict):
        return value
    out: Schema = {}
    for key, content in value.items():
        if key in _NAMED:
            out[key] = {name: function(one) for name, one in content.items()}
        elif key in _NESTED and isinstance(content, list):
            out[key] = [function(one) for one in content]
        else:
            out[key] = function(content) if key in _NESTED else content
    return out


_NAMED = frozenset({"properties", "patternProperties", "$defs"})
_NESTED = frozenset(
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


def without(value: Any, keywords: Iterable[str]) -> Any:
    """``value`` without ``keywords``, however deep."""
    dropping = frozenset(keywords)

    def walk(one: Any) -> Any:
        if isinstance(one, dict):
            one = {key: content for key, content in one.items() if key not in dropping}
        return mapped(one, walk)

    return walk(value)


def rewritten(root: Schema, is_rejected: Callable[[Schema], bool]) -> tuple[Schema, list[str]]:
    """``root`` without ``KEYWORDS``, and those of them that it does not wholly stand for.

    It never allows less than ``root``. ``is_rejected`` says of a schema whether nothing is valid.
    """
    rewriting = _Rewriting(root, is_rejected)
    return rewriting.schema(root), list(dict.fromkeys(rewriting.inexact))


def spelled(root: Schema) -> Schema | None:
    """``root``, in which no declared name can be spelled otherwise.

    ``None`` when there are too many names, too long ones, patterns, or objects laid over others.
    """
    fits = not any(map(_is_merged, _schemas(root)))

    def walk(value: Any) -> Any:
        nonlocal fits
        out = mapped(value, walk)
        if isinstance(out, dict) and _is_open(out):
            declared = [*out.get("properties", ()), *out.get("required", ())]
            fits = fits and len(declared) <= _MAX_NAMES and "patternProperties" not in out
            if not fits or max(map(len, declared)) > _MAX_LENGTH:
                fits = False
                return out
            rest = out.get("additionalProperties", True)
            other = f"^(?:{_other_than(declared)})$"
            named = {**out.get("properties", {})}
            named.update((name, rest) for name in declared if name not in named)
            out.update(
                properties=named, patternProperties={other: rest}, additionalProperties=False
            )
        return out

    walked: Schema = walk(root)
    return walked if fits else None


def _is_merged(schema: Schema) -> bool:
    """Whether several keywords may say something of one object."""
    members = len(schema.get("allOf", ())) + sum(
        key in schema for key in ("anyOf", "oneOf", "$ref")
    )
    return members > 1 or (members == 1 and not _OF_OBJECTS.isdisjoint(schema))


_OF_OBJECTS = frozenset({"properties", "patternProperties", "additionalProperties", "required"})


def can_be_misspelled(root: Schema) -> bool:
    """Whether a declared name may come in another spelling, with a value that is not its own."""
    return any(map(_is_open, _schemas(root)))


def _other_than(names: Iterable[str]) -> str:
    """A regular expression of all texts but ``names``."""
    ends: dict[str, list[str]] = {}
    for name in names:
        ends.setdefault(name[:1], []).append(name[1:])
    firsts = [re.escape(first) for first in ends if first]
    other = rf"[^\x00{''.join(firsts)}][\s\S]*" if firsts else r"[\s\S]+"
    longer = [f"{re.escape(first)}(?:{_other_than(rest)})" for first, rest in ends.items() if first]
    return "|".join([*([] if "" in ends else [""]), other, *longer])


def _is_open(schema: Schema) -> bool:
    declares = any(schema.get(key) for key in ("properties", "patternProperties", "required"))
    return declares and schema.get("additionalProperties") is not False


def _schemas(value: Any) -> Iterator[Schema]:
    """``value`` and all schemas in it that are no booleans."""
    found: list[Schema] = []

    def walk(one: Any) -> Any:
        if isinstance(one, dict):
            found.append(one)
            mapped(one, walk)
        return one

    walk(value)
    yield from found


@dataclass
class _Evaluated:
    """The properties that a schema's keywords look at: those of every instance, and those that may
    be looked at or not."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    all: bool = False
    """Whatever their names are."""
    refs: set[str] = field(default_factory=set)
    """What was followed already."""


class _Rewriting:
    def __init__(self, root: Schema, is_rejected: Callable[[Schema], bool]) -> None:
        self._root = root
        self._is_rejected = is_rejected
        self._known: dict[str, Mapping[str, None] | None] = {}
        self.inexact: list[str] = []

    def schema(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        out: Schema = mapped({k: v for k, v in value.items() if k not in KEYWORDS}, self.schema)
        conjuncts: list[Schema] = []
        if "propertyNames" in value:
            conjuncts += self._property_names(value)
        if "unevaluatedProperties" in value:
            conjuncts += self._unevaluated(value)
        if not conjuncts:
            return out
        kind = {"type": value["type"]} if "type" in value else {}
        conjuncts = [{**kind, **one} for one in conjuncts]
        first = [one for one in conjuncts if "patternProperties" in one]
        last = [one for one in conjuncts if "patternProperties" not in one]
        members = [*first, *out.pop("allOf", ()), *last]
        return {"allOf": members, **out} if first else {**out, "allOf": members}

    # unevaluatedProperties

    def _unevaluated(self, value: Schema) -> Iterator[Schema]:
        rest = value["unevaluatedProperties"]
        own = {key: content for key, content in value.items() if key != "unevaluatedProperties"}
        always, perhaps = _Evaluated(), _Evaluated()
        self._evaluate(own, always, perhaps)
        if rest in (True, {}) or always.all:
            return
        certain = perhaps.names.keys() <= always.names.keys()
        certain = certain and perhaps.patterns.keys() <= always.patterns.keys()
        if perhaps.all or not certain:
            self.inexact.append("unevaluatedProperties")
        if not perhaps.all:
            names, patterns = always.names | perhaps.names, always.patterns | perhaps.patterns
            yield _only(names, patterns, self.schema(rest))

    def _evaluate(self, value: Any, always: _Evaluated, perhaps: _Evaluated) -> None:
        """Adds what ``value`` evaluates in place."""
        if not isinstance(value, dict):
            return
        for one in (*value.get("anyOf", ()), *value.get("oneOf", ())):
            self._evaluate(one, perhaps, perhaps)
        ref = value.get("$ref")
        if ref is not None and ref not in always.refs:
            always.refs.add(ref)
            self._evaluate(self._target(ref), always, perhaps)
        for one in value.get("allOf", ()):
            self._evaluate(one, always, perhaps)
        always.names.update(dict.fromkeys(value.get("properties", ())))
        always.patterns.update(dict.fromkeys(value.get("patternProperties", ())))
        always.all |= "additionalProperties" in value or "unevaluatedProperties" in value

    def _target(self, ref: str) -> Any:
        name = ref.removeprefix("#/$defs/")
        return self._root if ref == "#" else self._root.get("$defs", {}).get(name, True)

    # propertyNames

    def _property_names(self, value: Schema) -> Iterator[Schema]:
        requested = value["propertyNames"]
        names = self._names(requested)
        if names is not None:
            is_plain = isinstance(requested, dict) and requested.keys() <= {"type", "enum"}
            if len(names) <= (_MAX_NAMES if is_plain else _MAX_CHECKED):
                allowed = [name for name in names if is_plain or self._is_allowed(name, requested)]
                declared = [name for name in value.get("properties", ()) if name in allowed]
                yield _only([*declared, *allowed], (), False)
                return
        pattern, exact = self._pattern(requested)
        if names is not None or not exact:
            self.inexact.append("propertyNames")
        if pattern is not None:
            yield _only((), [pattern], False)

    def _names(self, requested: Any) -> Mapping[str, None] | None:
        """Names among which are all that may be; ``None`` when there is no end of them."""
        if requested is False or not _has_texts(requested):
            return {}
        if not isinstance(requested, dict):
            return None
        if "const" in requested or "enum" in requested:
            listed = [requested["const"]] if "const" in requested else requested["enum"]
            return dict.fromkeys(name for name in listed if isinstance(name, str))
        found = [self._names(one) for one in requested.get("allOf", ())]
        if "$ref" in requested:
            found.append(self._names_of(requested["$ref"]))
        for branches in (requested.get("anyOf"), requested.get("oneOf")):
            if branches:
                united = [self._names(one) for one in branches]
                finite = [names for names in united if names is not None]
                if len(finite) == len(united):
                    found.append({name: None for names in finite for name in names})
        return next((names for names in found if names is not None), None)

    def _names_of(self, ref: str) -> Mapping[str, None] | None:
        if ref not in self._known:
            self._known[ref] = None
            self._known[ref] = self._names(self._target(ref))
        return self._known[ref]

    def _is_allowed(self, name: str, requested: Any) -> bool:
        definitions = {"$defs": self._root["$defs"]} if "$defs" in self._root else {}
        return not self._is_rejected({"allOf": [{"const": name}, requested], **definitions})

    def _pattern(self, requested: Any, hops: int = 9) -> tuple[str | None, bool]:
        """The pattern of the names, if there is one, and whether it is all that is asked."""
        if not isinstance(requested, dict):
            return None, requested is True
        if requested.keys() - {"type"} == {"$ref"} and hops:
            return self._pattern(self._target(requested["$ref"]), hops - 1)
        rest = requested.keys() - {"type", "pattern", "minLength", "maxLength", "format"}
        is_bounded = "minLength" in requested or "maxLength" in requested
        if "pattern" in requested:
            return requested["pattern"], not rest and not is_bounded
        exact = not rest and "format" not in requested
        if not is_bounded:
            return None, exact
        least, most = requested.get("minLength", 0), requested.get("maxLength", "")
        return rf"^[\s\S]{{{least},{most}}}$", exact


def _has_texts(schema: Any) -> bool:
    kinds = schema.get("type", "string") if isinstance(schema, dict) else "string"
    return "string" in ([kinds] if isinstance(kinds, str) else kinds)


def _only(names: Iterable[str], patterns: Iterable[str], rest: Any) -> Schema:
    """Properties of these names and patterns, whatever they are; of others what ``rest`` says."""
    conjunct: Schema = {"additionalProperties": rest}
    if found := dict.fromkeys(names, True):
        conjunct["properties"] = found
    if found := dict.fromkeys(patterns, True):
        conjunct["patternProperties"] = found
    return conjunct
