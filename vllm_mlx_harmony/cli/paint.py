"""Coloured text of token ids: control tokens are dim, and each message has the colour of its kind.

The parser decides which text belongs to which message (`core.parse`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from rich.text import Text as RichText

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Delta, Kind, Opened, Text
from vllm_mlx_harmony.core.parse import Parser, State

CONTROL_STYLE = "dim"
HEADER_STYLE = "dim"

KIND_STYLES = {
    Kind.REASONING: "yellow",
    Kind.PREAMBLE: "cyan",
    Kind.ANSWER: "bold",
    Kind.CALL: "magenta",
}
_ROLE_STYLES = {"system": "blue", "developer": "blue", "user": "green", "tool": "bright_blue"}

_HEADER_PARTS = frozenset({vocab.START, vocab.CHANNEL, vocab.MESSAGE})
_TERMINATORS = vocab.TURN_ENDS | {vocab.END}


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A control token, or the text between two of them.

    Only ``control`` distinguishes them, since text may look like a control token.
    """

    ids: tuple[int, ...]
    text: str
    control: bool


def pieces(ids: Iterable[int]) -> Iterator[TokenRun]:
    """``ids`` split at their control tokens. Bytes that are not UTF-8 become U+FFFD."""
    for control, run in groupby(ids, key=vocab.CONTROL.__contains__):
        if control:
            yield from (TokenRun((token,), vocab.encoding().decode([token]), True) for token in run)
        else:
            tokens = tuple(run)
            text = b"".join(map(vocab.token_bytes, tokens)).decode("utf-8", "replace")
            yield TokenRun(tokens, text, False)


def colorize(ids: Iterable[int], *, apart: bool = False) -> RichText:
    """The coloured text of a prompt or a completion.

    ``apart`` adds line breaks, so that each message begins on a new line.
    """
    parser, style = Parser(transcript=True), HEADER_STYLE
    found = list(pieces(ids))
    styles: list[str] = []
    for piece in found:
        in_body = parser.reading is not None
        deltas = parser.feed(piece.ids)
        if parser.reading is not None:
            style = KIND_STYLES[parser.reading]
        elif parser.state is not State.RESULT:
            style = HEADER_STYLE
        elif piece.ids[0] == vocab.MESSAGE:
            style = _ROLE_STYLES[parser.author]
        styles.append(CONTROL_STYLE if piece.control else style)
        if not in_body and piece.ids[0] != vocab.MESSAGE:
            _paint_headless(found, styles, deltas)
    _paint_headless(found, styles, parser.close("stop"))
    text = RichText()
    for piece, style in zip(found, styles, strict=True):
        if apart and text and piece.ids[0] == vocab.START:
            text.append("\n")
        text.append(piece.text, style)
    return text


def _paint_headless(found: list[TokenRun], styles: list[str], deltas: list[Delta]) -> None:
    """Colours messages without ``<|message|>``, whose kind is known only after their text."""
    for opened, first in pairwise(deltas):
        if isinstance(opened, Opened) and isinstance(first, Text):
            starts = [0, *accumulate(len(piece.ids) for piece in found)]
            texts: list[int] = []
            for at in range(bisect_left(starts, opened.at), len(styles)):
                if not found[at].control:
                    texts.append(at)
                elif found[at].ids[0] in _HEADER_PARTS:
                    texts.clear()
                elif found[at].ids[0] in _TERMINATORS:
                    break
            # The parser adds empty arguments to a call that has only a header.
            if first.text != "{}" or any("{}" in found[at].text for at in texts):
                for at in texts:
                    styles[at] = KIND_STYLES[opened.kind]
