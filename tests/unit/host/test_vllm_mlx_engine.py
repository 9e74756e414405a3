"""Our engine in vllm-mlx, with the stand-in loaded: its ids, settings and context window."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until_async

pytest.importorskip("vllm_mlx")
pytest.importorskip("mlx_lm")

from harmony_text import ids_of
from starlette.requests import Request
from starlette.responses import Response

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import OutputError, RequestError
from vllm_mlx_harmony.core.turn import OutputLimits, Sampling
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine, Options
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings, Step, Steps
from vllm_mlx_harmony.host import engine_routes
from vllm_mlx_harmony.host import vllm_mlx_engine as host_engine
from vllm_mlx_harmony.host.adapter import VllmMlx
from vllm_mlx_harmony.host.vllm_mlx_engine import HarmonyEngine
from vllm_mlx_harmony.model_files import length_of
from vllm_mlx_harmony.server import sampling
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.standin import Script
from vllm_mlx_harmony.standin.cursor import INSTEAD
from vllm_mlx_harmony.standin.model import WEIGHT

INTERVALS = [2, 7, 64]
"""Numbers of ids per step."""

GREEDY = GenerationSettings(max_tokens=500, temperature=0.0, top_p=1.0)
COUNT = "<|channel|>final<|message|>" + "".join(f" {n}" for n in range(45)) + "<|return|>"

COMPLETIONS = {
    "answer": "<|channel|>final<|message|>Hi.<|return|>",
    "call": "<|channel|>commentary to=functions.x <|constrain|>json<|message|>{}<|call|>",
    "endoftext": "<|channel|>final<|message|>Hi.<|endoftext|>",
    "runs on": "<|channel|>commentary to=x<|message|>{}<|call|><|start|>assistant<|channel|>final",
    "at once": "<|return|>",
    "count": COUNT,
    "again": "<|channel|>final<|message|>" + " a" * 30 + "<|return|>",
}


def prompt(text: str) -> tuple[int, ...]:
    return ids_of(f"<|start|>user<|message|>{text}<|end|><|start|>assistant")


SCRIPTS = [
    *(Script(f">{name}<", text) for name, text in COMPLETIONS.items()),
    Script(">slow<", COUNT, delay_ms=30),
    Script(">fails<", COUNT, fail_at=6),
]


def expected(name: str) -> tuple[int, ...]:
    """The script's ids up to and including the first that ends the turn."""
    token_ids = ids_of(COMPLETIONS[name])
    ends = [at for at, token in enumerate(token_ids) if token in vocab.TURN_ENDS]
    return token_ids[: ends[0] + 1]


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.write(tmp_path_factory.mktemp("standin"), SCRIPTS)


@pytest.fixture(scope="module")
def engine(directory: Path, run: Run) -> Iterator[HarmonyEngine]:
    engine = HarmonyEngine(str(directory))
    run(engine.start())
    yield engine
    run(engine.stop())


def generate(engine: HarmonyEngine, ids: tuple[int, ...], settings: GenerationSettings) -> Steps:
    assert engine.engine is not None
    return engine.engine.generate(GenerationRequest(ids, settings, ""))


async def read_steps(engine: Any, name: str, settings: GenerationSettings = GREEDY) -> list[Step]:
    async with aclosing(generate(engine, prompt(f">{name}<"), settings)) as generated:
        return [step async for step in generated if step.progress is None]


async def read_slowly(engine: Any, name: str) -> list[Step]:
    """The steps, read more slowly than the model generates them."""
    received: list[Step] = []
    async with aclosing(generate(engine, prompt(f">{name}<"), GREEDY)) as generated:
        async for step in generated:
            if step.progress is None:
                received.append(step)
            await asyncio.sleep(0.02)
    return received


def ids_of_steps(generated: list[Step]) -> tuple[int, ...]:
    return tuple(token for step in generated for token in step.ids)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_every_id_arrives_up_to_the_end_token(engine: Any, run: Run, name: str) -> None:
    generated = run(read_steps(engine, name))
    assert ids_of_steps(generated) == expected(name)
    assert [step.finish for step in generated if step.finish] == ["stop"]
    assert generated[-1].finish == "stop"


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("interval", INTERVALS)
def test_any_stream_interval_gives_the_same_ids(directory: Path, run: Run, interval: int) -> None:
    async def test() -> None:
        engine = HarmonyEngine(str(directory), options=Options(interval=interval))
        await engine.start()
        for name in COMPLETIONS:
            assert ids_of_steps(await read_steps(engine, name)) == expected(name)
        *others, _ = await read_steps(engine, "count")
        assert others and all(len(step.ids) % interval == 0 for step in others)
        assert ids_of_steps(await read_slowly(engine, "count")) == expected("count")
        await engine.stop()

    run(test())


