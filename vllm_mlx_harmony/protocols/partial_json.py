"""Turns a call's arguments, as they arrive, into the text of an object that every client can parse.

**Why.** In Chat Completions, arguments are a string; only at its end does a client find out whether
it is JSON. In Ollama's API they are an object, and so they are in Messages, which streams its text
in pieces
(https://docs.claude.com/en/docs/build-with-claude/streaming), and the official clients parse all
that they have after every piece. A piece that cannot be part of an object raises an error in the
client in the middle of the stream, and the whole answer is lost. Models do write such pieces: a
trailing comma, a lone surrogate, a bare word, a list, half an object at the limit of tokens.

**How.** A pushdown automaton over JSON (RFC 8259): ``Expect`` has its states, ``_open`` is the
stack of open objects and arrays. Text is sent unchanged as soon as nothing that follows can make it
invalid:

- A comma, a key and its colon are held back until the value begins. Otherwise, an output that ends
  there would leave a key without a value.
- Numbers, literals and escapes are sent whole, or not at all.

After the first character that is invalid in its place, nothing more is sent. ``close`` completes
what is open (a string, arrays, objects), repeats the interrupted member as null (of two members
with the same name, parsers take the last), and adds the whole text as ``INVALID_JSON``, so that the
tool's owner sees exactly what the model wrote.

**Invariants.** The returned pieces, joined, are one JSON object, or empty. Every beginning of it
becomes an object once what is open is closed. A valid object is returned byte for byte. How the
text is split makes no difference.

No library does this: `pydantic_core.from_json(allow_partial=True)` and jiter return the value of a
text that is cut, not the text that is safe to send, and read it from the beginning every time.
"""

from __future__ import annotations

import re
from enum import Enum
from math import isfinite

from vllm_mlx_harmony.protocols.events import quote

INVALID_JSON = "INVALID_JSON"
"""The member with the text of arguments that are not a JSON object.

The name is the one that Anthropic's page on fine-grained tool streaming proposes.
"""

MAX_DEPTH = 100
"""Nested objects and arrays. The official clients' own parsers give up at 200."""

MAX_DIGITS = 308
"""Characters of a number. Longer ones are infinite, or rejected by clients."""


class Expect(Enum):
    """A state: what may come next. Its value has the possible first characters of a token."""

    OBJECT = "{"
    FIRST_KEY = '"}'
    KEY = '"'
    COLON = ":"
    VALUE = '{["-0123456789tfn'
    FIRST_VALUE = VALUE + "]"
    NEXT = ",}]"
    NOTHING = ""
    KEY_TEXT = "inside of a key"
    VALUE_TEXT = "inside of a string"


_WHITE = re.compile(r"[ \t\n\r]+")
_WORD = re.compile(
    r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?=[^-+.0-9eE])"
)
"""A literal, or a number that has ended."""
_PARTIAL_WORD = re.compile(r"t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?|[-+.0-9eE]+")
# Halves of a surrogate pair are characters only together: clients reject a lone one.
_CHARACTERS = re.compile(
    r"""(?:[^"\\\x00-\x1f]+
        |\\["\\/bfnrt]
        |\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}
        |\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}
        )+""",
    re.VERBOSE,
)
_PARTIAL_ESCAPE = re.compile(
    r"""\\(?:u(?:[0-9a-fA-F]{0,3}
        |[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?
        )?)?""",
    re.VERBOSE,
)
_CLOSERS = {"{": "}", "[": "]"}


