"""A turn in progress: its prompt, the model's output so far, the results of tools.

All of them are one conversation and one sequence of ids:

    prompt │ <|start|>assistant output │ result │ result │ <|start|>assistant output │ …

What the model generates up to the next result of a client's tool is one *output*. The results of
tools that the server runs are inside an output, which is stored and replayed as a whole
(`core.replay.Output`). The parser reads only what the model generates, so the position of an id in
the sequence is its number in the parser plus an offset, which changes with each result.

The names of `StreamingHarmonyContext` and its methods are those of vLLM's ``ConversationContext``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from vllm_mlx_harmony.core.deltas import (
    Closed,
    Delta,
    Finished,
    Kind,
    Opened,
    Started,
    Text,
    TokenLogprob,
)
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import EndReason, Parser
from vllm_mlx_harmony.core.render import Rendered, opening, render, render_messages
from vllm_mlx_harmony.core.replay import ASSISTANT_KINDS, Output, terminate
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


class StreamingHarmonyContext:
    """One turn, from its prompt to its last delta; ``info`` provides the ids of calls.

    ``renderer`` renders the turn. At any time the context represents exactly the conversation so
    far: ``messages`` as values, ``render_for_completion()`` as ids. Raises ``RequestError`` if the
    turn cannot be rendered.
    """

    def __init__(
        self, turn: Turn, info: ResponseInfo, renderer: Callable[[Turn], Rendered] = render
    ) -> None:
        rendered = renderer(turn)
        self.names: Names = rendered.names
        """The names with which the tools were rendered."""
        self._tenant = turn.tenant
        self._parser = Parser(
            rendered.names,
            turn.limits.stop,
            answering=turn.prefill is not None,
            one_call=turn.limits.one_call,
        )
        self._info = info
        self._turn, self._renderer = turn, renderer
        self._messages = list(turn.messages)
        self._open: Opened | None = None
        self._parts: list[str] = []
        self._prompt_tokens = len(rendered.ids)
        self._tool_tokens = 0  # ids of results of the server's tools within the turn
        # whether the ids end with a tool result, and so lack ``<|start|>assistant``
        self._has_results = False
        self._ended = 0  # the end of the last complete message of the output
        self._outputs: list[Output] = []
        self._begin_output([*rendered.ids])

    @property
    def done(self) -> bool:
        """Whether the output has ended, by a token or a stop string, and generation can stop."""
        return self._parser.done

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, including a message that is still being generated."""
        tail = [] if self._open is None else [self._open_message()]
        return (*self._messages, *tail)

    @property
    def server_call(self) -> ServerCall | None:
        """The call that the server has to run before the model continues, if there is one."""
        last = self._messages[-1] if self._messages and self._open is None else None
        return last if isinstance(last, ServerCall) and not self._cut else None

    @property
    def unanswered(self) -> tuple[ServerCall, ...]:
        """The calls that the server has to run and that have no result yet, in order."""
        messages = self._messages
        return tuple(
            call
            for call, next_ in zip(messages, (*messages[1:], None), strict=True)
            if isinstance(call, ServerCall) and not isinstance(next_, ServerResult)
        )

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The completed outputs, for a `Replay`: neither those that a stop string ended, whose ids
        contain that string, nor those that continue a prefill."""
        return tuple(self._outputs)

    def start(self, cached_tokens: int | None = None) -> list[Delta]:
        """The delta before generation; ``cached_tokens`` as in ``Started``."""
        return [Started(self._prompt_tokens, cached_tokens)]

    def append_output(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> list[Delta]:
        """Adds generated ``ids`` with their ``logprobs``, if those were requested, and returns
        their deltas. Ids after the end are ignored."""
        if self._has_results:
            self._begin_output([*self._ids, *opening()])
        was_done = self.done
        if logprobs:
            deltas = [delta for logprob in logprobs for delta in self._parser.feed_one(logprob)]
        else:
            deltas = self._parser.feed(ids)
        if not was_done:
            self._ids += ids
            if self._parser.done_at is not None:
                # Ids after the end do not belong to the conversation. The end may come before these
                # ids: where the model began to write as the user or as a tool.
                del self._ids[self._parser.done_at + self._offset :]
        return self._take_in(deltas)

    def append_tool_output(self, messages: Iterable[Result | ServerResult]) -> list[Delta]:
        """Adds results of calls of this conversation, after which the model continues.

        Results of tools that the server ran become part of the output. Results of calls in the
        history are inserted there, before anything is generated, and the prompt is rendered again.
        Returns the deltas that close the output. Raises ``RequestError`` if a result has no call in
        the conversation; the context does not change then.
        """
        results = list(messages)
        within = {call.id for call in self.unanswered if call is not self._messages[-1]}
        if earlier := [result for result in results if result.call_id in within]:
            self._insert(earlier)
            results = [result for result in results if result.call_id not in within]
        if not results:
            return []
        calls = {call.id: call.name for call in self.messages if isinstance(call, Call)}
        rendered = [
            render_messages([result], self.names, calls, self._tenant) for result in results
        ]
        served = all(isinstance(result, ServerResult) for result in results)
        deltas = [] if self._has_results else self._end_output()
        if not served:
            self._store_output()
        for ids in rendered:
            self._begins.append(len(self._ids))
            self._ids += ids
            self._tool_tokens += len(ids) if served else 0
        self._messages += results
        self._ended = len(self._ids)
        self._has_results = True
        return deltas

    def render_for_completion(self) -> tuple[int, ...]:
        """The ids to generate from: the prompt, the output as it was generated, and results."""
        return (*self._ids, *opening()) if self._has_results else tuple(self._ids)

    def finish(self, reason: EndReason, cached_tokens: int = 0) -> list[Delta]:
        """The deltas that end the turn. ``Finished`` has the usage of the whole turn.

        ``cached_tokens`` of the prompt were cached, not computed again.
        """
        if not self._has_results:
            self._ended = self._place(self._parser.ended_at)
        *deltas, finished = self._take_in(self._parser.close(reason))
        assert isinstance(finished, Finished)
        if not finished.stop_sequence:
            self._store_output()
        usage = replace(
            finished.usage,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=cached_tokens,
            tool_tokens=self._tool_tokens,
        )
        return [*deltas, replace(finished, usage=usage)]

    def _insert(self, results: Sequence[Result | ServerResult]) -> None:
        """Inserts ``results`` after their calls in the history."""
        by_call = {result.call_id: result for result in results}
        waiting = {call.id: call for call in self.unanswered}  # the last one with each id
        messages: list[Message] = []
        for message in self._messages:
            messages.append(message)
            if isinstance(message, ServerCall) and message is waiting.get(message.id):
                messages += [by_call[message.id]] if message.id in by_call else []
        self._turn = replace(self._turn, messages=tuple(messages))
        ids = self._renderer(self._turn).ids
        self._messages = messages
        self._tool_tokens += len(ids) - len(self._ids)
        self._has_results = False
        self._begin_output([*ids])

    def _begin_output(self, ids: list[int]) -> None:
        """Starts the next output after ``ids``, or continues the current one if they end with a
        server tool's result."""
        lead = opening()
        begins = ids[-len(lead) :] == lead  # with a prefill, it continues a message
        self._ids = ids
        self._start = len(ids) - (len(lead) if begins else 0)  # the position of <|start|>assistant
        self._offset = len(ids) - self._parser.tokens
        last = self._messages[-1] if self._messages else None
        if not (self._has_results and isinstance(last, ServerResult)):
            self._output_at, self._messages_before = self._start, len(self._messages)
            self._begins: list[int] = []  # the positions of the output's messages
            self._cut = False  # whether the last of them was cut
            # These ids continue a message, or a turn of the history. They cannot be replayed on
            # their own.
            self._stored = not begins or type(last) in ASSISTANT_KINDS
        self._has_results = False

    def _end_output(self) -> list[Delta]:
        """Closes the output: as deltas, and with the terminator it has in a history."""
        last = self.server_call if self._open is None else self._open_message()
        self._ended = self._place(self._parser.ended_at)  # before the open message is closed
        deltas = self._take_in(self._parser.resume())
        if self._ids[self._start :] == opening():
            # Nothing was generated: the call is in the history, and its result goes there, too.
            del self._ids[self._start :]
            self._stored = True
        else:
            called = isinstance(last, (Call, ServerCall))
            # Replaces the last id with its terminator, or appends one.
            self._ids[-1:] = terminate(self._ids[-1:], called=called)
        return deltas

    def _place(self, read: int) -> int:
        """The position where a message begins or ends, after ``read`` ids of the parser.

        The first message begins with the ``<|start|>assistant`` before them.
        """
        at = read + self._offset
        return self._start if at == self._start + len(opening()) else at

    def _store_output(self) -> None:
        """Adds the output to ``outputs``, unless that was done before or it cannot be placed."""
        messages = tuple(self._messages[self._messages_before :])
        if messages and not self._stored:
            before = tuple(self._messages[: self._messages_before])
            ids, at = tuple(self._ids[self._output_at :]), self._output_at
            begins = tuple(begin - at for begin in self._begins)
            self._outputs.append(Output(before, messages, ids, begins, self._ended - at))
        self._stored = True

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
        assert self._open is not None
        opened, text = self._open, "".join(self._parts)
        if opened.kind in _MESSAGE_OF:
            return _MESSAGE_OF[opened.kind](text)
        call = Call if opened.kind is Kind.CALL else ServerCall
        return call(self._info.call_id(opened.index), opened.name, text)
