"""The engine's loop: everything that its thread alone touches.

What a request passes through::

    waiting ─▶ computing: memory, cached prefix, chunks ─▶ generating: row of a batch ─▶ ended

`scheduler` decides what is done next, `memory` whether a request fits. An error of the model ends
the requests that were being computed together, and no others. An error in this file ends the
thread: all requests fail, and the engine reports that it is not healthy.

Other threads post calls to ``thread``, and read what was ``published``: an immutable status, a new
one after each chunk, every ``PUBLISH_SECONDS`` seconds while answers are generated, and before a
request is told that it has ended. Requests get their steps by calls of their event loops. Nothing
else is shared.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx
from mlx.nn import Module
from mlx.utils import tree_reduce
from mlx_lm.models.cache import make_prompt_cache

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError
from vllm_mlx_harmony.engine import device, measure_costs, pieces
from vllm_mlx_harmony.engine.batch import Batch, prefill_together
from vllm_mlx_harmony.engine.drafts import Drafts
from vllm_mlx_harmony.engine.memory import Budget, Layout
from vllm_mlx_harmony.engine.mlx_lm_compat import Layers, drop_outside_windows, evaluate
from vllm_mlx_harmony.engine.prefix_cache import STORE_EVERY, PrefixCache, boundaries
from vllm_mlx_harmony.engine.request import Item, Phase, Request, hand_over
from vllm_mlx_harmony.engine.scheduler import (
    BatchLimits,
    Begin,
    Chunk,
    ScheduledStep,
    Scheduler,
)
from vllm_mlx_harmony.engine.status import EngineStatus, RequestStatus, Totals, Waiting
from vllm_mlx_harmony.engine.step_costs import ASSUMED
from vllm_mlx_harmony.engine.thread import EngineThread, Stopped
from vllm_mlx_harmony.engine_api.engine import Finish, Speculate

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""Requests that may wait to begin, by default. A burst may exceed it: a request counts from the
moment at which its answer is first read."""

CLEAR_POOL_EVERY, IDS_PER_STEP = 2048, 8
"""Prompt ids between two calls of ``mx.clear_cache``; a step counts as ``IDS_PER_STEP`` ids. mlx-lm
calls it as often: after a chunk of 2,048 ids, or 256 steps."""

PROBE_IDS = 64
"""Length of the probe chunk whose peak memory is measured when a model is loaded."""

ADMISSION_TIMEOUT = 10.0
"""Seconds after which a prompt without enough memory fails, if meanwhile no other request runs and
no memory is freed."""

WRITE_TIMEOUT = 2.0
"""Seconds that a prompt waits for evicted pieces to be written, if it lacks their memory."""

POLL_SECONDS = 0.2
"""Seconds between two attempts at work that waits for something else, such as memory."""

REPORT_SECONDS = 0.5
"""Seconds between two progress reports of prompts that wait."""

PUBLISH_SECONDS = 0.1
"""Seconds between two statuses while nothing but steps is computed, which are short."""

TRANSITIONS: dict[Phase, set[Phase]] = {
    Phase.WAITING: {Phase.COMPUTING, Phase.ENDED},
    Phase.COMPUTING: {Phase.GENERATING, Phase.ENDED},
    Phase.GENERATING: {Phase.ENDED},
    Phase.ENDED: set(),
}

Load: TypeAlias = "Callable[[], tuple[Module, PrefixCache]]"
"""Returns a model and the prefix cache for it."""


@dataclass(frozen=True, slots=True)
class Options:
    """How an engine runs. ``utilization``: part of the device's memory that it may use.

    ``interval``: ids of an answer in one ``Step``. ``costs_file`` remembers what steps of several
    ids cost. ``queue``: requests that may wait to begin. ``memory`` and ``wired`` as in ``device``,
    in bytes.
    """

    limits: BatchLimits = field(default_factory=BatchLimits)
    utilization: float = 0.9
    interval: int = 1
    speculate: Speculate = "auto"
    costs_file: Path | None = None
    queue: int = MAX_WAITING
    memory: int | None = None
    wired: int | None = None


