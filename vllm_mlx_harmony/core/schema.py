"""JSON Schema in, the part of it that openai-harmony prints as TypeScript out (semantics A9).

Knows JSON Schema, and what openai-harmony's template prints, drops and prints wrong.
Refuses to know messages, names and tokens. Pure, and bounded in depth and in size.

**Why.** The model was trained on tools declared as TypeScript types
(https://cookbook.openai.com/articles/openai-harmony#function-calling). openai-harmony prints them
from JSON Schema, but from a small part of it: no ``$ref``, no ``allOf``, ``anyOf`` or ``const``, no
list of types but as it is written. What it does not know it drops without a word, and a model
guesses at parameters. Clients send all of it: pydantic writes ``$defs`` and ``anyOf``, zod
``allOf`` and ``const``, MCP servers whatever they like.

**How.** A schema is rewritten into one that the template prints whole and right, in four steps:

1. *Reading* (``_Reading``): of any JSON value the known keywords of the right type, and no more. A
   ``$ref`` (a JSON pointer, RFC 6901) is replaced by what it points to; one that leads back to
   itself is ``any``, because a printed type cannot be recursive.
2. *Merging*: every ``allOf`` is laid over what stands beside it, the outermost keyword wins. It is
   not what it means in general (https://json-schema.org/draft/2020-12/json-schema-core#section-10.2)
   but what it is used for: a base with additions.
3. *Expressing*: ``anyOf`` becomes ``oneOf``, null becomes ``nullable`` or a variant, ``const`` an
   ``enum``, tuples and unions a type that the template prints.
4. *Noting*: what no type says (formats, examples, that items are mixed) is put into descriptions.

What is shown is advice. What is enforced comes from the schema itself (`core.grammar`).

**Invariants.** What it is given is never changed. Depth, number of schemas and characters are
bounded before anything is built: four references to four references, twelve times, is a small
request and sixteen million types.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.turn import Tool
from vllm_mlx_harmony.core.vocab import clean

Schema: TypeAlias = "dict[str, Any]"

# openai-harmony parses a message with serde_json, which refuses JSON deeper than 128: a level of a
# schema takes two (`properties` and the key), the message around it and a value in it eight each.
MAX_DEPTH = 32
# A few nested `$ref`s can stand for more schemas than there is memory. What is over is `any`.
MAX_SCHEMAS = 4_000
MAX_VALUE_DEPTH = 8
# The same for texts and for all tools of a request together, which is refused then: no model has
# room for as much.
MAX_CHARACTERS = 2 * 2**20
MAX_SCHEMAS_IN_ALL = 40_000

# openai-harmony joins a list of types with ` | ` and prints each as it is, so such a list can say
# what its template has no form for: a number, null, a union in brackets.
_NULL: Schema = {"type": ["null"]}
_NEVER: Schema = {"type": ["never"]}
_OBJECT: Schema = {"type": ["object"]}
_REST_KEY = "[key: string]"
_MIXED = "Items of these types may be mixed."

_SCALARS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}
_NOT_PARAMETERS = frozenset({*_SCALARS, "array", "null"})
_BARE_KEY = re.compile(r"[\w$.@/-]+")
_LINE_ENDS = re.compile(r"\r\n|[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]")
_PRINTED_BARE = re.compile(r'[^"\\\x00-\x1f\x7f-\x9f\u2028\u2029]*')


class SizeBudget:
    """What the tools of one request may still take, with every ``$ref`` in its place."""

    def __init__(self) -> None:
        self._characters = MAX_CHARACTERS
        self._schemas = MAX_SCHEMAS_IN_ALL

    def take(self, characters: int, schemas: int = 0) -> None:
        """Raises ``OverflowError`` when there is not as much left."""
        self._characters -= characters
        self._schemas -= schemas
        if self._characters < 0 or self._schemas < 0:
            raise OverflowError

    @property
    def left(self) -> tuple[int, int]:
        """Characters and schemas that may still be taken."""
        return self._characters, self._schemas

    def declare(self, tool: Tool, text: str) -> str:
        """``text``, the declaration of ``tool``. Raises ``RequestError`` as ``parameters``."""
        self.take_for(tool, len(text))
        return text

    def take_for(self, tool: Tool, characters: int, schemas: int = 0) -> None:
        """Raises ``RequestError`` as ``parameters`` when there is not as much left."""
        try:
            self.take(characters, schemas)
        except OverflowError as error:
            raise too_large(tool) from error


def too_large(tool: Tool) -> RequestError:
    """The error for tools that there is no room for."""
    problem = (
        f"with tool {quoted(tool.name)} the tools are too large: more than {MAX_CHARACTERS} "
        f"characters or {MAX_SCHEMAS_IN_ALL} schemas, with every $ref in its place"
    )
    return RequestError(problem, param=tool.where)


def parameters(tool: Tool, budget: SizeBudget | None = None) -> Schema | None:
    """What is to be printed as the argument of ``tool``; ``None`` when it takes none.

    Raises ``RequestError`` naming the tool when its parameters are not the schema of an object, or
    when there is no ``budget`` for them.
    """
    schema: object = tool.parameters
    if schema is None:
        return None
    if not isinstance(schema, Mapping):
        kind = type(schema).__name__
        raise _invalid(tool, f"must be a JSON Schema object, not {kind}")
    if isinstance(schema.get("type"), str) and schema["type"] in _NOT_PARAMETERS:
        raise _invalid(tool, f"must have the type 'object', not {quoted(schema['type'])}")
    try:
        expressed = express(schema, budget)
    except OverflowError as error:
        raise too_large(tool) from error
    expressed.pop("nullable", None)
    # `any` and `object` have nothing to say of an argument.
    shaped = "oneOf" in expressed or expressed.get("type") not in (None, _OBJECT["type"])
    return expressed if shaped and expressed.get("properties") != {} else None


def _invalid(tool: Tool, problem: str) -> RequestError:
    return RequestError(f"the parameters of tool {quoted(tool.name)} {problem}", param=tool.where)


def express(schema: object, budget: SizeBudget | None = None) -> Schema:
    """``schema`` (any JSON value) as a new schema that openai-harmony prints whole and right.

    ``$ref`` is inlined, ``anyOf`` is ``oneOf``, null is ``nullable`` or a variant, ``const`` is an
    ``enum``, ``allOf`` is merged (A9). What cannot be understood is ``{}``: printed as ``any``.
    Never changes what it is given. Raises ``OverflowError`` when there is no ``budget`` for it, and
    nothing else.
    """
    return _noted(_expressed(_Reading(schema, budget or SizeBudget()).schema(schema)))


# --- reading: any JSON value -> a bounded tree of known, well-typed keywords without `$ref` ---


_ROOT = frozenset({"#"})


class _Reading:
    """One walk through a schema: where references point, and how much may still be read."""

    def __init__(self, root: object, budget: SizeBudget) -> None:
        self._root = root
        self._budget = budget
        self._left = MAX_SCHEMAS

    def schema(self, value: object, depth: int = 0, refs: frozenset[str] = _ROOT) -> Schema:
        """``value`` as a schema; ``refs`` are the references that lead here: again is recursion."""
        self._left -= 1
        self._budget.take(0, schemas=1)
        if value is False:
            return {"enum": []}
        if not isinstance(value, Mapping) or depth >= MAX_DEPTH or self._left < 0:
            return {}
        own = dict(self._keywords(value, depth, refs))
        ref = value.get("$ref")
        if not isinstance(ref, str):
            return own
        target = self._target(ref, depth, refs)
        return {"allOf": [target, own]} if own else target

    def _keywords(
        self, value: Mapping[Any, Any], depth: int, refs: frozenset[str]
    ) -> Iterator[tuple[str, Any]]:
        for key, content in value.items():
            if key in _PLAIN_KEYWORDS:
                name, read = _PLAIN_KEYWORDS[key]
                plain = read(content)
                if plain is not None:
                    self._budget.take(_characters(plain[0]))
                    yield name, plain[0]
            elif key in _SCHEMA_KEYWORDS:
                yield from self._nested(key, content, depth + 1, refs)

    def _nested(
        self, key: str, content: object, depth: int, refs: frozenset[str]
    ) -> Iterator[tuple[str, Any]]:
        if key == "items" and isinstance(content, list):
            key = "prefixItems"  # as draft 4 spelled it
        kind = _SCHEMA_KEYWORDS[key]
        if kind is object:
            yield key, self.schema(content, depth, refs)
        elif kind is list and isinstance(content, list):
            yield key, [self.schema(one, depth, refs) for one in content]
        elif kind is Mapping and isinstance(content, Mapping):
            named = content.items()
            self._budget.take(sum(len(str(name)) for name in content))
            yield key, {clean(str(name)): self.schema(one, depth, refs) for name, one in named}

    def _target(self, ref: str, depth: int, refs: frozenset[str]) -> Schema:
        if ref in refs or not ref.startswith("#/"):
            return {}
        self._budget.take(len(ref))
        return self.schema(pointed(self._root, ref), depth + 1, refs | {ref})


def pointed(root: object, ref: str) -> object:
    """What the JSON pointer ``#/a/b`` points to in ``root``; ``None`` when to nothing."""
    found = root
    for part in ref[2:].split("/"):
        step = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list) and re.fullmatch(r"[0-9]{1,6}", step):
            found = found[int(step)] if int(step) < len(found) else None
        else:
            return None
    return found


