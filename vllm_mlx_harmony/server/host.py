"""What surrounds the engines: who lends them, who may ask, what applies where a request is silent.

Whoever puts the front end on a server implements ``Host``, and leaves it where every request finds
it (``install``); nothing else of that server is seen from here.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from vllm_mlx_harmony.core.deltas import Delta
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.parse import EndReason
from vllm_mlx_harmony.core.replay import Archive
from vllm_mlx_harmony.core.turn import Defaults, Message, Result, ServerCall, ServerResult
from vllm_mlx_harmony.server.engine import Engine

if TYPE_CHECKING:
    from vllm_mlx_harmony.server.tools.toolbox import Toolbox

T = TypeVar("T")

TIMED_OUT = 504


@dataclass(frozen=True, slots=True)
class Deadline:
    """``total`` seconds for a request, until ``at`` on the monotonic clock."""

    total: float
    at: float

    @property
    def left(self) -> float:
        """Seconds left, never less than none."""
        return max(0.0, self.at - time.monotonic())

    def remaining(self) -> float:
        """Seconds left. Raises ``HostError`` 504 when there are none."""
        seconds = self.at - time.monotonic()
        if seconds <= 0:
            problem = f"Request timed out after {self.total:.1f} seconds"
            raise HostError(problem, status=TIMED_OUT, code="timeout")
        return seconds


@dataclass(slots=True)
class Lease:
    """An engine lent to ``tenant``, not unloaded until it is released, and the time it is lent for.

    Releasing it again does nothing. It is released at the end of the block that it was acquired for
    (``serving.leased``), unless it is ``taken_over``: an ``Answer`` releases it when the engine has
    stopped. ``engine`` is ``None`` where the model is not a Harmony model: the host answers by
    itself.
    """

    engine: Engine | None
    tenant: str
    deadline: Deadline
    _give_back: Callable[[], Awaitable[None]]
    taken_over: bool = field(default=False, init=False)
    _released: bool = field(default=False, init=False)
    _endings: list[Callable[[], Awaitable[None]]] = field(default_factory=list, init=False)

    @property
    def harmony(self) -> Engine:
        """The engine, where it is known that there is one."""
        assert self.engine is not None
        return self.engine

    def on_release(self, ending: Callable[[], Awaitable[None]]) -> None:
        """``ending`` ends what is there for this request alone, when the engine is given back."""
        self._endings.append(ending)

    async def release(self) -> None:
        """Gives the engine back."""
        if not self._released:
            self._released = True
            try:
                await self._give_back()
            finally:
                for ending in self._endings:
                    await ending()


class Context(Protocol):
    """One turn, from its prompt to its last delta: what is used of a `StreamingHarmonyContext`.

    Its ``names`` and ``outputs`` are used where it has them: another's need not.
    """

    @property
    def done(self) -> bool:
        """Whether the model has ended its output: generate no more."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far."""

    @property
    def server_call(self) -> ServerCall | None:
        """The call that the server has to answer before the model goes on, if there is one."""

    @property
    def unanswered(self) -> tuple[ServerCall, ...]:
        """The calls of tools that the server runs which have no result, in order."""

    def start(self, cached_tokens: int | None = None) -> list[Delta]:
        """The turn is about to be generated."""

    def append_output(self, ids: Sequence[int]) -> list[Delta]:
        """What the model generated next."""

    def append_tool_output(self, messages: Iterable[Result | ServerResult]) -> list[Delta]:
        """What tools answered."""

    def render_for_completion(self) -> tuple[int, ...]:
        """The ids to generate from."""

    def finish(self, reason: EndReason, cached_tokens: int = 0) -> list[Delta]:
        """The deltas that end the turn."""


class Tracker(Protocol):
    """The host's accounting of one request."""

    def observe_ttft(self) -> None:
        """The first token is there."""

    def reasoning_ended(self, reason: str) -> None:
        """The model was made to answer: its ``budget`` of reasoning is used up, for instance."""

    def finish(
        self,
        *,
        result: str,
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
        cached_tokens: int = 0,
        reasoning_tokens: int = 0,
    ) -> None:
        """The request has ended; only the first call counts."""


