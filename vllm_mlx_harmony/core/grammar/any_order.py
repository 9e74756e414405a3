r"""What was not asked to be strict: JSON Schema as Lark rules, with properties in any order.

A caller who does not ask for ``strict`` gets no guarantee, so valid output must not change. These
rules only keep a model from what models really get wrong (semantics C1):

- a name that is not declared, in an object that allows no others; a name that comes twice; an end
  before all required names have come
- a value of the wrong type
- a text that ``enum`` or ``const`` does not list

and the same inside items, properties, unions and references. Everything else is the caller's to
check: bounds, lengths, patterns, counts, ``format``, ``not``, ``if``, and which numbers an ``enum``
lists. So no number or pattern of a client reaches llguidance, whose compiler some of them bring
down. All that it gets of a client are names and listed texts, as literals.

llguidance has JSON Schema of its own (`strict`), but with one order of properties and one spelling
of each name. Here every text is in the language that a JSON parser and JSON Schema accept.

**Schemas that apply together.** ``allOf``, ``$ref`` and the keywords beside them all hold for the
same value; of ``anyOf`` and ``oneOf``, one branch does. Both are computed on `_Values`: the scalars
that are allowed, and for objects and arrays a list of alternatives, each of which is the schemas
that hold for them together. Members and items are not merged here: all schemas that apply to the
same one are another conjunction, with a rule of its own. It is named before it is written, so
references may be recursive.

**Objects** are a walk over their members that remembers which names have come: a rule with a
64-bit parameter (https://github.com/guidance-ai/llguidance/blob/main/docs/parametric.md), one bit
for each name, required names first. A name whose bit is set may not come again, and ``}`` needs the
bits of all required names. ``n`` names make ``n`` alternatives, not ``n!``, because llguidance
instantiates the rule only for the sets that an output reaches.

**Names and texts** are lexemes in all their spellings: JSON may write ``a`` as ``\u0061``, and
``/`` as ``\/`` (RFC 8259, section 7). An undeclared name is a string that is none of the declared
ones. In an object with required names, at most `MAX_OTHERS` come in a row: a model that keeps
inventing names reaches a required one before its output is cut.

**White space** belongs to the lexeme before it, up to `MAX_WHITE_SPACE` characters in each place:
room for ten levels of indentation and for columns, while a model that writes nothing else is
stopped after a few dozen tokens.

**Bounds.** Depth, shapes, names and text are limited, because rules that are too deep or too large
bring llguidance down, too. What exceeds a limit is left out, which only ever accepts more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TypeAlias

from vllm_mlx_harmony.core import lru, vocab
from vllm_mlx_harmony.core.schema import (
    UNSUPPORTED,
    AnySchema,
    Schema,
    SchemaReader,
)

MAX_DEPTH = 64
"""Schemas within schemas, along references."""

MAX_ALTERNATIVES = 200
"""Alternatives for the objects, or the arrays, of schemas that apply together; and the schemas of
one alternative."""

MAX_WORK = 200_000
"""What is looked at of one schema: alternatives, names, and characters of names and texts."""

MAX_PREFIX = 50
"""Items with a schema of their own (``prefixItems``)."""

MAX_TEXT = 200_000
"""Characters of the rules of one schema."""

MAX_OTHERS = 64
MAX_WHITE_SPACE = 256

BITS = 64
"""Names of an object that are looked for: the size of llguidance's parameters."""

CACHE_BYTES = 8 * 2**20

# --- lexemes ---

_SPACE = rf"[ \t\n\r]{{0,{MAX_WHITE_SPACE}}}"
_STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\\x2fbfnrt]|\\u[0-9a-fA-F]{4})*"'
_WHOLE = r"(?:0|[1-9][0-9]*)"
_NUMBER = rf"-?{_WHOLE}(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{{1,3}})?"

_SHIFT = 20
"""Digits by which the exponent of an integer may move its point: ``1.5e1`` is one, ``1.25e1`` is
not."""


