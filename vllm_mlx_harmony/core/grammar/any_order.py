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
same value; of ``anyOf`` and ``oneOf``, one branch does. So a schema is a list of alternatives, each
of which is the schemas that hold together. Members and items are not merged here: all schemas that
apply to the same one are another conjunction, with a rule of its own. It is named before it is
written, so references may be recursive.

**Objects** are a walk over their members that remembers which names have come: a rule with a
64-bit parameter (https://github.com/guidance-ai/llguidance/blob/main/docs/parametric.md), one bit
for each name, required names first. A name whose bit is set may not come again, and ``}`` needs the
bits of all required names. ``n`` names make ``n`` alternatives, not ``n!``, because llguidance
instantiates the rule only for the sets that an output reaches.

**Names and texts** are lexemes in all their spellings: JSON may write ``a`` as ``\u0061``, and
``/`` as ``\/`` (RFC 8259, section 7). An undeclared name is a string that is none of the declared
ones. In an object with required names, at most `MAX_UNDECLARED` come in a row: a model that keeps
inventing names reaches a required one before its output is cut.

**White space** belongs to the lexeme before it, up to `MAX_WHITE_SPACE` characters in each place:
room for ten levels of indentation and for columns, while a model that writes nothing else is
stopped after a few dozen tokens.

**Bounds.** Depth, alternatives, names and text are limited, because rules that are too deep or too
large bring llguidance down, too. What exceeds a limit is left out, which only ever accepts more:
an object with more than 64 names may have one of them twice. Only the limits of white space and of
undeclared names reject valid text, which models hardly ever write, and stop one that loops.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from typing import TypeAlias

from vllm_mlx_harmony.core import json_escapes, lru, vocab
from vllm_mlx_harmony.core.schema import (
    KINDS,
    UNSUPPORTED,
    AnySchema,
    Schema,
    SchemaReader,
    cache_key,
    followed,
    kinds,
    literals,
    resolve,
)

MAX_DEPTH = 64
"""Schemas within schemas, along references."""

MAX_ALTERNATIVES = 200
"""Alternatives of schemas that apply together, and the schemas of one alternative."""

MAX_WORK = 200_000
"""What is looked at of one schema: alternatives, names, and characters of names and texts."""

MAX_PREFIX = 50
"""Items with a schema of their own (``prefixItems``)."""

MAX_TEXT = 200_000
"""Characters of the rules of one schema."""

MAX_UNDECLARED = 64
"""Undeclared names in a row, in an object with required names. A model that keeps inventing names
with short values reaches a required one after some 400 tokens."""

MAX_WHITE_SPACE = 256
"""Characters of white space in one place: 2 tokens of blanks, 65 of indented empty lines."""

BITS = 64
"""Names of an object that are looked for: the size of llguidance's parameters."""

CACHE_BYTES = 8 * 2**20
"""Bytes of the cache of rules. A schema that was evicted is read again, in milliseconds."""

# --- lexemes ---

_SPACE = rf"[ \t\n\r]{{0,{MAX_WHITE_SPACE}}}"
_STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\\x2fbfnrt]|\\u[0-9a-fA-F]{4})*"'
_WHOLE = r"(?:0|[1-9][0-9]*)"
_NUMBER = rf"-?{_WHOLE}(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{{1,3}})?"

_SHIFT = 20
"""Digits by which an exponent may move an integer's point: ``1.5e1`` is one, ``1.25e1`` is not."""


def _integer() -> str:
    """Numbers without a fractional part; with a point or an exponent, none that may be infinite."""
    forms = [_WHOLE, r"0(?:\.0+)?[eE]-[0-9]{1,3}", r"1(?:\.[0-6][0-9]*)?[eE]\+?0*308"]
    forms.append(r"[0-9](?:\.[0-9]+)?[eE]\+?0*(?:20[1-9]|2[1-9][0-9]|30[0-7])")
    rest = [r"(?:\.0+)?[eE](?:\+?0*(?:1?[0-9]{1,2}|200)|-0+)", r"\.0+"]
    rest.append(r"\.[0-9]+[eE]\+?0*(?:2[1-9]|[3-9][0-9]|1[0-9]{2}|200)")
    for digits in range(1, _SHIFT + 1):
        rest.append(rf"\.[0-9]{{1,{digits}}}0*[eE]\+?0*{digits}")
        forms.append(rf"[1-9][0-9]{{0,99}}0{{{digits}}}(?:\.0+)?[eE]-0*{digits}")
    forms.append(f"(?:0|[1-9][0-9]{{0,99}})(?:{'|'.join(rest)})")
    return f"-?(?:{'|'.join(forms)})"


