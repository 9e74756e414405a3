"""Pictures, audio and files in a request: gpt-oss reads text only (semantics A11).

A line of text stands in the place of each. The model can then say what it was not given, and the
session of an agent, which sends its whole history with every request, goes on.
"""

from __future__ import annotations

from enum import Enum

from vllm_mlx_harmony.core.errors import RequestError, quoted

KINDS = ("image", "audio", "video", "file")


def left_out(kind: str) -> str:
    """The line that stands for a part of this kind: one of ``KINDS``, or the API's own word."""
    part = kind if kind in KINDS else f"part of type {quoted(kind)}"
    return f"[{part} left out: this model reads text only]"


class Attachments(str, Enum):
    """What a server does with them."""

    OMIT = "omit"
    REFUSE = "refuse"

    def line(self, kind: str, part_type: str, where: str) -> str:
        """What the model reads instead of the part at ``where`` in the request.

        ``part_type`` is what the API calls it. Raises ``RequestError`` naming it to ``REFUSE`` it.
        """
        if self is Attachments.REFUSE:
            problem = f"{where} is of type {quoted(part_type)}: this model reads text only"
            raise RequestError(problem, param=where, code="unsupported_value")
        return left_out(kind)
