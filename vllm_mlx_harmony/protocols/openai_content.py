"""What both of OpenAI's APIs send alike: the parts of a content, and the arguments of a call.

Knows which parts are text, what stands for the others and how they are joined (semantics A4, A5,
A11). Refuses to know in which messages or items they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.turn import omitted
from vllm_mlx_harmony.protocols.validation import UNSUPPORTED, Wire, required


class Part(Wire):
    """One part of some content. What is neither text nor refusal is only named."""

    type: str
    text: str | None = None
    refusal: str | None = None


def _as_parts(value: object) -> object:
    """A string is a list of one text part."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if value is None or isinstance(value, list):
        return value
    raise PydanticCustomError("content_type", "must be a string or a list of parts")


Parts = Annotated[list[Part] | None, BeforeValidator(_as_parts)]
"""A content, as it is checked: a string or a list of parts."""

_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""The parts that are text, and the field it stands in."""

_KINDS = {
    "image_url": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "input_video": "video",
    "input_file": "file",
}


def message_text(parts: Sequence[Part], where: str) -> str:
    """The text of a message's parts, one after the other. ``where`` is the path of the list.

    Raises ``RequestError`` naming the part that is not text.
    """
    texts: list[str] = []
    for index, part in enumerate(parts):
        at = f"{where}[{index}]"
        text = _part_text(part, at)
        if text is None:
            problem = f"{at} is of type {quoted(part.type)}: the model reads text only"
            raise RequestError(problem, param=at, code=UNSUPPORTED)
        texts.append(text)
    return "".join(texts)


def user_text(parts: Sequence[Part], where: str, *, newest: bool) -> str:
    """The text of a user's message; of what is not text, a line in all but the ``newest`` (A11).

    Raises ``RequestError`` naming the part in that one: it is what the answer would be about.
    """
    return message_text(parts, where) if newest else result_text(parts, where)


def paragraphs(parts: Sequence[Part], where: str) -> str:
    """The texts of parts that were paragraphs of their own. What is not text is not there."""
    texts = (_part_text(part, f"{where}[{index}]") for index, part in enumerate(parts))
    return "\n".join(text for text in texts if text)


def result_text(parts: Sequence[Part], where: str) -> str:
    """The text of a tool's result. A part that is not text is replaced by a line that says so."""
    joined, line_open = "", False
    for index, part in enumerate(parts):
        text = _part_text(part, f"{where}[{index}]")
        starts_line = joined and (line_open or text is None)
        joined += "\n" if starts_line and not joined.endswith("\n") else ""
        joined += omitted(_KINDS.get(part.type, part.type)) if text is None else text
        line_open = text is None
    return joined


def call_arguments(given: object, where: str) -> str:
    """A string byte for byte; an object compactly, non-ASCII kept; nothing is ``{}`` (A4).

    Raises ``RequestError`` naming ``where``, the path of the field, for anything else.
    """
    if isinstance(given, str):
        return given or "{}"
    if isinstance(given, dict):
        return dumps(given, ensure_ascii=False, separators=(",", ":"))
    if given is None:
        return "{}"
    raise RequestError(f"{where} must be a string of JSON", param=where, code="invalid_type")


def _part_text(part: Part, where: str) -> str | None:
    """The text of a part; ``None`` when it is a picture, a sound or anything else."""
    field = _TEXTS.get(part.type)
    if field is None:
        return None
    text: str | None = getattr(part, field)
    if text is None:
        raise required(f"{where}.{field}")
    return text
