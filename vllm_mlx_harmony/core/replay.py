"""Replay: earlier turns are placed in a prompt with the exact ids that the model generated.

**Why.** A model can write the same text in several ways: `" the"` is one id or two, JSON has spaces
or not, the parts of a header come in either order. So rendering the messages that a client sends
back does not reproduce the generated ids. From the first difference on, an engine has to compute
everything again, since its cache depends on ids. Therefore the ids are stored, and a turn that
comes back is placed as it was generated. An ``Archive`` may have turns that are not in memory, such
as those of an earlier process.

**Identifying a turn.** The APIs are stateless, and none has an id for a turn. A turn with calls is
identified by the id of its first call, which was generated here and is unique. A turn without calls
is identified by its content and the **history hash**: a digest (BLAKE2b, RFC 7693) of the
conversation before it, as a client sees it. Call ids and history hashes are the same in every
API, so a conversation may change APIs, and in every process, so an archive may be shared.

**What a client may change.** Clients change some things unintentionally:

- Reasoning is left out, shortened or summarised. The stored ids contain it, and A6 defines where
  it is dropped from the prompt (so a turn is stored as one **span** of ids per message).
- White space and the order of keys in a call's arguments: clients parse and rewrite them.
- How several texts of one turn are joined: Chat has a single content for all of them.

Any other change is an edit: the turn is not found, and its messages are rendered. The content and
the calls of a turn that was found are compared with those that the client sent.

**Invariants.** Joined, the spans are the ids of the output as they occur in a history: whatever
ended the turn (``<|return|>``, a limit) becomes the end of a message (``<|end|>``). A turn is never
found from another scope (a model and a tenant). The size in bytes is bounded, and the least
recently used turns are evicted first.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, groupby, islice, pairwise
from sys import getsizeof
from typing import Protocol, TypeAlias
from zlib import crc32

from vllm_mlx_harmony.core import lru, vocab
from vllm_mlx_harmony.core.text_limits import is_quick_to_parse
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
"""Messages of the assistant, and results of tools that the server ran for it. A turn is a maximal
run of these in a history."""


@dataclass(frozen=True, slots=True)
class Output:
    """What the model generated after the messages ``before``.

    ``ids`` begin with the ``<|start|>assistant`` of the prompt. Message ``n`` begins at
    ``ids[begins[n]]``. Hidden text may occur between messages. ``ids[:ended]`` ends with the last
    complete message; a partial message or header may follow.
    """

    before: tuple[Message, ...]
    messages: tuple[Message, ...]
    ids: tuple[int, ...]
    begins: tuple[int, ...]
    ended: int


Span: TypeAlias = tuple[int, ...]
"""The ids of one generated message, and of hidden text after it."""


def is_self_contained(span: Span) -> bool:
    """Whether it can be placed without the spans before it."""
    return span[0] == vocab.START


@dataclass(frozen=True, slots=True)
class GeneratedTurn:
    """A turn as it was generated: the kind and the ids of each message.

    ``content`` and ``calls`` are what a client sees of it in any API; ``server_digest`` is that of
    the tools that the server ran within it (`server_calls_digest`).
    """

    kinds: tuple[type[Message], ...]
    spans: tuple[Span, ...]
    content: str
    calls: tuple[Call, ...]
    server_digest: str = ""

    def to_bytes(self) -> bytes:
        """The turn for an archive: a checksum, the length of a JSON header, the header, each id
        (four bytes, in the machine's order)."""
        header = {
            "kinds": [kind.__name__ for kind in self.kinds],
            "lengths": [len(span) for span in self.spans],
            "content": self.content,
            "calls": [[call.id, call.name, call.arguments] for call in self.calls],
            **({"served": self.server_digest} if self.server_digest else {}),
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        ids = b"".join(array("I", span).tobytes() for span in self.spans)
        body = len(text).to_bytes(4, "little") + text + ids
        return crc32(body).to_bytes(_CRC, "little") + body

    @classmethod
    def from_bytes(cls, content: bytes) -> GeneratedTurn | None:
        """The turn in ``content``; ``None`` if it is damaged, or from another version."""
        body = content[_CRC:]
        if crc32(body) != int.from_bytes(content[:_CRC], "little"):
            return None
        try:
            length = int.from_bytes(body[:4], "little")
            header = json.loads(body[4 : 4 + length])
            ids = array("I", body[4 + length :])
            places = accumulate(header["lengths"], initial=0)
            return cls(
                tuple(_KINDS[name] for name in header["kinds"]),
                tuple(intern_ids(ids[start:end]) for start, end in pairwise(places)),
                header["content"],
                tuple(Call(*call) for call in header["calls"]),
                header.get("served", ""),
            )
        except (ValueError, KeyError, TypeError):  # written by a version with another format
            return None


_KINDS = {kind.__name__: kind for kind in ASSISTANT_KINDS}
_CRC = 4
"""Bytes of the checksum of a turn."""

_Key: TypeAlias = tuple[str, str] | tuple[str, int, str]


class Archive(Protocol):
    """Turns stored elsewhere than in memory, by digest. Its methods are quick and never raise."""

    @property
    def blocks(self) -> bool:
        """Whether a call may wait for a network, and so must not run on an event loop."""

    def put(self, key: bytes, turn: GeneratedTurn) -> None:
        """Stores a turn, or replaces the one with the same key."""

    def find(self, keys: Sequence[bytes]) -> Sequence[GeneratedTurn | None]:
        """The turns with these keys, ``None`` for a missing one."""

    def use(self, key: bytes) -> None:
        """Notes that the turn with this key was used."""


class Replay:
    """A cache of generated turns, of ``limit`` bytes, in front of the ``archive``. Thread-safe."""

    def __init__(self, limit: int, archive: Archive | None = None) -> None:
        self._turns: lru.ByteLRU[_Key, GeneratedTurn] = lru.ByteLRU(limit)
        self._archive = archive

    def view(self, scope: str) -> ReplayScope:
        """The turns of one ``scope``: a model and a tenant."""
        return ReplayScope(self._turns, scope, self._archive)


@dataclass(frozen=True, slots=True)
class ReplayScope:
    """The generated turns of one tenant with one model."""

    _turns: lru.ByteLRU[_Key, GeneratedTurn]
    _scope: str
    _archive: Archive | None = None

    @property
    def blocks(self) -> bool:
        """Whether ``remember`` and ``history`` may wait for a network."""
        return self._archive is not None and self._archive.blocks

    def remember(self, output: Output) -> None:
        """Stores what was generated, unless nothing of it was visible."""
        spans = _spans(output)
        content, calls = visible_content(output.messages)
        server_digest = server_calls_digest(output.messages)
        if spans and (content or calls or server_digest):
            key = self._key(output.messages, 0 if calls else history_hash(output.before))
            kinds = tuple(map(type, output.messages))
            turn = GeneratedTurn(kinds, spans, content, tuple(calls), server_digest)
            self._turns.put(key, turn, _size(turn, key))
            if self._archive is not None:
                self._archive.put(_digest(*key), turn)

    def history(
        self, messages: Iterable[Message]
    ) -> list[tuple[Sequence[Message], GeneratedTurn | None]]:
        """The groups of ``messages`` (`group_turns`), each with the turn that was generated.

        That is ``None`` between turns, if it was not generated here, or if a client edited it.
        """
        groups = group_turns(messages)
        keys = [
            self._key(group, before) if from_assistant else None
            for (from_assistant, group), before in zip(groups, _hashes(groups), strict=False)
        ]
        turns = self._found([key for key in keys if key is not None])
        return [
            (group, _unedited(turns.get(key) if key else None, group))
            for key, (_, group) in zip(keys, groups, strict=True)
        ]

    def _found(self, keys: Sequence[_Key]) -> dict[_Key, GeneratedTurn]:
        """The turns with these keys, from memory or with one query from the archive."""
        turns = {key: turn for key in keys if (turn := self._turns.get(key)) is not None}
        if self._archive is None:
            return turns
        for key in turns:
            self._archive.use(_digest(*key))
        missing = [key for key in keys if key not in turns]
        archived = self._archive.find([_digest(*key) for key in missing]) if missing else ()
        for key, turn in zip(missing, archived, strict=True):
            if turn is not None:
                turns[key] = turn
                self._turns.put(key, turn, _size(turn, key))
        return turns

    def _key(self, turn: Iterable[Message], before: int) -> _Key:
        content, calls = visible_content(turn)
        return (self._scope, calls[0].id) if calls else (self._scope, before, content)


def _unedited(turn: GeneratedTurn | None, sent: Sequence[Message]) -> GeneratedTurn | None:
    """``turn``, unless a client edited the turn that it ``sent``."""
    if turn is None:
        return None
    content, calls = visible_content(sent)
    sent_digest = server_calls_digest(sent)
    if turn.content != content or len(turn.calls) != len(calls):
        return None
    if not all(map(_is_same, turn.calls, calls)):
        return None
    # Some APIs have no place for tools that the server ran, so their clients send nothing back. If
    # a turn has neither content nor calls, those tools are all that identifies it.
    is_same = sent_digest == turn.server_digest or (sent_digest == "" and (content or calls))
    return turn if is_same else None


# --- What a client sees


def visible_content(turn: Iterable[Message]) -> tuple[str, list[Call]]:
    """What a client sees of a turn in any API: all its content, joined by line breaks as in Chat
    (semantics B), and its calls."""
    texts: list[str] = []
    calls: list[Call] = []
    for message in turn:
        if isinstance(message, Call):
            calls.append(message)
        elif isinstance(message, (Preamble, Answer)):
            texts.append(message.text)
    return "\n".join(texts), calls


def server_calls_digest(turn: Iterable[Message]) -> str:
    """A digest of the server's tool calls in ``turn`` and their results. Ignores call ids and the
    formatting of arguments. Empty if there are no such calls."""
    server_messages = [m for m in turn if isinstance(m, (ServerCall, ServerResult))]
    if not server_messages:
        return ""
    parts: list[str] = []
    for message in server_messages:
        text = message.text if isinstance(message, ServerResult) else message.arguments
        if isinstance(message, ServerCall) and is_quick_to_parse(text):
            with suppress(ValueError, RecursionError):
                text = _canonical(text)
        parts += (type(message).__name__, message.name, text)
    return _digest(*parts).hex()


def group_turns(messages: Iterable[Message]) -> list[tuple[bool, list[Message]]]:
    """``messages`` in groups: the turns of the assistant (true), and what is between them."""
    groups = groupby(messages, lambda message: type(message) in ASSISTANT_KINDS)
    return [(from_assistant, list(group)) for from_assistant, group in groups]


def history_hash(messages: Iterable[Message]) -> int:
    """A hash of what a client sees of ``messages``, the same in every process (as Python's is not).

    It does not depend on how content is joined, nor on reasoning, instructions, call ids and
    arguments.
    """
    *_, last = _hashes(group_turns(messages))
    return last


def _hashes(groups: Iterable[tuple[bool, Sequence[Message]]]) -> Iterator[int]:
    """The `history_hash` of what comes before each of ``groups``, and of all of them."""
    history = blake2b(digest_size=8)
    for from_assistant, group in groups:
        yield int.from_bytes(history.digest(), "little")
        if from_assistant:
            content, calls = visible_content(group)
            parts = [(b"said", content), *((b"call", call.name) for call in calls)]
        else:
            parts = [
                (b"user" if isinstance(message, User) else b"tool", message.text)
                for message in group
                if isinstance(message, (User, Result))
            ]
        for kind, text in parts:
            encoded = text.encode("utf-8", "surrogatepass")
            history.update(kind + len(encoded).to_bytes(8, "little") + encoded)
    yield int.from_bytes(history.digest(), "little")


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
    if not is_quick_to_parse(other):
        return False  # too large to parse: counts as edited
    try:
        return _canonical(one) == _canonical(other)
    except (ValueError, RecursionError):
        return False


def _canonical(text: str) -> str:
    """``text``, which is JSON, in a canonical form. As Python values, ``true`` and ``1`` would be
    equal. ``1.0`` becomes ``1``, since JavaScript cannot tell them apart."""

    def number(text: str) -> float | int:
        value = float(text)
        return int(value) if value.is_integer() else value

    return json.dumps(json.loads(text, parse_float=number), sort_keys=True)


# --- What is stored


def _spans(output: Output) -> tuple[Span, ...]:
    """The ids of each message.

    Empty if the output has no visible message, or if its last message begins after the ids: text
    without a header only becomes a message when the output ends.
    """
    begins = output.begins
    if not begins or begins[-1] >= len(output.ids):
        return ()
    ids = output.ids
    if ids[-1] not in vocab.RETURN_ENDS:
        # After the last complete message, there may be half of another one. Or there is just a
        # header, possibly with noise before it, of a message that never began: it is removed.
        in_message = begins[-1] >= output.ended or vocab.MESSAGE in ids[output.ended :]
        ids = ids if in_message else ids[: output.ended]
    ids = terminate(ids, called=isinstance(output.messages[-1], (Call, ServerCall)))
    starts, ends = (0, *begins[1:]), (*begins[1:], len(ids))
    return tuple(intern_ids(ids[start:end]) for start, end in zip(starts, ends, strict=True))


def terminate(ids: Sequence[int], *, called: bool) -> tuple[int, ...]:
    """``ids``, which end in a message (``called``: a call), with the terminator that it has in a
    history: where the turn ended or was cut, a message ends."""
    if ids[-1] in vocab.RETURN_ENDS:
        return (*ids[:-1], vocab.END)
    if ids[-1] in (vocab.END, vocab.CALL):
        return tuple(ids)
    return (*ids, vocab.CALL if called else vocab.END)


class _InternedIds(dict[int, int]):
    """One object for each id of the vocabulary: a tuple takes 8 bytes for each id, not 36."""

    def __missing__(self, token: int) -> int:
        if 0 <= token < vocab.SIZE:
            self[token] = token
        return token


_interned = _InternedIds()


def intern_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """``ids`` as a tuple for storage, whose objects are shared with all other such tuples.

    Copied in chunks, between which other threads can run: millions of ids take 100 ms.
    """
    remaining = iter(ids)
    stored: list[int] = []
    while chunk := list(islice(remaining, _CHUNK)):
        stored += map(_interned.__getitem__, chunk)
    return tuple(stored)


_CHUNK = 65_536
"""Ids that are copied before other threads get a chance to run."""

_OVERHEAD = 256
"""The approximate size of a turn, a span or a call, without its ids and texts."""


def _size(remembered: GeneratedTurn, key: _Key) -> int:
    texts = (remembered.content, *(call.arguments for call in remembered.calls), key[0])
    objects = 1 + len(remembered.spans) + len(remembered.calls)
    ids = sum(map(getsizeof, remembered.spans))
    return ids + sum(map(getsizeof, texts)) + objects * _OVERHEAD
