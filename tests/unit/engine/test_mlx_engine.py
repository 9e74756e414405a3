"""The engine by itself: answers equal those of mlx-lm, whatever runs beside them."""

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
from engine_models import (
    answer,
    load_module,
    loading,
    of_mlx_lm,
    open_engine,
    rows,
    started,
    steps,
    words,
)
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache
from waiting import wait_until, wait_until_async

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
    engine = open_engine(tiny)
    yield engine
    engine.close()


def ids(text: str) -> tuple[int, ...]:
    return tuple(vocab.encoding().encode(text, allowed_special="all"))


def prompt_of(text: str) -> tuple[int, ...]:
    return ids(f"<|start|>user<|message|>{text}<|end|><|start|>assistant")


def limit(engine: MlxEngine, nbytes: int) -> None:
    """Limits the memory of an idle engine to ``nbytes``."""
    engine.loop.budget = replace(engine.loop.budget, limit=nbytes)
    engine.loop.publish()


LENGTHS = [1, 2, 5, 127, 128, 129, 300, 700]


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("length", LENGTHS)
def test_answer_equals_mlx_lm(tiny_engine: MlxEngine, run: Run, length: int) -> None:
    prompt = words(length, length)
    expected = of_mlx_lm(tiny_engine, prompt)
    generated = run(steps(tiny_engine, prompt))
    assert sum((step.ids for step in generated), ()) == expected
    assert generated[-1].finish in ("stop", "length")
    assert all(step.finish is None for step in generated[:-1])


@pytest.mark.nightly
def test_concurrent_answers_equal_separate_ones(tiny_engine: MlxEngine, run: Run) -> None:
    prompts = [words(seed, length) for seed, length in enumerate(LENGTHS * 2)]
    expected = [of_mlx_lm(tiny_engine, prompt) for prompt in prompts]

    async def together() -> list[tuple[int, ...]]:
        async def later(at: int) -> tuple[int, ...]:
            await asyncio.sleep(0.01 * at)
            return await answer(tiny_engine, prompts[at])

        return await asyncio.gather(*map(later, range(len(prompts))))

    assert run(together()) == expected


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
def test_chunk_size_does_not_change_answers(tiny: Path, run: Run, chunk: int) -> None:
    engine = open_engine(tiny, limits=BatchLimits(chunk=chunk))
    try:
        for length in (2, 129, 300):
            prompt = words(length, length)
            assert run(answer(engine, prompt)) == of_mlx_lm(engine, prompt)
    finally:
        engine.close()


@pytest.mark.nightly
@pytest.mark.once
def test_long_and_short_prompts_use_separate_batches(tiny_engine: MlxEngine, run: Run) -> None:
    """Padding would double the memory of the long one."""
    long, short = words(1, 3500), words(2, 5)
    expected = [of_mlx_lm(tiny_engine, prompt, most) for prompt, most in ((long, 60), (short, 20))]

    async def together() -> Any:
        batches = []

        async def short_one() -> tuple[int, ...]:
            await wait_until_async(lambda: rows(tiny_engine), "the long one")
            generated = ()
            settings = GenerationSettings(max_tokens=20, temperature=0.0, top_p=1.0)
            async with aclosing(
                tiny_engine.generate(GenerationRequest(short, settings, ""))
            ) as stream:
                async for step in stream:
                    generated += step.ids
                    batches.append(len(tiny_engine.loop.batches))
            return generated

        answers = await asyncio.gather(answer(tiny_engine, long, max_tokens=60), short_one())
        return answers, max(batches)

    answers, batches = run(together())
    assert answers == expected
    assert batches == 2


# --- How requests end, with scripted answers.

SCRIPTS = [
    Script("answer", "<|channel|>final<|message|>Hi.<|return|>"),
    Script("at once", "<|return|>"),
    Script("count", COUNT),
    Script("slow", COUNT, delay_ms=20),
    Script("failing", COUNT, fail_at=5),
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlxEngine]:
    engine = open_engine(standin.write(tmp_path_factory.mktemp("scripted"), SCRIPTS))
    yield engine
    engine.close()


def idle(engine: MlxEngine) -> bool:
    """Whether the engine holds nothing of any request."""

    def is_idle() -> bool:
        scheduler = engine.loop.scheduler
        return not (
            engine.loop.requests or engine.loop.batches or scheduler._prompts or scheduler._answers
        )

    return engine.loop.thread.call(is_idle).result()


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("script", SCRIPTS[:4], ids=lambda script: script.pattern)
def test_answer_ends_with_its_end_token(scripted: MlxEngine, run: Run, script: Script) -> None:
    generated = run(steps(scripted, prompt_of(script.pattern), max_tokens=500))
    assert sum((step.ids for step in generated), ()) == ids(script.completion)
    assert [step.finish for step in generated][-1] == "stop"
    assert idle(scripted)


def test_answer_stops_at_max_tokens(scripted: MlxEngine, run: Run) -> None:
    for most in (1, 2, 10):
        generated = run(steps(scripted, prompt_of("count"), max_tokens=most))
        assert sum((step.ids for step in generated), ()) == ids(COUNT)[:most]
        assert generated[-1].finish == "length"


def test_max_tokens_of_zero_computes_prompt(scripted: MlxEngine, run: Run) -> None:
    assert run(steps(scripted, prompt_of("count"), max_tokens=0)) == [Step((), "length")]
    assert idle(scripted)


def test_closing_stream_frees_engine(scripted: MlxEngine, run: Run) -> None:
    async def close_after(read: int) -> None:
        settings = GenerationSettings(max_tokens=500, temperature=0.0, top_p=1.0)
        stream = scripted.generate(GenerationRequest(prompt_of("slow"), settings, ""))
        for _ in range(read):
            await anext(stream)
        await stream.aclose()
        assert idle(scripted)

    for read in (0, 1, 5):
        run(close_after(read))


