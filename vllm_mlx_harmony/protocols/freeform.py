"""Freeform tools (``custom`` in both of OpenAI's APIs): text in, where a function takes JSON.

The model sees a function with one string parameter, ``input``. This module defines that function
and unwraps the text from ``{"input": "…"}`` while the arguments arrive.

**Why.** A custom tool (https://platform.openai.com/docs/guides/function-calling#custom-tools) takes
text: a patch, a program, a query. Harmony has only functions, whose arguments are JSON, and gpt-oss
was trained to write that. So the text is the only member of an object, which is removed as the text
arrives: clients receive the text incrementally, as the API specifies.

**How.** The arguments are read in three states: the *opening* up to the quote that begins the
string, the *string*, and the rest. In the string, an escape (RFC 8259, section 7) is decoded once
it is complete. A ``\\uXXXX`` is a unit of UTF-16: the decoder waits for the second half of a pair.

Models make two mistakes here, which are handled as follows:

- They write the text itself, without the object, most often when the tool has a grammar.
  Arguments that do not begin with ``{"input": "`` are passed on unchanged.
- They forget to escape a quote in a long text. A quote ends the string only if the end of the
  object or another member can follow it; otherwise it is part of the text. To decide this, up to
  ``_MAX_HELD`` characters after a quote are held back.

**Invariants.** The text does not depend on how the arguments are split.
``unwrap(wrap(text)) == text``. Nothing is raised. Nothing is held back but an incomplete escape,
and what may become the opening or the end.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Mapping
from enum import Enum, auto

from vllm_mlx_harmony.core import json_escapes
from vllm_mlx_harmony.core.turn import Syntax, SyntaxKind, Tool

INPUT = "input"
"""The only parameter of a freeform tool in the prompt."""

_PARAMETERS: Mapping[str, object] = {
    "type": "object",
    "properties": {
        INPUT: {"type": "string", "description": "The whole input, as one string of free text."}
    },
    "required": [INPUT],
    "additionalProperties": False,
}


def freeform_tool(
    name: str, description: str, where: str, syntax: SyntaxKind | None, definition: str | None
) -> Tool:
    """The tool as the prompt shows it: its description ends with the grammar of its input.

    ``syntax`` and ``definition`` are those of its format, if that is a grammar.
    """
    if not definition:
        return Tool(name, description, _PARAMETERS, where)
    what = f"this {syntax} grammar" if syntax else "this grammar"
    grammar = f"The input must match {what}:\n{definition.strip()}"
    described = f"{description}\n\n{grammar}" if description else grammar
    must = Syntax(syntax, definition) if syntax else None
    return Tool(name, described, _PARAMETERS, where, syntax=must)


def _spelled(character: str) -> str:
    return rf"(?:{character}|\\u(?i:{ord(character):04x}))"


def _partial_key() -> str:
    """A pattern for every beginning of the key, and of what follows it up to the string."""
    pattern = r'(?:"\s*(?::\s*)?)?'
    for character in reversed(INPUT):
        one, two, three, _ = [*f"{ord(character):04x}"]
        cut = rf"\\(?:u(?:{one}(?:{two}{three}?)?)?)?"
        pattern = rf"(?:{_spelled(character)}{pattern}|{cut})?"
    return pattern


# A model may write every character of the key as an escape: a grammar permits all spellings.
_OPENING = re.compile(rf'\s*\{{\s*"{"".join(map(_spelled, INPUT))}"\s*:\s*"')
_PARTIAL_OPENING = re.compile(rf'\s*(?:\{{\s*(?:"{_partial_key()})?)?|\s*\{{\s*\}}\s*')
_EMPTY = re.compile(r"\s*\{\s*\}\s*")
_MAX_HELD = 256  # characters of the opening or the end, both of which may have white space
_MEMBER = re.compile(r'"\s*,\s*"[^"\\]*"\s*:')
_OBJECT_END = re.compile(r'"\s*\}\s*')
_MAY_END = re.compile(r'"\s*(?:\}\s*|,\s*(?:"[^"\\]*(?:"\s*)?)?)?')
_PIECE = re.compile(r"""(?s)[^"\\]+|\\(?:[^u]|u[0-9a-fA-F]{4}|u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F]))""")
"""Text, or an escape that is complete."""
_UNICODE = 6  # characters of \uXXXX
_Decoder = getincrementaldecoder("utf-16-be")


def wrap(text: str) -> str:
    """The arguments that call a freeform tool with ``text``."""
    return json.dumps({INPUT: text}, ensure_ascii=False, separators=(",", ":"))


def unwrap(arguments: str) -> str:
    """The text in ``arguments``, which are the whole arguments of a call of a freeform tool."""
    freeform = FreeformInput()
    return freeform.feed(arguments) + freeform.close()


class _State(Enum):
    OPENING = auto()  # the text so far may still become {"input": "
    STRING = auto()
    ENDED = auto()  # in another member, or in white space after the object
    WHOLE = auto()  # not {"input": "…": passed on unchanged


class FreeformInput:
    """Unwraps the arguments of one call as they arrive."""

    def __init__(self) -> None:
        self._state = _State.OPENING
        self._pending = ""
        self._units = _Decoder("replace")  # of \uXXXX, which come in pairs beyond U+FFFF

    def feed(self, text: str) -> str:
        """Reads more of the arguments, and returns the text that is now certain."""
        self._pending += text
        if self._state is _State.OPENING:
            opening = _OPENING.match(self._pending)
            if opening and opening.end() <= _MAX_HELD:
                self._state, self._pending = _State.STRING, self._pending[opening.end() :]
            elif len(self._pending) <= _MAX_HELD and _PARTIAL_OPENING.fullmatch(self._pending):
                return ""
            else:
                self._state = _State.WHOLE
        if self._state is _State.STRING:
            return self._read_string()
        pending, self._pending = self._pending, ""
        return pending if self._state is _State.WHOLE else ""

    def close(self) -> str:
        """Ends the arguments, which may be cut off, and returns the rest of the text."""
        pending, self._pending = self._pending, ""
        if self._state is _State.OPENING:
            return "" if _EMPTY.fullmatch(pending) else pending
        return self._units.decode(b"", final=True)

    def _read_string(self) -> str:
        out: list[str] = []
        pending, at = self._pending, 0
        while at < len(pending):
            match = _PIECE.match(pending, at)
            piece = match.group() if match else pending[at]
            if match is None:
                if piece == "\\":  # more of the escape may come
                    break
                limit = at + _MAX_HELD + 1
                is_end = len(pending) >= limit and _OBJECT_END.fullmatch(pending, at, limit)
                if is_end or _MEMBER.match(pending, at, limit):
                    self._state = _State.ENDED
                    out.append(self._units.decode(b"", final=True))
                    break
                if len(pending) - at <= _MAX_HELD and _MAY_END.fullmatch(pending, at):
                    break
            at += len(piece)
            if piece[0] == "\\" and len(piece) == _UNICODE:
                out.append(self._units.decode(bytes.fromhex(piece[2:])))
                continue
            # Half a surrogate pair whose other half did not come is U+FFFD; an escape that JSON
            # does not know stands for itself.
            out.append(self._units.decode(b"", final=True))
            out.append(json_escapes.CHARACTERS.get(piece[1:], piece) if piece[0] == "\\" else piece)
        self._pending = pending[at:]
        return "".join(out)
