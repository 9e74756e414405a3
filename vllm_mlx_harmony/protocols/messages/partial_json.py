"""A call's arguments, as they arrive, into JSON of an object that no client fails to parse.

**Why.** In Chat Completions arguments are a string, and a client finds out at the end whether they
are JSON. In Messages they are an object:
https://docs.claude.com/en/docs/build-with-claude/streaming sends it in pieces of text, and the
official clients parse what there is after every piece. A piece that can be no part of an object
raises in the client, in the middle of a stream, and takes all of the answer with it. A model writes
such pieces: a trailing comma, a lone surrogate, a bare word, a list, half an object at its limit.

**How.** A pushdown automaton over JSON (RFC 8259): ``Expect`` says what may come next, ``_open``
which objects and arrays are open. Text goes out as it came as soon as it cannot turn out wrong:

- A comma, a key and its colon are held until the value begins: a value that never comes would leave
  a key without one, and that cannot be taken back.
- Numbers, literals and escapes go out whole, or not at all.

At the first character that no object can have there, nothing more goes out. ``close`` completes
what is open (a string, arrays, objects), writes the member that was interrupted once more as null
(of two members with one name parsers take the last), and adds all of the text under
``INVALID_JSON``: the tool's owner sees exactly what the model wrote.

**Invariants.** All that was returned, joined, is one JSON object, or nothing at all. Each beginning
of it can be completed to one by closing what is open. What was an object comes back byte for byte.
The result does not depend on how the text is cut. The text is stored
for `INVALID_JSON`, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from math import isfinite
from typing import TypeAlias

from vllm_mlx_harmony.protocols.events import quote

INVALID_JSON = "INVALID_JSON"
"""The member under which arguments that are not a JSON object are handed over, whole, as text.

The name is the one that Anthropic's page on fine-grained tool streaming proposes.
"""

MAX_DEPTH = 100
"""Objects and arrays in each other. The official clients' own parsers give up at 200."""

MAX_DIGITS = 308
"""Characters of a number. Longer ones are infinite, or refused by clients."""


class Expect(Enum):
    """What may come next."""

    OBJECT = auto()
    FIRST_KEY = auto()  # or the end of the object
    KEY = auto()
    KEY_TEXT = auto()
    COLON = auto()
    VALUE = auto()
    FIRST_VALUE = auto()  # or the end of the array
    VALUE_TEXT = auto()
    NEXT = auto()  # a comma, or the end of what is open
    NOTHING = auto()  # the object is complete


_WHITE = re.compile(r"[ \t\n\r]*")
_NUMERIC = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
# Halves of a surrogate pair are characters only together: clients refuse a lone one.
_CHARACTERS = re.compile(
    r"""(?:[^"\\\x00-\x1f]+
        |\\["\\/bfnrt]
        |\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}
        |\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}
        )*""",
    re.VERBOSE,
)
_ESCAPE_BEGUN = re.compile(
    r"""\\(?:u(?:[0-9a-fA-F]{0,3}
        |[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?
        )?)?""",
    re.VERBOSE,
)
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSERS = {"{": "}", "[": "]"}
_WAIT = -1
"""Instead of a position: the text ends inside something that has to be seen whole."""


