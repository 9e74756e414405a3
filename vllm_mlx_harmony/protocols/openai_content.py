"""Content parts and call arguments, which are the same in both of OpenAI's APIs.

Text parts are joined; a line of text replaces any other part (semantics A4, A5, A11).
"""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from typing import Annotated

from vllm_mlx_harmony.core.attachments import Attachments, left_out
from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.protocols.validation import UNSUPPORTED, Wire, required, text_parts


class Part(Wire):
    """One part of a content. Only text and refusals are read."""

    type: str
    text: str | None = None
    refusal: str | None = None


Parts = Annotated[list[Part] | None, text_parts("parts")]
"""A content: a string or a list of parts."""

_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""The types of text parts, and the field with the text."""

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


def message_text(parts: Sequence[Part], where: str, attachments: Attachments) -> str:
    """The text of a message's parts. ``where`` is the path of the list.

    Raises ``RequestError`` naming a part that is neither text nor an attachment.
    """
    for index, part in enumerate(parts):
        if part.type not in _TEXTS and part.type not in _KINDS:
            at = f"{where}[{index}]"
            problem = f"{at} is of type {quoted(part.type)}, which is not supported"
            raise RequestError(problem, param=at, code=UNSUPPORTED)
    return result_text(parts, where, attachments)


def paragraphs(parts: Sequence[Part], where: str) -> str:
    """The texts of the parts, each on a line of its own. Other parts are left out."""
    texts = (_part_text(part, f"{where}[{index}]") for index, part in enumerate(parts))
    return "\n".join(text for text in texts if text)


def result_text(parts: Sequence[Part], where: str, attachments: Attachments) -> str:
    """The text of a tool's result: the texts, concatenated, and a line for every other part."""
    joined, line_open = "", False
    for index, part in enumerate(parts):
        at = f"{where}[{index}]"
        text = _part_text(part, at)
        is_line = text is None
        if text is None:
            kind = _KINDS.get(part.type)
            text = attachments.line(kind, part.type, at) if kind else left_out(part.type)
        starts_line = joined and (line_open or is_line)
        joined += "\n" if starts_line and not joined.endswith("\n") else ""
        joined += text
        line_open = is_line
    return joined


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


def _part_text(part: Part, where: str) -> str | None:
    """The text of a part; ``None`` if it is not a text part."""
    field = _TEXTS.get(part.type)
    if field is None:
        return None
    text: str | None = getattr(part, field)
    if text is None:
        raise required(f"{where}.{field}")
    return text
