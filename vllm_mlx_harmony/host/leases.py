"""The engine of a request, and the time it has: the host's own acquisition, release and budget.

Knows how the host counts who uses an engine. Refuses to know what a request asks for.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from starlette.requests import HTTPConnection, Request

from vllm_mlx_harmony.host.model_names import own_name


@dataclass(frozen=True, slots=True)
class Budget:
    """``total`` seconds for a request, until ``deadline`` on the monotonic clock."""

    total: float
    deadline: float

    @classmethod
    def start(cls, timeout: float | None) -> Budget:
        """From now on; the server's default where a request names none."""
        from vllm_mlx import server

        return cls(*server._start_request_budget(timeout))

    @property
    def left(self) -> float:
        """Seconds left, never less than none."""
        return max(0.0, self.deadline - time.monotonic())

    def remaining(self) -> float:
        """Seconds left. Raises the host's HTTP 504 when there are none."""
        from vllm_mlx import server

        seconds: float = server._remaining_request_timeout(self.total, self.deadline)
        return seconds


@dataclass(slots=True)
class Lease:
    """An engine that cannot be unloaded until it is released; releasing again does nothing.

    The host files what it lent under the request: the same object goes in and out.
    """

    engine: Any
    _request: Request
    _released: bool = field(default=False, init=False)

    @property
    def tenant(self) -> str:
        """Whom it was lent to."""
        return tenant_of(self._request)

    async def release(self) -> None:
        """Gives the engine back."""
        if not self._released:
            self._released = True
            from vllm_mlx import server

            await server._release_engine_for_request(self._request)


def tenant_of(connection: HTTPConnection) -> str:
    """A digest of the API key that ``connection`` came with: the same key, the same tenant.

    What one tenant stored, and what is remembered of its prompts, no other gets to see.
    """
    key = connection.headers.get("authorization") or connection.headers.get("x-api-key") or ""
    return sha256(re.sub(r"(?i)^bearer\s+", "", key).encode()).hexdigest()


async def acquire(request: Request, model: str | None, budget: Budget) -> Lease | None:
    """The engine that serves ``model``, loaded if it was not; ``None`` when the client has gone.

    Raises the host's HTTPException: 404 for a model it does not have, 503 and 504.
    """
    from vllm_mlx import server

    if model is not None:
        model = own_name(model)
        server._validate_model_name(model)
    engine = await server._acquire_default_engine_for_request(
        request, total_timeout=budget.total, deadline=budget.deadline, model=model
    )
    return None if engine is None else Lease(engine, request)


def needs_model() -> bool:
    """Whether the server has several models, so that a request must name one to get an engine."""
    from vllm_mlx import server

    return server._model_manager is not None
