"""The answers that are being generated: a row of a batch each, one id for all of them per step.

On mlx-lm's caches, which come in two kinds: of one sequence, and of a batch, whose rows are padded
on the left to the longest. A step of a padded batch computes with the padding and masks it. So an
answer alone has caches of one sequence, exactly those that its prompt was computed with, and is
decoded as ``mlx_lm.stream_generate`` does it; and rows share a batch only where their lengths are
alike (`memory.may_be_padded`): a short one beside one of 100,000 ids would take as much memory.

A step runs one ahead: while Python looks at the ids of one step, the device computes the next. The
id that a row joins with is the last of its prompt. Everything runs on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from vllm_mlx_harmony.engine.memory import may_be_padded
from vllm_mlx_harmony.engine.sampler import Sampler, draw

Layers = list[Any]
"""A cache of mlx-lm for each layer of a model."""


@dataclass(eq=False, slots=True)
class Row:
    """An answer. ``ids`` are those of prompt and answer that the caches hold, or will after the
    step that is computed; ``joined``: its first step has been made."""

    request: int
    sampler: Sampler
    ids: list[int]
    joined: bool = False


@dataclass(eq=False, slots=True)
class Batch:
    """Rows that are computed together. ``pending`` (rows,) are the ids that they go on with."""

    rows: list[Row] = field(default_factory=list)
    layers: Layers = field(default_factory=list)
    pending: Any = None

    def takes(self, length: int) -> bool:
        """Whether a row with so many ids may join."""
        return may_be_padded([*(len(row.ids) for row in self.rows), length])

    def join(self, row: Row, layers: Layers) -> None:
        """Adds ``row``, whose caches hold all of its ids but the last."""
        last = mx.array(row.ids[-1:], dtype=mx.uint32)
        if not self.rows:
            self.rows, self.layers, self.pending = [row], layers, last
            return
        alone = len(self.rows) == 1
        for at, layer in enumerate(layers):
            own = self.layers[at]
            if alone:
                own = type(own).merge([own, layer])
            else:
                own.extend(type(layer).merge([layer]))
            # One layer after another, so that no more than one is there twice.
            mx.eval(own.keys, own.values)
            self.layers[at], layers[at] = own, None
        self.rows.append(row)
        self.pending = mx.concatenate([self.pending, last])

    def remove(self, gone: Iterable[Row]) -> None:
        """Takes rows out; the others stay as they are."""
        out = set(map(id, gone))
        keep = [at for at, row in enumerate(self.rows) if id(row) not in out]
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[at] for at in keep]
        if not keep:
            self.layers, self.pending = [], None
            return
        chosen = mx.array(keep)
        self.pending = self.pending[chosen]
        for at, layer in enumerate(self.layers):
            if len(keep) == 1:
                layer = layer.extract(keep[0])  # noqa: PLW2901
            else:
                layer.filter(chosen)
            mx.eval(layer.keys, layer.values)
            self.layers[at] = layer

    @property
    def nbytes(self) -> int:
        """Bytes of its caches."""
        return sum(layer.nbytes for layer in self.layers)


class Answers:
    """All rows, in as many batches as their lengths ask for."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def join(self, row: Row, layers: Layers) -> None:
        """Adds a row to the first batch that takes it."""
        for batch in self.batches:
            if batch.takes(len(row.ids)):
                break
        else:
            batch = Batch()
            self.batches.append(batch)
        with self._dropped_on_error(batch):
            batch.join(row, layers)

    def step(self, model: Callable[..., Any], batch: Batch) -> list[tuple[Row, int]]:
        """The next id of each row of ``batch`` that has one: a row that has just joined has none.

        The caches hold the ids that are returned.
        """
        last = batch.pending
        logits = model(last[:, None], cache=batch.layers)[:, -1, :]
        batch.pending = draw([row.sampler for row in batch.rows], last, logits)
        mx.async_eval(batch.pending)
        ids: Sequence[int] = last.tolist()
        found = []
        for row, token in zip(batch.rows, ids, strict=True):
            if row.joined:
                row.ids.append(token)
                found.append((row, token))
            row.joined = True
        return found

    def settle(self) -> None:
        """Waits for what is computed ahead."""
        mx.eval([batch.pending for batch in self.batches if batch.pending is not None])

    def remove(self, rows: Iterable[Row]) -> None:
        """Takes rows out of their batches."""
        gone = list(rows)
        for batch in list(self.batches):
            with self._dropped_on_error(batch):
                batch.remove(gone)
        self.batches = [batch for batch in self.batches if batch.rows]

    @contextmanager
    def _dropped_on_error(self, batch: Batch) -> Iterator[None]:
        """Some of its layers have been changed then, and others have not."""
        try:
            yield
        except BaseException:
            self.drop(batch)
            raise

    def drop(self, batch: Batch) -> None:
        """Takes out a batch with all of its rows, whatever state it is in."""
        self.batches = [each for each in self.batches if each is not batch]

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(batch.nbytes for batch in self.batches)

    def __len__(self) -> int:
        return sum(len(batch.rows) for batch in self.batches)
