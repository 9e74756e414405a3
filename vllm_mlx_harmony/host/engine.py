"""An engine as an asynchronous iterator of token ids: prompt ids in, generated ids out.

Knows the two engines of vllm-mlx, where each loses ids, and how each reports a failure.
Refuses to know what the ids mean, except those that end a turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError
from vllm_mlx_harmony.engine.masks import LogitsMask
from vllm_mlx_harmony.engine.sampler import LIKELIEST, Sampler
from vllm_mlx_harmony.host.kv import prefix
from vllm_mlx_harmony.host.kv.prefix import TenantPrompt
from vllm_mlx_harmony.host.kv.status import model_of
from vllm_mlx_harmony.host.prompts import PromptText
from vllm_mlx_harmony.server import generation
from vllm_mlx_harmony.server.engine import Finish, Step, Steps
from vllm_mlx_harmony.server.sampling import Settings

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.02
_FAILED = "the engine failed while it was generating: the server's log says why"


async def generate(
    engine: Any,
    prompt: tuple[int, ...],
    settings: Settings,
    tenant: str = "",
    constraint: Constraint | None = None,
) -> Steps:
    """The ids that follow ``prompt``, up to and with the first that ends the turn.

    With ``max_tokens`` 0 there are none: the prompt is computed, and what can be reused of it is
    remembered. Both engines compute a prompt's last id only to choose the next: one is chosen, and
    is nobody's.
    What is remembered of the prompt is ``tenant``'s alone (see `kv.prefix`).
    Of all ids only those come that ``constraint`` lets through.
    Close the iterator (``aclosing``) to stop earlier: the engine is free again when that returns.
    Raises ``OutputError`` when the engine fails, ``HostError`` for one that takes no ids.
    """
    if engine.is_mllm:
        raise HostError("this engine serves a multimodal model: it takes no token ids", status=500)
    nothing = settings.max_tokens == 0
    settings = replace(settings, max_tokens=max(settings.max_tokens, 1))
    source = _simple if one_at_a_time(engine) else _batched
    try:
        processor = None if constraint is None else partial(LogitsMask, constraint)
        sampler = Sampler(settings, prompt, processor)
        known = IdPrompt(prompt, tenant)
        known.match = await prefix.fetch(model_of(engine), known, tenant)
        try:
            async with aclosing(source(engine, known, sampler)) as steps:
                async for step in steps:
                    if nothing:
                        ended = replace(step, ids=(), finish="length" if step.finish else None)
                    else:
                        ended = _ended(step)
                    yield ended
                    if ended.finish is not None:
                        return
        finally:
            known.match = None  # of one that never had its turn
    except HarmonyFailure:
        raise
    except Exception as error:
        logger.exception("the engine failed")
        raise OutputError(_FAILED) from error
    raise OutputError("the engine ended before the answer did")


def one_at_a_time(engine: Any) -> bool:
    """Whether the engine refuses a second request while one runs."""
    return hasattr(engine, "_generation_lock")


def _ended(step: Step) -> Step:
    """The step up to the first id that ends the turn; engines may run on behind it."""
    for at, token in enumerate(step.ids, start=1):
        if token in vocab.TURN_ENDS:
            return replace(step, ids=step.ids[:at], finish="stop")
    return step


async def reusable_tokens(engine: Any, prompt: Sequence[int], tenant: str = "") -> int:
    """How many ids of ``prompt`` would not be computed if it were generated from now.

    What is true then can be another number: a batching engine may run others before.
    """
    model = model_of(engine)
    return 0 if model is None else await prefix.reach(model, prompt, tenant)


async def _batched(engine: Any, prompt: IdPrompt, sampler: Sampler) -> Steps:
    from vllm_mlx.request import SamplingParams

    params = SamplingParams(
        max_tokens=sampler.settings.max_tokens,
        temperature=LIKELIEST,
        # Counts only when this request is the one vllm-mlx makes its batch generator for.
        stop_token_ids=sorted(vocab.TURN_ENDS),
        logits_processors=[sampler],
    )
    # The core itself, not its asynchronous wrapper: closing the wrapper leaves the core's
    # iterator, which aborts the request, to the garbage collector.
    core = engine._engine.engine
    request_id = await core.add_request(prompt=prompt, sampling_params=params)
    async with _closed_whole(core.stream_outputs(request_id)) as outputs:
        async for output in outputs:
            finish = _finish(output.finish_reason)
            yield Step(tuple(output.new_token_ids), finish, prompt.cached)
            _raise_if_failed(output.finish_reason)


async def _simple(engine: Any, prompt: IdPrompt, sampler: Sampler) -> Steps:
    from vllm_mlx.engine.base import EngineBusy

    started = False
    while not started:
        # Until none of vllm-mlx's own routes holds the engine. Another may be quicker than the call
        # that follows: then the engine says so, and we wait again.
        async with engine._generation_lock:
            pass
        generated = engine.stream_generate(
            prompt=prompt,
            prefill_step_size=engine._prefill_step_size,
            max_tokens=sampler.settings.max_tokens,
            temperature=LIKELIEST,
            specprefill=False,  # it reads the prompt as text
            logits_processors=[sampler],
        )
        try:
            async with _closed_whole(generated) as outputs:
                async for output in outputs:
                    started = True
                    yield Step(prompt.take(), _finish(output.finish_reason), prompt.cached)
                    _raise_if_failed(output.finish_reason)
                return
        except EngineBusy:
            if started:
                raise
            await asyncio.sleep(_RETRY_SECONDS)


@asynccontextmanager
async def _closed_whole(outputs: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
    """``outputs``, closed behind it to the end: a cancellation waits for that.

    vllm-mlx awaits while it cleans up. Cancelled there, when a client goes just as its answer
    ends, it would leave out the rest: the request stood in ``/v1/status`` for ever.
    """
    try:
        yield outputs
    finally:
        closing = asyncio.ensure_future(outputs.aclose())
        await generation.end_of(closing)
        closing.result()


_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}


def _finish(reason: str | None) -> Finish | None:
    return _FINISHES.get(reason or "")


def _raise_if_failed(reason: str | None) -> None:
    """Any other reason is one: ``error`` (out of memory, say) or ``abort`` (the server stops)."""
    if reason == "error":
        raise OutputError(_FAILED)
    if reason is not None and reason not in _FINISHES:
        raise OutputError(f"the engine gave the answer up ({reason})")


class IdPrompt(TenantPrompt):
    """A prompt that collects the ids generated for it: the simple engine hands on only their text.

    Written on the engine's thread, taken on the event loop's.
    """

    def __init__(self, ids: tuple[int, ...], tenant: str = "") -> None:
        super().__init__(ids, tenant)
        self._generated: deque[int] = deque()

    def watch(self, chunks: Iterator[Any]) -> Iterator[Any]:
        """``chunks`` as they are, with the id of each collected."""
        try:
            for chunk in chunks:
                self._generated.append(int(chunk.token))
                yield chunk
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                close()

    def take(self) -> tuple[int, ...]:
        """The ids collected since the last time."""
        collected = self._generated
        return tuple(collected.popleft() for _ in range(len(collected)))


def hand_on_ids(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """``MLXLanguageModel.stream_generate`` that reports to an ``IdPrompt``, and else is as before.

    A ``PromptText`` goes in as its ids. Drop when vllm-mlx hands on token ids in
    ``GenerationOutput.tokens``.
    """

    @wraps(original)
    def reporting(model: Any, prompt: Any, *args: Any, **keywords: Any) -> Iterator[Any]:
        if isinstance(prompt, PromptText):
            prompt = list(prompt.ids)
        chunks = original(model, prompt, *args, **keywords)
        return prompt.watch(chunks) if isinstance(prompt, IdPrompt) else chunks

    return reporting


def forget_waiting(original: Callable[[Any, str], bool]) -> Callable[[Any, str], bool]:
    """``Scheduler._do_abort_request`` that finds a request which still waits, too.

    By the time an abort is carried out vllm-mlx has cleaned the request up, does not find it, and
    leaves it in the queue: it is generated later, to its end, for nobody. Drop when vllm-mlx looks
    for it there.
    """

    @wraps(original)
    def abort(scheduler: Any, request_id: str) -> bool:
        for request in [one for one in scheduler.waiting if one.request_id == request_id]:
            scheduler.waiting.remove(request)
        return original(scheduler, request_id)

    return abort