def test_warmed_up_prompt_joins_no_batch(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caches of the batch would be copied twice for a row that makes no step."""
    engine = open_engine(tiny)

    async def warm_up_beside_answer() -> list[Step]:
        task = await started(engine, words(1, 50), max_tokens=10_000)
        monkeypatch.setattr(Batch, "join", None)
        found = await steps(engine, words(2, 50), max_tokens=0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    try:
        assert run(warm_up_beside_answer()) == [Step((), "length")]
        assert idle(engine) and engine.healthy
    finally:
        engine.close()


def test_prompt_holds_no_more_than_windows_between_chunks(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of 200 ids leaves 327 in a window of 128, which the budget does not count."""
    engine = open_engine(tiny, limits=BatchLimits(chunk=200))
    choose, held = engine.loop.scheduler.next, set[int]()

    def watched(*arguments: Any) -> Any:
        for request in engine.loop.requests.values():
            for layer in request.layers or ():
                if isinstance(layer, RotatingKVCache) and layer.keys is not None:
                    held.add(layer.keys.shape[2])
        return choose(*arguments)

    monkeypatch.setattr(engine.loop.scheduler, "next", watched)
    try:
        assert run(answer(engine, words(1, 700))) == of_mlx_lm(engine, words(1, 700))
        assert held == {128}
    finally:
        engine.close()


def test_cancellation_frees_engine(scripted: MlxEngine, run: Run) -> None:
    async def cancel_after(seconds: float) -> None:
        task = asyncio.ensure_future(answer(scripted, prompt_of("slow"), max_tokens=500))
        await asyncio.sleep(seconds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert idle(scripted)

    for seconds in (0.0, 0.01, 0.1):
        run(cancel_after(seconds))


def test_model_error_ends_its_batch(scripted: MlxEngine, run: Run) -> None:
    async def together() -> list[Any]:
        answers = (
            answer(scripted, prompt_of(pattern), max_tokens=500) for pattern in ("failing", "slow")
        )
        return await asyncio.gather(*answers, return_exceptions=True)

    failed, beside = run(together())
    assert isinstance(failed, OutputError) and failed.status == 500
    assert isinstance(beside, OutputError) or beside == ids(COUNT)
    assert idle(scripted)
    assert run(answer(scripted, prompt_of("answer"))) == ids(SCRIPTS[0].completion), "it goes on"
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
def test_device_failure_ends_request_and_not_engine(
    tiny: Path, run: Run, when: str, problem: str, code: str
) -> None:
    engine = open_engine(tiny)
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


TIMEOUT = RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error")


def test_failed_step_ahead_ends_answers_and_not_next_prompt(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a step surfaces when its result is read: before the chunk of a prompt."""
    engine = open_engine(tiny, speculate="off")
    evaluate, failing = mx.eval, [False]

    def failing_once(*arrays: Any) -> None:
        if failing[0] and len(arrays) == 1 and isinstance(arrays[0], mx.array):
            failing[0] = False
            raise TIMEOUT
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", failing_once)

    async def answer_both() -> list[Any]:
        first = await started(engine, words(1, 50), max_tokens=10_000)
        failing[0] = True
        return await asyncio.gather(first, answer(engine, words(2, 50)), return_exceptions=True)

    try:
        failed, beside = run(answer_both())
        assert isinstance(failed, HostError) and failed.code == "gpu_error"
        assert beside == of_mlx_lm(engine, words(2, 50))
        assert idle(engine) and engine.healthy
    finally:
        engine.close()


@pytest.mark.parametrize("when", ["the engine rests", "another model is measured"])
def test_failed_step_ahead_does_not_end_engine(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    engine = open_engine(tiny, speculate="off")
    failing = [True]

    def settle() -> None:
        if failing and failing.pop():
            raise TIMEOUT

    monkeypatch.setattr(device.lock, "_settle", settle)

    async def answer_while_measured() -> Any:
        task = await started(engine, words(1, 50), max_tokens=10_000)
        with ThreadPoolExecutor(1) as pool:
            await asyncio.get_running_loop().run_in_executor(pool, measure)
        return await asyncio.gather(task, return_exceptions=True)

    def measure() -> None:
        with device.lock.exclusive():
            pass

    try:
        if when == "the engine rests":
            assert run(answer(engine, words(1, 50))) == of_mlx_lm(engine, words(1, 50))
        else:
            (failed,) = run(answer_while_measured())
            assert isinstance(failed, HostError) and failed.code == "gpu_error"
        assert run(answer(engine, words(3, 50))) == of_mlx_lm(engine, words(3, 50))
        assert not failing and engine.healthy
    finally:
        engine.close()


def test_failure_at_end_of_answer_ends_its_batch(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(tiny)
    remove, broken = Batch.remove, [True]

    def remove_once_failing(batch: Batch, rows_to_remove: Any) -> None:
        if broken and broken.pop():
            raise RuntimeError("[malloc] Unable to allocate 123456789 bytes.")
        remove(batch, rows_to_remove)

    monkeypatch.setattr(Batch, "remove", remove_once_failing)

    async def answer_both() -> list[Any]:
        answers = (answer(engine, words(n, 50), max_tokens=10 + 200 * n) for n in range(2))
        return await asyncio.gather(*answers, return_exceptions=True)

    try:
        first, second = run(answer_both())
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
    """Only some layers have changed by then: answers of the batch would be nonsense."""
    kind = KVCache if change == "merge" else BatchKVCache
    original, calls, failing = getattr(kind, change), [0], [False]

    def broken(*args: Any) -> Any:
        calls[0] += failing[0]
        if calls[0] == 2:  # the first layer has changed
            raise OUT_OF_MEMORY
        return original(*args)

    monkeypatch.setattr(kind, change, staticmethod(broken) if change == "merge" else broken)
    engine = open_engine(tiny)

    async def together() -> list[Any]:
        """Long answers, and one that joins or leaves while they run."""
        running = 1 if change in ("merge", "extract") else 2
        tasks = [await started(engine, words(n, 20 + n), max_tokens=10_000) for n in range(running)]
        failing[0] = change in ("merge", "extend")
        more = asyncio.ensure_future(answer(engine, words(9, 30), max_tokens=10_000))
        if not failing[0]:
            await wait_until_async(lambda: rows(engine) > running, "the answer that leaves")
            failing[0] = True
            more.cancel()
        return await asyncio.gather(*tasks, more, return_exceptions=True)

    try:
        results = run(together())
        assert calls[0] >= 2
        for result in results:
            assert isinstance(result, (HostError, asyncio.CancelledError)), result
        failing[0] = False
        assert idle(engine) and engine.healthy
        assert run(answer(engine, words(3, 50))) == of_mlx_lm(engine, words(3, 50))
    finally:
        engine.close()


def test_request_to_dying_thread_fails(tiny: Path, run: Run) -> None:
    """The call is posted before the thread dies."""
    engine = open_engine(tiny)
    dying, may_die = threading.Event(), threading.Event()

    def die(*_: Any) -> None:
        dying.set()
        may_die.wait(60)
        raise AssertionError("a bug")

    async def send() -> Any:
        engine.loop.scheduler.next = die  # type: ignore[method-assign, assignment]
        engine.loop.thread.call(bool)
        await asyncio.to_thread(dying.wait, 60)
        task = asyncio.ensure_future(answer(engine, words(3, 50)))
        calls = engine.loop.thread._calls
        await wait_until_async(lambda: calls.qsize() >= 2, "`arrive` and `enqueue`")
        may_die.set()
        with pytest.raises(HostError) as error:
            await asyncio.wait_for(task, 60)
        return error.value

    assert run(send()).status == 503
    assert not engine.loop.requests
    engine.close()
    assert not engine.loaded, "what a dead thread leaves is freed"


def test_request_beyond_queue_limit_is_rejected(tiny: Path, run: Run) -> None:
    """By ``generate`` itself, before a stream has sent its status."""
    engine = open_engine(tiny, limits=BatchLimits(answers=1), queue=2)

    async def test() -> None:
        endless = replace(GREEDY, max_tokens=10_000)
        running = engine.generate(GenerationRequest(words(1, 20), endless, ""))
        while not (await anext(running)).ids:
            pass
        waiting = [asyncio.ensure_future(answer(engine, words(n, 20))) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(HostError) as error:
            engine.generate(GenerationRequest(words(1, 20), GREEDY, ""))
        assert (error.value.status, error.value.code) == (503, "queue_full")
        await wait_until_async(
            lambda: [status.place for status in engine.status()] == [0, 1, 2], "a full queue"
        )
        waiting.pop().cancel()  # cancellation frees a place
        await wait_until_async(lambda: engine.loop.waiting.count < 2, "a place")
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
    engine = open_engine(tiny)

    def broken(*_: Any) -> None:
        raise AssertionError("a bug")

    engine.loop.scheduler.next = broken  # type: ignore[method-assign, assignment]
    with monkeypatch.context() as patched:
        if device_fails:
            patched.setattr(device.lock, "_settle", broken)
        for _ in range(2):
            with pytest.raises(HarmonyFailure) as error:
                run(answer(engine, words(3, 50)))
            assert error.value.status == 503
        engine.loop.thread._thread.join(10)
    assert not engine.healthy
    engine.close()


def test_close_ends_all_requests(tiny: Path, run: Run) -> None:
    engine = open_engine(tiny)

    async def close_while_answering() -> list[Any]:
        task = await started(engine, words(3, 50), max_tokens=10_000)
        await asyncio.to_thread(engine.close)
        return await asyncio.gather(task, return_exceptions=True)

    (result,) = run(close_while_answering())
    assert isinstance(result, HostError) and result.status == 503
    assert not engine.loaded
    with pytest.raises(HostError):
        run(answer(engine, words(3, 50)))


def test_close_clears_streams_of_engine_thread(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If mlx 0.32 clears them itself, the process sometimes aborts at exit."""
    threads = list[str]()
    monkeypatch.setattr(
        mx, "clear_streams", lambda: threads.append(threading.current_thread().name), raising=False
    )
    open_engine(tiny).close()
    assert threads == [f"engine of {tiny}"]


def test_two_engines_run_side_by_side(tiny: Path, scripted: MlxEngine, run: Run) -> None:
    other = open_engine(tiny)
    try:
        prompt = words(5, 200)

        async def answer_both() -> list[tuple[int, ...]]:
            return await asyncio.gather(
                answer(other, prompt), answer(scripted, prompt_of("count"), max_tokens=500)
            )

        assert run(answer_both()) == [of_mlx_lm(other, prompt), ids(COUNT)]
    finally:
        other.close()


# --- Requests in every state at once.


async def in_every_state(engine: MlxEngine) -> dict[str, asyncio.Task[Any]]:
    """Starts a request in each state, on an engine with ``answers=2``: tasks by state."""

    def send(seed: int) -> asyncio.Task[Any]:
        return asyncio.ensure_future(answer(engine, words(seed, 30_000), max_tokens=20_000))

    def computes_prompt() -> bool:
        requests = engine.loop.requests.values()
        return any(request.computed_ids > 0 and not request.ids for request in requests)

    tasks = {"decode": await started(engine, words(1, 20), max_tokens=20_000)}
    tasks["prefill"] = send(2)
    await wait_until_async(computes_prompt, "the second prompt to be computed")
    tasks["waiting"] = send(3)
    await wait_until_async(lambda: len(engine.loop.scheduler.order()) >= 2, "the third request")
    return tasks


@pytest.fixture
def crowded(tiny: Path) -> Iterator[MlxEngine]:
    engine = open_engine(tiny, limits=BatchLimits(answers=2, chunk=256))
    yield engine
    engine.close()


@pytest.mark.parametrize("state", ["decode", "prefill", "waiting"])
def test_request_can_be_cancelled_in_any_state(crowded: MlxEngine, run: Run, state: str) -> None:
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


def test_close_ends_requests_in_any_state(crowded: MlxEngine, run: Run) -> None:
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
    """A model that records its calls: rows, ids, and whether answers run beside a chunk."""

    def __init__(self, engine: MlxEngine) -> None:
        self.engine, self.model = engine, engine.loop.module
        self.make_cache = engine.loop.module.make_cache
        self.chunks: list[tuple[bool, int]] = []
        self.rows: list[int] = []
        self.prefilling: list[int] = []
        self.running: list[int] = []

    def __call__(self, ids: Any, cache: Any) -> Any:
        requests = list(self.engine.loop.requests.values())
        answers = rows(self.engine)
        prompts = sum(request.prefill_start > 0 and not request.ids for request in requests)
        self.prefilling.append(prompts)
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
        BatchLimits(prompts=2, chunk_beside=32),  # so that some chunks run beside answers
        BatchLimits(sequences=3, prompts=2, answers=2, chunk=96, chunk_beside=48),
    ],
    ids=["sequences", "prompts", "answers", "chunk", "chunk beside", "all"],
)
def test_batch_limits_are_kept(tiny: Path, run: Run, limits: BatchLimits) -> None:
    """Those of ``--max-num-seqs``, ``--prefill-batch-size``, ``--completion-batch-size``,
    ``--prefill-step-size`` and ``--chunked-prefill-tokens``."""
    engine = open_engine(tiny, limits=limits, queue=4)
    expected = [of_mlx_lm(engine, words(seed, 200 + seed), 25) for seed in range(4)]
    watched = engine.loop.module = Watched(engine)

    async def together() -> list[tuple[int, ...]]:
        answers = (answer(engine, words(seed, 200 + seed), max_tokens=25) for seed in range(4))
        return await asyncio.gather(*answers)

    try:
        assert run(together()) == expected
        assert max(watched.running) <= limits.sequences
        assert max(watched.prefilling) <= limits.prompts
        assert max(watched.rows) <= limits.answers
        assert max(ids for _, ids in watched.chunks) <= limits.chunk
        if limits.chunk_beside:
            assert max(ids for beside, ids in watched.chunks if beside) <= limits.chunk_beside
    finally:
        engine.close()


# --- Memory.


@pytest.mark.nightly
@pytest.mark.once
def test_request_waits_until_memory_is_free(tiny: Path, run: Run) -> None:
    engine = open_engine(tiny)
    try:
        budget = engine.budget
        nbytes = budget.layout.nbytes(1000 + 40)
        room = device.used() + budget.work + int(nbytes * 1.5)
        limit(engine, room)
        most = 0

        async def watch() -> list[tuple[int, ...]]:
            nonlocal most
            tasks = [asyncio.ensure_future(answer(engine, words(seed, 1000))) for seed in range(3)]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0.001)
                most = max(
                    most,
                    sum(
                        request.prefill_start > 0 for request in list(engine.loop.requests.values())
                    ),
                )
            return [task.result() for task in tasks]

        answers = run(watch())
        assert most == 1
        assert answers == [of_mlx_lm(engine, words(seed, 1000)) for seed in range(3)]
    finally:
        engine.close()


