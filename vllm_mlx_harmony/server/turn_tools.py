"""The tool calls of one turn, and what is left of its calls, time and tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import ToolFailure, ToolFinished
from vllm_mlx_harmony.core.errors import PromptTooLong
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.pages import Page
from vllm_mlx_harmony.core.turn import Defaults, ServerCall, ToolChoice, Turn
from vllm_mlx_harmony.engine_api.engine import GenerationSettings
from vllm_mlx_harmony.server.enforcement import constraint_for
from vllm_mlx_harmony.server.sampling import limited_to_context
from vllm_mlx_harmony.server.settings import Enforcement, ToolsMode
from vllm_mlx_harmony.server.tools.tool_server import ToolServer
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

RESERVED_ANSWER_TOKENS = 512
"""Tokens of the model's context that are reserved for the answer."""

MAX_REJECTED = 3
"""Calls beyond the limit that are rejected before the turn is ended."""


@dataclass(slots=True)
class TurnTools:
    """The tools of a turn and the remaining limits.

    ``seconds`` is the time limit of the request. ``request_servers`` has the tool servers that it
    names by URL, and ``pages`` what the browser has shown in its prompt.
    """

    toolbox: Toolbox
    turn: Turn
    names: Names
    enforcement: Enforcement
    seconds: float
    request_servers: Sequence[ToolServer] = ()
    pages: Mapping[int, Page] = field(default_factory=dict)
    _calls: int = field(default=0, init=False)
    _rejected: int = field(default=0, init=False)
    _until: float | None = field(default=None, init=False)
    _sessions: Mapping[str, ToolServer] = field(init=False)

    def __post_init__(self) -> None:
        self._sessions = self.toolbox.sessions(self.turn, self.pages)

    def fresh(self) -> TurnTools:
        """The same tools for another choice, with a count of calls and a browser session of its
        own."""
        return replace(self)

    @property
    def exhausted(self) -> bool:
        """Whether the limit of calls or of time is reached."""
        late = self._until is not None and time.monotonic() >= self._until
        most, requested = self.toolbox.config.max_tool_calls, self.turn.max_tool_calls
        return late or self._calls >= (most if requested is None else min(most, requested))

    def needs_approval(self, call: ServerCall) -> bool:
        """Whether ``call`` needs the caller's approval before it is run."""
        return any(namespace.needs_approval(call.name) for namespace in self.turn.namespaces)

    @property
    def keeps_calling(self) -> bool:
        """Whether the model keeps calling although no more calls are run."""
        return self._rejected >= MAX_REJECTED

    @property
    def pauses(self) -> bool:
        """Whether the turn pauses before the next call, until its caller sends the turn back."""
        return self.turn.pauses and self.exhausted

    async def execute(
        self, call: ServerCall, prompt_tokens: int, context_length: int | None
    ) -> ToolFinished:
        """Runs ``call`` in a conversation of ``prompt_tokens``."""
        now = time.monotonic()
        if self._until is None:
            self._until = now + self.toolbox.config.max_seconds
        if self.exhausted:
            self._rejected += 1
            return ToolFinished(f"Error: {_NO_MORE}", ToolFailure(_NO_MORE))
        self._calls += 1
        room = self.toolbox.config.max_output_tokens
        if context_length is not None:
            room = context_length - prompt_tokens - RESERVED_ANSWER_TOKENS
        # A stream that is silent for the whole time limit is ended, so a call must end before that.
        seconds = min(self._until - now, max(self.seconds - 1.0, self.seconds / 2))
        return await self.toolbox.execute(
            call, self.turn.namespaces, seconds, room, self.request_servers, sessions=self._sessions
        )

    async def prepare_next_output(
        self,
        settings: GenerationSettings,
        constraint: Constraint | None,
        prompt_tokens: int,
        context_length: int | None,
        generated: int,
    ) -> tuple[GenerationSettings, Constraint | None] | None:
        """The settings and the constraint of the output that follows a tool's result.

        ``settings`` and ``constraint`` belong to the previous output, which has ``generated`` ids.
        ``None`` if no token is left of the request's limit or of the model's context.
        """
        if settings.max_tokens <= generated:
            return None
        try:
            left = replace(settings, max_tokens=settings.max_tokens - generated)
            left = limited_to_context(left, prompt_tokens, context_length)
        except PromptTooLong:
            return None
        if constraint is None:
            return left, None
        # A required call has been made. The grammar leaves out calls that would not be run.
        choice = replace(self.turn.tool_choice, required=False)
        if self.exhausted and not self.turn.pauses:
            served = {
                recipient
                for namespace in self.turn.namespaces
                for recipient in namespace.recipients
            }
            names = choice.names
            if names is None:
                names = tuple(tool.name for tool in self.turn.callable_tools)
            choice = ToolChoice(False, tuple(name for name in names if name not in served))
        turn = replace(self.turn, tool_choice=choice, prefill=None)
        spec = constraint.spec
        if spec.grammar is not None:
            fresh = await constraint_for(turn, self.names, self.enforcement)
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


def with_tools(defaults: Defaults, toolbox: Toolbox, servers: Sequence[ToolServer]) -> Defaults:
    """``defaults`` with the tools of the server, and of the ``servers`` that a request names."""
    for_all = toolbox.use is ToolsMode.ALL
    namespaces = (*toolbox.namespaces, *toolbox.request_namespaces(servers))
    return replace(defaults, namespaces=namespaces, tools_for_all=for_all)


_NO_MORE = "no more tools can be called in this turn: answer with what you have"