def _text(value: object) -> tuple[str] | None:
    return (clean(value),) if isinstance(value, str) and value.strip() else None


def _texts(value: object) -> tuple[list[str]] | None:
    if not isinstance(value, list):
        return None
    return ([clean(one) for one in value if isinstance(one, str)],)


def _types(value: object) -> tuple[list[str]] | None:
    return ([value],) if isinstance(value, str) else _texts(value)


def _values(value: object) -> tuple[list[Any]] | None:
    return ([_plain(one) for one in value],) if isinstance(value, list) else None


def _plain(value: object, depth: int = 0) -> Any:
    """A JSON value that openai-harmony's JSON parser accepts: shallow, its numbers of 64 bits."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, (int, float)):
        small = abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)
        return value if small else "a number beyond 64 bits"
    if depth >= MAX_VALUE_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {clean(str(key)): _plain(one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, depth + 1) for one in value]
    return None


def _characters(value: object) -> int:
    """Of a JSON value, about."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _characters(one) for key, one in value.items())
    return sum(1 + _characters(one) for one in value) if isinstance(value, list) else 1


_Reader: TypeAlias = "Callable[[object], tuple[Any] | None]"

_PLAIN_KEYWORDS: dict[str, tuple[str, _Reader]] = {
    "type": ("type", _types),
    "enum": ("enum", _values),
    "const": ("enum", lambda value: ([_plain(value)],)),
    "required": ("required", _texts),
    "title": ("title", _text),
    "description": ("description", _text),
    "format": ("format", _text),
    "examples": ("examples", _texts),
    "default": ("default", lambda value: (_plain(value),)),
    "nullable": ("nullable", lambda value: (value is True,)),
}
"""Keyword -> the keyword it is kept as, and its reader: a 1-tuple, or None to leave it out."""