def test_limit_of_zero_generates_nothing(engine: Any, run: Run) -> None:
    generated = run(
        read_steps(engine, "count", GenerationSettings(max_tokens=0, temperature=0.0, top_p=1.0))
    )
    assert ids_of_steps(generated) == ()
    assert [step.finish for step in generated if step.finish] == ["length"]


@pytest.mark.parametrize("limit", [1, 2, 3, 40])
def test_answer_is_cut_at_its_limit(engine: Any, run: Run, limit: int) -> None:
    settings = GenerationSettings(max_tokens=limit, temperature=0.0, top_p=1.0)
    generated = run(read_steps(engine, "count", settings))
    assert ids_of_steps(generated) == expected("count")[:limit]
    assert generated[-1].finish == "length"


def test_end_token_at_the_limit_is_a_stop(engine: Any, run: Run) -> None:
    whole = expected("answer")
    settings = GenerationSettings(max_tokens=len(whole), temperature=0.0, top_p=1.0)
    generated = run(read_steps(engine, "answer", settings))
    assert (ids_of_steps(generated), generated[-1].finish) == (whole, "stop")


def test_slow_reader_loses_nothing(engine: Any, run: Run) -> None:
    assert ids_of_steps(run(read_slowly(engine, "count"))) == expected("count")


def test_engine_failure_does_not_affect_the_next_request(engine: Any, run: Run) -> None:
    with pytest.raises(OutputError, match="internal engine error") as raised:
        run(read_steps(engine, "fails"))
    assert (raised.value.status, raised.value.code) == (500, "generation_failed")
    assert ids_of_steps(run(read_steps(engine, "answer"))) == expected("answer")


@asynccontextmanager
async def started_answer(engine: Any, name: str) -> AsyncIterator[Any]:
    async with aclosing(generate(engine, prompt(f">{name}<"), GREEDY)) as generated:
        while not (await anext(generated)).ids:  # progress of the prompt
            pass
        yield generated


async def wait_until_idle(engine: Any) -> None:
    await wait_until_async(lambda: not engine.engine.status(), "the engine to be idle")


def test_closed_request_frees_the_engine(engine: Any, run: Run) -> None:
    async def test() -> None:
        before = engine.engine.totals.completion_tokens
        async with started_answer(engine, "slow"):
            pass
        await wait_until_idle(engine)
        assert engine.engine.totals.completion_tokens - before < len(ids_of(COUNT)) / 2
        assert ids_of_steps(await read_steps(engine, "answer")) == expected("answer")

    run(test())


def test_cancelled_request_frees_the_engine(engine: Any, run: Run) -> None:
    async def test() -> None:
        before = engine.engine.totals.completion_tokens
        task = asyncio.ensure_future(read_steps(engine, "slow"))
        await wait_until_async(
            lambda: any(status.generated for status in engine.engine.status()), "an id"
        )
        task.cancel()
        await asyncio.wait({task})
        await wait_until_idle(engine)
        assert engine.engine.totals.completion_tokens - before < len(ids_of(COUNT)) / 2
        assert ids_of_steps(await read_steps(engine, "answer")) == expected("answer")

    run(test())


def test_concurrent_answers_do_not_mix(engine: Any, run: Run) -> None:
    async def test() -> None:
        names = ["answer", "call", "count", "endoftext", "answer", "count"]
        outputs = await asyncio.gather(*(read_steps(engine, name) for name in names))
        assert [ids_of_steps(output) for output in outputs] == [expected(name) for name in names]

    run(test())


def test_request_is_served_beside_one_of_the_host(engine: Any, run: Run) -> None:
    async def generate_for_host() -> None:
        async with aclosing(engine.stream_generate(prompt="Once", max_tokens=20)) as outputs:
            async for _ in outputs:
                await asyncio.sleep(0.01)

    async def test() -> None:
        theirs = asyncio.ensure_future(generate_for_host())
        await asyncio.sleep(0.05)
        assert ids_of_steps(await read_steps(engine, "answer")) == expected("answer")
        await theirs

    run(test())


