"""How an id is sampled from logits: a sampler for each sequence, one computation for each step.

The sequences of a batch have settings of their own. In each step, what the settings ask for is
computed at once for all rows that ask for it, with temperature, ``top_p`` and so on as columns
beside the logits; what a row does not ask for costs it nothing. In this order:

1. The sequence's *mask*, if it has one: what its grammar allows.
2. ``logit_bias``, then the penalties, over the text generated so far: not the prompt, and not
   headers, where a penalty on a word used before would make the model misspell its own format. The
   device counts how often each id was generated. As in vLLM, a repetition penalty divides what is
   positive and multiplies what is negative, then frequency and presence are subtracted.
3. ``top_p``, ``min_p`` and ``top_k``. Each leaves the ids whose probability reaches a threshold,
   so that ids of equal probability stay or go together, and the likeliest always stays. Sorting
   201,088 floats to find it takes longer than everything else together (and on Metal a partition
   is a sort). But positive floats are ordered as their bits are, as integers: 30 halvings of the
   range find the very float, with nothing read back from the device.
4. Sampling, as an argmax over logits with Gumbel noise. Each sequence has random keys of its own,
   one per step: the same seed samples the same id from the same logits, whatever runs beside it.
   Temperature comes after the filters, as in mlx-lm.

Everything is computed in float32, whatever the model computes in. Nothing here waits for the
device, except for sequences with a mask. A ``Sampler`` may be created on any thread; the rest
runs on the thread that owns the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, TypeAlias

import mlx.core as mx

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import LOWEST_LOGPROB
from vllm_mlx_harmony.engine.masks import ApplyMask, LogitsMask
from vllm_mlx_harmony.engine_api.engine import GenerationSettings

SamplerState: TypeAlias = "tuple[int, tuple[Any, ...], mx.array | None, mx.array | None]"
"""What the next id of a sequence depends on: see ``Sampler.state``."""

MIN_TEMPERATURE = 1e-5
"""Below it, the likeliest id is chosen, as at 0: logits divided by less are infinite. As in vLLM
(``_SAMPLING_EPS``)."""

MAX_PENALTY = 1e4
"""Largest bias and penalty: large enough to outweigh any logit; small enough that no sum or product
overflows, which would give NaN."""

_HEADER = (vocab.START, vocab.CHANNEL, vocab.CONSTRAIN, vocab.END)
"""Ids that a header follows, or continues after; `<|message|>` ends it."""


class Sampler:
    """The settings of one sequence, and the state that its next id depends on.

    ``prompt`` is what the sequence continues: it decides whether a header or text comes first.
    ``mask`` restricts which ids may come next. It is called once per step, in order, and may be
    called after the last id, because an engine runs one step ahead; ``sample_ahead`` takes
    functions of `LogitsMask.after` instead and does not call it.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        prompt: Sequence[int] = (),
        mask: LogitsMask | None = None,
    ) -> None:
        self.settings = settings
        self.mask = mask
        # As text: `Random` treats -1 and 1 as the same seed.
        self._random = Random(None if settings.seed is None else str(settings.seed))
        last_control = next((token for token in prompt[::-1] if token >= vocab.CONTROL.start), None)
        # A prompt without control ids is plain text, as `/v1/completions` sends it.
        self._opens_with_text = last_control in (None, vocab.MESSAGE)
        self.greedy = settings.temperature < MIN_TEMPERATURE
        self.filters = (settings.top_p < 1, settings.min_p > 0, settings.top_k > 0)
        self.penalises = (
            settings.presence_penalty != 0
            or settings.frequency_penalty != 0
            or settings.repetition_penalty != 1
        )
        self.adjusts = mask is not None or self.penalises or bool(settings.logit_bias)
        self._steps = 0
        self._counts: mx.array | None = None
        self._in_text: mx.array | None = None

    def key(self) -> tuple[int, int]:
        """A new random key; call once per step."""
        self._steps += 1
        return self._random.getrandbits(32), self._random.getrandbits(32)

    def count(self, last: mx.array, size: int) -> None:
        """Takes in the id (1,) that the next one follows, of a vocabulary of ``size``."""
        if not self.penalises:
            return
        if self._counts is None or self._in_text is None:
            self._counts = mx.zeros((size,), dtype=mx.float32)
            self._in_text = mx.array([self._opens_with_text])
        else:
            heads = (last[:, None] == mx.array(_HEADER, dtype=last.dtype)).any(axis=-1)
            self._in_text = mx.where(heads, False, self._in_text | (last == vocab.MESSAGE))
            counted = self._in_text & (last < vocab.CONTROL.start)
            self._counts = self._counts.at[last].add(counted.astype(mx.float32))

    def biased(self, logits: mx.array) -> mx.array:
        """``logits`` (1, vocabulary) after bias and penalties."""
        settings = self.settings
        # mlx does not check indices: it would write behind the logits.
        biases = [bias for bias in settings.logit_bias if bias[0] < logits.shape[-1]]
        if biases:
            ids, values = zip(*((token, _bounded(bias)) for token, bias in biases), strict=True)
            logits = logits.at[:, mx.array(ids)].add(mx.array(values, dtype=mx.float32))
        if not self.penalises:
            return logits
        counts = mx.where(self._in_text, self._counts, 0.0)[None]
        if settings.repetition_penalty != 1:
            penalty = max(1 / MAX_PENALTY, _bounded(settings.repetition_penalty))
            factor = mx.where(logits < 0, penalty, 1 / penalty)
            logits = mx.where(counts > 0, logits * factor, logits)
        if settings.frequency_penalty:
            logits = logits - _bounded(settings.frequency_penalty) * counts
        if settings.presence_penalty:
            penalty = _bounded(settings.presence_penalty)
            logits = mx.where(counts > 0, logits - penalty, logits)
        # A control id is never counted, hence never penalised.
        return logits

    @property
    def state(self) -> SamplerState:
        """What the next id depends on: assigning an earlier one forgets what came after it."""
        return self._steps, self._random.getstate(), self._counts, self._in_text

    @state.setter
    def state(self, state: SamplerState) -> None:
        self._steps, key, self._counts, self._in_text = state
        self._random.setstate(key)


