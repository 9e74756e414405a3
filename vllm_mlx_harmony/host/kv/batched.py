"""The batched engine: sequences start where the known ends, are drawn together, cut as they run.

Knows mlx-lm's batch generator and vllm-mlx's scheduler around it. Everything runs where the
generator runs: on the engine's own thread. Refuses to know what is remembered (`prefix`) and how an
id is drawn (`sampler`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.turn import VOCAB_SIZE
from vllm_mlx_harmony.engine.sampler import LIKELIEST, Sampler, claimed, draw
from vllm_mlx_harmony.host.kv import prefix
from vllm_mlx_harmony.host.kv.prefix import TenantPrompt
from vllm_mlx_harmony.host.models import is_harmony
from vllm_mlx_harmony.server.sampling import Settings

logger = logging.getLogger(__name__)

Method = Callable[..., Any]

_ours: WeakSet[Any] = WeakSet()
"""Schedulers whose prefix cache is ours."""


def ours_instead(original: Method) -> Method:
    """``Scheduler.__init__`` without vllm-mlx's prefix cache where ours takes its place.

    vllm-mlx's keeps every prompt-only entry as a copy of its own, stores none after a hit until
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
    """``Scheduler.add_request`` that hands a ``TenantPrompt`` on as it is, instead of a copy.

    What vllm-mlx itself asks such an engine for (raw completions, warm-up) is made one.
    """

    @wraps(original)
    def add_request(self: Any, request: Any) -> None:
        if self not in _ours:
            original(self, request)
            return
        if isinstance(request.prompt, TenantPrompt) and request.prompt_token_ids is None:
            request.prompt_token_ids = request.prompt
            request.num_prompt_tokens = len(request.prompt)
        original(self, request)
        if not isinstance(request.remaining_tokens, TenantPrompt) and request.prompt_cache is None:
            request.remaining_tokens = TenantPrompt(request.prompt_token_ids)

    return add_request


def own_sampler(original: Method) -> Method:
    """``Scheduler.add_request`` that gives requests of vllm-mlx's own a sampler, too.

    vllm-mlx has one for all that run together, that of the request which came first: a raw
    completion that joins a chat would be drawn as the chat is. Only with a Harmony model.
    """

    @wraps(original)
    def add_request(self: Any, request: Any) -> None:
        wanted = request.sampling_params
        sampler, others = claimed(wanted.logits_processors or ())
        if sampler is not None:
            self._detokenizer_pool[request.request_id] = Silence()
        elif is_harmony(self.tokenizer):
            settings = Settings(
                max_tokens=wanted.max_tokens,
                temperature=wanted.temperature,
                top_p=wanted.top_p or 1.0,  # none of the probability: mlx-lm takes it for all
                top_k=wanted.top_k if 0 < wanted.top_k < VOCAB_SIZE else 0,
                min_p=wanted.min_p,
            )
            request.sampling_params = replace(
                wanted,
                temperature=LIKELIEST,
                top_p=type(wanted).top_p,
                min_p=type(wanted).min_p,
                logits_processors=[Sampler(settings), *others],
            )
        original(self, request)

    return add_request


class Silence:
    """A detokenizer for who asks for ids: spelling them would cost each token, for nobody."""

    last_segment = text = ""

    def add_token(self, token: int) -> None:
        """Nothing to spell."""

    def finalize(self) -> None:
        """Nothing left."""


class Decoding(GenerationBatch):  # type: ignore[misc, unused-ignore]
    """A batch whose rows are drawn together, and that says when a row has ended.

    mlx-lm's own samples every row alone as soon as one has a sampler, and normalises the logits of
    all of them, which nobody reads. ``ended(row)`` is called while the batch still holds the row.
    """

    ended: Callable[[int], None] = staticmethod(lambda row: None)
    logits_processors: list[list[Any]]
    _next_tokens: Any

    def _step(self) -> tuple[list[int], list[Any]]:
        if not all(isinstance(each, Sampler) for each in self.samplers):
            stepped: tuple[list[int], list[Any]] = super()._step()  # a model that is not Harmony
            return stepped
        last = self._current_tokens = self._next_tokens
        logits = self.model(last[:, None], cache=self.prompt_cache)[:, -1, :]
        self._next_tokens = draw(self.samplers, last, self._processed(last, logits))
        mx.async_eval(self._next_tokens)
        ids: list[int] = last.tolist()
        for tokens, token in zip(self.tokens, ids, strict=True):
            tokens.append(token)
        # One of each row is counted on, none is looked at.
        self._next_logprobs = [None] * len(ids)
        return ids, self._next_logprobs

    def _processed(self, last: Any, logits: Any) -> Any:
        """``logits`` after the processors that requests of vllm-mlx's own brought."""
        if not any(self.logits_processors):
            return logits
        rows = [logits[row : row + 1] for row in range(len(self.uids))]
        for row, processors in enumerate(self.logits_processors):
            if processors:
                context = self._token_context[row].update_and_fetch(last[row : row + 1])
                mx.async_eval(context)  # else it grows, if nobody looks at it
                for processor in processors:
                    rows[row] = processor(context, rows[row])
        return mx.concatenate(rows)

    def extract_cache(self, idx: int) -> list[Any]:
        """As before; mlx-lm calls it for a row that has ended."""
        self.ended(idx)
        extracted: list[Any] = super().extract_cache(idx)
        return extracted

    def filter(self, keep: list[int]) -> None:
        """As before, and no list of processors is forgotten.

        When all are empty the original leaves those of finished sequences behind, and the sequence
        that comes next is run with one that is not its own. Drop when mlx-lm (0.31.3 does) no
        longer skips them.
        """
        bare = not any(self.logits_processors)
        super().filter(keep)
        if bare:
            self.logits_processors = [[] for _ in keep]