SETTINGS = [
    pytest.param({"logit_bias": ((vocab.RETURN, 100.0),)}, (vocab.RETURN,), id="logit bias"),
    pytest.param({"temperature": 2.0, "top_k": 1}, expected("count"), id="top k"),
    pytest.param({"temperature": 2.0, "top_p": 0.0001}, expected("count"), id="top p"),
    pytest.param({"temperature": 2.0, "min_p": 1.0}, expected("count"), id="min p"),
]


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize(("changed", "answer"), SETTINGS)
def test_settings_reach_the_model(
    engine: Any, run: Run, changed: dict[str, Any], answer: tuple[int, ...]
) -> None:
    settings = GenerationSettings(
        **{"max_tokens": 500, "temperature": 0.0, "top_p": 1.0, **changed}
    )
    assert ids_of_steps(run(read_steps(engine, "count", settings))) == answer


HOT = GenerationSettings(max_tokens=30, temperature=100.0, top_p=1.0)
"""So hot that any of 200,000 ids may come, whatever the stand-in prefers."""


@pytest.mark.parametrize("first", ["cold", "hot"])
def test_concurrent_requests_have_their_own_settings(engine: Any, run: Run, first: str) -> None:
    async def test() -> None:
        requests = {"cold": read_steps(engine, "count"), "hot": read_steps(engine, "count", HOT)}
        order = [first, *(name for name in requests if name != first)]
        outputs = await asyncio.gather(*(requests[name] for name in order))
        ids_of = dict(zip(order, map(ids_of_steps, outputs), strict=True))
        assert ids_of["cold"] == expected("count")
        assert ids_of["hot"] != expected("count")[:30]

    run(test())


@pytest.mark.parametrize(("ours", "theirs"), [(0.0, 100.0), (100.0, 0.0)])
def test_host_request_in_our_batch_keeps_its_settings(
    engine: Any, run: Run, ours: float, theirs: float
) -> None:
    async def generate_for_host(temperature: float) -> str:
        text = vocab.encoding().decode(list(prompt(">count<")))
        options = {"max_tokens": 20, "temperature": temperature, "top_p": 1.0}
        return str((await engine.generate(prompt=text, **options)).text)

    async def test() -> None:
        cold = await generate_for_host(0.0)
        settings = GenerationSettings(max_tokens=40, temperature=ours, top_p=1.0)
        running = asyncio.ensure_future(read_steps(engine, "count", settings))
        await asyncio.sleep(0.05)
        assert (await generate_for_host(theirs) == cold) is (theirs == 0)
        await running

    run(test())


LONG = "".join(f" {n}" for n in range(4_000))
"""A prompt that takes several steps to compute, so that other requests join it."""


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("theirs", ["Once", LONG])
def test_host_requests_and_ours_are_independent(
    engine: Any, run: Run, theirs: str, temperature: float
) -> None:
    async def generate_for_host() -> None:
        options = {"max_tokens": 40, "temperature": temperature}
        async with aclosing(engine.stream_generate(prompt=theirs, **options)) as outputs:
            async for _ in outputs:
                pass

    async def test() -> None:
        running = asyncio.ensure_future(generate_for_host())
        await asyncio.sleep(0.05)
        answers = await asyncio.gather(
            read_steps(engine, "count"), read_steps(engine, "count", HOT)
        )
        await running
        assert ids_of_steps(answers[0]) == expected("count")
        assert ids_of_steps(answers[1]) != expected("count")[:30]

    run(test())


async def continue_answer(engine: Any, text: str, settings: GenerationSettings) -> tuple[int, ...]:
    """The ids that follow a prompt and the header of an answer."""
    beginning = (*prompt(text), *ids_of("<|channel|>final<|message|>"))
    async with aclosing(generate(engine, beginning, settings)) as generated:
        return ids_of_steps([step async for step in generated])


def test_presence_penalty_reaches_the_model(engine: Any, run: Run) -> None:
    """The bias lifts one id just over all others until the penalty takes it down again.

    The stand-in gives its next id ``WEIGHT`` and every other one nearly nothing.
    """
    lifted = {"max_tokens": 4, "temperature": 0.0, "logit_bias": ((ids_of(" 7")[0], WEIGHT + 1),)}
    plain = GenerationSettings(top_p=1.0, **lifted)
    penalised = GenerationSettings(top_p=1.0, presence_penalty=2.0, **lifted)
    assert len(set(run(continue_answer(engine, ">count<", plain)))) == 1
    assert len(set(run(continue_answer(engine, ">count<", penalised)))) > 1


def test_frequency_penalty_counts_the_whole_answer(engine: Any, run: Run) -> None:
    """The lead of the stand-in's next id outlasts 26 penalties, but not 27."""
    lead = WEIGHT - INSTEAD[0][0]
    penalised = GenerationSettings(
        max_tokens=30, temperature=0.0, top_p=1.0, frequency_penalty=lead / 26.5
    )
    generated = run(continue_answer(engine, ">again<", penalised))
    assert generated[:27] == (ids_of(" a")[0],) * 27
    assert generated[27:28] != (ids_of(" a")[0],)


