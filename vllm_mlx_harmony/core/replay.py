"""What the model generated, remembered as it was: the exact ids of earlier turns.

Knows which turns of a history it has seen generated, and what a client may change in them unseen.
An ``Archive`` may have turns that memory has not: those of a process that ran before, say.
Refuses to know prompts (render), which analysis is dropped (render, A6), time, disks and API keys.

**Why.** A model writes one text in more than one way: `" the"` is one id or two, JSON has spaces or
not, a header comes in either order. Rendering what a client gives back is therefore not what was
generated, and with the first id that differs everything behind it has to be computed again: an
engine's cache knows ids, not meanings. So the ids are remembered, and a turn that comes back is
placed as it was.

**Which turn is it?** APIs are stateless, and none has an id for a turn. A turn with calls has that
of its first call, which was made up here and is in no other turn. A turn without calls is known by
its content and the **history hash**: a digest (BLAKE2b, RFC 7693) of what a client sees of all that
was said before. Both are the same for every API, so that a conversation can change from one to the
other, and in every process, so that an archive can be shared.

**What may a client change?** Whatever clients do change without meaning to:

- Reasoning: left out, shortened, summarised. It is in the remembered ids, and A6 says where those
  of the analysis are dropped (which is why a turn is kept as one **span** of ids per message).
- White space and the order of keys in a call's arguments: clients parse them and write them anew.
- How several texts of one turn are joined: Chat has one content for all of them.

Anything else is an edit, and makes it another turn: it is not found, and its messages are rendered.
Content and calls of what was found are compared with what the client sent.

**Invariants.** Spans in a row are the ids of the output, as a history has them: what ended the turn
(``<|return|>``, a limit) ends a message (``<|end|>``) there. No ids of one scope (a model and whom
it speaks with) are ever found from another. Bounded in bytes, least recently used out first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from sys import getsizeof
from typing import Protocol, TypeAlias

from vllm_mlx_harmony.core import lru, vocab
from vllm_mlx_harmony.core.text_limits import is_parsed_soon
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    Message,
    Preamble,
    Reasoning,
    Result,
    ServerCall,
    ServerResult,
    User,
)

ASSISTANT_KINDS = frozenset({Reasoning, Preamble, Answer, Call, ServerCall, ServerResult})
"""What an assistant says, and what it had run on the server in between. A turn is as much of that
as stands in a row in a history."""


@dataclass(frozen=True, slots=True)
class Output:
    """What the model generated in one go, behind ``before``.

    ``ids`` begin with the ``<|start|>assistant`` that it was prompted with; message ``n`` of
    ``messages`` begins at ``ids[begins[n]]``. Ids of what was not shown stand anywhere between.
    What stands in ``ids[:ended]`` had ended; behind it the model was at a message, or at a header.
    """

    before: tuple[Message, ...]
    messages: tuple[Message, ...]
    ids: tuple[int, ...]
    begins: tuple[int, ...]
    ended: int


Span: TypeAlias = "tuple[int, ...]"
"""The ids of one generated message, and of what was not shown behind it."""


def stands_alone(span: Span) -> bool:
    """Whether it can be placed without what was generated before it."""
    return span[0] == vocab.START


@dataclass(frozen=True, slots=True)
class GeneratedTurn:
    """A turn as it was generated; its spans in a row are its ids, ended as in a history.

    ``kinds`` are what the spans are, ``content`` and ``calls`` what a client saw of it, whatever
    API it used; ``served`` is the digest of what ran on the server within it (`served`).
    """

    kinds: tuple[type[Message], ...]
    spans: tuple[Span, ...]
    content: str
    calls: tuple[Call, ...]
    served: str = ""


_Key: TypeAlias = "tuple[str, str] | tuple[str, int, str]"


class Archive(Protocol):
    """Turns outside of memory. Keys are digests; no call waits for long, none raises."""

    @property
    def blocks(self) -> bool:
        """Whether a call may wait for a network: then it is for a thread, not for an event loop."""

    def put(self, key: bytes, turn: GeneratedTurn) -> None:
        """Takes in a turn, in place of one with the same key."""

    def find(self, keys: Sequence[bytes]) -> Sequence[GeneratedTurn | None]:
        """The turns with these keys, as they were taken in; ``None`` for what is not there."""

    def use(self, key: bytes) -> None:
        """Notes that the turn with this key was used."""


class Replay:
    """Turns that were generated, no more than ``limit`` bytes of them, the last used kept.

    A turn with calls is known by the id of its first call, which no other turn has; a turn without
    by what it says and what was said before it. Any thread may use it at any time. What memory has
    not, ``archive`` is asked for.
    """

    def __init__(self, limit: int, archive: Archive | None = None) -> None:
        self._turns: lru.ByteLRU[_Key, GeneratedTurn] = lru.ByteLRU(limit)
        self._archive = archive

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._turns.size

    def __len__(self) -> int:
        """Turns held."""
        return len(self._turns)

    def view(self, scope: str) -> ReplayScope:
        """The turns of one ``scope``: a model and whom it speaks with. No other sees them."""
        return ReplayScope(self._turns, scope, self._archive)


@dataclass(frozen=True, slots=True)
class ReplayScope:
    """What one tenant's conversations with one model may be answered from."""

    _turns: lru.ByteLRU[_Key, GeneratedTurn]
    _scope: str
    _archive: Archive | None = None

    @property
    def blocks(self) -> bool:
        """Whether ``remember`` and ``history`` may wait for a network."""
        return self._archive is not None and self._archive.blocks

    def remember(self, output: Output) -> None:
        """Takes in what was generated. An output that shows nothing is never asked for."""
        spans = _spans(output)
        content, calls = visible(output.messages)
        ran = served(output.messages)
        if spans and (content or calls or ran):
            key = self._key(content, calls, 0 if calls else history_hash(output.before))
            kinds = tuple(map(type, output.messages))
            turn = GeneratedTurn(kinds, spans, content, tuple(calls), ran)
            self._turns.put(key, turn, _size(turn, key))
            if self._archive is not None:
                self._archive.put(_digest(*key), turn)

    def history(
        self, messages: Iterable[Message]
    ) -> Iterator[tuple[bool, list[Message], GeneratedTurn | None]]:
        """``messages`` in groups as `turns` has them, each with the turn that was generated.

        That is ``None`` when it was not here, or a client edited it. Reasoning does not count:
        clients leave it out, shorten and reword it. Nor do white space and order within the JSON of
        a call's arguments: clients parse it and write it anew.
        """
        groups = turns(messages)
        seen = self._seen(groups)
        found = iter(self._found([shown[0] for shown in seen if shown is not None]))
        for (from_assistant, group), shown in zip(groups, seen, strict=True):
            if shown is None:
                yield from_assistant, group, None
                continue
            yield from_assistant, group, _unedited(next(found), *shown[1:])

    def _seen(
        self, groups: Sequence[tuple[bool, list[Message]]]
    ) -> list[tuple[_Key, str, list[Call], str] | None]:
        """Per group the key of what the assistant said, what was seen of it, and what ran here."""
        seen: list[tuple[_Key, str, list[Call], str] | None] = []
        before, counted = _HistoryHash(), 0
        for at, (from_assistant, group) in enumerate(groups):
            if not from_assistant:
                seen.append(None)
                continue
            content, calls = visible(group)
            if not calls:  # a call is what a turn is known by, and not the history_hash before it
                before.update(groups[counted:at])
                counted = at
            key = self._key(content, calls, 0 if calls else before.number)
            seen.append((key, content, calls, served(group)))
        return seen

    def _found(self, keys: Sequence[_Key]) -> list[GeneratedTurn | None]:
        """The turns with these keys: what memory has not, the archive is asked for in one go."""
        found = [self._turns.get(key) for key in keys]
        if self._archive is None:
            return found
        missing = [at for at, turn in enumerate(found) if turn is None]
        for key, turn in zip(keys, found, strict=True):
            if turn is not None:
                self._archive.use(_digest(*key))
        if missing:
            archived = self._archive.find([_digest(*keys[at]) for at in missing])
            for at, turn in zip(missing, archived, strict=True):
                if turn is not None:
                    found[at] = turn
                    self._turns.put(keys[at], turn, _size(turn, keys[at]))
        return found

    def _key(self, content: str, calls: Sequence[Call], before: int) -> _Key:
        return (self._scope, calls[0].id) if calls else (self._scope, before, content)


