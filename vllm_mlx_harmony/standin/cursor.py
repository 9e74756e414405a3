"""Which token of a script comes next, given the ids so far. There is no other state.

This file is copied into each stand-in directory, so it only imports the standard library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

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

They apply if the scripted token is forbidden: what was begun then ends soon. Whatever is allowed
in a string is allowed in a text, and whatever is allowed between values is allowed in a string. So
the token that ends a text is likelier than the one that ends a string, which is likelier than the
one that ends an object. No list, object or number becomes longer than required, and a call is made
rather than another message. With differences of ten, the order is the same at a temperature of 1.
"""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class ScriptEntry:
    """One script in the book: a compiled pattern and a completion in ids."""

    pattern: re.Pattern[str]
    completion: tuple[int, ...]
    whole_prompt: bool = False
    delay_ms: float = 0
    fail_at: int | None = None
    prompt_ms: float = 0


@dataclass(frozen=True)
class Book:
    """All scripts, first match first; the last entry matches anything.

    ``opening`` are the ids of ``<|start|>assistant``, ``end`` is the id after a completion.
    """

    entries: tuple[ScriptEntry, ...]
    opening: tuple[int, ...]
    end: int

    @property
    def longest(self) -> int:
        """Length in ids of the longest completion."""
        return max(len(entry.completion) for entry in self.entries)


@dataclass(frozen=True)
class Step:
    """The next id, how long it takes, and whether the model fails instead."""

    token: int
    delay_ms: float = 0
    fails: bool = False


def parse_book(document: str) -> Book:
    fields = json.loads(document)
    entries = []
    for entry in fields["scripts"]:
        pattern = re.compile(entry.pop("pattern"), entry.pop("flags"))
        completion = tuple(entry.pop("completion"))
        entries.append(ScriptEntry(pattern, completion, **entry))
    return Book(tuple(entries), tuple(fields["opening"]), fields["end"])


def read_book(directory: Path) -> Book:
    """The scripts of a directory, read again when the file has changed (one ``stat`` a call)."""
    path = directory / BOOK
    found = path.stat()
    return _read_book(path, found.st_mtime_ns, found.st_size, found.st_ino)


@lru_cache(maxsize=1)
def _read_book(path: Path, *_: int) -> Book:
    return parse_book(path.read_text("utf-8"))


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
    return {token: wanted[text] for token, text in enumerate(table) if text in wanted}


def decoder(table: Sequence[bytes]) -> Decode:
    """Ids to text, with names of control tokens; bytes that are not UTF-8 become U+FFFD."""

    @lru_cache(maxsize=64)
    def decoded(ids: tuple[int, ...]) -> str:
        return b"".join(table[token] for token in ids).decode("utf-8", "replace")

    return lambda ids: decoded(tuple(ids))


def next_step(history: Sequence[int], book: Book, decode: Decode) -> Step:
    """The next step after ``history``, the ids of the prompt and the answer so far.

    The answer began after a ``<|start|>assistant``. A completion may contain one itself, so the
    first one counts that is followed by nothing but the beginning of a script's completion. If a
    token was forced, so that the answer is not in its script any more, it continues at the same
    position. A raw prompt, without messages, has an answer as well.
    """
    history = list(history)
    first = next(_positions(history, book.opening[0], 0), None)
    if first is None or _opens(history, first, book):  # only the assistant's own messages
        return _after_raw_prompt(history, book, decode)
    usual = _usual_start(history, book)
    for start in _starts(history, book):
        entry = entry_for(history[:start], book, decode)
        known = start == usual or entry is not book.entries[-1]
        if known and _follows(history[start:], entry, book):
            return _step(entry, len(history) - start, book)
    entry = entry_for(history[:usual], book, decode)
    return Step(_step(entry, len(history) - usual, book).token)


def prompt_ms(history: Sequence[int], book: Book, decode: Decode) -> float:
    """Milliseconds for each token at the end of ``history``, which is the beginning of a prompt."""
    if not any(entry.prompt_ms for entry in book.entries):
        return 0
    return entry_for(list(history), book, decode).prompt_ms


def _starts(history: list[int], book: Book) -> Iterator[int]:
    """Positions after an opening, in order, no further back than the longest completion."""
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


def _opens(history: list[int], at: int, book: Book) -> bool:
    """Whether an opening is at ``at``, or the beginning of one at the end of the history."""
    there = tuple(history[at : at + len(book.opening)])
    return there == book.opening[: len(history) - at]


def _usual_start(history: list[int], book: Book) -> int:
    """Where an answer begins: after the first opening after the last message of another author."""
    found = at = len(history)
    while (at := _last(history, book.opening[0], at)) >= 0 and _opens(history, at, book):
        found = min(at + len(book.opening), len(history))
    return found


def _last(history: list[int], token: int, end: int) -> int:
    """The last position of ``token`` before ``end``; -1 if there is none."""
    before = history[:end]
    before.reverse()
    return end - 1 - before.index(token) if token in before else -1


def entry_for(prompt: list[int], book: Book, decode: Decode) -> ScriptEntry:
    """The script for a prompt, by the message before the opening that ends it."""
    size = len(book.opening)
    end = len(prompt) - size if tuple(prompt[-size:]) == book.opening else len(prompt)
    last = decode(prompt[max(0, _last(prompt, book.opening[0], end)) : end])
    for entry in book.entries:
        if entry.pattern.search(decode(prompt) if entry.whole_prompt else last):
            return entry
    raise LookupError("the last entry of a book must match anything")


def _follows(answer: list[int], entry: ScriptEntry, book: Book) -> bool:
    """Whether ``answer`` is the beginning of the completion, or all of it and its end."""
    begun, rest = answer[: len(entry.completion)], answer[len(entry.completion) :]
    return tuple(begun) == entry.completion[: len(begun)] and set(rest) <= {book.end}


def _step(entry: ScriptEntry, position: int, book: Book) -> Step:
    token = entry.completion[position] if position < len(entry.completion) else book.end
    return Step(token, entry.delay_ms, position == entry.fail_at)


def _after_raw_prompt(history: list[int], book: Book, decode: Decode) -> Step:
    """The answer so far is the longest beginning of a completion that ends the history."""
    for start in range(max(0, len(history) - book.longest - 1), len(history) + 1):
        prompt, answer = history[:start], history[start:]
        for entry in book.entries:
            if answer[:1] != list(entry.completion[: len(answer[:1])]):
                continue  # quickly, for there are many starts
            if _follows(answer, entry, book) and entry_for(prompt, book, decode) is entry:
                return _step(entry, len(answer), book)
    return Step(book.end)
