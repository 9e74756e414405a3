"""The host's real engines reuse what they computed, and say the same as without."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rows import ids

pytest.importorskip("vllm_mlx")
pytest.importorskip("mlx_lm")

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.engine.disk.cache import DiskCache
from vllm_mlx_harmony.engine.prefix_tree import Counters, PrefixTree
from vllm_mlx_harmony.host import contract, patching
from vllm_mlx_harmony.host.engine import generate, reusable_tokens
from vllm_mlx_harmony.host.kv import batched, prefix, simple
from vllm_mlx_harmony.host.kv.status import model_of
from vllm_mlx_harmony.host.patching import Patch
from vllm_mlx_harmony.server.sampling import Settings
from vllm_mlx_harmony.standin import Script

ENGINES = ["simple", "batched"]
MODELS = ["standin", "tiny"]
GREEDY = Settings(max_tokens=20, temperature=0.0, top_p=1.0)
PLENTY = 1 << 30
WIDTH = 16
"""Of the model with random weights: what it takes to run is mostly the product with 201,088 ids."""

REASONED = "<|channel|>analysis<|message|>Hm.<|end|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.x<|message|>{}<|call|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Rain.<|return|>"
SCRIPTS = [
    Script("Slow", REASONED + FINAL, delay_ms=20),
    Script("Fail", REASONED, fail_at=4),
    Script("last result", REASONED + FINAL),
    Script("functions.x", REASONED + CALL),
    *(
        Script(f"Person {n} asks", f"<|channel|>final<|message|>{'la ' * n}person {n}<|return|>")
        for n in range(8)
    ),
    Script("Look it up", REASONED + CALL),
    Script("Say hello", "<|channel|>final<|message|>Hello.<|return|>"),
]


def words(seed: int, count: int) -> str:
    return " ".join(str(random.Random(seed * 1000 + at).randrange(999)) for at in range(count))


SYSTEM = ids(f"<|start|>system<|message|>You are ChatGPT. {words(0, 90)}<|end|>")
DEVELOPER = ids(f"<|start|>developer<|message|># Instructions\n\n{words(2, 60)}<|end|>")
OPENING = ids("<|start|>assistant")


def user(text: str) -> list[int]:
    return ids(f"<|start|>user<|message|>{text} {words(1, 60)}<|end|>")


def result(seed: int, text: str = "") -> list[int]:
    body = f"{text} {words(seed, 65)}"
    return ids(f"<|start|>functions.x to=assistant<|channel|>commentary<|message|>{body}<|end|>")


def placed(said: list[int]) -> list[int]:
    """What was said, as a history has it."""
    return [*said[:-1], vocab.END] if said[-1] == vocab.RETURN else said


def known(prompt: list[int], said: list[int]) -> int:
    """How many ids of a prompt that goes on behind ``said`` were computed."""
    return len(prompt) + len(said) - (said[-1] == vocab.RETURN)


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "standin": standin.write(root / "standin", SCRIPTS),
        "tiny": standin.write_tiny(root / "tiny", width=WIDTH),
    }


PACKAGES = {"engine", "kv.batched", "kv.opening", "kv.simple", "kv.status"}
"""The modules of the host's package whose requirements prefix reuse needs."""


def package(row: Patch) -> str:
    return str(row.replacement).removeprefix("vllm_mlx_harmony.host.").partition(":")[0]


@pytest.fixture(scope="module", autouse=True)
def _patched() -> Iterator[None]:
    rows = [row for row in contract.CHANGES if isinstance(row, Patch) and package(row) in PACKAGES]
    assert {package(row) for row in rows} == PACKAGES
    undos = patching.apply_all(rows)
    yield
    patching.undo_all(undos)


