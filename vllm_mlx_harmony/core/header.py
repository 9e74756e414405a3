"""The header of one generated message, read word by word.

Knows what a word means where it stands (semantics B, "Header"), and which text is no header at all.
Never raises and holds a bounded amount of text. Refuses to know bodies and what a message means.

The grammar of a header: https://cookbook.openai.com/articles/openai-harmony#message-format. What
models write beside it stands row by row in ``tests/core/test_parse.py``.

A header as the model was trained to write it is one of

    <|start|>assistant<|channel|>analysis<|message|>
    <|start|>assistant<|channel|>commentary to=functions.x <|constrain|>json<|message|>
    <|start|>assistant to=functions.x<|channel|>commentary json<|message|>
    <|start|>functions.x to=assistant<|channel|>commentary<|message|>          (a tool answers)

What it writes in one to four turns of a hundred has more in it: a channel begun twice, the second
time as it was meant; a tool's name where a channel belongs; `to=assistant` as tools write it;
quotes, marks and capitals; words that belong nowhere. So a header has **parts**: what stands before
the first ``<|channel|>`` (the role position), and what stands behind each ``<|channel|>``.

- The last part says the channel: the model began anew because the one before was wrong.
- A recipient is looked for in the role position, then in the last part, then in the parts between.
  There it counts only for a message with a content type: nobody thinks in JSON, while
  `<|channel|>functions.x<|channel|>analysis` is a thought *about* a call.
- `assistant`, `user` and `all` are no recipients: without one, a message is for those anyway.
- Where the role or the channel belongs, a tool's name needs no `to=`; anywhere else a lone word is
  never a recipient. Which names are tools' the reader is told (``is_tool``).

Text that is none of this is **loose**. Whether it is noise in a header or a message that has lost
its header shows only later, by a ``<|message|>`` or by none: from the first loose word on all of it
is held as it was written (``abandoned``), and read as well (``header``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

ROLES = frozenset({"assistant", "user", "system", "developer", "tool"})
CHANNELS = frozenset({"analysis", "commentary", "final"})
CONTENT_TYPES = frozenset({"json", "code", "text", "python"})
NOT_TOOLS = frozenset({"assistant", "user", "all"})
"""Recipients that are none."""

LOOSE_LIMIT = 32
"""Ids of loose text after which what stands there is no header but the message itself."""

NAME_LIMIT = 256
"""Characters after which what follows ``to=`` is no name. Bounds what a header can hold."""

_TO = "to="
_FUNCTION = "functions."
_KNOWN = (*ROLES, *CHANNELS, *CONTENT_TYPES, _TO, _FUNCTION)
_PIECES = re.compile(r"\s+|\S+")
_TYPE = re.compile(r"[A-Za-z][\w./+-]*")
_ASSISTANT_CHANNEL = re.compile(rf"(?:assistant)?({'|'.join(sorted(CHANNELS))})?")
"""May stand before ``to=``, too: gpt-oss writes ``commentaryto=functions.x``."""

# Python's \W is all that is neither letter, digit nor underscore, in any script.
_AROUND = re.compile(r"\A[\W_]+|[\W_]+\Z")
_AROUND_NAME = re.compile(r"\A[^\w-]+|[^\w-]+\Z")  # a name may begin and end with - and _
_BETWEEN = re.compile(r"[\W_]+")


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says. ``channel`` and ``recipient`` are empty when none was written."""

    role: str = "assistant"
    channel: str = ""
    recipient: str = ""
    content_type: str = ""


