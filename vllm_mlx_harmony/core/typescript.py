"""Tools as Harmony declares them: ``namespace functions`` with a TypeScript type for each.

Knows the template that openai-harmony prints, which it does not give out as text: it encodes it in
one go, and holds the interpreter's lock for as long as that takes (see `pretokens`). So it stands
here once more, and the tests hold the two against each other. It is
``json_schema_to_typescript`` and ``template_tools_section`` in
https://github.com/openai/harmony/blob/main/src/encoding.rs, for what `schema.express` makes of a
JSON Schema. Refuses to know JSON Schema (schema) and names (names).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Schema: TypeAlias = "Mapping[str, Any]"

_NUMBERS = {"integer": "number"}
_PLAIN = {"number": "number", "integer": "number", "boolean": "boolean"}


def section(namespace: str, tools: Iterable[str], description: str = "") -> str:
    """One namespace of `tool` declarations, its description above it; ``# Tools`` has several."""
    comments = "".join(f"// {line}\n" for line in _lines(description))
    opening = f"## {namespace}\n", f"{comments}namespace {namespace} {{\n"
    return "\n".join([*opening, *tools, f"}} // namespace {namespace}"])


def tool(name: str, description: str, parameters: Schema | None) -> str:
    """The declaration of one tool, its description above it."""
    comments = "".join(f"// {line}\n" for line in _lines(description))
    argument = "" if parameters is None else f"_: {of(parameters)}"
    return f"{comments}type {name} = ({argument}) => any;\n"


def of(schema: Schema, indent: str = "") -> str:
    """The type that an expressed ``schema`` stands for; its lines begin with ``indent``."""
    if "oneOf" in schema:
        variants = (_variant(one, indent, one.get("description")) for one in schema["oneOf"])
        return "".join(f"\n{indent} | {variant}" for variant in variants)
    kind = schema.get("type")
    if isinstance(kind, list) and kind:
        types: list[str] = kind
        return " | ".join(_NUMBERS.get(each, each) for each in types)
    if kind == "object":
        return _object(schema, indent)
    if kind == "string":
        values = [f'"{value}"' for value in schema.get("enum", ())]
        return " | ".join(values) if values else "string"
    if kind == "array":
        return f"{of(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    return _PLAIN.get(kind, "any") if isinstance(kind, str) else "any"


def _object(schema: Schema, indent: str) -> str:
    required = frozenset(schema.get("required", ()))
    lines = [f"{indent}// {schema['description']}\n"] if "description" in schema else []
    lines.append("{\n")
    for name, value in schema.get("properties", {}).items():
        mark = "" if name in required else "?"
        lines += _comments(value, indent)
        if "oneOf" in value:
            lines += _union(f"{indent}{name}{mark}:\n", value, indent)
        else:
            default = f" // {_default(value)}" if "default" in value else ""
            lines.append(f"{indent}{name}{mark}: {_or_null(value, indent + '    ')},{default}\n")
    lines.append(f"{indent}}}")
    return "".join(lines)


def _comments(value: Schema, indent: str) -> list[str]:
    lines = [f"{indent}// {value['title']}\n{indent}//\n"] if "title" in value else []
    if "description" in value and "oneOf" not in value:
        lines.append(f"{indent}// {value['description']}\n")
    if value.get("examples"):
        lines.append(f"{indent}// Examples:\n")
        lines += [f'{indent}// - "{example}"\n' for example in value["examples"]]
    return lines


def _union(name: str, value: Schema, indent: str) -> list[str]:
    """A property of several types. What equals the property's description is not said again."""
    variants: Sequence[Schema] = value["oneOf"]
    whole = value.get("description")
    described = whole is not None and not (variants and variants[0].get("description") == whole)
    lines = [f"{indent}// {whole}\n"] if described else []
    if "default" in value:
        lines.append(f"{indent}// {_default(value)}\n")
    lines.append(name)
    for at, one in enumerate(variants):
        said = one.get("description")
        shown = None if said == whole or (at == 0 and described) else said
        lines.append(f"{indent} | {_variant(one, indent, shown, _default)}\n")
    return [*lines, f"{indent},\n"]


def _default(schema: Schema) -> str:
    """A string in quotes; bare, where the values of an enum are shown."""
    value = schema["default"]
    if isinstance(value, str):
        return f"default: {value}" if schema.get("enum") else f'default: "{value}"'
    return f"default: {_json(value)}"


def _default_in_type(schema: Schema) -> str:
    """In a union that is no property's: there it is in quotes in either case."""
    value = schema["default"]
    return f"default: {_json(value)}" if schema.get("enum") else _default(schema)


def _variant(schema: Schema, indent: str, said: str | None, default: Any = _default_in_type) -> str:
    """One of several types, what is said of it behind it."""
    comments = [] if said is None else [said]
    if "default" in schema:
        comments.append(default(schema))
    trailing = f" // {' '.join(comments)}" if comments else ""
    return _or_null(schema, indent + "   ") + trailing


def _or_null(schema: Schema, indent: str) -> str:
    text = of(schema, indent)
    return f"{text} | null" if schema.get("nullable") is True and "null" not in text else text


def _lines(text: str) -> list[str]:
    """As Rust's ``str::lines``: only a line feed ends a line, with a carriage return before it."""
    *ended, last = text.split("\n")
    lines = [line.removesuffix("\r") for line in ended]
    return [*lines, last] if last else lines


def _json(value: Any) -> str:
    """Compact, numbers as Rust's serde_json writes them."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(key)}:{_json(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    if isinstance(value, float):
        return _float(value)
    return json.dumps(value, ensure_ascii=False)


def _float(value: float) -> str:
    """``1e-05`` is ``0.00001`` and ``1e+16`` is ``1e16``."""
    digits, exponential, power = repr(value).partition("e")
    if not exponential:
        return digits
    if power == "-05":
        sign, digits = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
        return f"{sign}0.0000{digits.replace('.', '')}"
    return f"{digits}e{int(power)}"