class Host(Protocol):
    """A server that the front end stands in. Its refusals are Starlette's ``HTTPException``."""

    # --- Models and engines

    @property
    def model_name(self) -> str | None:
        """What the server's only model is called; ``None`` when it has several."""

    async def models(self) -> dict[str, Any]:
        """The list of ``GET /v1/models``, with ``max_model_len`` where it is known."""

    async def acquire(
        self, request: Request, model: str | None, deadline: Deadline
    ) -> Lease | None:
        """The engine that serves ``model``, loaded if it was not; ``None`` for a client that went.

        Raises ``HTTPException``: 404 for a model it does not have, 503 and 504.
        """

    async def forward(self, request: Request) -> Response:
        """The server's own answer to a request that is not ours. Raises ``LookupError``."""

    # --- What applies where a request is silent

    def deadline(self, timeout: float | None) -> Deadline:
        """The time a request has from now on, which asks for ``timeout`` seconds or for nothing."""

    def defaults(self, engine: Engine | None) -> Defaults:
        """What a request to ``engine`` may override, from now on until midnight."""

    def max_tokens(self, requested: int | None) -> int:
        """How long an answer may be. Raises ``HTTPException`` 400 for more than is allowed."""

    @property
    def reasoning_tokens(self) -> int | None:
        """The budget of reasoning that a flag sets."""

    @property
    def archive(self) -> Archive | None:
        """Where generated turns outlive the process, if anywhere: always the same object."""

    @property
    def toolbox(self) -> Toolbox | None:
        """The tools that the server runs for requests; ``None`` when it runs none."""

    # --- Who may ask

    @property
    def requires_key(self) -> bool:
        """Whether there is an API key."""

    async def authenticate(self, connection: HTTPConnection) -> None:
        """Raises ``HTTPException`` 401 for a wrong API key, and anything for a strange one."""

    async def check_rate_limit(self, connection: HTTPConnection) -> None:
        """Counts one request. Raises ``HTTPException`` 429 when there were too many."""

    # --- Around an answer

    def tracker(self, api: str, *, stream: bool) -> Tracker:
        """The accounting of a request that begins now."""

    async def unless_gone(
        self, coming: Awaitable[T], request: Request, seconds: float, total: float
    ) -> T | None:
        """What is ``coming``; ``None`` when the client has gone, and then it is cancelled.

        Raises ``HTTPException`` 504 after ``seconds``; ``total`` is the number it says.
        """

    def until_gone(self, frames: AsyncIterable[str], request: Request) -> AsyncIterator[str]:
        """``frames``, ended when the client has gone. A host that cannot see it go may send a
        comment now and then, to find out."""

    def transport(self, connection: HTTPConnection) -> asyncio.WriteTransport | None:
        """What asyncio writes to this client with; ``None`` where there is no socket of its own.

        The front end aborts it when a client reads nothing.
        """

    # --- Replaceable parts (entry points)

    @property
    def renderer(self) -> Callable[..., Any]:
        """Makes the prompt of a turn (`core.render.render`)."""

    @property
    def context(self) -> Callable[..., Context]:
        """Follows one answer (`core.context.StreamingHarmonyContext`)."""


_STATE = "vllm_mlx_harmony_host"


def install(app: Starlette, host: Host) -> None:
    """Leaves ``host`` where the requests to ``app`` find it."""
    setattr(app.state, _STATE, host)


def uninstall(app: Starlette) -> None:
    """Takes it away again."""
    delattr(app.state, _STATE)


def host_of(connection: HTTPConnection) -> Host:
    """The host that ``connection`` came to."""
    host: Host = getattr(connection.app.state, _STATE)
    return host


def tenant_of(connection: HTTPConnection) -> str:
    """A digest of the API key that ``connection`` came with: the same key, the same tenant.

    What one tenant stored, and what is remembered of its prompts, no other gets to see. White space
    around a key is not the key's, Unicode's neither: FastAPI's ``HTTPBearer``, which asks for the
    key of vllm-mlx, strips it all.
    """
    key = connection.headers.get("authorization") or connection.headers.get("x-api-key") or ""
    return sha256(re.sub(r"(?i)^bearer\s+", "", key).strip().encode()).hexdigest()
