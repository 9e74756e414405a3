"""Freeform tools (``custom`` in both of OpenAI's APIs): text in, where a function takes JSON.

The model sees a function with one string parameter, ``input``. This module defines that function
and unwraps the text from ``{"input": "…"}`` while the arguments arrive.

**Why.** A custom tool (https://platform.openai.com/docs/guides/function-calling#custom-tools) takes
text: a patch, a program, a query. Harmony knows functions only, whose arguments are JSON, and that
is what gpt-oss was trained to write. So the text is the only member of an object, which is removed
while the text arrives: clients receive the text incrementally, as the API specifies.

**How.** Three states are read in order: the *opening* up to the quote that begins the string, the
*string*, and what comes behind it. In the string an escape (RFC 8259, section 7) is decoded when it
is there whole; ``\\uXXXX`` are halves of UTF-16 and go through a decoder that waits for the second.

Models make two mistakes here, and each has an answer:

- They write the text itself, without the object, most often when the tool has a grammar.
  Arguments that do not begin with ``{"input": "`` are passed on unchanged.
- They forget to escape a quote in a long text. A quote ends the string only where the object can
  end behind it, or another member begin; any other one is part of the text. That takes what follows
  the quote, so that a quote waits for up to ``_LONGEST`` characters.

**Invariants.** Any cut of the arguments gives the same text. ``unwrapped(wrap(text)) == text``.
Never raises; holds no more than an escape, or what may become the opening or the end.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Mapping
from enum import Enum, auto
from typing import Literal, TypeAlias

from vllm_mlx_harmony.core.turn import Syntax, Tool

INPUT = "input"
"""The one parameter a freeform tool is shown with."""

GrammarSyntax: TypeAlias = Literal["regex", "lark"]
"""The notations that a grammar may be written in."""

_PARAMETERS: Mapping[str, object] = {
    "type": "object",
    "properties": {
        INPUT: {"type": "string", "description": "The whole input, as one string of free text."}
    },
    "required": [INPUT],
}


def freeform_tool(
    name: str, description: str, where: str, syntax: GrammarSyntax | None, definition: str | None
) -> Tool:
    """The tool as the model is shown it: its description ends with the grammar of its input.

    ``syntax`` and ``definition`` are those of its format, when that is a grammar.
    """
    if not definition:
        return Tool(name, description, _PARAMETERS, where)
    what = f"this {syntax} grammar" if syntax else "this grammar"
    grammar = f"The input must match {what}:\n{definition.strip()}"
    described = f"{description}\n\n{grammar}" if description else grammar
    must = Syntax(syntax, definition) if syntax else None
    return Tool(name, described, _PARAMETERS, where, syntax=must)


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_EMPTY = re.compile(r"\s*\{\s*\}\s*")
_LONGEST = 256  # characters of the opening or the end: white space may stand anywhere in them
_TOKENS = ("{", f'"{INPUT}"', ":", '"')
_MEMBER = re.compile(r'"\s*,\s*"[^"\\]*"\s*:')
_MAY_END = re.compile(r'"\s*(?:\}\s*|,\s*(?:"[^"\\]*(?:"\s*)?)?)?')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}
_HEX = re.compile(r"[0-9a-fA-F]*")
_UNICODE = 6  # characters of \uXXXX
_Decoder = getincrementaldecoder("utf-16-be")


def wrap(text: str) -> str:
    """The arguments that call a freeform tool with ``text``."""
    return json.dumps({INPUT: text}, ensure_ascii=False, separators=(",", ":"))


def unwrapped(arguments: str) -> str:
    """The text that a freeform tool is called with by ``arguments``, all of them."""
    freeform = FreeformInput()
    return freeform.feed(arguments) + freeform.close()


class _State(Enum):
    OPENING = auto()  # what came so far may still become {"input": "
    STRING = auto()
    ENDED = auto()  # in another member
    WHOLE = auto()  # not {"input": "…": handed over as it is


class FreeformInput:
    """Unwraps one call's arguments. Feed any pieces of them; what comes out is the same, joined.

    Arguments that do not begin as ``{"input": "`` are handed over whole: a model that was shown a
    grammar sometimes writes the text itself. A quote that it forgot to escape is part of the text:
    only one before the end, or before another member, ends it. Never raises; holds no more than an
    escape, or what may yet become the opening or the end.
    """

    def __init__(self) -> None:
        self._state = _State.OPENING
        self._pending = ""
        self._units = _Decoder("replace")  # of \uXXXX, which come in pairs beyond U+FFFF

    def feed(self, text: str) -> str:
        """What of the input is known for certain by now and was not handed out before."""
        self._pending += text
        if self._state is _State.OPENING:
            self._open()
        if self._state is _State.STRING:
            return self._string()
        if self._state is _State.OPENING:
            return ""
        pending, self._pending = self._pending, ""
        return pending if self._state is _State.WHOLE else ""

    def close(self) -> str:
        """The rest: the arguments end here, whole or cut."""
        pending, self._pending = self._pending, ""
        if self._state is _State.OPENING:
            return "" if _EMPTY.fullmatch(pending) else pending
        return self._lone()

    def _open(self) -> None:
        opening = _OPENING.match(self._pending)
        if opening and opening.end() <= _LONGEST:
            self._state, self._pending = _State.STRING, self._pending[opening.end() :]
        elif len(self._pending) > _LONGEST or not (
            _may_open(self._pending) or _EMPTY.fullmatch(self._pending)
        ):
            self._state = _State.WHOLE

    def _string(self) -> str:
        out, at, pending = [], 0, self._pending
        while at < len(pending) and self._state is _State.STRING:
            end = self._end_of_piece(pending, at)
            if end is None:
                break
            out.append(self._piece(pending[at:end]))
            at = end
        self._pending = pending[at:]
        return "".join(out)

    def _end_of_piece(self, pending: str, at: int) -> int | None:
        """Where what stands ``at`` ends: plain text, an escape or a quote; ``None``: wait for more.

        The quote before another member is not passed: there the string has ended.
        """
        if pending[at] == "\\":
            return _escape_end(pending, at)
        if pending[at] != '"':
            plain = _PLAIN.match(pending, at)
            return plain.end() if plain else at
        if _MEMBER.match(pending, at, at + _LONGEST + 1):  # one that could have been waited for
            self._state = _State.ENDED
            return at
        return None if len(pending) - at <= _LONGEST and _MAY_END.fullmatch(pending, at) else at + 1

    def _piece(self, piece: str) -> str:
        """What ``piece`` stands for."""
        return self._escape(piece) if piece.startswith("\\") else self._lone() + piece

    def _escape(self, escape: str) -> str:
        """What ``escape`` stands for; one that JSON does not know stands for itself."""
        if len(escape) == _UNICODE:
            return self._units.decode(bytes.fromhex(escape[2:]))
        return self._lone() + _ESCAPES.get(escape[1:], escape)

    def _lone(self) -> str:
        """Half a surrogate pair whose other half did not come, as U+FFFD."""
        return self._units.decode(b"", final=True)


def _may_open(text: str) -> bool:
    """Whether ``text`` is the beginning of ``{"input": "``, white space aside."""
    rest = text
    for token in _TOKENS:
        rest = rest.lstrip()
        if len(rest) <= len(token):
            return token.startswith(rest)
        if not rest.startswith(token):
            return False
        rest = rest[len(token) :]
    return False


def _escape_end(text: str, at: int) -> int | None:
    """Where the escape at ``at`` ends; ``None`` when more of it may come."""
    if len(text) < at + 2:
        return None
    if text[at + 1] != "u":
        return at + 2
    digits = _HEX.match(text, at + 2, at + _UNICODE)
    end = digits.end() if digits else at + 2
    if end == at + _UNICODE:
        return end
    return None if end == len(text) else at + 2