@dataclass
class Served:
    """An engine, and the memory it works with."""

    engine: Any
    kind: str
    limit: int = 20
    tree: PrefixTree[Any] = field(default_factory=lambda: PrefixTree(PLENTY))

    @property
    def counters(self) -> Counters:
        return self.tree.counters()

    @property
    def reused(self) -> dict[str, int]:
        return prefix.status(model_of(self.engine))

    async def ask(
        self,
        prompt: list[int],
        tenant: str = "",
        meanwhile: Callable[[], object] = lambda: None,
        **settings: Any,
    ) -> tuple[list[int], int]:
        """What is said, and how many ids of the prompt were not computed."""
        said, cached = [], 0
        wanted = replace(GREEDY, **{"max_tokens": self.limit, **settings})
        async with aclosing(generate(self.engine, tuple(prompt), wanted, tenant)) as steps:
            async for step in steps:
                said += step.ids
                cached = step.cached_tokens
                meanwhile()
        return said, cached

    async def give_up(self, prompt: list[int], after: int) -> list[int]:
        """What is said until it is given up."""
        said: list[int] = []
        async with aclosing(generate(self.engine, tuple(prompt), GREEDY)) as steps:
            async for step in steps:
                said += step.ids
                if len(said) >= after:
                    break
        return said


def make(kind: str, directory: Path, **keywords: Any) -> Any:
    from vllm_mlx.engine.batched import BatchedEngine
    from vllm_mlx.engine.simple import SimpleEngine

    return (SimpleEngine if kind == "simple" else BatchedEngine)(str(directory), **keywords)


@pytest.fixture(
    scope="module", params=[(kind, name) for kind in ENGINES for name in MODELS], ids="-".join
)
def started(
    request: pytest.FixtureRequest, directories: dict[str, Path], run: Run
) -> Iterator[Any]:
    kind, name = request.param
    engine = make(kind, directories[name])
    run(engine.start())
    yield engine, kind, name
    run(engine.stop())


@pytest.fixture
def served(started: Any, monkeypatch: pytest.MonkeyPatch) -> Served:
    """The engine with an empty memory of its own."""
    engine, kind, name = started
    served = Served(engine, kind, limit=20 if name == "standin" else 8)
    monkeypatch.setattr(prefix, "memory", lambda: served.tree)
    return served


@pytest.fixture
def name(started: Any) -> str:
    return str(started[2])


async def loop(
    served: Served, turns: int, tenant: str = ""
) -> list[tuple[list[int], list[int], int]]:
    """A tool loop: prompt, what was said, and how much was cached, of every turn."""
    taken = []
    prompt = [*SYSTEM, *user("Look it up."), *OPENING]
    for turn in range(turns):
        said, cached = await served.ask(prompt, tenant)
        taken.append((prompt, said, cached))
        prompt = [*prompt, *said, *result(turn), *OPENING]
    return taken


def test_tool_loop_computes_only_what_is_new(served: Served, run: Run) -> None:
    turns = run(loop(served, 8))
    for (before, said, _), (_, _, cached) in pairwise(turns):
        assert cached == len(before) + len(said)
    assert turns[0][2] == 0
    last = turns[-1][0]
    assert served.reused["tokens_new"] <= 1.05 * len(last)
    assert (served.reused["hits"], served.reused["misses"]) == (7, 1)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("budget", [PLENTY, 0])