def _unedited(
    found: GeneratedTurn | None, content: str, calls: Sequence[Call], ran: str
) -> GeneratedTurn | None:
    """``found``, if it is what a client sends back as ``content`` and ``calls``."""
    if found is None or found.content != content or len(found.calls) != len(calls):
        return None
    if not all(map(_is_same, found.calls, calls)):
        return None
    # A client of an API that has no place for what ran here gives nothing of it back. A turn that
    # ended before it said anything is known by that alone.
    return found if ran == found.served or (ran == "" and (content or calls)) else None


# --- What a client sees


def visible(turn: Iterable[Message]) -> tuple[str, list[Call]]:
    """What a client sees of a turn, alike in every API: its content in one, and its calls.

    Chat has one content for all messages, beside the calls, joined by line breaks (semantics B).
    """
    texts: list[str] = []
    calls: list[Call] = []
    for message in turn:
        if isinstance(message, Call):
            calls.append(message)
        elif isinstance(message, (Preamble, Answer)):
            texts.append(message.text)
    return "\n".join(texts), calls


def served(turn: Iterable[Message]) -> str:
    """A digest of what ran on the server in ``turn``: calls and results; empty when nothing did.

    The same however a client wrote the arguments anew, and whatever it did to ids.
    """
    ran = [each for each in turn if isinstance(each, (ServerCall, ServerResult))]
    if not ran:
        return ""
    parts: list[str] = []
    for each in ran:
        text = each.text if isinstance(each, ServerResult) else _as_json(each.arguments)
        parts += (type(each).__name__, each.name, text)
    return _digest(*parts).hex()


