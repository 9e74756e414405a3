"""Token ids as coloured text: control tokens apart from the rest, each message in its colour.

Knows which colour means what. Refuses to know how a header is read: that is `core.header`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Kind
from vllm_mlx_harmony.core.header import Header, HeaderReader

CONTROL_STYLE = "dim"
HEADER_STYLE = "dim"

KIND_STYLES = {
    Kind.REASONING: "yellow",
    Kind.PREAMBLE: "cyan",
    Kind.ANSWER: "bold",
    Kind.CALL: "magenta",
}
_CHANNEL_KINDS = {"analysis": Kind.REASONING, "commentary": Kind.PREAMBLE}
_ROLE_STYLES = {"system": "blue", "developer": "blue", "user": "green", "tool": "bright_blue"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A control token, or the text between two of them. Only ``control`` tells them apart for sure:
    what a user typed may look like a control token and is text."""

    ids: tuple[int, ...]
    text: str
    control: bool


def pieces(ids: Iterable[int]) -> Iterator[Piece]:
    """``ids`` cut at their control tokens. Joined, the texts are what the ids say.

    Takes ids of the vocabulary only; bytes that are no UTF-8 become U+FFFD.
    """
    for control, run in groupby(ids, key=vocab.CONTROL.__contains__):
        if control:
            yield from (Piece((token,), vocab.encoding().decode([token]), True) for token in run)
        else:
            tokens = tuple(run)
            said = b"".join(map(vocab.token_bytes, tokens)).decode("utf-8", "replace")
            yield Piece(tokens, said, False)


def painted(ids: Iterable[int], *, apart: bool = False) -> Text:
    """``ids`` written out, in colours. They begin with a header, as a prompt and a completion do.

    ``apart``: each message on a line of its own, with line breaks that are not in the ids.
    """
    text, reader, style = Text(), HeaderReader(marked=True), HEADER_STYLE
    for piece in pieces(ids):
        if apart and text and piece.ids[0] == vocab.START:
            text.append("\n")
        text.append(piece.text, CONTROL_STYLE if piece.control else style)
        if not piece.control:
            reader.text(piece.text)
        elif piece.ids[0] == vocab.MESSAGE:
            style = style_of(reader.header())
        elif piece.ids[0] == vocab.CHANNEL:
            reader.channel()
        elif piece.ids[0] != vocab.CONSTRAIN:
            reader, style = HeaderReader(marked=True), HEADER_STYLE
    return text


def style_of(header: Header) -> str:
    """The colour of the message behind a header."""
    if header.role in _ROLE_STYLES:
        return _ROLE_STYLES[header.role]
    if header.recipient:
        return KIND_STYLES[Kind.CALL]
    return KIND_STYLES[_CHANNEL_KINDS.get(header.channel, Kind.ANSWER)]
