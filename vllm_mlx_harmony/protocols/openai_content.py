"""Content parts and call arguments, which are the same in both of OpenAI's APIs.

Text parts are joined; a line of text replaces any other part (semantics A4, A5, A11).
"""

from __future__ import annotations

from collections.abc import Iterable
from json import dumps
from typing import Annotated, TypeAlias

from vllm_mlx_harmony.core.attachments import Attachments, placeholder
from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.protocols.validation import (
    RequestModel,
    Variants,
    string_as_list,
    unsupported,
)


class AnyPart(RequestModel):
    """One part of a content. Only texts and refusals are read."""

    type: str


class TextPart(AnyPart):
    text: str


class Refusal(AnyPart):
    refusal: str


_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
TEXT_PARTS: dict[str, type[RequestModel]] = {**dict.fromkeys(_TEXTS, TextPart), "refusal": Refusal}

Part: TypeAlias = Annotated[AnyPart, Variants(TEXT_PARTS, AnyPart)]
Parts: TypeAlias = Annotated[list[Part] | None, string_as_list("parts")]
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


def paragraphs(parts: Iterable[AnyPart] | None) -> str:
    """The texts of the parts, each on a line of its own. Other parts are left out."""
    texts = map(_part_text, parts or ())
    return "\n".join(text for text in texts if text)


def text_of(
    parts: Iterable[AnyPart] | None,
    where: str,
    attachments: Attachments,
    *,
    lenient: bool = False,
    skip: tuple[type[AnyPart], ...] = (),
) -> str:
    """The texts, concatenated, and a line for every other part that is not of the models ``skip``.

    ``where`` is the path of the list. Raises ``RequestError`` naming a part that is neither text
    nor an attachment, unless ``lenient`` as for the results of tools.
    """
    joined, after_line = "", False
    for index, part in enumerate(parts or ()):
        if isinstance(part, skip):
            continue
        text, at = _part_text(part), f"{where}[{index}]"
        is_line = text is None
        if text is None:
            kind = _KINDS.get(part.type)
            if not (kind or lenient):
                problem = f"{at} is of type {quoted(part.type)}, which is not supported"
                raise unsupported(at, problem)
            text = attachments.line(kind, part.type, at) if kind else placeholder(part.type)
        if joined and (after_line or is_line) and not joined.endswith("\n"):
            joined += "\n"
        joined += text
        after_line = is_line
    return joined


def _part_text(part: AnyPart) -> str | None:
    if isinstance(part, TextPart):
        return part.text
    return part.refusal if isinstance(part, Refusal) else None


def call_arguments(arguments: object, where: str) -> str:
    """The arguments as JSON (A4): a string unchanged, an object serialized, ``{}`` for null.

    Raises ``RequestError`` naming ``where``, the path of the field, for any other value.
    """
    if isinstance(arguments, str):
        return arguments or "{}"
    if isinstance(arguments, dict):
        return dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    if arguments is None:
        return "{}"
    raise RequestError(f"{where} must be a string of JSON", param=where, code="invalid_type")