def _as_json(text: str) -> str:
    if not is_parsed_soon(text):
        return text
    try:
        return _canonical(text)
    except (ValueError, RecursionError):
        return text


def turns(messages: Iterable[Message]) -> list[tuple[bool, list[Message]]]:
    """``messages`` in groups: what the assistant says in a row (true), and what stands between."""
    groups: list[tuple[bool, list[Message]]] = []
    from_assistant, group = None, list[Message]()
    for message in messages:
        speaks = type(message) in ASSISTANT_KINDS
        if speaks is not from_assistant:
            from_assistant, group = speaks, []
            groups.append((from_assistant, group))
        group.append(message)
    return groups


def history_hash(messages: Iterable[Message]) -> int:
    """A number for what a client sees of ``messages``.

    The same however the client's API joins content, and whatever it does to reasoning,
    instructions, call ids and arguments; the same in every process.
    """
    hashed = _HistoryHash()
    hashed.update(turns(messages))
    return hashed.number


class _HistoryHash:
    """A `history_hash` that grows: one digest for a history of hundreds of messages."""

    __slots__ = ("_digest",)

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=8)  # Python's own hash is another in every process

    @property
    def number(self) -> int:
        """For all so far."""
        return int.from_bytes(self._digest.digest(), "little")

    def update(self, groups: Iterable[tuple[bool, Sequence[Message]]]) -> None:
        """Takes in groups of `turns`."""
        for from_assistant, group in groups:
            if from_assistant:
                content, calls = visible(group)
                self._take_in(b"said", content)
                for call in calls:
                    self._take_in(b"call", call.name)
                continue
            for message in group:
                if isinstance(message, User):
                    self._take_in(b"user", message.text)
                elif isinstance(message, Result):
                    self._take_in(b"tool", message.text)

    def _take_in(self, kind: bytes, text: str) -> None:
        content = text.encode("utf-8", "surrogatepass")
        self._digest.update(kind + len(content).to_bytes(8, "little") + content)