def _integer() -> str:
    """Numbers without a fractional part, in any spelling."""
    finite = "0*(?:[0-9]{1,2}|[12][0-9]{2}|30[0-8])"  # others are read as infinity
    forms = [rf"{_WHOLE}(?:\.0+)?(?:[eE](?:\+?{finite}|-0+))?", r"0(?:\.0+)?[eE]-[0-9]{1,3}"]
    for digits in range(1, _SHIFT + 1):
        forms.append(rf"{_WHOLE}\.[0-9]{{1,{digits}}}0*[eE]\+?0*{digits}")
        forms.append(rf"[1-9][0-9]*0{{{digits}}}(?:\.0+)?[eE]-0*{digits}")
    forms.append(rf"{_WHOLE}\.[0-9]+[eE]\+?0*(?:2[1-9]|[3-9][0-9]|[12][0-9]{{2}})")
    return f"-?(?:{'|'.join(forms)})"


_COMMON = {
    "JSON_SPACE": f"/{_SPACE}/",
    "JSON_BLANK": f"/{_SPACE.replace('{0,', '{1,')}/",
    "JSON_OPEN": rf"/\{{{_SPACE}/",
    "JSON_CLOSE": rf"/\}}{_SPACE}/",
    "JSON_FIRST": rf"/\[{_SPACE}/",
    "JSON_LAST": rf"/\]{_SPACE}/",
    "JSON_COMMA": f"/,{_SPACE}/",
    "JSON_COLON": f"/{_SPACE}:{_SPACE}/",
    "JSON_NAME": f"/{_STRING}/",
    "JSON_STRING": f"/{_STRING}{_SPACE}/",
    "JSON_NUMBER": f"/{_NUMBER}{_SPACE}/",
    "JSON_INTEGER": f"/{_integer()}{_SPACE}/",
    "JSON_TRUE": f"/true{_SPACE}/",
    "JSON_FALSE": f"/false{_SPACE}/",
    "JSON_NULL": f"/null{_SPACE}/",
    "json_value": "JSON_STRING | JSON_NUMBER | JSON_TRUE | JSON_FALSE | JSON_NULL | json_object"
    " | json_array",
    "json_object": "JSON_OPEN (json_member (JSON_COMMA json_member)*)? JSON_CLOSE",
    "json_member": "JSON_NAME JSON_COLON json_value",
    "json_array": "JSON_FIRST (json_value (JSON_COMMA json_value)*)? JSON_LAST",
}

NOTHING = f"<[{vocab.UNUSED}]>"
"""Matches an id that no model generates: a rule cannot be empty."""

COMMON = "".join(f"{name}: {body}\n" for name, body in _COMMON.items())
"""Rules that are shared by all schemas."""

_SHORT = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", '"': '"', "\\": "\\", "/": "/"}


def _spelled(texts: Iterable[str]) -> str:
    """A regular expression of ``texts`` as JSON strings, in every spelling."""
    return f'"(?:{"|".join("".join(map(_character, text)) for text in texts)})"'


@lru_cache(maxsize=4096)
def _character(char: str) -> str:
    code = ord(char)
    units = [code] if char <= "\uffff" else [0xD7C0 + (code >> 10), 0xDC00 + (code & 0x3FF)]
    forms = ["".join(rf"\\u{''.join(map(_hexadecimal, f'{unit:04x}'))}" for unit in units)]
    if char in _SHORT:
        forms.append(rf"\\{_literal(_SHORT[char])}")
    if char >= " " and char not in '"\\' and not "\ud800" <= char <= "\udfff":
        forms.append(_literal(char))
    return f"(?:{'|'.join(forms)})"


def _hexadecimal(digit: str) -> str:
    return digit if digit.isdigit() else f"[{digit}{digit.upper()}]"


def _literal(char: str) -> str:
    return char if char.isalnum() or char in "_-" or not char.isascii() else rf"\x{ord(char):02x}"


# --- schemas that apply together ---

_KINDS: Mapping[str, frozenset[str]] = {
    "null": frozenset({"null"}),
    "boolean": frozenset({"true", "false"}),
    "integer": frozenset({"integer"}),
    "number": frozenset({"integer", "fraction"}),
}
_SCALARS = frozenset().union(*_KINDS.values())

_OF_OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
)
_OF_ARRAYS = frozenset({"items", "prefixItems", "additionalItems"})

_Texts: TypeAlias = "Mapping[str, None] | None"
"""A set of strings, in order; ``None``: all of them."""

_Alternatives: TypeAlias = "tuple[tuple[Schema, ...], ...]"
"""Sets of schemas, of which all of one set hold."""


