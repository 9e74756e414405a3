"""``Host``: the interface of the server that the front end is a part of.

It provides engines, checks API keys and rate limits, and has the defaults for what requests do not
set. A server implements ``Host``, and makes a `front_end.FrontEnd` with it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from vllm_mlx_harmony.core.deltas import Delta, TokenLogprob, Usage
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import EndReason
from vllm_mlx_harmony.core.render import Rendered
from vllm_mlx_harmony.core.replay import Archive, Output, ReplayScope
from vllm_mlx_harmony.core.turn import (
    Defaults,
    Message,
    ResponseInfo,
    Result,
    ServerCall,
    ServerResult,
    Turn,
)
from vllm_mlx_harmony.engine_api.engine import Engine
from vllm_mlx_harmony.server.settings import ServerSettings

if TYPE_CHECKING:
    from vllm_mlx_harmony.server.tools.toolbox import Toolbox

TIMED_OUT = 504


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time limit of ``total`` seconds that ends at ``at`` on the monotonic clock."""

    total: float
    at: float

    @property
    def left(self) -> float:
        """Never negative."""
        return max(0.0, self.at - time.monotonic())

    def timeout_error(self) -> HostError:
        """The error of a request that has no time left."""
        problem = f"Request timed out after {self.total:.1f} seconds"
        return HostError(problem, status=TIMED_OUT, code="timeout")


@dataclass(slots=True)
class Lease:
    """An engine in use by a request of ``tenant``. It is not unloaded until the lease is released.

    Used as a context manager, it is released at the end of the block, unless ``hand_over`` was
    called: then whoever took it over releases it. Later releases have no effect.

    ``tenant`` is that of the API key, or of a gateway's client once its request is read (`ids`).
    """

    engine: Engine
    tenant: str
    deadline: Deadline
    _give_back: Callable[[], Awaitable[None]]
    endings: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)
    """Callbacks that run after the engine is released."""
    _handed_over: bool = field(default=False, init=False)
    _released: bool = field(default=False, init=False)

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._handed_over:
            await self.release()

    def hand_over(self) -> None:
        """Leaves the release to the caller, as ``ExitStack.pop_all`` does."""
        self._handed_over = True

    async def release(self) -> None:
        if not self._released:
            self._released = True
            async with self.endings:
                await self._give_back()


class NotHarmony(Exception):
    """The model is not a Harmony model: the host itself answers its requests."""


