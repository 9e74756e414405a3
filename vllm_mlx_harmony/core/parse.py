"""Token ids into deltas: the Harmony state machine (semantics B).

It never raises on any ids, and its memory does not grow with the output.

The format: https://cookbook.openai.com/articles/openai-harmony. On output that follows it this
parser agrees with ``StreamableParser`` of https://github.com/openai/harmony (a differential test
holds them together); that one raises where a model does not, and a server must not.

A message is a header, ``<|message|>``, a body and a terminator. The parser is in one of these
**states**, and every control token is a **sign** that leads from one to the next. `TRANSITIONS` has
the states and `Parser._control` the effects, as in h11
(https://github.com/python-hyper/h11/blob/master/h11/_state.py):

    HEADER ──<|message|>──▶ BODY ──<|end|>──▶ HEADER … ──<|return|>──▶ ENDED
                             └────<|call|>──▶ CALLED ──<|start|>──▶ HEADER   (a transcript)

Some transitions have no sign; they are **findings** (`FINDINGS`): a header with so much loose text
that it is the message; a stop string; an author who is not the assistant.

There is no other reader of headers: what counts reasoning (`core.reasoning`) and what colours ids
(`cli.paint`) ask this parser what it is reading.

Three things make it more than that picture.

**A header may lack its ``<|message|>``.** At ``<|return|>``, ``<|call|>`` and the end of the output
the loose text in it is the message: the model forgot the header. At ``<|end|>`` it is more often a
header that the model gave up (`<|channel|>commentary?commentary?<|end|>`), after which it begins
anew. So the text is held back: at the end of the output it is the answer, if nothing that is shown
came behind it, and no content or call before it. Only the last such text is held, and it is no
longer than a header can be (`LOOSE_LIMIT`).

**The model may play another.** Behind ``<|start|>`` it can write `user`, or a tool's name, and go
on with what that one says. The turn ends before that ``<|start|>``: `done_at` is then less than
what was generated, and who keeps the ids keeps only those. In a transcript, where ids follow a
``<|call|>`` all the same, tools have really answered: what they say is read over (``RESULT``).

**The same ids give the same deltas and the same usage, however they are cut.** Bytes of a body are
decoded once per feed. With stop strings they are decoded id by id: otherwise ids behind the stop
string would be counted when they came in the same feed. Behind the end of a turn ids are not read
and not counted.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, TypeAlias

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import (
    Closed,
    Delta,
    Finished,
    FinishReason,
    Kind,
    Opened,
    Text,
    Usage,
)
from vllm_mlx_harmony.core.header import Header, HeaderReader
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.stops import StopStrings

EndReason: TypeAlias = Literal["stop", "length", "pause"]
"""Why an engine stopped: the model ended its turn, or the limit cut it."""


class State(Enum):
    """Where the parser is between two ids."""

    HEADER = auto()
    BODY = auto()
    CALLED = auto()  # after <|call|>: only a transcript goes on, with <|start|>
    RESULT = auto()  # in a message of a tool, or of any other author, in a transcript
    ENDED = auto()  # after <|return|>, <|endoftext|>, a stop string, the only call; another speaks


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
"""Those that end a turn are `vocab.TURN_ENDS`: ``CALL`` and ``RETURN``."""


class Finding(Enum):
    """What a header or a body turns out to be, at whatever id."""

    LOOSE = auto()  # so much loose text that there is no header
    RESULT = auto()  # a tool's message in a transcript
    PLAYED = auto()  # a message of another author, made up by the model
    STOPPED = auto()  # a stop string is complete


FINDINGS: dict[Finding, State] = {
    Finding.LOOSE: State.BODY,
    Finding.RESULT: State.RESULT,
    Finding.PLAYED: State.ENDED,
    Finding.STOPPED: State.ENDED,
}

TRANSITIONS: dict[State, dict[Sign, State]] = {
    State.HEADER: {
        **dict.fromkeys(Sign, State.HEADER),
        Sign.MESSAGE: State.BODY,
        Sign.CALL: State.CALLED,
        Sign.RETURN: State.ENDED,
    },
    State.BODY: {
        **dict.fromkeys(Sign, State.BODY),
        Sign.START: State.HEADER,
        Sign.CHANNEL: State.HEADER,
        Sign.END: State.HEADER,
        Sign.CALL: State.CALLED,
        Sign.RETURN: State.ENDED,
    },
    State.CALLED: {
        **dict.fromkeys(Sign, State.CALLED),
        Sign.START: State.HEADER,
        Sign.RETURN: State.ENDED,
    },
    State.RESULT: {
        **dict.fromkeys(Sign, State.RESULT),
        Sign.START: State.HEADER,
        Sign.END: State.HEADER,
        Sign.CALL: State.CALLED,
        Sign.RETURN: State.ENDED,
    },
    State.ENDED: dict.fromkeys(Sign, State.ENDED),
}

_CHANNEL_KINDS = {"analysis": Kind.REASONING, "commentary": Kind.PREAMBLE}
_ENDED: State = State.ENDED  # looked up once per feed
_Decoder = getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class _Loose:
    """Text without ``<|message|>``: what a header says of it, its ids, where the header began."""

    header: Header
    text: str
    ids: int
    began: int


class Parser:
    """Reads what a model generated behind ``<|start|>assistant``.

    ``names`` maps recipients back to the tools of the request; ``stop`` are the caller's stop
    strings; ``within`` is the header of a message that the prompt has begun already; ``one_call``
    ends the turn with its first call; a ``transcript`` has messages of all authors, such as a
    prompt, and no end of a turn ends it. Feed ids in any chunks, then close: the deltas are the
    same however the ids were cut, once adjacent ``Text`` is joined.
    """

    def __init__(
        self,
        names: Names | None = None,
        stop: Sequence[str] = (),
        within: Header | None = None,
        *,
        one_call: bool = False,
        transcript: bool = False,
    ) -> None:
        self.state = State.HEADER
        self.author = "assistant"
        """Who speaks in the state ``RESULT``, and who ended the turn by speaking."""
        self.tokens = 0
        """Ids read: all that were fed, but for those behind the end of the turn."""
        self.done_at: int | None = None
        """How many of them make up the turn; ``None`` as long as it goes on."""
        self.ended_at = 0
        """How many stand up to the end of the last message that has ended."""
        self._began = 0  # … up to the header that is being read
        self._names = names or Names()
        self._stop = tuple(stop)
        self._stopped_by: str | None = None
        self._one_call = one_call
        self._transcript = transcript
        self._index = 0
        self._calls = 0
        self._server_calls = 0
        self._waiting: _Loose | None = None  # for the turn to say something else
        self._answered = False  # content or a call has been shown
        self._reasoning_tokens = 0
        self._out: list[Delta] = []
        self._pending: list[bytes] = []
        self._begin_header(marked=False)
        if within is not None:
            self.state = State.BODY
            self._begin_body(within)

    @property
    def reading(self) -> Kind | None:
        """The kind of the message whose body is being read; ``None`` in a header."""
        return self._kind

    @property
    def reasoning_tokens(self) -> int:
        """Ids in bodies of reasoning up to now."""
        return self._reasoning_tokens

    @property
    def done(self) -> bool:
        """Whether the turn has ended, so that nothing more need be generated."""
        return self.done_at is not None

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        """The deltas of the next ids, of which there may be any number."""
        if self.state is _ENDED:
            return []
        for token in ids:
            self.tokens += 1
            sign = SIGNS.get(token)
            if sign is not None or not 0 <= token < vocab.STARTOFTEXT:
                self._flush()
                self._control(sign or Sign.OTHER)
            elif self.state is State.BODY:
                self._reasoning_tokens += self._kind is Kind.REASONING
                self._pending.append(vocab.token_bytes(token))
                if self._stops is None:
                    continue
                self._flush()
            elif self.state is State.HEADER:
                self._header_text(vocab.token_bytes(token))
            if self.state is _ENDED:
                break
        self._flush()
        return self._take()

    def resume(self) -> list[Delta]:
        """Another output of the same turn begins, behind another ``<|start|>assistant``.

        Returns the deltas that close what the output before it left open.
        """
        self._end(complete=True)
        self.state, self.done_at = State.HEADER, None
        self._waiting, self._answered = None, False
        self.ended_at = self.tokens
        self._begin_header(marked=False)
        return self._take()

    def close(self, reason: EndReason) -> list[Delta]:
        """The deltas that end the turn, the last of them ``Finished`` (without prompt tokens).

        ``length`` cuts the message that is open; a turn the model had ended itself is not cut.
        ``pause``: it ended in a call that the server has not run.
        """
        cut = reason == "length" and self.state in (State.HEADER, State.BODY)
        self._end(complete=not cut)
        if self._waiting is not None:
            self._begin_header(marked=False)
            self._show_loose(self._waiting)
            self._close(complete=True)
        self.state = State.ENDED
        cut = cut and self._stopped_by is None
        ended: FinishReason = "tool_calls" if self._calls else "stop"
        if cut or reason == "pause":
            ended = reason
        usage = Usage(completion_tokens=self.tokens, reasoning_tokens=self._reasoning_tokens)
        self._out.append(Finished(ended, self._stopped_by, usage))
        return self._take()

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    # Control tokens

    def _control(self, sign: Sign) -> None:
        calls, server_calls = self._calls, self._server_calls
        if self.state is State.HEADER:
            self._header.gap()
            if self._header.author != "assistant":
                self._another_speaks(self._header.author)
        before, self.state = self.state, TRANSITIONS[self.state][sign]
        self._act(before, sign)
        if (self._one_call and self._calls > calls) or self._server_calls > server_calls:
            self.state = State.ENDED  # the server runs it before the model goes on
        if self.state in (State.CALLED, State.ENDED):
            self._done(self.ended_at)
        if self._transcript and self.state is State.ENDED:
            self.state = State.CALLED

    def _act(self, before: State, sign: Sign) -> None:
        """The effects of the transition from ``before`` that ``sign`` has made."""
        begins = self.state is State.HEADER and sign in (Sign.START, Sign.CHANNEL)
        match before, sign:
            case State.HEADER, Sign.CONSTRAIN:
                self._header.constrain()
            case State.HEADER, Sign.MESSAGE:
                self._end_header()
            case State.HEADER, Sign.END:
                self._hold(self._loose())
                self._end_message()
            case State.HEADER, Sign.CALL | Sign.RETURN:
                self._show_loose(self._loose())
                self._end_message()
            case State.BODY, Sign.START | Sign.CHANNEL | Sign.END | Sign.CALL | Sign.RETURN:
                self._end_message()
            case State.RESULT, Sign.END:
                self._end_message()
        if begins:
            if sign is Sign.START:
                self._begin_header(marked=True)
            else:
                self._header.channel()
            # The id is no part of a body that it has ended.
            self._began = min(self._began, self.tokens - 1)
            self.ended_at = min(self.ended_at, self._began)

    def _found(self, finding: Finding, done_at: int | None = None) -> None:
        self.state = FINDINGS[finding]
        if done_at is not None:
            self._done(done_at)

    def _done(self, at: int) -> None:
        """The turn has ended there, if it had not ended before: a transcript goes on behind it."""
        self.done_at = at if self.done_at is None else self.done_at

    def _another_speaks(self, author: str) -> None:
        self.author = author
        if self._transcript or (author == "tool" and self.done):
            self._found(Finding.RESULT)
        else:
            self._found(Finding.PLAYED, self.ended_at)

    def _end_message(self) -> None:
        self._close(complete=True)
        self._begin_header(marked=False)
        self.ended_at = self.tokens

    # Headers

    def _begin_header(self, *, marked: bool) -> None:
        self._header = HeaderReader(marked=marked, is_tool=self._names.is_tool)
        self._began = self.tokens - marked
        self._decoder = _Decoder("replace")
        self._kind: Kind | None = None
        self._stops: StopStrings | None = None
        self._opened, self._empty = False, True

    def _end_header(self) -> None:
        """A ``<|message|>``: the body follows."""
        self._decoder.reset()
        header = self._header.header()
        if header.role == "assistant":
            self._begin_body(header)
        else:  # without <|start|>, only <|message|> shows that it is a role
            self._another_speaks(header.role)

    def _header_text(self, text: bytes) -> None:
        self._header.text(self._decoder.decode(text))
        if self._header.author != "assistant":
            self._another_speaks(self._header.author)
        elif self._header.overfull:
            self._found(Finding.LOOSE)  # first: a stop string in the text ends it at once
            self._show_loose(self._loose())

    def _loose(self, *, cut: bool = False) -> _Loose:
        """What stands in the header, which no ``<|message|>`` has ended."""
        header, text = self._header.abandoned(cut=cut)
        return _Loose(header, text, self._header.loose_ids, self._began)

    def _hold(self, loose: _Loose) -> None:
        """The text may turn out to be the answer, if none has been given."""
        if (loose.text or loose.header.recipient) and not self._answered:
            self._waiting = loose

    def _show_loose(self, loose: _Loose) -> None:
        """The text is the body; a recipient is called even without any."""
        if loose.text or loose.header.recipient:
            self._began = loose.began
            self._begin_body(loose.header)
            self._reasoning_tokens += loose.ids if self._is(Kind.REASONING) else 0
            self._show(loose.text)

    # Bodies

    def _begin_body(self, header: Header) -> None:
        tool = self._names.addressee(header.recipient)
        self._kind = _kind(header, tool)
        if self._stop and self._is(Kind.PREAMBLE, Kind.ANSWER):
            self._stops = StopStrings(self._stop)
        if self._kind is Kind.CALL:
            served = self._names.is_served(header.recipient)
            self._kind = Kind.SERVER_CALL if served else Kind.CALL
            self._open(self._kind, tool)

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
            self._found(Finding.STOPPED, self.tokens)

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
        self._waiting = None
        self._answered = self._answered or kind is not Kind.REASONING

    def _end(self, *, complete: bool) -> None:
        """The output ends: what was being read is closed, as complete or as cut."""
        if self.state is State.HEADER and (loose := self._loose(cut=not complete)).text:
            self._show_loose(loose)
        self._close(complete=complete)

    def _close(self, *, complete: bool) -> None:
        if complete:  # half a character is invalid; at a cut the rest of it was only not generated
            self._show(self._decoder.decode(b"", final=True))
        if self._stops is not None:
            self._emit(self._stops.flush())
        if self._is(Kind.CALL, Kind.SERVER_CALL) and complete:
            self._calls += self._kind is Kind.CALL
            self._server_calls += self._kind is Kind.SERVER_CALL
            self._emit("{}" if self._empty else "")
        self._shut(complete=complete)

    def _shut(self, *, complete: bool) -> None:
        if self._opened:
            self._out.append(Closed(complete))
        self._kind, self._stops, self._opened = None, None, False


def _kind(header: Header, tool: str) -> Kind:
    """What a message of the assistant is (semantics B, "Meaning")."""
    if tool:
        return Kind.CALL
    return _CHANNEL_KINDS.get(header.channel, Kind.ANSWER)
