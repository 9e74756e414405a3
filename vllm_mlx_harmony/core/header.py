"""The header of one generated message, read word by word (semantics B, "Header").

Never raises, and holds a bounded amount of text.

The grammar of a header: https://cookbook.openai.com/articles/openai-harmony#message-format. The
rows of ``tests/unit/core/test_parse.py`` show what else models write.

The model was trained to write one of these headers:

    <|start|>assistant<|channel|>analysis<|message|>
    <|start|>assistant<|channel|>commentary to=functions.x <|constrain|>json<|message|>
    <|start|>assistant to=functions.x<|channel|>commentary json<|message|>
    <|start|>functions.x to=assistant<|channel|>commentary<|message|>          (a tool answers)

In one to four per cent of turns it writes something else: two channels, of which the second is
meant; a tool's name in place of a channel; `to=assistant`, as tools write it; quotes,
punctuation and capitals; stray words. So a header has **parts**: the text before the first
``<|channel|>`` (the role position), and the text after each ``<|channel|>``.

- The last part decides the channel: the model started over because the earlier one was wrong.
- The recipient is the one in the role position, else in the last part, else in an intermediate
  part. The last of these counts only if the message has a content type: a message in JSON is a
  call, while `<|channel|>functions.x<|channel|>analysis` is a thought *about* a call.
- `assistant`, `user` and `all` are not recipients: they receive any message without one.
- In place of the role or the channel, a tool's name needs no `to=`. Anywhere else a single word is
  never a recipient.

Any other text is **loose**. Whether it is noise in a header or a message without one is not known
until a ``<|message|>`` follows, or does not. So from the first loose word on, all text is
kept as it was written (``abandoned``) and read as a header as well (``header``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

ROLES = frozenset({"assistant", "user", "system", "developer", "tool"})
CHANNELS = frozenset({"analysis", "commentary", "final"})
CONTENT_TYPES = frozenset({"json", "code", "text", "python"})
NOT_TOOLS = frozenset({"assistant", "user", "all"})
"""Names after ``to=`` that do not address a tool."""

LOOSE_LIMIT = 32
"""Loose text of this many ids or more is a message body, not a header."""

NAME_LIMIT = 256
"""Characters of the longest name after ``to=``. Bounds the size of a header."""

_TO = "to="
_FUNCTION = "functions."
_KNOWN = (*ROLES, *CHANNELS, *CONTENT_TYPES, _TO, _FUNCTION)
_PIECES = re.compile(r"\s+|\S+")
_TYPE = re.compile(r"[A-Za-z][\w./+-]*")
_ASSISTANT_CHANNEL = re.compile(rf"(?:assistant)?({'|'.join(sorted(CHANNELS))})?")
"""What may precede ``to=`` without a space: gpt-oss writes ``commentaryto=functions.x``."""

# Python's \W matches all but letters, digits and the underscore, in any script.
_AROUND = re.compile(r"\A[\W_]+|[\W_]+\Z")
_AROUND_NAME = re.compile(r"\A[^\w-]+|[^\w-]+\Z")  # a name may begin and end with - and _
_BETWEEN = re.compile(r"[\W_]+")


@dataclass(frozen=True, slots=True)
class Header:
    """A header that was read. ``channel`` and ``recipient`` are empty if there was none."""

    role: str = "assistant"
    channel: str = ""
    recipient: str = ""
    content_type: str = ""


class HeaderReader:
    """Reads one header.

    Call ``text`` for each text id. For each control token, call ``gap`` first, then the method for
    that token.

    ``after_start``: it follows an explicit ``<|start|>``. ``is_tool`` tells whether a name
    addresses a tool of the turn.
    """

    def __init__(self, *, after_start: bool, is_tool: Callable[[str], bool]) -> None:
        self._after_start = after_start
        self._is_tool = is_tool
        self._so_far = Header()  # the role, and what the current part has
        self._before_loose: Header | None = None  # the header before the first loose word
        self._in_role_position = ""  # the recipient in the role position
        self._intermediate = ""  # the last recipient in an intermediate part
        self._unknown_author = False
        self._word = ""
        self._loose = ""
        self.loose_ids = 0
        """The number of ids of the loose text."""
        self._at_start = True  # no word of this part has ended yet
        self._in_channel = False
        self._wants_name = False
        self._wants_type = False

    # Input

    def text(self, text: str) -> None:
        """The text of one id; empty if its bytes do not complete a character."""
        for piece in _PIECES.findall(text):
            if piece.isspace():
                self._end_word()
                self._loose += piece if self._before_loose else ""
            else:
                self._word += piece
        # The current word may still turn out to be loose. If it was part of the header, `_end_word`
        # resets the count.
        if self._before_loose or self._word or not text:
            self.loose_ids += 1

    def channel(self) -> None:
        """A ``<|channel|>``: another part begins, and loose text before it is noise."""
        if self._in_channel:
            self._intermediate = self._so_far.recipient or self._intermediate
        else:
            self._in_role_position = self._so_far.recipient
        self._so_far = Header(role=self.author)  # a bare `user` was no role: users have no channel
        self._before_loose, self._loose, self.loose_ids = None, "", 0
        self._in_channel, self._at_start, self._wants_type = True, True, False

    def constrain(self) -> None:
        """A ``<|constrain|>``: the content type follows."""
        self._wants_type = True

    def gap(self) -> None:
        """Any control token: it ends the current word, and a ``to=`` that waits for its name."""
        self._end_word()
        self._wants_name = False

    # Results

    @property
    def author(self) -> str:
        """The role after a ``<|start|>``, as soon as it is known."""
        return self._so_far.role if self._after_start else "assistant"

    @property
    def too_loose(self) -> bool:
        naming = self._wants_name or _TO in self._word or self._word.startswith(_FUNCTION)
        in_name = naming and not self._before_loose and len(self._word) < NAME_LIMIT
        return self.loose_ids >= LOOSE_LIMIT and not in_name

    def header(self) -> Header:
        """The header, after ``<|message|>``."""
        return self._addressed(self._so_far)

    def abandoned(self, *, cut: bool = False) -> tuple[Header, str]:
        """The header, and its loose text as the body, if there was no ``<|message|>``.

        ``cut``: the output ended here, perhaps within a word of the header.
        """
        if cut and not self._before_loose:
            expected = self._at_start and (self._in_channel or self._after_start)
            if expected or any(word.startswith(self._word) for word in _KNOWN):
                self._word = ""
        self.gap()
        return self._addressed(self._before_loose or self._so_far), self._loose

    def _addressed(self, read: Header) -> Header:
        between = self._intermediate if read.content_type else ""
        recipient = self._in_role_position or read.recipient or between
        return replace(read, recipient=recipient) if recipient != read.recipient else read

    # Words

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        before = self._so_far
        rest = word if len(word) >= NAME_LIMIT else self._meaning(word)
        self._at_start = False
        if self._before_loose:
            self._loose += word
        elif rest:
            self._before_loose, self._loose = before, rest
            if rest != word:  # the content type at its front is header
                self._before_loose = self._so_far
        else:
            self.loose_ids = 0

    def _meaning(self, word: str) -> str:
        """Applies ``word`` to the header, and returns the part of it that is loose text."""
        head, to, name = word.partition(_TO)
        if self._in_channel and (to or not self._so_far.channel):
            head = _AROUND.sub("", head).casefold()
        glued = _ASSISTANT_CHANNEL.fullmatch(head)
        if glued and (to or head == "assistant" or glued[1]):
            if glued[1] and not self._so_far.channel:
                self._so_far = replace(self._so_far, channel=glued[1])
            if to:
                return self._recipient(name)
            return "" if glued[1] or not self._is_settled else word
        if self._wants_name:
            return self._recipient(word)
        if self._wants_type or self._is_settled:
            rest = self._content_type(word)
            if rest != word:
                return rest
        if self._at_start and (self._in_channel or self._after_start):
            return self._expected_word(word)
        if self._at_start and word in ROLES:  # or the first word of an answer: `user data is …`
            self._so_far = replace(self._so_far, role=word)
        return self._ambiguous(word)

    def _recipient(self, word: str) -> str:
        self._wants_name = not word
        name = _AROUND_NAME.sub("", word)
        if name.casefold() in NOT_TOOLS:
            if self._unknown_author and not self._in_channel:  # `x to=assistant`, as tools write it
                self._so_far = replace(self._so_far, role="tool")
        elif name and not self._so_far.recipient:
            self._so_far = replace(self._so_far, recipient=name)
        return ""

    @property
    def _is_settled(self) -> bool:
        """Whether the channel or the recipient is known, so that only a content type may follow."""
        return bool(self._so_far.channel or self._so_far.recipient or self._in_role_position)

    def _content_type(self, word: str) -> str:
        match = _TYPE.match(word)
        rest = word[match.end() :] if match else word
        plausible = match and match.group() in CONTENT_TYPES and (not rest or rest[0] in "{[")
        if not match or not (self._wants_type or plausible):
            return word
        self._wants_type = False
        self._so_far = replace(self._so_far, content_type=match.group())
        return rest

    def _expected_word(self, word: str) -> str:
        """A word in place of the channel or, after ``<|start|>``, of the role."""
        name, bare = _AROUND_NAME.sub("", word), _AROUND.sub("", word).casefold()
        is_tool = self._is_tool(name)
        if self._in_channel:
            if is_tool:
                self._so_far = replace(self._so_far, recipient=name)
                return ""
        elif bare in ROLES or is_tool or name.startswith(_FUNCTION):
            self._so_far = replace(self._so_far, role=bare if bare in ROLES else "tool")
            return ""
        else:
            self._unknown_author = True
        return self._ambiguous(word)

    def _ambiguous(self, word: str) -> str:
        """A word that is loose text, but counts if the text turns out to be a header: `Final`,
        `commentary?commentary?`, `JSON`."""
        for part in _BETWEEN.split(word.casefold()):
            if part in CHANNELS and not self._so_far.channel:
                self._so_far = replace(self._so_far, channel=part)
            elif part in CONTENT_TYPES:
                self._so_far = replace(self._so_far, content_type=part)
        return word
