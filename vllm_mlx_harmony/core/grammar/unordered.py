"""JSON Schema as rules of a Lark grammar, in which properties may come in any order.

**The normal form.** A schema is a conjunction of keywords, some of which are conjunctions and
disjunctions of schemas. It is brought into a disjunction of alternatives (`_Alternative`), whose
keywords each concern a single JSON type: ``allOf``, ``$ref`` and the keywords next to them are
merged; ``anyOf``, ``oneOf`` and ``enum`` multiply the alternatives. The value of a property has to
satisfy all schemas that apply to its name, which is another conjunction. Each such conjunction
becomes a rule, so references may be recursive.

**An object** is a walk over its members that remembers which names have occurred: a rule with a
64-bit parameter (https://github.com/guidance-ai/llguidance/blob/main/docs/parametric.md), with one
bit for each name, required names first. A name whose bit is set may not occur again, and ``}`` is
allowed once the bits of all required names are set. ``n`` names make ``n`` alternatives, not
``n!``, because llguidance instantiates a rule only for the subsets that an output reaches.
Undeclared names come in loops between the declared ones, so that they do not deepen the parse. In
an object with required names such a loop is bounded: a model that keeps inventing names reaches a
required one before its output is cut. Names are lexemes. A declared name is a literal in all its
spellings (`spellings`); any other is a string that is not one of those.

**White space** belongs to the lexeme before it, up to 256 characters in each place: room for ten
levels of indentation and for columns, while a model that writes nothing else is stopped after a few
dozen tokens.

**What is not supported** is left out, which only ever accepts more, and is listed in ``dropped``.
``format`` is an annotation, as JSON Schema has it. Depth along references, alternatives and text
are all bounded, since a grammar that is too deep crashes llguidance's process, and one that is too
large exhausts its memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal, localcontext
from itertools import chain, combinations, product
from math import lcm
from operator import add, and_, or_
from typing import NamedTuple, TypeVar

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.grammar import property_names, spellings
from vllm_mlx_harmony.core.grammar.escaped import NotExpressible
from vllm_mlx_harmony.core.grammar.json_schema import EVALUATING_NOTHING, SchemaReader
from vllm_mlx_harmony.core.grammar.property_names import AnySchema, Schema

MAX_DEPTH = 64
"""Rules within rules, along references: four levels of llguidance's each."""

MAX_ALTERNATIVES = 200
MAX_TEXT = 200_000
"""Characters of the rules of one schema."""

MAX_COUNT = 1000
"""Items, properties and characters that are counted."""

MAX_OTHERS = 64
"""Undeclared names in a row, in an object with required names."""

MAX_LENGTH = 10_000
MAX_MODULUS = 10_000
MAX_PATTERNS = 3
MAX_PREFIX = 50
MAX_PAIRS = 2000
MAX_ORDER = 30
"""Powers of ten of bounds of numbers, to either side."""

BITS = 64
CACHE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Rules:
    """The symbol that matches a schema's values, the rules it needs, one a line, and the keywords
    that these do not enforce."""

    symbol: str
    lines: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


_SPACE = spellings.WHITE_SPACE

_COMMON = {
    "JSON_SPACE": f"/{_SPACE}/",
    "JSON_BLANK": f"/{_SPACE.replace('{0,', '{1,')}/",
    "JSON_OPEN": rf"/\{{{_SPACE}/",
    "JSON_CLOSE": rf"/\}}{_SPACE}/",
    "JSON_FIRST": rf"/\[{_SPACE}/",
    "JSON_LAST": rf"/\]{_SPACE}/",
    "JSON_COMMA": f"/,{_SPACE}/",
    "JSON_COLON": f"/{_SPACE}:{_SPACE}/",
    "JSON_NAME": f"/{spellings.string()}/",
    "JSON_STRING": f"/{spellings.string()}{_SPACE}/",
    "JSON_NUMBER": f"/{spellings.NUMBER}{_SPACE}/",
    "JSON_INTEGER": f"/{spellings.INTEGER}{_SPACE}/",
    "JSON_TRUE": f"/true{_SPACE}/",
    "JSON_FALSE": f"/false{_SPACE}/",
    "JSON_NULL": f"/null{_SPACE}/",
    "JSON_ZEROS": rf"/\.0+(?:[eE][-+]?0+)?{_SPACE}|[eE][-+]?0+{_SPACE}/",
    "json_value": "JSON_STRING | JSON_NUMBER | JSON_TRUE | JSON_FALSE | JSON_NULL | json_object"
    " | json_array",
    "json_object": "JSON_OPEN (json_member (JSON_COMMA json_member)*)? JSON_CLOSE",
    "json_member": "JSON_NAME JSON_COLON json_value",
    "json_array": "JSON_FIRST (json_value (JSON_COMMA json_value)*)? JSON_LAST",
}