@dataclass(frozen=True, slots=True)
class _Values:
    """A set of JSON values: by default, all of them. ``scalars`` are those without strings."""

    scalars: frozenset[str] = _SCALARS
    texts: _Texts = None
    arrays: _Alternatives = ((),)
    objects: _Alternatives = ((),)

    @classmethod
    def of(cls, schema: Schema) -> _Values:
        """Those that the keywords of ``schema`` allow which do not combine schemas."""
        arrays = ((),) if _OF_ARRAYS.isdisjoint(schema) else ((schema,),)
        objects = ((),) if _OF_OBJECTS.isdisjoint(schema) else ((schema,),)
        values = cls(arrays=arrays, objects=objects)
        if "type" in schema:
            named = schema["type"]
            names = {named} if isinstance(named, str) else set(named)
            values = values.both(cls.of_types(names))
        if "const" in schema:
            values = values.both(cls.listed([schema["const"]]))
        if "enum" in schema:
            values = values.both(cls.listed(schema["enum"]))
        return values

    @classmethod
    def of_types(cls, names: Iterable[str]) -> _Values:
        return cls(
            frozenset().union(*(_KINDS.get(name, ()) for name in names)),
            None if "string" in names else {},
            ((),) if "array" in names else (),
            ((),) if "object" in names else (),
        )

    @classmethod
    def listed(cls, literals: Iterable[object]) -> _Values:
        """``literals``, and all other numbers, arrays and objects if there are some among them."""
        types = set()
        scalars = set()
        for literal in literals:
            if literal is None or isinstance(literal, bool):
                scalars.add(json.dumps(literal))
            elif isinstance(literal, (int, float)):
                scalars.add("integer" if literal % 1 == 0 else "fraction")
            elif not isinstance(literal, str):
                types.add("array" if isinstance(literal, list) else "object")
        texts = {literal: None for literal in literals if isinstance(literal, str)}
        return replace(cls.of_types(types), scalars=frozenset(scalars), texts=texts)

    def both(self, other: _Values) -> _Values:
        return _Values(
            self.scalars & other.scalars,
            _intersection(self.texts, other.texts),
            _product(self.arrays, other.arrays),
            _product(self.objects, other.objects),
        )

    def either(self, other: _Values) -> _Values:
        texts: _Texts = None
        if self.texts is not None and other.texts is not None:
            texts = {**self.texts, **other.texts}
        return _Values(
            self.scalars | other.scalars,
            texts,
            _distinct((*self.arrays, *other.arrays)),
            _distinct((*self.objects, *other.objects)),
        )

    @property
    def size(self) -> int:
        return 1 + len(self.texts or ()) + len(self.arrays) + len(self.objects)


_NOTHING = _Values.of_types(())


def _intersection(one: _Texts, other: _Texts) -> _Texts:
    if one is None or other is None:
        return one if other is None else other
    return {text: None for text in one if text in other}


def _product(some: _Alternatives, others: _Alternatives) -> _Alternatives:
    """Each of ``some`` together with each of ``others``; the fewer alone if that is too much."""
    if len(some) * len(others) > max(MAX_ALTERNATIVES, len(some), len(others)):
        return min(some, others, key=len)
    return _distinct((*one, *other)[:MAX_ALTERNATIVES] for one, other in product(some, others))


def _distinct(alternatives: Iterable[tuple[Schema, ...]]) -> _Alternatives:
    return tuple({tuple(map(id, schemas)): schemas for schemas in alternatives}.values())


