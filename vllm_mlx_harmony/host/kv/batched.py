"""Prefix reuse in the batched engine: sequences start where the known ends, are cut as they run.

Knows mlx-lm's batch generator and the host's scheduler around it. Everything runs where the
generator runs: on the engine's own thread. Refuses to know what is remembered (`kv`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from typing import Any
from weakref import WeakSet

from mlx_lm.generate import BatchGenerator, GenerationBatch

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.host.kv import prefix
from vllm_mlx_harmony.host.kv.prefix import Known
from vllm_mlx_harmony.host.models import is_harmony

logger = logging.getLogger(__name__)

Method = Callable[..., Any]

_ours: WeakSet[Any] = WeakSet()
"""Schedulers whose prefix cache is ours."""


def ours_instead(original: Method) -> Method:
    """``Scheduler.__init__`` without the host's prefix cache where ours takes its place.

    The host's keeps every prompt-only entry as a copy of its own, stores none after a hit until
    the prompt has grown by 4,096 tokens, and writes what it has to the user's disk. Where it was
    turned off, nothing is reused at all.
    """

    @wraps(original)
    def init(self: Any, model: Any, tokenizer: Any, config: Any = None) -> None:
        from vllm_mlx.scheduler import SchedulerConfig

        config = config or SchedulerConfig()
        wanted = config.enable_prefix_cache and not config.max_kv_size
        if wanted and is_harmony(tokenizer) and prefix.reusable(model):
            config = replace(config, enable_prefix_cache=False)
            _ours.add(self)
        original(self, model, tokenizer, config)

    return init


def keep_known(original: Method) -> Method:
    """``Scheduler.add_request`` that hands a ``Known`` prompt on as it is, instead of a copy.

    What the host itself asks such an engine for (raw completions, warm-up) is made one.
    """

    @wraps(original)
    def add_request(self: Any, request: Any) -> None:
        if self not in _ours:
            original(self, request)
            return
        if isinstance(request.prompt, Known) and request.prompt_token_ids is None:
            request.prompt_token_ids = request.prompt
            request.num_prompt_tokens = len(request.prompt)
        original(self, request)
        if not isinstance(request.remaining_tokens, Known) and request.prompt_cache is None:
            request.remaining_tokens = Known(request.prompt_token_ids)

    return add_request


class Remembering(GenerationBatch):  # type: ignore[misc, unused-ignore]
    """A batch that has ``ended(row)`` called when a row ends, while it still holds the row."""

    ended: Callable[[int], None]

    def extract_cache(self, idx: int) -> list[Any]:
        """As before; mlx-lm calls it for a row that has ended."""
        self.ended(idx)
        extracted: list[Any] = super().extract_cache(idx)
        return extracted


class Reusing(BatchGenerator):  # type: ignore[misc, unused-ignore]
    """Starts ``Known`` prompts where the known ends, and remembers them as they run.

    Other prompts are as before. Those it was given and has not finished are in ``_known``, by uid.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._known: dict[int, Known] = {}
        self._generation_batch = Remembering.empty(self.model, self.sampler)
        self._generation_batch.ended = self._row_ended

    def insert_segments(self, segments: Any, *args: Any, **keywords: Any) -> Any:
        firsts = [segment[0] for segment in segments]
        uids = super().insert_segments(segments, *args, **keywords)
        known = zip(uids, firsts, strict=True)
        self._known.update({uid: ids for uid, ids in known if isinstance(ids, Known)})
        return uids

    def remove(self, uids: Any, *args: Any, **keywords: Any) -> Any:
        for uid in uids:
            self._known.pop(uid, None)
        return super().remove(uids, *args, **keywords)

    def _make_batch(self, n: int) -> Any:
        # Only now, when its turn has come: those before it may have made more known, and what
        # waits holds no memory.
        for at in range(n):
            self._unprocessed_sequences[at] = self._resumed(self._unprocessed_sequences[at])
        return super()._make_batch(n)

    def _resumed(self, sequence: tuple[Any, ...]) -> tuple[Any, ...]:
        uid, _, limit, _, before, *others = sequence
        prompt = self._known.get(uid)
        if prompt is None or before:
            return sequence
        known, cache = prefix.resume(self.model, prompt)
        places = [known, *prefix.marks(prompt, after=known), len(prompt)]
        pieces = [prompt[start:end] for start, end in pairwise(places)]
        return (
            *(uid, pieces, limit, cache or self._make_new_cache(), prompt[:known]),
            *others,
        )

    def _next(self) -> Any:
        prompted, generated = super()._next()
        for response in prompted:
            if response.end_of_segment and not response.end_of_prompt:
                self._remember(self._prompt_batch, response.uid)
        for response in generated:
            if response.finish_reason is None and response.token in vocab.TURN_ENDS:
                self._row_ended(self._generation_batch.uids.index(response.uid))
        return prompted, generated

    def _remember(self, batch: Any, uid: int) -> None:
        prompt = self._known.get(uid)
        if prompt is not None:
            row = batch.uids.index(uid)
            prefix.remember(self.model, prompt.tenant, batch.tokens[row], batch.prompt_cache, row)

    def _row_ended(self, row: int) -> None:
        batch = self._generation_batch
        uid = batch.uids[row]
        self._remember(batch, uid)
        self._known.pop(uid, None)


def reusing(original: type[Any]) -> type[Any]:
    """The scheduler's ``BatchGenerator``, which is mlx-lm's. Raises ``TypeError`` for another."""
    if original is not BatchGenerator:
        raise TypeError(f"{original} is not mlx-lm's BatchGenerator")
    return Reusing
