"""Token ids into deltas: the Harmony state machine; the only place that says what each id does.

Knows messages, terminators and what a header makes of a body (semantics B).
Refuses to know prompts, APIs and engines. Never raises on any ids, never grows with the output.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Literal, TypeAlias

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Closed, Delta, Finished, Kind, Opened, Text, Usage
from vllm_mlx_harmony.core.header import Header, HeaderReader
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.stops import StopStrings

EndReason: TypeAlias = Literal["stop", "length"]
"""Why an engine stopped: the model ended its turn, or the limit cut it."""


class State(Enum):
    """Where the parser is between two ids."""

    HEADER = auto()
    BODY = auto()
    CALLED = auto()  # after <|call|>: only a transcript goes on, with <|start|>
    ENDED = auto()  # after <|return|>, <|endoftext|>, a stop string or the only call


class Sign(Enum):
    """What an id is to the parser."""

    TEXT = auto()
    START = auto()
    CHANNEL = auto()
    CONSTRAIN = auto()
    MESSAGE = auto()
    END = auto()
    CALL = auto()
    RETURN = auto()
    OTHER = auto()  # reserved, unassigned or out of range


SIGNS: dict[int, Sign] = {
    vocab.START: Sign.START,
    vocab.CHANNEL: Sign.CHANNEL,
    vocab.CONSTRAIN: Sign.CONSTRAIN,
    vocab.MESSAGE: Sign.MESSAGE,
    vocab.END: Sign.END,
    vocab.CALL: Sign.CALL,
    vocab.RETURN: Sign.RETURN,
    vocab.ENDOFTEXT: Sign.RETURN,
}

Action: TypeAlias = Literal["start", "channel", "constrain", "gap", "message", "abandon", "close"]

TRANSITIONS: dict[State, dict[Sign, tuple[tuple[Action, ...], State]]] = {
    State.HEADER: {
        Sign.START: (("start",), State.HEADER),
        Sign.CHANNEL: (("channel",), State.HEADER),
        Sign.CONSTRAIN: (("constrain",), State.HEADER),
        Sign.MESSAGE: (("message",), State.BODY),
        Sign.END: (("abandon", "close"), State.HEADER),
        Sign.CALL: (("abandon", "close"), State.CALLED),
        Sign.RETURN: (("abandon", "close"), State.ENDED),
        Sign.OTHER: (("gap",), State.HEADER),
    },
    State.BODY: {
        Sign.START: (("close", "start"), State.HEADER),
        Sign.CHANNEL: (("close", "channel"), State.HEADER),
        Sign.CONSTRAIN: ((), State.BODY),
        Sign.MESSAGE: ((), State.BODY),
        Sign.END: (("close",), State.HEADER),
        Sign.CALL: (("close",), State.CALLED),
        Sign.RETURN: (("close",), State.ENDED),
        Sign.OTHER: ((), State.BODY),
    },
    State.CALLED: {
        **dict.fromkeys(Sign, ((), State.CALLED)),
        Sign.START: (("start",), State.HEADER),
        Sign.RETURN: ((), State.ENDED),
    },
    State.ENDED: dict.fromkeys(Sign, ((), State.ENDED)),
}

_CHANNEL_KINDS = {"analysis": Kind.REASONING, "commentary": Kind.PREAMBLE}
_Decoder = getincrementaldecoder("utf-8")


class Parser:
    """Reads what a model generated behind ``<|start|>assistant``.

    ``names`` maps recipients back to the tools of the request; ``stop`` are the caller's stop
    strings; ``within`` is the header of a message that the prompt has begun already; ``one_call``
    ends the turn with its first call. Feed ids in any chunks, then close: the deltas are the same
    however the ids were cut, once adjacent ``Text`` is joined.
    """

    def __init__(
        self,
        names: Names | None = None,
        stop: Sequence[str] = (),
        within: Header | None = None,
        *,
        one_call: bool = False,
    ) -> None:
        self.state = State.HEADER
        self.done_at = 0
        """Ids generated up to the end of the turn; 0 as long as it goes on."""
        self.ended_at = 0
        """Ids generated up to the end of the last message that has ended."""
        self._began = 0  # up to the header that is being read
        self._names = names or Names()
        self._stop = tuple(stop)
        self._stopped_by: str | None = None
        self._one_call = one_call
        self._index = 0
        self._calls = 0
        self._tokens = 0
        self._reasoning_tokens = 0
        self._out: list[Delta] = []
        self._pending: list[bytes] = []
        self._begin_header(marked=False)
        if within is not None:
            self.state = State.BODY
            self._begin_body(within)

    @property
    def done(self) -> bool:
        """Whether the turn has ended, so that nothing more need be generated."""
        return self.done_at > 0

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        """The deltas of the next ids, of which there may be any number."""
        for token in ids:
            self._tokens += 1
            sign = SIGNS.get(token)
            if sign is not None or not 0 <= token < vocab.STARTOFTEXT:
                self._flush()
                self._control(sign or Sign.OTHER)
            elif self.state is State.BODY:
                self._reasoning_tokens += self._kind is Kind.REASONING
                self._pending.append(vocab.token_bytes(token))
            elif self.state is State.HEADER:
                self._header_text(vocab.token_bytes(token))
        self._flush()
        return self._take()

    def resume(self) -> list[Delta]:
        """Another output of the same turn begins, behind another ``<|start|>assistant``.

        Returns the deltas that close what the output before it left open.
        """
        self._end(complete=True)
        self.state, self.done_at = State.HEADER, 0
        self._begin_header(marked=False)
        return self._take()

    def close(self, reason: EndReason) -> list[Delta]:
        """The deltas that end the turn, the last of them ``Finished`` (without prompt tokens).

        ``length`` cuts the message that is open; a turn the model had ended itself is not cut.
        """
        cut = reason == "length" and self.state in (State.HEADER, State.BODY)
        self._end(complete=not cut)
        self.state = State.ENDED
        called: Literal["tool_calls", "stop"] = "tool_calls" if self._calls else "stop"
        usage = Usage(completion_tokens=self._tokens, reasoning_tokens=self._reasoning_tokens)
        self._out.append(Finished("length" if cut else called, self._stopped_by, usage))
        return self._take()

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    # Control tokens

    def _control(self, sign: Sign) -> None:
        calls = self._calls
        actions, self.state = TRANSITIONS[self.state][sign]
        for action in actions:
            self._act(action)
        if self._one_call and self._calls > calls:
            self.state = State.ENDED
        if self.state in (State.CALLED, State.ENDED):
            self.done_at = self.done_at or self.ended_at

    def _act(self, action: Action) -> None:
        if action == "start":
            self._begin_header(marked=True)
        elif action == "message":
            self._decoder.reset()
            self._begin_body(self._header.header())
        elif action == "abandon":
            self._abandon()
        elif action == "close":
            self._close(complete=True)
            self._begin_header(marked=False)
            self.ended_at = self._tokens
        else:
            getattr(self._header, action)()
        if action in ("start", "channel"):  # where it closed a body, it is not part of that
            self._began = min(self._began, self._tokens - 1)
            self.ended_at = min(self.ended_at, self._began)

    # Headers

    def _begin_header(self, *, marked: bool) -> None:
        self._header = HeaderReader(marked=marked)
        self._began = self._tokens - marked
        self._decoder = _Decoder("replace")
        self._kind: Kind | None = None
        self._stops: StopStrings | None = None
        self._opened, self._empty = False, True

    def _header_text(self, text: bytes) -> None:
        self._header.text(self._decoder.decode(text))
        if self._header.overfull:
            self.state = State.BODY  # a stop string in the text ends it at once
            self._abandon()

    def _abandon(self) -> None:
        """No ``<|message|>`` came: loose text is the body; a recipient is called all the same."""
        header, body = self._header.abandoned()
        if body or header.recipient:
            self._begin_body(header)
            self._reasoning_tokens += self._header.loose_ids if self._is(Kind.REASONING) else 0
            self._show(body)

    # Bodies

    def _begin_body(self, header: Header) -> None:
        tool = self._names.addressee(header.recipient)
        self._kind = _kind(header, tool)
        if self._stop and self._is(Kind.PREAMBLE, Kind.ANSWER):
            self._stops = StopStrings(self._stop)
        if self._kind is Kind.CALL:
            self._open(Kind.CALL, tool)

    def _is(self, *kinds: Kind) -> bool:
        return self._kind in kinds

    def _flush(self) -> None:
        """Decodes the body's bytes of this feed at once."""
        if self._pending:
            text = self._decoder.decode(b"".join(self._pending))
            self._pending.clear()
            self._show(text)

    def _show(self, text: str) -> None:
        if self._stops is None:
            self._emit(text)
            return
        shown, self._stopped_by = self._stops.feed(text)
        self._emit(shown)
        if self._stopped_by is not None:
            self._shut(complete=True)
            self.state, self.done_at = State.ENDED, self._tokens

    def _emit(self, text: str) -> None:
        if self._kind is None or not text:
            return
        if not self._opened:
            self._open(self._kind)
        self._empty = False
        self._out.append(Text(text))

    def _open(self, kind: Kind, name: str = "") -> None:
        self._out.append(Opened(self._index, kind, name, self._began))
        self._index += 1
        self._opened = True

    def _end(self, *, complete: bool) -> None:
        """The output ends: what was being read is closed, as complete or as cut."""
        if self.state is State.HEADER and self._header.abandoned(cut=not complete)[1]:
            self._abandon()
        self._close(complete=complete)

    def _close(self, *, complete: bool) -> None:
        if complete:  # half a character is invalid; at a cut the rest of it was only not generated
            self._show(self._decoder.decode(b"", final=True))
        if self._stops is not None:
            self._emit(self._stops.flush())
        if self._is(Kind.CALL) and complete:
            self._calls += 1
            self._emit("{}" if self._empty else "")
        self._shut(complete=complete)

    def _shut(self, *, complete: bool) -> None:
        if self._opened:
            self._out.append(Closed(complete))
        self._kind, self._stops, self._opened = None, None, False


def _kind(header: Header, tool: str) -> Kind | None:
    """What a message is (semantics B, "Meaning"); ``None`` when it is not shown."""
    if header.role != "assistant":
        return None
    if tool:
        return Kind.CALL
    return _CHANNEL_KINDS.get(header.channel, Kind.ANSWER)
