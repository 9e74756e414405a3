"""JSON Schema in, the part of it that llguidance can enforce out, and what that leaves out.

Knows which keywords llguidance has, and that dropping a keyword only ever allows more. Refuses to
know tools and messages. Never raises on any JSON value, and is bounded in depth and in size.

llguidance (https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md) takes most of
draft 2020-12 and refuses a schema with anything else in it. So a schema is copied, keyword by
keyword: annotations and what is no keyword are left out silently; what is said of the names of
properties is said otherwise (`property_names`); OpenAPI's ``nullable``, which the prompt shows, is
an alternative, but at the root, where the prompt shows none; other keywords that llguidance does
not have are dropped and told; and where it refuses the rest (a pattern with look-around, a
``oneOf`` whose branches overlap), the keyword that it refuses is looked for, and dropped and told
as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.grammar import property_names
from vllm_mlx_harmony.core.schema import pointed
from vllm_mlx_harmony.core.vocab import clean

Schema: TypeAlias = "dict[str, Any]"

MAX_DEPTH = 100
MAX_SCHEMAS = 10_000
REMEMBERED = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Expressed:
    """A schema as llguidance takes it, in JSON, and the keywords that are not in it any more."""

    text: str
    dropped: tuple[str, ...] = ()


_WHITE_SPACE = r"\r?\n[ \t]{0,80}|[ \t]{1,4}"
"""Between JSON's tokens: a line end with its indentation, or some blanks. Matched once."""

_ESCAPES = "json_allow_general_unicode_escapes"
_OPTIONS = {"whitespace_pattern": _WHITE_SPACE, _ESCAPES: True}
_SPACED = json.dumps(_OPTIONS, separators=(",", ":"))[1:-1]


def with_compact_json(text: str) -> str:
    """``text``, a grammar, for llguidance 1.7: no white space between JSON's tokens.

    It does not know the option of escapes, and takes the pattern of white space as often as a model
    likes: one that loops in it never ends.
    """
    return text.replace(_SPACED, '"whitespace_flexible":false')


def compile_error(grammar: str) -> str:
    """Why llguidance does not take ``grammar``, in one line; empty when it does."""
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(grammar).partition("\n")[0]


Check: TypeAlias = "Callable[[str], str]"
"""Why a grammar cannot be compiled, in one line; empty when it can. May be asked of another
process, so that every question has its price."""


def express(
    value: Mapping[str, Any],
    *,
    of_object: bool = False,
    tenant: str = "",
    check: Check = compile_error,
) -> Expressed:
    """``value`` without what cannot be enforced. ``of_object``: it is the schema of an object even
    where it does not say so. Remembered for ``tenant``: it is asked for on every turn."""
    try:
        key = json.dumps([tenant, of_object, value], separators=(",", ":"))
    except (RecursionError, TypeError, ValueError):
        return Expressed(_text({"type": "object"}, check), ("a schema that is no JSON",))
    known = _remembered.get(key)
    if known is None:
        known = _expressed(value, of_object, check)
        _remembered.put(key, known, 2 * (len(key) + len(known.text)) + 512)
    return known


_remembered: lru.ByteLRU[str, Expressed] = lru.ByteLRU(REMEMBERED)


def _expressed(value: Mapping[str, Any], of_object: bool, check: Check) -> Expressed:
    reading = Reading(value)
    copied = reading.root(of_object)
    dropped = list(reading.dropped)
    names, unevaluated = property_names.KEYWORDS
    said = [one for one in (names, unevaluated) if property_names.without(copied, [one]) != copied]
    # A keyword that is gone may have evaluated properties: they are not to be refused.
    lost = [] if reading.dropped.keys() <= EVALUATING_NOTHING else [unevaluated]
    attempts = [[*lost, *more] for more in ([], [names], [unevaluated], [names, unevaluated])]
    tried = []
    for given_up in dict.fromkeys(tuple(one for one in said if one in each) for each in attempts):
        kept = property_names.without(copied, given_up)
        rewritten, inexact = property_names.rewritten(
            kept, lambda schema: bool(_compile_error(schema, check))
        )
        tried.append((rewritten, [*inexact, *given_up]))
        if not _compile_error(rewritten, check):
            break
    else:
        rewritten, rejected = _weakened(tried[0][0], check)
        tried.append((rewritten, [*tried[0][1], *rejected]))
    rewritten, given = tried[-1]
    dropped += given
    return Expressed(_text(rewritten, check), tuple(dict.fromkeys(dropped)))