_SCHEMA_KEYWORDS: dict[str, type] = {
    "properties": Mapping,
    "patternProperties": Mapping,
    "additionalProperties": object,
    "propertyNames": object,
    "items": object,
    "prefixItems": list,
    "anyOf": list,
    "oneOf": list,
    "allOf": list,
}

_NOTES = ("title", "description", "examples", "default")
_SHAPES = (
    "enum",
    "properties",
    "patternProperties",
    "items",
    "prefixItems",
    "additionalProperties",
)


# --- merging: `allOf` and what stands beside it ---


def _merged(schema: Schema) -> Schema:
    """``schema`` with every ``allOf`` in it laid over one another; the outermost keyword wins."""
    if "allOf" not in schema:
        return schema
    own = {key: value for key, value in schema.items() if key != "allOf"}
    merged: Schema = {}
    for part in [*map(_merged, schema["allOf"]), own]:
        merged = _laid_over(merged, part)
    return merged


def _laid_over(base: Schema, top: Schema) -> Schema:
    both = {**base, **top}
    if "properties" in base and "properties" in top:
        both["properties"] = _all_properties(base["properties"], top["properties"])
    if "required" in base and "required" in top:
        both["required"] = [*base["required"], *top["required"]]
    return both


def _all_properties(
    base: Mapping[str, Schema], top: Mapping[str, Schema], combine: str = "allOf"
) -> dict[str, Schema]:
    both = dict(base)
    for name, schema in top.items():
        both[name] = _combined(combine, both[name], schema) if name in both else schema
    return both


