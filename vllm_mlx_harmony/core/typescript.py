"""JSON Schema as the TypeScript types that the model was trained to read (semantics A9).

**Why.** gpt-oss was trained on tools that are declared as TypeScript types
(https://cookbook.openai.com/articles/openai-harmony#function-calling). openai-harmony converts JSON
Schema to such types, but only a small part of it: without ``$ref``, ``allOf``, ``anyOf`` or
``const``. It silently drops the rest, and the model has to guess. Clients send all of these:
pydantic writes ``$defs`` and ``anyOf``, zod writes ``allOf`` and ``const``, MCP servers anything.
openai-harmony also encodes a declaration in one call, which holds the GIL (see `pretokens`). So
this module reimplements its template, with a reader for the whole language:

    JSON Schema ──`SchemaReader`──▶ its copy ──`_Converter`──▶ `Type`, a small tree ──▶ text

**Reading.** Schemas are read by `core.schema`, for the grammar as for this text. A schema that has
been read is a list of *layers*: the target of its ``$ref``, each schema of its ``allOf``, and its
own keywords. What several layers have of ``properties``, ``required`` and ``items`` adds up; of
types and literals, those remain that all layers allow, as in the grammar. Of other keywords, the
last one wins. In general ``allOf`` means something else
(https://json-schema.org/draft/2020-12/json-schema-core#section-10.2), but this is how it is used:
for a base with additions. Layers are converted one level at a time, when a type needs them. A
recursive reference becomes ``any``, because a type that is printed inline cannot be recursive.

**Printing.** The text is that of ``json_schema_to_typescript`` and ``template_tools_section`` in
https://github.com/openai/harmony/blob/main/src/encoding.rs, including its oddities, because the
model was trained on them: the description of an object is repeated, each variant of a union has a
line of its own, and lists of types share one. Where that template prints a wrong type (no
``| null`` after a text that contains "null", ``[]`` after a union), the tree has a different shape,
which prints correctly. What TypeScript cannot express (formats, examples, mixed items) becomes a
comment.

The model only reads this text. What it writes is constrained by the schema itself (`core.grammar`).

**Bounds.** Depth, schemas and characters are counted before anything is built: four references to
four references, twelve levels deep, are a small request and sixteen million types.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.schema import AnySchema, SchemaReader
from vllm_mlx_harmony.core.text_limits import clean
from vllm_mlx_harmony.core.turn import Tool

# In one schema, with every `$ref` replaced. What exceeds these becomes `any`, or null in a value.
MAX_DEPTH = 32
MAX_SCHEMAS = 4_000
"""They are converted in some 100 ms, and their text has at least 25,000 tokens."""
MAX_VALUE_DEPTH = 8
# In all tools of a request. More is rejected, since it does not fit any model's context.
MAX_CHARACTERS = 2 * 2**20
"""Some 500,000 tokens."""
MAX_SCHEMAS_IN_ALL = 40_000
"""They are converted in about a second."""


@dataclass(slots=True)
class SizeBudget:
    """The size that is left for the tools of one request, with every ``$ref`` replaced.

    ``tool`` is the last one that was read, which an error names.
    """

    tool: Tool = field(default_factory=partial(Tool, ""))
    characters: int = MAX_CHARACTERS
    schemas: int = MAX_SCHEMAS_IN_ALL

    def take(self, characters: int, schemas: int = 0) -> None:
        """Raises ``RequestError`` if less than that is left."""
        self.characters -= characters
        self.schemas -= schemas
        if self.characters < 0 or self.schemas < 0:
            problem = (
                f"the tools up to {quoted(self.tool.name)} are too large: more than "
                f"{MAX_CHARACTERS} characters or {MAX_SCHEMAS_IN_ALL} schemas once every $ref is "
                "expanded"
            )
            raise RequestError(problem, param=self.tool.where)


def section(namespace: str, declarations: Iterable[str], description: str = "") -> str:
    opening = f"## {namespace}\n", f"{_comment(description)}namespace {namespace} {{\n"
    return "\n".join([*opening, *declarations, f"}} // namespace {namespace}"])


def declaration(name: str, description: str, parameters: Type | None) -> str:
    argument = "" if parameters is None else f"_: {parameters.text()}"
    return f"{_comment(description)}type {name} = ({argument}) => any;\n"


def _comment(text: str) -> str:
    """The lines of ``text`` as comments. Like Rust's ``str::lines``, it only splits at ``\\n``."""
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
    return "".join(f"// {line}\n" for line in lines)


