"""JSON Schema as rules of a Lark grammar, in which properties may come in any order.

**A value** has one rule for all schemas that apply to it together, so references may be recursive.
The rule lists a symbol for each JSON type of each of their `alternatives`.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from itertools import chain, combinations
from math import lcm

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.grammar import numbers, spellings
from vllm_mlx_harmony.core.grammar.alternatives import (
    ANY_NUMBER,
    MAX_DEPTH,
    MAX_ORDER,
    Alternative,
    Bound,
    Count,
    Expander,
    Members,
    listed_strings,
)
from vllm_mlx_harmony.core.grammar.escaped import NotExpressible
from vllm_mlx_harmony.core.grammar.json_schema import (
    EVALUATING_NOTHING,
    AnySchema,
    Schema,
    SchemaReader,
)

MAX_TEXT = 200_000
"""Characters of the rules of one schema."""

MAX_COUNT = 1000
"""Items, properties and characters that are counted."""

MAX_OTHERS = 64
"""Undeclared names in a row, in an object with required names."""

MAX_NAMES = 10_000
"""Declared names of an object, times the patterns that they may match."""

MAX_LENGTH = 10_000
MAX_MODULUS = 10_000
MAX_PATTERNS = 3
MAX_PREFIX = 50

BITS = 64
CACHE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one schema: the ``symbol`` of its values, and a line for each rule.

    ``dropped`` are the keywords that they do not enforce.
    """

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
    "JSON_NUMBER": f"/{numbers.NUMBER}{_SPACE}/",
    "JSON_INTEGER": f"/{numbers.INTEGER}{_SPACE}/",
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
        with localcontext(numbers.EXACT):
            known = _RuleWriter(SchemaReader(schema), of_object, name, tenant).rules()
        _cache.put(key, known, 2 * (len(key) + sum(map(len, known.lines))) + 512)
    return known


_cache: lru.ByteLRU[str, Rules] = lru.ByteLRU(CACHE_BYTES)


class _TooLarge(Exception):
    """The rules exceed ``MAX_TEXT``."""


