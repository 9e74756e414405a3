"""Parses token ids into deltas: the Harmony state machine (semantics B).

It never raises, whatever the ids, and its memory does not grow with the output.

The format: https://cookbook.openai.com/articles/openai-harmony. On output that follows it, this
parser agrees with ``StreamableParser`` of https://github.com/openai/harmony, which a differential
test checks. On other output ``StreamableParser`` raises, which a server cannot afford.

A message is a header, ``<|message|>``, a body and a terminator. The parser is in one of these
**states**, and control tokens lead from one to another. As in h11
(https://github.com/python-hyper/h11/blob/master/h11/_state.py), where a token leads is a table,
`TRANSITIONS`, and its effects are code, `Parser._control`:

    HEADER ──<|message|>──▶ BODY ──<|end|>──▶ HEADER … ──<|return|>──▶ ENDED
                             └────<|call|>──▶ CALLED ──<|start|>──▶ HEADER   (a transcript)

Four transitions are triggered by text instead, and are made where that text is read: a header with
so much loose text that it must be the message (to ``BODY``), an author other than the assistant
(``RESULT`` in a transcript, else ``ENDED``), a stop string, and the call that ends the turn
(``ENDED``).

**Positions** count ids. The numbers below this output are those counts:

    <|channel|> final <|message|> Hi <|end|> <|start|> user <|message|> No
         1        2        3       4     5       6       7       8

- `tokens`: the number of ids that were read. It stops at 7, where the turn ends.
- ``_began``: the number of ids before the current header: 0, then 5. ``Opened.at`` is the number of
  ids before the header of a visible message.
- `ended_at`: the number of ids up to the end of the last complete message: 0, then 5.
- `done_at`: the number of ids of the turn, once it has ended: 5.

Reasoning budgets (`core.reasoning`) and coloured output (`cli.paint`) use this parser, too.

Three things complicate the picture.

**A header may lack its ``<|message|>``.** At ``<|return|>``, ``<|call|>`` and the end of the
output, its loose text is the message: the model forgot the header. At ``<|end|>`` it is more often
a header that the model abandoned (`<|channel|>commentary?commentary?<|end|>`) before it started
over. So that text is held back. At the end of the output it becomes the answer, if there was no
content or call before it and nothing visible after it. Only the last such text is held, and it is
no longer than a header can be (`LOOSE_LIMIT`).

**The model may write as another author.** After ``<|start|>`` it can write `user` or a tool's name,
and continue in that role. The turn ends before that ``<|start|>``: `done_at` is then less than the
number of generated ids, and the ids after it are not part of the conversation. In a transcript,
where ids follow a ``<|call|>``, tools really have answered; their messages are skipped
(``RESULT``).

**The same ids give the same deltas and the same usage, however they are split.** The bytes of a
body are decoded once per feed. With stop strings they are decoded id by id: otherwise the ids after
a stop string in the same feed would be counted. Ids after the end of a turn are neither read nor
counted.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque
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
    TextLogprob,
    TokenLogprob,
    Usage,
)
from vllm_mlx_harmony.core.header import Header, HeaderReader
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.stops import StopStrings

EndReason: TypeAlias = Literal["stop", "length", "pause"]
"""Why the output ended: the model ended its turn, a limit cut it, or a call awaits the server."""


class State(Enum):
    """The parser's state between two ids."""

    HEADER = auto()
    BODY = auto()
    CALLED = auto()  # after <|call|>; only a transcript continues, with <|start|>
    RESULT = auto()  # in a message of a tool, or of any other author, in a transcript
    ENDED = auto()  # after <|return|>, a stop string, the call that ends the turn, another role


_ENDS = {
    vocab.CALL: State.CALLED,
    vocab.RETURN: State.ENDED,
    vocab.ENDOFTEXT: State.ENDED,
}

TRANSITIONS: dict[State, dict[int, State]] = {
    State.HEADER: {vocab.MESSAGE: State.BODY, **_ENDS},
    State.BODY: {
        vocab.START: State.HEADER,
        vocab.CHANNEL: State.HEADER,
        vocab.END: State.HEADER,
        **_ENDS,
    },
    State.CALLED: {**_ENDS, vocab.START: State.HEADER},
    State.RESULT: {vocab.START: State.HEADER, vocab.END: State.HEADER, **_ENDS},
    State.ENDED: {},
}
"""The state that each control token leads to. Any other token changes nothing: reserved ones, ids
out of range, and those with a meaning in other states only."""