def _combined(keyword: str, first: Schema, second: Schema) -> Schema:
    """Two schemas of one property; flat, however many there are, so that depth stays bounded."""
    if first == second:
        return first
    known = first[keyword] if set(first) == {keyword} else [first]
    return {keyword: [*known, second]}


# --- expressing: one merged schema -> what openai-harmony prints ---


def _expressed(schema: Schema) -> Schema:
    schema = _merged(schema)
    notes = {key: schema[key] for key in _NOTES if key in schema}
    if "format" in schema:
        notes["description"] = _lines(notes.get("description"), f"format: {schema['format']}")
    form = _union(_forms(schema), notes.get("description", ""))
    if "description" in form and "description" in notes:
        notes["description"] = _lines(notes["description"], form["description"])
    return {**form, **notes}


def _forms(schema: Schema) -> list[Schema]:
    """The alternatives that ``schema`` stands for; each is expressed, and null is its own."""
    null = [_NULL] if schema.get("nullable") else []
    variants = schema.get("anyOf") or schema.get("oneOf")
    if variants and "properties" in schema:
        return [*_typed(_widened(schema, variants)), *null]
    if variants and not any(key in schema for key in _SHAPES):
        kind = {"type": schema["type"]} if "type" in schema else {}
        return [*(form for one in variants for form in _variant({**kind, **_merged(one)})), *null]
    return [*_typed(schema), *null]


def _widened(schema: Schema, variants: Iterable[Schema]) -> Schema:
    """An object with the properties of its variants beside its own, as far as those do not clash.

    Each variant as a whole object would repeat the object's own properties, at every level again.
    """
    added: dict[str, Schema] = {}
    for variant in map(_merged, variants):
        added = _all_properties(added, variant.get("properties", {}), "anyOf")
    return {**schema, "properties": {**added, **schema["properties"]}}


def _variant(schema: Schema) -> list[Schema]:
    """The alternatives of one variant: a union in a union is one union."""
    whole = _expressed(schema)
    flat = _alternatives(whole)
    if len(flat) > 1 and "description" in whole:
        flat[0] = {"description": whole["description"], **flat[0]}
    return flat


def _alternatives(form: Schema) -> list[Schema]:
    if "oneOf" in form:
        return list(form["oneOf"])
    if "nullable" in form:
        return [{key: value for key, value in form.items() if key != "nullable"}, _NULL]
    return [form]


def _typed(schema: Schema) -> list[Schema]:
    """The alternatives of a schema that has no variants: by its values, or else by its types."""
    if "enum" in schema:
        return _literals(schema["enum"])
    types = list(dict.fromkeys(schema.get("type") or _implied(schema)))
    shown = [kind for kind in types if kind != "null"]
    if len(shown) > 1 and all(kind in _SCALARS for kind in shown):
        null = [_NULL] if len(shown) < len(types) else []
        return [{"type": list(dict.fromkeys(_SCALARS[kind] for kind in shown))}, *null]
    return [_of_type(kind, schema) for kind in types]


def _implied(schema: Schema) -> list[str]:
    if any(key in schema for key in ("properties", "patternProperties", "additionalProperties")):
        return ["object"]
    return ["array"] if "items" in schema or "prefixItems" in schema else ["any"]