class ObjectText:
    """Reads text that should be a JSON object as it arrives, and returns what is safe to send.

    Text that is not an object, or is cut, is completed to an object that has the whole text as
    `INVALID_JSON`. Empty text stays empty: clients read it as an object without members.
    """

    def __init__(self) -> None:
        self._text: list[str] = []
        self._expect = Expect.OBJECT
        self._broken = False
        self._open: list[str] = []
        self._unread = ""
        self._held: list[str] = []  # a comma, a key and a colon before a value
        self._free: list[str] = []
        self._member = ""  # the name of the outermost object's last member, quoted

    def feed(self, text: str) -> str:
        """Reads more ``text``, and returns what is now safe to send."""
        self._text.append(text)
        if self._broken:
            return ""
        text, at = self._unread + text, 0
        while at < len(text):
            if self._expect in (Expect.KEY_TEXT, Expect.VALUE_TEXT):
                end = self._read_string(text, at)
            elif white := _WHITE.match(text, at):
                end = white.end()
                if self._held:
                    self._held.append(white.group())
                elif self._open:
                    self._free.append(white.group())
            else:
                end = self._read_token(text, at)
            if end == at:  # incomplete, or invalid
                break
            at = end
        self._unread = text[at:]
        free, self._free = "".join(self._free), []
        return free

    def close(self) -> str:
        """Ends the text, and returns what remains to be sent."""
        if self._expect is Expect.NOTHING and not self._broken:
            return "}"
        text = "".join(self._text)
        if not text.strip():
            return ""
        completed = "{"
        if self._expect is not Expect.OBJECT:
            in_text = self._expect is Expect.VALUE_TEXT
            closers = "".join(_CLOSERS[opener] for opener in reversed(self._open[1:]))
            taken_back = f",{self._member}:null" if in_text or closers else ""
            completed = ('"' if in_text else "") + closers + taken_back
            completed += "," if self._member else ""
        return f"{completed}{quote(INVALID_JSON)}:{quote(text)}}}"

    def _release(self, text: str) -> None:
        """Sends ``text``, of a value, and the comma, key and colon before it."""
        if self._held:
            held, self._held = "".join(self._held), []
            self._free.append(held)
            if len(self._open) == 1:
                self._member = held.strip(" \t\n\r,:")
        self._free.append(text)

    def _read_string(self, text: str, at: int) -> int:
        """Reads characters, or the quotation mark that ends them, and returns their end."""
        characters = _CHARACTERS.match(text, at)
        if characters is None and text[at] != '"':
            self._broken = not _PARTIAL_ESCAPE.fullmatch(text, at)
            return at
        end = characters.end() if characters else at + 1
        if self._expect is Expect.KEY_TEXT:
            self._held.append(text[at:end])
            self._expect = self._expect if characters else Expect.COLON
        else:
            self._release(text[at:end])
            self._expect = self._expect if characters else Expect.NEXT
        return end

    def _read_token(self, text: str, at: int) -> int:
        """Reads a token outside of strings, and returns its end."""
        char, end = text[at], at + 1
        if char not in self._expect.value:
            self._broken = True
        elif char in ",:":
            self._held.append(char)
            in_object = self._open[-1] == "{"
            self._expect = Expect.KEY if char == "," and in_object else Expect.VALUE
        elif char == '"' and self._expect in (Expect.FIRST_KEY, Expect.KEY):
            self._held.append(char)
            self._expect = Expect.KEY_TEXT
        elif char == '"':
            self._release(char)
            self._expect = Expect.VALUE_TEXT
        elif char in _CLOSERS:
            self._broken = len(self._open) == MAX_DEPTH
            if not self._broken:
                self._release(char)
                self._open.append(char)
                self._expect = Expect.FIRST_KEY if char == "{" else Expect.FIRST_VALUE
        elif char in "]}":
            self._broken = _CLOSERS[self._open[-1]] != char
            if not self._broken:
                self._open.pop()
                self._expect = Expect.NEXT if self._open else Expect.NOTHING
                self._free += char if self._open else ""  # `close` sends the last
        else:
            end = self._read_word(text, at)
        return at if self._broken else end

    def _read_word(self, text: str, at: int) -> int:
        """Reads a literal or a number, and returns its end, or ``at`` if more of it may follow."""
        word = _WORD.match(text, at)
        if word is None:
            partial = _PARTIAL_WORD.fullmatch(text, at)
            self._broken = partial is None or len(partial.group()) > MAX_DIGITS
            return at
        is_number = word.group()[0] not in "tfn"
        if is_number and (len(word.group()) > MAX_DIGITS or not isfinite(float(word.group()))):
            self._broken = True
            return at
        self._release(word.group())
        self._expect = Expect.NEXT
        return word.end()