COMMON = rf"""JSON_BLANK: /{_SPACE.replace("{0,", "{1,")}/
JSON_OPEN: /\{{{_SPACE}/
JSON_CLOSE: /\}}{_SPACE}/
JSON_FIRST: /\[{_SPACE}/
JSON_LAST: /\]{_SPACE}/
JSON_COMMA: /,{_SPACE}/
JSON_COLON: /{_SPACE}:{_SPACE}/
JSON_NAME: /{_STRING}/
JSON_STRING: /{_STRING}{_SPACE}/
JSON_NUMBER: /{_NUMBER}{_SPACE}/
JSON_INTEGER: /{_integer()}{_SPACE}/
JSON_TRUE: /true{_SPACE}/
JSON_FALSE: /false{_SPACE}/
JSON_NULL: /null{_SPACE}/
json_value: JSON_STRING | JSON_NUMBER | JSON_TRUE | JSON_FALSE | JSON_NULL
 | json_object | json_array
json_object: JSON_OPEN (json_member (JSON_COMMA json_member)*)? JSON_CLOSE
json_member: JSON_NAME JSON_COLON json_value
json_array: JSON_FIRST (json_value (JSON_COMMA json_value)*)? JSON_LAST
"""
"""Rules that are shared by all schemas."""

NOTHING = f"<[{vocab.UNUSED}]>"
"""Matches an id that no model generates: a rule cannot be empty."""

_SHORT = {character: letter for letter, character in json_escapes.CHARACTERS.items()}


def _spelled(texts: Iterable[str]) -> str:
    """A regular expression of ``texts`` as JSON strings, in every spelling."""
    return f'"(?:{"|".join("".join(map(_character, text)) for text in texts)})"'


@lru_cache(maxsize=4096)
def _character(char: str) -> str:
    code = ord(char)
    units = [code] if char <= "\uffff" else [0xD7C0 + (code >> 10), 0xDC00 + (code & 0x3FF)]
    escapes = "".join(rf"\\u{unit:04x}" for unit in units)
    forms = [re.sub("[a-f]", lambda digit: f"[{digit[0]}{digit[0].upper()}]", escapes)]
    if char in _SHORT:
        forms.append(rf"\\{_literal(_SHORT[char])}")
    if char >= " " and char not in '"\\' and not "\ud800" <= char <= "\udfff":
        forms.append(_literal(char))
    return f"(?:{'|'.join(forms)})"


def _literal(char: str) -> str:
    return char if char.isalnum() or char in "_-" or not char.isascii() else rf"\x{ord(char):02x}"


# --- schemas that apply together ---

_OF_OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
)
_OF_ARRAYS = frozenset({"items", "prefixItems"})
_KEYWORDS = frozenset({"type", "enum", "const"}) | _OF_OBJECTS | _OF_ARRAYS

_Texts: TypeAlias = "Mapping[str, None] | None"
"""A set of strings, in order; ``None``: all of them."""

_Alternatives: TypeAlias = "tuple[tuple[Schema, ...], ...]"
"""Sets of schemas, of which all of one set hold, as far as they combine no others."""


