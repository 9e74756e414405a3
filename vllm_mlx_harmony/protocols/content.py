"""The parts of a message's content as one text: alike in both of OpenAI's APIs.

Knows how parts are joined (semantics A5, A11). Refuses to know which types of parts there are.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_mlx_harmony.core.turn import left_out


def result_text(parts: Iterable[tuple[str | None, str]]) -> str:
    """The text of a tool's result, from the (text, kind) of its parts.

    A part without text is replaced by a line of its own that says what kind was left out.
    """
    joined, line_open = "", False
    for text, kind in parts:
        starts_line = joined and (line_open or text is None)
        joined += "\n" if starts_line and not joined.endswith("\n") else ""
        joined += left_out(kind) if text is None else text
        line_open = text is None
    return joined
