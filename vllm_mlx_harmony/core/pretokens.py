"""Splits a text into pieces, each of which takes byte pair encoding at most about 2 ms.

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

Some pairs of adjacent characters always have the end of a pre-token between them, such as the end
of a word and a space. Ordinary text has one every few characters, and is cut there, which changes
no token. A text that has none for ``MAX_SPAN`` characters or ``MAX_BYTES`` is cut anyway, and may
get other tokens there than if it were encoded whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_SPAN = 1020
"""Characters that are encoded whole although there is no boundary among them. A multiple of three,
like the tokens of a long run of digits."""

MAX_BYTES = 3 * MAX_SPAN
"""Bytes of such a span: fewer characters of four bytes, which are emoji and rare ideographs."""

MAX_PIECE = 8_192
"""Characters of the largest piece: 2 ms of ordinary text. The event loop needs the interpreter lock
about a dozen times for a request, and waits for the end of a piece each time."""

MAX_WORK = MAX_BYTES**2
"""The greatest sum of the squared sizes in bytes of a piece's spans. A single longest span of
characters of three bytes reaches it, and takes about 2 ms."""

_STEP = MAX_SPAN // 4

_BOUNDARY = re.compile(
    r"\S(?=[ \t])"  # no alternative continues with a blank after a non-blank
    r"|[\r\n](?=[^\s/])"  # after a line end, only (3) can, with `/`, and (4), with white space
    r"|[^\W_](?=[\r\n])"  # words and numbers end before line ends,
    r"|[^\W_](?=[!-&(-/:-@\[-`{-~、-〃！-＆（-／：-＠])"  # and before signs, but ' and marks
    r"|[A-Za-z](?=[0-9])"
)


def pieces(text: str) -> Iterator[str]:
    start = at = work = 0
    while len(text) - at > MAX_SPAN:
        boundary = _BOUNDARY.search(text, at + _STEP, at + MAX_SPAN)
        end = at + MAX_SPAN if boundary is None else boundary.end()
        size = len(text[at:end].encode("utf-8", "surrogatepass"))
        if size > MAX_BYTES:
            end, boundary = at + MAX_BYTES // 4, None
            size = len(text[at:end].encode("utf-8", "surrogatepass"))
        if start < at and (end - start > MAX_PIECE or work + size * size > MAX_WORK):
            yield text[start:at]
            start, work = at, 0
        at, work = end, work + size * size
        if boundary is None:
            yield text[start:at]
            start, work = at, 0
    yield text[start:]