@pytest.mark.parametrize("beside", [0, 3])
def test_seed_draws_the_same_beside_other_requests(engine: Any, run: Run, beside: int) -> None:
    async def test() -> None:
        seeded = GenerationSettings(max_tokens=12, temperature=100.0, top_p=0.95, seed=-7)
        first = ids_of_steps(await read_steps(engine, "count", seeded))
        others = [read_steps(engine, "count", HOT) for _ in range(beside)]
        again, *rest = await asyncio.gather(read_steps(engine, "count", seeded), *others)
        assert ids_of_steps(again) == first
        assert len({first, *map(ids_of_steps, rest)}) == beside + 1

    run(test())


def test_repetition_penalty_reaches_the_model(engine: Any, run: Run) -> None:
    """It lowers generated ids to the level of all others: then any of 200,000 may come."""
    plain = GenerationSettings(max_tokens=12, temperature=1.0, top_p=1.0)
    penalised = GenerationSettings(
        max_tokens=12, temperature=1.0, top_p=1.0, repetition_penalty=1e6
    )
    text = expected("again")[3:]
    assert run(continue_answer(engine, ">again<", plain)) == text[:12]
    assert run(continue_answer(engine, ">again<", penalised)) != text[:12]


def test_cached_ids_of_the_prompt_are_counted(engine: Any, run: Run) -> None:
    async def test() -> None:
        long = prompt("".join(f" {n}" for n in range(300)) + ">answer<")
        first = [step async for step in generate(engine, long, GREEDY)]
        longer = (*long, *ids_of_steps(first)[:-1], *prompt(">answer<"))
        second = [step async for step in generate(engine, longer, GREEDY)]
        assert first[0].cached_tokens == 0
        assert 0 <= second[0].cached_tokens < len(longer)

    run(test())


# --- Settings and window.


def test_server_defaults_apply_where_the_request_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_mlx import server

    server_wide = Sampling(temperature=0.25, top_k=17)
    monkeypatch.setattr(server, "_default_max_tokens", 77)
    allowed = VllmMlx(ServerSettings.read()).max_tokens
    resolved = sampling.resolve(Sampling(), OutputLimits(), allowed, server_wide)
    assert (resolved.temperature, resolved.top_k, resolved.max_tokens) == (0.25, 17, 77)
    assert (resolved.top_p, resolved.repetition_penalty, resolved.seed) == (1.0, 1.0, None)
    wanted = Sampling(temperature=0.0, top_k=3, frequency_penalty=1.0, seed=4)
    overridden = sampling.resolve(wanted, OutputLimits(max_tokens=5), allowed, server_wide)
    assert (overridden.temperature, overridden.top_k, overridden.max_tokens) == (0.0, 3, 5)
    assert (overridden.frequency_penalty, overridden.seed) == (1.0, 4)


def any_number(requested: int | None) -> int:
    return requested or 100


FLAGS = {"temperature": 0.4, "top_p": 0.8, "min_p": 0.1, "presence_penalty": 0.5}
MODEL = '{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}'


@pytest.mark.parametrize(
    ("flags", "model", "expected"),
    [
        ({}, None, Sampling(1.0, 1.0)),
        ({}, '{"do_sample": true, "eos_token_id": 1}', Sampling(1.0, 1.0)),
        ({}, MODEL, Sampling(0.6, 0.95, 20, None, None, 1.05)),
        (FLAGS, None, Sampling(0.4, 0.8, None, 0.1, 0.5)),
        (FLAGS, MODEL, Sampling(0.4, 0.8, 20, 0.1, 0.5, 1.05)),
        ({"temperature": 0.0}, MODEL, Sampling(0.0, 0.95, 20, None, None, 1.05)),
        ({}, '{"temperature": "hot", "top_p": 7, "top_k": -3, "min_p": true}', Sampling(1.0, 1.0)),
        ({}, '{"repetition_penalty": 0, "temperature": NaN}', Sampling(1.0, 1.0)),
        ({}, "{broken", Sampling(1.0, 1.0)),
    ],
)
def test_flag_overrides_model_file_overrides_recommendation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, float],
    model: str | None,
    expected: Sampling,
) -> None:
    from vllm_mlx import server

    for name, value in flags.items():
        monkeypatch.setattr(server, f"_default_{name}", value)
    if model is not None:
        (tmp_path / "generation_config.json").write_text(model)
    engine: Any = SimpleNamespace(model=str(tmp_path))
    assert VllmMlx(ServerSettings.read()).defaults(engine).sampling == expected


