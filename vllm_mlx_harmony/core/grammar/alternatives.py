"""JSON Schema in a normal form: the alternatives from which `unordered` makes its rules.

A schema is a conjunction of keywords, some of which are conjunctions and disjunctions of schemas.
`Expander` brings it into a disjunction of `Alternative` values, whose keywords each concern a
single JSON type: ``allOf``, ``$ref`` and the keywords next to them are merged; ``anyOf``,
``oneOf`` and ``enum`` multiply the alternatives. The schemas of items and properties are not
expanded. All that apply to the same item or property are another conjunction.

What the form cannot express is left out, which only ever accepts more, and reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import combinations, product
from typing import Literal, NamedTuple, TypeVar

from vllm_mlx_harmony.core.grammar import numbers
from vllm_mlx_harmony.core.grammar.json_schema import AnySchema, Schema

MAX_DEPTH = 64
"""Schemas within schemas that are expanded, along references."""

MAX_ALTERNATIVES = 200
MAX_PAIRS = 5_000
"""Pairs of alternatives that are compared, of the branches of all ``oneOf``."""

MAX_COMPARED = 20
"""Required members of two alternatives that are compared, and patterns of their names."""

MAX_LISTED = 1_000
"""Literals of two alternatives that are compared, times the patterns that they may match."""

MAX_ORDER = 30
"""Powers of ten of bounds of numbers, to either side."""

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})

_Value = TypeVar("_Value")


class Count(NamedTuple):
    """A range of counts: at least, and at most (``None``: any number)."""

    least: int = 0
    most: int | None = None

    def intersect(self, other: Count) -> Count:
        most = [limit for limit in (self.most, other.most) if limit is not None]
        return Count(max(self.least, other.least), min(most, default=None))

    def less(self, taken: int) -> Count:
        """The range for the rest, after ``taken`` of them."""
        most = None if self.most is None else max(self.most - taken, 0)
        return Count(max(self.least - taken, 0), most)

    @property
    def is_empty(self) -> bool:
        return self.most is not None and self.least > self.most

    def times(self, part: str) -> str:
        """The expression for ``part``, this many times."""
        if self == ANY_NUMBER:
            return f"({part})*"
        return "" if self.most == 0 else f"({part}){{{self.least},{self.most or ''}}}"

    def listed(self, member: str) -> str:
        """``member``, this many times, separated by commas. The range must allow at least one."""
        items = f"{member} {self.less(1).times(f'JSON_COMMA {member}')}".rstrip()
        return items if self.least else f"({items})?"


ANY_NUMBER = Count()


@dataclass(frozen=True, slots=True)
class Members:
    """``properties``, ``patternProperties`` and ``additionalProperties`` (``rest``) of one schema.

    ``evaluates`` are the names that count as evaluated: those of the first two keywords, all (with
    the third one), or none (of a literal).
    """

    names: Mapping[str, AnySchema] = field(default_factory=dict)
    patterns: Mapping[str, AnySchema] = field(default_factory=dict)
    rest: AnySchema = True
    evaluates: Literal["declared", "all", "none"] = "declared"

    def schemas_of(self, name: str) -> list[AnySchema | None]:
        """The schemas that apply to the member ``name``; ``None`` stands for others that may."""
        schemas: list[AnySchema | None] = [self.names[name]] if name in self.names else []
        for pattern, schema in self.patterns.items():
            applies = matches(pattern, name)
            if applies is not False:
                schemas.append(schema if applies else None)
        return schemas or [self.rest]


@dataclass(frozen=True, slots=True)
class Items:
    """``prefixItems`` and ``items`` (``rest``) of one schema."""

    prefix: Sequence[AnySchema] = ()
    rest: AnySchema = True


class Bound(NamedTuple):
    value: Decimal
    exclusive: bool
    is_minimum: bool

    def allows(self, value: Decimal) -> bool:
        if value == self.value:
            return not self.exclusive
        return (value > self.value) == self.is_minimum


@dataclass(frozen=True, slots=True)
class Alternative:
    """A conjunction of keywords that do not combine schemas (as ``allOf`` and ``anyOf`` do).

    ``listed_strings`` and ``listed_numbers`` are those of an ``enum``, ``steps`` the values of
    ``multipleOf``, ``name_schemas`` those of ``propertyNames``.
    """

    types: frozenset[str] = TYPES
    is_integer: bool = False
    booleans: frozenset[bool] = frozenset({False, True})
    listed_strings: Mapping[str, None] | None = None
    listed_numbers: Mapping[Decimal, None] | None = None
    length: Count = ANY_NUMBER
    patterns: tuple[str, ...] = ()
    bounds: tuple[Bound, ...] = ()
    steps: tuple[Decimal, ...] = ()
    items: tuple[Items, ...] = ()
    item_count: Count = ANY_NUMBER
    members: tuple[Members, ...] = ()
    required: tuple[str, ...] = ()
    name_schemas: tuple[AnySchema, ...] = ()
    member_count: Count = ANY_NUMBER
    in_any_of: bool = False
    """Whether it is a branch of an ``anyOf``: other branches may hold as well, and evaluate other
    properties."""

    @classmethod
    def of(cls, schema: Schema) -> Alternative:
        """The keywords of ``schema`` that do not combine schemas, except for its literals."""
        types = schema.get("type", list(TYPES))
        named = {types} if isinstance(types, str) else set(types)
        bounds = []
        for keyword, is_minimum in (("minimum", True), ("maximum", False)):
            exclusive = schema.get(f"exclusive{keyword.capitalize()}")  # in draft 4, a boolean
            for limit, strictly in ((schema.get(keyword), exclusive is True), (exclusive, True)):
                value = numbers.decimal(limit)
                if value is not None:
                    bounds.append(Bound(value, strictly, is_minimum))
        step = numbers.decimal(schema.get("multipleOf"))
        items: tuple[Items, ...] = ()
        if isinstance(schema.get("items"), list):  # of drafts before 2020-12
            items = (Items(schema["items"], schema.get("additionalItems", True)),)
        elif "items" in schema or "prefixItems" in schema:
            items = (Items(schema.get("prefixItems", ()), schema.get("items", True)),)
        members: tuple[Members, ...] = ()
        if {"properties", "patternProperties", "additionalProperties"} & schema.keys():
            members = (
                Members(
                    schema.get("properties", {}),
                    schema.get("patternProperties", {}),
                    schema.get("additionalProperties", True),
                    "all" if "additionalProperties" in schema else "declared",
                ),
            )
        return cls(
            types=frozenset("number" if name == "integer" else name for name in named),
            is_integer="integer" in named and "number" not in named,
            length=Count(schema.get("minLength", 0), schema.get("maxLength")),
            patterns=(schema["pattern"],) if "pattern" in schema else (),
            bounds=tuple(bounds),
            steps=(abs(step),) if step else (),
            items=items,
            item_count=Count(schema.get("minItems", 0), schema.get("maxItems")),
            members=members,
            required=tuple(dict.fromkeys(schema.get("required", ()))),
            name_schemas=(schema["propertyNames"],) if "propertyNames" in schema else (),
            member_count=Count(schema.get("minProperties", 0), schema.get("maxProperties")),
        )

    def merge(self, other: Alternative) -> Alternative:
        return Alternative(
            types=self.types & other.types,
            is_integer=self.is_integer or other.is_integer,
            booleans=self.booleans & other.booleans,
            listed_strings=_in_both(self.listed_strings, other.listed_strings),
            listed_numbers=_in_both(self.listed_numbers, other.listed_numbers),
            length=self.length.intersect(other.length),
            patterns=_union(self.patterns, other.patterns),
            bounds=_union(self.bounds, other.bounds),
            steps=_union(self.steps, other.steps),
            items=self.items + other.items,
            item_count=self.item_count.intersect(other.item_count),
            members=self.members + other.members,
            required=_union(self.required, other.required),
            name_schemas=self.name_schemas + other.name_schemas,
            member_count=self.member_count.intersect(other.member_count),
            in_any_of=self.in_any_of or other.in_any_of,
        )

    def allows_string(self, text: str) -> bool | None:
        """Whether ``text`` satisfies all keywords; ``None`` if that is not known."""
        if "string" not in self.types:
            return False
        if self.listed_strings is not None and text not in self.listed_strings:
            return False
        if self.length.intersect(Count(len(text), len(text))).is_empty:
            return False
        if len(self.patterns) > MAX_COMPARED:
            return None
        known = [matches(pattern, text) for pattern in self.patterns]
        return False if False in known else None if None in known else True

    @property
    def strings(self) -> tuple[str, ...] | None:
        """The strings of its ``enum`` that satisfy the other keywords, as far as that is known."""
        if self.listed_strings is None:
            return None
        return tuple(text for text in self.listed_strings if self.allows_string(text) is not False)

    @property
    def numbers(self) -> tuple[Decimal, ...] | None:
        """The numbers of its ``enum`` that satisfy the other keywords."""
        if self.listed_numbers is None:
            return None
        return tuple(
            value
            for value in self.listed_numbers
            if all(bound.allows(value) for bound in self.bounds)
            and not (self.is_integer and value % 1)
            and not any(value % step for step in self.steps)
        )

    @property
    def evaluated(self) -> Members | None:
        """The names and patterns that its keywords evaluate; ``None`` if they evaluate any name."""
        if any(part.evaluates == "all" for part in self.members):
            return None
        parts = [part for part in self.members if part.evaluates == "declared"]
        names = {name: True for part in parts for name in part.names}
        return Members(names, {pattern: True for part in parts for pattern in part.patterns})

    @property
    def member_patterns(self) -> int:
        return sum(len(part.patterns) for part in self.members)

    def schemas_of(self, name: str) -> list[AnySchema | None]:
        """As those of ``Members``, for all of them."""
        return [schema for part in self.members for schema in part.schemas_of(name)]


def _in_both(
    one: Mapping[_Value, None] | None, other: Mapping[_Value, None] | None
) -> Mapping[_Value, None] | None:
    if one is None or other is None:
        return one if other is None else other
    return {value: None for value in one if value in other}


def _union(one: tuple[_Value, ...], other: tuple[_Value, ...]) -> tuple[_Value, ...]:
    return tuple(dict.fromkeys((*one, *other)))


def listed_strings(alternatives: Iterable[Alternative]) -> list[str] | None:
    """The strings that ``alternatives`` allow; ``None`` if those are infinite or not known."""
    strings: dict[str, None] = {}
    for alternative in alternatives:
        if "string" in alternative.types:
            listed = alternative.strings
            if listed is None or None in map(alternative.allows_string, listed):
                return None
            strings.update(dict.fromkeys(listed))
    return [*strings]


def matches(pattern: str, text: str) -> bool | None:
    """Whether ``pattern`` matches anywhere in ``text``; ``None`` if that is not known.

    Python cannot read every pattern. It tries all ways to match one, and holds the GIL meanwhile:
    ``^(a+)+$`` has a billion of them in 30 characters.
    """
    choices = len(_CHOICE.findall(pattern))
    if _REPEATED_GROUP.search(pattern) or (len(text) + 2) ** (choices + 1) > MAX_STEPS:
        return None
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return None


_REPEATED_GROUP = re.compile(r"\)[*+{]")
_CHOICE = re.compile(r"[*+?|]|\{[0-9]*,")
MAX_STEPS = 1_000_000
"""The greatest number of ways in which a pattern is matched."""


class Expander:
    """Expands the schemas below one ``root``, a copy of a `SchemaReader`.

    ``drop`` is called with the name of what the form cannot express. ``knows_evaluated``: all
    keywords that evaluate properties are in the copy.
    """

    def __init__(
        self, root: Schema, drop: Callable[[str], None], *, knows_evaluated: bool = True
    ) -> None:
        self._root = root
        self._drop = drop
        self._knows_evaluated = knows_evaluated
        self._expanded: dict[int, tuple[Alternative, ...]] = {}
        self._expanding: set[int] = set()
        self._constants: dict[str, Schema] = {}
        self._pairs = MAX_PAIRS  # that may still be compared

    def conjunction(self, schemas: Iterable[AnySchema]) -> tuple[Alternative, ...]:
        """The alternatives of all ``schemas`` together; none if they accept nothing."""
        return self.combine(map(self.alternatives, schemas))

    def combine(self, parts: Iterable[Sequence[Alternative]]) -> tuple[Alternative, ...]:
        """The conjunction of ``parts``, each of which is a disjunction."""
        remaining = iter(parts)
        combined = next(remaining, (Alternative(),))
        for part in remaining:
            if len(combined) * len(part) > MAX_ALTERNATIVES:
                self._drop("a schema with too many combinations of alternatives")
                combined = min(part, combined, key=len)
            else:
                merged = (one.merge(other) for one, other in product(combined, part))
                combined = [alternative for alternative in merged if alternative.types]
        return tuple(alternative for alternative in combined if alternative.types)

    def alternatives(self, schema: AnySchema) -> tuple[Alternative, ...]:
        if isinstance(schema, bool):
            return (Alternative(),) if schema else ()
        # By identity: schemas are unhashable, and the copied root keeps them alive.
        key = id(schema)
        if key in self._expanded:
            return self._expanded[key]
        if key in self._expanding:
            self._drop("a $ref to a schema that contains it")
            return (Alternative(),)
        if len(self._expanding) >= MAX_DEPTH:
            self._drop("a schema that is nested too deeply")
            return (Alternative(),)
        self._expanding.add(key)
        alternatives = self.expand(schema)
        if "unevaluatedProperties" in schema:
            alternatives = tuple(
                self.with_unevaluated(alternatives, schema["unevaluatedProperties"])
            )
        self._expanding.discard(key)
        self._expanded[key] = alternatives
        return alternatives

    def expand(self, schema: Schema) -> tuple[Alternative, ...]:
        """The alternatives of ``schema`` without its ``unevaluatedProperties``."""
        parts: list[Sequence[Alternative]] = [(Alternative.of(schema),)]
        if "const" in schema:
            parts.append([*self.literals([schema["const"]])])
        if "enum" in schema:
            parts.append([*self.literals(schema["enum"])])
        parts += map(self.alternatives, schema.get("allOf", ()))
        if "$ref" in schema:
            parts.append(self.alternatives(self.target(schema["$ref"])))
        for keyword in ("anyOf", "oneOf"):
            if keyword not in schema:
                continue
            branches = [self.alternatives(branch) for branch in schema[keyword]]
            union = [alternative for branch in branches for alternative in branch]
            if keyword == "anyOf":
                union = [replace(alternative, in_any_of=len(branches) > 1) for alternative in union]
            elif not self.are_disjoint(branches):
                self._drop("oneOf")
            # By repr, because an Alternative contains dicts.
            parts.append([*{repr(alternative): alternative for alternative in union}.values()])
        return self.combine(parts)

    def target(self, ref: str) -> AnySchema:
        """The schema that ``ref`` refers to: the root, or one of its definitions."""
        if ref == "#":
            return self._root
        schema: AnySchema = self._root.get("$defs", {}).get(ref.removeprefix("#/$defs/"), True)
        return schema

    def literals(self, listed: Sequence[object]) -> Iterator[Alternative]:
        """An ``enum``: one alternative for all scalars, and one for each array and object."""
        types, strings, values, booleans = set(), [], [], set()
        for literal in listed:
            if literal is None:
                types.add("null")
            elif isinstance(literal, bool):
                types.add("boolean")
                booleans.add(literal)
            elif isinstance(literal, str):
                types.add("string")
                strings.append(literal)
            elif isinstance(literal, (int, float)):
                number = numbers.decimal(literal)
                if number is not None and (not number or abs(number.adjusted()) <= MAX_ORDER):
                    types.add("number")
                    values.append(number)
                else:
                    self._drop("a number that is too large")
                    yield Alternative(types=frozenset({"number"}))
            elif isinstance(literal, list):
                yield Alternative(
                    types=frozenset({"array"}),
                    items=(Items([self.constant(item) for item in literal], False),),
                    item_count=Count(len(literal), len(literal)),
                )
            elif isinstance(literal, dict):
                names = {name: self.constant(member) for name, member in literal.items()}
                yield Alternative(
                    types=frozenset({"object"}),
                    members=(Members(names, {}, False, "none"),),
                    required=tuple(names),
                )
        if types:
            yield Alternative(
                types=frozenset(types),
                booleans=frozenset(booleans),
                listed_strings=dict.fromkeys(strings),
                listed_numbers=dict.fromkeys(values),
            )

    def constant(self, value: object) -> Schema:
        """The schema of ``value``: the same object for equal values, as schemas are keys by id."""
        schema = {"const": value}
        return self._constants.setdefault(json.dumps(schema, sort_keys=True), schema)

    def with_unevaluated(
        self, alternatives: Sequence[Alternative], rest: AnySchema
    ) -> Iterator[Alternative]:
        """Each alternative with ``rest`` as ``unevaluatedProperties``."""
        if rest in (True, {}):
            every = Members(evaluates="all")
            yield from (replace(each, members=(*each.members, every)) for each in alternatives)
            return
        if not self._knows_evaluated:
            self._drop("unevaluatedProperties")
            yield from alternatives
            return
        # Of the branches of an `anyOf`, more than one may hold: together, they evaluate all names.
        branches = [each for each in alternatives if each.in_any_of]
        if any(each.evaluated != branches[0].evaluated for each in branches):
            self._drop("unevaluatedProperties")
        together = Alternative(members=tuple(part for each in branches for part in each.members))
        for each in alternatives:
            evaluated = (together if each.in_any_of else each).evaluated
            if evaluated is None:
                yield each
            else:
                closed = replace(evaluated, rest=rest, evaluates="all")
                yield replace(each, members=(*each.members, closed))

    def are_disjoint(self, branches: Sequence[Sequence[Alternative]]) -> bool:
        """Whether no value satisfies two of ``branches``, as far as that is obvious."""
        self._pairs -= sum(len(one) * len(other) for one, other in combinations(branches, 2))
        return self._pairs >= 0 and all(
            self.is_empty(one.merge(other), levels=3)
            for some, others in combinations(branches, 2)
            for one, other in product(some, others)
        )

    def is_empty(self, alternative: Alternative, levels: int) -> bool:
        """Whether it obviously accepts nothing. ``levels`` is how deep to look into nested
        objects."""
        listed = len(alternative.listed_strings or ()) + len(alternative.listed_numbers or ())
        is_short = listed * (1 + len(alternative.patterns)) <= MAX_LISTED
        bounds = alternative.bounds
        lower = [bound for bound in bounds if bound.is_minimum]
        upper = [bound for bound in bounds if not bound.is_minimum]
        is_empty = {
            "boolean": not alternative.booleans,
            "string": (is_short and alternative.strings == ()) or alternative.length.is_empty,
            "number": (is_short and alternative.numbers == ())
            or any(
                low.value > high.value
                or (low.value == high.value and (low.exclusive or high.exclusive))
                for low, high in product(lower, upper)
            ),
            "array": alternative.item_count.is_empty,
        }
        if not all(is_empty.get(kind) for kind in alternative.types - {"object"}):
            return False
        if "object" not in alternative.types:
            return True
        if not levels or alternative.member_patterns > MAX_COMPARED:
            return False
        for name in alternative.required[:MAX_COMPARED]:
            schemas = [schema for schema in alternative.schemas_of(name) if schema is not None]
            if all(self.is_empty(inner, levels - 1) for inner in self.conjunction(schemas)):
                return True
        return False
