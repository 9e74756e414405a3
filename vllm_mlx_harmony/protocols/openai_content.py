"""Content parts and call arguments, which are the same in both of OpenAI's APIs.

Text parts are joined; a line of text replaces any other part (semantics A4, A5, A11).
"""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from typing import Annotated, TypeAlias

from vllm_mlx_harmony.core.attachments import Attachments, placeholder
from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.protocols.validation import Variants, Wire, text_parts, unsupported


class AnyPart(Wire):
    """One part of a content. Only texts and refusals are read."""

    type: str


class TextPart(AnyPart):
    text: str


class Refusal(AnyPart):
    refusal: str


_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_MODELS: dict[str, type[Wire]] = {**dict.fromkeys(_TEXTS, TextPart), "refusal": Refusal}

Part: TypeAlias = Annotated[AnyPart, Variants(_MODELS, AnyPart)]
Parts: TypeAlias = Annotated[list[Part] | None, text_parts("parts")]
"""A content: a string or a list of parts."""

_KINDS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "computer_screenshot": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
    "input_file": "file",
    "file": "file",
    "document": "file",
}
"""The types of attachments, including those of other servers, and the kind of each."""


def message_text(parts: Sequence[AnyPart], where: str, attachments: Attachments) -> str:
    """The text of a message's parts. ``where`` is the path of the list.

    Raises ``RequestError`` naming a part that is neither text nor an attachment.
    """
    for index, part in enumerate(parts):
        if part.type not in _MODELS and part.type not in _KINDS:
            at = f"{where}[{index}]"
            raise unsupported(at, f"{at} is of type {quoted(part.type)}, which is not supported")
    return result_text(parts, where, attachments)


def paragraphs(parts: Sequence[AnyPart]) -> str:
    """The texts of the parts, each on a line of its own. Other parts are left out."""
    texts = (_part_text(part) for part in parts)
    return "\n".join(text for text in texts if text)


def result_text(parts: Sequence[AnyPart], where: str, attachments: Attachments) -> str:
    """The text of a tool's result: the texts, concatenated, and a line for every other part."""
    joined, line_open = "", False
    for index, part in enumerate(parts):
        text = _part_text(part)
        is_line = text is None
        if text is None:
            kind, at = _KINDS.get(part.type), f"{where}[{index}]"
            text = attachments.line(kind, part.type, at) if kind else placeholder(part.type)
        starts_line = joined and (line_open or is_line)
        joined += "\n" if starts_line and not joined.endswith("\n") else ""
        joined += text
        line_open = is_line
    return joined


def _part_text(part: AnyPart) -> str | None:
    if isinstance(part, TextPart):
        return part.text
    return part.refusal if isinstance(part, Refusal) else None


def call_arguments(given: object, where: str) -> str:
    """The arguments as JSON (A4): a string unchanged, an object serialized, ``{}`` for null.

    Raises ``RequestError`` naming ``where``, the path of the field, for any other value.
    """
    if isinstance(given, str):
        return given or "{}"
    if isinstance(given, dict):
        return dumps(given, ensure_ascii=False, separators=(",", ":"))
    if given is None:
        return "{}"
    raise RequestError(f"{where} must be a string of JSON", param=where, code="invalid_type")
