"""The engine: requests from any event loop, computed on one thread, answered id by id.

A request is parsed, rendered and admitted by `server`; here it is a prompt of ids, its settings, a
tenant and a constraint. Its way:

    event loop    generate ─▶ what the disk has of the prompt is read ─▶ wait for steps ─▶ yield
    thread        admitted ─▶ begun: memory, known beginning ─▶ chunks ─▶ a row of a batch ─▶ ended

What the thread does next is the scheduler's decision (`scheduler`); how much fits, `memory`'s. An
error of the model ends the requests that were computed together when it came, and nothing else. An
error of this file ends the thread: all requests fail, and the engine says that it is not healthy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Literal, TypeAlias

import mlx.core as mx

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import Progress
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError
from vllm_mlx_harmony.engine import device
from vllm_mlx_harmony.engine.batch import Answers, Batch, Layers, Row
from vllm_mlx_harmony.engine.boundaries import boundaries
from vllm_mlx_harmony.engine.masks import LogitsMask
from vllm_mlx_harmony.engine.memory import Budget, Layout
from vllm_mlx_harmony.engine.mlx_lm_compat import evaluate, make_prompt_cache
from vllm_mlx_harmony.engine.prefix_cache import Match, PrefixCache
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.engine.sampler import Sampler
from vllm_mlx_harmony.engine.scheduler import Chunk, Limits, Scheduler
from vllm_mlx_harmony.engine.scheduler import Step as NextStep
from vllm_mlx_harmony.engine.thread import IDLE, EngineThread, Stopped
from vllm_mlx_harmony.server.engine import Finish, Step, Steps
from vllm_mlx_harmony.server.generation import end_of
from vllm_mlx_harmony.server.model_files import length_of
from vllm_mlx_harmony.server.sampling import Settings
from vllm_mlx_harmony.server.settings import number

logger = logging.getLogger(__name__)

QUEUE_VARIABLE = "VLLM_MLX_HARMONY_QUEUE"
"""Environment variable: requests whose prompts may wait; more are rejected with 503."""

WAITING = 256
"""The same without the variable."""

FREED = 2048
"""Ids of prompts, and an eighth as many steps, after which mlx gives back what it has put aside."""

PROBE = 64
"""Ids of the chunk that is computed when a model is loaded, to see what one takes."""

HOPELESS = 10.0
"""Seconds after which a prompt is refused that finds no memory although no request runs."""

REPORTED = 0.5
"""Seconds between two reports of how far the prompts are that wait."""

_FAILED = "the engine failed while it was generating: the server's log says why"
_STOPPED = "the engine was stopped"


Load: TypeAlias = "Callable[[], tuple[Any, Any]]"
"""Loads a model and its tokenizer, on the engine's thread."""


@dataclass(frozen=True, slots=True)
class Options:
    """How an engine runs. ``utilization``: part of the device's memory that it may use.

    ``interval``: ids of an answer that are handed on together. ``cache`` makes the prefix cache of
    a model that is loaded, on its thread; without it there is none.
    """

    limits: Limits = field(default_factory=Limits)
    utilization: float = 0.9
    interval: int = 1
    cache: Callable[[Any], PrefixCache] = lambda model: PrefixCache(model, PrefixTree(0))


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """One request now. ``place`` counts from 1 among those whose prompts are not computed, else 0.

    ``computed`` of the ``total`` ids of the prompt are done, the ``cached`` ones included.
    ``seconds`` since it came. ``speed`` in ids per second: of the answer when it generates, of the
    prompt before. ``expected`` seconds to its first id, by the speed so far, if nothing else comes;
    ``None`` as long as there is no speed.
    """

    tenant: str
    state: Literal["waiting", "computing", "generating"]
    place: int
    total: int
    cached: int
    computed: int
    generated: int
    seconds: float
    speed: float
    expected: float | None


@dataclass(slots=True)
class Totals:
    """What an engine has done since it was loaded."""

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


Item: TypeAlias = "Step | HarmonyFailure"