@pytest.mark.parametrize(
    ("temperature", "top_p", "expected"),
    [(1.0, 0.0, 0.0), (1.0, 1e-9, 0.0), (1e-40, 1.0, 0.0), (0.5, 1e-5, 0.5), (0.0, 0.5, 0.0)],
)
def test_settings_that_leave_one_id_are_greedy(
    temperature: float, top_p: float, expected: float
) -> None:
    resolved = sampling.resolve(
        Sampling(temperature=temperature, top_p=top_p), OutputLimits(), any_number
    )
    assert resolved.temperature == expected and resolved.top_p >= sampling.EPSILON


@pytest.mark.parametrize(("top_k", "expected"), [(0, 0), (-1, 0), (5, 5), (201_088, 0), (10**9, 0)])
def test_top_k_that_keeps_everything_is_none(top_k: int, expected: int) -> None:
    assert sampling.resolve(Sampling(top_k=top_k), OutputLimits(), any_number).top_k == expected


@pytest.mark.parametrize("token", [-1, 201_088, 10**12])
def test_bias_on_unknown_token_is_rejected(token: int) -> None:
    with pytest.raises(RequestError) as raised:
        sampling.resolve(Sampling(logit_bias=((token, 1.0),)), OutputLimits(), any_number)
    assert (raised.value.status, raised.value.param) == (400, "logit_bias")


@pytest.mark.parametrize(
    ("room", "tokens", "expected"),
    [(None, 10**6, 500), (1000, 100, 500), (1000, 600, 400), (1000, 999, 1)],
)
def test_answer_is_limited_to_what_the_prompt_leaves(
    room: int | None, tokens: int, expected: int
) -> None:
    assert sampling.limited_to_context(GREEDY, tokens, room).max_tokens == expected


@pytest.mark.parametrize("tokens", [1000, 1001, 10**6])
def test_error_for_full_window_has_both_numbers(tokens: int) -> None:
    with pytest.raises(RequestError) as raised:
        sampling.limited_to_context(GREEDY, tokens, 1000)
    assert (raised.value.status, raised.value.code) == (400, "context_length_exceeded")
    assert "1000" in raised.value.message
    assert str(tokens) in raised.value.message


@pytest.mark.parametrize(
    ("content", "length"),
    [
        ('{"max_position_embeddings": 131072}', 131072),
        ('{"text_config": {"max_position_embeddings": 4096}}', 4096),
        ('{"max_position_embeddings": "many"}', None),
        ("[]", None),
        ("{broken", None),
        (None, None),
    ],
)
def test_window_is_read_from_the_configuration(
    tmp_path: Path, content: str | None, length: int | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert length_of(str(tmp_path)) == length


def test_configuration_is_read_once_downloaded(tmp_path: Path) -> None:
    assert length_of(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    assert length_of(str(tmp_path)) == 4096


def test_concurrent_starts_load_one_model(
    directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[MlxEngine] = []

    class Slow(MlxEngine):
        def load(self, *arguments: Any) -> None:
            loaded.append(self)
            time.sleep(0.5)
            super().load(*arguments)

    monkeypatch.setattr("vllm_mlx_harmony.host.vllm_mlx_engine.MlxEngine", Slow)

    async def test() -> None:
        engine = HarmonyEngine(str(directory))
        await asyncio.gather(engine.start(), engine.start())
        assert loaded == [engine.engine]
        await engine.stop()
        await engine.start()  # and again after that
        assert loaded[1:] == [engine.engine]
        await engine.stop()

    try:
        run(test())
    finally:
        for mlx_engine in loaded:
            mlx_engine.close()


def test_model_can_load_while_health_is_reported(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    class Adding:
        """An engine during whose check two others are loaded."""

        @property
        def healthy(self) -> bool:
            loaded.update(dict.fromkeys((2, 3), ("another", SimpleNamespace(healthy=True))))
            return True

    async def forward(_: Any) -> Response:
        return Response()

    loaded: dict[int, Any] = {1: ("one", Adding())}
    monkeypatch.setattr(engine_routes, "forward_to_host", forward)
    monkeypatch.setattr(host_engine, "_loaded", loaded)
    assert run(engine_routes.health(Request({"type": "http"}))).status_code == 200
    assert len(host_engine.serving()) == 3


def test_missing_model_has_no_context_length() -> None:
    assert length_of("nobody/no-such-model") is None
