"""Which token a scripted model says next, given the ids so far. Has no memory of its own.

Knows scripts and where in one a history stands. Refuses to know models, caches and APIs.
Copied into each stand-in directory: imports the standard library and nothing of this package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

BOOK = "standin_scripts.json"
TABLE = "standin_tokens.bin"

INSTEAD: tuple[tuple[float, tuple[str, ...]], ...] = (
    (70.0, ("<|return|>", "<|call|>", "<|end|>")),
    (60.0, ('"',)),
    (50.0, ("}", "]", "{}", "[]", "null", " to", "final")),
    (40.0, (",", ":", "{", "[", "false", "commentary", "<|message|>")),
    (30.0, ("1", "<|channel|>")),
)
"""Logits of tokens that end a message, a string or an object, or lead there. All others are 0.

They count where the scripted token is forbidden: what was begun then ends, and soon. A text may say
anything that a string may, and a string anything that stands between values: so what ends a text is
likelier than what ends a string, and that than what ends an object. No list, object or number gets
more than it must have, and a call is made rather than another message begun. Ten apart, they keep
this order at a temperature of 1 as well.
"""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Entry:
    """One script as it stands in the book: a compiled pattern and a completion in ids."""

    pattern: re.Pattern[str]
    completion: tuple[int, ...]
    whole_prompt: bool = False
    delay_ms: float = 0
    fail_at: int | None = None


@dataclass(frozen=True)
class Book:
    """All scripts, first match first; the last entry matches anything.

    ``opening`` are the ids of ``<|start|>assistant``, ``end`` is the id said after a completion.
    """

    entries: tuple[Entry, ...]
    opening: tuple[int, ...]
    end: int

    @property
    def longest(self) -> int:
        """Length in ids of the longest completion."""
        return max(len(entry.completion) for entry in self.entries)


@dataclass(frozen=True)
class Step:
    """What comes next: an id, how long it takes, and whether the model breaks instead."""

    token: int
    delay_ms: float = 0
    fails: bool = False


def parse_book(document: str) -> Book:
    """The book in a ``standin_scripts.json``."""
    fields = json.loads(document)
    return Book(
        entries=tuple(_entry(fields_) for fields_ in fields["scripts"]),
        opening=tuple(fields["opening"]),
        end=fields["end"],
    )


def _entry(fields: dict[str, Any]) -> Entry:
    return Entry(
        pattern=re.compile(fields["pattern"], fields["flags"]),
        completion=tuple(fields["completion"]),
        whole_prompt=fields["whole_prompt"],
        delay_ms=fields["delay_ms"],
        fail_at=fields["fail_at"],
    )


class Shelf:
    """The book of a directory, read again when the file has changed (one ``stat`` per look)."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / BOOK
        self._seen: tuple[int, int, int] | None = None
        self._book: Book | None = None

    def book(self) -> Book:
        """The scripts as they are on disk now."""
        found = self._path.stat()
        state = (found.st_mtime_ns, found.st_size, found.st_ino)
        if self._book is None or state != self._seen:
            self._book, self._seen = parse_book(self._path.read_text("utf-8")), state
        return self._book


def read_table(content: bytes) -> list[bytes]:
    """Bytes by id, from a ``standin_tokens.bin``: each token after one byte with its length."""
    tokens, at = [], 0
    while at < len(content):
        end = at + 1 + content[at]
        tokens.append(content[at + 1 : end])
        at = end
    return tokens


def instead(table: Sequence[bytes]) -> dict[int, float]:
    """The logits of `INSTEAD` by id, for those that are in the table."""
    wanted = {text.encode(): logit for logit, texts in INSTEAD for text in texts}
    return {token: wanted[said] for token, said in enumerate(table) if said in wanted}


def decoder(table: Sequence[bytes]) -> Decode:
    """Ids to text; control tokens written out, bytes that are no UTF-8 as U+FFFD."""

    def decode(ids: Sequence[int]) -> str:
        return b"".join(table[token] for token in ids).decode("utf-8", "replace")

    @lru_cache(maxsize=64)
    def remembered(ids: tuple[int, ...]) -> str:
        return decode(ids)

    return lambda ids: remembered(tuple(ids))