class ObjectText:
    """Text that should be a JSON object, read as it arrives; what may be sent of it comes back.

    Everything that ``feed`` and ``close`` return, joined, is the JSON of an object, and each
    beginning of it can be completed by a client that parses as it goes. An object comes back as it
    was written. Of anything else (cut arguments too) what was already sent is completed, a member
    that was interrupted is taken back (written again, as null: the last one counts) and the whole
    text stands under `INVALID_JSON`. Empty text gives nothing at all: an object without members.
    """

    def __init__(self) -> None:
        self._text: list[str] = []
        self._expect = Expect.OBJECT
        self._broken = False
        self._open: list[str] = []
        self._unread = ""
        self._pending: list[str] = []
        self._free: list[str] = []
        self._key: list[str] = []
        self._member = ""

    def feed(self, text: str) -> str:
        """The next ``text``; returns what may be sent now."""
        self._text.append(text)
        if self._broken:
            return ""
        text, at = self._unread + text, 0
        while at < len(text) and not self._broken:
            after = self._step(text, at)
            if after == _WAIT:
                break
            at = after
        self._unread = text[at:]
        return self._released()

    def close(self) -> str:
        """What has to be sent when nothing more comes."""
        if self._expect is Expect.NOTHING and not self._broken:
            return "}"
        text = "".join(self._text)
        return f"{self._mended()}{quote(INVALID_JSON)}:{quote(text)}}}" if text.strip() else ""

    def _mended(self) -> str:
        """What completes the members that were sent, up to where one more can be written."""
        if self._expect is Expect.OBJECT:
            return "{"
        in_text = self._expect is Expect.VALUE_TEXT
        closers = "".join(_CLOSERS[opener] for opener in reversed(self._open[1:]))
        taken_back = f",{self._member}:null" if in_text or closers else ""
        joint = "," if self._member else ""
        return ('"' if in_text else "") + closers + taken_back + joint

    # What is sent: a comma, a key and a colon only together with the value they lead to.

    def _hold(self, text: str) -> None:
        self._pending.append(text)

    def _release(self, text: str) -> None:
        if self._pending:
            self._free += self._pending
            self._pending = []
            if self._key:
                self._member, self._key = "".join(self._key), []
        self._free.append(text)

    def _released(self) -> str:
        text = "".join(self._free)
        self._free = []
        return text

    # Reading: each step takes in one piece of the text and says where the next begins.

    def _step(self, text: str, at: int) -> int:
        if self._expect in _IN_TEXT:
            return self._characters(text, at)
        end = _end(_WHITE, text, at)
        if end > at:
            return self._white(text[at:end], end)
        read = _READ[self._expect].get(text[at])
        return self._break(at) if read is None else read(self, text, at)

    def _break(self, at: int) -> int:
        """It is no JSON object."""
        self._broken = True
        return at

    def _white(self, white: str, end: int) -> int:
        if self._open:
            self._hold(white) if self._pending else self._release(white)
        return end

    def _opener(self, text: str, at: int) -> int:
        if len(self._open) == MAX_DEPTH:
            return self._break(at)
        opener = text[at]
        self._release(opener)
        self._open.append(opener)
        self._expect = Expect.FIRST_KEY if opener == "{" else Expect.FIRST_VALUE
        return at + 1

    def _closer(self, text: str, at: int) -> int:
        if _CLOSERS[self._open[-1]] != text[at]:
            return self._break(at)
        self._open.pop()
        if self._open:
            self._release(text[at])
        self._expect = Expect.NEXT if self._open else Expect.NOTHING
        return at + 1

    def _comma(self, text: str, at: int) -> int:
        self._hold(text[at])
        self._expect = Expect.KEY if self._open[-1] == "{" else Expect.VALUE
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        self._hold(text[at])
        self._expect = Expect.VALUE
        return at + 1

    def _quotation(self, text: str, at: int) -> int:
        """The quotation mark that opens or closes a string."""
        following = _QUOTED[self._expect]
        if Expect.KEY_TEXT in (self._expect, following):
            self._keep_key(text[at])
        else:
            self._release(text[at])
        self._expect = following
        return at + 1

    def _keep_key(self, text: str) -> None:
        self._hold(text)
        if len(self._open) == 1:
            self._key.append(text)

    def _characters(self, text: str, at: int) -> int:
        end = _end(_CHARACTERS, text, at)
        if end > at:
            keep = self._keep_key if self._expect is Expect.KEY_TEXT else self._release
            keep(text[at:end])
            return end
        if text[at] == '"':
            return self._quotation(text, at)
        return _WAIT if _ESCAPE_BEGUN.fullmatch(text, at) else self._break(at)

    def _number(self, text: str, at: int) -> int:
        end = _end(_NUMERIC, text, at)
        if end - at > MAX_DIGITS:
            return self._break(at)
        if end == len(text):
            return _WAIT
        number = text[at:end]
        if not _NUMBER.fullmatch(number) or not isfinite(float(number)):
            return self._break(at)
        return self._value(number, end)

    def _literal(self, text: str, at: int) -> int:
        literal = _LITERALS[text[at]]
        if text.startswith(literal, at):
            return self._value(literal, at + len(literal))
        return _WAIT if literal.startswith(text[at:]) else self._break(at)

    def _value(self, value: str, end: int) -> int:
        self._release(value)
        self._expect = Expect.NEXT
        return end


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where ``pattern``, which matches anywhere, ends when it begins ``at``."""
    match = pattern.match(text, at)
    return match.end() if match else at


_IN_TEXT = frozenset({Expect.KEY_TEXT, Expect.VALUE_TEXT})
_QUOTED = {
    Expect.FIRST_KEY: Expect.KEY_TEXT,
    Expect.KEY: Expect.KEY_TEXT,
    Expect.KEY_TEXT: Expect.COLON,
    Expect.VALUE: Expect.VALUE_TEXT,
    Expect.FIRST_VALUE: Expect.VALUE_TEXT,
    Expect.VALUE_TEXT: Expect.NEXT,
}

_Read: TypeAlias = Callable[[ObjectText, str, int], int]
_VALUES: dict[str, _Read] = {
    **dict.fromkeys("{[", ObjectText._opener),
    **dict.fromkeys("-0123456789", ObjectText._number),
    **dict.fromkeys("tfn", ObjectText._literal),
    '"': ObjectText._quotation,
}
_READ: dict[Expect, dict[str, _Read]] = {
    Expect.OBJECT: {"{": ObjectText._opener},
    Expect.FIRST_KEY: {'"': ObjectText._quotation, "}": ObjectText._closer},
    Expect.KEY: {'"': ObjectText._quotation},
    Expect.COLON: {":": ObjectText._colon},
    Expect.VALUE: _VALUES,
    Expect.FIRST_VALUE: {**_VALUES, "]": ObjectText._closer},
    Expect.NEXT: {
        ",": ObjectText._comma,
        "}": ObjectText._closer,
        "]": ObjectText._closer,
    },
    Expect.NOTHING: {},
}
"""What each character does where it may stand. A missing key means: not JSON."""