def _digest(*parts: str | int) -> bytes:
    """16 bytes for ``parts``, the same in every process."""
    digest = blake2b(digest_size=16)
    for part in parts:
        text = str(part).encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(text) + text)
    return digest.digest()


def _is_same(ours: Call, theirs: Call) -> bool:
    if ours.id != theirs.id or ours.name != theirs.name:
        return False
    if ours.arguments == theirs.arguments:
        return True
    one, other = ours.arguments or "{}", theirs.arguments or "{}"  # a cut call may have none
    if not is_parsed_soon(other):
        return False  # a text that is edited is another, too
    try:
        return _canonical(one) == _canonical(other)
    except (ValueError, RecursionError):
        return False


def _canonical(text: str) -> str:
    """Compared as text: in Python ``true``, ``1`` and ``1.0`` are equal, for a tool they are not.

    ``1.0`` and ``1`` are: JavaScript cannot tell one from the other.
    """
    return json.dumps(json.loads(text, parse_float=_number), sort_keys=True)


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number


# --- What is kept


def _spans(output: Output) -> tuple[Span, ...]:
    """One per message; in a row they are the ids of the output, ended. None when it shows nothing.

    Nor when a message was read behind the ids: what follows the end of a turn is no part of it.
    """
    begins = output.begins
    if not begins or begins[-1] >= len(output.ids):
        return ()
    ids = _ended(output)
    starts, ends = (0, *begins[1:]), (*begins[1:], len(ids))
    return tuple(shared(ids[start:end]) for start, end in zip(starts, ends, strict=True))


def _ended(output: Output) -> Sequence[int]:
    """The ids as a history has them: what ended the turn, or cut it, ends a message there.

    Of a header that was cut nothing is left.
    """
    if output.ids[-1] in vocab.LAST:
        return (*output.ids[:-1], vocab.END)
    # Behind the last message that ended there may be half of another, or only a header, and perhaps
    # junk before it, of one that never began.
    rest = output.ids[output.ended :]
    in_message = output.begins[-1] >= output.ended or vocab.MESSAGE in rest
    ids = output.ids if in_message else output.ids[: output.ended]
    if ids[-1] in (vocab.END, vocab.CALL):
        return ids
    called = isinstance(output.messages[-1], (Call, ServerCall))
    return (*ids, vocab.CALL if called else vocab.END)


class _Shared(dict[int, int]):
    """One object for each id of the vocabulary, which as many tuples can hold: 8 bytes, not 36."""

    def __missing__(self, token: int) -> int:
        if 0 <= token < vocab.SIZE:
            self[token] = token
        return token


_shared = _Shared()


def shared(ids: Iterable[int]) -> tuple[int, ...]:
    """``ids``, to be kept: the same ones, in objects that are shared with all others kept.

    In steps, between which other threads run: for millions it would be one call of 100 ms.
    """
    left = iter(ids)
    kept: list[int] = []
    while step := list(islice(left, _STEP)):
        kept += map(_shared.__getitem__, step)
    return tuple(kept)


_STEP = 65_536
"""Ids that are shared in one step."""


_EACH = 256
"""Bytes that a turn, a span or a call takes beside its ids and texts, about."""


def _size(remembered: GeneratedTurn, key: _Key) -> int:
    texts = (remembered.content, *(call.arguments for call in remembered.calls), key[0])
    objects = 1 + len(remembered.spans) + len(remembered.calls)
    ids = sum(map(getsizeof, remembered.spans))
    return ids + sum(map(getsizeof, texts)) + objects * _EACH
