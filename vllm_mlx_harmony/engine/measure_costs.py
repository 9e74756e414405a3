"""Measures what steps of several ids cost on this machine, when a model is loaded.

Weights that are read for one id are not read again for the next, but each id may use other experts,
and a device without fast matrix multiplication gains nothing. So whether a draft pays
(`Costs.best_draft_length`) depends on these measurements alone.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.files import write_atomically
from vllm_mlx_harmony.engine.mlx_lm_compat import Layers, Model, trim
from vllm_mlx_harmony.engine.sampler import Sampler, sample, sample_ahead
from vllm_mlx_harmony.engine.step_costs import WIDTHS, Costs
from vllm_mlx_harmony.engine_api.engine import GenerationSettings

logger = logging.getLogger(__name__)

DEPTH = 8192
"""Ids behind which steps are measured a second time: where Metal has no kernel for so many ids in
one step (`WIDTHS`), attention costs the more the more ids there are before them."""

RUNS = 3
"""A model is measured once each time that it is loaded, until there are so many measurements; the
fastest steps count. Another program may have had the device, or the processor, during one."""

REPEATS = 5
"""Measurements per width; the fastest counts. The first single-id step is discarded: steps overlap,
and it has no predecessor."""

MAX_SECONDS = 1.0
"""Time limit in seconds: after it, the current width is measured at most twice and wider ones are
skipped."""

WITHOUT_GAIN = 2
"""Consecutive widths without a gain over single-id steps, after which measuring stops."""

Runs: TypeAlias = "tuple[tuple[float, ...], ...]"
"""Measurements: seconds of the steps of ``WIDTHS``, as far as they were measured."""


def measure_step_costs(
    model: Model, layers: Layers, clock: Callable[[], float] = time.perf_counter
) -> Costs:
    """What steps of several ids cost behind what ``layers`` hold, by ``clock``.

    Includes what a draft costs besides: Python waits for the ids, and the device for Python. Ends
    early where wide steps do not pay, so that a device without a use for them is not kept busy.
    """
    sampler = Sampler(GenerationSettings(max_tokens=1, temperature=1.0, top_p=1.0))
    token, seconds = vocab.ENDOFTEXT, list[float]()
    last = mx.array([token], dtype=mx.uint32)
    end, without_gain = clock() + MAX_SECONDS, 0
    for width in WIDTHS:
        draft = [token] * (width - 1)
        best = math.inf
        for run in range(REPEATS):
            started = clock()
            if run > 1 and started > end:
                break
            logits = model(mx.array([[token, *draft]]) if draft else last[None], cache=layers)[0]
            if draft:
                sample_ahead(sampler, [token], draft, [], logits)[0].tolist()
                trim(layers, width - 1)
            else:
                last, before = sample([sampler], last, logits), last
                mx.async_eval(last)
                mx.eval(before)
            if draft or run:
                best = min(best, clock() - started)
        # `Costs.max_known_ids` assumes that wider steps never cost less.
        seconds.append(max([best, *seconds[-1:]]))
        gains = width == 1 or best < width * seconds[0]
        without_gain = 0 if gains else without_gain + 1
        if clock() > end or without_gain == WITHOUT_GAIN:
            break
    return Costs(WIDTHS[: len(seconds)], tuple(seconds))


def measure_at_depths(
    model: Model,
    layers: Layers,
    deep: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """What `measure_step_costs` finds behind what ``layers`` hold and, if there is memory for it
    (``deep``), behind ``DEPTH`` ids, too."""
    costs = measure_step_costs(model, layers, clock)
    if len(costs.ids) == 1 or not deep:
        return costs
    deepen(layers)
    return worse(costs, measure_step_costs(model, layers, clock))


def deepen(layers: Layers) -> None:
    """Makes layers that keep everything look as if they held ``DEPTH`` ids."""
    for layer in layers:
        if type(layer) is KVCache:
            _, heads, _, width = layer.keys.shape
            shape = (1, heads, DEPTH + 2 * WIDTHS[-1] * REPEATS, width)
            layer.keys, layer.values = (
                mx.zeros(shape, dtype=array.dtype) for array in (layer.keys, layer.values)
            )
            layer.offset = DEPTH


def worse(shallow: Costs, deep: Costs) -> Costs:
    """Costs by which a draft only pays if it does at both depths: relative to a step of one id,
    those of the depth where they are higher."""
    first = shallow.seconds[0]
    pairs = zip(shallow.seconds, deep.seconds, strict=False)
    seconds = tuple(max(near, far / deep.seconds[0] * first) for near, far in pairs)
    return Costs(WIDTHS[: len(seconds)], seconds)


_measured: dict[str, Runs] = {}
"""What this process has measured, for when there is no file."""


def load_or_measure(path: Path | None, key: str, measure: Callable[[], Costs]) -> Costs:
    """The costs for ``key``: the fastest steps of ``RUNS`` measurements. Those in the file at
    ``path``, or in this process, count; while they are fewer, another one is made.

    The file is a JSON object of such keys. It is a cache: one that cannot be read is replaced.
    """
    try:
        known = {} if path is None else dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        known = {}
    runs = max(_runs(known.get(key)), _measured.get(key, ()), key=len)
    if len(runs) < RUNS:
        runs = (*runs, measure().seconds)
    _measured[key] = runs
    if path is not None and _runs(known.get(key)) != runs:
        try:
            write_atomically(path, json.dumps({**known, key: runs}).encode())
        except OSError as error:
            logger.warning("the costs of steps could not be saved: %s", error)
    widest = max(len(run) for run in runs)
    fastest = tuple(min(run[at] for run in runs if at < len(run)) for at in range(widest))
    return Costs(WIDTHS[:widest], fastest)


def _runs(value: Any) -> Runs:
    """The measurements in a file; none if they are not as they were written."""
    try:
        runs = tuple(tuple(sorted(float(seconds) for seconds in run)) for run in value)
    except (TypeError, ValueError):
        return ()
    valid = all(0 < len(run) <= len(WIDTHS) and 0 < run[0] <= run[-1] < math.inf for run in runs)
    finite = all(math.isfinite(seconds) for run in runs for seconds in run)
    return runs[:RUNS] if valid and finite else ()
