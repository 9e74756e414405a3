"""A turn in progress: its prompt, what the model said so far, what tools answered.

Knows that prompt, output and tool results are one conversation and one sequence of ids.
Refuses to know engines and APIs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

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


class StreamingHarmonyContext:
    """One turn, from its prompt to its last delta; ``info`` gives its calls their ids.

    ``renderer`` turns the request into ids. What the context holds is at every moment exactly the
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
        self._ids = list(rendered.ids)
        self._messages = list(turn.messages)
        self._open: Opened | None = None
        self._parts: list[str] = []
        self._prompt_tokens = len(rendered.ids)
        self._has_results = False  # the last ids are a tool's; no <|start|>assistant behind them
        self._goes_on = False  # that tool ran on the server: its answer is within this output
        self._tool_tokens = 0
        self._outputs: list[Output] = []
        self._begin_output()

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
            self._ids, self._has_results = [*self.render_for_completion()], False
            if self._goes_on:  # behind what the server ran: in the same output
                self._output_at = len(self._ids)
                self._read_before = self._parser.tokens
            else:
                self._begin_output()
        goes_on = not self.done
        deltas = self._parser.feed(ids)
        if goes_on:
            self._ids.extend(ids)
        if goes_on and self._parser.done_at is not None:
            # What follows the end was never part of the conversation; the end may stand further
            # back than these ids, where the model began to speak for the user or a tool.
            del self._ids[self._output_at + self._parser.done_at - self._read_before :]
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
        goes_on = all(isinstance(each, ServerResult) for each in results)
        deltas = [] if self._has_results else self._end_output()
        if not goes_on:
            self._keep_output()
        for result, ids in zip(results, rendered, strict=True):
            if goes_on:
                self._begins.append(len(self._ids) - self._started_at)
                self._tool_tokens += len(ids)
            self._ids.extend(ids)
            self._messages.append(result)
        self._ended_at = len(self._ids) - self._started_at
        self._has_results, self._goes_on = True, goes_on
        return deltas

    def render_for_completion(self) -> tuple[int, ...]:
        """The ids to generate from: what was prompted and generated, as it was, and the results."""
        return (*self._ids, *opening()) if self._has_results else tuple(self._ids)

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
        ids = list(self._renderer(self._turn).ids)
        self._tool_tokens += len(ids) - len(self._ids)
        self._ids, self._messages = ids, messages
        self._begin_output()

    def _end_output(self) -> list[Delta]:
        """Closes the output on both sides: as deltas, and with a terminator that a history has."""
        called = self.server_call is not None
        called |= self._open is not None and self._open.kind in _CALLS
        if len(self._ids) == self._output_at and self._ids[-len(opening()) :] == opening():
            # Nothing was generated: the call stands in the history, and so does what follows it.
            del self._ids[-len(opening()) :]
            self._started_at = len(self._ids)
        elif self._ids[-1] in vocab.LAST:
            self._ids[-1] = vocab.END
        elif self._ids[-1] not in (vocab.END, vocab.CALL):
            self._ids.append(vocab.CALL if called else vocab.END)
        self._note_end()
        return self._take_in(self._parser.resume())

    def _begin_output(self) -> None:
        """Sets all that is counted of one output; nothing of it has been generated yet."""
        # Places in `_ids`: where what the model generates begins, each time anew behind what the
        # server ran; and where the whole output does, with the <|start|>assistant in front of it.
        self._output_at = len(self._ids)
        self._started_at = max(self._output_at - len(opening()), 0)
        # Counted from `_started_at`: where each message begins, and up to where they have ended.
        self._begins: list[int] = []
        self._ended_at = self._output_at - self._started_at
        # What `_output_at` is in the parser's count, which has neither prompt nor results.
        self._read_before = self._parser.tokens
        # How many of `_messages` stand before the output.
        self._messages_before = len(self._messages)
        # Whether its last message was cut, and whether it is in `_outputs` already.
        self._cut = self._kept = False

    def _place(self, generated: int) -> int:
        """Where in the output the id stands that comes behind ``generated`` ids.

        Directly behind a result that is the ``<|start|>assistant`` in front of it.
        """
        place = self._output_at - self._started_at + generated - self._read_before
        return place - len(opening()) if self._begins and generated == self._read_before else place

    def _note_end(self) -> None:
        """Notes up to where messages have ended, as long as what is open has not been closed."""
        if not self._has_results:
            self._ended_at = self._place(self._parser.ended_at)

    def _keep_output(self) -> None:
        """The output as it can be placed again, once."""
        if self._kept:
            return
        self._kept = True
        ids = self._ids[self._started_at :]
        before = self._messages_before
        said = tuple(self._messages[:before]), tuple(self._messages[before:])
        # What continues a turn of the history cannot be placed without the rest of it.
        continues = bool(said[0]) and type(said[0][-1]) in ASSISTANT_KINDS
        if ids[: len(opening())] == opening() and said[1] and not continues:
            self._outputs.append(Output(*said, tuple(ids), tuple(self._begins), self._ended_at))

    def _take_in(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            if isinstance(delta, Text):
                self._parts.append(delta.text)
            elif isinstance(delta, Opened):
                self._open, self._parts = delta, []
                self._begins.append(self._place(delta.at))
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
