"""``--warm-prompts``: computes common beginnings of prompts before the first request."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import wraps
from itertools import takewhile
from time import perf_counter
from typing import TypeAlias

from fastapi import HTTPException

from vllm_mlx_harmony.core.errors import HarmonyFailure
from vllm_mlx_harmony.engine.prefix_cache import EVERYBODY
from vllm_mlx_harmony.host.engine import Messages, engine_of, prompt_ids
from vllm_mlx_harmony.server.sampling import Settings

logger = logging.getLogger(__name__)

Warm: TypeAlias = Callable[..., Awaitable[Mapping[str, object]]]


def warm_prefix_cache(original: Warm) -> Warm:
    """vllm-mlx's ``warm_prefix_cache``, for a Harmony model: computes the beginning of prompts
    with these messages, for all API keys. Those that fail are skipped with a warning."""

    @wraps(original)
    async def warm(
        engine: object, prompts: Sequence[Messages], *, max_tokens: int = 1
    ) -> Mapping[str, object]:
        ours = engine_of(engine)
        if ours is None:
            return await original(engine, prompts, max_tokens=max_tokens)
        started, computed, skipped = perf_counter(), 0, 0
        for index, messages in enumerate(prompts):
            try:
                prompt = _beginning(messages)
                async with aclosing(ours.generate(prompt, _NOTHING, EVERYBODY, None)) as steps:
                    async for _ in steps:
                        pass
                computed += len(prompt)
            except (HarmonyFailure, HTTPException) as error:
                logger.warning("warm-up prompt %d was skipped: %s", index, error)
                skipped += 1
        return {
            "count": len(prompts) - skipped,
            "skipped": skipped,
            "elapsed_ms": (perf_counter() - started) * 1000,
            "total_prompt_tokens": computed,
            "mode": "harmony",
        }

    return warm


_NOTHING = Settings(max_tokens=0, temperature=0.0, top_p=1.0)


def _beginning(messages: Messages) -> tuple[int, ...]:
    """The ids that all prompts with ``messages`` begin with, whatever the last user message is."""
    last = messages[-1] if messages else {}
    ends_with_user = isinstance(last, Mapping) and last.get("role") == "user"
    before = messages[: -1 if ends_with_user else None]
    one, other = (
        prompt_ids([*before, {"role": "user", "content": word}], None, None)
        for word in ("Alpha", "Bravo")
    )
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(token for token, _ in pairs)
