"""The answers that are being generated: each is a row of a batch and gets one id or more per step.

A single answer has the caches of one sequence that its prompt was computed with, and is decoded as
``mlx_lm.stream_generate`` does it. mlx-lm's caches of a batch are padded on the left to the longest
row, and a step computes the padding, too. So rows share a batch only if their lengths are similar
(`memory.may_be_padded`): a short one beside one of 100,000 ids would take as much memory.

Steps run one ahead: while Python looks at the ids of one step, the device computes the next. None
follows the last ids that ``max_tokens`` allows, since a prompt that arrives would wait for it. The
first id of a new row is the last of its prompt. Everything runs on the engine's thread.

Short prompts that wait are computed in one pass, too (`prefill_together`), and their caches, which
are those of a batch then, stay together: the prompts become rows at once.

**Several ids in one step** (``Options.speculate``). A step reads all weights for one id; several
cost little more. An answer that is alone in its batch computes, together with its next id,

- *forced* ids: the grammar, a budget or the like allows no other (`masks`). They are not sampled.
- a *draft*: ids of the header that is expected (`core.expected_header`), or that it may copy
  (`drafts`). The next id is sampled at each position as if the draft up to there were correct
  (`sampler.sample_ahead`). Up to and including the first position where it differs from the draft,
  the result is what sampling one id at a time gives, with the same seed (Leviathan et al.,
  https://arxiv.org/abs/2211.17192). Rejected ids are trimmed from the caches.

With a draft, Python must read the next id before the step starts, so the device idles meanwhile.
This is done only where a draft is likely to pay for it, or where few ids are allowed, as in
headers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import mlx.core as mx

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine.masks import ApplyMask
from vllm_mlx_harmony.engine.memory import may_be_padded
from vllm_mlx_harmony.engine.mlx_lm_compat import Layers, Model, evaluate, trim
from vllm_mlx_harmony.engine.request import Request
from vllm_mlx_harmony.engine.sampler import (
    SamplerState,
    accepted_count,
    log_probabilities,
    sample,
    sample_ahead,
)
from vllm_mlx_harmony.engine.step_costs import WIDTHS, Costs
from vllm_mlx_harmony.engine_api.engine import Origin

EXPECTED_RIGHT = 0.95
"""Assumed share of headers that continue as expected."""

MAX_CHOICES_TO_WAIT_FOR = 32
"""When at most so many ids are allowed, as in headers, forced ones often follow."""


class Batch:
    """Rows that are computed together. ``pending`` (rows,) has the ids of the next step.

    ``next_id`` is the one of a single row, if Python knows it: the last of its prompt, a forced
    one, the one that was sampled after a draft, or ``pending`` after it was read. It is ``None``
    when rows have joined, and after a step without a draft.

    ``complete``: every answer has all its ids, and the caches lack the last id of each.

    ``broken``: a change has failed, or is being made. Some layers may have changed and others not,
    so the batch is of no use any more.
    """

    def __init__(self, rows: Sequence[Request], layers: Layers, costs: Costs | None = None) -> None:
        self.rows, self.layers, self.costs = list(rows), layers, costs
        self.next_id: int | None = None
        self.complete = self.broken = False
        self.pending = _last_ids(rows)

    def fits(self, rows: Sequence[Request]) -> bool:
        return may_be_padded([len(row.ids) for row in (*self.rows, *rows)])

    def join(self, new: Sequence[Request], layers: Layers) -> None:
        """Adds rows, whose ``layers`` hold all of their ids but the last of each."""
        self.broken = True
        for at, layer in enumerate(layers):
            own = self.layers[at]
            if len(self.rows) == len(new) == 1:
                own = type(own).merge([own, layer])
            else:
                own = type(own).merge([own]) if len(self.rows) == 1 else own
                own.extend(type(layer).merge([layer]) if len(new) == 1 else layer)
            # One layer after another, so that no more than one exists twice.
            mx.eval(own.keys, own.values)
            self.layers[at], layers[at] = own, None
        self.pending, self.next_id = mx.concatenate([self.pending, _last_ids(new)]), None
        self.rows += new
        self.broken = False

    def step(self, model: Model) -> list[tuple[Request, int]]:
        """Runs one step; returns the next ids of the rows. A row's first step computes the last id
        of its prompt and returns none. An id that ends a turn is the last of its row."""
        if all(request.stepped and not request.remaining_ids for request in self.rows):
            found = self._read_last()
        elif self.costs is not None and len(self.rows) == 1 and self._read_next(self.costs):
            (request,) = self.rows
            found = [(request, token) for token in self._step_ahead(model, self.costs)]
        else:
            found = self._step_rows(model)
        for request in self.rows:
            request.stepped = True
        return found

    def held(self, request: Request) -> Sequence[int]:
        """Those of its ids that the caches hold."""
        return request.ids[:-1] if self.complete else request.ids

    def _read_last(self) -> list[tuple[Request, int]]:
        """The last id of each answer, with no step after it."""
        self.complete = True
        found = list(zip(self.rows, self.pending.tolist(), strict=True))
        for request, token in found:
            if request.sampler.mask is not None:
                request.sampler.mask.advance(token)
        _record(found)
        return found

    def _step_rows(self, model: Model) -> list[tuple[Request, int]]:
        """One id of each row is computed, and the next one is sampled."""
        last = self.pending
        logits = model(last[:, None], cache=self.layers)[:, -1, :]
        self.pending = sample([request.sampler for request in self.rows], last, logits)
        masks = [request.sampler.mask for request in self.rows]
        mx.async_eval(self.pending, [mask.likeliest for mask in masks if mask is not None])
        rows = zip(self.rows, last.tolist(), strict=True)
        found = [(request, token) for request, token in rows if request.stepped]
        _record(found)
        self._score(logits)
        return found

    def _score(self, logits: mx.array) -> None:
        """Computes log probabilities of the ids of the next step for rows that request them."""
        with_logprobs = [at for at, row in enumerate(self.rows) if row.top_logprobs is not None]
        if not with_logprobs:
            return
        most = max(self.rows[at].top_logprobs or 0 for at in with_logprobs)
        chosen = mx.array(with_logprobs)
        scores = log_probabilities(logits[chosen], self.pending[chosen], most)
        for row, at in enumerate(with_logprobs):
            self.rows[at].scores = [score[row] for score in scores]
        # The slices themselves: computed when they are read, they would wait for the next step, and
        # with them all rows.
        mx.async_eval([self.rows[at].scores for at in with_logprobs])

    def _read_next(self, costs: Costs) -> bool:
        """Sets ``next_id`` to the next id of a single row if it can be had without waiting, or if
        waiting is likely to pay; returns whether it is known.

        Never if its log probabilities are requested: those are computed one by one.
        """
        (request,) = self.rows
        if request.top_logprobs is not None:
            return False
        mask = request.sampler.mask
        if not request.stepped:
            self.next_id = request.ids[-1]
        elif self.next_id is None and mask is not None:
            self.next_id = mask.forced()
        if self.next_id is None and self._may_have_followers(costs):
            self.next_id = int(self.pending.item())
        return self.next_id is not None

    def _may_have_followers(self, costs: Costs) -> bool:
        """Whether ids that are forced, expected or copied are likely to follow the next one."""
        (request,) = self.rows
        mask, drafts = request.sampler.mask, request.drafts
        if (
            mask is not None
            and costs.max_known_ids(1)
            and (mask.choices <= MAX_CHOICES_TO_WAIT_FOR or mask.expected(1))
        ):
            return True
        return drafts is not None and bool(drafts.next(costs, request.remaining_ids))

    def _guess(self, costs: Costs, most: int) -> tuple[list[int], bool]:
        """The ids to try next, no more than ``most``, and whether they are copied: otherwise they
        are the rest of the header that is being written."""
        (request,) = self.rows
        mask, drafts = request.sampler.mask, request.drafts
        header = [] if mask is None else mask.expected(most)
        if length := costs.best_draft_length(EXPECTED_RIGHT, len(header)):
            return header[:length], False
        return ([] if drafts is None else drafts.next(costs, most)), True

    def _step_ahead(self, model: Model, costs: Costs) -> list[int]:
        """The next ids of a single row whose next id is known: several where some are forced,
        expected or may be copied."""
        (request,) = self.rows
        sampler, drafts = request.sampler, request.drafts
        mask = sampler.mask
        assert self.next_id is not None
        run = [self.next_id]
        ends = request.stepped and self.next_id in vocab.TURN_ENDS
        most = 0 if ends else min(WIDTHS[-1] - 1, request.remaining_ids)
        origins: str = Origin.SAMPLED
        if mask is not None:
            if request.stepped:
                mask.advance(self.next_id)
            origins = mask.origin
            run += mask.follow(costs.max_known_ids(most))
        origins += Origin.FORCED * (len(run) - 1)
        first = 0 if request.stepped else 1  # the last id of the prompt is none of the answer
        found = run[first:]
        request.origins += origins[first:]
        if drafts is not None:
            drafts.extend(found)
        draft, is_copy = self._guess(costs, most + 1 - len(run))
        apply_masks: list[ApplyMask] = [lambda logits: logits] * (len(draft) + 1)
        if mask is not None:
            apply_masks = mask.after(draft)
            draft = draft[: len(apply_masks) - 1]
        inputs = mx.array([[*run, *draft]], dtype=mx.uint32)
        logits = model(inputs, cache=self.layers)[0, -len(apply_masks) :]
        sampled, states = sample_ahead(sampler, run, draft, apply_masks, logits)
        mx.async_eval(sampled, [] if mask is None else mask.likeliest)
        if not draft:
            self.pending, self.next_id = sampled, None
            return found
        return found + self._accept(draft, sampled, states, is_copy=is_copy)

    def _accept(
        self, draft: list[int], sampled: mx.array, states: list[SamplerState], *, is_copy: bool
    ) -> list[int]:
        """The ids of ``draft`` that agree with those that were ``sampled``. The caches and the
        sampler forget the others, and the next id is known."""
        (request,) = self.rows
        mask, drafts = request.sampler.mask, request.drafts
        tokens = sampled.tolist()
        accepted = accepted_count(draft, tokens)
        if accepted < len(draft):
            trim(self.layers, len(draft) - accepted)
            request.sampler.state = states[accepted]
        if mask is not None:
            mask.advance(*draft[:accepted])
        if drafts is not None:
            drafts.extend(draft[:accepted])
        request.origins += Origin.COPIED * accepted
        if is_copy:
            request.accepted += accepted
            request.rejected += len(draft) - accepted
        self.pending, self.next_id = sampled[accepted : accepted + 1], tokens[accepted]
        return draft[:accepted]

    def remove(self, removed: Collection[Request]) -> None:
        """Removes rows; the others continue."""
        self.broken = True
        stay = [at for at, request in enumerate(self.rows) if request not in removed]
        if stay:
            chosen = mx.array(stay)
            self.pending = self.pending[chosen]
            for at, layer in enumerate(self.layers):
                if len(stay) == 1:
                    layer = layer.extract(stay[0])  # noqa: PLW2901
                else:
                    layer.filter(chosen)
                mx.eval(layer.keys, layer.values)
                self.layers[at] = layer
        self.rows = [self.rows[at] for at in stay]
        self.broken = False


def prefill_together(
    model: Model, prompts: Sequence[Layers], inputs: Sequence[Sequence[int]]
) -> Layers:
    """Computes ``inputs``, which follow in each of ``prompts``, in one pass. Returns the caches of
    a batch; those of the prompts are emptied.

    As mlx-lm's ``BatchGenerator`` does it: what each holds is padded on the left, what is computed
    on the right, and then turned around, so that all padding is on the left.
    """
    lengths = [len(ids) for ids in inputs]
    padding = [max(lengths) - length for length in lengths]
    merged: Layers = []
    for at in range(len(prompts[0])):
        layer = type(prompts[0][at]).merge([prompt[at] for prompt in prompts])
        layer.prepare(lengths=lengths, right_padding=padding)
        if layer.keys is not None:
            mx.eval(layer.keys, layer.values)
        for prompt in prompts:
            prompt[at] = None
        merged.append(layer)
    rows = [[*ids, *[vocab.ENDOFTEXT] * more] for ids, more in zip(inputs, padding, strict=True)]
    model(mx.array(rows, dtype=mx.uint32), cache=merged)
    for layer in merged:
        layer.finalize()
    evaluate(merged)
    return merged


def _record(found: Sequence[tuple[Request, int]]) -> None:
    """Records how each id was chosen, and its log probability. The masks have advanced."""
    for request, token in found:
        mask = request.sampler.mask
        request.origins += Origin.SAMPLED if mask is None else mask.origin
        if request.drafts is not None:
            request.drafts.extend((token,))
        request.take_logprob(token)


def _last_ids(rows: Sequence[Request]) -> mx.array:
    return mx.array([request.ids[-1] for request in rows], dtype=mx.uint32)
