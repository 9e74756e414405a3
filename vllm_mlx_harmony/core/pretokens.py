"""Splits a text into pieces, each of which takes byte pair encoding only a few milliseconds.

Byte pair encoding runs in two steps. A regular expression (o200k's is in
https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py) cuts the text into
*pre-tokens*; within each of them, pairs of tokens are merged, and no token spans two. Merging takes
time that grows with the square of a pre-token's bytes, and the encoder holds the GIL meanwhile: a
run of 100,000 ``a`` stops every other thread for 3 s. The expression's alternatives are, with ``L``
for letters (``U`` upper case, ``l`` lower case), ``M`` for marks and ``N`` for numbers:

1. a word: ``[^\\r\\nLN]? [UM…]* [lM…]+`` or ``[^\\r\\nLN]? [UM…]+ [lM…]*``, then ``'s`` and such:
   any number of letters and marks, after at most one character that is neither a letter, a number
   nor a line end
2. a number: ``N{1,3}``
3. signs: one space at most, then ``[^\\sLN]+`` (marks are signs, too), then line ends and ``/``
4. white space up to its last line end: ``\\s*[\\r\\n]+``
5. other white space; when something follows, its last character is left for that: ``\\s+(?!\\S)``

so words, signs and white space can be as long as the text, and scripts without spaces (Thai, Lao,
Khmer, Japanese, Chinese) make long words of ordinary sentences.

A text can be cut at the end of a pre-token if the pre-token would also end there without the text
that follows. Only (5) looks ahead, so the one exception is white space (except a line end) with
something after it.

- Some pairs of adjacent characters always have such a cut between them, such as the end of a word
  and a space. Ordinary text has one every few characters, and is cut there.
- Where there is none for ``MAX_PRETOKEN`` characters, the expression itself finds the pre-tokens.
  ``re`` has no ``\\p{L}``, so it runs over kinds of characters. Each of its repetitions is limited
  to ``MAX_PRETOKEN``, which bounds the time of a step and still finds all pre-tokens that are no
  longer.
- **The difference**: a longer pre-token is encoded in parts, which may give it and its successor
  other tokens. Near such a run, characters that are newer than this Python's Unicode count as
  signs.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

MAX_PRETOKEN = 1024
"""Characters of the longest pre-token that is encoded whole."""

MAX_PIECE = 16_384
"""Characters of the largest piece: 3 ms of ordinary text."""

MAX_WORK = (4 * MAX_PRETOKEN) ** 2
"""The greatest sum of the squared sizes in bytes of a piece's pre-tokens. A single longest
pre-token of four-byte characters reaches it, and takes about 5 ms."""

_STEP = MAX_PRETOKEN // 4

_BOUNDARY = re.compile(
    r"\S(?=[ \t])"  # no alternative continues with a blank after a non-blank
    r"|[\r\n](?=[^\s/])"  # after a line end, only (3) can, with `/`, and (4), with white space
    r"|[^\W_](?=[\r\n])"  # words and numbers end before line ends,
    r"|[^\W_](?=[!-&(-/:-@\[-`{-~、-〃！-＆（-／：-＠])"  # and before signs, but ' and marks
    r"|[A-Za-z](?=[0-9])"
)


def pieces(text: str) -> Iterator[str]:
    """The pieces of ``text``, in order."""
    if len(text) <= _STEP:
        yield text
        return
    start = at = work = 0
    for end, more in _spans(text):
        if start < at and (end - start > MAX_PIECE or work + more > MAX_WORK):
            yield text[start:at]
            start, work = at, 0
        at, work = end, work + more
    yield text[start:]


def encodable(text: str) -> bool:
    """Whether UTF-8 can represent ``text``, which then has no lone surrogates."""
    if text.isascii():
        return True
    try:
        for at in range(0, len(text), _UTF8_AT_ONCE):
            text[at : at + _UTF8_AT_ONCE].encode()
    except UnicodeEncodeError:
        return False
    return True


_UTF8_AT_ONCE = 2**20


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """The positions where ``text`` may be cut, each with the work since the one before."""
    at = 0
    while len(text) - at > MAX_PRETOKEN:
        boundary = _BOUNDARY.search(text, at + _STEP, at + MAX_PRETOKEN)
        if boundary is not None:
            yield boundary.end(), _work(text[at : boundary.end()])
            at = boundary.end()
        else:
            end = len(text)
            for start in range(at + MAX_PRETOKEN - 1, len(text), MAX_PIECE):
                # A search holds the lock, so it is made in steps, each with one more character,
                # which the expression only looks at.
                boundary = _BOUNDARY.search(text, start, start + MAX_PIECE + 1)
                if boundary is not None:
                    end = boundary.end()
                    break
            yield from _long_span(text, at, end)
            at = end
    yield len(text), _work(text[at:])


def _long_span(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Like ``_spans``, between two boundaries that are far apart."""
    kinds = "".join(
        text[at : min(at + MAX_PIECE, end)].translate(_KINDS) for at in range(start, end, MAX_PIECE)
    )
    work = 0
    for found in _PRETOKEN.finditer(kinds):
        at = found.start()
        for cut in range(at + MAX_PRETOKEN, found.end(), MAX_PRETOKEN):
            yield start + cut, MAX_WORK
            at, work = cut, 0
        whole = found.end() - at < MAX_PRETOKEN  # else it may go on: what follows is another piece
        work += _work(text[start + at : start + found.end()]) if whole else MAX_WORK
        if not _BEFORE_MORE.match(kinds, found.end() - 1):
            yield start + found.end(), work
            work = 0