def parameters(tool: Tool, budget: SizeBudget | None = None) -> Type | None:
    """The type of the argument of ``tool``, or ``None`` if it takes none.

    Raises ``RequestError`` naming the tool if its parameters do not describe an object, or if they
    exceed the ``budget``.
    """
    schema: object = tool.parameters
    problem = ""
    if schema is None:
        return None
    if not isinstance(schema, Mapping):
        problem = f"must be a JSON Schema object, not {type(schema).__name__}"
    elif schema.get("type") in [*_SCALARS, "array", "null"]:
        problem = f"must have the type 'object', not {quoted(schema['type'])}"
    if problem:
        problem = f"the parameters of tool {quoted(tool.name)} {problem}"
        raise RequestError(problem, param=tool.where)
    budget = budget or SizeBudget()
    budget.tool = tool
    argument = replace(type_of(schema, budget), nullable=False)
    if isinstance(argument, Object):
        return argument if argument.properties else None
    is_empty = isinstance(argument, Inline) and argument.members in (("any",), ("object",))
    return None if is_empty else argument


def type_of(schema: object, budget: SizeBudget | None = None) -> Type:
    """The type that ``schema`` (any JSON value) describes; ``any`` where it is invalid."""
    root, definitions = SchemaReader(schema, annotations=True).read()
    converter = _Converter(definitions, budget or SizeBudget())
    return converter.type(converter.keywords((_Node(root),)))