class _RuleWriter:
    """Writes the rules of one schema, whose symbols contain ``name``.

    A method for a kind of values returns their symbol, or ``None`` if there are no such values.
    """

    def __init__(self, reader: SchemaReader, of_object: bool, name: str, tenant: str) -> None:
        self._root = reader.root(of_object)
        self._drop, self._dropped = reader.drop, reader.dropped
        knows_evaluated = reader.dropped.keys() <= EVALUATING_NOTHING
        self._expander = Expander(self._root, self._drop, knows_evaluated=knows_evaluated)
        self._name = name
        self._tenant = tenant
        self._lines: dict[str, None] = {}
        self._size = 0
        self._terminals: dict[str, str] = {}
        self._depth = 0
        self._symbols: dict[frozenset[int], str | None] = {}
        self._referred: set[frozenset[int]] = set()

    def rules(self) -> Rules:
        weakest = OBJECT_RULES if self._root.get("type") == "object" else Rules("json_value")
        try:
            symbol = self.value([self._root])
        except (_TooLarge, RecursionError):
            return replace(weakest, dropped=(*self._dropped, "a schema that is too large"))
        if symbol is None:
            return replace(weakest, dropped=(*self._dropped, "the schema as a whole"))
        return Rules(symbol, tuple(self._lines), tuple(self._dropped))

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

    def value(self, schemas: Iterable[AnySchema]) -> str | None:
        """The symbol of the values that all ``schemas`` accept; ``None`` if there are none."""
        # By identity: schemas are unhashable, and the copied root keeps them alive.
        wanted = {id(schema): schema for schema in schemas if schema is not True and schema != {}}
        if not wanted:
            return "json_value"
        if any(schema is False for schema in wanted.values()):
            return None
        if self._depth >= MAX_DEPTH:
            self._drop("a schema that is nested too deeply")
            return "json_value"
        key = frozenset(wanted)
        if key in self._symbols:
            self._referred.add(key)
            return self._symbols[key]
        # The symbol is known before its rule is written, so that references can be recursive.
        self._symbols[key] = symbol = f"v_{self._name}_{len(self._symbols)}"
        self._depth += 1
        symbols: dict[str | None, None] = {}
        for alternative in self._expander.conjunction(wanted.values()):
            symbols.update(dict.fromkeys(self.symbols(alternative)))
        self._depth -= 1
        written = [symbol for symbol in symbols if symbol is not None]
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

    def symbols(self, alternative: Alternative) -> Iterator[str | None]:
        """A symbol for each type; ``None`` for one that no value has."""
        if alternative == Alternative():
            yield "json_value"
            return
        if "null" in alternative.types:
            yield "JSON_NULL"
        if "boolean" in alternative.types:
            yield from (f"JSON_{str(value).upper()}" for value in sorted(alternative.booleans))
        if "string" in alternative.types:
            yield self.string(alternative)
        if "number" in alternative.types:
            yield self.number(alternative)
        if "array" in alternative.types:
            yield self.array(alternative)
        if "object" in alternative.types:
            yield self.members(alternative)

    def string(self, alternative: Alternative) -> str | None:
        if len(alternative.listed_strings or ()) > MAX_NAMES:
            raise _TooLarge
        if alternative.strings == ():
            return None
        conditions = self.conditions(alternative, "minLength", "maxLength")
        return self.terminal(f"({conditions}) JSON_SPACE") if conditions else "JSON_STRING"

    def conditions(self, alternative: Alternative, least: str, most: str) -> str:
        """A terminal expression for the strings that ``alternative`` allows; empty for any
        string."""
        if alternative.strings is not None:
            if None in map(alternative.allows_string, alternative.strings):
                self._drop("pattern")
            return f"/{spellings.any_of(alternative.strings)}/"
        length = self.limit_count(alternative.length, least, most, MAX_LENGTH)
        parts = []
        for pattern in alternative.patterns:
            with suppress(NotExpressible):
                parts.append(f"/{spellings.matching(pattern, self._tenant)}/")
                continue
            self._drop("pattern")
        if len(parts) > MAX_PATTERNS:
            self._drop("pattern")
            parts = parts[:MAX_PATTERNS]
        if length != ANY_NUMBER:
            parts.append(f"/{spellings.string(*length)}/")
        return " & ".join(parts)

    def limit_count(self, many: Count, least: str, most: str, limit: int) -> Count:
        """``many`` without bounds above ``limit``, which a grammar cannot count to."""
        if many.least > limit:
            self._drop(least)
            many = Count(0, many.most)
        if many.most is not None and many.most > limit:
            self._drop(most)
            many = Count(many.least)
        return many

    def number(self, alternative: Alternative) -> str | None:
        if alternative.numbers is not None:
            if not alternative.numbers:
                return None
            equal = "|".join(map(numbers.equal_to, alternative.numbers))
            return self.terminal(f"/(?:{equal}){_SPACE}/")
        bounds = []
        for bound in alternative.bounds:
            if bound.value and abs(bound.value.adjusted()) > MAX_ORDER:
                self._drop("minimum" if bound.is_minimum else "maximum")
            else:
                bounds.append(bound)
        steps = [numbers.multiple_of(step) for step in alternative.steps]
        if None in steps and (multiple := self.multiple(alternative, bounds)):
            return multiple
        parts = [
            self.terminal(f"/{numbers.bounded(value, is_minimum=is_minimum, exclusive=exclusive)}/")
            for value, exclusive, is_minimum in bounds
        ]
        parts += [self.terminal(f"/{step}/") for step in steps if step is not None]
        if not parts:
            return "JSON_INTEGER" if alternative.is_integer else "JSON_NUMBER"
        base = numbers.INTEGER if alternative.is_integer else numbers.NUMBER
        parts.insert(0, self.terminal(f"/{base}/"))
        return self.terminal(f"({' & '.join(parts)}) JSON_SPACE")

    def multiple(self, alternative: Alternative, bounds: Sequence[Bound]) -> str | None:
        """Multiples that need arithmetic. ``%json`` has it, for numbers without an exponent."""
        whole = all(not step % 1 for step in alternative.steps)
        step = Decimal(lcm(*map(int, alternative.steps))) if whole else alternative.steps[0]
        is_single = whole or (len(alternative.steps) == 1 and not alternative.is_integer)
        digits = int("".join(map(str, step.normalize().as_tuple().digits)))
        if not is_single or max(digits, int(step)) > MAX_MODULUS:
            self._drop("multipleOf")
            return None
        schema: Schema = {"type": "integer" if whole else "number"}
        schema["multipleOf"] = int(step) if whole else float(step)
        for bound in bounds:
            keyword = "minimum" if bound.is_minimum else "maximum"
            if bound.exclusive:
                keyword = f"exclusive{keyword.capitalize()}"
            value = float(bound.value) if bound.value % 1 else int(bound.value)
            if keyword not in schema or (schema[keyword] < value) == bound.is_minimum:
                schema[keyword] = value
        options = {"x-guidance": {"whitespace_flexible": False}}
        written = json.dumps({**options, **schema}, separators=(",", ":"))
        name = f"m_{self._name}_{len(self._lines)}"
        self.rule(name, [f"%json {written}"])
        return f"{name} (JSON_ZEROS | JSON_BLANK)?"

    def array(self, alternative: Alternative) -> str | None:  # noqa: C901 - one case per keyword
        many = self.limit_count(alternative.item_count, "minItems", "maxItems", MAX_COUNT)
        if many.is_empty:
            return None
        length = max((len(items.prefix) for items in alternative.items), default=0)
        if length > MAX_PREFIX:
            self._drop("prefixItems")
            return "json_array"
        heads: list[str] = []
        for at in range(length):
            here = [
                items.prefix[at] if at < len(items.prefix) else items.rest
                for items in alternative.items
            ]
            item = self.value(here)
            if item is None:  # nothing is valid here, so the array ends before
                many = many.intersect(Count(most=at))
                break
            heads.append(item)
        rest = self.value([items.rest for items in alternative.items])
        if rest is None:
            many = many.intersect(Count(most=length))
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

    def members(self, alternative: Alternative) -> str | None:
        many = self.limit_count(alternative.member_count, "minProperties", "maxProperties", 255)
        names = self._expander.conjunction(alternative.name_schemas)
        listed = listed_strings(names)
        declared = dict.fromkeys(name for part in alternative.members for name in part.names)
        declared.update(dict.fromkeys((*alternative.required, *(listed or ()))))
        if len(declared) * (1 + alternative.member_patterns) > MAX_NAMES:
            raise _TooLarge
        values: dict[str, str] = {}
        for name in declared:
            value = None
            if any(option.allows_string(name) is not False for option in names):
                schemas = alternative.schemas_of(name)
                if None in schemas:
                    self._drop("patternProperties")
                value = self.value([schema for schema in schemas if schema is not None])
            if value is not None:
                values[name] = value
            elif name in alternative.required:
                return None
        others = []
        if listed is None:
            others = [*self.others(alternative.members, declared, names)]
        required = [name for name in values if name in alternative.required]
        if many.most is not None and len(required) > many.most:
            return None
        return self.walk(required, values, others, many)

    def others(
        self,
        members: Sequence[Members],
        declared: Iterable[str],
        names: Sequence[Alternative],
    ) -> Iterator[str]:
        """Members with undeclared names, one for each set of patterns that a name may match."""
        patterns = {pattern: None for part in members for pattern in part.patterns}
        written = {}
        for pattern in patterns:
            with suppress(NotExpressible):
                written[pattern] = self.terminal(f"/{spellings.matching(pattern, self._tenant)}/")
        # There is one terminal for each subset of the patterns, so there must be few.
        is_known = len(written) == len(patterns) <= MAX_PATTERNS
        if not is_known:
            self._drop("patternProperties")
        allowed = " | ".join(dict.fromkeys(self.names(names)))
        if not allowed:
            return
        known = [*patterns] if is_known else []
        subsets = (combinations(known, count) for count in range(len(known) + 1))
        for matched in chain.from_iterable(subsets):
            schemas: list[AnySchema] = []
            for part in members:
                matching = [rest for pattern, rest in part.patterns.items() if pattern in matched]
                schemas += matching or ([part.rest] if is_known or not part.patterns else [])
            value = self.value(schemas)
            if value is None:
                continue
            name = f"({allowed})" if " | " in allowed else allowed
            for pattern in known:
                name += f" & {'' if pattern in matched else '~'}{written[pattern]}"
            if declared:
                name += f" & ~{self.terminal(f'/{spellings.any_of(declared)}/')}"
            yield f"{name if name == 'JSON_NAME' else self.terminal(name)} JSON_COLON {value}"

    def names(self, names: Iterable[Alternative]) -> Iterator[str]:
        """The terminals of the names that ``propertyNames`` allows."""
        for alternative in names:
            if "string" in alternative.types and alternative.strings != ():
                conditions = self.conditions(alternative, "propertyNames", "propertyNames")
                yield self.terminal(conditions) if conditions else "JSON_NAME"

    def walk(  # noqa: C901, PLR0915 - one case per rule
        self,
        required: Sequence[str],
        values: Mapping[str, str],
        others: Sequence[str],
        many: Count,
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
        least, most = counted = many.less(len(required))
        width = (most or least).bit_length() + 1 if least or most is not None else 0
        bits = BITS - width
        if len(required) > bits:  # the others may be missing
            self._drop(f"required for more than {bits} names of one object")
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
            if loops == ["JSON_NAME JSON_COLON json_value"] and counted == ANY_NUMBER:
                return "json_object"
            member = loops[0] if len(loops) == 1 else f"({' | '.join(loops)})"
            return f"JSON_OPEN {counted.listed(member)} JSON_CLOSE"
        walk = f"o_{self._name}_{len(self._lines)}"
        counter = f"[{bits}:{BITS}]"
        all_required = f"is_ones([0:{len(required)}])"
        has_room = "" if most is None else f"lt({counter}, {most})"
        # With a maximum, others count one by one: a loop could pass it.
        loop = f"{walk}_l " if loops and most is None else ""
        alternatives = []
        for bit, name in enumerate(tracked):
            member = f"{self.terminal(f'/{spellings.text(name)}/')} JSON_COLON {values[name]}"
            is_counted = width and bit >= len(required)
            condition = _when(f"bit_clear({bit})", has_room if is_counted else "")
            after = f"{walk}_{'c' if is_counted else 's'}::set_bit({bit})"
            alternatives.append(f"{loop}{member} {after}{condition}")
        if loops:
            self.rule(f"{walk}_o", loops)
            longest = str(MAX_OTHERS) if required else ""
            self.rule(f"{walk}_l", [f"({walk}_o JSON_COMMA){{0,{longest}}}"])
            if most is None:
                enough = f"ge({counter}, {least - 1})" if least else ""
                last = _when(all_required if required else "", enough)
                alternatives.append(f"{walk}_o (JSON_COMMA {walk}_o)* JSON_CLOSE{last}")
            if width:
                few = has_room or f"lt({counter}, {least})"
                alternatives.append(f"{walk}_o {walk}_c::_{_when(few)}")
        self.rule(f"{walk}_m::_", alternatives)
        for after, uncounted in (("s", 0), ("c", 1)) if width else (("s", 0),):
            enough = f"ge({counter}, {least - uncounted})" if least else ""
            may_close = _when(all_required if required else "", enough)
            # A comma needs a member that may follow it.
            left = "" if loops else f"not(is_ones([0:{len(tracked)}]))"
            if most is not None:
                left = "" if loops else f"not(is_ones([{len(required)}:{len(tracked)}]))"
                left = _all(f"lt({counter}, {most - uncounted})", left)
                left = f"or(not({all_required}), {left})" if required else left
            then = f"{walk}_m::{f'incr({counter})' if uncounted else '_'}"
            rules = [f"JSON_CLOSE{may_close}", f"JSON_COMMA {then}{_when(left)}"]
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


def _all(*conditions: str) -> str:
    """The conjunction of the conditions that are not empty."""
    given = [condition for condition in conditions if condition]
    return f"and({', '.join(given)})" if len(given) > 1 else "".join(given)


def _when(*conditions: str) -> str:
    condition = _all(*conditions)
    return f" %if {condition}" if condition else ""