def _of_type(kind: str, schema: Schema) -> Schema:
    if kind in _SCALARS:
        return {"type": kind}
    if kind == "null":
        return _NULL
    if kind == "array":
        return _array(schema)
    # Some clients write `dict` or nothing at all for an object.
    return _object(schema) if kind == "object" or "properties" in schema else {}


def _literals(values: Sequence[Any]) -> list[Schema]:
    """An enum: strings as openai-harmony prints them; it drops anything else, so that is a type."""
    shown = [value for value in values if value is not None]
    null = [_NULL] if len(shown) < len(values) else []
    if not shown:
        return null or [_NEVER]
    if all(isinstance(value, str) and _PRINTED_BARE.fullmatch(value) for value in shown):
        return [{"type": "string", "enum": shown}, *null]
    return [{"type": [json.dumps(value, ensure_ascii=False) for value in shown]}, *null]


def _union(forms: Iterable[Schema], note: str = "") -> Schema:
    """Alternatives as one schema. Null is ``nullable`` where that is printed, else a variant.

    ``note`` is what the whole will be described with.
    """
    distinct = list({json.dumps(form): form for form in forms}.values())
    null = _NULL in distinct
    real = [form for form in distinct if form not in (_NULL, _NEVER)]
    if not real:
        return dict(_NULL if null else _NEVER)
    if any("type" not in form and "oneOf" not in form for form in real):
        return {}  # `any` takes in everything beside it
    if len(real) == 1:
        return _nullable(real[0], note) if null else real[0]
    return {"oneOf": [*map(_trailing, real), *([_NULL] if null else [])]}


def _nullable(form: Schema, note: str) -> Schema:
    """``form`` or null. openai-harmony leaves ``| null`` out where it already reads "null"."""
    if "oneOf" in form:
        return {**form, "oneOf": [*form["oneOf"], _NULL]}
    if "null" not in json.dumps(form) + note:
        return {**form, "nullable": True}
    line = _line(form)
    if line is not None:
        return {**form, "type": [line, "null"]}
    return {"oneOf": [_trailing(form), _NULL]}


# --- arrays and objects ---


def _array(schema: Schema) -> Schema:
    if "prefixItems" in schema:
        return _tuple([_expressed(one) for one in schema["prefixItems"]], schema.get("items"))
    return _array_of(_expressed(schema["items"])) if "items" in schema else {"type": "array"}


def _tuple(items: list[Schema], rest: Schema | None) -> Schema:
    """``[A, B, ...C[]]`` when that fits a line, else an array of A, B and C."""
    last = [] if rest in (None, {"enum": []}) else [_expressed(rest or {})]
    lines = [_line(one) for one in items]
    spread = [_line(_array_of(one)) for one in last]
    printed = [*lines, *(line and f"...{line}" for line in spread)]
    if all(printed):
        return {"type": [f"[{', '.join(map(str, printed))}]"]}
    return _array_of(_union(form for one in [*items, *last] for form in _alternatives(one)))


def _array_of(item: Schema) -> Schema:
    """An array of ``item``. The template puts ``[]`` behind the last type of a union only."""
    if not _is_union(item):
        return {"type": "array", "items": _noted(item), **_hoisted(item)}
    line = _line(item)
    if line is not None:
        return {"type": [f"({line})[]"], **_hoisted(item)}
    arrays = [_array_of(one) for one in _alternatives(item)]
    note = _lines(item.get("description") if "oneOf" in item else None, _MIXED)
    return {"oneOf": [_trailing(one) for one in arrays], "description": note}


def _is_union(form: Schema) -> bool:
    kind = form.get("type")
    several = (kind if isinstance(kind, list) else form.get("enum", ()))[1:]
    return "oneOf" in form or "nullable" in form or bool(several)


def _hoisted(item: Schema) -> Schema:
    """The description of an item, for its array: only an object prints its own."""
    if "description" not in item or item.get("type") == "object":
        return {}
    return {"description": item["description"]}