# --- the tree of types, and its text ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Type(ABC):
    """A TypeScript type with its comments; ``default`` is JSON, not escaped."""

    title: str = ""
    description: str = ""
    examples: tuple[str, ...] = ()
    default: str = ""
    nullable: bool = False

    @abstractmethod
    def text(self, indent: str = "") -> str:
        """The type without ``| null``; all lines but the first begin with ``indent``."""

    def line(self) -> str | None:
        """The same on one line, or ``None`` if it needs several."""
        text = self.text()
        return None if "\n" in text else text

    def alternatives(self) -> list[Type]:
        """The types of which this one is a union, with null at the end."""
        return [replace(self, nullable=False), NULL] if self.nullable else [self]

    def member(self, name: str, indent: str = "") -> str:
        """The lines of a property ``name`` of this type."""
        above = self._above(indent, self.description)
        return f"{above}{indent}{name}: {self._value(indent + '    ', ',', self._default())}\n"

    def _value(self, indent: str, end: str, *comments: str) -> str:
        null = " | null" if self.nullable else ""
        beside = " ".join(filter(None, comments))
        return f"{self.text(indent)}{null}{end}" + (f" // {beside}" if beside else "")

    def _default(self) -> str:
        return f"default: {self.default}" if self.default else ""

    def _above(self, indent: str, description: str, *more: str) -> str:
        texts = [f"{_below(self.title)}\n{indent}//"] if self.title else []
        texts += [_below(description)] if description else []
        if self.examples:
            texts += ["Examples:", *(f'- "{_escape(example)}"' for example in self.examples)]
        return "".join(f"{indent}// {text}\n" for text in (*texts, *filter(None, more)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inline(Type):
    """Types on one line: keywords, literals, tuples (``string``, ``"a" | "b"``, ``[A, B]``).

    ``strings``: an enum of strings, whose default is printed without quotes.
    """

    members: tuple[str, ...]
    strings: bool = False

    def text(self, indent: str = "") -> str:
        return " | ".join(self.members)

    def _default(self) -> str:
        bare = self.default.removeprefix('"').removesuffix('"') if self.strings else self.default
        return f"default: {bare}" if self.default else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Array(Type):
    """``item[]``, where the item is not a union."""

    item: Type | None = None

    def text(self, indent: str = "") -> str:
        return f"{self.item.text(indent)}[]" if self.item else "Array<any>"

    def line(self) -> str | None:
        item = self.item.line() if self.item else "any"
        return item and f"{item}[]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Object(Type):
    """An object's properties by name; the name of an optional one ends in ``?``."""

    properties: tuple[tuple[str, Type], ...]

    def text(self, indent: str = "") -> str:
        comment = f"{indent}// {_below(self.description)}\n" if self.description else ""
        members = "".join(type_.member(name, indent) for name, type_ in self.properties)
        return f"{comment}{{\n{members}{indent}}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Union(Type):
    """Types on lines of their own, each followed by its comments; null is one of them."""

    variants: tuple[Type, ...]

    def text(self, indent: str = "") -> str:
        inner = indent + "   "
        # Unlike in a property, the default of each variant keeps its quotes here.
        return "".join(
            f"\n{indent} | {variant._value(inner, '', variant.description, Type._default(variant))}"
            for variant in self.variants
        )

    def alternatives(self) -> list[Type]:
        return list(self.variants)

    def member(self, name: str, indent: str = "") -> str:
        """As in `Type`, except that the template has room for only one description above the name:
        that of the union is joined with the first variant's, unless the variant is an object, which
        prints its own."""
        first = self.variants[0]
        own = isinstance(first, Object) or not self.description
        above = _below(self.description if own else _join(self.description, first.description))
        beside = [
            variant.description if variant.description != above else "" for variant in self.variants
        ]
        if above:
            beside[0] = ""
        shown = "" if own and above == first.description else above
        lines = [self._above(indent, "", shown, self._default()), f"{indent}{name}:\n"]
        for variant, text in zip(self.variants, beside, strict=True):
            lines.append(
                f"{indent} | {variant._value(indent + '   ', '', text, variant._default())}\n"
            )
        return "".join([*lines, f"{indent},\n"])


ANY, NULL, NEVER, OBJECT = (Inline(members=(name,)) for name in ("any", "null", "never", "object"))
_SCALARS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def _inline(type_: Type) -> str | None:
    """``type_`` on one line with all its alternatives, or ``None``."""
    lines = [alternative.line() for alternative in type_.alternatives()]
    return None if None in lines else " | ".join(map(str, lines))


def _union(types: Iterable[Type], note: str = "") -> Type:
    """A union of ``types``, whose description will be ``note``."""
    distinct = list(dict.fromkeys(types))
    real = [type_ for type_ in distinct if type_ not in (NULL, NEVER)]
    null = [NULL] if NULL in distinct else []
    if not real:
        return NULL if null else NEVER
    if any(isinstance(type_, Inline) and type_.members == ANY.members for type_ in real):
        return ANY  # includes all others
    if len(real) > 1:
        return Union(variants=(*map(_on_one_line, real), *null))
    only = real[0]
    if not null:
        return only
    if isinstance(only, Union):
        return replace(only, variants=(*only.variants, NULL))
    # The template prints no ``| null`` after a text that contains "null".
    if only.line() is None and "null" in note + only.member(""):
        return Union(variants=(_on_one_line(only), NULL))
    return replace(only, nullable=True)


def _array_of(item: Type) -> Type:
    """An array of ``item``. The template only puts ``[]`` after the last type of a union."""
    is_list = isinstance(item, Inline) and len(item.members) > 1
    if not (is_list or item.nullable or isinstance(item, Union)):
        # Only an object prints its own description.
        return Array(item=item, description="" if isinstance(item, Object) else item.description)
    line = _inline(item)
    if line is not None:
        return Inline(members=(f"({line})[]",), description=item.description)
    note = _join(
        item.description if isinstance(item, Union) else "", "Items of these types may be mixed."
    )
    arrays = (_on_one_line(_array_of(variant)) for variant in item.alternatives())
    return Union(variants=tuple(arrays), description=note)


# --- conversion: a schema that has been read -> a type ---


class _Node(NamedTuple):
    """A schema, its depth, and the references that led to it."""

    schema: AnySchema
    depth: int = 0
    refs: frozenset[str] = frozenset({"#"})


_Layers: TypeAlias = tuple[_Node, ...]
"""One schema, as layers in increasing order of precedence."""

_Keywords: TypeAlias = dict[str, Any]
"""The keywords of one schema; subschemas are `_Layers`."""

_NOTHING: _Keywords = {"enum": []}
"""The schema ``false``."""


class _Converter:
    """Converts one schema to a type, and takes its size from the budget."""

    def __init__(self, definitions: Mapping[str, AnySchema], budget: SizeBudget) -> None:
        self._definitions = definitions
        self._budget = budget
        self._left = MAX_SCHEMAS

    # a schema -> its keywords

    def keywords(self, layers: _Layers) -> _Keywords:
        """The keywords of ``layers`` together."""
        merged: _Keywords = {}
        for own in chain.from_iterable(map(self.layers, layers)):
            for key, content in own.items():
                combine = _TOGETHER.get(key) if key in merged else None
                merged[key] = combine(merged[key], content) if combine else content
        return merged

    def layers(  # noqa: C901 - one case per keyword
        self, node: _Node
    ) -> Iterator[_Keywords]:
        """The layers of a schema: its reference, its ``allOf``, and its own keywords, with
        ``const`` as an enum and types as a list."""
        schema, depth, refs = node
        self._left -= 1
        self._budget.take(0, schemas=1)
        if schema is False:
            yield _NOTHING
        if isinstance(schema, bool) or depth >= MAX_DEPTH or self._left < 0:
            return
        ref = schema.get("$ref", "#")
        if ref not in refs:
            self._budget.take(len(ref))
            target = self._definitions[ref.removeprefix("#/$defs/")]
            yield from self.layers(_Node(target, depth + 1, refs | {ref}))
        for part in schema.get("allOf", ()):
            yield from self.layers(_Node(part, depth + 1, refs))

        def subschema(inner: AnySchema) -> _Layers:
            return (_Node(inner, depth + 1, refs),)

        own: _Keywords = {}
        for key, content in schema.items():
            if key in _VALUES:
                if (read := _VALUES[key](content)) is not None:
                    self._budget.take(len(str(read)))
                    own["enum" if key == "const" else key] = read
            elif key in ("properties", "patternProperties"):
                self._budget.take(sum(map(len, content)))
                own[key] = {name: subschema(inner) for name, inner in content.items()}
            elif key in ("prefixItems", "anyOf", "oneOf"):
                own[key] = [*map(subschema, content)]
            elif key in ("items", "additionalProperties", "propertyNames"):
                own[key] = subschema(content)
        yield own

    # its keywords -> its type

    def type(self, schema: _Keywords) -> Type:
        stated = f"format: {schema['format']}" if "format" in schema else ""
        description = _join(schema.get("description", ""), stated)
        type_ = _union(self.alternatives(schema), description)
        notes: dict[str, Any] = {
            key: schema[key] for key in ("title", "examples", "default") if key in schema
        }
        if description:
            notes["description"] = _join(description, type_.description)
        return replace(type_, **notes) if notes else type_

    def alternatives(self, schema: _Keywords) -> list[Type]:
        null = [NULL] if schema.get("nullable") else []
        variants = schema.get("anyOf") or schema.get("oneOf")
        if variants and not any(key in schema for key in _SHAPES):
            base = {"type": schema["type"]} if "type" in schema else {}
            types = (self.type({**base, **self.keywords(variant)}) for variant in variants)
            return [*_flatten(types), *null]
        if "enum" in schema:
            return [*_literals(schema["enum"]), *null]
        kinds = list(dict.fromkeys(schema.get("type") or ()))
        if not kinds and any(key in schema for key in _OBJECT_KEYWORDS):
            kinds = ["object"]
        elif not kinds:
            kinds = ["array"] if "items" in schema or "prefixItems" in schema else ["any"]
        if "null" in kinds:
            kinds.remove("null")
            null = [NULL]
        if len(kinds) > 1 and all(kind in _SCALARS for kind in kinds):
            scalars = Inline(members=tuple(dict.fromkeys(_SCALARS[kind] for kind in kinds)))
            return [scalars, *null]
        return [*(self.of_kind(kind, schema) for kind in kinds), *null]

    def of_kind(self, kind: str, schema: _Keywords) -> Type:
        if kind in _SCALARS:
            return Inline(members=(_SCALARS[kind],))
        if kind == "array":
            return self.array(schema)
        # Some clients write `dict` or nothing at all for an object.
        return self.object_type(schema) if kind == "object" or "properties" in schema else ANY

    def array(self, schema: _Keywords) -> Type:
        """``[A, B, ...C[]]`` for a tuple that fits on one line, else an array of A, B and C."""
        rest = self.keywords(schema["items"]) if "items" in schema else None
        if "prefixItems" not in schema:
            return Array() if rest is None else _array_of(self.type(rest))
        items = [self.type(self.keywords(item)) for item in schema["prefixItems"]]
        lines = [*map(_inline, items)]
        if rest is not None and rest != _NOTHING:
            items.append(self.type(rest))
            line = _inline(_array_of(items[-1]))
            lines.append(line and f"...{line}")
        if None not in lines:
            return Inline(members=(f"[{', '.join(map(str, lines))}]",))
        return _array_of(_union(variant for item in items for variant in item.alternatives()))

    def object_type(self, schema: _Keywords) -> Type:
        required = {_key(name) for name in schema.get("required", ())}
        properties = {
            _key(name): type_ for name, type_ in self.properties(schema).items() if type_ != NEVER
        }
        extra = schema.get("additionalProperties")
        additional = _NOTHING if extra is None else self.keywords(extra)
        patterns = schema.get("patternProperties", {}).values()
        if patterns or additional or not properties:  # otherwise additional properties are implied
            several = [*map(self.keywords, patterns), additional]
            rest = _union(_flatten(map(self.type, several)))
            key, is_required = self.rest_key(schema)
            if key and rest != NEVER:
                properties[key] = rest
                required |= {key} if is_required else set()
        if not properties and (extra is None or additional != _NOTHING):
            return OBJECT
        marked = ((key if key in required else f"{key}?", properties[key]) for key in properties)
        return Object(properties=tuple(marked))

    def properties(self, schema: _Keywords) -> dict[str, Type]:
        """The named properties, and those of variants with other names: as objects of their own,
        these would repeat the object's properties at every level."""
        if "properties" not in schema:
            return {}
        several: dict[str, list[_Layers]] = {}
        for variant in schema.get("anyOf") or schema.get("oneOf") or ():
            for name, layers in self.keywords(variant).get("properties", {}).items():
                several.setdefault(name, []).append(layers)
        several.update((name, [layers]) for name, layers in schema["properties"].items())
        properties = {}
        for name, schemas in several.items():
            types = [self.type(self.keywords(layers)) for layers in schemas]
            is_union = any(type_ != types[0] for type_ in types)
            properties[name] = _union(_flatten(types)) if is_union else types[0]
        return properties

    def rest_key(self, schema: _Keywords) -> tuple[str, bool]:
        """The key of additional properties, and whether they are required. It is that of a mapped
        type (``[key in "a" | "b"]``) if ``propertyNames`` lists names, and empty for none."""
        names = self.keywords(schema.get("propertyNames", ())).get("enum")
        if names is None or "patternProperties" in schema:
            return "[key: string]", True
        texts = [name for name in names if isinstance(name, str)]
        undeclared = [name for name in texts if name not in schema.get("properties", {})]
        names_type = " | ".join(map(_dumps, undeclared))
        key = f"[key in {names_type}]" if undeclared else ""
        return key, set(undeclared) <= set(schema.get("required", ()))


def _flatten(types: Iterable[Type]) -> Iterator[Type]:
    """``types``, with unions replaced by their alternatives; the first gets the description."""
    for type_ in types:
        first, *rest = type_.alternatives()
        yield replace(first, description=first.description or type_.description)
        yield from rest


def _literals(values: Sequence[Any]) -> Sequence[Type]:
    """The values of an enum. The template only has strings, which it does not escape."""
    shown = [value for value in values if value is not None]
    null = [NULL] if len(shown) < len(values) else []
    if not shown:
        return null or [NEVER]
    members = tuple(_dumps(value) for value in shown)
    strings = all(isinstance(value, str) and _UNESCAPED.fullmatch(value) for value in shown)
    return [Inline(members=members, strings=strings), *null]


def _key(name: str) -> str:
    """The name of a property in TypeScript, in quotes if it contains unusual characters."""
    return name if _BARE_KEY.fullmatch(name) else _dumps(name)


# --- keywords of several layers, together ---


def _both_types(before: Sequence[str], content: Sequence[str]) -> Sequence[str]:
    """The types in both, or the last ones: nothing is of both, so one layer replaces another."""
    common = [name for name in content if name in before]
    return common or content


def _both_named(before: Mapping[str, _Layers], content: Mapping[str, _Layers]) -> Any:
    return {**before, **{name: before.get(name, ()) + content[name] for name in content}}


_TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "properties": _both_named,
    "required": lambda before, content: [*before, *content],
    "items": lambda before, content: before + content,
    "type": _both_types,
    "enum": _both_types,
}

# --- values of keywords, None if they have the wrong type ---


def _read_text(value: object) -> str | None:
    return clean(value) if isinstance(value, str) and value.strip() else None


def _read_texts(value: object) -> tuple[str, ...] | None:
    if not isinstance(value, list):
        return None
    return tuple(clean(text) for text in value if isinstance(text, str))


def _plain(value: object, depth: int = 0) -> Any:
    """A JSON value with at most 64-bit numbers and ``MAX_VALUE_DEPTH`` levels."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, (int, float)):
        small = abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)
        return value if small else "a number beyond 64 bits"
    if depth >= MAX_VALUE_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {clean(str(key)): _plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, depth + 1) for inner in value]
    return None


def _read_default(value: object) -> str:
    plain = _plain(value)
    return f'"{_escape(plain)}"' if isinstance(plain, str) else _json(plain)


_VALUES: dict[str, Callable[[object], Any]] = {
    "type": lambda value: (value,) if isinstance(value, str) else _read_texts(value),
    "enum": lambda value: [*map(_plain, value)] if isinstance(value, list) else None,
    "const": lambda value: [_plain(value)],
    "required": _read_texts,
    "title": _read_text,
    "description": _read_text,
    "format": _read_text,
    "examples": _read_texts,
    "default": _read_default,
    "nullable": lambda value: value is True,
}

_OBJECT_KEYWORDS = ("properties", "patternProperties", "additionalProperties")
_SHAPES = ("enum", "items", "prefixItems", *_OBJECT_KEYWORDS)


# --- texts ---

_BARE_KEY = re.compile(r"[\w$.@/-]+")
_LINE_ENDS = re.compile(r"\r\n|[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]")
_UNESCAPED = re.compile(r'[^"\\\x00-\x1f\x7f-\x9f\u2028\u2029]*')
_dumps = json.JSONEncoder(ensure_ascii=False).encode


def _join(*texts: str) -> str:
    """``texts`` on lines of their own, without duplicates."""
    return "\n".join(dict.fromkeys(filter(None, texts)))


def _escape(text: str) -> str:
    return _LINE_ENDS.sub(r"\\n", text)


def _below(text: str) -> str:
    """A text that follows ``// ``: each further line becomes another comment."""
    return _LINE_ENDS.sub("\n// ", text)


def _on_one_line(variant: Type) -> Type:
    """A variant of a union, whose description follows on the same line."""
    return replace(variant, description=_LINE_ENDS.sub(" ", variant.description))


def _json(value: Any) -> str:
    """Compact JSON, with floats as Rust's serde_json writes them."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(key)}:{_json(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    if isinstance(value, float):
        digits, exponential, power = repr(value).partition("e")
        if power == "-05":  # 1e-05 is 0.00001
            sign = "-" if value < 0 else ""
            return f"{sign}0.0000{digits.removeprefix('-').replace('.', '')}"
        return f"{digits}e{int(power)}" if exponential else digits  # 1e+16 is 1e16
    return _dumps(value)