def test_prefill_steps_are_as_long_as_the_flag_says(
    directories: dict[str, Path],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    budget: int,
) -> None:
    """Computed at a time: never more ids than ``--prefill-step-size``, and as many where it can."""
    from mlx_lm.models.gpt_oss import Model
    from vllm_mlx.scheduler import SchedulerConfig

    lengths: list[int] = []
    call = Model.__call__

    def counted(self: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        lengths.append(inputs.shape[1])
        return call(self, inputs, *args, **keywords)

    monkeypatch.setattr(Model, "__call__", counted)
    keywords: dict[str, Any] = {"prefill_step_size": 48}
    if kind == "batched":
        keywords = {"scheduler_config": SchedulerConfig(prefill_step_size=48)}
    engine = make(kind, directories["tiny"], **keywords)
    run(engine.start())
    served = Served(engine, kind, limit=3, tree=PrefixTree(budget))
    monkeypatch.setattr(prefix, "memory", lambda: served.tree)
    run(served.ask([*SYSTEM, *user("Hello."), *OPENING]))
    run(engine.stop())
    assert max(lengths) == 48


def test_output_is_the_same_without(served: Served, run: Run) -> None:
    reused = run(loop(served, 5))
    served.tree = PrefixTree(0)
    for prompt, said, _ in reused:
        assert run(served.ask(prompt)) == (said, 0)


def test_what_will_be_reused_is_known_before(served: Served, run: Run) -> None:
    for prompt, _, cached in run(loop(served, 3)):
        by_now = run(reusable_tokens(served.engine, prompt))
        assert by_now >= cached  # it was computed itself
    counters = served.counters
    again = [*prompt, *result(7), *OPENING]
    expected = run(reusable_tokens(served.engine, again))
    assert expected > len(SYSTEM)
    assert run(reusable_tokens(served.engine, again, "somebody else")) == 0
    assert served.counters == counters
    assert run(served.ask(again))[1] == expected


def test_nothing_is_generated_and_all_is_remembered(served: Served, run: Run) -> None:
    prompt = [*SYSTEM, *user("Say hello."), *OPENING]
    said, cached = run(served.ask(prompt, max_tokens=0))
    assert (said, cached) == ([], 0)
    assert run(reusable_tokens(served.engine, prompt)) == len(prompt) - 1
    other = [*SYSTEM, *user("Look it up."), *OPENING]
    assert run(reusable_tokens(served.engine, other)) == len(SYSTEM)
    assert run(served.ask(prompt, max_tokens=0)) == ([], len(prompt) - 1)
    run(served.ask([*DEVELOPER, *ids("<|start|>user<|message|>.<|end|>"), *OPENING], max_tokens=0))
    assert run(reusable_tokens(served.engine, [*DEVELOPER, *user("Say hello.")])) == len(DEVELOPER)
    warm = run(served.ask(prompt))
    served.tree = PrefixTree(0)
    assert warm == (run(served.ask(prompt))[0], len(prompt) - 1)


def test_retry_and_branch(served: Served, run: Run) -> None:
    turns = run(loop(served, 4))
    for prompt, said, _ in turns:
        assert run(served.ask(prompt)) == (said, len(prompt) - 1)
    prompt, said, _ = turns[1]
    branch = [*prompt, *said, *result(77), *OPENING]
    assert run(served.ask(branch))[1] == len(prompt) + len(said)
    other = [*SYSTEM, *user("Say hello."), *OPENING]
    assert run(served.ask(other))[1] == len(SYSTEM)
    assert run(served.ask([*SYSTEM, *OPENING]))[1] == len(SYSTEM)
    assert run(served.ask([*ids("<|start|>user<|message|>"), *SYSTEM, *OPENING]))[1] == 0


def test_next_user_turn_without_the_reasoning(served: Served, run: Run) -> None:
    turns = run(loop(served, 3))
    first = turns[0][0]
    dropped = ids(CALL)[2:]  # the opening is there, the analysis is not
    again = [*first, *dropped, *result(0), *OPENING]
    again += [*placed(ids(FINAL))[2:], *user("Say hello."), *OPENING]
    assert run(served.ask(again))[1] == len(first) - 1
    edited = [*again[: -len(user("Say hello.")) - 2], *user("Look it up."), *OPENING]
    assert run(served.ask(edited))[1] == len(again) - len(user("Say hello.")) - 2


def test_next_user_turn_after_an_answer_without_reasoning(served: Served, run: Run) -> None:
    """Known but for its last id, which a history has otherwise."""
    prompt = [*SYSTEM, *user("Say hello."), *OPENING]
    said, _ = run(served.ask(prompt))
    if said[-1] != vocab.RETURN:
        said, _ = run(served.ask(prompt, max_tokens=150))  # of random weights: a window and more
    again = [*prompt, *placed(said), *user("Say hello."), *OPENING]
    there, cached = run(served.ask(again))
    assert cached == known(prompt, said)
    served.tree = PrefixTree(0)
    assert run(served.ask(again)) == (there, 0)


def test_length_is_an_end_too(served: Served, run: Run) -> None:
    prompt = [*SYSTEM, *user("Look it up."), *OPENING]
    said, _ = run(served.ask(prompt, max_tokens=5))
    assert len(said) == 5
    assert run(served.ask([*prompt, *said, *result(1), *OPENING]))[1] == len(prompt) + 5


def test_tenants_share_nothing(served: Served, run: Run) -> None:
    prompt = [*SYSTEM, *user("Say hello."), *OPENING]
    said, _ = run(served.ask(prompt, "alice"))
    assert run(served.ask(prompt, "bob")) == (said, 0)
    assert run(served.ask(prompt, "alice")) == (said, len(prompt) - 1)


def test_eight_conversations_interleaved(served: Served, run: Run, name: str) -> None:
    async def together() -> None:
        prompts = {n: [*SYSTEM, *user(f"Person {n} asks."), *OPENING] for n in range(8)}
        kept = dict.fromkeys(prompts, 0)
        for turn in range(3):
            asked = [served.ask(prompt) for prompt in prompts.values()]
            if served.kind == "simple":  # its requests wait in a line
                answers = [await one for one in asked]
            else:
                answers = await asyncio.gather(*asked)
            for n, (said, cached) in enumerate(answers):
                if name == "standin":
                    expected = ids(
                        "<|channel|>final<|message|>" + "la " * n + f"person {n}<|return|>"
                    )
                    assert said == expected[:20]
                if turn:
                    assert cached == kept[n]
                kept[n] = known(prompts[n], said)
                prompts[n] += [*placed(said), *user(f"Person {n} asks."), *OPENING]

    run(together())
    system = len(SYSTEM)
    assert served.reused["hits"] >= 16
    assert served.counters.nbytes < 2 * 8 * 4 * 1024 * (system + 8 * 400)


def test_given_up_answers_are_not_remembered(served: Served, run: Run) -> None:
    prompt = [*SYSTEM, *user("Slow."), *OPENING]
    said = run(served.give_up(prompt, after=4))
    assert run(served.ask([*prompt, *said, *result(1), *OPENING]))[1] == len(prompt) - 1
    whole, cached = run(served.ask(prompt))
    assert whole[: len(said)] == said and cached == len(prompt) - 1


def test_two_requests_for_the_same_conversation(served: Served, run: Run) -> None:
    prompt = [*SYSTEM, *user("Look it up."), *OPENING]

    async def twice() -> list[tuple[list[int], int]]:
        if served.kind == "simple":
            return [await served.ask(prompt), await served.ask(prompt)]
        return list(await asyncio.gather(served.ask(prompt), served.ask(prompt)))

    first, second = run(twice())
    assert first[0] == second[0]
    follow = [*prompt, *first[0], *result(1), *OPENING]
    answers = [run(served.ask(follow)) for _ in range(2)]
    assert answers[0][0] == answers[1][0]
    assert [cached for _, cached in answers] == [len(prompt) + len(first[0]), len(follow) - 1]


@pytest.mark.parametrize("share", [0.3, 0.7, 1.05])
def test_small_budgets(served: Served, run: Run, share: float) -> None:
    """Of one conversation, and of less: what is reused is right, and the budget is kept."""
    turns = run(loop(served, 4))
    served.tree = PrefixTree(int(served.counters.nbytes * share))
    for _ in range(2):
        for tenant in ("one", "two"):
            for prompt, said, _ in turns:
                assert run(served.ask(prompt, tenant))[0] == said
                assert served.counters.nbytes <= served.counters.budget


def test_thrown_out_while_it_is_used(served: Served, run: Run) -> None:
    prompt = [*SYSTEM, *user("Slow."), *OPENING]
    before = run(served.ask(prompt))[0]

    async def emptied() -> list[int]:
        said: list[int] = []
        wanted = replace(GREEDY, max_tokens=served.limit)
        async with aclosing(generate(served.engine, tuple(prompt), wanted)) as steps:
            async for step in steps:
                if step.finish is None:
                    served.tree.forget(lambda owner: True)
                said += step.ids
        return said

    assert run(emptied()) == before
    follow = [*prompt, *placed(before), *result(1), *OPENING]
    assert run(served.ask(follow))[1] == known(prompt, before)


def test_failure_inside_changes_nothing_outside(
    served: Served, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_mlx_harmony.engine import pieces

    def broken(*args: Any, **keywords: Any) -> Any:
        raise RuntimeError("no room")

    turns = run(loop(served, 2))
    monkeypatch.setattr(pieces, "join", broken)
    monkeypatch.setattr(pieces, "cut", broken)
    for prompt, said, _ in turns:
        assert run(served.ask(prompt)) == (said, 0)


def test_penalties_see_the_same_prompt(served: Served, run: Run) -> None:
    prompt = [*SYSTEM, *user("Look it up."), *OPENING]
    wanted = {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    first = run(served.ask(prompt, **wanted))
    second = run(served.ask(prompt, **wanted))
    assert first[0] == second[0] and second[1] == len(prompt) - 1


def test_an_engine_that_failed_is_no_source(
    directories: dict[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ENGINES:
        engine = make(kind, directories["standin"])
        run(engine.start())
        served = Served(engine, kind)
        monkeypatch.setattr(prefix, "memory", lambda served=served: served.tree)
        prompt = [*SYSTEM, *user("Fail."), *OPENING]
        for _ in range(2):
            with pytest.raises(OutputError):
                run(served.ask(prompt))
        hello = [*SYSTEM, *user("Say hello."), *OPENING]
        said, _ = run(served.ask(hello))
        assert said == ids("<|channel|>final<|message|>Hello.<|return|>")
        assert run(served.ask(hello)) == (said, len(hello) - 1)
        run(engine.stop())


@pytest.mark.parametrize("kind", ENGINES)
def test_a_conversation_goes_on_from_the_disk_behind_what_was_warmed_up(
    directories: dict[str, Path],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
) -> None:
    """After a restart memory has what is everybody's, and the disk the tenant's on top of it."""
    disk = DiskCache(tmp_path, PLENTY)
    prefix.keep_on(disk)
    held: list[int] = []
    warmed = [*SYSTEM, *ids("<|start|>user<|message|>.<|end|>"), *OPENING]
    prompt, expected = [*SYSTEM, *user("Say hello."), *OPENING], 0
    try:
        for again in (False, True):
            engine = make(kind, directories["tiny"])
            run(engine.start())
            served = Served(engine, kind, limit=8)
            monkeypatch.setattr(prefix, "memory", lambda served=served: served.tree)
            run(served.ask(warmed, prefix.EVERYBODY, max_tokens=0))
            said, cached = run(served.ask(prompt, "alice", lambda: held.append(disk.read_ahead)))
            assert cached == (expected if again else len(SYSTEM))
            assert not any(held) and disk.flush(10)
            prompt, expected = [*prompt, *said, *result(1), *OPENING], len(prompt) + len(said)
            run(engine.stop())
        assert disk.counters().hits >= 1
    finally:
        prefix.keep_on(None)
        disk.close(1.0)


@pytest.mark.parametrize("kind", ENGINES)
def test_another_models_thread_takes_the_global_stream(
    directories: dict[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """At every moment: before a batch generator is made anew, and while a prompt is computed."""
    from vllm_mlx.mlx_streams import bind_generation_streams

    generating = import_module("mlx_lm.generate")  # the package has a function of that name
    monkeypatch.setattr(generating, "generation_stream", generating.generation_stream)
    engine = make(kind, directories["standin"])
    run(engine.start())
    served = Served(engine, kind)
    monkeypatch.setattr(prefix, "memory", lambda: served.tree)
    resume = prefix.resume
    with ThreadPoolExecutor(1) as other:

        def interrupted(*args: Any, **keywords: Any) -> Any:
            other.submit(bind_generation_streams).result()
            return resume(*args, **keywords)

        monkeypatch.setattr(prefix, "resume", interrupted)
        for words in ("Say hello.", "Fail.", "Say hello."):
            prompt = [*SYSTEM, *user(words), *OPENING]
            if words == "Fail.":
                with pytest.raises(OutputError):
                    run(served.ask(prompt))
            else:
                said, _ = run(served.ask(prompt))
                assert said == ids("<|channel|>final<|message|>Hello.<|return|>")
        run(engine.stop())


@pytest.mark.parametrize("kind", ENGINES)
def test_a_stopped_engine_leaves_nothing(
    directories: dict[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    engine = make(kind, directories["tiny"])
    run(engine.start())
    served = Served(engine, kind)
    monkeypatch.setattr(prefix, "memory", lambda: served.tree)
    prompt = [*SYSTEM, *user("Say hello."), *OPENING]
    said, _ = run(served.ask(prompt))
    assert served.counters.nbytes > 0
    run(engine.stop())
    gc.collect()
    for _ in range(500):
        if not served.counters.nbytes:
            break
        time.sleep(0.01)
    assert served.counters.nbytes == 0
    run(engine.start())  # loads the model again
    assert run(served.ask(prompt)) == (said, 0)
    run(engine.stop())


def test_200_conversations_stay_within_the_budget(served: Served, run: Run, name: str) -> None:
    import mlx.core as mx

    served.tree = PrefixTree(200_000)
    levels = []
    for person in range(200 if name == "standin" else 20):
        prompt = ids(
            f"<|start|>user<|message|>{person} {words(person, 30)}<|end|><|start|>assistant"
        )
        run(served.ask(prompt, tenant=str(person % 3), max_tokens=1))
        assert served.counters.nbytes <= 200_000
        levels.append(mx.get_active_memory())
    assert served.counters.evictions > 0
    half = len(levels) // 2
    assert max(levels[half:]) <= max(levels[:half]) + 100_000


def scheduler(engine: Any) -> Any:
    return engine._engine.engine.scheduler


def test_the_hosts_prefix_cache_is_off_where_ours_is_on(
    directories: dict[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_mlx.scheduler import SchedulerConfig

    async def caches(**config: Any) -> tuple[bool, bool]:
        engine = make("batched", directories["tiny"], scheduler_config=SchedulerConfig(**config))
        await engine.start()
        found = scheduler(engine)
        held = found.memory_aware_cache is not None, found in batched._ours
        await engine.stop()
        return held

    assert run(caches()) == (False, True)
    assert run(caches(enable_prefix_cache=False)) == (False, False)
    assert run(caches(max_kv_size=512)) == (True, False)
    monkeypatch.setattr(prefix, "memory", lambda: PrefixTree(0))
    assert run(caches()) == (True, False)


def test_counters_are_shown_and_caches_emptied(served: Served, run: Run) -> None:
    prompt = [*SYSTEM, *user("Say hello."), *OPENING]
    run(served.ask(prompt))
    run(served.ask(prompt))
    shown = served.engine.get_cache_stats()["harmony_prefix_reuse"]
    assert shown["hits"] == 1 and shown["nbytes"] == served.counters.nbytes > 0
    served.engine.clear_runtime_caches()
    assert served.counters.nbytes == 0
    assert run(served.ask(prompt))[1] == 0


def test_other_prompts_pass_through_the_simple_engine_as_they_are() -> None:
    calls: list[Any] = []

    def original(model: Any, prompt: Any, *args: Any, **keywords: Any) -> Iterator[Any]:
        calls.append((model, prompt, args, keywords))
        return iter(())

    reusing = simple.reuse_prefix(original)
    for prompt, keywords in (
        ("text", {}),
        ([1, 2], {"stop": None}),
        (prefix.TenantPrompt([1]), {"prompt_cache": 1}),
    ):
        list(reusing("model", prompt, **keywords))
        assert calls[-1] == ("model", prompt, (), keywords)


def test_raw_requests_of_the_host_are_reused_too(
    directories: dict[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree: PrefixTree[Any] = PrefixTree(PLENTY)
    monkeypatch.setattr(prefix, "memory", lambda: tree)
    text = vocab.encoding().decode([*SYSTEM, *user("Say hello."), *OPENING])
    hits: list[int] = []

    async def test() -> list[str]:
        engine = make("batched", directories["standin"])
        await engine.start()
        texts = [
            (await engine.generate(prompt=text, max_tokens=9, temperature=0)).text for _ in "ab"
        ]
        hits.append(prefix.status(model_of(engine))["hits"])
        await engine.stop()
        return texts

    first, second = run(test())
    assert first == second and "Hello." in first
    assert hits == [1]