COMMON = "".join(f"{name}: {body}\n" for name, body in _COMMON.items())
"""Rules that are shared by all schemas."""

OBJECT_RULES = Rules("json_object")

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


def rules_of(schema: Mapping[str, object], *, of_object: bool = False, tenant: str = "") -> Rules:
    """The rules of the values that ``schema`` accepts.

    With ``of_object`` it describes an object even if it does not say so. Never raises. Cached per
    ``tenant``.
    """
    try:
        key = json.dumps([tenant, of_object, schema], separators=(",", ":"))
    except (RecursionError, TypeError, ValueError):
        return replace(OBJECT_RULES, dropped=("a schema that is not JSON",))
    known = _cache.get(key)
    if known is None:
        name = hashlib.blake2b(key.partition(",")[2].encode(), digest_size=6).hexdigest()
        with localcontext(spellings.EXACT):
            known = _Translator(SchemaReader(schema), of_object, name, tenant).rules()
        _cache.put(key, known, 2 * (len(key) + sum(map(len, known.lines))) + 512)
    return known


_cache: lru.ByteLRU[str, Rules] = lru.ByteLRU(CACHE_BYTES)


_Value = TypeVar("_Value")


class _TooLarge(Exception):
    """The rules exceed ``MAX_TEXT``."""


class _Count(NamedTuple):
    """How many there may be: at least, and at most (``None``: any number)."""

    least: int = 0
    most: int | None = None

    def both(self, other: _Count) -> _Count:
        most = [each for each in (self.most, other.most) if each is not None]
        return _Count(max(self.least, other.least), min(most, default=None))

    def less(self, taken: int) -> _Count:
        """The count of the rest, after ``taken`` of them."""
        return _Count(
            max(self.least - taken, 0), None if self.most is None else max(self.most - taken, 0)
        )

    @property
    def is_empty(self) -> bool:
        return self.most is not None and self.least > self.most

    def times(self, part: str) -> str:
        """``part``, this many times."""
        if self.most == 0:
            return ""
        return (
            f"({part})*" if self == _ANY_NUMBER else f"({part}){{{self.least},{self.most or ''}}}"
        )

    def listed(self, member: str) -> str:
        """``member``, this many times, separated by commas; at least one is allowed."""
        listed = f"{member} {self.less(1).times(f'JSON_COMMA {member}')}".rstrip()
        return listed if self.least else f"({listed})?"


_ANY_NUMBER = _Count()


@dataclass(frozen=True, slots=True)
class _Members:
    """``properties``, ``patternProperties`` and ``additionalProperties`` (``rest``) of one schema.

    ``is_open``: it has no ``additionalProperties``.
    """

    names: Mapping[str, AnySchema] = field(default_factory=dict)
    patterns: Mapping[str, AnySchema] = field(default_factory=dict)
    rest: AnySchema = True
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class _Items:
    prefix: Sequence[AnySchema] = ()
    rest: AnySchema = True


@dataclass(frozen=True, slots=True)
class _Bound:
    """A ``minimum`` or ``maximum``, exclusive if ``strictly``."""

    value: Decimal
    strictly: bool
    is_least: bool

    def allows(self, value: Decimal) -> bool:
        if value == self.value:
            return not self.strictly
        return (value > self.value) == self.is_least

    @property
    def pattern(self) -> str:
        return spellings.bounded(self.value, is_least=self.is_least, strictly=self.strictly)


def _common(
    one: tuple[_Value, ...] | None, other: tuple[_Value, ...] | None
) -> tuple[_Value, ...] | None:
    if one is None or other is None:
        return one if other is None else other
    return tuple(value for value in one if value in other)


def _united(one: tuple[_Value, ...], other: tuple[_Value, ...]) -> tuple[_Value, ...]:
    return tuple(dict.fromkeys((*one, *other)))


# How `_Alternative.merged` combines a field of two conjunctions.
_INTERSECTED, _EITHER, _ADDED = {"merge": and_}, {"merge": or_}, {"merge": add}
_IN_BOTH, _UNITED, _COUNTED = {"merge": _common}, {"merge": _united}, {"merge": _Count.both}


