"""The simple engine's way with prompts of ours: computed from where they leave the known, and on.

Knows where a generator of vllm-mlx's model wrapper begins and ends. Everything runs where that
generator runs: on the engine's own thread, and on that thread's default stream. vllm-mlx makes that
the one to generate on, and has ``mlx_lm.generate.generation_stream`` be it, too; but this is one
global of the process, and another model's thread may have it be another's at any moment.
Refuses to know what is remembered (`prefix`) and how an id is drawn (`sampler`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from itertools import count
from typing import Any

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine.sampler import Sampler, claimed, draw
from vllm_mlx_harmony.host.kv import prefix
from vllm_mlx_harmony.host.kv.prefix import TenantPrompt

logger = logging.getLogger(__name__)

STEP = 2048
"""Tokens computed at a time where ``--prefill-step-size`` says nothing else, as mlx-lm does it."""

HEADROOM = 256
"""Tokens an answer may have before the cache grows for the first time. Every so many tokens, too,
what the device has put aside is freed, as mlx-lm does it."""

Stream = Callable[..., Iterator[Any]]


def reuse_prefix(original: Stream) -> Stream:
    """``MLXLanguageModel.stream_generate``, begun where a ``TenantPrompt`` leaves the known.

    One that brings a ``Sampler``, that is: other prompts, and calls that bring a cache of their
    own, are as before.
    """

    @wraps(original)
    def reusing(model: Any, prompt: Any, *args: Any, **keywords: Any) -> Iterator[Any]:
        if isinstance(prompt, TenantPrompt) and not args and keywords.get("prompt_cache") is None:
            sampler, others = claimed(keywords.get("logits_processors") or ())
            if sampler is not None and not others:
                step = keywords.get("prefill_step_size", STEP)
                return _answer(model.model, prompt, sampler, keywords["max_tokens"], step)
        return original(model, prompt, *args, **keywords)

    return reusing


def _answer(
    model: Any, prompt: TenantPrompt, sampler: Sampler, limit: int, step: int
) -> Iterator[Any]:
    """vllm-mlx's chunks for the ids that follow ``prompt``, without text: nobody reads it."""
    from vllm_mlx.models.llm import StreamingOutput

    with prefix.computing():
        cache = _prefilled(model, prompt, step)
        sampler.begin()
        chunks = _decoded(model, prompt[-1], cache, sampler)
        generated: list[int] = []
        finish = None
        try:
            for token in chunks:
                generated.append(token)
                ends = token in vocab.TURN_ENDS
                finish = "stop" if ends else "length" if len(generated) == limit else None
                yield StreamingOutput("", token, finish is not None, finish, len(prompt))
                if finish is not None:
                    break
        finally:
            chunks.close()
            # One that was stopped before its end is no turn that anybody will continue.
            if finish is not None:
                prefix.remember(model, prompt.tenant, [*prompt, *generated], cache)


def _decoded(
    model: Any, last: int, cache: list[Any], sampler: Sampler
) -> Generator[int, None, None]:
    """One id after another, for as long as they are asked for.

    Each is handed out when the computation of the next is under way. The cache holds what was
    handed out.
    """
    import mlx.core as mx

    def following(ids: Any) -> Any:
        drawn = draw([sampler], ids, model(ids[None], cache=cache)[:, -1, :])
        mx.async_eval(drawn)
        return drawn

    with _wired(model):
        coming = following(mx.array([last], dtype=mx.uint32))
        for made in count(1):
            ids, coming = coming, following(coming)
            yield ids.item()
            if made % HEADROOM == 0:
                mx.clear_cache()


def _prefilled(model: Any, prompt: TenantPrompt, step: int) -> list[Any]:
    """A cache that holds all of ``prompt`` but its last id."""
    from mlx_lm.models.cache import make_prompt_cache

    with _wired(model):
        try:
            if prefix.reusable(model):
                known, resumed = prefix.resume(model, prompt, answer=HEADROOM)
                cache: list[Any] = make_prompt_cache(model) if resumed is None else resumed
                for place in prefix.marks(prompt, after=known):
                    _compute(model, prompt[known:place], cache, step)
                    prefix.remember(model, prompt.tenant, prompt[:place], cache)
                    known = place
                return cache
        except Exception:
            logger.exception("a prompt could not be computed in pieces")
        prompt.cached = 0
        cache = make_prompt_cache(model)
        _compute(model, prompt[:-1], cache, step)
        return cache


@contextmanager
def _wired(model: Any) -> Iterator[None]:
    """The memory limit that mlx-lm generates with."""
    import mlx.core as mx

    generate = import_module("mlx_lm.generate")  # the package has a function of that name
    with generate.wired_limit(model, [mx.default_stream(mx.default_device())]):
        yield


def _compute(model: Any, ids: list[int], cache: list[Any], step: int) -> None:
    import mlx.core as mx

    for at in range(0, len(ids), step):
        model(mx.array(ids[at : at + step])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