def _object(schema: Schema) -> Schema:
    properties = {
        _key(name): one
        for name, value in schema.get("properties", {}).items()
        if (one := _expressed(value)) != _NEVER
    }
    required = [_key(name) for name in schema.get("required", ())]
    rest_key, is_required = _rest_key(schema)
    rest = _rest(schema, bool(properties))
    if rest is not None and rest_key:
        properties[rest_key] = rest
        required += [rest_key] if is_required else []
    if not properties and schema.get("additionalProperties") != {"enum": []}:
        return dict(_OBJECT)
    printed = {name: _noted(value) for name, value in properties.items()}
    return {"type": "object", "properties": printed, "required": required}


def _rest_key(schema: Schema) -> tuple[str, bool]:
    """The key of properties without a name of their own, empty when there can be none; and whether
    it is printed without a question mark.

    Names that ``propertyNames`` lists are a mapped type's: ``[key in "a" | "b"]``.
    """
    names = _merged(schema.get("propertyNames", {})).get("enum")
    if names is None or "patternProperties" in schema:
        return _REST_KEY, True
    texts = [name for name in names if isinstance(name, str)]
    others = [name for name in texts if name not in schema.get("properties", {})]
    listed = " | ".join(json.dumps(name, ensure_ascii=False) for name in others)
    key = f"[key in {listed}]" if others else ""
    return key, set(others) <= set(schema.get("required", ()))


def _rest(schema: Schema, has_properties: bool) -> Schema | None:
    """What properties without a name of their own may be; ``None`` when there is nothing to say."""
    additional = schema.get("additionalProperties", {"enum": []})
    named = list(schema.get("patternProperties", {}).values())
    if additional == {} and not named and has_properties:
        return None
    rest = _expressed({"anyOf": [*named, additional]})
    return None if rest == _NEVER else rest


def _key(name: str) -> str:
    """A property's name as TypeScript: in quotes when it could be taken for something else."""
    return name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _line(form: Schema) -> str | None:
    """``form`` as TypeScript on one line, when it fits there without losing a comment."""
    parts = [_member(one) for one in _alternatives(form)]
    return None if None in parts else " | ".join(map(str, parts))


def _member(form: Schema) -> str | None:
    if "oneOf" in form or form.get("type") == "object":
        return None
    if form.get("type") == "array":
        item = _line(form["items"]) if "items" in form else "any"
        return item and f"{item}[]"
    if "enum" in form and form["type"] == "string":
        return " | ".join(f'"{value}"' for value in form["enum"])
    kind = form.get("type", "any")
    return " | ".join(kind) if isinstance(kind, list) else _SCALARS.get(kind, "any")


# --- comments: openai-harmony prints texts as they are, behind one `//` ---


def _lines(*texts: str | None) -> str:
    """Texts below one another, each once."""
    return "\n".join(dict.fromkeys(text for text in texts if text))


def _noted(form: Schema) -> Schema:
    """``form`` where its description stands above it: each line of it a comment."""
    if "oneOf" in form:
        form = _with_first_note(form)
    return _commented(form, "\n// ")


def _trailing(form: Schema) -> Schema:
    """``form`` as a variant: its description stands behind it, so it has to be one line."""
    return _commented(form, " ")


def _commented(form: Schema, joint: str) -> Schema:
    shown = [key for key in ("title", "description") if key in form]
    texts: Schema = {key: _joined(form[key], joint) for key in shown}
    if isinstance(form.get("default"), str):
        texts["default"] = _joined(form["default"], "\\n")
    if "examples" in form:
        texts["examples"] = [_joined(one, "\\n") for one in form["examples"]]
    return {**form, **texts}


def _joined(text: str, joint: str) -> str:
    return joint.join(_LINE_ENDS.split(text))


def _with_first_note(form: Schema) -> Schema:
    """The template leaves out the first variant's description below one of the whole: put it there.

    Of two equal ones it prints neither. An object prints its own in any case.
    """
    first, *others = form["oneOf"]
    if "description" not in form or "description" not in first or first.get("type") == "object":
        return form
    bare = {key: value for key, value in first.items() if key != "description"}
    description = _lines(form["description"], first["description"])
    return {**form, "oneOf": [bare, *others], "description": description}