class Prefilling(PromptProcessingBatch):  # type: ignore[misc, unused-ignore]
    """Prompts of a batch, from which a ``Decoding`` comes."""

    uids: list[int]
    prompt_cache: list[Any]
    tokens: list[list[int]]
    samplers: list[Sampler | None]
    logits_processors: list[list[Any]]
    max_tokens: list[int]

    def extend(self, batch: Any) -> None:
        """As before, and every sequence has a list of processors.

        The original puts ``None`` in the place of empty ones. The generation that follows raises,
        at every step, for all sequences. Drop when mlx-lm (0.31.3 does) no longer does.
        """
        super().extend(batch)
        self.logits_processors = [each or [] for each in self.logits_processors]

    def generate(self, tokens: list[list[int]]) -> Decoding:
        """The original does the same, with a batch of its own class."""
        if any(len(each) > 1 for each in tokens):
            self.prompt([each[:-1] for each in tokens])
        decoding = Decoding(
            self.model,
            self.uids,
            mx.array([each[-1] for each in tokens], dtype=mx.uint32),
            self.prompt_cache,
            self.tokens,
            self.samplers,
            self.fallback_sampler,
            self.logits_processors,
            self.state_machines,
            self.max_tokens,
        )
        self.uids, self.prompt_cache, self.tokens = [], [], []
        self.samplers, self.logits_processors, self.max_tokens = [], [], []
        return decoding


class Reusing(BatchGenerator):  # type: ignore[misc, unused-ignore]
    """Starts ``TenantPrompt`` prompts where the known ends, and remembers them as they run.

    Other prompts are as before. Those it was given and has not finished are in ``_known``, by uid.
    Sequences that come with a ``Sampler`` are drawn with it.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        # mlx-lm would take its global stream, which by now may be that of another model's thread.
        keywords.setdefault("stream", mx.default_stream(mx.default_device()))
        super().__init__(*args, **keywords)
        self._known: dict[int, TenantPrompt] = {}
        self._prompt_batch = Prefilling.empty(
            self.model, self.sampler, prefill_step_size=self.prefill_step_size
        )
        self._generation_batch = Decoding.empty(self.model, self.sampler)
        self._generation_batch.ended = self._row_ended

    def insert_segments(  # noqa: PLR0917  # as mlx-lm's
        self,
        segments: Any,
        max_tokens: Any = None,
        caches: Any = None,
        all_tokens: Any = None,
        samplers: Any = None,
        logits_processors: Any = None,
        state_machines: Any = None,
    ) -> Any:
        """As before; samplers may be among the processors, which vllm-mlx hands through."""
        if logits_processors and not samplers:
            both = [claimed(each) for each in logits_processors]
            samplers, logits_processors = map(list, zip(*both, strict=True))
            for sampler in samplers:
                if sampler is not None:
                    sampler.begin()
        firsts = [segment[0] for segment in segments]
        uids = super().insert_segments(
            segments, max_tokens, caches, all_tokens, samplers, logits_processors, state_machines
        )
        known = zip(uids, firsts, strict=True)
        self._known.update({uid: ids for uid, ids in known if isinstance(ids, TenantPrompt)})
        return uids

    def remove(self, uids: Any, *args: Any, **keywords: Any) -> Any:
        for uid in uids:
            self._known.pop(uid, None)
        return super().remove(uids, *args, **keywords)

    def _make_batch(self, n: int) -> Any:
        # Only now, when its turn has come: those before it may have made more known, and what
        # waits holds no memory but what was read for it from a disk.
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
        with prefix.computing():
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