EVALUATING_NOTHING = frozenset(
    {
        "not",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
        "dependentRequired",
    }
)
"""Keywords without which no property is unevaluated that was evaluated with them."""


def _text(copied: Schema, check: Check) -> str:
    """As ``%json`` of a grammar has it; ``copied`` is not refused."""
    options = _OPTIONS
    if property_names.can_be_misspelled(copied):
        spelled = property_names.spelled(copied)
        if spelled is None or _compile_error(spelled, check):
            options = {**_OPTIONS, **property_names.NO_ESCAPES}
        else:
            copied = spelled
    return json.dumps({"x-guidance": options, **copied}, separators=(",", ":"))


def _compile_error(copied: Schema, check: Check) -> str:
    """Why llguidance does not take it; empty when it does."""
    return check(json.dumps({"grammars": [{"json_schema": {"x-guidance": _OPTIONS, **copied}}]}))


# --- copying: any JSON value -> known, well-formed keywords, every $ref to a definition ---


class Reading:
    """One walk through a schema. What is referred to becomes a definition of its own."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = MAX_SCHEMAS
        self._definitions: dict[str, str] = {}
        self._waiting: list[tuple[str, object]] = []
        self._named: dict[str, object] | None = None
        self.dropped: dict[str, None] = {}

    def root(self, of_object: bool) -> Schema:
        copied = self.schema(self._root)
        copied = {"not": {}} if copied is False else {} if copied is True else copied
        if of_object and not _is_object(copied):
            copied = {"type": "object", **copied}
        definitions = {}
        while self._waiting:
            name, target = self._waiting.pop()
            if isinstance(target, _Branches):
                definitions[name] = self._inlined(target.of)
            else:
                definitions[name] = self.schema(target)
        return {**copied, "$defs": definitions} if definitions else copied

    def schema(self, value: object, depth: int = 0) -> Any:
        """``value`` as a schema: a boolean or a new mapping."""
        self._left -= 1
        if isinstance(value, bool):
            return value
        if not isinstance(value, Mapping):
            return self._drop("a schema that is neither object nor boolean", True)
        if depth >= MAX_DEPTH or self._left < 0:
            return self._drop("a schema of this size", True)
        copied: Schema = {}
        by_place = "patternProperties" not in value  # see `property_names` on patterns
        for key, content in sorted(value.items(), key=_place) if by_place else value.items():
            if key in _MEANINGLESS and content in _MEANINGLESS[key]:
                continue
            if key in _MISSING:
                self._drop(key, None)
            elif key in _KEYWORDS:
                read = _KEYWORDS[key](self, content, depth + 1)
                if read is None:
                    self._drop(f"{key} as it stands there", None)
                else:
                    copied.update(zip((key,), read, strict=False))
        if value.get("nullable") is True and value is not self._root:
            return {"anyOf": [copied, {"type": "null"}]}
        return copied

    def _drop(self, what: str, instead: Any) -> Any:
        self.dropped[what] = None
        return instead

    # What a keyword may hold: a 1-tuple with its copy, () to leave it out, None when malformed.

    def plain(self, content: object, _: int) -> tuple[Any] | None:
        return (content,)

    def number(self, content: object, _: int) -> tuple[Any] | None:
        return (content,) if isinstance(content, (int, float)) else None

    def count(self, content: object, _: int) -> tuple[Any] | None:
        if isinstance(content, float) and content.is_integer():
            content = int(content)
        return (content,) if isinstance(content, int) and content >= 0 else None

    def pattern(self, content: object, _: int) -> tuple[Any] | None:
        return (_without_nul(clean(content)),) if isinstance(content, str) else None

    def format(self, content: object, _: int) -> tuple[Any] | tuple[()] | None:
        return (content,) if isinstance(content, str) and content in FORMATS else ()

    def texts(self, content: object, _: int) -> tuple[Any] | None:
        if not isinstance(content, list) or not all(isinstance(one, str) for one in content):
            return None
        return ([clean(one) for one in content],)

    def values(self, content: object, _: int) -> tuple[Any] | None:
        return (content,) if isinstance(content, list) else None

    def types(self, content: object, _: int) -> tuple[Any] | None:
        named = [content] if isinstance(content, str) else content
        if not isinstance(named, list) or not named:
            return None
        if not all(isinstance(one, str) and one in TYPES for one in named):
            return None
        return (content,)

    def sub(self, content: object, depth: int) -> tuple[Any] | None:
        return (self.schema(content, depth),)

    def subs(self, content: object, depth: int) -> tuple[Any] | None:
        if not isinstance(content, list) or not content:
            return None
        return ([self.schema(one, depth) for one in content],)

    def branches(self, content: object, depth: int) -> tuple[Any] | None:
        """As ``subs``. Branches that are references make a definition of their own, of what they
        refer to: llguidance sees that no two objects hold at once, but not through references."""
        if not isinstance(content, list) or not any(map(_is_reference, content)):
            return self.subs(content, depth)
        key = json.dumps(content)
        if key not in self._definitions:
            self._definitions[key] = f"d{len(self._definitions)}"
            self._waiting.append((self._definitions[key], _Branches(content)))
        return ([{"$ref": f"#/$defs/{self._definitions[key]}"}],)

    def _inlined(self, branches: Sequence[Any]) -> Schema:
        inlined = []
        for one in branches:
            target = self._target(one["$ref"]) if _is_reference(one) else None
            if isinstance(target, Mapping) and one.get("nullable") is True:
                target = {**target, "nullable": True}
            inlined.append(self.schema(one if target is None else target))
        return {"oneOf": inlined}

    def items(self, content: object, depth: int) -> tuple[Any] | None:
        return self.subs(content, depth) if isinstance(content, list) else self.sub(content, depth)

    def named(self, content: object, depth: int) -> tuple[Any] | None:
        if not isinstance(content, Mapping):
            return None
        return ({clean(str(k)): self.schema(v, depth) for k, v in content.items()},)

    def patterned(self, content: object, depth: int) -> tuple[Any] | None:
        if not isinstance(content, Mapping):
            return None
        patterns = {_without_nul(clean(str(k))): v for k, v in content.items()}
        return self.named(patterns, depth)

    def reference(self, content: object, _: int) -> tuple[Any] | None:
        if content == "#":
            return ("#",)
        if not isinstance(content, str):
            return None
        if content not in self._definitions:
            target = self._target(content)
            if target is None:
                return None
            self._definitions[content] = f"d{len(self._definitions)}"
            self._waiting.append((self._definitions[content], target))
        return (f"#/$defs/{self._definitions[content]}",)

    def _target(self, ref: str) -> object:
        if ref.startswith("#/"):
            return pointed(self._root, ref)
        if self._named is None:
            self._named = dict(_named(self._root))
        return self._named.get(ref)


@dataclass(frozen=True, slots=True)
class _Branches:
    """A definition that is yet to be made, of the branches of a ``oneOf``."""

    of: Sequence[Any]


def _is_reference(schema: object) -> bool:
    """Whether it is a reference and says nothing else."""
    if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
        return False
    return all(key == "$ref" or key not in {*_KEYWORDS, *_MISSING} for key in schema)


def _without_nul(pattern: str) -> str:
    """``pattern``, with U+0000 in no negated class.

    llguidance 1.9 takes a quote for ``[^"]``, and a backslash for ``[^\\]``, when that is in it.
    """
    return _NEGATED.sub(lambda at: at[0] + (r"\x00" if at[0] == "[^" else ""), pattern)


_NEGATED = re.compile(r"\\.|\[\^", re.DOTALL)


def _place(item: tuple[Any, Any]) -> int:
    """Properties come in the order in which keywords are applied: as the prompt shows them."""
    return _BEFORE_OWN.index(item[0]) if item[0] in _BEFORE_OWN else len(_BEFORE_OWN)


_BEFORE_OWN = ("anyOf", "oneOf", "$ref", "allOf")


def _is_object(copied: Schema) -> bool:
    return copied.get("type") == "object"


def _named(root: object) -> Iterator[tuple[str, object]]:
    """What an ``$anchor`` or an ``$id`` in ``root`` names."""
    waiting, left = [root], MAX_SCHEMAS
    while waiting and left:
        left -= 1
        value = waiting.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get("$anchor"), str):
                yield f"#{value['$anchor']}", value
            if isinstance(value.get("$id"), str):
                yield value["$id"], value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


TYPES = frozenset({"null", "boolean", "number", "integer", "string", "array", "object"})

FORMATS = frozenset(
    {
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
    }
)
"""Those that are enforced. Any other is an annotation, as for JSON Schema every format may be."""

_Reader: TypeAlias = "Callable[[Reading, object, int], tuple[Any] | tuple[()] | None]"

_KEYWORDS: Mapping[str, _Reader] = {
    "type": Reading.types,
    "enum": Reading.values,
    "const": Reading.plain,
    "$ref": Reading.reference,
    "anyOf": Reading.subs,
    "oneOf": Reading.branches,
    "allOf": Reading.subs,
    "properties": Reading.named,
    "patternProperties": Reading.patterned,
    "additionalProperties": Reading.sub,
    "required": Reading.texts,
    "minProperties": Reading.count,
    "maxProperties": Reading.count,
    "items": Reading.items,
    "prefixItems": Reading.subs,
    "additionalItems": Reading.sub,
    "minItems": Reading.count,
    "maxItems": Reading.count,
    "minLength": Reading.count,
    "maxLength": Reading.count,
    "pattern": Reading.pattern,
    "format": Reading.format,
    "minimum": Reading.number,
    "maximum": Reading.number,
    "exclusiveMinimum": Reading.number,
    "exclusiveMaximum": Reading.number,
    "multipleOf": Reading.number,
    **dict.fromkeys(property_names.KEYWORDS, Reading.sub),
}
"""What llguidance has, or what can be said in its words, and how its content is read."""

_MISSING = frozenset(
    {
        "if",
        "then",
        "else",
        "not",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedItems",
        "$dynamicRef",
        "$recursiveRef",
    }
)
"""Keywords of any draft that llguidance does not have."""

_MEANINGLESS: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "contains": (),
    "not": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "additionalItems": (True, {}),
}
"""Contents with which a keyword says nothing."""


# --- weakening: what llguidance refuses all the same ---


def _weakened(copied: Schema, check: Check) -> tuple[Schema, list[str]]:
    """``copied`` without the keywords for which it is refused, and these.

    The one keyword whose absence is enough; or several; or nothing but an object is left.
    """
    for keyword in _REFUSABLE:
        weaker, changed = _without(copied, [keyword], check)
        if changed and not _compile_error(weaker, check):
            return weaker, [keyword]
    weaker, rejected = copied, []
    for keyword in _REFUSABLE:
        less, changed = _without(weaker, [keyword], check)
        if changed:
            weaker = less
            rejected.append(keyword)
            if not _compile_error(weaker, check):
                return weaker, rejected
    return {"type": "object"} if _is_object(copied) else {}, ["the schema as a whole"]


_REFUSABLE = (
    "pattern",
    "oneOf",
    "patternProperties",
    "minProperties",
    "maxProperties",
    "multipleOf",
    "format",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minItems",
    "maxItems",
    "const",
    "enum",
    "allOf",
    "required",
    "anyOf",
    "$ref",
)
"""In the order in which they are given up."""


def _without(copied: Schema, keywords: Iterable[str], check: Check) -> tuple[Schema, bool]:
    """``copied`` without those of ``keywords`` that llguidance refuses; whether any was there."""
    dropping = frozenset(keywords)
    changed = False

    def walk(value: Any) -> Any:
        nonlocal changed
        if not isinstance(value, dict):
            return value
        kept: Schema = {}
        for key, content in value.items():
            if key not in dropping or not _is_rejected(key, content, check):
                kept[key] = content
                continue
            changed = True
            if key == "oneOf":
                kept["anyOf" if "anyOf" not in value else "oneOf"] = content
        if "patternProperties" in value and "patternProperties" not in kept:
            kept.pop("additionalProperties", None)  # they would be additional ones now
        return property_names.mapped(kept, walk)

    weaker: Schema = walk(copied)
    return weaker, changed


def _is_rejected(keyword: str, content: Any, check: Check) -> bool:
    """A pattern by itself; of the other keywords it cannot be said."""
    if keyword == "pattern":
        return bool(_compile_error({"type": "string", "pattern": content}, check))
    return True


ANY_OBJECT = Expressed(_text({"type": "object"}, compile_error))