@dataclass(eq=False, slots=True)
class _Request:
    number: int
    prompt: tuple[int, ...]
    settings: Settings
    tenant: str
    sampler: Sampler
    loop: asyncio.AbstractEventLoop
    since: float
    match: Match | None = None
    # On the thread.
    begun: float = 0.0
    layers: Layers | None = None
    marks: deque[int] = field(default_factory=deque)
    at: int = 0
    cached: int = 0
    row: Row | None = None
    generated: int = 0
    first: float = 0.0
    held: list[int] = field(default_factory=list)
    # On the loop.
    ended: bool = False
    items: deque[Item] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None

    @property
    def end(self) -> int:
        """Ids of prompt and answer together, at most."""
        return len(self.prompt) + self.settings.max_tokens

    def progress(self, now: float, place: int = 0) -> Progress:
        """How far its prompt is. Before it has begun: what is known of it, and its place."""
        total = len(self.prompt)
        if not self.begun:
            known = 0 if self.match is None else min(self.match.cached, total - 1)
            return Progress(total, known, known, place=place)
        return Progress(total, self.cached, self.at, now - self.begun)

    def take(self, item: Item) -> None:
        self.items.append(item)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def next(self) -> Step:
        """All ids that have come since the last time, as one step; or how far the prompt is.

        Raises what the request failed with.
        """
        while not self.items:
            self.waiter = self.loop.create_future()
            await self.waiter
        first = self.items.popleft()
        if isinstance(first, HarmonyFailure):
            self.ended = True
            raise first
        while first.progress is None and self.items and isinstance(self.items[0], Step):
            more = self.items.popleft()
            assert isinstance(more, Step)
            first = replace(more, ids=first.ids + more.ids)
        self.ended = first.finish is not None
        return first


