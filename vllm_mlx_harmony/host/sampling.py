"""How the next id is chosen, as the host's engines want it: the request's values over the server's.

Knows the host's defaults and which settings its batched engine would drop or mix up.
Refuses to know prompts, engines' loops and APIs. No mlx array is made outside the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

from fastapi import HTTPException

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Limits, Sampling

ROWS = 201_088
"""Ids gpt-oss can say. A bias beyond them would write outside the logits."""

Processor: TypeAlias = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything an engine needs beside the prompt: no ``None`` is left."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


def settle(sampling: Sampling, limits: Limits) -> Settings:
    """The request's values where it gives any, the server's otherwise.

    Raises ``RequestError`` for a ``max_tokens`` over the server's limit and a bias on no id.
    """
    from vllm_mlx import server

    top_k = server._resolve_top_k(sampling.top_k)
    return Settings(
        max_tokens=_max_tokens(limits),
        temperature=server._resolve_temperature(sampling.temperature),
        top_p=server._resolve_top_p(sampling.top_p),
        top_k=top_k if 0 < top_k < ROWS else 0,
        min_p=server._resolve_min_p(sampling.min_p),
        presence_penalty=server._resolve_presence_penalty(sampling.presence_penalty),
        repetition_penalty=server._resolve_repetition_penalty(sampling.repetition_penalty),
        logit_bias=_checked(sampling.logit_bias),
    )


def _max_tokens(limits: Limits) -> int:
    from vllm_mlx import server

    try:
        allowed: int = server._resolve_request_max_tokens(limits.max_tokens)
    except HTTPException as error:
        raise RequestError(str(error.detail), param="max_tokens") from error
    return allowed


def _checked(logit_bias: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    for token, _ in logit_bias:
        if not 0 <= token < ROWS:
            raise RequestError(f"no token has the id {token}", param="logit_bias")
    return logit_bias


def bias(settings: Settings) -> list[Processor]:
    """The processors for the logit bias, which neither engine knows."""
    if not settings.logit_bias:
        return []
    return [_late(lambda: _make(logit_bias=dict(settings.logit_bias)))]


def when_batched(settings: Settings) -> list[Processor]:
    """The processors for what the batched engine would not do, or not for this request alone.

    It takes ``presence_penalty`` and ignores it, and it has one sampler for all that run together:
    that of the request which came first. So each draws its own id, as its last processor, and the
    engine is asked for the likeliest one. Drop when the host hands on a sampler for each sequence,
    as mlx-lm's batch generator takes them.
    """
    processors: list[Processor] = []
    if settings.presence_penalty:
        processors.append(_late(lambda: _make(presence_penalty=settings.presence_penalty)))
    if settings.temperature > 0:
        processors.append(_late(lambda: [_draw(settings)]))
    return processors


def keep_aligned(original: Callable[[Any, list[int]], None]) -> Callable[[Any, list[int]], None]:
    """mlx-lm's ``GenerationBatch.filter``, which forgets no list of processors.

    When all lists are empty the original leaves those of finished sequences behind, and the
    sequence that comes next is run with a list that is not its own: its bias and penalties are
    ignored. Drop when mlx-lm (0.31.3 does) no longer skips them.
    """

    @wraps(original)
    def keep_only(batch: Any, keep: list[int]) -> None:
        bare = not any(batch.logits_processors)
        original(batch, keep)
        if bare:
            batch.logits_processors = [[] for _ in keep]

    return keep_only


def _make(**wanted: Any) -> list[Processor]:
    from mlx_lm.sample_utils import make_logits_processors

    made: list[Processor] = make_logits_processors(**wanted)
    return made


def _draw(settings: Settings) -> Processor:
    """Leaves of the logits (rows, vocabulary) one id for each row: the one that is drawn."""
    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    sample = make_sampler(
        temp=settings.temperature,
        top_p=settings.top_p,
        min_p=settings.min_p,
        top_k=settings.top_k,
    )

    def draw(_tokens: Any, logits: Any) -> Any:
        drawn = sample(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        chosen = mx.arange(logits.shape[-1]) == drawn[:, None]
        return mx.where(chosen, mx.zeros_like(logits), -mx.inf)

    return draw


def _late(make: Callable[[], list[Processor]]) -> Processor:
    """A processor made when it is first used: by then it runs on the thread that owns the model."""
    made: list[Processor] = []

    def processor(tokens: Any, logits: Any) -> Any:
        if not made:
            made.extend(make())
        for each in made:
            logits = each(tokens, logits)
        return logits

    return processor
