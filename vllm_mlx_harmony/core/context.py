"""A turn in progress: its prompt, the model's output so far, the results of tools.

All of them are one conversation and one sequence of ids, which is a list of *segments*:

    prompt │ <|start|>assistant output │ result │ result │ <|start|>assistant output │ …

What the model generates up to the next result of a client's tool is one *output*. The results of
tools that the server runs are inside an output, which is stored and replayed as a whole
(`core.replay.Output`). Positions are relative to a segment; the position in an output or in the
conversation is a sum of lengths.

The names of `StreamingHarmonyContext` and its methods are those of vLLM's ``ConversationContext``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

from vllm_mlx_harmony.core import vocab
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
    """The ids of the prompt, or of the result of a tool, which the server (``served``) or the
    client ran.

    ``begins`` are the positions of its messages, ``ended`` is the end of the last complete one.
    """

    ids: list[int]
    begins: list[int] = field(default_factory=list)
    ended: int = 0
    served: bool = False


@dataclass(slots=True)
class _Generated(_Segment):
    """One output of the model, which begins with ``opening`` ids of ``<|start|>assistant``.

    The parser had read ``read_before`` ids before it.
    """

    opening: int = 0
    read_before: int = 0

    def place(self, read: int) -> int:
        """The position after the first ``read`` ids of the parser."""
        return self.opening + max(read - self.read_before, 0)


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
        within = Header(channel="final") if turn.prefill is not None else None
        self.names: Names = rendered.names
        """The names with which the tools were rendered."""
        self._tenant = turn.tenant
        limits = turn.limits
        self._parser = Parser(rendered.names, limits.stop, within, one_call=limits.one_call)
        self._info = info
        self._turn, self._renderer = turn, renderer
        self._messages = list(turn.messages)
        self._open: Opened | None = None
        self._parts: list[str] = []
        self._output_at = 0  # the first segment of the current output
        self._messages_before = 0  # the number of messages before that output
        self._cut = False  # whether the last message of the output was cut
        self._kept = False  # whether the output is in ``outputs``
        self._generated: _Generated  # the last segment that the model generated
        self._prompt_tokens = len(rendered.ids)
        self._inserted = 0  # ids of results that were inserted into the history
        self._outputs: list[Output] = []
        self._segments: list[_Segment] = []
        self._begin_conversation(rendered.ids)

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
        """The completed outputs, for a `Replay`.

        Outputs that a stop string ended, whose ids contain that string, and outputs that continue
        a prefill are left out.
        """
        return tuple(self._outputs)

    def start(self, cached_tokens: int | None = None) -> list[Delta]:
        """The delta before generation; ``cached_tokens`` as in ``Started``."""
        return [Started(self._prompt_tokens, cached_tokens)]

    def append_output(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> list[Delta]:
        """Adds generated ids, and returns their deltas. Ids after the end are ignored.

        ``logprobs`` are those of all ``ids``, if they were requested.
        """
        if self._has_results:
            self._begin_output(opening())
        was_done = self.done
        if logprobs:
            deltas = [delta for each in logprobs for delta in self._parser.feed_one(each)]
        else:
            deltas = self._parser.feed(ids)
        if not was_done:
            self._generated.ids.extend(ids)
            if self._parser.done_at is not None:
                # Ids after the end do not belong to the conversation. The end may come before these
                # ids: where the model began to write as the user or as a tool.
                del self._generated.ids[self._generated.place(self._parser.done_at) :]
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
        if earlier := [each for each in results if each.call_id in within]:
            self._insert(earlier)
            results = [each for each in results if each.call_id not in within]
            if not results:
                return []
        calls = {call.id: call.name for call in self.messages if isinstance(call, Call)}
        rendered = [render_messages([each], self.names, calls, self._tenant) for each in results]
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
        """The ids to generate from: the prompt, the output as it was generated, and results."""
        ids = chain.from_iterable(each.ids for each in self._segments)
        return (*ids, *opening()) if self._has_results else tuple(ids)

    def finish(self, reason: EndReason, cached_tokens: int = 0) -> list[Delta]:
        """The deltas that end the turn. ``Finished`` has the usage of the whole turn.

        ``cached_tokens`` of the prompt were cached, not computed again.
        """
        if not self._has_results:
            self._generated.ended = self._place(self._parser.ended_at)
        *deltas, finished = self._take_in(self._parser.close(reason))
        assert isinstance(finished, Finished)
        if not finished.stop_sequence:
            self._keep_output()
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
        self._inserted = (
            self._tool_tokens + len(ids) - sum(len(each.ids) for each in self._segments)
        )
        self._messages = messages
        self._begin_conversation(ids)

    @property
    def _has_results(self) -> bool:
        """Whether the last segment is a tool's result, without ``<|start|>assistant`` after it."""
        return self._segments[-1] is not self._generated

    @property
    def _tool_tokens(self) -> int:
        """The number of ids of results of the server's tools within the turn."""
        return self._inserted + sum(len(each.ids) for each in self._segments if each.served)

    def _begin_conversation(self, prompt: Sequence[int]) -> None:
        """Starts with ``prompt`` alone, which ends where the model continues."""
        # With a prefill, the output begins within a message.
        lead = opening()
        if [*prompt[-len(lead) :]] != lead:
            lead = []
        self._segments = [_Segment([*prompt[: len(prompt) - len(lead)]])]
        self._begin_output(lead)

    def _begin_output(self, lead: list[int]) -> None:
        """Begins an output after ``lead``, in the same output if the server ran a tool before."""
        if not self._segments[-1].served:
            self._output_at = len(self._segments)
            self._messages_before = len(self._messages)
            self._cut = self._kept = False
        self._generated = _Generated([*lead], opening=len(lead), read_before=self._parser.tokens)
        self._segments.append(self._generated)

    def _end_output(self) -> list[Delta]:
        """Closes the output: as deltas, and with the terminator it has in a history."""
        called = self.server_call is not None
        called |= self._open is not None and self._open.kind in _CALLS
        ids, lead = self._generated.ids, self._generated.opening
        if lead and len(ids) == lead:
            # Nothing was generated: the call is in the history, and its result goes there, too.
            self._segments.pop()
            self._output_at = len(self._segments)
        elif ids and ids[-1] in vocab.LAST:
            ids[-1] = vocab.END
        elif not ids or ids[-1] not in (vocab.END, vocab.CALL):
            ids.append(vocab.CALL if called else vocab.END)
        self._generated.ended = self._place(self._parser.ended_at)  # before the open one is closed
        return self._take_in(self._parser.resume())

    def _place(self, read: int) -> int:
        """The position in the output after ``read`` ids of the parser, for a message boundary.

        The first message after a result begins at its ``<|start|>assistant``, that is at 0.
        """
        follows = any(each.begins for each in self._segments[self._output_at :])
        at_start = follows and read == self._generated.read_before
        return 0 if at_start else self._generated.place(read)

    def _keep_output(self) -> None:
        """Adds the output to ``outputs``, unless that was done before."""
        if self._kept:
            return
        self._kept = True
        output = self._segments[self._output_at :]
        ids = [*chain.from_iterable(each.ids for each in output)]
        before = tuple(self._messages[: self._messages_before])
        messages = tuple(self._messages[self._messages_before :])
        # The continuation of a turn in the history cannot be placed without the rest of that turn.
        continues = bool(before) and type(before[-1]) in ASSISTANT_KINDS
        placeable = bool(output) and isinstance(output[0], _Generated) and output[0].opening > 0
        if placeable and messages and not continues:
            ends = [*accumulate(len(each.ids) for each in output)]
            starts = [0, *ends[:-1]]
            begins = (
                start + at for start, each in zip(starts, output, strict=True) for at in each.begins
            )
            ended = starts[-1] + output[-1].ended
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
        """The open message, as far as it was generated."""
        assert self._open is not None
        text = "".join(self._parts)
        if self._open.kind in _CALLS:
            key = self._info.call_id(self._open.index)
            return _CALLS[self._open.kind](key, self._open.name, text)
        return _MESSAGE_OF[self._open.kind](text)
