"""The answers that are being generated: a row of a batch each, one id for all of them per step.

mlx-lm's caches come in two kinds: of one sequence, and of a batch, whose rows are padded on the
left to the longest. A step of a padded batch computes the padding, too, and masks it. So a single
answer has caches of one sequence, those that its prompt was computed with, and is decoded as
``mlx_lm.stream_generate`` does it; and rows share a batch only if their lengths are similar
(`memory.may_be_padded`): a short one beside one of 100,000 ids would take as much memory.

Steps run one ahead: while Python looks at the ids of one step, the device computes the next. The
first id of a new row is the last of its prompt. Everything runs on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from vllm_mlx_harmony.engine.memory import may_be_padded
from vllm_mlx_harmony.engine.mlx_lm_compat import Layers
from vllm_mlx_harmony.engine.request import Request
from vllm_mlx_harmony.engine.sampler import draw


class Batch:
    """Rows that are computed together. ``pending`` (rows,) are the ids of the next step."""

    def __init__(self, request: Request, layers: Layers) -> None:
        self.rows, self.layers = [request], layers
        self.pending = mx.array(request.ids[-1:], dtype=mx.uint32)
        request.batch = self

    def join(self, request: Request, layers: Layers) -> None:
        """Adds a row, whose ``layers`` hold all of its ids but the last."""
        for at, layer in enumerate(layers):
            own = self.layers[at]
            if len(self.rows) == 1:
                own = type(own).merge([own, layer])
            else:
                own.extend(type(layer).merge([layer]))
            # One layer after another, so that no more than one exists twice.
            mx.eval(own.keys, own.values)
            self.layers[at], layers[at] = own, None
        last = mx.array(request.ids[-1:], dtype=mx.uint32)
        self.pending = mx.concatenate([self.pending, last])
        self.rows.append(request)
        request.batch = self

    def remove(self, gone: Iterable[Request]) -> None:
        """Removes those of its rows that are among ``gone``."""
        out = {id(request) for request in gone}
        stay = [at for at, request in enumerate(self.rows) if id(request) not in out]
        if stay and len(stay) < len(self.rows):
            chosen = mx.array(stay)
            self.pending = self.pending[chosen]
            for at, layer in enumerate(self.layers):
                if len(stay) == 1:
                    layer = layer.extract(stay[0])  # noqa: PLW2901
                else:
                    layer.filter(chosen)
                mx.eval(layer.keys, layer.values)
                self.layers[at] = layer
        for request in self.rows:
            request.batch = self if id(request) not in out else None
        self.rows = [self.rows[at] for at in stay]


class Answers:
    """All rows, in as many batches as their lengths require."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def join(self, request: Request, layers: Layers) -> None:
        """Adds a row to the first batch whose lengths are similar."""
        for batch in self.batches:
            if may_be_padded([len(each.ids) for each in (*batch.rows, request)]):
                with self._dropped_on_error(batch):
                    batch.join(request, layers)
                return
        self.batches.append(Batch(request, layers))

    def step(self, model: Callable[..., mx.array], batch: Batch) -> list[tuple[Request, int]]:
        """The next id of each row of ``batch``, but for the rows that have just joined.

        The caches hold the ids that are returned.
        """
        last = batch.pending
        logits = model(last[:, None], cache=batch.layers)[:, -1, :]
        batch.pending = draw([request.sampler for request in batch.rows], last, logits)
        mx.async_eval(batch.pending)
        found = []
        for request, token in zip(batch.rows, last.tolist(), strict=True):
            if request.joined:
                request.ids.append(token)
                found.append((request, token))
            request.joined = True
        return found

    def settle(self) -> None:
        """Waits for what is computed ahead."""
        mx.eval([batch.pending for batch in self.batches])

    def remove(self, requests: Iterable[Request]) -> None:
        """Removes rows from their batches; the other rows continue."""
        gone = list(requests)
        for batch in {id(each.batch): each.batch for each in gone}.values():
            if batch is not None:
                with self._dropped_on_error(batch):
                    batch.remove(gone)
        self.batches = [batch for batch in self.batches if batch.rows]

    @contextmanager
    def _dropped_on_error(self, batch: Batch) -> Iterator[None]:
        """Some of its layers have been changed by then, and others have not."""
        try:
            yield
        except BaseException:
            self.drop(batch)
            raise

    def drop(self, batch: Batch) -> None:
        """Removes a batch with all of its rows, whatever state it is in."""
        self.batches = [each for each in self.batches if each is not batch]
        for request in batch.rows:
            request.batch = None

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for batch in self.batches for layer in batch.layers)

    def __len__(self) -> int:
        return sum(len(batch.rows) for batch in self.batches)
