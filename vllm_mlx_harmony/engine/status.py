"""What an engine publishes of itself, for other threads to read."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from vllm_mlx_harmony.engine.memory import Budget
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.engine.request import Phase
from vllm_mlx_harmony.engine.step_costs import Costs


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """The state of a request. ``place`` is its place in the queue, from 1; 0 once it generates.

    ``computed`` of the ``total`` ids of the prompt are done, the ``cached`` ones included.
    ``seconds`` since it arrived. ``speed`` in ids per second: of the answer while it generates, of
    the prompt before. ``expected`` seconds to its first id, by the speed so far, if nothing else
    arrives; ``None`` while no speed is known.
    """

    state: Phase
    place: int
    total: int
    cached: int
    computed: int
    generated: int
    seconds: float
    speed: float
    expected: float | None


@dataclass(frozen=True, slots=True)
class Totals:
    """What an engine has done since it was loaded; drafts are counted in ids."""

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafts_accepted: int = 0
    drafts_rejected: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine ``at`` a time of `time.perf_counter`. ``stop_reason``: what requests are told once
    it has stopped. ``cache`` is the one object that changes; it may be used on any thread."""

    at: float
    loaded: bool
    stop_reason: str
    cache: PrefixCache
    budget: Budget
    weight_bytes: int
    costs: Costs | None
    totals: Totals
    requests: tuple[RequestStatus, ...]


class Waiting:
    """How many requests wait to begin. Counted when they arrive, on their event loops, so that one
    too many is rejected at once; and when they begin or end, on the engine's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self, requests: int) -> None:
        with self._lock:
            self.count += requests