def test_context_length_is_bounded_by_memory(tiny: Path) -> None:
    engine = open_engine(tiny)
    try:
        assert engine.context_length == 131_072
        budget = engine.budget
        room = device.weight_bytes() + budget.work + budget.layout.nbytes(5000)
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
def test_loaded_models_shorten_context_of_others(tiny: Path, weights: int) -> None:
    before = device.weight_bytes()
    first = open_engine(tiny)
    second = open_engine(tiny)
    try:
        loaded = device.weight_bytes() - before
        assert first.weight_bytes == second.weight_bytes == loaded // 2 > 10**6
        budget = first.budget
        room = device.weight_bytes() + budget.work + budget.layout.nbytes(5120) + weights
        limit(first, room)
        alone = first.context_length
        device.add_weights(weights)
        assert first.context_length == min(alone or 0, 5120)
        device.add_weights(-weights)
        assert first.context_length == alone
    finally:
        first.close()
        second.close()
    assert device.weight_bytes() == before and first.weight_bytes == 0


@pytest.mark.nightly
def test_model_is_measured_while_others_pause(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that computes adds neither to the measured work nor to the costs of steps, and then
    continues with the same ids."""
    first = open_engine(tiny, speculate="auto")
    alone, first_loop = first.budget.work, first.loop
    measure = EngineLoop._measure
    step_counts: list[tuple[int, int]] = []

    def observe(loop: EngineLoop, module: Any) -> None:
        before, used = first_loop.totals.steps, device.used()
        time.sleep(0.2)  # time for the other model to compute some steps
        assert device.used() == used
        measure(loop, module)
        step_counts.append((before, first_loop.totals.steps))

    monkeypatch.setattr(EngineLoop, "_measure", observe)
    prompt = words(5, 1500)
    expected = run(answer(first, prompt))
    loads: list[int] = []

    async def together() -> tuple[int, ...]:
        task = await started(first, (*prompt[:-1], 7), max_tokens=4000)
        for _ in range(2):
            second = await asyncio.to_thread(open_engine, tiny, speculate="auto")
            loads.append(second.budget.work)
            await asyncio.to_thread(second.close)
        assert not task.done(), "it computes all the while"
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return await answer(first, prompt)

    try:
        assert run(together()) == expected
        # On a CPU, mlx frees memory late, so the figures vary; another model would be tenfold.
        assert all(alone / 2 < load < 2 * alone for load in loads), (alone, loads)
        assert len(step_counts) == 2 and all(before == after for before, after in step_counts)
    finally:
        first.close()
    assert not device.lock._shared


def test_wired_memory_is_released_while_idle(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine polls as the device says until nothing is wired, and again after a request."""
    callers, computed, answers = list[str](), list[str](), [0.01, 0.01, None, 0.01, None]

    def unwire() -> float | None:
        callers.append(threading.current_thread().name)
        return answers.pop(0) if answers else None

    monkeypatch.setattr(device, "unwire_when_idle", unwire)
    monkeypatch.setattr(device, "keep_wired", lambda: computed.append("computing"))
    engine = open_engine(tiny, speculate="off")  # a step for each id

    try:
        wait_until(lambda: len(callers) >= 3, "three calls")
        assert len(callers) == 3 and not computed
        run(answer(engine, words(1, 20)))
        wait_until(lambda: len(callers) >= 5, "two more")
        assert len(callers) == 5 and len(computed) >= 40
        assert set(callers) == {engine.loop.thread._thread.name}
    finally:
        engine.close()


def waiting_for_memory(engine: MlxEngine, missing: int, since: float) -> Request:
    """A request that lacks ``missing`` bytes and arrived ``since`` seconds ago."""
    request = Request(99, words(1, 200), GREEDY, "", Sampler(GREEDY), time.perf_counter() - since)
    engine.loop.requests[99] = request
    engine.loop.scheduler.add(99, 199, "", request.arrival_time)
    budget = engine.budget
    room = device.used() + budget.needed([request.max_length]) - missing
    limit(engine, room)
    return request


def test_admission_timeout_starts_at_first_attempt(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the request arrives; it restarts whenever the memory in use changes."""
    used = [10**6]

    async def test() -> None:
        engine = open_engine(tiny)
        monkeypatch.setattr(device, "used", lambda: used[0])
        try:
            request = waiting_for_memory(engine, 1, 1000.0)
            assert not engine.loop._make_room(99) and 99 in engine.loop.requests
            monkeypatch.setattr("vllm_mlx_harmony.engine.loop.ADMISSION_TIMEOUT", -1.0)
            for change in (1, 2):
                used[0] += change
                assert not engine.loop._make_room(99) and 99 in engine.loop.requests
            assert not engine.loop._make_room(99) and 99 not in engine.loop.requests
            engine.loop._deliver()
            with pytest.raises(HostError) as error:
                await request.next()
            assert error.value.code == "out_of_memory"
        finally:
            engine.close()

    run(test())


def test_request_that_finds_no_memory_leaves_prefix_cache(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicting all of it would not have made enough room."""
    monkeypatch.setattr("vllm_mlx_harmony.engine.loop.ADMISSION_TIMEOUT", -1.0)

    async def test() -> None:
        engine = open_engine(tiny, cache=reusing())
        try:
            await answer(engine, words(1, 300), max_tokens=2)
            nbytes = engine.cache.counters().nbytes
            request = waiting_for_memory(engine, 10**9, 0.0)
            engine.loop.thread.call(lambda: None)  # it looks for work, and for memory
            with pytest.raises(HostError):
                await request.next()
            assert engine.cache.counters().nbytes == nbytes > 0
        finally:
            engine.close()

    run(test())


@pytest.mark.parametrize(("missing", "evicted"), [(1, True), (10**9, False)])
def test_prefix_cache_is_evicted_only_if_that_makes_room(
    tiny: Path, run: Run, missing: int, evicted: bool
) -> None:
    async def test() -> None:
        engine = open_engine(tiny, cache=reusing())
        try:
            await answer(engine, words(1, 300), max_tokens=2)
            nbytes = engine.cache.counters().nbytes
            waiting_for_memory(engine, missing, 0.0)
            assert (
                nbytes
                and engine.loop.thread.call(partial(engine.loop._make_room, 99)).result() == evicted
            )
            assert (engine.cache.counters().nbytes < nbytes) == evicted
        finally:
            engine.close()

    run(test())


def test_eviction_waits_for_pending_writes(
    tiny: Path, run: Run, open_disk: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, may_write, write = open_disk(), threading.Event(), DiskCache._write

    def write_slowly(*args: Any) -> None:
        may_write.wait(60)
        write(*args)

    monkeypatch.setattr(DiskCache, "_write", write_slowly)
    new_cache = partial(PrefixCache, tree=PrefixTree(1 << 30), disk=disk, weights_digest=b"w" * 16)

    async def test() -> None:
        engine = open_engine(tiny, cache=new_cache)
        try:
            for seed in range(5):
                await answer(engine, words(seed, 300), max_tokens=2)
            waiting_for_memory(engine, 1, 0.0)
            fits = partial(engine.loop.thread.call, partial(engine.loop._make_room, 99))
            for _ in range(5):
                assert not fits().result()
                assert engine.cache.counters().evictions == 1
                assert disk.evicted > 0

            def written() -> bool:
                may_write.set()
                return disk.flush(60) and engine.loop._make_room(99)

            # In one call, since the engine begins the request as soon as there is memory.
            assert engine.loop.thread.call(written).result()
            assert engine.cache.counters().evictions == 1 and disk.evicted == 0
        finally:
            may_write.set()
            engine.close()

    run(test())


class Owned(dict[int, Request]):
    """Requests by number; records the threads that access them as ``readers``."""

    readers: set[str]

    def record(self) -> None:
        self.readers.add(threading.current_thread().name)

    def __iter__(self) -> Iterator[int]:
        self.record()
        return super().__iter__()

    def __len__(self) -> int:
        self.record()
        return super().__len__()

    def __getitem__(self, key: int) -> Request:
        self.record()
        return super().__getitem__(key)

    def __setitem__(self, key: int, value: Request) -> None:
        self.record()
        super().__setitem__(key, value)

    def values(self) -> Any:
        self.record()
        return super().values()

    def pop(self, *args: Any) -> Any:
        self.record()
        return super().pop(*args)


def test_requests_are_accessed_only_on_engine_thread(tiny: Path, run: Run) -> None:
    engine = open_engine(tiny)
    owned = engine.loop.requests = Owned()
    owned.readers = set()

    async def test() -> None:
        task = await started(engine, words(1, 600), max_tokens=5000)
        await answer(engine, words(2, 50), max_tokens=5)
        assert engine.context_length and engine.totals.requests == 1
        task.cancel()
        await asyncio.wait({task})
        assert engine.status() == []

    try:
        run(test())
        assert owned.readers == {engine.loop.thread._thread.name}
    finally:
        engine.close()


def test_longer_waiting_prompts_are_not_checked_again(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, 256 waiting prompts would slow down each step of an answer."""
    calls = [0]
    missing = Budget.missing

    def count(*args: Any) -> int:
        calls[0] += 1
        return missing(*args)

    async def test() -> None:
        engine = open_engine(tiny)
        monkeypatch.setattr(Budget, "missing", count)
        try:
            running = engine.generate(
                GenerationRequest(words(1, 20), replace(GREEDY, max_tokens=9_000), "")
            )
            while not (await anext(running)).ids:
                pass
            budget = engine.budget
            room = device.used() + budget.needed([10_000])
            limit(engine, room)
            waiting = [
                asyncio.ensure_future(answer(engine, words(n, 400 + n), max_tokens=500))
                for n in range(50)
            ]
            while len(engine.loop.scheduler.order()) < len(waiting):
                await anext(running)
            calls[0], before = 0, engine.loop.totals.steps
            while engine.loop.totals.steps < before + 20:
                await anext(running)
            assert 20 <= calls[0] <= 3 * (engine.loop.totals.steps - before)
            for task in waiting:
                task.cancel()
            await running.aclose()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert idle(engine)
        finally:
            engine.close()

    run(test())


def test_cancellation_frees_engine_when_storing_fails(
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


def test_answer_on_closed_event_loop_does_not_stop_others(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, the answer gets two ids in its last step."""
    engine = open_engine(tiny)
    prompt, beside = words(1, 50), words(2, 50)
    expected = of_mlx_lm(engine, beside)
    closed_loop, step = asyncio.new_event_loop(), Batch.step
    closed_loop.close()
    delayed: list[Any] = []

    def step_late(batch: Batch, model: Any) -> list[Any]:
        pairs = []
        for request, token in step(batch, model):
            if request.prompt == prompt and request.generated + len(delayed) == 8:
                delayed.append((request, token))
                request.event_loop = closed_loop
            else:
                pairs += (
                    [*delayed, (request, token)] if request.prompt == prompt else [(request, token)]
                )
        return pairs

    monkeypatch.setattr(Batch, "step", step_late)

    async def answer_both() -> Any:
        first = asyncio.ensure_future(answer(engine, prompt, max_tokens=10))
        try:
            return await answer(engine, beside)
        finally:
            first.cancel()

    try:
        assert run(answer_both()) == expected
        assert delayed and idle(engine)
    finally:
        engine.close()


# --- Prefix reuse.


def reusing(nbytes: int = 1 << 30) -> Callable[[Any], PrefixCache]:
    return lambda model: PrefixCache(model, PrefixTree(nbytes))


def test_reused_layers_equal_computed_ones(tiny: Path, run: Run) -> None:
    engine = open_engine(tiny, cache=reusing())
    try:
        start = words(1, 300)
        first = run(steps(engine, start))
        assert first[-1].cached_tokens == 0
        history = start + sum((step.ids for step in first), ())
        again = history + words(2, 150)
        assert run(engine.reusable_tokens(again, "")) >= len(start)
        generated = run(steps(engine, again))
        assert generated[0].cached_tokens >= len(start)
        assert sum((step.ids for step in generated), ()) == of_mlx_lm(engine, again)
        assert run(engine.reusable_tokens(again, "another")) == 0
        repeated = run(steps(engine, start))
        assert repeated[0].cached_tokens == len(start) - 1
        assert sum((step.ids for step in repeated), ()) == sum((step.ids for step in first), ())
    finally:
        engine.close()


@pytest.mark.nightly
def test_rows_of_batch_are_reused(tiny: Path, run: Run) -> None:
    engine = open_engine(tiny, cache=reusing())
    prompts = [words(seed, 100 + 40 * seed) for seed in range(4)]

    async def answer_all(prompts: list[tuple[int, ...]]) -> list[list[Step]]:
        return list(await asyncio.gather(*(steps(engine, prompt) for prompt in prompts)))

    try:
        first = run(answer_all(prompts))
        again = [
            prompt + sum((step.ids for step in generated), ()) + words(9, 60)
            for prompt, generated in zip(prompts, first, strict=True)
        ]
        for prompt, before, generated in zip(again, prompts, run(answer_all(again)), strict=True):
            assert generated[0].cached_tokens >= len(before)
            assert sum((step.ids for step in generated), ()) == of_mlx_lm(engine, prompt)
    finally:
        engine.close()


@pytest.mark.once
def test_prefix_cache_gives_way_to_request(tiny: Path, run: Run) -> None:
    engine = open_engine(tiny, cache=reusing())
    try:
        run(answer(engine, words(1, 2000), max_tokens=2))
        budget, cache = engine.budget, engine.cache
        assert cache.counters().nbytes > 0
        room = device.used() - cache.counters().nbytes + budget.work + budget.layout.nbytes(2100)
        limit(engine, room)
        assert len(run(answer(engine, words(2, 2000), max_tokens=2))) == 2
        assert run(engine.reusable_tokens(words(1, 2000), "")) == 0
    finally:
        engine.close()


# --- Cancelled prompts (semantics E2).

CHUNK = 64


async def cancel_prompt(engine: MlxEngine, prompt: tuple[int, ...], chunks: int) -> int:
    """Closes a request after so many chunks of its prompt; returns how many ids were reported as
    computed."""
    settings = replace(GREEDY, max_tokens=8)
    computed = 0
    async with aclosing(engine.generate(GenerationRequest(prompt, settings, ""))) as stream:
        async for step in stream:
            if step.progress is not None and not step.progress.place:
                computed = step.progress.processed
            if computed >= chunks * CHUNK:
                break
    return computed


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 8, 9])
def test_cancelled_prompt_is_resumed(
    tiny: Path, run: Run, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is another prompt that differs only behind that place."""
    monkeypatch.setattr(
        "vllm_mlx_harmony.engine.loop.STORE_EVERY", CHUNK
    )  # as many ids as a chunk, as in production
    cancelled_prompt = words(7, 10 * CHUNK)
    engine = open_engine(tiny, cache=reusing(), limits=BatchLimits(chunk=CHUNK))
    try:
        computed = run(cancel_prompt(engine, cancelled_prompt, chunks))
        for prompt in (cancelled_prompt[: 9 * CHUNK + 2] + words(8, 40), cancelled_prompt):
            generated = run(steps(engine, prompt, max_tokens=8))
            assert generated[0].cached_tokens >= min(computed, 9 * CHUNK)
            assert sum((step.ids for step in generated), ()) == of_mlx_lm(engine, prompt, 8)
    finally:
        engine.close()


def test_repeatedly_cancelled_prompt_is_computed_once(tiny: Path, run: Run) -> None:
    prompt = words(9, 12 * CHUNK + 5)
    engine = open_engine(tiny, cache=reusing(), limits=BatchLimits(chunk=CHUNK), speculate="off")
    passes: list[int] = []
    module = engine.loop.module

    def count_pass(inputs: mx.array, cache: Any) -> mx.array:
        passes.append(inputs.shape[1])
        return module(inputs, cache=cache)

    try:
        expected = of_mlx_lm(engine, prompt, 8)
        engine.loop.module = count_pass
        for chunks in range(2, 12, 2):
            run(cancel_prompt(engine, prompt, chunks))
        assert run(answer(engine, prompt, max_tokens=8)) == expected
        assert sum(length for length in passes if length > 1) == len(prompt) - 1
    finally:
        engine.close()


def test_prompt_of_killed_server_is_on_disk(
    tiny: Path, open_disk: Callable[..., DiskCache], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_mlx_harmony.engine.loop.STORE_EVERY", 2 * CHUNK)
    prompt, disk = words(10, 12 * CHUNK), open_disk()

    def new_cache(model: Any) -> PrefixCache:
        return PrefixCache(model, PrefixTree(1 << 30), disk, b"weights")

    async def find_on_disk(engine: MlxEngine) -> int:
        """How many ids another process would find while the prompt is computed."""
        settings = replace(GREEDY, max_tokens=8)
        async with aclosing(engine.generate(GenerationRequest(prompt, settings, ""))) as stream:
            async for step in stream:
                if step.progress is not None and step.progress.processed >= 7 * CHUNK:
                    break
            await asyncio.to_thread(disk.flush, 10)
            other = PrefixCache(engine.loop.module, PrefixTree(1 << 30), open_disk(), b"weights")
            return (await other.find(prompt, "")).cached

    engine = open_engine(tiny, cache=new_cache, limits=BatchLimits(chunk=CHUNK))
    try:
        assert run(find_on_disk(engine)) >= 6 * CHUNK
    finally:
        engine.close()


def test_requests_of_two_event_loops_reuse_disk(
    tiny: Path, open_disk: Callable[..., DiskCache], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looks its prompts up while the other's are read."""
    prompts = [words(seed, 500) for seed in range(4)]

    def open_with_disk() -> MlxEngine:
        disk = open_disk()
        return open_engine(tiny, cache=lambda model: PrefixCache(model, tree(), disk, b"weights"))

    def tree() -> PrefixTree[Any]:
        return PrefixTree(1 << 30)

    first = open_with_disk()
    expected = [run(answer(first, prompt, max_tokens=8)) for prompt in prompts]
    assert first.cache._disk is not None and first.cache._disk.flush(10)
    first.close()
    second, load = open_with_disk(), DiskCache._load
    barrier = threading.Barrier(2)

    async def answer_two(pair: list[tuple[int, ...]]) -> list[list[Step]]:
        barrier.wait(10)
        return await asyncio.gather(*(steps(second, prompt, max_tokens=8) for prompt in pair))

    def load_slowly(*args: Any) -> Any:
        time.sleep(0.05)
        return load(*args)

    monkeypatch.setattr(DiskCache, "_load", load_slowly)
    try:
        with ThreadPoolExecutor(2) as threads:
            loops = [threads.submit(asyncio.run, answer_two(prompts[at : at + 2])) for at in (0, 2)]
            results = [result for loop in loops for result in loop.result(60)]
        assert [sum((step.ids for step in result), ()) for result in results] == expected
        assert [result[-1].cached_tokens for result in results] == [499] * 4
    finally:
        second.close()


# --- The memory of stored prompts.


@pytest.mark.nightly
@pytest.mark.parametrize("tree", [0, 200_000, 1 << 30])
def test_memory_stays_within_limit_after_every_step(tiny: Path, run: Run, tree: int) -> None:
    """With prompts that just fit, whatever the size of the prefix cache; answers are the same."""
    engine = open_engine(tiny, cache=reusing(tree), limits=BatchLimits(chunk=256), speculate="off")
    prompts = [words(seed, 1500) for seed in range(4)]
    used: list[int] = []
    work = engine.loop.work

    def work_and_measure() -> float | None:
        wait = work()
        used.append(device.used())
        return wait

    try:
        expected = [of_mlx_lm(engine, prompt, 6) for prompt in prompts]
        budget = engine.budget
        room = device.used() + budget.work + budget.layout.nbytes(1506)
        limit(engine, room)
        engine.loop.thread._work = work_and_measure
        for prompt, expected_answer in zip(prompts, expected, strict=True):
            assert run(answer(engine, prompt, max_tokens=6)) == expected_answer
        assert max(used) <= room
    finally:
        engine.close()


@pytest.mark.nightly
def test_prompts_are_stored_in_remaining_memory(tiny: Path, run: Run) -> None:
    """There is room for two: the least recently used is evicted."""
    engine = open_engine(tiny, cache=reusing(), speculate="off")
    prompts = [words(seed, 1000) for seed in range(3)]
    try:
        budget = engine.budget
        piece = budget.layout.piece(1006)
        room = device.used() + budget.work + budget.layout.nbytes(1006) + 5 * piece // 2
        limit(engine, room)
        for prompt in prompts:
            run(answer(engine, prompt, max_tokens=6))
        assert run(engine.reusable_tokens(prompts[2], "")) == 999
        assert run(engine.reusable_tokens(prompts[0], "")) == 0
    finally:
        engine.close()


def test_caches_of_new_prompt_do_not_grow(tiny: Path, run: Run) -> None:
    """mlx-lm copies its caches every 256 tokens."""
    engine = open_engine(tiny, limits=BatchLimits(chunk=256), speculate="off")
    prompt = words(3, 2000)
    sizes: set[tuple[int, ...]] = set()
    model = engine.loop.module

    def record_sizes(ids: Any, cache: Any) -> Any:
        logits = model(ids, cache=cache)
        sizes.add(tuple(layer.keys.shape[2] for layer in cache if type(layer) is KVCache))
        return logits

    try:
        expected = of_mlx_lm(engine, prompt, 6)
        engine.loop.module = record_sizes
        assert run(answer(engine, prompt, max_tokens=6)) == expected
        assert len(sizes) == 1 and set(*sizes) == {2006}
    finally:
        engine.close()


@pytest.mark.nightly
@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "beside an answer"])
def test_slow_disk_does_not_block_prompt(
    tiny: Path,
    run: Run,
    open_disk: Callable[..., DiskCache],
    monkeypatch: pytest.MonkeyPatch,
    beside: int,
) -> None:
    """Evicted pieces that wait too long to be written are dropped."""
    disk, may_write, write = open_disk(), threading.Event(), DiskCache._write

    def write_slowly(*args: Any) -> None:
        may_write.wait(60)
        write(*args)

    monkeypatch.setattr(DiskCache, "_write", write_slowly)
    monkeypatch.setattr("vllm_mlx_harmony.engine.loop.WRITE_TIMEOUT", 0.2)
    new_cache = partial(PrefixCache, tree=PrefixTree(1 << 30), disk=disk, weights_digest=b"w" * 16)
    engine = open_engine(tiny, cache=new_cache, speculate="off")
    long, long_answer = words(9, 2000), 20_000

    async def answer_long() -> tuple[int, ...]:
        prompts = [words(10, 20)] * beside
        others = [asyncio.ensure_future(answer(engine, p, max_tokens=long_answer)) for p in prompts]
        while rows(engine) < beside:
            await asyncio.sleep(0.001)
        found = await asyncio.wait_for(answer(engine, long, max_tokens=2), 40)
        assert not any(other.done() for other in others)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return found

    try:
        for seed in range(4):
            run(answer(engine, words(seed, 600), max_tokens=2))
        held_bytes = engine.cache.counters().nbytes
        needed = engine.budget.needed([2002, *[20 + long_answer] * beside])
        limit(engine, device.used() - held_bytes // 2 + needed)
        expected = of_mlx_lm(engine, long, 2)
        assert run(answer_long()) == expected
        assert disk.counters().dropped > 0
        may_write.set()
        assert disk.flush(60) and disk.evicted == 0
    finally:
        may_write.set()
        engine.close()


@pytest.mark.nightly
def test_memory_pool_is_empty_when_idle(tiny: Path, run: Run) -> None:
    engine = open_engine(tiny, speculate="off")
    try:
        run(answer(engine, words(1, 1500), max_tokens=4))
        assert idle(engine)
        engine.loop.thread.call(lambda: None).result()
        wait_until(lambda: mx.get_cache_memory() == 0, "the memory pool to be emptied", 20)
    finally:
        engine.close()