def sample(samplers: Sequence[Sampler], last: mx.array, logits: mx.array) -> mx.array:
    """The next id of each sequence: ids (rows,) from logits (rows, vocabulary).

    ``last`` (rows,) are the ids that led to the logits: of the prompt at a sequence's first step,
    later what was sampled.
    """
    if any(sampler.adjusts for sampler in samplers):
        read: list[int | None] = [None] * len(samplers)
        if any(sampler.mask is not None for sampler in samplers):
            mx.async_eval(logits)  # the device has work while Python waits for `last`
            read = last.tolist()
        parts = mx.split(logits.astype(mx.float32), len(samplers))
        for at, sampler in enumerate(samplers):
            if sampler.mask is not None:
                # At first, the last id is the prompt's: the matcher must not consume it.
                parts[at] = sampler.mask(read[at] if sampler._steps else None, parts[at])
            if sampler.adjusts:
                sampler.count(last[at : at + 1], logits.shape[-1])
                parts[at] = sampler.biased(parts[at])
        logits = mx.concatenate(parts)
    kinds = [(sampler.greedy, *sampler.filters) for sampler in samplers]
    if len({*kinds}) == 1:
        return _sample_alike(samplers, logits, [sampler.key() for sampler in samplers])
    sampled = mx.zeros((len(samplers),), dtype=mx.uint32)
    for kind in {*kinds}:
        alike = [row for row, own in enumerate(kinds) if own == kind]
        some, rows = [samplers[row] for row in alike], mx.array(alike)
        sampled[rows] = _sample_alike(some, logits[rows], [sampler.key() for sampler in some])
    return sampled


def sample_ahead(
    sampler: Sampler,
    run: Sequence[int],
    draft: Sequence[int],
    apply_masks: Sequence[ApplyMask],
    logits: mx.array,
) -> tuple[mx.array, list[SamplerState]]:
    """The id after ``run`` and the id after each id of ``draft``, as if all before it were sampled.

    ``run`` is the id that was sampled last, or the prompt's, and those forced after it. ``logits``
    (places, vocabulary) are those of the ids that are returned (places,), and ``apply_masks`` what
    masks each; unused if the sampler has nothing to adjust. With each id comes the state of the
    sampler after it: assign the state before a wrong id to forget what was sampled after it.
    """
    size = logits.shape[-1]
    for token in run[:-1]:
        sampler.count(mx.array([token], dtype=mx.uint32), size)
        sampler.key()
    rows = mx.split(logits.astype(mx.float32), len(draft) + 1) if sampler.adjusts else []
    keys, states = [], []
    for at, token in enumerate((run[-1], *draft)):
        if sampler.adjusts:
            sampler.count(mx.array([token], dtype=mx.uint32), size)
            rows[at] = sampler.biased(apply_masks[at](rows[at]))
        keys.append(sampler.key())
        states.append(sampler.state)
    logits = mx.concatenate(rows) if rows else logits
    return _sample_alike([sampler] * len(keys), logits, keys), states