def _work(text: str) -> int:
    """The work of merging ``text``, if it is one pre-token."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return size * size


# --- o200k's pre-tokenizer, over kinds of characters ---

_SPACE = frozenset(map(ord, "\t\v\f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"))
_SPACE |= frozenset(range(0x2000, 0x200B))  # as Unicode has it; to `str.isspace` \x1c is one, too
_KIND = {"Lu": "A", "Lt": "A", "Ll": "a", "Lm": "@", "Lo": "@"}
_ITSELF = frozenset(map(ord, " \n/'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"))


class _Kinds(dict[int, str]):
    """The kind of each character, as ``_PRETOKEN`` denotes it: a table for ``str.translate``.

    ``A`` and ``a`` are letters with case, ``@`` those without, ``^`` marks, ``0`` numbers, ``!``
    signs, and a tab is white space. Characters that occur in the expression denote themselves.
    Only ASCII is stored, since there are a million characters.
    """

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        kind = _KIND.get(category) or {"M": "^", "N": "0"}.get(category[0], "!")
        if code in _ITSELF:
            kind = character
        elif code in _SPACE:
            kind = "\t"
        elif character == "\r":
            kind = "\n"
        elif character == "ſ":  # an `s` where case is ignored
            kind = "s"
        if code < 128:  # noqa: PLR2004
            self[code] = kind
        return kind


_KINDS = _Kinds()

_ONE, _ANY = f"{{1,{MAX_PRETOKEN}}}", f"{{0,{MAX_PRETOKEN}}}"
_BEHIND = "(?:'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL]))?"
_PRETOKEN = re.compile(
    rf"[\^ \t/'!]?[A-Z@^]{_ANY}[a-z@^]{_ONE}{_BEHIND}"
    rf"|[\^ \t/'!]?[A-Z@^]{_ONE}[a-z@^]{_ANY}{_BEHIND}"
    r"|0{1,3}"
    rf"| ?[\^/'!]{_ONE}[\n/]{_ANY}"
    rf"|[ \t\n]{_ANY}\n{_ONE}"
    rf"|[ \t\n]{_ONE}(?![^ \t\n])"
    rf"|[ \t\n]{_ONE}"
)
_BEFORE_MORE = re.compile(r"[ \t][^ \t\n]")