@dataclass(frozen=True, slots=True)
class _Alternative:
    """A conjunction of keywords that do not combine schemas (as ``allOf`` and ``anyOf`` do).

    ``texts`` and ``values`` are the strings and numbers of an ``enum``.
    """

    types: frozenset[str] = field(default=_TYPES, metadata=_INTERSECTED)
    is_integer: bool = field(default=False, metadata=_EITHER)
    booleans: frozenset[bool] = field(default=frozenset({False, True}), metadata=_INTERSECTED)
    texts: tuple[str, ...] | None = field(default=None, metadata=_IN_BOTH)
    values: tuple[Decimal, ...] | None = field(default=None, metadata=_IN_BOTH)
    length: _Count = field(default=_ANY_NUMBER, metadata=_COUNTED)
    patterns: tuple[str, ...] = field(default=(), metadata=_UNITED)
    bounds: tuple[_Bound, ...] = field(default=(), metadata=_UNITED)
    steps: tuple[Decimal, ...] = field(default=(), metadata=_UNITED)
    items: tuple[_Items, ...] = field(default=(), metadata=_ADDED)
    many_items: _Count = field(default=_ANY_NUMBER, metadata=_COUNTED)
    members: tuple[_Members, ...] = field(default=(), metadata=_ADDED)
    required: tuple[str, ...] = field(default=(), metadata=_UNITED)
    of_names: tuple[AnySchema, ...] = field(default=(), metadata=_ADDED)
    many_members: _Count = field(default=_ANY_NUMBER, metadata=_COUNTED)
    is_one_of_any: bool = field(default=False, metadata=_EITHER)
    """Whether it is a branch of an ``anyOf``: other branches may hold as well, and evaluate other
    properties."""

    def merged(self, other: _Alternative) -> _Alternative:
        """Their conjunction."""
        return _Alternative(
            *(merge(getattr(self, name), getattr(other, name)) for name, merge in _MERGES)
        )

    def allows_text(self, text: str) -> bool:
        if "string" not in self.types or (self.texts is not None and text not in self.texts):
            return False
        if self.length.both(_Count(len(text), len(text))).is_empty:
            return False
        return all(_found(pattern, text) for pattern in self.patterns)

    @property
    def numbers(self) -> tuple[Decimal, ...] | None:
        """The numbers of its ``enum`` that satisfy the other keywords."""
        if self.values is None:
            return None
        return tuple(
            value
            for value in self.values
            if all(bound.allows(value) for bound in self.bounds)
            and not (self.is_integer and value % 1)
            and not any(value % step for step in self.steps)
        )

    @property
    def strings(self) -> tuple[str, ...] | None:
        """The strings of its ``enum`` that satisfy the other keywords."""
        return None if self.texts is None else tuple(filter(self.allows_text, self.texts))


_MERGES = [(one.name, one.metadata["merge"]) for one in fields(_Alternative)]