class EngineLoop:
    """A model, what is computed with it, and the thread for both. All attributes but ``thread``,
    ``published`` and ``waiting`` are the thread's.

    Unless the model is loaded, ``module``, ``cache`` and ``budget`` are empty.
    """

    def __init__(self, model: str, options: Options) -> None:
        self.model, self.options = model, options
        self.loaded = False
        self.module = Module()
        self.cache = PrefixCache(self.module)
        self.budget = Budget(0, Layout(), 0)
        self.weight_bytes = 0
        self.costs = None if options.speculate == "off" else ASSUMED
        self.totals = Totals()
        self.scheduler = Scheduler(options.limits)
        self.requests: dict[int, Request] = {}
        self.batches: list[Batch] = []
        self.waiting = Waiting()
        self._out: defaultdict[asyncio.AbstractEventLoop, list[tuple[Request, Item]]]
        self._out = defaultdict(list)
        self._shapes: pieces.Shapes = []
        self._ids_since_clear = 0
        self._reported = 0.0
        self._changed = False
        """Whether a request has ended since the last status."""
        self._too_long = inf
        """Length of the shortest request that did not fit beside others in this call of `work`;
        longer ones are not tried."""
        self._stop_reason = "the engine was stopped"
        self.published = self._status()
        self.thread = EngineThread(f"engine of {model}", self.work, self.abandon)

    # --- What others see

    def publish(self) -> None:
        self.published, self._changed = self._status(), False

    def _status(self) -> EngineStatus:
        return EngineStatus(
            at=time.perf_counter(),
            loaded=self.loaded,
            stop_reason=self._stop_reason,
            cache=self.cache,
            budget=self.budget,
            weight_bytes=self.weight_bytes,
            costs=self.costs,
            totals=self.totals,
            requests=tuple(self._request_statuses()),
        )

    def _request_statuses(self) -> list[RequestStatus]:
        """Those that generate first, then the others in the order in which they will be served."""
        now, scheduler = time.perf_counter(), self.scheduler
        places = {number: place for place, number in enumerate(scheduler.order(), start=1)}

        def place_of(request: Request) -> int:
            if request.phase is Phase.GENERATING:
                return 0
            return places.get(request.number, len(places) + 1)

        found = []
        expected: float | None = 0.0
        for request in sorted(self.requests.values(), key=place_of):
            place = place_of(request)
            progress = request.progress()
            rest = scheduler.seconds(request.number) if place <= len(places) else None
            expected = None if expected is None or rest is None else expected + rest
            speed = 0.0
            if not place and now > request.first_token_time > 0:
                speed = request.generated / (now - request.first_token_time)
            elif request.phase is Phase.COMPUTING and rest:
                speed = (progress.total - progress.processed) / rest
            found.append(
                RequestStatus(
                    state=request.phase,
                    place=place,
                    total=len(request.prompt),
                    cached=progress.cached,
                    computed=progress.processed,
                    generated=request.generated,
                    seconds=round(now - request.arrival_time, 3),
                    speed=round(speed, 3),
                    expected=None if expected is None else round(expected, 3),
                )
            )
        return found

    # --- On the thread: loading and freeing

    def load(self, load: Load) -> None:
        """Loads and measures the model."""
        with device.load_lock:
            module, self.cache = load()
            self.weight_bytes = tree_reduce(
                lambda nbytes, array: nbytes + getattr(array, "nbytes", 0), module, 0
            )
            self.module, self.loaded = module, True
            device.add_weights(
                self.weight_bytes,
                self.cache.counters().budget,
                self.options.utilization,
                self.options.wired,
            )
            with device.lock.exclusive():
                self._measure(module)
                mx.clear_cache()
        self.publish()

    def _measure(self, module: Module) -> None:
        """What a prompt and steps cost. Raises ``HostError`` if there is no memory for a prompt."""
        limit = int(device.memory(self.options.memory) * self.options.utilization)
        layers = make_prompt_cache(module)
        mx.reset_peak_memory()
        before = device.used()
        module(mx.array([[vocab.ENDOFTEXT] * PROBE_IDS]), cache=layers)
        evaluate(layers)
        work_per_id = max(0, mx.get_peak_memory() - before) / PROBE_IDS
        work = int(work_per_id * self.options.limits.chunk)
        self.budget = Budget(limit, Layout.of(layers), work)
        self._shapes = pieces.shapes(layers)
        loaded = device.weight_bytes()
        if self.budget.longest(loaded) < 1:
            raise HostError(
                f"the weights take {loaded:,} of the {limit:,} bytes that may be used, "
                "which leaves no memory for a prompt: use a smaller model, or increase "
                "--gpu-memory-utilization",
                code="out_of_memory",
            )
        if self.options.speculate == "auto":
            where = f"mlx {mx.__version__}, {mx.device_info().get('device_name')}"
            # Version 1 measured steps of one id too short, version 2 only short contexts.
            key = f"{self.model}: {self.weight_bytes} bytes, {where}, version 3"
            deep = self.budget.longest(loaded) > 2 * measure_costs.DEPTH
            measure = partial(measure_costs.measure_at_depths, module, layers, deep)
            self.costs = measure_costs.load_or_measure(self.options.costs_file, key, measure)

    def unload(self) -> None:
        """Ends all requests and unloads in one call; a request arriving between two calls would
        never end."""
        self.abandon()
        device.lock.share(self)  # what is freed meanwhile would falsify a measurement
        self.cache.close()
        self.module, self.loaded = Module(), False
        self.cache, self._shapes = PrefixCache(self.module), []
        device.add_weights(-self.weight_bytes)
        self.weight_bytes = 0
        mx.clear_cache()
        device.lock.release(self)
        self.publish()

    def abandon(self, error: BaseException | None = None) -> None:
        """Ends all requests with 503. ``error`` is what the thread died of."""
        if error is not None:
            self._stop_reason = f"the engine stopped unexpectedly: {type(error).__name__}"
        for number in list(self.requests):
            request = self.requests.pop(number)
            self._enter(request, Phase.ENDED)
            request.layers = request.match = None
            self._put(request, HostError(self._stop_reason))
        self.batches, self.scheduler = [], Scheduler(self.options.limits)
        self.publish()
        self._deliver()
        device.lock.release(self)  # last: it fails with a device that has failed

    # --- On the thread: requests

    def _enter(self, request: Request, phase: Phase) -> None:
        assert phase in TRANSITIONS[request.phase]
        if request.phase is Phase.WAITING:
            self.waiting.add(-1)
        request.phase = phase

    def arrive(self, request: Request) -> None:
        self.requests[request.number] = request

    def enqueue(self, request: Request) -> None:
        """The request, whose ``match`` is known, waits for its turn from now on."""
        if not self.loaded or request.number not in self.requests:
            raise HostError(self._stop_reason)
        assert request.match is not None
        last = len(request.prompt) - 1
        cached = min(request.match.cached, last)
        self.scheduler.add(
            request.number, last - cached, request.tenant, request.arrival_time, cached
        )

    def cancel(self, request: Request) -> None:
        """Removes a request whose client has gone. What was computed of its prompt is kept: a
        client that gave up will send it again (semantics E2)."""
        try:
            if request.layers is not None:
                self._store_to(request, request.computed_ids, request.layers)
        finally:
            self._forget(request)
            self.publish()

    def _forget(self, request: Request) -> None:
        """Removes a request, wherever it is."""
        if self.requests.pop(request.number, None) is None:
            return
        self._enter(request, Phase.ENDED)
        self.scheduler.remove(request.number)
        self._changed = True
        before = self.totals
        self.totals = replace(
            before,
            requests=before.requests + 1,
            prompt_tokens=before.prompt_tokens + request.computed_ids,
            completion_tokens=before.completion_tokens + request.generated,
            drafts_accepted=before.drafts_accepted + request.accepted,
            drafts_rejected=before.drafts_rejected + request.rejected,
        )
        request.layers = request.match = None
        for batch in self.batches:
            if request in batch.rows:
                with self._failing_alone(batch):
                    batch.remove([request])
        self.batches = [batch for batch in self.batches if batch.rows]

    def _put(self, request: Request, item: Item) -> None:
        self._out[request.event_loop].append((request, item))

    def _deliver(self) -> None:
        """Gives requests what has arrived for them, with one call of each event loop. Those that
        have ended are counted before their clients know."""
        if self._changed:
            self.publish()
        if not self._out:
            return
        out, self._out = self._out, defaultdict(list)
        for event_loop, items in out.items():
            try:
                event_loop.call_soon_threadsafe(hand_over, items)
            except RuntimeError:  # the loop is closed
                for request, _ in items:  # later: a step may be using its row now
                    with suppress(Stopped):
                        self.thread.call(partial(self.cancel, request))

    def _fail(self, requests: Iterable[Request], error: Exception) -> None:
        """Ends ``requests``, and the answers of broken batches, with ``error``.

        When memory has run out, the prefix cache is emptied.
        """
        broken = [batch for batch in self.batches if batch.broken]
        self.batches = [batch for batch in self.batches if not batch.broken]
        failure = _failure_of(error)
        for request in {*requests, *(row for batch in broken for row in batch.rows)}:
            self._put(request, failure)
            self._forget(request)
        if device.exhausted(error):
            self.cache.evict(1 << 62)
            mx.clear_cache()

    @contextmanager
    def _failing(self, requests: Iterable[Request]) -> Iterator[None]:
        """An error ends these requests, and no others."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - of the model, whatever it is
            self._fail(requests, error)

    @contextmanager
    def _failing_alone(self, batch: Batch) -> Iterator[None]:
        """An error ends the answers of ``batch``, and nothing else."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - of the model, whatever it is
            batch.broken = True
            self._fail((), error)

    # --- On the thread: work

    def work(self) -> float | None:
        self._too_long = inf
        if self.requests:
            self._share_device()
            device.keep_wired()
        decision = self.scheduler.next(time.perf_counter(), self._make_room)
        # Not while prompts only wait: they may wait for what the cache writes.
        with self.cache.writing_slowly() if decision is not None else nullcontext():
            match decision:
                case Begin(number):
                    with self._failing([self.requests[number]]):
                        self._begin(self.requests[number])
                case Chunk(number, ids, other_numbers):
                    self._settle()
                    requests = [self.requests[number] for number in (number, *other_numbers)]
                    with self._failing(requests):
                        self._compute(requests, ids)
                case ScheduledStep():
                    self._step()
            if self._ids_since_clear >= CLEAR_POOL_EVERY:
                self._ids_since_clear = 0
                mx.clear_cache()
            self._report()
            age = time.perf_counter() - self.published.at
            if age >= PUBLISH_SECONDS or not isinstance(decision, ScheduledStep):
                self.publish()
            self._deliver()
        if decision is not None:
            return 0
        try:
            device.lock.release(self)
        except Exception as error:  # noqa: BLE001 - of a step ahead, whose answer has ended
            logger.error("a step failed that no answer needed: %s", error)
        if not self.requests:
            mx.clear_cache()  # nobody needs what is left in mlx's pool
            return device.unwire_when_idle()
        return POLL_SECONDS

    def _share_device(self) -> None:
        """Waits while another model is measured. What runs ahead is computed before, and answers
        end if that fails."""
        try:
            device.lock.share(self)
        except Exception as error:  # noqa: BLE001 - of the device, whatever it is
            for batch in self.batches:
                batch.broken = True
            self._fail((), error)
            device.lock.share(self)

    def _settle(self) -> None:
        """Waits for the steps that run ahead: neither their time nor their errors are those of the
        chunk that comes next."""
        for batch in list(self.batches):
            with self._failing_alone(batch):
                mx.eval(batch.pending)

    def _report(self) -> None:
        """Tells prompts that wait their places, from time to time."""
        if time.perf_counter() - self._reported >= REPORT_SECONDS:
            self._reported = time.perf_counter()
            for place, number in enumerate(self.scheduler.order(), start=1):
                self._put(self.requests[number], self.requests[number].report(place))

    def _make_room(self, number: int) -> bool:
        """Whether there is memory for the request to its end, or can be made.

        Evicts cached pieces if that suffices, and fails the request after `ADMISSION_TIMEOUT`.
        """
        budget, request, now = self.budget, self.requests[number], time.perf_counter()
        if request.max_length >= self._too_long:
            request.hopeless_since = now  # others run: their memory will be freed
            return False
        other_bytes, running = self._in_use()
        missing = budget.missing(other_bytes, [*running, request.max_length])
        request.lacking_since = min(request.lacking_since, now) if missing else inf
        # A slow disk is not a lack of memory: what waits to be written is given up after a while.
        late = now > request.lacking_since + WRITE_TIMEOUT
        if self.cache.make_room(missing, may_wait=not late):
            mx.clear_cache()
            other_bytes, _ = self._in_use()
            missing = budget.missing(other_bytes, [*running, request.max_length])
        if running and missing:
            self._too_long = request.max_length
        if running or other_bytes != request.other_bytes:
            request.other_bytes, request.hopeless_since = other_bytes, now
        elif missing and now > request.hopeless_since + ADMISSION_TIMEOUT:
            logger.error("%d bytes are missing for a request, and none are freed", missing)
            self._put(request, _no_memory())
            self._forget(request)
        return not missing

    def _in_use(self) -> tuple[int, list[int]]:
        """Bytes in use without the caches of requests that have begun, and the ``max_length`` of
        each of these."""
        running = [one for one in self.requests.values() if one.phase is not Phase.WAITING]
        holders: list[Request | Batch] = [*running, *self.batches]
        own = sum(layer.nbytes for holder in holders for layer in holder.layers or ())
        return device.used() - own, [one.max_length for one in running]

    def _begin(self, request: Request) -> None:
        """Makes the request's caches, with as much of the prompt as is cached."""
        started = time.perf_counter()
        match, request.match = request.match, None
        assert match is not None
        request.layers, cached = self.cache.restore(match, request.allocated_length)
        last = len(request.prompt) - 1
        if self.cache.enabled:
            request.boundaries = deque(boundaries(request.prompt, cached))
        request.prefill_start = started
        self._enter(request, Phase.COMPUTING)
        request.computed_ids = request.cached = request.stored = cached
        self._put(request, request.report())
        self.scheduler.begin(request.number, last - cached, cached, time.perf_counter() - started)
        if cached == last:
            self._join([request], request.layers)

    def _compute(self, requests: Sequence[Request], ids: int) -> None:
        """Computes up to ``ids`` ids of a prompt, or the rest of several in one pass. What of them
        is to be found again is stored: up to each boundary, and at least every `STORE_EVERY`
        ids."""
        chunks = [request.next_chunk(ids) for request in requests]
        layers = requests[0].layers
        assert layers is not None
        started = time.perf_counter()
        if len(requests) == 1:
            pieces.reserve(layers, self._shapes, requests[0].allocated_length)
            self.module(mx.array(chunks, dtype=mx.uint32), cache=layers)
            evaluate(layers)
        else:
            prompts = [request.layers or [] for request in requests]
            layers = prefill_together(self.module, prompts, chunks)
            for request in requests:
                request.layers = None
            requests[0].layers = layers  # of all of them, until they are rows
        computed = sum(map(len, chunks))
        self._ids_since_clear += computed
        for row, (request, chunk) in enumerate(zip(requests, chunks, strict=True)):
            request.computed_ids += len(chunk)
            self._store(request, layers, row)
        seconds = time.perf_counter() - started
        for request, chunk in zip(requests, chunks, strict=True):
            share = seconds * len(chunk) / computed
            alone = len(requests) == 1
            self.scheduler.chunk_done(request.number, len(chunk), share, alone=alone)
        if requests[0].computed_ids == len(requests[0].prompt) - 1:
            self._join(requests, layers)
        else:
            drop_outside_windows(layers)
            self._put(requests[0], requests[0].report())

    def _store(self, request: Request, layers: Layers, row: int = 0) -> None:
        """Stores what is computed of the prompt, up to each boundary; behind the last of them, if
        it is `STORE_EVERY` ids or more."""
        while request.boundaries and request.boundaries[0] <= request.computed_ids:
            self._store_to(request, request.boundaries.popleft(), layers, row)
        if request.computed_ids - request.stored >= STORE_EVERY:
            self._store_to(request, request.computed_ids, layers, row)

    def _store_to(self, request: Request, end: int, layers: Layers, row: int = 0) -> None:
        """Stores the first ``end`` ids of the prompt."""
        if end > request.stored:
            self._store_ids(request, request.prompt[:end], layers, row)
            request.stored = end

    def _store_ids(
        self, request: Request, ids: Sequence[int], layers: Layers, row: int = 0
    ) -> None:
        """Stores ``ids``, which ``layers`` hold in ``row``, if there is memory for a copy of what
        the cache lacks of them, beside what running requests need to their ends. Evicts other
        cached prompts for it."""
        if not self.cache.enabled:
            return

        def missing_bytes() -> int:
            size = self.budget.layout.piece(len(ids) - self.cache.stored(ids, request.tenant))
            return size - self.budget.remaining(*self._in_use())

        missing = missing_bytes()
        if missing > 0 and self.cache.make_room(missing):
            mx.clear_cache()
            missing = missing_bytes()  # what ``ids`` continue may have been evicted, too
        if missing <= 0:
            self.cache.store(ids, layers, request.tenant, row)

    def _join(self, requests: Sequence[Request], layers: Layers) -> None:
        """The requests generate from now on: all of each prompt but the last id is computed."""
        if len(requests) == 1 and not requests[0].settings.max_tokens:  # a prompt is warmed up
            requests[0].computed_ids = len(requests[0].prompt)
            self._put(requests[0], requests[0].step("length"))
            self._forget(requests[0])
            return
        for request in requests:
            self._enter(request, Phase.GENERATING)
            request.computed_ids = len(request.prompt)
            request.layers, request.ids = None, list(request.prompt)
            self._put(request, request.report())
            self.scheduler.start_answer(request.number)
            if self.options.speculate == "auto" and request.top_logprobs is None:
                request.drafts = Drafts((*request.settings.prediction, *request.prompt))
        for batch in self.batches:
            if batch.fits(requests):
                batch.join(requests, layers)
                break
        else:
            self.batches.append(Batch(requests, layers, self.costs))
        for request in requests:  # one of several leaves the caches that they share
            if not request.settings.max_tokens:
                self._put(request, request.step("length"))
                self._forget(request)

    def _step(self) -> None:
        """An id or more for every answer. A finished answer is stored before its last ids are sent,
        so that an immediate follow-up request finds it cached."""
        started = time.perf_counter()
        for batch in list(self.batches):
            ended: dict[Request, Finish] = {}
            with self._failing_alone(batch):
                for request, token in batch.step(self.module):
                    request.ids.append(token)
                    request.unsent_ids.append(token)
                    request.first_token_time = request.first_token_time or time.perf_counter()
                    if token in vocab.TURN_ENDS:
                        ended[request] = "stop"
                    elif request.generated >= request.settings.max_tokens:
                        ended[request] = "length"
                    elif len(request.unsent_ids) >= self.options.interval:
                        self._put(request, request.step())
                self._deliver()
                for request, finish in ended.items():
                    row = batch.rows.index(request)
                    self._store_ids(request, batch.held(request), batch.layers, row)
                    self._put(request, request.step(finish))
                if ended:
                    batch.remove(ended)
                    for request in ended:
                        self._forget(request)
        self.totals = replace(self.totals, steps=self.totals.steps + 1)
        self._ids_since_clear += IDS_PER_STEP
        self.scheduler.step_done(time.perf_counter() - started)


def _failure_of(error: Exception) -> HarmonyFailure:
    """What clients are told of an error of the model, which is logged."""
    if device.exhausted(error):
        logger.error("out of memory: %s", error)
        return _no_memory()
    if device.gpu_failed(error):
        logger.error("the GPU failed: %s", error)
        problem = "the GPU ended the computation of this answer: send the request again"
        return HostError(problem, code="gpu_error", retry_after=5)
    logger.error("the engine failed", exc_info=error)
    return OutputError("internal engine error during generation; see the server log")


def _no_memory() -> HostError:
    problem = "not enough memory for this request: try again later, or shorten the prompt"
    return HostError(problem, code="out_of_memory", retry_after=5)
