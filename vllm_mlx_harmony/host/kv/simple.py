"""Prefix reuse in the simple engine: the prompt is computed here, the answer by mlx-lm as before.

Knows where a generator of the host's model wrapper begins and ends. Everything runs where that
generator runs: on the engine's own thread. Refuses to know what is remembered (`kv`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import wraps
from importlib import import_module
from typing import Any

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.host.kv import prefix
from vllm_mlx_harmony.host.kv.prefix import Known

logger = logging.getLogger(__name__)

STEP = 2048
"""Tokens computed at a time where ``--prefill-step-size`` says nothing else, as mlx-lm does it."""

ROOM = 256
"""Tokens an answer may have before the cache grows for the first time."""

Stream = Callable[..., Iterator[Any]]


def reuse_prefix(original: Stream) -> Stream:
    """``MLXLanguageModel.stream_generate`` that goes on where a ``Known`` prompt leaves the known.

    Other prompts, and calls that bring a cache of their own, are as before.
    """

    @wraps(original)
    def reusing(model: Any, prompt: Any, *args: Any, **keywords: Any) -> Iterator[Any]:
        if isinstance(prompt, Known) and not args and keywords.get("prompt_cache") is None:
            return _continued(original, model, prompt, keywords)
        return original(model, prompt, *args, **keywords)

    return reusing


def _continued(
    original: Stream, wrapper: Any, prompt: Known, keywords: dict[str, Any]
) -> Iterator[Any]:
    rest, cache = _prefilled(wrapper.model, prompt, keywords.pop("prefill_step_size", STEP))
    speaker = wrapper if keywords.get("stop") else _silent(wrapper)
    chunks = original(speaker, rest, **{**keywords, "prompt_cache": cache})
    generated: list[int] = []
    whole = False
    try:
        for chunk in chunks:
            generated.append(int(chunk.token))
            whole = bool(chunk.finished) or generated[-1] in vocab.TURN_ENDS
            chunk.prompt_tokens = len(prompt)
            yield chunk
    finally:
        _close(chunks)
        # One that was stopped before its end is no turn that anybody will continue.
        if whole and cache is not None:
            prefix.remember(wrapper.model, prompt.tenant, [*prompt, *generated], cache)


def _prefilled(model: Any, prompt: Known, step: int) -> tuple[list[int], list[Any] | None]:
    """What is left for mlx-lm to do: the last id, and a cache that holds the ones before it."""
    try:
        # mlx-lm would compute the prompt as well, but in steps of its own.
        if prefix.reusable(model) or step != STEP:
            return prompt[-1:], _prefill(model, prompt, step)
    except Exception:
        logger.exception("a prompt could not be computed in pieces")
    prompt.cached = 0
    return list(prompt), None


def _prefill(model: Any, prompt: Known, step: int) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    with _generating(model):
        known, cache = prefix.resume(model, prompt, answer=ROOM)
        cache = make_prompt_cache(model) if cache is None else cache
        for place in prefix.marks(prompt, after=known):
            _compute(model, prompt[known:place], cache, step)
            prefix.remember(model, prompt.tenant, prompt[:place], cache)
            known = place
        return cache


@contextmanager
def _generating(model: Any) -> Iterator[None]:
    """The stream and the memory limit that mlx-lm generates with."""
    import mlx.core as mx

    generate = import_module("mlx_lm.generate")  # the package has a function of that name
    stream = generate.generation_stream  # looked up late: the host gives each thread its own
    with generate.wired_limit(model, [stream]), mx.stream(stream):
        yield


def _compute(model: Any, ids: list[int], cache: list[Any], step: int) -> None:
    import mlx.core as mx

    for at in range(0, len(ids), step):
        model(mx.array(ids[at : at + step])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()


class _Silence:
    """A detokenizer for who asks for ids. mlx-lm's copies the whole vocabulary for every answer."""

    last_segment = ""

    def __init__(self, tokenizer: Any) -> None:
        """Nothing to prepare."""

    def add_token(self, token: int) -> None:
        """Nothing to spell."""

    def finalize(self) -> None:
        """Nothing left."""


def _silent(wrapper: Any) -> Any:
    """The host's wrapper of the model, with a tokenizer that spells nothing (0.1 s per answer)."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    tokenizer = wrapper.tokenizer
    if type(tokenizer) is not TokenizerWrapper:
        return wrapper
    silent = copy(wrapper)
    silent.tokenizer = object.__new__(TokenizerWrapper)  # it forwards even what copying asks for
    vars(silent.tokenizer).update(vars(tokenizer), _detokenizer_class=_Silence)
    return silent


def _close(chunks: Iterator[Any]) -> None:
    close = getattr(chunks, "close", None)
    if close is not None:
        close()