def next_step(history: Sequence[int], book: Book, decode: Decode) -> Step:
    """What the stand-in says after ``history`` (prompt and answer so far, as ids).

    The answer began after a ``<|start|>assistant``. A completion may contain one itself, so the
    earliest one that is followed by nothing but the beginning of its script's completion counts.
    An answer that left its script (somebody forced a token) goes on at the same position. A raw
    prompt, without messages, is answered all the same.
    """
    history = list(history)
    if _is_raw(history, book):
        return _unopened(history, book, decode)
    usual = _usual_start(history, book)
    for start in _starts(history, book):
        entry = _find(history[:start], book, decode)
        known = start == usual or entry is not book.entries[-1]
        if known and _follows(history[start:], entry, book):
            return _scripted(entry, len(history) - start, book)
    entry = _find(history[:usual], book, decode)
    return Step(_token(entry, len(history) - usual, book))


def _starts(history: list[int], book: Book) -> Iterator[int]:
    """Positions after an opening, earliest first, no further back than a completion can reach."""
    size = len(book.opening)
    reach = max(0, len(history) - book.longest - size - 1)
    for at in _positions(history, book.opening[0], reach):
        if tuple(history[at : at + size]) == book.opening:
            yield at + size


def _positions(history: list[int], token: int, at: int) -> Iterator[int]:
    while True:
        try:
            at = history.index(token, at)
        except ValueError:
            return
        yield at
        at += 1


def _is_raw(history: list[int], book: Book) -> bool:
    """Whether no message but the assistant's own is in it."""
    first = next(_positions(history, book.opening[0], 0), None)
    return first is None or _opens(history, first, book)


def _opens(history: list[int], at: int, book: Book) -> bool:
    """Whether an opening is at ``at``, or as much of one as the history goes on for."""
    there = tuple(history[at : at + len(book.opening)])
    return there == book.opening[: len(history) - at]


def _usual_start(history: list[int], book: Book) -> int:
    """Where an answer starts: after the first opening behind the last message of somebody else."""
    found = len(history)
    for at in range(len(history) - 1, -1, -1):
        if history[at] == book.opening[0]:
            if not _opens(history, at, book):
                break
            found = min(at + len(book.opening), len(history))
    return found


def _find(prompt: list[int], book: Book, decode: Decode) -> Entry:
    last = decode(_last_message(prompt, book))
    for entry in book.entries:
        if entry.pattern.search(decode(prompt) if entry.whole_prompt else last):
            return entry
    raise LookupError("the last entry of a book must match anything")


def _last_message(prompt: list[int], book: Book) -> list[int]:
    """The message before the opening that ends ``prompt``, header and all."""
    size = len(book.opening)
    end = len(prompt) - size if tuple(prompt[-size:]) == book.opening else len(prompt)
    for at in range(end - 1, -1, -1):
        if prompt[at] == book.opening[0]:
            return prompt[at:end]
    return prompt[:end]


def _token(entry: Entry, position: int, book: Book) -> int:
    return entry.completion[position] if position < len(entry.completion) else book.end


def _follows(answer: list[int], entry: Entry, book: Book) -> bool:
    """Whether ``answer`` is the beginning of the completion, or all of it and ends."""
    said, rest = answer[: len(entry.completion)], answer[len(entry.completion) :]
    return tuple(said) == entry.completion[: len(said)] and set(rest) <= {book.end}


def _scripted(entry: Entry, position: int, book: Book) -> Step:
    return Step(_token(entry, position, book), entry.delay_ms, position == entry.fail_at)


def _unopened(history: list[int], book: Book, decode: Decode) -> Step:
    """The longest beginning of a completion that ends the history is the answer so far."""
    for start in range(max(0, len(history) - book.longest - 1), len(history) + 1):
        for entry in _beginning_with(history[start : start + 1], book):
            answer = history[start:]
            if _follows(answer, entry, book) and _find(history[:start], book, decode) is entry:
                return _scripted(entry, len(answer), book)
    return Step(book.end)


def _beginning_with(first: list[int], book: Book) -> Iterator[Entry]:
    return (entry for entry in book.entries if list(entry.completion[: len(first)]) == first)