class MlxEngine:
    """A model on a thread of its own, as `server.engine.Engine`.

    Not loaded until ``load``; closed for good by ``close``. ``model`` is the directory or the name
    of the repository that it comes from.
    """

    remote = False

    def __init__(self, model: str, options: Options | None = None) -> None:
        self.model = model
        self.options = options or Options()
        self.tokenizer: Any = None
        self.cache: PrefixCache | None = None
        self.budget: Budget | None = None
        self.weights = 0
        self.problem: HarmonyFailure | None = None
        self.totals = Totals()
        self._module: Any = None
        self._answers = Answers()
        self._scheduler = Scheduler(self.options.limits)
        self._requests: dict[int, _Request] = {}
        self._numbers = count(1)
        self._out: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Request, Item]]]
        self._out = defaultdict(list)
        self._wired: int | None = None
        self._computed = self._steps = 0
        self._reported = 0.0
        self._thread = EngineThread(f"engine of {model}", self._work, self._died)

    # --- From any thread

    @property
    def loaded(self) -> bool:
        """Whether there is a model to generate with."""
        return self._module is not None

    @property
    def healthy(self) -> bool:
        """Whether its thread is alive."""
        return self._thread.alive

    @property
    def module(self) -> Any:
        """The model itself; used on the engine's thread alone."""
        return self._module

    @property
    def context_length(self) -> int | None:
        """Ids of prompt and answer together: as many as the model can see, and as there is memory
        for when a request is alone."""
        known = length_of(self.model)
        if self.budget is None:
            return known
        longest = self.budget.longest(self.weights)
        return longest if known is None else min(known, longest)

    def load(self, load: Load) -> None:
        """Loads the model. Raises what that raises, and ``HostError`` when it does not fit."""
        if not self.loaded:
            self._thread.call(partial(self._load, load)).result()

    def close(self) -> None:
        """Ends all requests, frees everything, ends the thread."""
        with suppress(Stopped):
            self._thread.post(self._shut)
        self._thread.close()
        if self.loaded:  # the thread died and could not free it
            self._free()

    async def run(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns on the engine's thread, between two pieces of work."""
        return await asyncio.wrap_future(self._thread.call(function))

    def status(self) -> list[RequestStatus]:
        """All requests, those that generate first, then as they are expected to be served."""
        now, scheduler = time.perf_counter(), self._scheduler
        requests = dict(self._requests)
        seconds = {key: scheduler.seconds(key) for key in scheduler.order()}
        places = {key: place for place, key in enumerate(seconds, start=1)}
        expected: dict[int, float | None] = {}
        before: float | None = 0.0
        for key, own in seconds.items():
            expected[key] = before = None if before is None or own is None else before + own
        found = []
        for each in requests.values():
            progress = each.progress(now)
            generating = bool(each.begun) and each.number not in places
            speed = 0.0
            if generating and now > each.first > 0:
                speed = each.generated / (now - each.first)
            elif each.begun and (own := seconds.get(each.number)):
                speed = (progress.total - progress.processed) / own
            found.append(
                RequestStatus(
                    tenant=each.tenant,
                    state="generating" if generating else "computing" if each.begun else "waiting",
                    place=0 if generating else places.get(each.number, len(places) + 1),
                    total=len(each.prompt),
                    cached=progress.cached,
                    computed=len(each.prompt) if generating else progress.processed,
                    generated=each.generated,
                    seconds=now - each.since,
                    speed=speed,
                    expected=0.0 if generating else expected.get(each.number),
                )
            )
        return sorted(found, key=lambda each: each.place)

    def generate(
        self,
        prompt: tuple[int, ...],
        settings: Settings,
        tenant: str,
        constraint: Constraint | None,
    ) -> Steps:
        """See ``server.engine.Engine``. Raises ``HostError`` when too many requests wait, and when
        the engine has stopped."""
        if not self._thread.alive:
            raise self.problem or HostError(_STOPPED)
        waiting = sum(not each.begun for each in list(self._requests.values()))
        if waiting >= max(1, number(QUEUE_VARIABLE, WAITING)):
            problem = f"{waiting} requests are waiting already; try again later"
            raise HostError(problem, code="queue_full")
        return self._generated(prompt, settings, tenant, constraint)

    async def _generated(
        self,
        prompt: tuple[int, ...],
        settings: Settings,
        tenant: str,
        constraint: Constraint | None,
    ) -> Steps:
        mask = None if constraint is None else LogitsMask(constraint)
        request = _Request(
            number=next(self._numbers),
            prompt=prompt,
            settings=settings,
            tenant=tenant,
            sampler=Sampler(settings, prompt, mask),
            loop=asyncio.get_running_loop(),
            since=time.perf_counter(),
        )
        # From now on, so that it ends with the engine, whatever it waits for.
        self._requests[request.number] = request
        try:
            if self.cache is not None:
                found = await self._looked_up(self.cache, prompt, tenant)
                request.match = await self.cache.load(found)
            try:
                self._thread.post(partial(self._admit, request))
            except Stopped:
                raise self.problem or HostError(_STOPPED) from None
            while not request.ended:
                yield await request.next()
        finally:
            if not request.ended:
                await self._dropped(request)

    async def reusable_tokens(self, prompt: Sequence[int], tenant: str) -> int:
        """See ``server.engine.Engine``."""
        cache = self.cache
        return 0 if cache is None else (await self._looked_up(cache, prompt, tenant)).cached

    async def _looked_up(self, cache: PrefixCache, prompt: Sequence[int], tenant: str) -> Match:
        if cache.blocks:
            return await asyncio.to_thread(cache.lookup, prompt, tenant)
        return cache.lookup(prompt, tenant)

    async def _dropped(self, request: _Request) -> None:
        try:
            dropping = self._thread.call(partial(self._forget, request))
        except Stopped:
            self._requests.pop(request.number, None)
            return
        await end_of(asyncio.ensure_future(asyncio.wrap_future(dropping)))

    # --- On the thread: loading and freeing

    def _load(self, load: Load) -> None:
        module, self.tokenizer = load()
        self._wired = device.wire()
        self.weights = device.used()
        self._module = module
        limit = int(device.memory() * self.options.utilization)
        layers: Layers = make_prompt_cache(module)
        mx.reset_peak_memory()
        module(mx.array([[vocab.ENDOFTEXT] * PROBE]), cache=layers)
        evaluate(layers)
        layout = _layout(layers)
        self._work_per_id = max(0, mx.get_peak_memory() - self.weights) / PROBE
        self.budget = Budget(limit, layout, self._chunk_work())
        if self.budget.longest(self.weights) < 1:
            raise HostError(
                f"{self.weights:,} bytes of weights leave no room for a prompt in the "
                f"{limit:,} bytes that may be used; take a smaller model, or more of the memory "
                "(--gpu-memory-utilization)",
                code="out_of_memory",
            )
        mx.clear_cache()
        self.cache = self.options.cache(module)

    def _chunk_work(self) -> int:
        return int(self._work_per_id * self.options.limits.chunk)

    def _free(self) -> None:
        if self.cache is not None:
            self.cache.close()
        self.cache = self.budget = None
        self._module = self.tokenizer = None
        device.unwire(self._wired)
        self._wired = None
        mx.clear_cache()

    def _died(self, error: BaseException) -> None:
        self.problem = HostError(f"the engine has died: {type(error).__name__}")
        for request in list(self._requests.values()):
            self._put(request, self.problem)
        self._requests.clear()
        self._deliver()

    def _shut(self) -> None:
        """In one call: a request that comes in between would never end."""
        for request in list(self._requests.values()):
            self._put(request, HostError(_STOPPED))
            self._forget(request)
        self._deliver()
        self._free()

    # --- On the thread: requests

    def _admit(self, request: _Request) -> None:
        if request.number not in self._requests:  # its client has gone
            return
        if not self.loaded:
            del self._requests[request.number]
            self._put(request, HostError(_STOPPED))
            self._deliver()
            return
        known = 0 if request.match is None else request.match.cached
        rest = max(0, len(request.prompt) - 1 - known)
        self._scheduler.add(request.number, rest, request.tenant, request.since)

    def _forget(self, request: _Request) -> None:
        """Nothing is computed for it any more."""
        if self._requests.pop(request.number, None) is None:
            return
        self._scheduler.remove(request.number)
        self.totals.requests += 1
        self.totals.prompt_tokens += request.at
        self.totals.completion_tokens += request.generated
        row, request.layers, request.row = request.row, None, None
        if row is not None:
            try:
                self._answers.remove([row])
            except Exception as error:  # noqa: BLE001 - as in ``_step``
                self._fail(self._without_batch(), error)

    def _without_batch(self) -> list[_Request]:
        """Answers whose batch has been dropped: its caches could not be changed as a whole."""
        rows = {id(row) for batch in self._answers.batches for row in batch.rows}
        found = [
            each
            for each in self._requests.values()
            if each.row is not None and id(each.row) not in rows
        ]
        for request in found:
            request.row = None
        return found

    def _report(self, request: _Request) -> None:
        self._put(request, Step((), progress=request.progress(time.perf_counter())))

    def _report_waiting(self) -> None:
        """Where the prompts are that nothing was computed of just now."""
        now = time.perf_counter()
        if now - self._reported < REPORTED:
            return
        self._reported = now
        for place, key in enumerate(self._scheduler.order(), start=1):
            request = self._requests[key]
            self._put(request, Step((), progress=request.progress(now, place)))

    def _put(self, request: _Request, item: Item) -> None:
        self._out[request.loop].append((request, item))

    def _deliver(self) -> None:
        """Hands on what has come for requests, once for each event loop."""
        if not self._out:
            return
        out, self._out = self._out, defaultdict(list)
        for loop, items in out.items():
            try:
                loop.call_soon_threadsafe(_hand_on, items)
            except RuntimeError:  # the loop is closed
                for request, _ in items:
                    self._forget(request)

    def _fail(self, requests: Iterable[_Request], error: Exception) -> None:
        """They end with ``error``. When memory has run out, what can be spared is given back."""
        failure: HarmonyFailure
        if device.exhausted(error):
            logger.error("memory has run out: %s", error)
            problem = (
                "the memory for this request has run out; try again later, or a shorter prompt"
            )
            failure = HostError(problem, code="out_of_memory", retry_after=5)
        else:
            logger.error("the engine failed", exc_info=error)
            failure = OutputError(_FAILED)
        for request in requests:
            self._put(request, failure)
            self._forget(request)
        if device.exhausted(error):
            if self.cache is not None:
                self.cache.evict(1 << 62)
            mx.clear_cache()

    # --- On the thread: work

    def _work(self) -> float | None:
        if self.cache is None:
            return None
        with self.cache.computing():
            return self._worked()

    def _worked(self) -> float | None:
        decision = self._scheduler.next(time.perf_counter(), self._fits)
        match decision:
            case Chunk(number, ids):
                request = self._requests[number]
                try:
                    self._compute(request, ids) if request.begun else self._begin(request)
                except Exception as error:  # noqa: BLE001 - of the model, whatever it is
                    self._fail({request, *self._without_batch()}, error)
            case NextStep():
                self._step()
            case None:
                self._report_waiting()
                self._deliver()
                return IDLE if self._requests else None
        self._report_waiting()
        self._deliver()
        return 0

    def _fits(self, number: int) -> bool:
        """Whether a request's keys and values to its end have room. What is cached gives way."""
        budget, request = self.budget, self._requests[number]
        assert budget is not None
        running = [each for each in self._requests.values() if each.begun]
        own = self._answers.nbytes + sum(
            layer.nbytes for each in running for layer in each.layers or ()
        )
        ends = [*(each.end for each in running), request.end]
        missing = budget.missing(device.used() - own, ends)
        if missing and self.cache is not None:
            self.cache.evict(missing)
            mx.clear_cache()
            missing = budget.missing(device.used() - own, ends)
        if missing and not running and time.perf_counter() - request.since > HOPELESS:
            self._fail([request], MemoryError(f"{missing} bytes are missing"))
        return not missing

    def _begin(self, request: _Request) -> None:
        """Its caches, with what is known of the prompt."""
        started = time.perf_counter()
        cache, match, request.match = self.cache, request.match, None
        assert cache is not None
        assert match is not None
        room = len(request.prompt) + min(request.settings.max_tokens, PROBE)
        request.layers, known = cache.restore(match, room)
        last = len(request.prompt) - 1
        request.marks = deque(boundaries(request.prompt, known)) if cache.enabled else deque([last])
        request.begun, request.at, request.cached = started, known, known
        self._report(request)
        self._scheduler.begin(request.number, last - known)
        self._scheduler.computed(request.number, 0, time.perf_counter() - started)
        if known == last:
            self._join(request)

    def _compute(self, request: _Request, ids: int) -> None:
        """A chunk of its prompt, up to the next place where it is stored."""
        self._settle()
        layers = request.layers
        assert layers is not None
        end = min(request.at + ids, request.marks[0])
        chunk = request.prompt[request.at : end]
        started = time.perf_counter()
        self._module(mx.array([chunk], dtype=mx.uint32), cache=layers)
        evaluate(layers)
        if end == request.marks[0]:
            request.marks.popleft()
            self._store(request, request.prompt[:end], layers)
        request.at = end
        self._computed += len(chunk)
        if self._computed >= FREED:
            self._computed = 0
            mx.clear_cache()
        self._scheduler.computed(request.number, len(chunk), time.perf_counter() - started)
        if request.marks:
            self._report(request)
        else:
            self._join(request)

    def _settle(self) -> None:
        """Answers are computed one step ahead: that is not the prompt's time. Nor is it the
        answers': what they lose by taking turns is not taken from their share."""
        if len(self._answers):
            self._answers.settle()

    def _join(self, request: _Request) -> None:
        """All of its prompt but the last id is computed: it generates from now on."""
        if request.settings.max_tokens == 0:
            self._put(request, Step((), "length", request.cached))
            self._forget(request)
            return
        request.at = len(request.prompt)
        self._report(request)
        layers, request.layers = request.layers, None
        assert layers is not None
        self._scheduler.answers(request.number)
        request.row = Row(request.number, request.sampler, list(request.prompt))
        self._answers.join(request.row, layers)

    def _step(self) -> None:
        started = time.perf_counter()
        for batch in list(self._answers.batches):
            together = [self._requests[row.request] for row in batch.rows]
            try:
                found = self._answers.step(self._module, batch)
                ended = [(row, finish) for row, token in found if (finish := self._add(row, token))]
                self._deliver()
                if ended:
                    self._end(batch, ended)
            except Exception as error:  # noqa: BLE001 - of the model, whatever it is
                self._answers.drop(batch)  # its caches may be broken
                for request in together:
                    request.row = None
                self._fail(together, error)
        self._steps += 1
        self.totals.steps += 1
        if self._steps * 8 >= FREED:
            self._steps = 0
            mx.clear_cache()
        self._scheduler.stepped(time.perf_counter() - started)

    def _add(self, row: Row, token: int) -> Finish | None:
        """Hands ``token`` on, unless it is the last of its answer: then why that ends."""
        request = self._requests[row.request]
        request.generated += 1
        request.held.append(token)
        request.first = request.first or time.perf_counter()
        if token in vocab.TURN_ENDS:
            return "stop"
        if request.generated >= request.settings.max_tokens:
            return "length"
        if len(request.held) >= self.options.interval:
            self._put(request, Step(tuple(request.held), None, request.cached))
            request.held.clear()
        return None

    def _end(self, batch: Batch, ended: Sequence[tuple[Row, Finish]]) -> None:
        """Stores them, and then hands on their last ids: who asks again at once finds them."""
        for row, finish in ended:
            request = self._requests[row.request]
            self._store(request, row.ids, batch.layers, batch.rows.index(row))
            self._put(request, Step(tuple(request.held), finish, request.cached))
        self._answers.remove([row for row, _ in ended])
        for row, _ in ended:
            request = self._requests[row.request]
            request.row = None
            self._forget(request)

    def _store(self, request: _Request, ids: Sequence[int], layers: Layers, row: int = 0) -> None:
        if self.cache is not None:
            self.cache.store(ids, layers, request.tenant, row)


def _hand_on(items: list[tuple[_Request, Item]]) -> None:
    """On the event loop of the requests."""
    for request, item in items:
        request.take(item)


def _layout(layers: Layers) -> Layout:
    """What an id takes in caches that hold some."""
    per_id, windows = 0, Counter[int]()
    for layer in layers:
        keys, values = layer.keys, layer.values
        nbytes = sum(each.nbytes // each.shape[2] for each in (keys, values))
        window = getattr(layer, "max_size", None)
        if window is None:
            per_id += nbytes
        else:
            windows[window] += nbytes
    return Layout(per_id, tuple(sorted(windows.items())))
