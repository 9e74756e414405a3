"""The engine by itself: the ids that mlx-lm generates, whatever runs beside them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from engine_models import answer, flushed, load_module, loading, of_mlx_lm, opened, steps, words
from mlx_lm.models.cache import BatchKVCache, KVCache

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError
from vllm_mlx_harmony.engine import device
from vllm_mlx_harmony.engine.batch import Batch
from vllm_mlx_harmony.engine.disk.cache import DiskCache
from vllm_mlx_harmony.engine.loop import EngineLoop
from vllm_mlx_harmony.engine.memory import Budget
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.engine.request import Request
from vllm_mlx_harmony.engine.sampler import Sampler
from vllm_mlx_harmony.engine.scheduler import BatchLimits
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings, Step
from vllm_mlx_harmony.standin import Script

Run = Callable[[Coroutine[Any, Any, Any]], Any]

GREEDY = GenerationSettings(max_tokens=40, temperature=0.0, top_p=1.0)
COUNT = "<|channel|>final<|message|>" + "".join(f" {n}" for n in range(45)) + "<|return|>"


@pytest.fixture(scope="module")
def tiny_engine(tiny: Path) -> Iterator[MlxEngine]:
    engine = opened(tiny)
    yield engine
    engine.close()


def ids(text: str) -> tuple[int, ...]:
    return tuple(vocab.encoding().encode(text, allowed_special="all"))


def prompt(text: str) -> tuple[int, ...]:
    return ids(f"<|start|>user<|message|>{text}<|end|><|start|>assistant")


def limit(engine: MlxEngine, nbytes: int) -> None:
    """Lets the engine, whose thread has nothing to do, use so many bytes."""
    engine.loop.budget = replace(engine.loop.budget, limit=nbytes)
    engine.loop.publish()


def rows(engine: MlxEngine) -> int:
    """How many answers are generated."""
    return sum(len(batch.rows) for batch in engine.loop.batches)


LENGTHS = [1, 2, 5, 127, 128, 129, 300, 700]


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("length", LENGTHS)
def test_alone_it_generates_what_mlx_lm_does(tiny_engine: MlxEngine, run: Run, length: int) -> None:
    asked = words(length, length)
    expected = of_mlx_lm(tiny_engine, asked)
    found = run(steps(tiny_engine, asked))
    assert sum((step.ids for step in found), ()) == expected
    assert found[-1].finish in ("stop", "length")
    assert all(step.finish is None for step in found[:-1])


def test_together_each_is_what_it_is_alone(tiny_engine: MlxEngine, run: Run) -> None:
    prompts = [words(seed, length) for seed, length in enumerate(LENGTHS * 2)]
    expected = [of_mlx_lm(tiny_engine, each) for each in prompts]

    async def together() -> list[tuple[int, ...]]:
        async def later(at: int) -> tuple[int, ...]:
            await asyncio.sleep(0.01 * at)
            return await answer(tiny_engine, prompts[at])

        return await asyncio.gather(*map(later, range(len(prompts))))

    assert run(together()) == expected


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
def test_prompts_may_be_cut_anywhere(tiny: Path, run: Run, chunk: int) -> None:
    engine = opened(tiny, limits=BatchLimits(chunk=chunk))
    try:
        for length in (2, 129, 300):
            asked = words(length, length)
            assert run(answer(engine, asked)) == of_mlx_lm(engine, asked)
    finally:
        engine.close()


@pytest.mark.nightly
@pytest.mark.once
def test_long_and_short_ones_do_not_share_a_batch(tiny_engine: MlxEngine, run: Run) -> None:
    """Padding would take the memory of the long one twice."""
    long, short = words(1, 3500), words(2, 5)
    expected = [of_mlx_lm(tiny_engine, each, most) for each, most in ((long, 60), (short, 20))]

    async def together() -> Any:
        batches = []

        async def short_one() -> tuple[int, ...]:
            while not rows(tiny_engine):
                await asyncio.sleep(0.001)
            found = ()
            settings = GenerationSettings(max_tokens=20, temperature=0.0, top_p=1.0)
            async with aclosing(
                tiny_engine.generate(GenerationRequest(short, settings, ""))
            ) as coming:
                async for step in coming:
                    found += step.ids
                    batches.append(len(tiny_engine.loop.batches))
            return found

        both = await asyncio.gather(answer(tiny_engine, long, max_tokens=60), short_one())
        return both, max(batches)

    found, batches = run(together())
    assert found == expected
    assert batches == 2


# --- On scripts: how requests end.

SCRIPTS = [
    Script("answer", "<|channel|>final<|message|>Hi.<|return|>"),
    Script("at once", "<|return|>"),
    Script("count", COUNT),
    Script("slow", COUNT, delay_ms=20),
    Script("failing", COUNT, fail_at=5),
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlxEngine]:
    engine = opened(standin.write(tmp_path_factory.mktemp("scripted"), SCRIPTS))
    yield engine
    engine.close()


def idle(engine: MlxEngine) -> bool:
    """Whether nothing of any request is left."""

    def left() -> bool:
        scheduler = engine.loop.scheduler
        return not (
            engine.loop.requests or engine.loop.batches or scheduler._prompts or scheduler._answers
        )

    return engine._thread.call(left).result()


@pytest.mark.parametrize("script", SCRIPTS[:4], ids=lambda script: script.pattern)
def test_answer_ends_with_its_end_token(scripted: MlxEngine, run: Run, script: Script) -> None:
    found = run(steps(scripted, prompt(script.pattern), max_tokens=500))
    assert sum((step.ids for step in found), ()) == ids(script.completion)
    assert [step.finish for step in found][-1] == "stop"
    assert idle(scripted)


def test_an_answer_is_no_longer_than_its_limit(scripted: MlxEngine, run: Run) -> None:
    for most in (1, 2, 10):
        found = run(steps(scripted, prompt("count"), max_tokens=most))
        assert sum((step.ids for step in found), ()) == ids(COUNT)[:most]
        assert found[-1].finish == "length"


def test_a_limit_of_none_computes_the_prompt(scripted: MlxEngine, run: Run) -> None:
    assert run(steps(scripted, prompt("count"), max_tokens=0)) == [Step((), "length")]
    assert idle(scripted)


def test_closing_an_answer_frees_the_engine(scripted: MlxEngine, run: Run) -> None:
    async def closed(read: int) -> None:
        settings = GenerationSettings(max_tokens=500, temperature=0.0, top_p=1.0)
        coming = scripted.generate(GenerationRequest(prompt("slow"), settings, ""))
        for _ in range(read):
            await anext(coming)
        await coming.aclose()
        assert idle(scripted)

    for read in (0, 1, 5):
        run(closed(read))


def test_cancellation_frees_the_engine(scripted: MlxEngine, run: Run) -> None:
    async def cancelled(seconds: float) -> None:
        task = asyncio.ensure_future(answer(scripted, prompt("slow"), max_tokens=500))
        await asyncio.sleep(seconds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert idle(scripted)

    for seconds in (0.0, 0.01, 0.1):
        run(cancelled(seconds))


def test_an_error_of_the_model_ends_what_was_computed_together(
    scripted: MlxEngine, run: Run
) -> None:
    async def together() -> list[Any]:
        asked = (answer(scripted, prompt(each), max_tokens=500) for each in ("failing", "slow"))
        return await asyncio.gather(*asked, return_exceptions=True)

    failed, beside = run(together())
    assert isinstance(failed, OutputError) and failed.status == 500
    assert isinstance(beside, OutputError) or beside == ids(COUNT)
    assert idle(scripted)
    assert run(answer(scripted, prompt("answer"))) == ids(SCRIPTS[0].completion), "it goes on"
    assert scripted.healthy


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize(
    ("problem", "code"),
    [
        ("[malloc] Unable to allocate 123456789 bytes.", "out_of_memory"),
        ("[METAL] Command buffer execution failed: Insufficient Memory", "out_of_memory"),
        ("[METAL] Command buffer execution failed: Caused GPU Timeout Error", "gpu_error"),
    ],
)
@pytest.mark.parametrize("when", ["prompt", "answer"])
def test_failure_of_the_device_ends_a_request_and_not_the_engine(
    tiny: Path, run: Run, when: str, problem: str, code: str
) -> None:
    engine = opened(tiny)
    try:
        model, wanted = engine.loop.module, when == "answer"

        class Full:
            make_cache = staticmethod(model.make_cache)

            def __call__(self, ids: Any, cache: Any) -> Any:
                if (ids.shape[1] == 1) == wanted:
                    raise RuntimeError(problem)
                return model(ids, cache=cache)

        engine.loop.module = Full()
        with pytest.raises(HostError) as error:
            run(answer(engine, words(3, 50)))
        assert (error.value.status, error.value.code) == (503, code)
        engine.loop.module = model
        assert run(answer(engine, words(3, 50))) == of_mlx_lm(engine, words(3, 50))
        assert idle(engine)
    finally:
        engine.close()


def test_failure_at_the_end_of_an_answer_ends_its_batch(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(tiny)
    remove, broken = Batch.remove, [True]

    def full(batch: Batch, gone: Any) -> None:
        if broken and broken.pop():
            raise RuntimeError("[malloc] Unable to allocate 123456789 bytes.")
        remove(batch, gone)

    monkeypatch.setattr(Batch, "remove", full)

    async def both() -> list[Any]:
        asked = (answer(engine, words(n, 50), max_tokens=10 + 200 * n) for n in range(2))
        return await asyncio.gather(*asked, return_exceptions=True)

    try:
        first, second = run(both())
        assert first == of_mlx_lm(engine, words(0, 50), 10)
        assert isinstance(second, HostError) and second.code == "out_of_memory"
        assert idle(engine) and engine.healthy
        assert run(answer(engine, words(3, 50))) == of_mlx_lm(engine, words(3, 50))
    finally:
        engine.close()


OUT_OF_MEMORY = RuntimeError("[malloc] Unable to allocate 123456789 bytes.")


@pytest.mark.parametrize("change", ["merge", "extend", "filter", "extract"])
def test_failed_batch_change_ends_only_its_answers(
    tiny: Path, run: Run, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have another row by then and others do not: it could only generate nonsense."""
    kind = KVCache if change == "merge" else BatchKVCache
    original, calls, failing = getattr(kind, change), [0], [False]

    def broken(*given: Any) -> Any:
        calls[0] += failing[0]
        if calls[0] == 2:  # the first layer is done
            raise OUT_OF_MEMORY
        return original(*given)

    monkeypatch.setattr(kind, change, staticmethod(broken) if change == "merge" else broken)
    engine = opened(tiny)

    async def together() -> list[Any]:
        """Answers of 60 and more ids, and one more that comes or goes when they run."""
        running = 1 if change in ("merge", "extract") else 2
        asked = [
            asyncio.ensure_future(answer(engine, words(n, 20 + n), max_tokens=10_000))
            for n in range(running)
        ]
        while rows(engine) < running:
            await asyncio.sleep(0.001)
        failing[0] = change in ("merge", "extend")
        more = asyncio.ensure_future(answer(engine, words(9, 30), max_tokens=10_000))
        if not failing[0]:
            while rows(engine) < running + 1:
                await asyncio.sleep(0.001)
            failing[0] = True
            more.cancel()
        return await asyncio.gather(*asked, more, return_exceptions=True)

    try:
        ended = run(together())
        assert calls[0] >= 2
        for each in ended:
            assert isinstance(each, (HostError, asyncio.CancelledError)), each
        failing[0] = False
        assert idle(engine) and engine.healthy
        assert run(answer(engine, words(3, 50))) == of_mlx_lm(engine, words(3, 50))
    finally:
        engine.close()