class HeaderReader:
    """Reads one header. ``marked``: an explicit ``<|start|>`` stands before it.

    ``is_tool`` says of a name whether it addresses a tool of the turn.
    """

    def __init__(
        self, *, marked: bool, is_tool: Callable[[str], bool] = lambda name: False
    ) -> None:
        self._marked = marked
        self._is_tool = is_tool
        self._read = Header()  # the role, and what the part that is being read says
        self._proper: Header | None = None  # as it was before the first loose word
        self._in_role_position = ""  # the recipient there
        self._between = ""  # the recipient in a part between, the last of them
        self._unknown_author = False
        self._word = ""
        self._loose = ""
        self._ids = 0
        self._first = True  # no word of this part has ended yet
        self._in_channel = False
        self._wants_name = False
        self._wants_type = False

    # What is fed

    def text(self, text: str) -> None:
        """The text of one id; empty when the id only begins a character."""
        for piece in _PIECES.findall(text):
            if piece.isspace():
                self._end_word()
                self._loose += piece if self._proper else ""
            else:
                self._word += piece
        if self._proper or self._word or not text:
            self._ids += 1

    def channel(self) -> None:
        """A ``<|channel|>``: another part begins, and loose text before it is junk."""
        self.gap()
        if self._in_channel:
            self._between = self._read.recipient or self._between
        else:
            self._in_role_position = self._read.recipient
        self._read = Header(role=self.author)  # a lone `user` was no role: users have no channel
        self._proper, self._loose, self._ids = None, "", 0
        self._in_channel, self._first, self._wants_type = True, True, False

    def constrain(self) -> None:
        """A ``<|constrain|>``: the content type follows."""
        self.gap()
        self._wants_type = True

    def gap(self) -> None:
        """Any other control token: a word ends, and nothing is left to be named."""
        self._end_word()
        self._wants_name = False

    # What was read

    @property
    def author(self) -> str:
        """The role that stands behind a ``<|start|>``, as soon as it is known."""
        return self._read.role if self._marked else "assistant"

    @property
    def overfull(self) -> bool:
        """Whether so much loose text stands here that this is no header."""
        naming = self._wants_name or _TO in self._word or self._word.startswith(_FUNCTION)
        in_name = naming and not self._proper and len(self._word) < NAME_LIMIT
        return self._ids >= LOOSE_LIMIT and not in_name

    @property
    def loose_ids(self) -> int:
        """Ids of the loose text."""
        return self._ids

    def header(self) -> Header:
        """The header, once ``<|message|>`` has ended it."""
        self.gap()
        return self._addressed(self._read)

    def abandoned(self, *, cut: bool = False) -> tuple[Header, str]:
        """The header and the loose text, when no ``<|message|>`` ended it: the text is the body.

        ``cut``: the output ended here, perhaps in the middle of a word of the header.
        """
        if cut and not self._proper:
            placed = self._first and (self._in_channel or self._marked)
            if placed or any(word.startswith(self._word) for word in _KNOWN):
                self._word = ""
        self.gap()
        return self._addressed(self._proper or self._read), self._loose

    def _addressed(self, read: Header) -> Header:
        between = self._between if read.content_type else ""
        return replace(read, recipient=self._in_role_position or read.recipient or between)

    # Words

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        before = self._read
        rest = word if len(word) >= NAME_LIMIT else self._meaning(word)
        self._first = False
        if self._proper:
            self._loose += word
        elif rest:
            self._proper, self._loose = before, rest
            if rest != word:  # the content type at its front is header
                self._proper = self._read
        else:
            self._ids = 0

    def _meaning(self, word: str) -> str:
        """Takes in what ``word`` says and returns what of it is loose text."""
        head, to, name = word.partition(_TO)
        if self._in_channel and (to or not self._read.channel):
            head = _AROUND.sub("", head).casefold()
        glued = _ASSISTANT_CHANNEL.fullmatch(head)
        if glued and (to or head == "assistant" or glued[1]):
            self._take_channel(glued[1] or "")
            if to:
                return self._recipient(name)
            return "" if glued[1] or not self._is_placed else word
        if self._wants_name:
            return self._recipient(word)
        if self._wants_type or self._is_placed:
            rest = self._content_type(word)
            if rest != word:
                return rest
        if self._first and (self._in_channel or self._marked):
            return self._in_place(word)
        if self._first and word in ROLES:  # or the first word of an answer: `user data is …`
            self._read = replace(self._read, role=word)
        return self._ambiguous(word)

    def _take_channel(self, name: str) -> None:
        if name and not self._read.channel:
            self._read = replace(self._read, channel=name)

    def _recipient(self, word: str) -> str:
        self._wants_name = not word
        name = _AROUND_NAME.sub("", word)
        if name.casefold() in NOT_TOOLS:
            if self._unknown_author and not self._in_channel:  # `x to=assistant`, as tools write it
                self._read = replace(self._read, role="tool")
        elif name and not self._read.recipient:
            self._read = replace(self._read, recipient=name)
        return ""

    @property
    def _is_placed(self) -> bool:
        """Whether channel or recipient are known, so that only a content type may follow."""
        return bool(self._read.channel or self._read.recipient or self._in_role_position)

    def _content_type(self, word: str) -> str:
        found = _TYPE.match(word)
        rest = word[found.end() :] if found else word
        plausible = found and found.group() in CONTENT_TYPES and (not rest or rest[0] in "{[")
        if not found or not (self._wants_type or plausible):
            return word
        self._wants_type = False
        self._read = replace(self._read, content_type=found.group())
        return rest

    def _in_place(self, word: str) -> str:
        """A word that stands where the channel or, behind ``<|start|>``, the role belongs."""
        name, bare = _AROUND_NAME.sub("", word), _AROUND.sub("", word).casefold()
        is_tool = self._is_tool(name)
        if self._in_channel:
            if is_tool:
                self._read = replace(self._read, recipient=name)
                return ""
        elif bare in ROLES or is_tool or name.startswith(_FUNCTION):
            self._read = replace(self._read, role=bare if bare in ROLES else "tool")
            return ""
        else:
            self._unknown_author = True
        return self._ambiguous(word)

    def _ambiguous(self, word: str) -> str:
        """A word of a text, which says something if it turns out to stand in a header: `Final`,
        `commentary?commentary?`, `JSON`."""
        for part in _BETWEEN.split(word.casefold()):
            if part in CHANNELS:
                self._take_channel(part)
            elif part in CONTENT_TYPES:
                self._read = replace(self._read, content_type=part)
        return word
