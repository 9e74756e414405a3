"""Images, audio and files in a request: gpt-oss reads text only (semantics A11).

Each is replaced by a line of text. So the model can say what it did not see, and an agent, which
sends its whole history again with every request, is not stuck.
"""

from __future__ import annotations

from enum import StrEnum

from vllm_mlx_harmony.core.errors import RequestError, quoted

KINDS = ("image", "audio", "video", "file")


def placeholder(kind: str) -> str:
    """The line that replaces a part; ``kind`` is one of ``KINDS`` or the API's own word."""
    part = kind if kind in KINDS else f"part of type {quoted(kind)}"
    return f"[{part} left out: this model reads text only]"


class Attachments(StrEnum):
    """What a server does with attachments."""

    OMIT = "omit"
    REFUSE = "refuse"

    def line(self, kind: str, part_type: str, where: str) -> str:
        """What the model reads instead of the part at the path ``where`` of the request, which the
        API calls ``part_type``. With ``REFUSE``, raises ``RequestError``."""
        if self is Attachments.REFUSE:
            problem = f"{where} is of type {quoted(part_type)}: this model reads text only"
            raise RequestError(problem, param=where, code="unsupported_value")
        return placeholder(kind)
