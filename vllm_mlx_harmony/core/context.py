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
from vllm_mlx_harmony.core.replay import Output
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    Message,
    Preamble,
    Reasoning,
    Result,
    Stamp,
    Turn,
)

_SPOKEN: dict[Kind, Callable[[str], Message]] = {
    Kind.REASONING: Reasoning,
    Kind.PREAMBLE: Preamble,
    Kind.ANSWER: Answer,
}


class StreamingHarmonyContext:
    """One turn, from its prompt to its last delta; ``stamp`` gives its calls their ids.

    ``renderer`` turns the request into ids. What the context holds is at every moment exactly the
    conversation: ``messages`` as values, ``render_for_completion()`` as ids.
    Raises ``RequestError`` when the turn cannot be rendered.
    """

    def __init__(
        self, turn: Turn, stamp: Stamp, renderer: Callable[[Turn], Rendered] = render
    ) -> None:
        rendered = renderer(turn)
        within = Header(channel="final") if turn.prefill is not None else None
        self._names = rendered.names
        self._tenant = turn.tenant
        limits = turn.limits
        self._parser = Parser(rendered.names, limits.stop, within, one_call=limits.one_call)
        self._stamp = stamp
        self._ids = list(rendered.ids)
        self._messages = list(turn.messages)
        self._open: Opened | None = None
        self._parts: list[str] = []
        self._prompt_tokens = len(rendered.ids)
        self._answered = False  # a tool has, and the assistant's next message is not begun
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
        tail = [] if self._open is None else [self._spoken()]
        return (*self._messages, *tail)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What the model generated and has ended, as it can be placed again: for a `Replay`.

        Without what a stop string ended, which stands in the ids, and what a prefill began.
        """
        return tuple(self._outputs)

    def start(self, cached_tokens: int | None = None) -> list[Delta]:
        """The turn is about to be generated; ``cached_tokens`` as in ``Started``."""
        return [Started(self._prompt_tokens, cached_tokens)]

    def append_output(self, ids: Sequence[int]) -> list[Delta]:
        """What the model generated next: any number of ids, none and ids after the end included."""
        if self._answered:
            self._ids, self._answered = [*self.render_for_completion()], False
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

    def append_tool_output(self, messages: Iterable[Result]) -> list[Delta]:
        """What tools answered to calls of this conversation: the model goes on behind it.

        Returns the deltas of what closes by that. Raises ``RequestError`` when a result answers
        no call of the conversation; nothing has changed then.
        """
        results = list(messages)
        rendered = render_messages(results, self._names, self._calls(), self._tenant)
        deltas = [] if self._answered else self._end_output()
        self._ids.extend(rendered)
        self._messages.extend(results)
        self._answered = True
        return deltas

    def render_for_completion(self) -> tuple[int, ...]:
        """The ids to generate from: what was prompted and generated, as it was, and the results."""
        return (*self._ids, *opening()) if self._answered else tuple(self._ids)

    def finish(self, reason: EndReason, cached_tokens: int = 0) -> list[Delta]:
        """The deltas that end the turn; ``Finished`` carries the usage of all of it.

        ``cached_tokens`` of the prompt needed no prefill.
        """
        ended = self._parser.ended_at
        deltas = self._take_in(self._parser.close(reason))
        if not (self._answered or any(isinstance(d, Finished) and d.stop_sequence for d in deltas)):
            self._keep_output(ended)
        prompt = {"prompt_tokens": self._prompt_tokens, "cached_tokens": cached_tokens}
        return [
            replace(delta, usage=replace(delta.usage, **prompt))
            if isinstance(delta, Finished)
            else delta
            for delta in deltas
        ]

    def _end_output(self) -> list[Delta]:
        """Closes the output on both sides: as deltas, and with a terminator that a history has."""
        called = self._open is not None and self._open.kind is Kind.CALL
        if self._ids[-1] in vocab.LAST:
            self._ids[-1] = vocab.END
        elif self._ids[-1] not in (vocab.END, vocab.CALL):
            self._ids.append(vocab.CALL if called else vocab.END)
        ended = self._parser.ended_at
        deltas = self._take_in(self._parser.resume())
        self._keep_output(ended)
        return deltas

    def _begin_output(self) -> None:
        """Notes what stands before it."""
        self._output_at = len(self._ids)
        self._messages_before = len(self._messages)
        self._read_before = self._parser.tokens
        self._begins: list[int] = []

    def _place(self, generated: int) -> int:
        """Where in the output an id is that so many ids were generated before."""
        return len(opening()) + generated - self._read_before

    def _keep_output(self, ended: int) -> None:
        ids = self._ids[max(self._output_at - len(opening()), 0) :]
        if ids[: len(opening())] == opening():
            before = self._messages_before
            said = tuple(self._messages[:before]), tuple(self._messages[before:])
            places = tuple(self._begins), self._place(ended)
            self._outputs.append(Output(*said, tuple(ids), *places))

    def _take_in(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            if isinstance(delta, Text):
                self._parts.append(delta.text)
            elif isinstance(delta, Opened):
                self._open, self._parts = delta, []
                self._begins.append(self._place(delta.at))
            elif isinstance(delta, Closed):
                self._messages.append(self._spoken())
                self._open = None
        return deltas

    def _spoken(self) -> Message:
        """The message that is open, as far as it goes."""
        assert self._open is not None
        text = "".join(self._parts)
        if self._open.kind is Kind.CALL:
            return Call(self._stamp.call_id(self._open.index), self._open.name, text)
        return _SPOKEN[self._open.kind](text)

    def _calls(self) -> dict[str, str]:
        return {call.id: call.name for call in self.messages if isinstance(call, Call)}
