"""The answers that are being generated: a row of a batch each, one id for all of them per step.

mlx-lm's caches come in two kinds: of one sequence, and of a batch, whose rows are padded on the
left to the longest. A step of a padded batch computes the padding, too, and masks it. So a single
answer has caches of one sequence, those that its prompt was computed with, and is decoded as
``mlx_lm.stream_generate`` does it; and rows share a batch only if their lengths are similar
(`memory.may_be_padded`): a short one beside one of 100,000 ids would take as much memory.

Steps run one ahead: while Python looks at the ids of one step, the device computes the next. The
first id of a new row is the last of its prompt. Everything runs on the engine's thread.

A batch that cannot be changed has no rows left: some of its layers have another row by then, and
others have not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

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

    def takes(self, request: Request) -> bool:
        return may_be_padded([len(each.ids) for each in (*self.rows, request)])

    def join(self, request: Request, layers: Layers) -> None:
        """Adds a row, whose ``layers`` hold all of its ids but the last."""
        rows, self.rows = self.rows, []
        for at, layer in enumerate(layers):
            own = self.layers[at]
            if len(rows) == 1:
                own = type(own).merge([own, layer])
            else:
                own.extend(type(layer).merge([layer]))
            # One layer after another, so that no more than one exists twice.
            mx.eval(own.keys, own.values)
            self.layers[at], layers[at] = own, None
        last = mx.array(request.ids[-1:], dtype=mx.uint32)
        self.pending = mx.concatenate([self.pending, last])
        self.rows = [*rows, request]

    def step(self, model: Callable[..., mx.array]) -> list[tuple[Request, int]]:
        """The next id of each row, but for the rows that have just joined.

        The caches hold the ids that are returned.
        """
        last = self.pending
        logits = model(last[:, None], cache=self.layers)[:, -1, :]
        self.pending = draw([request.sampler for request in self.rows], last, logits)
        mx.async_eval(self.pending)
        found = []
        for request, token in zip(self.rows, last.tolist(), strict=True):
            if request.joined:
                request.ids.append(token)
                found.append((request, token))
            request.joined = True
        return found

    def remove(self, gone: Collection[Request]) -> None:
        """Removes rows; the others continue."""
        rows, self.rows = self.rows, []
        stay = [at for at, request in enumerate(rows) if request not in gone]
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
        self.rows = [rows[at] for at in stay]
