"""How the next id is chosen, as the host's engines want it: the request's values over the server's.

Knows the host's defaults, and how ids are drawn with mlx-lm's means, on either engine alike.
Refuses to know prompts, engines' loops and APIs. No mlx array is made outside the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeAlias

from fastapi import HTTPException

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Limits, Sampling

ROWS = 201_088
"""Ids gpt-oss can say. A bias beyond them would write outside the logits."""

SMALLEST = 1e-6
"""A temperature or ``top_p`` below it leaves the likeliest id, and float32 cannot show it."""

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

    temperature = server._resolve_temperature(sampling.temperature)
    top_p, top_k = server._resolve_top_p(sampling.top_p), server._resolve_top_k(sampling.top_k)
    return Settings(
        max_tokens=_max_tokens(limits),
        temperature=0.0 if min(temperature, top_p) < SMALLEST else temperature,
        top_p=max(top_p, SMALLEST),
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
        said = str(error.detail).replace("max_tokens", limits.where)
        raise RequestError(said, param=limits.where, code="invalid_value") from error
    return allowed


def _checked(logit_bias: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    for token, _ in logit_bias:
        if not 0 <= token < ROWS:
            raise RequestError(f"no token has the id {token}", param="logit_bias")
    return logit_bias


def processors(settings: Settings) -> list[Processor]:
    """What chooses the next id, for an engine that is asked for the likeliest: at least one.

    The same on both engines. The batched one has a single sampler for all that run together, that
    of the request which came first, and ignores ``top_k`` and ``presence_penalty``; neither knows
    a bias. So each request draws its own id, at temperature 0 too, and leaves the engine no other.
    Drop when the host hands on a sampler for each sequence, as mlx-lm's batch generator takes them.
    """
    return [_late(lambda: _make(settings))]


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


def never_none(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """mlx-lm's ``PromptProcessingBatch.extend``, after which every sequence has a list.

    The original puts ``None`` in the place of empty ones. The generation that follows raises, at
    every step, for all sequences. Drop when mlx-lm (0.31.3 does) no longer does.
    """

    @wraps(original)
    def extend(batch: Any, other: Any) -> None:
        original(batch, other)
        batch.logits_processors = [each or [] for each in batch.logits_processors]

    return extend


def _make(settings: Settings) -> list[Processor]:
    from mlx_lm.sample_utils import make_logits_processors

    made: list[Processor] = make_logits_processors(
        logit_bias=dict(settings.logit_bias) or None,
        repetition_penalty=_unless(1.0, settings.repetition_penalty),
        presence_penalty=_unless(0.0, settings.presence_penalty),
    )
    return [*made, _draw(settings)]


def _unless(neutral: float, penalty: float) -> float | None:
    return None if penalty == neutral else penalty


def _draw(settings: Settings) -> Processor:
    """Leaves of the logits (rows, vocabulary) one id for each row: the one that is drawn."""
    import mlx.core as mx

    choose = partial(_sample, settings=settings) if settings.temperature > 0 else mx.argmax

    def draw(_tokens: Any, logits: Any) -> Any:
        chosen = mx.arange(logits.shape[-1]) == choose(logits, axis=-1)[:, None]
        return mx.where(chosen, mx.zeros_like(logits), -mx.inf)

    return draw


def _sample(logits: Any, axis: int, settings: Settings) -> Any:
    """An id for each row; in float32, whatever the model computes in."""
    import mlx.core as mx
    from mlx_lm.sample_utils import categorical_sampling

    exact = logits.astype(mx.float32)
    logprobs = exact - mx.logsumexp(exact, axis=axis, keepdims=True)
    return categorical_sampling(_allowed(logprobs, settings), settings.temperature)


def _allowed(logprobs: Any, settings: Settings) -> Any:
    """``logprobs`` (rows, vocabulary) with -inf for what may not come; the likeliest always may.

    The probabilities of 201,088 ids, summed up, can stay short of ``1 - top_p``: then mlx-lm drops
    them all, and whatever has no probability at all is as likely as anything.
    """
    import mlx.core as mx
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

    kept = logprobs
    if settings.top_p < 1:
        kept = apply_top_p(kept, settings.top_p)
    if settings.min_p:
        kept = apply_min_p(kept, settings.min_p)
    if settings.top_k:
        kept = apply_top_k(kept, settings.top_k)
    return mx.where(logprobs == mx.max(logprobs, axis=-1, keepdims=True), logprobs, kept)


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