class Context(Protocol):
    """One turn, from its prompt to its last delta: the interface of `StreamingHarmonyContext`."""

    @property
    def names(self) -> Names:
        """The names of the turn's tools in its prompt."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The completed outputs, which later prompts may reuse."""

    @property
    def done(self) -> bool:
        """Whether the model has ended its output."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far."""

    @property
    def server_call(self) -> ServerCall | None:
        """The tool call that the server has to answer before the model continues, if any."""

    @property
    def unanswered(self) -> tuple[ServerCall, ...]:
        """Calls of the server's tools that have no result yet, in order."""

    def start(self, cached_tokens: int | None = None) -> list[Delta]:
        """Begins the turn."""

    def append_output(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> list[Delta]:
        """Appends generated ids, with their log probabilities if they were requested."""

    def append_tool_output(self, messages: Iterable[Result | ServerResult]) -> list[Delta]:
        """Appends results of tools."""

    def render_for_completion(self) -> tuple[int, ...]:
        """The prompt of the next output."""

    def finish(self, reason: EndReason, cached_tokens: int = 0) -> list[Delta]:
        """Ends the turn."""


class Renderer(Protocol):
    """Renders the prompt of a turn: the interface of `core.render.render`."""

    def __call__(self, turn: Turn, replay: ReplayScope | None = None) -> Rendered:
        """The prompt, in which ``replay`` has the generated turns that it may reuse."""


class ContextFactory(Protocol):
    """Makes a ``Context``: the interface of the class `StreamingHarmonyContext`."""

    def __call__(
        self, turn: Turn, info: ResponseInfo, renderer: Callable[[Turn], Rendered]
    ) -> Context:
        """The context of ``turn``, whose prompt ``renderer`` renders."""


class Tracker(Protocol):
    """The host's metrics of one request."""

    def observe_ttft(self) -> None:
        """Records the time to the first token. Only the first call counts."""

    def reasoning_ended(self, reason: str) -> None:
        """Counts reasoning that the server cut short; ``reason``: ``budget`` or ``repetition``."""

    def finish(self, result: str, usage: Usage) -> None:
        """Records the end of the request. Only the first call counts."""


class Host(Protocol):
    """The server around the front end. It rejects requests with Starlette's ``HTTPException``."""

    # --- Models and engines

    @property
    def model_name(self) -> str | None:
        """The name of the server's only model; ``None`` if it has several."""

    async def models(self) -> dict[str, Any]:
        """The document of ``GET /v1/models``, with ``max_model_len`` where it is known."""

    async def must_load(self, model: str | None) -> bool:
        """Whether ``model`` is known to be a Harmony model that ``acquire`` would have to load.

        If so, its requests are checked before it is loaded.
        """

    async def acquire(self, request: Request, model: str | None, deadline: Deadline) -> Lease:
        """The engine of ``model``, which is loaded first if necessary.

        Raises ``NotHarmony``, ``ClientDisconnect``, and ``HTTPException`` 404, 503 and 504.
        """

    async def forward(self, request: Request) -> Response:
        """The server's own response to ``request``. Raises ``LookupError`` if it has no route."""

    # --- Settings, defaults and limits

    @property
    def server_settings(self) -> ServerSettings:
        """The settings of the front end; always the same object."""

    def deadline(self, timeout: float | None) -> Deadline:
        """The deadline of a request that arrives now and may set ``timeout`` in seconds."""

    def defaults(self, engine: Engine | None) -> Defaults:
        """The server's defaults for a request to ``engine``, today."""

    def max_tokens(self, requested: int | None) -> int:
        """The maximum output tokens: as ``requested``, up to the server's limit, or its default."""

    @property
    def reasoning_tokens(self) -> int | None:
        """The reasoning budget set by a flag of the server."""

    @property
    def archive(self) -> Archive | None:
        """The persistent archive of generated turns, if any; always the same object."""

    @property
    def toolbox(self) -> Toolbox | None:
        """The tools that the server runs; ``None`` if it runs none."""

    # --- Access

    @property
    def requires_key(self) -> bool:
        """Whether the server has an API key."""

    def is_key(self, text: str) -> bool:
        """Whether ``text`` is a valid API key."""

    async def authenticate(self, connection: HTTPConnection) -> None:
        """Raises ``HTTPException`` 401 for a wrong API key. Called once for each request."""

    async def check_rate_limit(self, connection: HTTPConnection) -> None:
        """Counts one request. Raises ``HTTPException`` 429 above the limit."""

    # --- Around an answer

    def tracker(self, api: str, *, stream: bool) -> Tracker:
        """The metrics of a request that begins now."""

    # --- Replaceable parts (entry points)

    @property
    def renderer(self) -> Renderer:
        """Renders the prompts of turns."""

    @property
    def context(self) -> ContextFactory:
        """Makes the contexts of turns."""


def tenant_of(connection: HTTPConnection) -> str:
    """A digest of the API key of ``connection``: the same key, the same tenant.

    Tenants cannot access each other's stored responses and cached prompts. White space around a key
    is ignored, Unicode's included, as it is by FastAPI's ``HTTPBearer``, which vllm-mlx uses.
    """
    # Without a key, all clients are one tenant.
    key = connection.headers.get("authorization") or connection.headers.get("x-api-key") or ""
    return sha256(re.sub(r"(?i)^bearer\s+", "", key).strip().encode()).hexdigest()
