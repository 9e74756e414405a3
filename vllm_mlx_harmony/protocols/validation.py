"""Validates request bodies: any JSON value becomes a pydantic model or a ``RequestError``.

The error has the path of the invalid field (``messages[1].content[0].text``) and OpenAI's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from operator import methodcaller
from typing import Annotated, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.text_limits import clean, encodable, levels


class RequestModel(BaseModel):
    """Base of all request models: no coercion, finite numbers, unknown fields are ignored."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _yield_to_threads(cls, value: object) -> object:
        """Does nothing, but in Python, so that other threads can take the GIL here.

        Otherwise, pydantic would hold it while it validates thousands of messages.
        """
        return value


Model = TypeVar("Model", bound=RequestModel)


def as_choice(value: object) -> object:
    """A rule for tools as an object: a string such as ``auto`` becomes one of that type."""
    return {"type": value} if isinstance(value, str) else value


VARIANT = "\0"
"""Prefix of the names that pydantic puts into the path of an error for the model it has chosen."""


@dataclass(frozen=True, slots=True, eq=False)  # hashed, as typing requires of annotations
class Variants:
    """Annotates a field whose model depends on the ``kind`` of its value; null fields are absent.

    A field ``raw`` of a model is the whole value, as it was sent. A key ``*_end`` in
    ``models`` matches every kind with that ending that has no key of its own; ``other`` is for all
    remaining kinds.
    """

    models: Mapping[str, type[RequestModel]]
    other: type[RequestModel]
    kind: Callable[[Mapping[str, object]], object] = methodcaller("get", "type")

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        models = {self.other, *self.models.values()}
        choices = {VARIANT + model.__name__: handler.generate_schema(model) for model in models}
        union = core_schema.tagged_union_schema(choices, self._chosen)
        return core_schema.no_info_before_validator_function(_fields, union)

    def _chosen(self, value: object) -> str:
        kind = self.kind(value) if isinstance(value, dict) else None
        model = self.other
        if isinstance(kind, str):
            ends = (key for key in self.models if key.startswith("*") and kind.endswith(key[1:]))
            model = self.models.get(kind) or self.models.get(next(ends, ""), self.other)
        return VARIANT + model.__name__


def _fields(value: object) -> object:
    """Removes null fields, except for the type, which every variant requires."""
    if not isinstance(value, dict):
        return value
    fields = {name: field for name, field in value.items() if field is not None or name == "type"}
    return {**fields, "raw": value}


def string_as_list(noun: str, field: str = "text", **fields: str) -> BeforeValidator:
    """Makes a string the ``field`` of the only object in a list.

    The object is a text part, unless it has ``fields``.
    """

    def as_list(value: object) -> object:
        if isinstance(value, str):
            return [{**(fields or {"type": "text"}), field: value}]
        if value is None or isinstance(value, list):
            return value
        raise PydanticCustomError("content_type", f"must be a string or a list of {noun}")

    return BeforeValidator(as_list)


StopStrings: TypeAlias = Annotated[
    list[Annotated[str, Field(max_length=512)]], Field(max_length=64)
]
"""Stop strings. Bounded because every piece of output is searched for all of them."""

TopLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=20)]
"""How many of the likeliest tokens are returned."""

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A signed 64-bit seed, as other servers accept it."""

UNSUPPORTED = "unsupported_value"

_WORDS = {
    "missing": "is required",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "extra_forbidden": "is not a known field",
    "too_short": "must not be empty",
    "too_long": "must have at most {max_length} items",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
}


def validate(model: type[Model], body: object) -> Model:
    """``body``, the parsed JSON, as a ``model``.

    Raises only ``RequestError``, naming the first invalid field, whatever ``body`` is.
    """
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object", code="invalid_type")
    try:
        return model.model_validate(repair(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        words = _WORDS.get(first["type"])
        words = first["msg"] if words is None else words.format_map(first.get("ctx", {}))
        raise _invalid(first["type"], first["loc"], words) from error


MAX_DEPTH = 500
"""The maximum nesting of a body: deeper values cannot be serialized everywhere."""


def repair(body: object) -> object:
    """``body`` with every half of a surrogate pair replaced by U+FFFD.

    An agent written in JavaScript can cut an emoji in two when it shortens a text; its later
    requests, which repeat that text, must not fail.

    Raises ``RequestError`` for values that cannot be serialized: too deep, a number that is too
    long, or one that is not finite (``1e999``).
    """
    try:
        return body if _is_encodable(body) else _replace(body)
    except (ValueError, TypeError, RecursionError) as error:
        where = _infinite(body)
        if where is None:
            raise RequestError(f"the request body cannot be read: {error}") from error
        raise _invalid("finite_number", where, "must be a finite number") from error


def _replace(value: object) -> object:
    """``value`` with U+FFFD for each lone surrogate."""
    if isinstance(value, dict):
        return {_replace(key): _replace(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return list(map(_replace, value))
    return clean(value) if isinstance(value, str) else value


def _is_encodable(body: object) -> bool:
    """Whether ``body`` is free of lone surrogates. Raises ``ValueError`` for what no JSON has."""
    sound = True
    for depth, level in enumerate(levels(body)):
        if depth >= MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        for value in level:
            if isinstance(value, str):
                sound = sound and encodable(value)
            elif isinstance(value, float) and not isfinite(value):
                raise ValueError("a number is not finite")
            elif not (value is None or isinstance(value, (int, float, dict, list))):
                raise TypeError(f"{type(value).__name__} is not JSON")
    return sound


def _infinite(value: object, depth: int = 0) -> tuple[int | str, ...] | None:
    """The path of the first number in ``value`` that is not finite, up to ``MAX_DEPTH``."""
    if isinstance(value, float) and not isfinite(value):
        return ()
    inner: Iterable[tuple[int | str, object]] = ()
    if depth < MAX_DEPTH and isinstance(value, (dict, list)):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
    for step, item in inner:
        where = _infinite(item, depth + 1)
        if where is not None:
            return (step, *where)
    return None


def required(where: str) -> RequestError:
    """The error for a field that is missing or null where the API needs it."""
    return _invalid("missing", (where,), _WORDS["missing"])


def invalid(where: str, problem: str) -> RequestError:
    return RequestError(problem, param=where, code="invalid_value")


def unsupported(where: str, problem: str) -> RequestError:
    """The error for a valid value at ``where`` that this server does not support."""
    return RequestError(problem, param=where, code=UNSUPPORTED)


def path(parts: Iterable[int | str]) -> str:
    """``("messages", 1, "content")`` as ``messages[1].content``."""
    steps = (
        f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_KEY]}"
        for part in parts
        if isinstance(part, int) or not part.startswith(VARIANT)
    )
    text = "".join(steps).removeprefix(".")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_MAX_KEY = 200
"""The maximum length of a key in a path."""


def _invalid(kind: str, where: Iterable[int | str], message: str) -> RequestError:
    """The error for a field that pydantic rejects, with OpenAI's code for its error type."""
    param = path(where)
    words = message.replace("Input should be", "must be")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    if kind == "missing":
        code = "missing_required_parameter"
    return RequestError(f"{param} {words}", param=param, code=code)