def accepted_count(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """How many ids of ``draft`` are right: those before the first place where another is sampled.

    A draft proposes one id for certain. Rejection sampling accepts it with the probability that the
    sampler gives it, and else takes another: just as sampling from all of them and comparing does.
    """
    pairs = zip(draft, sampled, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(draft))


def log_probabilities(
    logits: mx.array, sampled: mx.array, most: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Of the model's own distribution: log probabilities of the ids ``sampled`` (rows,), and the
    ``most`` likeliest ids and their log probabilities (rows, most), likeliest first."""
    logits = logits.astype(mx.float32)
    scores = mx.maximum(logits - mx.logsumexp(logits, axis=-1, keepdims=True), LOWEST_LOGPROB)
    own = mx.take_along_axis(scores, sampled[:, None], axis=-1)[:, 0]
    if not most:
        none = mx.zeros((len(own), 0), dtype=mx.uint32)
        return own, none, none
    ids = mx.argpartition(-scores, most, axis=-1)[:, :most]
    found = mx.take_along_axis(scores, ids, axis=-1)
    order = mx.argsort(-found, axis=-1)
    return own, *(mx.take_along_axis(array, order, axis=-1) for array in (ids, found))


def _sample_alike(
    samplers: Sequence[Sampler], logits: mx.array, keys: Sequence[tuple[int, int]]
) -> mx.array:
    """Ids (rows,) for sequences that ask for the same parts, each with values of its own."""
    if samplers[0].greedy:
        return mx.argmax(logits, axis=-1).astype(mx.uint32)
    logits = logits.astype(mx.float32)
    scaled = logits * _column(1 / sampler.settings.temperature for sampler in samplers)
    if any(samplers[0].filters):
        scaled = mx.where(_allowed(samplers, logits), scaled, -mx.inf)
    categorical = mx.vmap(lambda row, key: mx.random.categorical(row, key=key))
    return categorical(scaled, mx.array(keys, dtype=mx.uint32))


def _allowed(samplers: Sequence[Sampler], logits: mx.array) -> mx.array:
    """Which ids (rows, vocabulary) the filters leave."""
    # The likeliest id has weight 1 exactly, so it always stays.
    weights = mx.exp(logits - mx.max(logits, axis=-1, keepdims=True))
    bits = weights.view(mx.uint32)
    lowest = mx.zeros((len(samplers), 1), dtype=mx.uint32)
    by_mass, by_weight, by_rank = samplers[0].filters
    if by_mass:
        mass = mx.sum(weights, axis=-1, keepdims=True)
        wanted = _column(sampler.settings.top_p for sampler in samplers) * mass
        lowest = mx.maximum(lowest, _threshold(bits, weights, wanted))
    if by_weight:
        share = _column(sampler.settings.min_p for sampler in samplers)
        lowest = mx.maximum(lowest, share.view(mx.uint32))
    if by_rank:
        wanted = mx.array([[sampler.settings.top_k] for sampler in samplers])
        lowest = mx.maximum(lowest, _threshold(bits, None, wanted))
    return bits >= lowest


_ONE = 0x3F80_0000
"""1.0, the largest weight there is, as bits."""


def _threshold(bits: mx.array, weights: mx.array | None, wanted: mx.array) -> mx.array:
    """The highest threshold (rows, 1), as float bits, such that the entries at or above it add up
    to at least ``wanted``.

    Sums ``weights``, or counts ids if it is ``None``. Sums are taken in the same order
    each time and only lose summands, so a higher threshold never sums up to more.
    """
    low = mx.zeros(wanted.shape, dtype=mx.uint32)  # reached: by all of them
    high = mx.full(wanted.shape, _ONE + 1, dtype=mx.uint32)  # not reached: by none
    for _ in range(_ONE.bit_length()):
        middle = (low + high) // 2
        above = bits >= middle
        kept = above if weights is None else mx.where(above, weights, 0.0)
        reached = mx.sum(kept, axis=-1, keepdims=True) >= wanted
        low, high = mx.where(reached, middle, low), mx.where(reached, high, middle)
    return low


def _bounded(value: float) -> float:
    return max(-MAX_PENALTY, min(value, MAX_PENALTY))


def _column(values: Iterable[float]) -> mx.array:
    return mx.array([[value] for value in values], dtype=mx.float32)