_CONTENT = (Kind.PREAMBLE, Kind.ANSWER)
_CALLS = (Kind.CALL, Kind.SERVER_CALL)
_CHANNEL_KINDS = {"analysis": Kind.REASONING, "commentary": Kind.PREAMBLE}
# A global: looking up an Enum member is slow, and this runs for every id.
_ENDED: State = State.ENDED
_Decoder = getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class _Loose:
    """Text that no ``<|message|>`` precedes. ``ids`` is its length in ids, and ``began`` the number
    of ids before its header."""

    header: Header
    text: str
    ids: int
    began: int
    logprobs: tuple[tuple[float, TokenLogprob], ...]


def _as_text(logprob: TokenLogprob) -> TextLogprob:
    def shown(token: int, score: float, top: tuple[TextLogprob, ...] = ()) -> TextLogprob:
        content = None if token in vocab.CONTROL else vocab.token_bytes(token)
        return TextLogprob(vocab.token_text(token), content, score, top)

    top = tuple(shown(token, score) for token, score in logprob.top)
    return shown(logprob.token, logprob.logprob, top)


class Parser:
    """Reads what a model generated after ``<|start|>assistant``.

    ``names`` maps recipients back to the tools of the request; ``stop`` are the caller's stop
    strings; ``answering``: the prompt contains the beginning of the answer; ``one_call`` ends the
    turn with its first call; a ``transcript`` contains messages of all authors, as a prompt does,
    and continues after the end of a turn. Feed ids in chunks of any size, then close: the deltas do
    not depend on the chunks, except for how ``Text`` is split.
    """

    def __init__(
        self,
        names: Names | None = None,
        stop: Sequence[str] = (),
        *,
        answering: bool = False,
        one_call: bool = False,
        transcript: bool = False,
    ) -> None:
        self.state = State.HEADER
        self.author = "assistant"
        """The author in the state ``RESULT``, or the one whose message ended the turn."""
        self.tokens = 0
        """The number of ids that were read: all that were fed, up to the end of the turn."""
        self.done_at: int | None = None
        """The number of ids that belong to the turn; ``None`` until it ends."""
        self.ended_at = 0
        """The number of ids up to the end of the last complete message."""
        self.reading: Kind | None = None
        """The kind of the message whose body is being read; ``None`` in a header."""
        self._began = 0  # the number of ids before the header that is being read
        self._names = names or Names()
        self._stop_strings = tuple(stop)
        self._stopped_by: str | None = None
        self._one_call = one_call
        self._transcript = transcript
        self._index = 0
        self._has_called = False  # whether a call of the client's tools is complete
        self._waiting: _Loose | None = None  # the answer, unless something visible follows
        self._answered = False  # content or a call has been visible
        self.reasoning_tokens = 0
        """The number of ids in bodies of reasoning so far."""
        self._call_tokens = 0  # the number in bodies of calls
        self._out: list[Delta] = []
        self._pending: list[bytes] = []
        self._logprobs: deque[tuple[float, TokenLogprob]] = deque()
        """The log probabilities of ids not shown yet, each with the number of characters decoded
        before it. A character of which only some bytes came before counts as half."""
        self._begin_header(after_start=False)
        if answering:
            self.state = State.BODY
            self._begin_body(Header(channel="final"))

    @property
    def done(self) -> bool:
        """Whether the turn has ended, so that generation can stop."""
        return self.done_at is not None

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        """Parses ``ids``, and returns their deltas. Ids after the end of the turn are ignored."""
        if self.state is _ENDED:
            return []
        for token in ids:
            self.tokens += 1
            if not 0 <= token < vocab.STARTOFTEXT:
                self._flush()
                self._control(token)
            elif self.state is State.BODY:
                self._pending.append(vocab.token_bytes(token))
                if self._finder is None:
                    continue
                self._flush()
            elif self.state is State.HEADER:
                text = self._decoder.decode(vocab.token_bytes(token))
                self._decoded += len(text)
                self._header.text(text)
                if self._header.author != "assistant":
                    self._another_speaks(self._header.author)
                elif self._header.too_loose:
                    self.state = State.BODY  # before its text, as a stop string there ends the turn
                    self._show_loose(self._loose())
            if self.state is _ENDED:
                break
        self._flush()
        return self._take()

    def feed_one(self, logprob: TokenLogprob) -> list[Delta]:
        """Like ``feed`` for one id; attaches its log probability if its text is content."""
        is_text, in_header = 0 <= logprob.token < vocab.STARTOFTEXT, self.state is State.HEADER
        if is_text and (in_header or self.reading in _CONTENT):
            # The id before loose text may contain the first bytes of its first character.
            while in_header and len(self._logprobs) > self._header.loose_ids + 1:
                self._logprobs.popleft()
            incomplete, _ = self._decoder.getstate()
            self._logprobs.append((self._decoded + bool(incomplete) / 2, logprob))
        return self.feed((logprob.token,))

    def resume(self) -> list[Delta]:
        """Begins another output of the same turn, after another ``<|start|>assistant``, and returns
        the deltas that close the previous one."""
        self._end_output(complete=True)
        self.state, self.done_at = State.HEADER, None
        self._waiting, self._answered = None, False
        self.ended_at = self.tokens
        self._begin_header(after_start=False)
        return self._take()

    def close(self, reason: EndReason) -> list[Delta]:
        """The deltas that end the turn; the last is ``Finished`` (without prompt tokens).

        ``length`` cuts the open message, unless the model had ended the turn itself. ``pause``: the
        turn ended in a call that the server has not run.
        """
        cut = reason == "length" and self.state in (State.HEADER, State.BODY)
        self._end_output(complete=not cut)
        if self._waiting is not None:
            self._begin_header(after_start=False)
            if self._waiting.text or not cut:
                self._show_loose(self._waiting)
            # The model gave up that header, and was cut before it wrote what it meant.
            self._finish_body(complete=not (cut and self.reading in _CALLS))
        self.state = State.ENDED
        cut = cut and self._stopped_by is None
        ended: FinishReason = "tool_calls" if self._has_called else "stop"
        if cut or reason == "pause":
            ended = reason
        usage = Usage(
            completion_tokens=self.tokens,
            reasoning_tokens=self.reasoning_tokens,
            call_tokens=self._call_tokens,
        )
        self._out.append(Finished(ended, self._stopped_by, usage))
        return self._take()

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    # Control tokens

    def _control(self, token: int) -> None:  # noqa: C901, PLR0912 - one case per transition
        if self.state is State.HEADER:
            self._header.gap()
            if self._header.author != "assistant":
                self._another_speaks(self._header.author)
        before = self.state
        self.state = TRANSITIONS[before].get(token, before)
        begins = self.state is State.HEADER and token in (vocab.START, vocab.CHANNEL)
        match before, token:
            case State.HEADER, vocab.CONSTRAIN:
                self._header.constrain()
            case State.HEADER, vocab.MESSAGE:
                self._decoder.reset()
                header = self._header.header()
                if header.role == "assistant":
                    self._begin_body(header)
                else:  # without <|start|>, only <|message|> shows that it is a role
                    self._another_speaks(header.role)
            case State.HEADER, vocab.END:
                loose = self._loose()
                if (loose.text or loose.header.recipient) and not self._answered:
                    self._waiting = loose
                self._end_message()
            case State.HEADER, vocab.CALL | vocab.RETURN | vocab.ENDOFTEXT:
                self._show_loose(self._loose())
                self._end_message()
            case State.BODY, _ if self.state is not before:
                self._end_message()
            case State.RESULT, vocab.END:
                self._end_message()
        if begins:
            if token == vocab.START:
                self._begin_header(after_start=True)
            else:
                self._header.channel()
            # The id that ended a body is the first of the next header.
            self._began = min(self._began, self.tokens - 1)
            self.ended_at = min(self.ended_at, self._began)
        if self.state in (State.CALLED, State.ENDED):
            self._end_turn(self.ended_at)
        if self._transcript and self.state is State.ENDED:
            self.state = State.CALLED  # a transcript continues after every end, with <|start|>

    def _end_turn(self, at: int) -> None:
        """Ends the turn, unless it had ended before: a transcript continues after its end."""
        if self.done_at is None:
            self.done_at = at

    def _another_speaks(self, author: str) -> None:
        self.author = author
        if self._transcript or (author == "tool" and self.done):
            self.state = State.RESULT
        else:
            self.state = State.ENDED
            self._end_turn(self.ended_at)

    def _end_message(self) -> None:
        self._finish_body(complete=True)
        self._begin_header(after_start=False)
        self.ended_at = self.tokens

    # Headers

    def _begin_header(self, *, after_start: bool) -> None:
        self._header = HeaderReader(after_start=after_start, is_tool=self._names.is_tool)
        self._began = self.tokens - after_start
        self._decoder = _Decoder("replace")
        self.reading = None
        self._finder: StopStrings | None = None
        self._opened = False
        self._decoded = self._shown = 0  # characters of the header, then of the body
        self._logprobs.clear()

    def _loose(self, *, cut: bool = False) -> _Loose:
        """The loose text of the header, when no ``<|message|>`` ended it."""
        header, text = self._header.abandoned(cut=cut)
        before = self._decoded - len(text)  # the text ends the header
        logprobs = [(at - before, logprob) for at, logprob in self._logprobs]
        while len(logprobs) > 1 and logprobs[1][0] <= 0:
            del logprobs[0]
        return _Loose(header, text, self._header.loose_ids, self._began, tuple(logprobs))

    def _show_loose(self, loose: _Loose) -> None:
        """Shows loose text as a body. A recipient makes it a call, even without text."""
        if loose.text or loose.header.recipient:
            self._began = loose.began
            self._begin_body(loose.header, loose.logprobs)
            self._count(loose.ids)
            self._show(loose.text)

    # Bodies

    def _begin_body(
        self, header: Header, logprobs: Iterable[tuple[float, TokenLogprob]] = ()
    ) -> None:
        self.reading = _CHANNEL_KINDS.get(header.channel, Kind.ANSWER)
        if tool := self._names.addressee(header.recipient):
            is_server_tool = self._names.is_server_tool(header.recipient)
            self.reading = Kind.SERVER_CALL if is_server_tool else Kind.CALL
            self._open(self.reading, tool)
        elif self._stop_strings and self.reading in _CONTENT:
            self._finder = StopStrings(self._stop_strings)
        self._decoded = 0
        self._logprobs = deque(logprobs if self.reading in _CONTENT else ())

    def _flush(self) -> None:
        """Decodes all bytes of the body in this feed at once."""
        if self._pending:
            self._count(len(self._pending))
            text = self._decoder.decode(b"".join(self._pending))
            self._pending.clear()
            self._show(text)

    def _count(self, ids: int) -> None:
        if self.reading is Kind.REASONING:
            self.reasoning_tokens += ids
        elif self.reading in _CALLS:
            self._call_tokens += ids

    def _show(self, text: str) -> None:
        self._decoded += len(text)
        if self._finder is None:
            self._emit(text)
            return
        shown, self._stopped_by = self._finder.feed(text)
        self._emit(shown)
        if self._stopped_by is not None:
            self._emit_closed(complete=True)
            self.state = State.ENDED
            self._end_turn(self.tokens)

    def _emit(self, text: str) -> None:
        if self.reading is None or not text:
            return
        if not self._opened:
            self._open(self.reading)
        self._shown += len(text)
        logprobs: tuple[TextLogprob, ...] = ()
        while self._logprobs and self._logprobs[0][0] < self._shown:
            logprobs += (_as_text(self._logprobs.popleft()[1]),)
        self._out.append(Text(text, logprobs))

    def _open(self, kind: Kind, name: str = "") -> None:
        self._out.append(Opened(self._index, kind, name, self._began))
        self._index += 1
        self._opened = True
        self._waiting = None
        self._answered = self._answered or kind is not Kind.REASONING

    def _end_output(self, *, complete: bool) -> None:
        """Closes what was being read when the output ended."""
        if self.state is State.HEADER and (loose := self._loose(cut=not complete)).text:
            self._show_loose(loose)
        self._finish_body(complete=complete)

    def _finish_body(self, *, complete: bool) -> None:
        if complete:  # half a character is invalid, unless the output was cut there
            self._show(self._decoder.decode(b"", final=True))
        if self._finder is not None:
            self._emit(self._finder.flush())
        if complete and self.reading in _CALLS:
            self._has_called = self._has_called or self.reading is Kind.CALL
            self._emit("" if self._shown else "{}")
            if self._one_call or self.reading is Kind.SERVER_CALL:
                self.state = State.ENDED  # the server runs its call before the model continues
        self._emit_closed(complete=complete)

    def _emit_closed(self, *, complete: bool) -> None:
        if self._opened:
            self._out.append(Closed(complete))
        self.reading, self._finder, self._opened = None, None, False
