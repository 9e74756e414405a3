"""The tool loop of one turn: how many calls, how much time and how many tokens are left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import ToolFailure
from vllm_mlx_harmony.core.errors import PromptTooLong
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import Defaults, ServerCall, ToolChoice, Turn
from vllm_mlx_harmony.server.enforcement import constraint_for
from vllm_mlx_harmony.server.host import Deadline, Host
from vllm_mlx_harmony.server.sampling import Settings, capped
from vllm_mlx_harmony.server.tools.config import Use
from vllm_mlx_harmony.server.tools.tool_server import ToolServer
from vllm_mlx_harmony.server.tools.toolbox import Answered, Toolbox

LEFT_FOR_THE_ANSWER = 512
"""Tokens of the model's context that are reserved for the answer."""

MOST_REFUSED = 3
"""Calls beyond the limit that are rejected before the turn is ended."""


@dataclass(slots=True)
class TurnTools:
    """What a turn may still run.

    ``patience``: seconds that a call may take before the silent stream would be ended. ``given``:
    the tool servers that the request names by their URLs.
    """

    toolbox: Toolbox
    turn: Turn
    names: Names
    patience: float
    by_flag: int | None = None
    given: tuple[ToolServer, ...] = ()
    _calls: int = 0
    _refused: int = 0
    _until: float | None = None

    @classmethod
    def of(
        cls,
        host: Host,
        turn: Turn,
        names: Names,
        deadline: Deadline,
        given: Sequence[ToolServer] = (),
    ) -> TurnTools | None:
        """The tools that ``host`` runs in ``turn``; ``None`` when there are none."""
        if host.toolbox is None or not turn.namespaces:
            return None
        # A stream that is silent for the whole time limit is ended: a tool has to end before that.
        patience = max(deadline.total - 1.0, deadline.total / 2)
        return cls(host.toolbox, turn, names, patience, host.reasoning_tokens, tuple(given))

    @property
    def _allowed(self) -> int:
        own = self.toolbox.config.max_tool_calls
        asked = self.turn.max_tool_calls
        return own if asked is None else min(own, asked)

    @property
    def exhausted(self) -> bool:
        """Whether no more calls are run: the limit of calls or of time is reached."""
        late = self._until is not None and time.monotonic() >= self._until
        return self._calls >= self._allowed or late

    def needs_approval(self, call: ServerCall) -> bool:
        """Whether ``call`` needs the caller's approval before it is run."""
        return any(each.needs_approval(call.name) for each in self.turn.namespaces)

    @property
    def over(self) -> bool:
        """Whether the model keeps calling although it was told that no more calls are run."""
        return self._refused >= MOST_REFUSED

    @property
    def pauses(self) -> bool:
        """Whether the turn pauses before the next call, until its caller sends the turn back."""
        return self.turn.pauses and self.exhausted

    async def run(
        self, call: ServerCall, prompt_tokens: int, context_length: int | None
    ) -> Answered:
        """The answer to ``call``, in a conversation that has ``prompt_tokens`` so far."""
        now = time.monotonic()
        if self._until is None:
            self._until = now + self.toolbox.config.max_seconds
        if self.exhausted:
            self._refused += 1
            return Answered(f"Error: {_NO_MORE}", ToolFailure(_NO_MORE))
        self._calls += 1
        room = self.toolbox.config.max_output_tokens
        if context_length is not None:
            room = context_length - prompt_tokens - LEFT_FOR_THE_ANSWER
        seconds = min(self._until - now, self.patience)
        return await self.toolbox.run(call, self.turn.namespaces, seconds, room, self.given)

    async def continued(
        self,
        settings: Settings,
        constraint: Constraint | None,
        prompt_tokens: int,
        context_length: int | None,
        generated: int,
    ) -> tuple[Settings, Constraint | None] | None:
        """The settings and the constraint of the output behind a tool's answer.

        ``settings`` and ``constraint`` are those of the output before, which has ``generated`` ids.
        ``None`` when no token is left, of the request's limit or of the model's context.
        """
        if settings.max_tokens <= generated:
            return None
        try:
            left = replace(settings, max_tokens=settings.max_tokens - generated)
            left = capped(left, prompt_tokens, context_length)
        except PromptTooLong:
            return None
        if constraint is None:
            return left, None
        # A required call has been made: none is required now. The grammar leaves out the calls
        # that would not be run.
        choice = replace(self.turn.tool_choice, required=False)
        turn = replace(self.turn, tool_choice=choice, prefill=None)
        if self.exhausted and not turn.pauses:
            turn = _without_calls(turn)
        spec = constraint.spec
        if spec.grammar is not None:
            fresh = await constraint_for(turn, self.names, self.by_flag)
            spec = replace(spec, grammar=None if fresh is None else fresh.spec.grammar)
        budget = spec.reasoning_tokens
        return left, Constraint(
            replace(
                spec,
                reasoning_tokens=None
                if budget is None
                else max(0, budget - constraint.reasoning_tokens),
                min_tokens=max(0, spec.min_tokens - generated),
                answering=False,
            )
        )


def with_tools(
    defaults: Defaults, toolbox: Toolbox | None, given: Sequence[ToolServer] = ()
) -> Defaults:
    """``defaults`` with the tools that the server can run now.

    ``given``: the tool servers that the request names by their URLs.
    """
    if toolbox is None:
        return defaults
    for_all = toolbox.use is Use.ALL
    namespaces = (*toolbox.namespaces, *toolbox.given(given))
    return replace(defaults, namespaces=namespaces, tools_for_all=for_all)


_NO_MORE = "no more tools can be called in this turn: answer with what you have"


def _without_calls(turn: Turn) -> Turn:
    """``turn`` whose grammar has no calls of the server's tools, only of the client's."""
    served = {name for namespace in turn.namespaces for name in namespace.recipients}
    names = turn.tool_choice.names
    if names is None:
        names = tuple(tool.name for tool in turn.callable_tools)
    left = tuple(name for name in names if name not in served)
    return replace(turn, tool_choice=ToolChoice(False, left))
