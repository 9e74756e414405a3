"""The response format of a Chat request, from OpenAI's field or from those of vLLM, llama.cpp and
SGLang.

Older versions of vLLM have a field for each kind of format (``guided_regex``), newer ones have one
for all of them (``structured_outputs``). SGLang's fields (``regex``) have the same contents, and so
has llama.cpp's ``json_schema``; in these two, forms send empty ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.text_limits import is_quick_to_parse
from vllm_mlx_harmony.core.turn import ResponseFormat, Syntax
from vllm_mlx_harmony.protocols.chat.schema import ChatBody, ChatFormat, StructuredOutputs
from vllm_mlx_harmony.protocols.validation import invalid, repair, required, unsupported


def response_format(body: ChatBody) -> ResponseFormat | None:
    """The requested format; ``None`` for plain text.

    Raises ``RequestError`` naming the field for a second format, or one that is not supported.
    """
    formats = list(_formats(body))
    if len(formats) > 1:
        (one, _), (other, _), *_ = formats
        problem = f"{other} cannot be combined with {one}: specify only one response format"
        raise invalid(other, problem)
    return replace(formats[0][1], where=formats[0][0]) if formats else None


def _formats(body: ChatBody) -> Iterator[tuple[str, ResponseFormat]]:
    if body.response_format is not None and body.response_format.type != "text":
        yield "response_format", _openai(body.response_format)
    outputs = body.structured_outputs or StructuredOutputs()
    if outputs.structural_tag is not None:
        raise _unsupported("structured_outputs.structural_tag", "Harmony defines its own tags")
    if outputs.disable_additional_properties:
        where = "structured_outputs.disable_additional_properties"
        raise _unsupported(where, "set additionalProperties in the schema")
    for name, guided, requested in (
        ("json", body.guided_json, outputs.json_schema),
        ("json_object", body.guided_json_object, outputs.json_object),
        ("regex", body.guided_regex, outputs.regex),
        ("choice", body.guided_choice, outputs.choice),
        ("grammar", body.guided_grammar, outputs.grammar),
    ):
        for where, value in ((f"guided_{name}", guided), (f"structured_outputs.{name}", requested)):
            if value is not None and value is not False:
                yield where, _vllm(name, value, where)
    for name, where, requested in (
        ("json", "json_schema", body.json_schema),
        ("regex", "regex", body.regex),
        ("grammar", "grammar", body.grammar),
    ):
        if requested:
            yield where, _vllm(name, requested, where)


def _openai(requested: ChatFormat) -> ResponseFormat:
    schema = requested.json_schema
    if requested.type == "json_object" or (schema is None and requested.bare_schema is not None):
        return ResponseFormat(requested.bare_schema)
    if schema is None:
        raise required("response_format.json_schema")
    return ResponseFormat(
        schema.json_schema,
        schema.name or "response",
        schema.description or "",
        strict=bool(schema.strict),
    )


def _vllm(name: str, requested: object, where: str) -> ResponseFormat:
    """The format that vLLM calls ``name``; a schema is an object, or the JSON of one."""
    match name, requested:
        case "json", _:
            return _by_schema(requested, where)
        case "regex", str(pattern):
            return ResponseFormat(strict=True, syntax=Syntax("regex", pattern))
        case "choice", list(choices):
            pattern = f"(?:{'|'.join(map(re.escape, choices))})"
            return ResponseFormat(strict=True, syntax=Syntax("regex", pattern))
        case "grammar", str(grammar):
            if "::=" in grammar:  # GBNF, which llama.cpp and other backends of vLLM take
                raise _unsupported(where, "write the grammar in Lark's notation")
            return ResponseFormat(strict=True, syntax=Syntax("lark", grammar))
        case _:
            return ResponseFormat()


def _by_schema(requested: object, where: str) -> ResponseFormat:
    if isinstance(requested, str) and not is_quick_to_parse(requested):
        raise invalid(where, f"{where} is too large")
    try:
        schema = repair(json.loads(requested)) if isinstance(requested, str) else requested
    except (ValueError, RecursionError, RequestError) as error:
        raise invalid(where, f"{where} is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise RequestError(f"{where} must be an object", param=where, code="invalid_type")
    return ResponseFormat(schema, strict=True, strict_implied=True)


def _unsupported(where: str, why: str) -> RequestError:
    return unsupported(where, f"{where} is not available: {why}")