# --- rules ---


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one schema: the ``symbol`` of its values, and a line for each rule.

    ``dropped`` tells what of the schema could not be read, or is too large.
    """

    symbol: str
    lines: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(map(len, self.lines))


OBJECT_RULES = Rules("json_object")


def rules_of(schema: Mapping[str, object], *, of_object: bool = False, tenant: str = "") -> Rules:
    """The rules of the values that ``schema`` accepts.

    With ``of_object`` it describes an object even if it does not say so. Never raises. Cached per
    ``tenant``, so that no timing reveals another tenant's tools.
    """
    try:
        key = json.dumps([tenant, of_object, schema], separators=(",", ":"))
    except (RecursionError, TypeError, ValueError):
        return replace(OBJECT_RULES, dropped=("a schema that is not JSON",))
    known = _cache.get(key)
    if known is None:
        name = hashlib.blake2b(key.partition(",")[2].encode(), digest_size=6).hexdigest()
        known = _RuleWriter(SchemaReader(schema), of_object, name).rules()
        _cache.put(key, known, 2 * (len(key) + known.size) + 512)
    return known


_cache: lru.ByteLRU[str, Rules] = lru.ByteLRU(CACHE_BYTES)


class _TooLarge(Exception):
    """The rules, or the work to write them, exceed a limit."""


class _RuleWriter:
    """Writes the rules of one schema, whose symbols contain ``name``.

    A method for a kind of values returns their symbol, or ``None`` if there are no such values.
    """

    def __init__(self, reader: SchemaReader, of_object: bool, name: str) -> None:
        self._root = reader.root(of_object)
        self._dropped = {what: None for what in reader.dropped if what not in UNSUPPORTED}
        self._name = name
        self._lines: dict[str, None] = {}
        self._size = 0
        self._work_left = MAX_WORK
        self._depth = 0
        self._symbols: dict[frozenset[int], str | None] = {}
        self._referred: set[frozenset[int]] = set()
        self._values: dict[int, _Values] = {}
        self._open: set[int] = set()
        self._rests: dict[int, AnySchema] = {}
        self._texts: dict[str, str] = {}

    def rules(self) -> Rules:
        weakest = OBJECT_RULES if self._root.get("type") == "object" else Rules("json_value")
        try:
            symbol = self.value([self._root])
        except (_TooLarge, RecursionError):
            return replace(weakest, dropped=(*self._dropped, "a schema that is too large"))
        if symbol is None:
            return replace(weakest, dropped=(*self._dropped, "a schema that no value fits"))
        return Rules(symbol, tuple(self._lines), tuple(self._dropped))

    def rule(self, head: str, alternatives: Iterable[str]) -> str:
        line = f"{head}: " + "\n | ".join(alternatives)
        if line not in self._lines:
            self._size += len(line)
            if self._size > MAX_TEXT:
                raise _TooLarge
            self._lines[line] = None
        return head

    def terminal(self, expression: str) -> str:
        """The name of a terminal: a digest of ``expression``, so that schemas can share it."""
        digest = hashlib.blake2b(expression.encode("utf-8", "replace"), digest_size=6).hexdigest()
        return self.rule(f"J_{digest.upper()}", [expression])

    def work(self, amount: int) -> None:
        """Raises ``_TooLarge`` if ``amount`` is more than may still be looked at."""
        self._work_left -= amount
        if self._work_left < 0:
            raise _TooLarge

    def text(self, text: str) -> str:
        """The terminal of one string, without white space."""
        if text not in self._texts:
            self.work(len(text))
            self._texts[text] = self.terminal(f"/{_spelled([text])}/")
        return self._texts[text]

    # Schemas: each is known by its identity, since it is unhashable; the root keeps it alive.

    def values(self, schema: AnySchema) -> _Values:
        """The values that ``schema`` accepts."""
        if isinstance(schema, bool):
            return _Values() if schema else _NOTHING
        key = id(schema)
        if key in self._values:
            return self._values[key]
        if key in self._open:
            self._dropped["a $ref to a schema that contains it"] = None
            return _Values()
        if len(self._open) >= MAX_DEPTH:
            self._dropped["a schema that is nested too deeply"] = None
            return _Values()
        self._open.add(key)
        parts = [_Values.of(schema), *map(self.values, schema.get("allOf", ()))]
        if "$ref" in schema:
            parts.append(self.values(self.target(schema["$ref"])))
        for union in ("anyOf", "oneOf"):
            if union in schema:
                branches = map(self.values, schema[union])
                parts.append(self.combined(_Values.either, _NOTHING, branches))
        self._open.discard(key)
        self._values[key] = self.combined(_Values.both, _Values(), parts)
        return self._values[key]

    def combined(
        self,
        combine: Callable[[_Values, _Values], _Values],
        first: _Values,
        others: Iterable[_Values],
    ) -> _Values:
        for other in others:
            self.work(first.size + other.size)
            first = combine(first, other)
        return first

    def followed(self, schema: AnySchema) -> AnySchema:
        """``schema``, or what it refers to, so that all references to it share one rule."""
        for _ in range(MAX_DEPTH):
            if isinstance(schema, bool) or schema.keys() != {"$ref"}:
                break
            schema = self.target(schema["$ref"])
        return schema

    def target(self, ref: str) -> AnySchema:
        """The schema that ``ref`` refers to: the root, or one of its definitions."""
        if ref == "#":
            return self._root
        schema: AnySchema = self._root.get("$defs", {}).get(ref.removeprefix("#/$defs/"), True)
        return schema

    # Values

    def value(self, schemas: Iterable[AnySchema]) -> str | None:
        """The symbol of the values that all ``schemas`` accept."""
        wanted = {
            id(schema): schema
            for schema in map(self.followed, schemas)
            if schema is not True and schema != {}
        }
        if not wanted:
            return "json_value"
        if self._depth >= MAX_DEPTH:
            self._dropped["a schema that is nested too deeply"] = None
            return "json_value"
        key = frozenset(wanted)
        if key in self._symbols:
            self._referred.add(key)
            return self._symbols[key]
        # The symbol is known before its rule is written, so that references can be recursive.
        self._symbols[key] = symbol = f"v_{self._name}_{len(self._symbols)}"
        self._depth += 1
        values = self.combined(_Values.both, _Values(), map(self.values, wanted.values()))
        symbols = [*dict.fromkeys(self.of_kinds(values))]
        self._depth -= 1
        if not symbols:
            self._symbols[key] = None
            if key in self._referred:  # by a rule that refers to itself through it
                self.rule(symbol, [NOTHING])
        elif len(symbols) == 1 and symbols[0].isidentifier() and key not in self._referred:
            # No rule is needed, unless a recursive reference uses the symbol already.
            self._symbols[key] = symbols[0]
        else:
            self.rule(symbol, symbols)
        return self._symbols[key]

    def of_kinds(self, values: _Values) -> Iterator[str]:
        """A symbol for each kind of ``values``."""
        if values == _Values():
            yield "json_value"
            return
        yield from (
            f"JSON_{name.upper()}" for name in ("null", "true", "false") if name in values.scalars
        )
        if values.texts is None:
            yield "JSON_STRING"
        elif values.texts:
            self.work(sum(map(len, values.texts)))
            yield self.terminal(f"/{_spelled(values.texts)}{_SPACE}/")
        if not values.scalars.isdisjoint(_KINDS["number"]):
            yield "JSON_NUMBER" if "fraction" in values.scalars else "JSON_INTEGER"
        yield from map(self.array, values.arrays)
        yield from filter(None, map(self.object, values.objects))

    def array(self, schemas: Sequence[Schema]) -> str:
        prefixes, rests = [], []
        for schema in schemas:
            items = schema.get("items", True)
            if isinstance(items, list):  # of drafts before 2020-12
                prefixes.append(items)
                rests.append(schema.get("additionalItems", True))
            else:
                prefixes.append(schema.get("prefixItems", []))
                rests.append(items)
        length = max(map(len, prefixes), default=0)
        if length > MAX_PREFIX:
            self._dropped["prefixItems"] = None
            return "json_array"
        heads: list[str] = []
        for at in range(length):
            pairs = zip(prefixes, rests, strict=True)
            head = self.value(items[at] if at < len(items) else rest for items, rest in pairs)
            if head is None:  # no item fits here, so the array ends before
                break
            heads.append(head)
        rest = self.value(rests) if len(heads) == length else None
        if not heads:
            if rest is None:
                return "JSON_FIRST JSON_LAST"
            if rest == "json_value":
                return "json_array"
            return f"JSON_FIRST ({rest} (JSON_COMMA {rest})*)? JSON_LAST"
        within = "" if rest is None else f"(JSON_COMMA {rest})*"
        for head in reversed(heads[1:]):
            within = f"(JSON_COMMA {head} {within})?"
        return f"JSON_FIRST ({heads[0]} {within})? JSON_LAST"

    def object(self, schemas: Sequence[Schema]) -> str | None:
        required = dict.fromkeys(name for each in schemas for name in each.get("required", ()))
        names = {name: None for each in schemas for name in each.get("properties", ())} | required
        allowed = self.allowed_names(schemas)
        names |= allowed or {}
        self.work(len(names) * len(schemas))
        rests = {id(each): self.rest(each) for each in schemas}
        values = {}
        for name in names:
            value = None
            if allowed is None or name in allowed:
                value = self.value(
                    each.get("properties", {}).get(name, rests[id(each)]) for each in schemas
                )
            if value is not None:
                values[name] = value
            elif name in required:
                return None
        others = self.value(rests.values()) if allowed is None else None
        return self.walk([name for name in values if name in required], values, names, others)

    def allowed_names(self, schemas: Iterable[Schema]) -> _Texts:
        """The names that ``propertyNames`` lists; ``None`` if it lists none."""
        allowed: _Texts = None
        for schema in schemas:
            allowed = _intersection(self.values(schema.get("propertyNames", True)).texts, allowed)
        return allowed

    def rest(self, schema: Schema) -> AnySchema:
        """The schema of undeclared members: they may match any of ``patternProperties``."""
        rest: AnySchema = schema.get("additionalProperties", True)
        if rest is not True and schema.get("patternProperties"):
            branches = [*schema["patternProperties"].values(), rest]
            rest = self._rests.setdefault(id(schema), {"anyOf": branches})
        return rest

    def walk(
        self,
        required: Sequence[str],
        values: Mapping[str, str],
        declared: Iterable[str],
        others: str | None,
    ) -> str:
        """An object with ``values`` for its names in any order, the ``required`` ones among them.

        ``others`` is the symbol of undeclared members, which are none of the ``declared`` names.
        For ``{"a": …, "b"?: …}`` with others, the rules of the object ``o`` are, without their
        digests::

            o:     JSON_OPEN o_m::0x0
            o_m::_: o_l A o_s::set_bit(0) %if bit_clear(0)      next comes the member a
                  | o_l B o_s::set_bit(1) %if bit_clear(1)
                  | o_o (JSON_COMMA o_o)* JSON_CLOSE %if is_ones([0:1])
            o_s::_: JSON_CLOSE %if is_ones([0:1])               a member has come
                  | JSON_COMMA o_m::_
            o_l:   (o_o JSON_COMMA){0,64}                       others before a or b
            o_o:   an undeclared member
        """
        if len(required) > BITS:
            self._dropped[f"required for more than {BITS} names of one object"] = None
            required = required[:BITS]
        # If there are too many names, only the required ones are looked for.
        tracked = [*required]
        if len(values) <= BITS:
            tracked += [name for name in values if name not in required]
        loops = [*self.untracked(values, tracked, declared, others)]
        if not tracked:
            if not loops:
                return "JSON_OPEN JSON_CLOSE"
            if loops == ["JSON_NAME JSON_COLON json_value"]:
                return "json_object"
            member = loops[0] if len(loops) == 1 else f"({' | '.join(loops)})"
            return f"JSON_OPEN ({member} (JSON_COMMA {member})*)? JSON_CLOSE"
        walk = f"o_{self._name}_{len(self._lines)}"
        complete = f" %if is_ones([0:{len(required)}])" if required else ""
        loop = f"{walk}_l " if loops else ""
        members = [
            f"{loop}{self.text(name)} JSON_COLON {values[name]}"
            f" {walk}_s::set_bit({bit}) %if bit_clear({bit})"
            for bit, name in enumerate(tracked)
        ]
        if loops:
            self.rule(f"{walk}_o", loops)
            self.rule(f"{walk}_l", [f"({walk}_o JSON_COMMA){{0,{MAX_OTHERS if required else ''}}}"])
            members.append(f"{walk}_o (JSON_COMMA {walk}_o)* JSON_CLOSE{complete}")
        self.rule(f"{walk}_m::_", members)
        # A comma needs a member that may follow it.
        left = "" if loops else f" %if not(is_ones([0:{len(tracked)}]))"
        self.rule(f"{walk}_s::_", [f"JSON_CLOSE{complete}", f"JSON_COMMA {walk}_m::_{left}"])
        empty = [] if required else ["JSON_OPEN JSON_CLOSE"]
        return self.rule(walk, [f"JSON_OPEN {walk}_m::0x0", *empty])

    def untracked(
        self,
        values: Mapping[str, str],
        tracked: Sequence[str],
        declared: Iterable[str],
        others: str | None,
    ) -> Iterator[str]:
        """The members that may come again: undeclared ones, and names that have no bit."""
        if others is not None:
            known = " | ".join(map(self.text, declared))
            name = self.terminal(f"JSON_NAME & ~({known})") if known else "JSON_NAME"
            yield f"{name} JSON_COLON {others}"
        alike: dict[str, list[str]] = {}
        for name in values.keys() - {*tracked}:
            alike.setdefault(values[name], []).append(name)
        for value, names in sorted(alike.items()):
            any_of_them = " | ".join(map(self.text, sorted(names)))
            yield f"{self.terminal(any_of_them)} JSON_COLON {value}"
