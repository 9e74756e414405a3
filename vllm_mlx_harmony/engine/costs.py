"""What a step of several ids costs on this machine, with this model: measured when it is loaded.

Weights that are read for one id are not read again for the next, but each id may use other experts,
and a device without fast matrix multiplication gains nothing. So nothing is assumed: whether a
draft pays (`drafts.Costs.length`) depends on these measurements alone.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.files import write_atomically
from vllm_mlx_harmony.engine.drafts import Costs
from vllm_mlx_harmony.engine.mlx_lm_compat import Layers, trim
from vllm_mlx_harmony.engine.sampler import Sampler, draw, draw_ahead
from vllm_mlx_harmony.server.sampling import Settings

logger = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 8, 16)
"""Ids of an answer in one step."""

REPEATED = 5
"""Measurements per width; the fastest counts. The first single-id step is discarded: steps overlap,
and it has no predecessor."""

LONGEST = 1.0
"""Time limit in seconds: after it, the current width is measured at most twice and wider ones are
skipped."""

WITHOUT_GAIN = 2
"""Consecutive widths without a gain over single-id steps, after which measuring stops."""

Model: TypeAlias = "Callable[..., mx.array]"


def measured(model: Model, layers: Layers, clock: Callable[[], float] = time.perf_counter) -> Costs:
    """What steps of several ids cost behind what ``layers`` hold, by ``clock``.

    Includes what a draft costs besides: Python waits for the ids, and the device for Python. Ends
    early where wide steps do not pay, so that a device without a use for them is not kept busy.
    """
    sampler = Sampler(Settings(max_tokens=1, temperature=1.0, top_p=1.0))
    token, seconds = vocab.ENDOFTEXT, list[float]()
    last = mx.array([token], dtype=mx.uint32)
    end, without_gain = clock() + LONGEST, 0
    for width in WIDTHS:
        draft = [token] * (width - 1)
        best = math.inf
        for run in range(REPEATED):
            started = clock()
            if run > 1 and started > end:
                break
            logits = model(mx.array([[token, *draft]]) if draft else last[None], cache=layers)[0]
            if draft:
                draw_ahead(sampler, [token], draft, [], logits)[0].tolist()
                trim(layers, width - 1)
            else:
                last, before = draw([sampler], last, logits), last
                mx.async_eval(last)
                mx.eval(before)
            if draft or run:
                best = min(best, clock() - started)
        # `Costs.together` assumes that wider steps never cost less.
        seconds.append(max([best, *seconds[-1:]]))
        gains = width == 1 or best < width * seconds[0]
        without_gain = 0 if gains else without_gain + 1
        if clock() > end or without_gain == WITHOUT_GAIN:
            break
    return Costs(WIDTHS[: len(seconds)], tuple(seconds))


_measured: dict[str, Costs] = {}
"""What this process has measured: a model that is loaded again is not measured again."""


def remembered(path: Path | None, key: str, measure: Callable[[], Costs]) -> Costs:
    """The costs for ``key``: those in the file at ``path``, or those that this process has
    measured, or else measured now and written to the file.

    The file is a JSON object of such keys. It is a cache: one that cannot be read is replaced.
    """
    try:
        known = {} if path is None else dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        known = {}
    try:
        seconds = sorted(float(each) for each in known[key])
        if seconds and all(0 < each < math.inf for each in seconds):
            return Costs(WIDTHS[: len(seconds)], tuple(seconds[: len(WIDTHS)]))
        raise ValueError
    except (KeyError, ValueError, TypeError):
        costs = _measured[key] if key in _measured else _measured.setdefault(key, measure())
    if path is not None:
        try:
            write_atomically(path, json.dumps({**known, key: costs.seconds}).encode())
        except OSError as error:
            logger.warning("the costs of steps could not be saved: %s", error)
    return costs
