"""``Observer``: what sees an answer from its prompt to its end, without taking part in it.

An application may install one function that makes observers (``install``), as the inspector does.
`server.traces` adds a second observer while traces are recorded. Their errors are logged, and do
not reach the client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.core.turn import ServerCall
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server.body import Document
from vllm_mlx_harmony.server.engine import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Observed:
    """A request whose prompt is rendered.

    ``owner`` is the tenant of its API key, and ``tenant`` that of its lease. The two differ if a
    gateway sent the request for one of its own tenants. ``trace`` has the headers of a trace that
    the request is part of (https://www.w3.org/TR/trace-context/).
    """

    api: str
    path: str
    document: Document
    model: str
    stream: bool
    id_seed: str
    tenant: str
    owner: str
    trace: Mapping[str, str] = field(default_factory=dict)


class Observer(Protocol):
    """Called on the event loop, several times for each token, so its methods must be fast."""

    def prompt(self, ids: tuple[int, ...], constraint: Constraint | None) -> None:
        """An output begins. That of a later one continues ``ids`` with the results of tools."""

    def step(self, step: Step) -> None:
        """The engine has reported its progress, or generated ids."""

    def tool(self, call: ServerCall) -> None:
        """The server begins to run a tool, which ends before the next ``tool`` or ``prompt``."""

    def events(self, events: Sequence[Event]) -> None:
        """Events were written for the client."""

    def whole(self, document: dict[str, Any]) -> None:
        """An answer that is not streamed is complete."""

    def ended(self, result: str, usage: Usage, failure: Exception | None) -> None:
        """The answer has ended, as in ``Tracker.finish``."""


def notify(observers: Iterable[Observer], call: Callable[[Observer], None]) -> None:
    for each in observers:
        try:
            call(each)
        except Exception:
            logger.exception("an observer failed")


Observe: TypeAlias = Callable[[Observed], Observer]

_STATE = "vllm_mlx_harmony_observe"


def install(app: Starlette, observe: Observe) -> None:
    """Has ``observe`` make an observer of every answer of ``app``."""
    setattr(app.state, _STATE, observe)


def uninstall(app: Starlette) -> None:
    delattr(app.state, _STATE)


def observe_of(connection: HTTPConnection) -> Observe | None:
    """The function that makes the observers of the application of ``connection``, if any."""
    found: Observe | None = getattr(connection.app.state, _STATE, None)
    return found
