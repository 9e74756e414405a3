"""Resolves the settings of a generation: those of its request, or else the server's defaults."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_mlx_harmony.core.errors import PromptTooLong, RequestError
from vllm_mlx_harmony.core.turn import RECOMMENDED, VOCAB_SIZE, OutputLimits, Sampling
from vllm_mlx_harmony.engine_api.engine import GenerationSettings

logger = logging.getLogger("vllm_mlx_harmony")

EPSILON = 1e-6
"""A smaller temperature or ``top_p`` always selects the likeliest id, and might underflow in
float32."""


def resolve(
    sampling: Sampling,
    limits: OutputLimits,
    max_tokens: Callable[[int | None], int],
    defaults: Sampling = RECOMMENDED,
) -> GenerationSettings:
    """The settings of the request, or else the server's ``defaults``, or else neutral ones.

    ``max_tokens`` is ``Host.max_tokens``; a larger limit of the request is logged (semantics E3).
    Raises ``RequestError`` for a bias on an id that does not exist.
    """

    def value(name: str, neutral: Any) -> Any:
        values = (getattr(sampling, name), getattr(defaults, name))
        return next((value for value in values if value is not None), neutral)

    temperature, top_p, top_k = value("temperature", 1.0), value("top_p", 1.0), value("top_k", 0)
    most = max_tokens(limits.max_tokens)
    if limits.max_tokens is not None and most < limits.max_tokens:
        logger.info("%s exceeds this server's limit, which is %d", limits.where, most)
    for token, _ in sampling.logit_bias:
        if not 0 <= token < VOCAB_SIZE:
            raise RequestError(f"token id {token} is out of range", param="logit_bias")
    return GenerationSettings(
        max_tokens=most,
        temperature=0.0 if min(temperature, top_p) < EPSILON else temperature,
        top_p=max(top_p, EPSILON),
        top_k=top_k if 0 < top_k < VOCAB_SIZE else 0,
        min_p=value("min_p", 0.0),
        presence_penalty=value("presence_penalty", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        logit_bias=sampling.logit_bias,
        frequency_penalty=value("frequency_penalty", 0.0),
        seed=sampling.seed,
        top_logprobs=sampling.top_logprobs,
    )


def reseeded(settings: GenerationSettings, choice: int) -> GenerationSettings:
    """``settings`` for another answer to the same prompt: ``choice`` is added to its seed."""
    if settings.seed is None:
        return settings
    return replace(settings, seed=(settings.seed + choice + 2**63) % 2**64 - 2**63)


def limited_to_context(
    settings: GenerationSettings, prompt_tokens: int, context_length: int | None
) -> GenerationSettings:
    """``settings`` with ``max_tokens`` reduced to what the context can hold after the prompt.

    Raises ``PromptTooLong`` if that is nothing (semantics A11).
    """
    if context_length is None:
        return settings
    available = context_length - prompt_tokens
    if available < 1:
        raise PromptTooLong(prompt_tokens, context_length)
    if settings.max_tokens <= available:
        return settings
    return replace(settings, max_tokens=available)