def test_request_posted_to_a_dying_thread_fails(tiny: Path, run: Run) -> None:
    """Its call waits while the thread dies."""
    engine = opened(tiny)
    held = threading.Event()

    def dies(*_: Any) -> None:
        held.wait(10)
        raise AssertionError("a bug")

    async def asking() -> Any:
        engine.loop.scheduler.next = dies  # type: ignore[method-assign, assignment]
        engine._thread.call(bool)
        asked = asyncio.ensure_future(answer(engine, words(3, 50)))
        await asyncio.sleep(0.05)
        held.set()
        with pytest.raises(HostError) as error:
            await asyncio.wait_for(asked, 60)
        return error.value

    assert run(asking()).status == 503
    assert not engine.loop.requests
    engine.close()
    assert not engine.loaded, "what a dead thread leaves is freed"


def test_too_many_that_wait_are_rejected_before_anything_is_sent(tiny: Path, run: Run) -> None:
    """By the call itself, so that a stream gets a status of its own."""
    engine = opened(tiny, limits=BatchLimits(answers=1), queue=2)

    async def test() -> None:
        running = engine.generate(GenerationRequest(words(1, 20), GREEDY, ""))
        while not (await anext(running)).ids:
            pass
        waiting = [asyncio.ensure_future(answer(engine, words(n, 20))) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(HostError) as error:
            engine.generate(GenerationRequest(words(1, 20), GREEDY, ""))
        assert (error.value.status, error.value.code) == (503, "queue_full")
        assert [each.place for each in engine.status()] != [0, 0, 0]
        waiting.pop().cancel()  # whoever goes frees a place
        await asyncio.sleep(0.1)
        waiting.append(asyncio.ensure_future(answer(engine, words(2, 20))))
        await running.aclose()
        assert all(await asyncio.gather(*waiting))

    try:
        run(test())
    finally:
        engine.close()


@pytest.mark.parametrize("device_fails", [False, True])
def test_dead_thread_ends_all_requests(
    tiny: Path, run: Run, device_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(tiny)

    def broken(*_: Any) -> None:
        raise AssertionError("a bug")

    engine.loop.scheduler.next = broken  # type: ignore[method-assign, assignment]
    with monkeypatch.context() as patched:
        if device_fails:
            patched.setattr(device.turns, "_settle", broken)
        for _ in range(2):
            with pytest.raises(HarmonyFailure) as error:
                run(answer(engine, words(3, 50)))
            assert error.value.status == 503
        engine._thread._thread.join(10)
    assert not engine.healthy
    engine.close()


def test_closed_it_ends_all_requests(tiny: Path, run: Run) -> None:
    engine = opened(tiny)

    async def closed() -> list[Any]:
        asked = [asyncio.ensure_future(answer(engine, words(3, 50), max_tokens=10_000))] * 1
        await asyncio.sleep(0.2)
        await asyncio.to_thread(engine.close)
        return await asyncio.gather(*asked, return_exceptions=True)

    (ended,) = run(closed())
    assert isinstance(ended, HostError) and ended.status == 503
    assert not engine.loaded
    with pytest.raises(HostError):
        run(answer(engine, words(3, 50)))


def test_closed_it_ends_the_streams_of_its_thread(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they are left to mlx 0.32, the process sometimes aborts when it exits."""
    ended = list[str]()
    monkeypatch.setattr(
        mx, "clear_streams", lambda: ended.append(threading.current_thread().name), raising=False
    )
    opened(tiny).close()
    assert ended == [f"engine of {tiny}"]


def test_two_engines_run_side_by_side(tiny: Path, scripted: MlxEngine, run: Run) -> None:
    other = opened(tiny)
    try:
        asked = words(5, 200)

        async def both() -> list[tuple[int, ...]]:
            return await asyncio.gather(
                answer(other, asked), answer(scripted, prompt("count"), max_tokens=500)
            )

        assert run(both()) == [of_mlx_lm(other, asked), ids(COUNT)]
    finally:
        other.close()


# --- Requests in every state at once.


async def in_every_state(engine: MlxEngine) -> dict[str, asyncio.Task[Any]]:
    """Requests to an engine with 2 ``answers`` and 3 ``sequences``: tasks by their states."""

    async def asked(length: int, seed: int) -> tuple[int, ...]:
        return await answer(engine, words(seed, length), max_tokens=20_000)

    tasks = {"decode": asyncio.ensure_future(asked(20, 1))}
    while not rows(engine):
        await asyncio.sleep(0.001)
    tasks["prefill"] = asyncio.ensure_future(asked(30_000, 2))
    while not any(each.computed_ids > 0 and not each.ids for each in engine.loop.requests.values()):
        await asyncio.sleep(0.001)
    tasks["waiting"] = asyncio.ensure_future(asked(30_000, 3))
    while len(engine.loop.scheduler.order()) < 2:
        await asyncio.sleep(0.001)
    return tasks


@pytest.fixture
def crowded(tiny: Path) -> Iterator[MlxEngine]:
    engine = opened(tiny, limits=BatchLimits(answers=2, chunk=256))
    yield engine
    engine.close()


@pytest.mark.parametrize("state", ["decode", "prefill", "waiting"])
def test_a_client_may_go_in_any_state(crowded: MlxEngine, run: Run, state: str) -> None:
    async def test() -> None:
        tasks = await in_every_state(crowded)
        others = sorted(set(tasks) - {state})
        tasks[state].cancel()
        await asyncio.wait({tasks[state]})
        assert tasks[state].cancelled()
        assert len(crowded.loop.requests) == 2
        await asyncio.sleep(0.1)
        for name in others:
            assert not tasks[name].done()
            tasks[name].cancel()
        await asyncio.wait(tasks.values())
        assert idle(crowded)

    run(test())
    assert run(answer(crowded, words(3, 50))) == of_mlx_lm(crowded, words(3, 50))


def test_unloaded_under_load_it_ends_requests_in_all_states(crowded: MlxEngine, run: Run) -> None:
    async def test() -> None:
        tasks = await in_every_state(crowded)
        await asyncio.to_thread(crowded.close)
        for task in tasks.values():
            with pytest.raises(HostError) as error:
                await asyncio.wait_for(task, 60)
            assert error.value.status == 503

    run(test())
    assert not (crowded.loaded or crowded.loop.requests or crowded.loop.batches)


# --- Limits.


class Watched:
    """A model, and how it is called: rows, and ids of each, and whether answers run beside."""

    def __init__(self, engine: MlxEngine) -> None:
        self.engine, self.model = engine, engine.loop.module
        self.make_cache = engine.loop.module.make_cache
        self.chunks: list[tuple[bool, int]] = []
        self.rows: list[int] = []
        self.begun: list[int] = []
        self.running: list[int] = []

    def __call__(self, ids: Any, cache: Any) -> Any:
        requests = list(self.engine.loop.requests.values())
        answers = rows(self.engine)
        prompts = sum(each.prefill_start > 0 and not each.ids for each in requests)
        self.begun.append(prompts)
        self.running.append(prompts + answers)
        if ids.shape[1] > 1:
            self.chunks.append((answers > 0, ids.shape[1]))
        else:
            self.rows.append(ids.shape[0])
        return self.model(ids, cache=cache)


@pytest.mark.nightly(sample=3)
@pytest.mark.once
@pytest.mark.parametrize(
    "limits",
    [
        BatchLimits(sequences=2),
        BatchLimits(prompts=1),
        BatchLimits(answers=2),
        BatchLimits(chunk=64),
        BatchLimits(prompts=2, chunk_beside=32),  # so that some are computed beside answers
        BatchLimits(sequences=3, prompts=2, answers=2, chunk=96, chunk_beside=48),
    ],
    ids=["sequences", "prompts", "answers", "chunk", "chunk beside", "all"],
)
def test_limits_are_kept(tiny: Path, run: Run, limits: BatchLimits) -> None:
    """As ``--max-num-seqs``, ``--prefill-batch-size``, ``--completion-batch-size``,
    ``--prefill-step-size`` and ``--chunked-prefill-tokens`` set them."""
    engine = opened(tiny, limits=limits, queue=4)
    expected = [of_mlx_lm(engine, words(seed, 200 + seed), 25) for seed in range(4)]
    watched = engine.loop.module = Watched(engine)

    async def together() -> list[tuple[int, ...]]:
        asked = (answer(engine, words(seed, 200 + seed), max_tokens=25) for seed in range(4))
        return await asyncio.gather(*asked)

    try:
        assert run(together()) == expected
        assert max(watched.running) <= limits.sequences
        assert max(watched.begun) <= limits.prompts
        assert max(watched.rows) <= limits.answers
        assert max(ids for _, ids in watched.chunks) <= limits.chunk
        if limits.chunk_beside:
            assert max(ids for beside, ids in watched.chunks if beside) <= limits.chunk_beside
    finally:
        engine.close()


# --- Memory.


@pytest.mark.once
def test_request_waits_until_memory_is_free(tiny: Path, run: Run) -> None:
    engine = opened(tiny)
    try:
        budget = engine.budget
        one = budget.layout.nbytes(1000 + 40)
        room = device.used() + budget.work + int(one * 1.5)
        limit(engine, room)
        most = 0

        async def watched() -> list[tuple[int, ...]]:
            nonlocal most
            asked = [asyncio.ensure_future(answer(engine, words(seed, 1000))) for seed in range(3)]
            while not all(each.done() for each in asked):
                await asyncio.sleep(0.001)
                most = max(
                    most,
                    sum(each.prefill_start > 0 for each in list(engine.loop.requests.values())),
                )
            return [each.result() for each in asked]

        found = run(watched())
        assert most == 1
        assert found == [of_mlx_lm(engine, words(seed, 1000)) for seed in range(3)]
    finally:
        engine.close()


def test_the_context_is_as_long_as_memory_allows(tiny: Path) -> None:
    engine = opened(tiny)
    try:
        assert engine.context_length == 131_072
        budget = engine.budget
        room = device.weights() + budget.work + budget.layout.nbytes(5000)
        limit(engine, room)
        assert engine.context_length is not None and 4600 < engine.context_length <= 5120
    finally:
        engine.close()


def test_model_without_room_for_prompts_is_not_loaded(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "memory", lambda *_: 20_000_000)
    engine = MlxEngine(str(tiny))
    with pytest.raises(HostError, match=r"of the 18,000,000 bytes .* leaves no memory"):
        engine.load(loading(partial(load_module, tiny)))
    engine.close()
    assert not engine.loaded


@pytest.mark.parametrize("weights", [1, 3, 10**9])
def test_other_models_shorten_the_context_while_they_are_loaded(tiny: Path, weights: int) -> None:
    before = device.weights()
    first = opened(tiny)
    second = opened(tiny)
    try:
        assert first.weights == second.weights == (device.weights() - before) // 2 > 10**6
        budget = first.budget
        room = device.weights() + budget.work + budget.layout.nbytes(5120) + weights
        limit(first, room)
        alone = first.context_length
        device.add_weights(weights)
        assert first.context_length == min(alone or 0, 5120)
        device.add_weights(-weights)
        assert first.context_length == alone
    finally:
        first.close()
        second.close()
    assert device.weights() == before and first.weights == 0


@pytest.mark.nightly
def test_a_model_is_measured_as_if_it_were_alone(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one that computes neither adds to its work nor to the costs of its steps, and goes on
    afterwards with the same ids."""
    first = opened(tiny, speculate="auto")
    alone, steps_of = first.budget.work, first.loop
    measured = EngineLoop._measure
    seen: list[tuple[int, int]] = []

    def observed(loop: EngineLoop, module: Any) -> None:
        before, used = steps_of.totals.steps, device.used()
        time.sleep(0.2)  # the other one would compute some steps
        assert device.used() == used
        measured(loop, module)
        seen.append((before, steps_of.totals.steps))

    monkeypatch.setattr(EngineLoop, "_measure", observed)
    asked = words(5, 1500)
    expected = run(answer(first, asked))
    loads: list[int] = []

    async def together() -> tuple[int, ...]:
        task = asyncio.ensure_future(answer(first, (*asked[:-1], 7), max_tokens=4000))
        while not rows(first):
            await asyncio.sleep(0.005)
        for _ in range(2):
            second = await asyncio.to_thread(opened, tiny, speculate="auto")
            loads.append(second.budget.work)
            await asyncio.to_thread(second.close)
        assert not task.done(), "it computes all the while"
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return await answer(first, asked)

    try:
        assert run(together()) == expected
        # mlx frees what it has used sooner or later on a CPU; another model would be tenfold.
        assert all(alone / 2 < load < 2 * alone for load in loads), (alone, loads)
        assert len(seen) == 2 and all(before == after for before, after in seen)
    finally:
        first.close()
    assert not device.turns._computing


def test_wired_memory_is_released_while_idle(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks as often as the device says, until nothing is wired, and again after a request."""
    asked, computed, answers = list[str](), list[str](), [0.01, 0.01, None, 0.01, None]

    def release() -> float | None:
        asked.append(threading.current_thread().name)
        return answers.pop(0) if answers else None

    monkeypatch.setattr(device, "release", release)
    monkeypatch.setattr(device, "computing", lambda: computed.append("computing"))
    engine = opened(tiny, speculate="off")  # a step for each id

    def wait(count: int) -> None:
        deadline = time.monotonic() + 30
        while len(asked) < count and time.monotonic() < deadline:
            time.sleep(0.01)

    try:
        wait(3)
        assert len(asked) == 3 and not computed
        run(answer(engine, words(1, 20)))
        wait(5)
        assert len(asked) == 5 and len(computed) >= 40
        assert set(asked) == {engine._thread._thread.name}
    finally:
        engine.close()


def waiting_for_memory(engine: MlxEngine, missing: int, since: float) -> Request:
    """A request for which ``missing`` bytes are missing; it arrived ``since`` seconds ago."""
    request = Request(99, words(1, 200), GREEDY, "", Sampler(GREEDY), time.perf_counter() - since)
    engine.loop.requests[99] = request
    engine.loop.scheduler.add(99, 199, "", request.arrival_time)
    budget = engine.budget
    room = device.used() + budget.needed([request.max_length]) - missing
    limit(engine, room)
    return request


def test_a_prompt_without_memory_waits_from_its_first_attempt(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long ago it arrived; and as long as memory is used and freed."""
    used = [10**6]

    async def test() -> None:
        engine = opened(tiny)
        monkeypatch.setattr(device, "used", lambda: used[0])
        try:
            request = waiting_for_memory(engine, 1, 1000.0)
            assert not engine.loop._fits(99) and 99 in engine.loop.requests
            monkeypatch.setattr("vllm_mlx_harmony.engine.loop.ADMISSION_TIMEOUT", -1.0)
            for change in (1, 2):
                used[0] += change
                assert not engine.loop._fits(99) and 99 in engine.loop.requests
            assert not engine.loop._fits(99) and 99 not in engine.loop.requests
            engine.loop._deliver()
            with pytest.raises(HostError) as error:
                await request.next()
            assert error.value.code == "out_of_memory"
        finally:
            engine.close()

    run(test())


@pytest.mark.parametrize(("missing", "evicted"), [(1, True), (10**9, False)])
def test_the_prefix_cache_is_evicted_only_if_that_makes_the_room(
    tiny: Path, run: Run, missing: int, evicted: bool
) -> None:
    async def test() -> None:
        engine = opened(tiny, cache=reusing())
        try:
            await answer(engine, words(1, 300), max_tokens=2)
            held = engine.cache.status().nbytes
            waiting_for_memory(engine, missing, 0.0)
            assert held and engine._thread.call(partial(engine.loop._fits, 99)).result() == evicted
            assert (engine.cache.status().nbytes < held) == evicted
        finally:
            engine.close()

    run(test())


def test_no_more_is_evicted_while_what_was_is_being_written(
    tiny: Path, run: Run, open_disk: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, held, write = open_disk(), threading.Event(), DiskCache._write

    def slow(*given: Any) -> None:
        held.wait(60)
        write(*given)

    monkeypatch.setattr(DiskCache, "_write", slow)
    cached = partial(PrefixCache, tree=PrefixTree(1 << 30), disk=disk, weights=b"w" * 16)

    async def test() -> None:
        engine = opened(tiny, cache=cached)
        try:
            for seed in range(5):
                await answer(engine, words(seed, 300), max_tokens=2)
            waiting_for_memory(engine, 1, 0.0)
            fits = partial(engine._thread.call, partial(engine.loop._fits, 99))
            for _ in range(5):
                assert not fits().result()
                assert engine.cache.status().evictions == 1
                assert disk.evicted > 0

            def written() -> bool:
                held.set()
                return flushed(disk, 60) and engine.loop._fits(99)

            # In one call: the engine would begin the request as soon as there is memory.
            assert engine._thread.call(written).result()
            assert engine.cache.status().evictions == 1 and disk.evicted == 0
        finally:
            held.set()
            engine.close()

    run(test())


class Owned(dict[int, Request]):
    """Requests by their numbers, and ``readers``: the threads that looked at them."""

    readers: set[str]

    def seen(self) -> None:
        self.readers.add(threading.current_thread().name)

    def __iter__(self) -> Iterator[int]:
        self.seen()
        return super().__iter__()

    def __len__(self) -> int:
        self.seen()
        return super().__len__()

    def __getitem__(self, key: int) -> Request:
        self.seen()
        return super().__getitem__(key)

    def __setitem__(self, key: int, value: Request) -> None:
        self.seen()
        super().__setitem__(key, value)

    def values(self) -> Any:
        self.seen()
        return super().values()

    def pop(self, *given: Any) -> Any:
        self.seen()
        return super().pop(*given)


def test_requests_belong_to_the_thread(tiny: Path, run: Run) -> None:
    engine = opened(tiny)
    owned = engine.loop.requests = Owned()
    owned.readers = set()

    async def test() -> None:
        task = asyncio.ensure_future(answer(engine, words(1, 600), max_tokens=5000))
        while not any(each.generated for each in engine.status()):
            await asyncio.sleep(0.001)
        await answer(engine, words(2, 50), max_tokens=5)
        assert engine.context_length and engine.totals.requests == 1
        task.cancel()
        await asyncio.wait({task})
        assert engine.status() == []

    try:
        run(test())
        assert owned.readers == {engine._thread._thread.name}
    finally:
        engine.close()


def test_longer_waiting_prompts_are_not_checked_again(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 prompts that wait beside an answer would slow each of its steps down."""
    counted = [0]
    missing = Budget.missing

    def count(*given: Any) -> int:
        counted[0] += 1
        return missing(*given)

    async def test() -> None:
        engine = opened(tiny)
        monkeypatch.setattr(Budget, "missing", count)
        try:
            running = engine.generate(
                GenerationRequest(words(1, 20), replace(GREEDY, max_tokens=900), "")
            )
            while not (await anext(running)).ids:
                pass
            budget = engine.budget
            room = device.used() + budget.needed([1000])
            limit(engine, room)
            waiting = [
                asyncio.ensure_future(answer(engine, words(n, 400 + n), max_tokens=500))
                for n in range(50)
            ]
            while len(engine.loop.scheduler.order()) < len(waiting):
                await anext(running)
            counted[0], before = 0, engine.loop.totals.steps
            while engine.loop.totals.steps < before + 20:
                await anext(running)
            assert 20 <= counted[0] <= 3 * (engine.loop.totals.steps - before)
            for each in waiting:
                each.cancel()
            await running.aclose()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert idle(engine)
        finally:
            engine.close()

    run(test())


def test_cancellation_frees_the_engine_without_a_cache(
    crowded: MlxEngine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no memory")

    async def test() -> None:
        tasks = await in_every_state(crowded)
        monkeypatch.setattr(EngineLoop, "_store", broken)
        for task in tasks.values():
            task.cancel()
        await asyncio.wait(tasks.values())
        assert idle(crowded) and not crowded.loop.waiting.count

    run(test())


def test_answer_may_end_while_its_event_loop_closes(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beside it continue. In the last step here, it gets two ids."""
    engine = opened(tiny)
    asked, beside = words(1, 50), words(2, 50)
    expected = of_mlx_lm(engine, beside)
    gone, step = asyncio.new_event_loop(), Batch.step
    gone.close()
    held: list[Any] = []

    def late(batch: Batch, model: Any) -> list[Any]:
        found = []
        for request, token in step(batch, model):
            if request.prompt == asked and request.generated + len(held) == 8:
                held.append((request, token))
                request.loop = gone
            else:
                found += (
                    [*held, (request, token)] if request.prompt == asked else [(request, token)]
                )
        return found

    monkeypatch.setattr(Batch, "step", late)

    async def both() -> Any:
        first = asyncio.ensure_future(answer(engine, asked, max_tokens=10))
        try:
            return await answer(engine, beside)
        finally:
            first.cancel()

    try:
        assert run(both()) == expected
        assert held and idle(engine)
    finally:
        engine.close()


# --- Prefix reuse.


def reusing(nbytes: int = 1 << 30) -> Callable[[Any], PrefixCache]:
    return lambda model: PrefixCache(model, PrefixTree(nbytes))


def test_reused_layers_equal_computed_ones(tiny: Path, run: Run) -> None:
    engine = opened(tiny, cache=reusing())
    try:
        start = words(1, 300)
        first = run(steps(engine, start))
        assert first[-1].cached_tokens == 0
        history = start + sum((step.ids for step in first), ())
        again = history + words(2, 150)
        assert run(engine.reusable_tokens(again, "")) >= len(start)
        found = run(steps(engine, again))
        assert found[0].cached_tokens >= len(start)
        assert sum((step.ids for step in found), ()) == of_mlx_lm(engine, again)
        assert run(engine.reusable_tokens(again, "another")) == 0
        repeated = run(steps(engine, start))
        assert repeated[0].cached_tokens == len(start) - 1
        assert sum((step.ids for step in repeated), ()) == sum((step.ids for step in first), ())
    finally:
        engine.close()


def test_rows_of_a_batch_are_reused_too(tiny: Path, run: Run) -> None:
    engine = opened(tiny, cache=reusing())
    prompts = [words(seed, 100 + 40 * seed) for seed in range(4)]

    async def asked(prompts: list[tuple[int, ...]]) -> list[list[Step]]:
        return list(await asyncio.gather(*(steps(engine, each) for each in prompts)))

    try:
        first = run(asked(prompts))
        again = [
            prompt + sum((step.ids for step in found), ()) + words(9, 60)
            for prompt, found in zip(prompts, first, strict=True)
        ]
        for prompt, before, found in zip(again, prompts, run(asked(again)), strict=True):
            assert found[0].cached_tokens >= len(before)
            assert sum((step.ids for step in found), ()) == of_mlx_lm(engine, prompt)
    finally:
        engine.close()


@pytest.mark.once
def test_the_prefix_cache_gives_way_to_a_request(tiny: Path, run: Run) -> None:
    engine = opened(tiny, cache=reusing())
    try:
        run(answer(engine, words(1, 2000), max_tokens=2))
        budget, cache = engine.budget, engine.cache
        assert cache.status().nbytes > 0
        room = device.used() - cache.status().nbytes + budget.work + budget.layout.nbytes(2100)
        limit(engine, room)
        assert len(run(answer(engine, words(2, 2000), max_tokens=2))) == 2
        assert run(engine.reusable_tokens(words(1, 2000), "")) == 0
    finally:
        engine.close()


# --- A prompt that is cancelled (semantics E2).

CHUNK = 64


async def cancelled(engine: MlxEngine, asked: tuple[int, ...], chunks: int) -> int:
    """Closes a request once that many chunks of its prompt are computed; returns how many ids were
    reported as computed."""
    settings = replace(GREEDY, max_tokens=8)
    computed = 0
    async with aclosing(engine.generate(GenerationRequest(asked, settings, ""))) as coming:
        async for step in coming:
            if step.progress is not None and not step.progress.place:
                computed = step.progress.processed
            if computed >= chunks * CHUNK:
                break
    return computed


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 8, 9])
def test_cancelled_prompt_continues_where_it_was(
    tiny: Path, run: Run, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same one, and one that differs behind that place."""
    monkeypatch.setattr("vllm_mlx_harmony.engine.loop.SPAN", CHUNK)  # as with the real numbers
    asked = words(7, 10 * CHUNK)
    engine = opened(tiny, cache=reusing(), limits=BatchLimits(chunk=CHUNK))
    try:
        computed = run(cancelled(engine, asked, chunks))
        for prompt in (asked[: 9 * CHUNK + 2] + words(8, 40), asked):
            found = run(steps(engine, prompt, max_tokens=8))
            assert found[0].cached_tokens >= min(computed, 9 * CHUNK)
            assert sum((step.ids for step in found), ()) == of_mlx_lm(engine, prompt, 8)
    finally:
        engine.close()


def test_repeatedly_cancelled_prompt_is_computed_once(tiny: Path, run: Run) -> None:
    asked = words(9, 12 * CHUNK + 5)
    engine = opened(tiny, cache=reusing(), limits=BatchLimits(chunk=CHUNK), speculate="off")
    passes: list[int] = []
    module = engine.loop.module

    def counted(inputs: mx.array, cache: Any) -> mx.array:
        passes.append(inputs.shape[1])
        return module(inputs, cache=cache)

    try:
        expected = of_mlx_lm(engine, asked, 8)
        engine.loop.module = counted
        for chunks in range(2, 12, 2):
            run(cancelled(engine, asked, chunks))
        assert run(answer(engine, asked, max_tokens=8)) == expected
        assert sum(length for length in passes if length > 1) == len(asked) - 1
    finally:
        engine.close()


def test_prompt_of_killed_server_is_on_disk(
    tiny: Path, open_disk: Callable[..., DiskCache], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_mlx_harmony.engine.loop.SPAN", 2 * CHUNK)
    asked, disk = words(10, 12 * CHUNK), open_disk()

    def cached(model: Any) -> PrefixCache:
        return PrefixCache(model, PrefixTree(1 << 30), disk, b"weights")

    async def on_disk(engine: MlxEngine) -> int:
        """What a process that starts now would find, while the prompt is computed."""
        settings = replace(GREEDY, max_tokens=8)
        async with aclosing(engine.generate(GenerationRequest(asked, settings, ""))) as coming:
            async for step in coming:
                if step.progress is not None and step.progress.processed >= 7 * CHUNK:
                    break
            await asyncio.to_thread(flushed, disk)
            other = PrefixCache(engine.loop.module, PrefixTree(1 << 30), open_disk(), b"weights")
            return (await other.find(asked, "")).cached

    engine = opened(tiny, cache=cached, limits=BatchLimits(chunk=CHUNK))
    try:
        assert run(on_disk(engine)) >= 6 * CHUNK
    finally:
        engine.close()


def test_requests_of_two_event_loops_reuse_what_is_on_disk(
    tiny: Path, open_disk: Callable[..., DiskCache], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each asks while the other's prompt is read."""
    asked = [words(seed, 500) for seed in range(4)]

    def with_disk() -> MlxEngine:
        disk = open_disk()
        return opened(tiny, cache=lambda model: PrefixCache(model, tree(), disk, b"weights"))

    def tree() -> PrefixTree[Any]:
        return PrefixTree(1 << 30)

    first = with_disk()
    expected = [run(answer(first, each, max_tokens=8)) for each in asked]
    assert first.cache._disk is not None and flushed(first.cache._disk)
    first.close()
    second, load = with_disk(), DiskCache._load
    both = threading.Barrier(2)

    async def two(prompts: list[tuple[int, ...]]) -> list[list[Step]]:
        both.wait(10)
        return await asyncio.gather(*(steps(second, each, max_tokens=8) for each in prompts))

    def slowly(*given: Any) -> Any:
        time.sleep(0.05)
        return load(*given)

    monkeypatch.setattr(DiskCache, "_load", slowly)
    try:
        with ThreadPoolExecutor(2) as threads:
            loops = [threads.submit(asyncio.run, two(asked[at : at + 2])) for at in (0, 2)]
            found = [each for loop in loops for each in loop.result(60)]
        assert [sum((step.ids for step in each), ()) for each in found] == expected
        assert [each[-1].cached_tokens for each in found] == [499] * 4
    finally:
        second.close()


# --- What is stored is within the limit, too.


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("tree", [0, 200_000, 1 << 30])
def test_memory_in_use_is_within_the_limit_after_every_step(
    tiny: Path, run: Run, tree: int
) -> None:
    """Of prompts that just fit, whatever the prefix cache may hold; and nothing of them is lost."""
    engine = opened(tiny, cache=reusing(tree), limits=BatchLimits(chunk=256), speculate="off")
    prompts = [words(seed, 1500) for seed in range(4)]
    used: list[int] = []
    work = engine.loop.work

    def watched() -> float | None:
        wait = work()
        used.append(device.used())
        return wait

    try:
        expected = [of_mlx_lm(engine, asked, 6) for asked in prompts]
        budget = engine.budget
        room = device.used() + budget.work + budget.layout.nbytes(1506)
        limit(engine, room)
        engine._thread._work = watched
        for asked, answered in zip(prompts, expected, strict=True):
            assert run(answer(engine, asked, max_tokens=6)) == answered
        assert max(used) <= room
    finally:
        engine.close()


def test_prompts_are_stored_in_what_is_left(tiny: Path, run: Run) -> None:
    """With room for two: the least recently used gives way to the last."""
    engine = opened(tiny, cache=reusing(), speculate="off")
    prompts = [words(seed, 1000) for seed in range(3)]
    try:
        budget = engine.budget
        piece = budget.layout.piece(1006)
        room = device.used() + budget.work + budget.layout.nbytes(1006) + 5 * piece // 2
        limit(engine, room)
        for asked in prompts:
            run(answer(engine, asked, max_tokens=6))
        assert run(engine.reusable_tokens(prompts[2], "")) == 999
        assert run(engine.reusable_tokens(prompts[0], "")) == 0
    finally:
        engine.close()


def test_caches_of_a_new_prompt_do_not_grow(tiny: Path, run: Run) -> None:
    """mlx-lm's are copied each time they have grown by 256 tokens."""
    engine = opened(tiny, limits=BatchLimits(chunk=256), speculate="off")
    asked = words(3, 2000)
    sizes: set[tuple[int, ...]] = set()
    model = engine.loop.module

    def watched(ids: Any, cache: Any) -> Any:
        logits = model(ids, cache=cache)
        sizes.add(tuple(each.keys.shape[2] for each in cache if type(each) is KVCache))
        return logits

    try:
        expected = of_mlx_lm(engine, asked, 6)
        engine.loop.module = watched
        assert run(answer(engine, asked, max_tokens=6)) == expected
        assert len(sizes) == 1 and set(*sizes) == {2006}
    finally:
        engine.close()


def test_slow_disk_does_not_keep_memory_from_a_prompt(
    tiny: Path, run: Run, open_disk: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted pieces wait to be written; after a while, that is given up."""
    disk, held, write = open_disk(), threading.Event(), DiskCache._write

    def slow(*given: Any) -> None:
        held.wait(60)
        write(*given)

    monkeypatch.setattr(DiskCache, "_write", slow)
    monkeypatch.setattr("vllm_mlx_harmony.engine.loop.WRITING", 0.2)
    cached = partial(PrefixCache, tree=PrefixTree(1 << 30), disk=disk, weights=b"w" * 16)
    engine = opened(tiny, cache=cached, speculate="off")
    try:
        for seed in range(4):
            run(answer(engine, words(seed, 600), max_tokens=2))
        budget, long = engine.budget, words(9, 2000)
        held_bytes = engine.cache.status().nbytes
        room = device.used() - held_bytes // 2 + budget.work + budget.layout.nbytes(2002)
        limit(engine, room)
        expected = of_mlx_lm(engine, long, 2)
        assert run(answer(engine, long, max_tokens=2)) == expected
        assert disk.counters().dropped > 0
        held.set()
        assert flushed(disk, 60) and disk.evicted == 0
    finally:
        held.set()
        engine.close()


def test_pool_is_empty_when_nothing_runs(tiny: Path, run: Run) -> None:
    engine = opened(tiny, speculate="off")
    try:
        run(answer(engine, words(1, 1500), max_tokens=4))
        assert idle(engine)
        engine._thread.call(lambda: None).result()
        until = time.monotonic() + 20
        while mx.get_cache_memory() and time.monotonic() < until:
            time.sleep(0.01)
        assert mx.get_cache_memory() == 0
    finally:
        engine.close()