def _texts(schemas: Iterable[Schema]) -> _Texts:
    """The texts that all of ``schemas`` list."""
    texts: _Texts = None
    for schema in schemas:
        for values in literals(schema):
            strings = {text: None for text in values if isinstance(text, str)}
            texts = strings if texts is None else {text: None for text in texts if text in strings}
    return texts


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

    With ``of_object`` it describes an object even if it does not say so. Never raises. Cached.
    """
    key = cache_key(schema, of_object, tenant)
    if key is None:
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
        self._alternatives: dict[int, _Alternatives] = {}
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

    def alternatives(self, schema: AnySchema) -> _Alternatives:
        """Those of the values that ``schema`` accepts."""
        if isinstance(schema, bool):
            return ((),) if schema else ()
        key = id(schema)
        if key in self._alternatives:
            return self._alternatives[key]
        if key in self._open:
            self._dropped["a $ref to a schema that contains it"] = None
            return ((),)
        if len(self._open) >= MAX_DEPTH:
            self._dropped["a schema that is nested too deeply"] = None
            return ((),)
        self._open.add(key)
        own: _Alternatives = ((),) if _KEYWORDS.isdisjoint(schema) else ((schema,),)
        parts = [own]
        parts += map(self.alternatives, schema.get("allOf", ()))
        if "$ref" in schema:
            parts.append(self.alternatives(resolve(schema["$ref"], self._root)))
        for union in ("anyOf", "oneOf"):
            if union in schema:
                branches = map(self.alternatives, schema[union])
                parts.append(_distinct(chain.from_iterable(branches)))
        self._open.discard(key)
        self._alternatives[key] = self.both(parts)
        return self._alternatives[key]

    def both(self, parts: Iterable[_Alternatives]) -> _Alternatives:
        """The alternatives if all of ``parts`` hold: each of one together with each of the next, or
        the fewer of them alone if that is too much."""
        found: _Alternatives = ((),)
        for part in parts:
            self.work(len(found) + len(part))
            if len(found) * len(part) > max(MAX_ALTERNATIVES, len(found), len(part)):
                found = min(found, part, key=len)
            else:
                pairs = product(found, part)
                found = _distinct((*one, *other)[:MAX_ALTERNATIVES] for one, other in pairs)
        return found

    # Values

    def value(self, schemas: Iterable[AnySchema]) -> str | None:
        """The symbol of the values that all ``schemas`` accept."""
        wanted = {
            id(schema): schema
            for schema in (followed(schema, self._root) for schema in schemas)
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
        alternatives = self.both(map(self.alternatives, wanted.values()))
        symbols = [*dict.fromkeys(self.of_kinds(alternatives))]
        self._depth -= 1
        is_alias = len(symbols) == 1 and symbols[0].isidentifier()
        self._symbols[key] = symbols[0] if is_alias else symbol if symbols else None
        if self._symbols[key] == symbol or key in self._referred:
            self.rule(symbol, symbols or [NOTHING])
        return self._symbols[key]

    def of_kinds(self, alternatives: _Alternatives) -> Iterator[str]:
        """A symbol for each kind of values of ``alternatives``, or for all kinds."""
        if () in alternatives:
            yield "json_value"
            return
        found: set[str] = set()
        texts: _Texts = {}
        arrays, objects = list[tuple[Schema, ...]](), list[tuple[Schema, ...]]()
        for schemas in alternatives:
            self.work(sum(1 + sum(map(len, literals(schema))) for schema in schemas))
            own = set.intersection(*map(kinds, schemas))
            found |= own
            if "string" in own:
                own_texts = _texts(schemas)
                texts = None if texts is None or own_texts is None else {**texts, **own_texts}
            if "array" in own:
                arrays.append(
                    tuple(schema for schema in schemas if not _OF_ARRAYS.isdisjoint(schema))
                )
            if "object" in own:
                objects.append(
                    tuple(schema for schema in schemas if not _OF_OBJECTS.isdisjoint(schema))
                )
        yield from (f"JSON_{name.upper()}" for name in ("null", "true", "false") if name in found)
        if texts is None:
            yield "JSON_STRING"
        elif texts:
            self.work(sum(map(len, texts)))
            yield self.terminal(f"/{_spelled(texts)}{_SPACE}/")
        if not found.isdisjoint(KINDS["number"]):
            yield "JSON_NUMBER" if "fraction" in found else "JSON_INTEGER"
        yield from map(self.array, _distinct(arrays))
        yield from filter(None, map(self.object, _distinct(objects)))

    def array(self, schemas: Sequence[Schema]) -> str:
        tuples = [(schema.get("prefixItems", []), schema.get("items", True)) for schema in schemas]
        length = max((len(prefix) for prefix, _ in tuples), default=0)
        if length > MAX_PREFIX:
            self._dropped["prefixItems"] = None
        if not tuples or length > MAX_PREFIX:
            return "json_array"
        items: list[str] = []
        for at in range(length):
            item = self.value(prefix[at] if at < len(prefix) else rest for prefix, rest in tuples)
            if item is None:  # nothing fits here, so the array ends before
                break
            items.append(item)
        rest = self.value(rest for _, rest in tuples) if len(items) == length else None
        more = "" if rest is None else f"(JSON_COMMA {rest})*"
        if not items:
            if rest is None:
                return "JSON_FIRST JSON_LAST"
            items = [rest]
        for item in reversed(items[1:]):
            more = f"(JSON_COMMA {item} {more})?"
        return f"JSON_FIRST ({items[0]} {more})? JSON_LAST"

    def object(self, schemas: Sequence[Schema]) -> str | None:
        required = dict.fromkeys(name for schema in schemas for name in schema.get("required", ()))
        names = {
            name: None for schema in schemas for name in schema.get("properties", ())
        } | required
        allowed = self.allowed_names(schemas)
        names |= allowed or {}
        self.work(len(names) * len(schemas))
        rests = {id(schema): self.rest(schema) for schema in schemas}
        values = {}
        for name in names:
            value = None
            if allowed is None or name in allowed:
                value = self.value(
                    schema.get("properties", {}).get(name, rests[id(schema)]) for schema in schemas
                )
            if value is not None:
                values[name] = value
            elif name in required:
                return None
        undeclared = self.value(rests.values()) if allowed is None else None
        loops = []
        if undeclared is not None:
            known = " | ".join(map(self.text, names))
            name = self.terminal(f"JSON_NAME & ~({known})") if known else "JSON_NAME"
            loops.append(f"{name} JSON_COLON {undeclared}")
        return self.walk([name for name in values if name in required], values, loops)

    def allowed_names(self, schemas: Iterable[Schema]) -> _Texts:
        """The names that ``propertyNames`` lists; ``None`` if it lists none."""
        names = [schema["propertyNames"] for schema in schemas if "propertyNames" in schema]
        name_sets = [*map(_texts, self.both(map(self.alternatives, names)))]
        return None if None in name_sets else dict.fromkeys(chain.from_iterable(name_sets))  # type: ignore[arg-type]

    def rest(self, schema: Schema) -> AnySchema:
        """The schema of undeclared members: they may match any of ``patternProperties``."""
        rest: AnySchema = schema.get("additionalProperties", True)
        if rest is not True and schema.get("patternProperties"):
            branches = [*schema["patternProperties"].values(), rest]
            rest = self._rests.setdefault(id(schema), {"anyOf": branches})
        return rest

    def walk(self, required: Sequence[str], values: Mapping[str, str], loops: Sequence[str]) -> str:
        """An object with ``values`` for its names in any order, the ``required`` ones among them.

        ``loops`` are members that may come again, with other names. If there are some beside
        ``{"a": …, "b"?: …}``, the rules of the object ``o`` are, without their digests::

            o:     JSON_OPEN o_m::0x0
            o_m::_: o_l A o_s::set_bit(0) %if bit_clear(0)      next comes the member a
                  | o_l B o_s::set_bit(1) %if bit_clear(1)
                  | o_o (JSON_COMMA o_o)* JSON_CLOSE %if is_ones([0:1])
            o_s::_: JSON_CLOSE %if is_ones([0:1])               a member has come
                  | JSON_COMMA o_m::_
            o_l:   (o_o JSON_COMMA){0,64}                       some of the others before a or b
            o_o:   one of the others
        """
        if len(required) > BITS:
            self._dropped[f"required for more than {BITS} names of one object"] = None
            required = required[:BITS]
        # If there are too many names, only the required ones are looked for.
        tracked = [*required]
        if len(values) <= BITS:
            tracked += [name for name in values if name not in required]
        untracked = sorted(values.keys() - {*tracked})
        loops = [*loops, *(f"{self.text(name)} JSON_COLON {values[name]}" for name in untracked)]
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
            self.rule(
                f"{walk}_l", [f"({walk}_o JSON_COMMA){{0,{MAX_UNDECLARED if required else ''}}}"]
            )
            members.append(f"{walk}_o (JSON_COMMA {walk}_o)* JSON_CLOSE{complete}")
        self.rule(f"{walk}_m::_", members)
        # A comma needs a member that may follow it.
        left = "" if loops else f" %if not(is_ones([0:{len(tracked)}]))"
        self.rule(f"{walk}_s::_", [f"JSON_CLOSE{complete}", f"JSON_COMMA {walk}_m::_{left}"])
        empty = [] if required else ["JSON_OPEN JSON_CLOSE"]
        return self.rule(walk, [f"JSON_OPEN {walk}_m::0x0", *empty])
