"""The header of one generated message, read word by word.

Knows what a word means where it stands (semantics B, "Header"), and which text is no header at all.
Never raises and holds a bounded amount of text. Refuses to know bodies and what a message means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from string import punctuation

ROLES = frozenset({"assistant", "user", "system", "developer", "tool"})
CHANNELS = frozenset({"analysis", "commentary", "final"})
CONTENT_TYPES = frozenset({"json", "code", "text", "python"})

LOOSE_LIMIT = 32
"""Ids of loose text after which what stands there is no header but the message itself."""

NAME_LIMIT = 256
"""Characters after which what follows ``to=`` is no name. Bounds what a header can hold."""

_KNOWN = (*ROLES, *CHANNELS, *CONTENT_TYPES, "to=", "functions.")
_PIECES = re.compile(r"\s+|\S+")
_TYPE = re.compile(r"[A-Za-z][\w./+-]*")
_TO = "to="
_JOINED = re.compile(rf"({'|'.join(sorted(CHANNELS))})(?={_TO})")
"""A channel that no space parts from the recipient: gpt-oss writes ``commentaryto=functions.x``."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says. ``channel`` and ``recipient`` are empty when none was written."""

    role: str = "assistant"
    channel: str = ""
    recipient: str = ""
    content_type: str = ""


class HeaderReader:
    """Reads one header. ``marked``: an explicit ``<|start|>`` stands before it.

    Loose text is what is neither role, channel, recipient nor content type. From the first loose
    word on, everything is loose, kept as it was written; what it says of channel and recipient
    counts only when a ``<|message|>`` shows that it was a header after all.
    """

    def __init__(self, *, marked: bool) -> None:
        self._marked = marked
        self._read = Header()
        self._proper: Header | None = None  # as it was before the first loose word
        self._author = ""  # a word where the role belongs that is no role
        self._word = ""
        self._loose = ""
        self._ids = 0
        self._first = True
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
        """A ``<|channel|>``: loose text before it is junk."""
        self.gap()
        self._proper, self._loose, self._ids = None, "", 0
        self._in_channel, self._first = True, False

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
    def overfull(self) -> bool:
        """Whether so much loose text stands here that this is no header."""
        if self._naming and len(self._word) < NAME_LIMIT:
            return False
        return self._ids >= LOOSE_LIMIT

    @property
    def loose_ids(self) -> int:
        """Ids of the loose text."""
        return self._ids

    def header(self) -> Header:
        """The header, once ``<|message|>`` has ended it."""
        self.gap()
        if self._author and self._read.recipient == "assistant":
            return replace(self._read, role="tool")  # `<|start|>functions.x to=assistant`
        return self._read

    def abandoned(self, *, cut: bool = False) -> tuple[Header, str]:
        """The header and the loose text, when no ``<|message|>`` ended it: the text is the body.

        ``cut``: the output ended here, perhaps in the middle of a word of the header.
        """
        if cut and not self._proper and any(word.startswith(self._word) for word in _KNOWN):
            self._word = ""
        self.gap()
        return self._proper or self._read, self._loose

    # Words

    @property
    def _naming(self) -> bool:
        return not self._proper and (self._wants_name or self._word.startswith(_TO))

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
        if self._in_channel and (joined := _JOINED.match(word)):
            self._is_channel(joined[1])
            word = word[joined.end() :]
        if self._wants_name or word.startswith(_TO):
            return self._recipient(word.removeprefix(_TO))
        if self._wants_type or self._is_placed:
            rest = self._content_type(word)
            if rest != word:
                return rest
        if self._first and word in ROLES:
            return self._role(word)
        if self._is_channel(word) or (word == "assistant" and not self._is_placed):
            return ""
        return self._unknown(word)

    def _recipient(self, name: str) -> str:
        self._wants_name = not name
        if name and not self._read.recipient:
            self._read = replace(self._read, recipient=name)
        return ""

    @property
    def _is_placed(self) -> bool:
        """Whether channel or recipient are known, so that only a content type may follow."""
        return bool(self._read.channel or self._read.recipient)

    def _content_type(self, word: str) -> str:
        found = _TYPE.match(word)
        rest = word[found.end() :] if found else word
        plausible = found and found.group() in CONTENT_TYPES and (not rest or rest[0] in "{[")
        if not found or not (self._wants_type or plausible):
            return word
        self._wants_type = False
        self._read = replace(self._read, content_type=found.group())
        return rest

    def _role(self, word: str) -> str:
        """Without ``<|start|>`` it may be the first word of an answer (`user data is …`)."""
        self._read = replace(self._read, role=word)
        return "" if self._marked or word == "assistant" else word

    def _is_channel(self, word: str) -> bool:
        name = word.strip(punctuation) if self._in_channel else word
        if name in CHANNELS and not self._read.channel:
            self._read = replace(self._read, channel=name)
        return name in CHANNELS

    def _unknown(self, word: str) -> str:
        if not (self._first and self._marked):
            return word
        if word.startswith("functions."):
            self._read = replace(self._read, role="tool")
            return ""
        self._author = word
        return word
