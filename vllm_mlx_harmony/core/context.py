"""A turn in progress: its prompt, the model's output so far, the results of tools.

All of them are one conversation and one sequence of ids, which is a list of *segments*:

    prompt │ <|start|>assistant output │ result │ result │ <|start|>assistant output │ …

An output and all that follows it up to a result of the client's tools is one *span* of segments:
results of tools that the server ran stand within it, and it is remembered and placed again as a
whole (`core.replay`). Positions are counted from the beginning of a segment, and become positions
in the span, or in the conversation, as sums of lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Closed, Delta, Finished, Kind, Opened, Started, Text
from vllm_mlx_harmony.core.header import Header
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import EndReason, Parser
from vllm_mlx_harmony.core.render import Rendered, opening, render, render_messages
from vllm_mlx_harmony.core.replay import ASSISTANT_KINDS, Output
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    Message,
    Preamble,
    Reasoning,
    ResponseInfo,
    Result,
    ServerCall,
    ServerResult,
    Turn,
)

_MESSAGE_OF: dict[Kind, Callable[[str], Message]] = {
    Kind.REASONING: Reasoning,
    Kind.PREAMBLE: Preamble,
    Kind.ANSWER: Answer,
}

_CALLS: dict[Kind, type[Call] | type[ServerCall]] = {
    Kind.CALL: Call,
    Kind.SERVER_CALL: ServerCall,
}


@dataclass(slots=True)
class _Segment:
    """Ids of the prompt, or of a tool's result, which the server (``served``) or the client ran.

    ``begins`` are the positions of its messages, ``ended`` is the end of the last complete one.
    """

    ids: list[int]
    begins: list[int] = field(default_factory=list)
    ended: int = 0
    served: bool = False


@dataclass(slots=True)
class _Generated(_Segment):
    """What the model generated in one go, behind the ``opening`` ids of ``<|start|>assistant``;
    the parser had read ``read_before`` ids before these."""

    opening: int = 0
    read_before: int = 0

    def place(self, read: int) -> int:
        """The position behind the first ``read`` ids of the parser."""
        return self.opening + max(read - self.read_before, 0)


class StreamingHarmonyContext:
    """One turn, from its prompt to its last delta; ``info`` gives its calls their ids.

    ``renderer`` turns the request into ids. At every moment the context has exactly the
    conversation: ``messages`` as values, ``render_for_completion()`` as ids.
    Raises ``RequestError`` when the turn cannot be rendered.
    """

    def __init__(
        self, turn: Turn, info: ResponseInfo, renderer: Callable[[Turn], Rendered] = render
    ) -> None:
        rendered = renderer(turn)
        within = Header(channel="final") if turn.prefill is not None else None
        self._names = rendered.names
        self._tenant = turn.tenant
        limits = turn.limits
        self._parser = Parser(rendered.names, limits.stop, within, one_call=limits.one_call)
        self._info = info
        self._turn, self._renderer = turn, renderer
        self._messages = list(turn.messages)
        self._open: Opened | None = None
        self._parts: list[str] = []
        self._cut = False  # the last message of the output
        self._prompt_tokens = len(rendered.ids)
        self._inserted = 0  # ids of results within the history
        self._outputs: list[Output] = []
        self._segments: list[_Segment] = []
        self._begin_conversation(rendered.ids)

    @property
    def names(self) -> Names:
        """The names that its tools were rendered with."""
        return self._names

    @property
    def done(self) -> bool:
        """Whether the model ended its output, by a token or a stop string: generate no more."""
        return self._parser.done

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far; a message that is still being generated is its last."""
        tail = [] if self._open is None else [self._open_message()]
        return (*self._messages, *tail)

    @property
    def server_call(self) -> ServerCall | None:
        """The call that the server has to answer before the model goes on, if there is one."""
        last = self._messages[-1] if self._messages and self._open is None else None
        return last if isinstance(last, ServerCall) and not self._cut else None

    @property
    def unanswered(self) -> tuple[ServerCall, ...]:
        """The calls of tools that the server runs which have no result, in order."""
        messages = self._messages
        return tuple(
            call
            for call, next_ in zip(messages, (*messages[1:], None), strict=True)
            if isinstance(call, ServerCall) and not isinstance(next_, ServerResult)
        )

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What the model generated and has ended, as it can be placed again: for a `Replay`.

        Without an output that a stop string ended (its ids have the string), and one that a prefill
        began.
        """
        return tuple(self._outputs)

    def start(self, cached_tokens: int | None = None) -> list[Delta]:
        """The turn is about to be generated; ``cached_tokens`` as in ``Started``."""
        return [Started(self._prompt_tokens, cached_tokens)]

    def append_output(self, ids: Sequence[int]) -> list[Delta]:
        """What the model generated next: any number of ids, none and ids after the end included."""
        if self._has_results:
            self._begin_output(opening())
        going_on = not self.done
        deltas = self._parser.feed(ids)
        if going_on:
            self._generated.ids.extend(ids)
            if self._parser.done_at is not None:
                # What follows the end was never part of the conversation; the end may stand further
                # back than these ids, where the model began to speak for the user or a tool.
                del self._generated.ids[self._generated.place(self._parser.done_at) :]
        return self._take_in(deltas)

    def append_tool_output(self, messages: Iterable[Result | ServerResult]) -> list[Delta]:
        """What tools answered to calls of this conversation: the model goes on behind it.

        What the server ran stays within the model's output, which is kept as a whole. Results of
        calls within the history go there, before anything is generated: the prompt is rendered
        again, once for all of them. Returns the deltas of what closes by that. Raises
        ``RequestError`` when a result answers no call of the conversation; nothing has changed
        then.
        """
        results = list(messages)
        within = {call.id for call in self.unanswered if call is not self._messages[-1]}
        if earlier := [each for each in results if each.call_id in within]:
            self._insert(earlier)
            results = [each for each in results if each.call_id not in within]
            if not results:
                return []
        calls = {call.id: call.name for call in self.messages if isinstance(call, Call)}
        rendered = [render_messages([each], self._names, calls, self._tenant) for each in results]
        served = all(isinstance(each, ServerResult) for each in results)
        deltas = [] if self._has_results else self._end_output()
        if not served:
            self._keep_output()
        for result, ids in zip(results, rendered, strict=True):
            begins = [0] if served else []
            self._segments.append(_Segment([*ids], begins, len(ids), served))
            self._messages.append(result)
        return deltas

    def render_for_completion(self) -> tuple[int, ...]:
        """The ids to generate from: what was prompted and generated, as it was, and the results."""
        ids = chain.from_iterable(each.ids for each in self._segments)
        return (*ids, *opening()) if self._has_results else tuple(ids)

    def finish(self, reason: EndReason, cached_tokens: int = 0) -> list[Delta]:
        """The deltas that end the turn; ``Finished`` carries the usage of all of it.

        ``cached_tokens`` of the prompt needed no prefill.
        """
        self._note_end()
        deltas = self._take_in(self._parser.close(reason))
        if not any(isinstance(each, Finished) and each.stop_sequence for each in deltas):
            self._keep_output()
        counted = {
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": cached_tokens,
            "tool_tokens": self._tool_tokens,
        }
        return [
            replace(delta, usage=replace(delta.usage, **counted))
            if isinstance(delta, Finished)
            else delta
            for delta in deltas
        ]

    def _insert(self, results: Sequence[Result | ServerResult]) -> None:
        """Puts ``results`` behind their calls in the history: the model reads them there."""
        by_call = {result.call_id: result for result in results}
        waiting = {call.id: call for call in self.unanswered}  # the last one of each id
        messages: list[Message] = []
        for message in self._messages:
            messages.append(message)
            if isinstance(message, ServerCall) and message is waiting.get(message.id):
                messages += [by_call[message.id]] if message.id in by_call else []
        self._turn = replace(self._turn, messages=tuple(messages))
        ids = self._renderer(self._turn).ids
        self._inserted = (
            self._tool_tokens + len(ids) - sum(len(each.ids) for each in self._segments)
        )
        self._messages = messages
        self._begin_conversation(ids)

    @property
    def _has_results(self) -> bool:
        """Whether the last ids are a tool's: no ``<|start|>assistant`` follows them yet."""
        return self._segments[-1] is not self._generated

    @property
    def _tool_tokens(self) -> int:
        """Ids of what tools of the server's answered within the turn."""
        return self._inserted + sum(len(each.ids) for each in self._segments if each.served)

    def _begin_conversation(self, prompt: Sequence[int]) -> None:
        """Nothing has been generated: ``prompt`` ends where the model goes on."""
        # With a prefill the output begins within a message.
        lead = opening() if [*prompt[-len(opening()) :]] == opening() else []
        self._segments = [_Segment([*prompt[: len(prompt) - len(lead)]])]
        self._begin_output(lead)

    def _begin_output(self, lead: list[int]) -> None:
        """The model goes on behind ``lead``, in the same span behind what the server ran."""
        if not self._segments[-1].served:
            self._span_at = len(self._segments)
            self._messages_before = len(self._messages)
            self._cut = self._kept = False
        self._generated = _Generated([*lead], opening=len(lead), read_before=self._parser.tokens)
        self._segments.append(self._generated)

    def _end_output(self) -> list[Delta]:
        """Closes the output on both sides: as deltas, and with a terminator that a history has."""
        called = self.server_call is not None
        called |= self._open is not None and self._open.kind in _CALLS
        ids, lead = self._generated.ids, self._generated.opening
        if lead and len(ids) == lead:
            # Nothing was generated: the call stands in the history, and so does what follows it.
            self._segments.pop()
            self._span_at = len(self._segments)
        elif ids and ids[-1] in vocab.LAST:
            ids[-1] = vocab.END
        elif not ids or ids[-1] not in (vocab.END, vocab.CALL):
            ids.append(vocab.CALL if called else vocab.END)
        self._note_end()
        return self._take_in(self._parser.resume())

    def _note_end(self) -> None:
        """Notes up to where messages have ended, as long as what is open has not been closed."""
        if not self._has_results:
            self._generated.ended = self._place(self._parser.ended_at)

    def _place(self, read: int) -> int:
        """Where in its output the message begins or ends that the parser has ``read`` ids before.

        Directly behind a result that is the ``<|start|>assistant`` in front of it.
        """
        follows = any(each.begins for each in self._segments[self._span_at :])
        at_start = follows and read == self._generated.read_before
        return 0 if at_start else self._generated.place(read)

    def _keep_output(self) -> None:
        """The output as it can be placed again, once."""
        if self._kept:
            return
        self._kept = True
        span = self._segments[self._span_at :]
        ids = [*chain.from_iterable(each.ids for each in span)]
        before = tuple(self._messages[: self._messages_before])
        messages = tuple(self._messages[self._messages_before :])
        # What continues a turn of the history cannot be placed without the rest of it.
        continues = bool(before) and type(before[-1]) in ASSISTANT_KINDS
        placeable = bool(span) and isinstance(span[0], _Generated) and span[0].opening > 0
        if placeable and messages and not continues:
            ends = [*accumulate(len(each.ids) for each in span)]
            starts = [0, *ends[:-1]]
            begins = (
                start + at for start, each in zip(starts, span, strict=True) for at in each.begins
            )
            ended = starts[-1] + span[-1].ended
            self._outputs.append(Output(before, messages, tuple(ids), tuple(begins), ended))

    def _take_in(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            if isinstance(delta, Text):
                self._parts.append(delta.text)
            elif isinstance(delta, Opened):
                self._open, self._parts = delta, []
                self._generated.begins.append(self._place(delta.at))
            elif isinstance(delta, Closed):
                self._messages.append(self._open_message())
                self._open, self._cut = None, not delta.complete
        return deltas

    def _open_message(self) -> Message:
        """The message that is open, as far as it goes."""
        assert self._open is not None
        text = "".join(self._parts)
        if self._open.kind in _CALLS:
            key = self._info.call_id(self._open.index)
            return _CALLS[self._open.kind](key, self._open.name, text)
        return _MESSAGE_OF[self._open.kind](text)