def _found(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return True


class _Translator:
    """Writes the rules of one schema."""

    def __init__(self, reader: SchemaReader, of_object: bool, name: str, tenant: str) -> None:
        self._root = reader.root(of_object)
        self.dropped = reader.dropped
        lost = self.dropped.keys() - EVALUATING_NOTHING
        self._evaluated_is_known = not lost
        self._name = name
        self._tenant = tenant
        self._lines: dict[str, None] = {}
        self._size = 0
        self._terminals: dict[str, str] = {}
        self._symbols: dict[frozenset[int], str | None] = {}
        self._referred: set[frozenset[int]] = set()
        self._expanded: dict[int, tuple[_Alternative, ...]] = {}
        self._expanding: set[int] = set()
        self._schemas: dict[str, Schema] = {}

    def rules(self) -> Rules:
        of_object = isinstance(self._root, dict) and self._root.get("type") == "object"
        any_ = OBJECT_RULES if of_object else Rules("json_value")
        try:
            symbol = self.value([self._root], 0)
        except (_TooLarge, RecursionError):
            return replace(any_, dropped=(*self.dropped, "a schema that is too large"))
        if symbol is None:
            return replace(any_, dropped=(*self.dropped, "the schema as a whole"))
        return Rules(symbol, tuple(self._lines), tuple(self.dropped))

    def drop(self, what: str) -> None:
        self.dropped[what] = None

    def rule(self, head: str, alternatives: Iterable[str]) -> None:
        line = f"{head}: " + "\n | ".join(alternatives)
        self._size += len(line)
        if self._size > MAX_TEXT:
            raise _TooLarge
        self._lines[line] = None

    def terminal(self, expression: str) -> str:
        """The name of a terminal: a digest of ``expression``, so that schemas can share it."""
        known = self._terminals.get(expression)
        if known is None:
            digest = hashlib.blake2b(expression.encode("utf-8", "replace"), digest_size=6)
            known = self._terminals[expression] = f"J_{digest.hexdigest().upper()}"
            self.rule(known, [expression])
        return known

    # Values

    def value(self, schemas: Iterable[AnySchema], depth: int) -> str | None:
        """The symbol of the values that all ``schemas`` accept; ``None`` if there are none."""
        wanted = {id(one): one for one in schemas if one is not True and one != {}}
        if not wanted:
            return "json_value"
        if any(one is False for one in wanted.values()):
            return None
        if depth >= MAX_DEPTH:
            self.drop("a schema that is nested too deeply")
            return "json_value"
        key = frozenset(wanted)
        if key in self._symbols:
            self._referred.add(key)
            return self._symbols[key]
        # The symbol is known before its rule is written, so that references can be recursive.
        self._symbols[key] = symbol = f"v_{self._name}_{len(self._symbols)}"
        alternatives = self.conjunction(list(wanted.values()), depth)
        symbols = (symbol for one in alternatives for symbol in self.symbols(one, depth))
        written = list(dict.fromkeys(each for each in symbols if each is not None))
        if "json_value" in written:
            written = ["json_value"]
        if not written:
            self._symbols[key] = None
        elif len(written) == 1 and written[0].isidentifier() and key not in self._referred:
            # No rule is needed, unless a recursive reference uses the symbol already.
            self._symbols[key] = written[0]
        else:
            self.rule(symbol, written)
        return self._symbols[key]

    def symbols(self, one: _Alternative, depth: int) -> Iterator[str | None]:
        """A symbol for each type, ``None`` for one that has no value."""
        if one == _Alternative():
            yield "json_value"
            return
        if "null" in one.types:
            yield "JSON_NULL"
        if "boolean" in one.types:
            yield from (f"JSON_{str(value).upper()}" for value in sorted(one.booleans))
        if "string" in one.types:
            yield self.string(one)
        if "number" in one.types:
            yield self.number(one)
        if "array" in one.types:
            yield self.array(one, depth)
        if "object" in one.types:
            yield self.members(one, depth)

    def string(self, one: _Alternative) -> str | None:
        if one.strings is not None:
            if not one.strings:
                return None
            return self.terminal(f"/{spellings.any_of(one.strings)}{_SPACE}/")
        conditions = self.conditions(one, "minLength", "maxLength")
        return self.terminal(f"({conditions}) JSON_SPACE") if conditions else "JSON_STRING"

    def conditions(self, one: _Alternative, least: str, most: str) -> str:
        """An expression of strings with the length and the patterns of ``one``; empty for any."""
        length = self.countable(one.length, least, most, MAX_LENGTH)
        parts = []
        for pattern in one.patterns:
            with suppress(NotExpressible):
                parts.append(f"/{spellings.matching(pattern, self._tenant)}/")
                continue
            self.drop("pattern")
        if len(parts) > MAX_PATTERNS:
            self.drop("pattern")
            parts = parts[:MAX_PATTERNS]
        if length != _ANY_NUMBER:
            parts.append(f"/{spellings.string(*length)}/")
        return " & ".join(parts)

    def countable(self, many: _Count, least: str, most: str, limit: int) -> _Count:
        """``many`` without bounds above ``limit``, which a grammar cannot count to."""
        if many.least > limit:
            self.drop(least)
            many = _Count(0, many.most)
        if many.most is not None and many.most > limit:
            self.drop(most)
            many = _Count(many.least)
        return many

    def number(self, one: _Alternative) -> str | None:
        if one.numbers is not None:
            if not one.numbers:
                return None
            equal = "|".join(map(spellings.equal_to, one.numbers))
            return self.terminal(f"/(?:{equal}){_SPACE}/")
        bounds = []
        for bound in one.bounds:
            if bound.value and abs(bound.value.adjusted()) > MAX_ORDER:
                self.drop("minimum" if bound.is_least else "maximum")
            else:
                bounds.append(bound)
        parts = [self.terminal(f"/{bound.pattern}/") for bound in bounds]
        steps = [spellings.multiple_of(step) for step in one.steps]
        if None in steps and (multiple := self.multiple(one, bounds)):
            return multiple
        parts += [self.terminal(f"/{step}/") for step in steps if step is not None]
        if not parts:
            return "JSON_INTEGER" if one.is_integer else "JSON_NUMBER"
        base = spellings.INTEGER if one.is_integer else spellings.NUMBER
        parts.insert(0, self.terminal(f"/{base}/"))
        return self.terminal(f"({' & '.join(parts)}) JSON_SPACE")

    def multiple(self, one: _Alternative, bounds: Sequence[_Bound]) -> str | None:
        """Multiples that need arithmetic. ``%json`` has it, for numbers without an exponent."""
        whole = all(not step % 1 for step in one.steps)
        step = Decimal(lcm(*map(int, one.steps))) if whole else one.steps[0]
        is_single = whole or (len(one.steps) == 1 and not one.is_integer)
        digits = int("".join(map(str, step.normalize().as_tuple().digits)))
        if not is_single or max(digits, int(step)) > MAX_MODULUS:
            self.drop("multipleOf")
            return None
        schema: Schema = {"type": "integer" if whole else "number"}
        schema["multipleOf"] = int(step) if whole else float(step)
        for bound in bounds:
            keyword = "minimum" if bound.is_least else "maximum"
            if bound.strictly:
                keyword = f"exclusive{keyword.capitalize()}"
            value = float(bound.value) if bound.value % 1 else int(bound.value)
            if keyword not in schema or (schema[keyword] < value) == bound.is_least:
                schema[keyword] = value
        options = {"x-guidance": {"whitespace_flexible": False}}
        written = json.dumps({**options, **schema}, separators=(",", ":"))
        name = f"m_{self._name}_{len(self._lines)}"
        self.rule(name, [f"%json {written}"])
        return f"{name} (JSON_ZEROS | JSON_BLANK)?"

    def array(self, one: _Alternative, depth: int) -> str | None:  # noqa: C901 - one case per keyword
        many = self.countable(one.many_items, "minItems", "maxItems", MAX_COUNT)
        if many.is_empty:
            return None
        length = max((len(each.prefix) for each in one.items), default=0)
        if length > MAX_PREFIX:
            self.drop("prefixItems")
            return "json_array"
        heads: list[str] = []
        for at in range(length):
            here = [each.prefix[at] if at < len(each.prefix) else each.rest for each in one.items]
            item = self.value(here, depth + 1)
            if item is None:  # nothing is valid here, so the array ends before
                many = many.both(_Count(most=at))
                break
            heads.append(item)
        rest = self.value([each.rest for each in one.items], depth + 1)
        if rest is None:
            many = many.both(_Count(most=length))
        if many.is_empty:
            return None
        heads = heads[: many.most]
        more, within = many.less(len(heads)), ""
        if rest is not None and more.most != 0:
            within = more.times(f"JSON_COMMA {rest}") if heads else more.listed(rest)
        for at in range(len(heads) - 1, -1, -1):
            within = f"{heads[at]} {within}"
            if at:
                within = f"JSON_COMMA {within}"
            if at >= many.least:
                within = f"({within})?"
        if within == "(json_value (JSON_COMMA json_value)*)?":
            return "json_array"
        return f"JSON_FIRST {within} JSON_LAST"

    # Objects

    def members(self, one: _Alternative, depth: int) -> str | None:
        many = self.countable(one.many_members, "minProperties", "maxProperties", 255)
        of_names = self.conjunction(one.of_names, depth) if one.of_names else None
        listed = self.listed_names(of_names)
        declared = dict.fromkeys(name for each in one.members for name in each.names)
        declared.update(dict.fromkeys((*one.required, *listed)))
        values: dict[str, str] = {}
        for name in declared:
            value = None
            if of_names is None or any(each.allows_text(name) for each in of_names):
                value = self.value(self.schemas_of_member(one.members, name), depth + 1)
            if value is not None:
                values[name] = value
            elif name in one.required:
                return None
        others = list(self.other_members(one, declared, of_names, depth))
        required = [name for name in values if name in one.required]
        if many.most is not None and len(required) > many.most:
            return None
        return self.walk(required, values, others, many)

    def schemas_of_member(self, members: Iterable[_Members], name: str) -> Iterator[AnySchema]:
        """All schemas that apply to the member ``name``."""
        for each in members:
            found = [each.names[name]] if name in each.names else []
            found += [rest for pattern, rest in each.patterns.items() if _found(pattern, name)]
            yield from found or [each.rest]

    def listed_names(self, of_names: Sequence[_Alternative] | None) -> list[str]:
        """The names that ``propertyNames`` allows, if there are finitely many."""
        texts = [each.strings for each in of_names or () if "string" in each.types]
        if of_names is None or any(each is None for each in texts):
            return []
        return [text for each in texts for text in each or ()]

    def other_members(  # noqa: C901 - one case per rule
        self,
        one: _Alternative,
        declared: Iterable[str],
        of_names: Sequence[_Alternative] | None,
        depth: int,
    ) -> Iterator[str]:
        """Members with undeclared names, one for each set of patterns that a name may match."""
        patterns = {pattern: None for each in one.members for pattern in each.patterns}
        written = {}
        for pattern in patterns:
            with suppress(NotExpressible):
                written[pattern] = self.terminal(f"/{spellings.matching(pattern, self._tenant)}/")
        # There is one terminal for each subset of the patterns, so there must be few.
        is_known = len(written) == len(patterns) <= MAX_PATTERNS
        if not is_known:
            self.drop("patternProperties")
        names = "JSON_NAME"
        if of_names is not None:
            names = " | ".join(dict.fromkeys(self.names(of_names)))
            if not names:
                return
        if self.listed_names(of_names):
            return
        names_of = [*patterns] if is_known else []
        subsets = (combinations(names_of, count) for count in range(len(names_of) + 1))
        for matched in chain.from_iterable(subsets):
            schemas: list[AnySchema] = []
            for each in one.members:
                found = [rest for pattern, rest in each.patterns.items() if pattern in matched]
                schemas += found or ([each.rest] if is_known or not each.patterns else [])
            value = self.value(schemas, depth + 1)
            if value is None:
                continue
            name = f"({names})" if " | " in names else names
            for pattern in patterns if is_known else ():
                name += f" & {'' if pattern in matched else '~'}{written[pattern]}"
            if declared:
                name += f" & ~{self.terminal(f'/{spellings.any_of(declared)}/')}"
            yield f"{name if name == 'JSON_NAME' else self.terminal(name)} JSON_COLON {value}"

    def names(self, of_names: Iterable[_Alternative]) -> Iterator[str]:
        """The terminals of the names that ``propertyNames`` allows."""
        for each in of_names:
            if "string" not in each.types:
                continue
            if each.strings is not None:
                if each.strings:
                    yield self.terminal(f"/{spellings.any_of(each.strings)}/")
                continue
            conditions = self.conditions(each, "propertyNames", "propertyNames")
            yield self.terminal(conditions) if conditions else "JSON_NAME"

    def walk(  # noqa: C901, PLR0915 - one case per rule
        self,
        required: Sequence[str],
        values: Mapping[str, str],
        others: Sequence[str],
        many: _Count,
    ) -> str | None:
        """An object whose members come in any order, the required ones among them.

        ``others`` are the undeclared members. For ``{"a": …, "b"?: …}`` with others, the rules of
        the object ``o`` are, without their digests::

            o:     JSON_OPEN o_m::0x0
            o_m::_: o_l A o_s::set_bit(0) %if bit_clear(0)      next comes the member a
                  | o_l B o_s::set_bit(1) %if bit_clear(1)
                  | o_o (JSON_COMMA o_o)* JSON_CLOSE %if is_ones([0:1])
            o_s::_: JSON_CLOSE %if is_ones([0:1])               a member has come
                  | JSON_COMMA o_m::_
            o_l:   (o_o JSON_COMMA){0,64}                       others before a or b
            o_o:   an undeclared member

        If ``minProperties`` or ``maxProperties`` bound the number of members, the highest bits of
        the parameter count those that are not required, and ``o_c`` follows such a member in place
        of ``o_s``.
        """
        least, most = counted_members = many.less(len(required))
        room = (most or least).bit_length() + 1 if least or most is not None else 0
        bits = BITS - room
        if len(required) > bits:  # the others may be missing
            self.drop(f"required for more than {bits} names of one object")
            required = required[:bits]
        tracked = [*required]
        if len(values) <= bits:
            tracked += [name for name in values if name not in required]
        loops = [*others, *self.untracked_members(values, tracked)]
        if not loops and least > len(tracked) - len(required):
            return None
        if not (loops or tracked) or (most == 0 and not required):
            return "JSON_OPEN JSON_CLOSE"
        if not tracked:
            is_any = loops == ["JSON_NAME JSON_COLON json_value"] and not least and most is None
            member = loops[0] if len(loops) == 1 else f"({' | '.join(loops)})"
            return (
                "json_object"
                if is_any
                else f"JSON_OPEN {counted_members.listed(member)} JSON_CLOSE"
            )
        walk = f"o_{self._name}_{len(self._lines)}"
        counted = f"[{bits}:{BITS}]"
        all_required = f"is_ones([0:{len(required)}])"
        has_room = "" if most is None else f"lt({counted}, {most})"
        # With a maximum, others count one by one: a loop could pass it.
        loop = f"{walk}_l " if loops and most is None else ""
        alternatives = []
        for bit, name in enumerate(tracked):
            member = f"{self.terminal(f'/{spellings.text(name)}/')} JSON_COLON {values[name]}"
            is_counted = room and bit >= len(required)
            condition = _when(f"bit_clear({bit})", has_room if is_counted else "")
            after = f"{walk}_{'c' if is_counted else 's'}::set_bit({bit})"
            alternatives.append(f"{loop}{member} {after}{condition}")
        if loops:
            self.rule(f"{walk}_o", loops)
            most_others = str(MAX_OTHERS) if required else ""
            self.rule(f"{walk}_l", [f"({walk}_o JSON_COMMA){{0,{most_others}}}"])
            if most is None:
                enough = f"ge({counted}, {least - 1})" if least else ""
                last = _when(all_required if required else "", enough)
                alternatives.append(f"{walk}_o (JSON_COMMA {walk}_o)* JSON_CLOSE{last}")
            if room:
                few = has_room or f"lt({counted}, {least})"
                alternatives.append(f"{walk}_o {walk}_c::_{_when(few)}")
        self.rule(f"{walk}_m::_", alternatives)
        for after, come in (("s", 0), ("c", 1)) if room else (("s", 0),):
            enough = f"ge({counted}, {least - come})" if least else ""
            # A comma needs a member that may follow it.
            free = "" if loops else f"not(is_ones([0:{len(tracked)}]))"
            if most is not None:
                free = "" if loops else f"not(is_ones([{len(required)}:{len(tracked)}]))"
                free = _all(f"lt({counted}, {most - come})", free)
                free = f"or(not({all_required}), {free})" if required else free
            is_whole = _when(all_required if required else "", enough)
            then = f"{walk}_m::{f'incr({counted})' if come else '_'}"
            rules = [f"JSON_CLOSE{is_whole}", f"JSON_COMMA {then}{_when(free)}"]
            self.rule(f"{walk}_{after}::_", rules)
        empty = [] if required or least else ["JSON_OPEN JSON_CLOSE"]
        self.rule(walk, [f"JSON_OPEN {walk}_m::0x0", *empty])
        return walk

    def untracked_members(self, values: Mapping[str, str], tracked: Sequence[str]) -> Iterator[str]:
        """Declared members that may be repeated, since they have no bit of their own."""
        names: dict[str, list[str]] = {}
        for name, value in values.items():
            if name not in tracked:
                names.setdefault(value, []).append(name)
        for value, alike in names.items():
            yield f"{self.terminal(f'/{spellings.any_of(alike)}/')} JSON_COLON {value}"

    # Alternatives

    def conjunction(self, schemas: Sequence[AnySchema], depth: int) -> tuple[_Alternative, ...]:
        """The alternatives of a conjunction."""
        found: tuple[_Alternative, ...] = (_Alternative(),)
        for one in schemas:
            found = self.both(found, self.alternatives(one, depth))
        return found

    def both(
        self, some: Sequence[_Alternative], others: Sequence[_Alternative]
    ) -> tuple[_Alternative, ...]:
        if len(some) * len(others) > MAX_ALTERNATIVES:
            self.drop("a schema with too many combinations of alternatives")
            return tuple(some if len(some) < len(others) else others)
        merged = (one.merged(other) for one, other in product(some, others))
        return tuple(one for one in merged if one.types)

    def alternatives(  # noqa: C901, PLR0912 - one case per keyword
        self, schema: AnySchema, depth: int
    ) -> tuple[_Alternative, ...]:
        if isinstance(schema, bool):
            return (_Alternative(),) if schema else ()
        key = id(schema)
        if key in self._expanded:
            return self._expanded[key]
        if key in self._expanding:
            self.drop("a $ref to a schema that contains it")
            return (_Alternative(),)
        if len(self._expanding) >= MAX_DEPTH:
            self.drop("a schema that is nested too deeply")
            return (_Alternative(),)
        self._expanding.add(key)
        found: tuple[_Alternative, ...] = (self.own_keywords(schema),)
        if "const" in schema:
            found = self.both(found, tuple(self.literals([schema["const"]])))
        if "enum" in schema:
            found = self.both(found, tuple(self.literals(schema["enum"])))
        for member in schema.get("allOf", ()):
            found = self.both(found, self.alternatives(member, depth))
        if "$ref" in schema:
            target = property_names.target(self._root, schema["$ref"])
            found = self.both(found, self.alternatives(target, depth))
        for keyword in ("anyOf", "oneOf"):
            if keyword not in schema:
                continue
            branches = [self.alternatives(one, depth) for one in schema[keyword]]
            united = [one for branch in branches for one in branch]
            if keyword == "anyOf":
                united = [replace(one, is_one_of_any=len(branches) > 1) for one in united]
            elif not self.are_disjoint(branches, depth):
                self.drop("oneOf")
            found = self.both(found, [*{repr(one): one for one in united}.values()])
        if "unevaluatedProperties" in schema:
            found = tuple(self.unevaluated(found, schema["unevaluatedProperties"]))
        self._expanding.discard(key)
        self._expanded[key] = found
        return found

    def own_keywords(self, schema: Schema) -> _Alternative:
        """The keywords of ``schema`` that do not combine schemas."""
        types = schema.get("type", list(_TYPES))
        named = {types} if isinstance(types, str) else set(types)
        bounds = []
        for keyword, is_least in (("minimum", True), ("maximum", False)):
            value = spellings.decimal(schema.get(keyword))
            exclusive = schema.get(f"exclusive{keyword.capitalize()}")
            if value is not None:
                bounds.append(_Bound(value, exclusive is True, is_least))
            beyond = spellings.decimal(exclusive)
            if beyond is not None:
                bounds.append(_Bound(beyond, True, is_least))
        step = spellings.decimal(schema.get("multipleOf"))
        items: tuple[_Items, ...] = ()
        if "items" in schema or "prefixItems" in schema:
            of_items = schema.get("items", True)
            if isinstance(of_items, list):  # of drafts before 2020-12
                items = (_Items(of_items, schema.get("additionalItems", True)),)
            else:
                items = (_Items(schema.get("prefixItems", ()), of_items),)
        members: tuple[_Members, ...] = ()
        if not schema.keys().isdisjoint(_OF_MEMBERS):
            members = (
                _Members(
                    schema.get("properties", {}),
                    schema.get("patternProperties", {}),
                    schema.get("additionalProperties", True),
                    "additionalProperties" not in schema,
                ),
            )
        return _Alternative(
            types=frozenset("number" if one == "integer" else one for one in named),
            is_integer="integer" in named and "number" not in named,
            length=_Count(schema.get("minLength", 0), schema.get("maxLength")),
            patterns=(schema["pattern"],) if "pattern" in schema else (),
            bounds=tuple(bounds),
            steps=(abs(step),) if step else (),
            items=items,
            many_items=_Count(schema.get("minItems", 0), schema.get("maxItems")),
            members=members,
            required=tuple(dict.fromkeys(schema.get("required", ()))),
            of_names=(schema["propertyNames"],) if "propertyNames" in schema else (),
            many_members=_Count(schema.get("minProperties", 0), schema.get("maxProperties")),
        )

    def literals(self, listed: Sequence[object]) -> Iterator[_Alternative]:
        """An ``enum``: one alternative for all scalars, and one for each array and object."""
        types, texts, values, booleans = set(), [], [], set()
        for one in listed:
            if one is None:
                types.add("null")
            elif isinstance(one, bool):
                types.add("boolean")
                booleans.add(one)
            elif isinstance(one, str):
                types.add("string")
                texts.append(one)
            elif isinstance(one, (int, float)):
                value = spellings.decimal(one)
                if value is not None and (not value or abs(value.adjusted()) <= MAX_ORDER):
                    types.add("number")
                    values.append(value)
                else:
                    self.drop("a number that is too large")
                    yield _Alternative(types=frozenset({"number"}))
            elif isinstance(one, list):
                yield _Alternative(
                    types=frozenset({"array"}),
                    items=(_Items([self.constant(each) for each in one], False),),
                    many_items=_Count(len(one), len(one)),
                )
            elif isinstance(one, dict):
                names = {name: self.constant(each) for name, each in one.items()}
                yield _Alternative(
                    types=frozenset({"object"}),
                    members=(_Members(names, {}, False, False),),
                    required=tuple(names),
                )
        if types:
            yield _Alternative(
                types=frozenset(types),
                booleans=frozenset(booleans),
                texts=tuple(dict.fromkeys(texts)),
                values=tuple(dict.fromkeys(values)),
            )

    def constant(self, value: object) -> Schema:
        schema = {"const": value}
        key = json.dumps(schema, sort_keys=True)
        return self._schemas.setdefault(key, schema)

    def unevaluated(self, found: Sequence[_Alternative], rest: AnySchema) -> Iterator[_Alternative]:
        """Each alternative with ``rest`` as ``unevaluatedProperties``."""
        if rest in (True, {}):
            all_ = _Members(is_open=False)
            yield from (replace(one, members=(*one.members, all_)) for one in found)
            return
        if not self._evaluated_is_known:
            self.drop("unevaluatedProperties")
            yield from found
            return
        together = [one for one in found if one.is_one_of_any]
        names = [{name for each in one.members for name in each.names} for one in together]
        if any(each != names[0] for each in names):
            self.drop("unevaluatedProperties")
        for one in found:
            beside = together if one.is_one_of_any else [one]
            members = [each for other in beside for each in other.members]
            if any(not each.is_open for each in members):
                yield one
                continue
            evaluated = _Members(
                {name: True for each in members for name in each.names},
                {pattern: True for each in members for pattern in each.patterns},
                rest,
                False,
            )
            yield replace(one, members=(*one.members, evaluated))

    # oneOf

    def are_disjoint(self, branches: Sequence[Sequence[_Alternative]], depth: int) -> bool:
        """Whether no value satisfies two of ``branches``."""
        pairs = sum(len(one) * len(other) for one, other in combinations(branches, 2))
        if pairs > MAX_PAIRS:
            return False
        return all(
            self.is_empty(one.merged(other), depth, 3)
            for some, others in combinations(branches, 2)
            for one, other in product(some, others)
        )

    def is_empty(self, one: _Alternative, depth: int, levels: int) -> bool:
        """Whether it obviously accepts nothing. ``levels`` is how deep to look into nested
        objects."""
        lower = [bound for bound in one.bounds if bound.is_least]
        upper = [bound for bound in one.bounds if not bound.is_least]
        is_empty = {
            "boolean": not one.booleans,
            "string": one.strings == () or one.length.is_empty,
            "number": one.numbers == ()
            or any(
                low.value > high.value
                or (low.value == high.value and (low.strictly or high.strictly))
                for low, high in product(lower, upper)
            ),
            "array": one.many_items.is_empty,
        }
        if not all(is_empty.get(kind) for kind in one.types - {"object"}):
            return False
        if "object" not in one.types:
            return True
        values = (self.schemas_of_member(one.members, name) for name in one.required)
        return levels > 0 and any(
            all(
                self.is_empty(each, depth, levels - 1)
                for each in self.conjunction(list(value), depth)
            )
            for value in values
        )


_OF_MEMBERS = frozenset({"properties", "patternProperties", "additionalProperties"})


def _all(*conditions: str) -> str:
    """The conjunction of the conditions that are not empty."""
    given = [one for one in conditions if one]
    return f"and({', '.join(given)})" if len(given) > 1 else "".join(given)


def _when(*conditions: str) -> str:
    condition = _all(*conditions)
    return f" %if {condition}" if condition else ""
