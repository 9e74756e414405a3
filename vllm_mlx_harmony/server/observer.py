"""``Observer``: what sees an answer from its prompt to its end, without taking part in it.

An application has functions that make observers of its answers (``FrontEnd.observer_factories``):
that of the inspector, and `server.traces` if traces are recorded. Their errors are logged, and do
not reach the client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.core.turn import ServerCall
from vllm_mlx_harmony.engine_api.engine import Step, Steps
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server.body import Document

TRACE_HEADERS = ("traceparent", "tracestate")
"""https://www.w3.org/TR/trace-context/"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedRequest:
    """A request whose prompt is rendered.

    ``owner`` is the tenant of its API key, and ``tenant`` that of its lease. The two differ if a
    gateway sent the request for one of its own tenants. ``trace`` has the headers of a trace that
    the request is part of (``TRACE_HEADERS``).
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
        """An output begins. ``ids`` is its prompt, which includes earlier outputs of the answer and
        the results of their tools."""

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


ObserverFactory: TypeAlias = Callable[[ObservedRequest], Observer]


_METHODS = tuple(name for name in vars(Observer) if not name.startswith("_"))


def make_observers(
    observed: ObservedRequest, factories: Iterable[ObserverFactory]
) -> tuple[Observer, ...]:
    """The observers of an answer, whose errors are logged. One that cannot be made is left out."""
    made: list[Any] = []
    for make in factories:
        try:
            observer = make(observed)
            methods = {name: partial(_call, getattr(observer, name)) for name in _METHODS}
            made.append(SimpleNamespace(**methods))
        except Exception:
            logger.exception("an observer could not be made")
    return tuple(made)


async def observe_steps(steps: Steps, observers: Sequence[Observer]) -> Steps:
    """``steps``, which ``observers`` see before they are yielded."""
    async with aclosing(steps):
        async for step in steps:
            for observer in observers:
                observer.step(step)
            yield step


def _call(method: Callable[..., None], *arguments: object) -> None:
    try:
        method(*arguments)
    except Exception:
        logger.exception("an observer failed")
