"""JSON Schemas of the parameters of tools that an API defines: its requests only name the type."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_mlx_harmony.protocols.events import Document


def record(
    required: Mapping[str, Document], optional: Mapping[str, Document] | None = None
) -> Document:
    """An object with these members and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": [*required],
        "additionalProperties": False,
    }


def string(description: str = "") -> Document:
    return _described({"type": "string"}, description)


def integer(description: str = "") -> Document:
    return _described({"type": "integer"}, description)


def number(description: str = "") -> Document:
    return _described({"type": "number"}, description)


def boolean(description: str = "") -> Document:
    return _described({"type": "boolean"}, description)


def choice(*values: str, description: str = "") -> Document:
    """One of these strings."""
    return _described({"type": "string", "enum": [*values]}, description)


def array(items: Document, description: str = "") -> Document:
    return _described({"type": "array", "items": items}, description)


def _described(schema: Document, description: str) -> Document:
    return {**schema, "description": description} if description else schema


_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def fits(value: object, schema: Document) -> bool:
    """Whether ``value`` is valid for a ``schema`` of this module, or a map or ``oneOf`` of them."""
    if "oneOf" in schema:
        return any(fits(value, branch) for branch in schema["oneOf"])
    kind = schema["type"]
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if isinstance(value, dict):
        undeclared = schema["additionalProperties"]
        members = {name: schema.get("properties", {}).get(name, undeclared) for name in value}
        return value.keys() >= {*schema.get("required", ())} and all(
            member is not False and fits(value[name], member) for name, member in members.items()
        )
    if isinstance(value, list):
        return all(fits(item, schema["items"]) for item in value)
    return value in schema["enum"] if "enum" in schema else True
