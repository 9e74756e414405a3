"""Chat's `n`: several answers to one prompt, which is computed once; streamed and not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from sse import documents

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")

import openai
from harmony_text import ids_of
from loops import run
from official_clients import clients
from openai.lib.streaming.chat import ChatCompletionStreamState
from scripted_host import KEY, MODEL, SingleEngineHost, Tracker
from starlette.testclient import TestClient

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import Progress, Usage
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Step, Steps
from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.app import application

pytestmark = pytest.mark.usefixtures("no_grammars")


CALL = '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a":1}<|call|>'
BREAKS = "break"
ANSWERS = (
    "<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>One.<|return|>",
    "<|channel|>final<|message|>A second answer, which is longer than the first.<|return|>",
    CALL,
    "<|channel|>analysis<|message|>And more, and more, and more, and more, and more, and more.",
)
FIRST_SEED = 2**63 - 2
SEEDS = (FIRST_SEED, FIRST_SEED + 1, -(2**63), -(2**63) + 1)
"""Seeds are signed 64-bit integers: the next after the largest is the smallest."""


@dataclass(eq=False)
class Seeded:
    """Generates one of ``answers`` for each seed, ``at_once`` ids at a time.

    ``begun`` lists the seeds in the order in which they began and, if the engine ``reports`` it,
    ``"computed"`` at the point at which the prompt was computed.
    """

    answers: tuple[str, ...] = ANSWERS
    at_once: int = 1
    reports: bool = False
    remote: bool = False
    model: str = MODEL
    context_length: int | None = 4096
    begun: list[Any] = field(default_factory=list)
    prompts: set[tuple[int, ...]] = field(default_factory=set)
    constraints: list[Constraint | None] = field(default_factory=list)
    running: int = 0

    async def generate(self, request: GenerationRequest) -> Steps:
        prompt, seed = request.prompt, request.settings.seed
        place = len([entry for entry in self.begun if entry != "computed"])
        self.begun.append(seed)
        self.prompts.add(prompt)
        self.constraints.append(request.constraint)
        self.running += 1
        size, cached = len(prompt), cached_ids(place, len(prompt))
        try:
            if self.remote:
                yield Step(())
            if self.reports:
                for processed in (cached, size // 2, size):
                    await asyncio.sleep(0)
                    if processed == size and not place:
                        self.begun.append("computed")
                    yield Step((), progress=Progress(size, cached, processed))
            at = SEEDS.index(seed) if seed is not None else place
            if self.answers[at] == BREAKS:
                raise OutputError("the engine failed")
            generated = ids_of(self.answers[at])
            ends = generated[-1] in vocab.TURN_ENDS
            for start in range(0, len(generated), self.at_once):
                step = generated[start : start + self.at_once]
                last = start + self.at_once >= len(generated)
                await asyncio.sleep(0)
                yield Step(step, ("stop" if ends else "length") if last else None, cached)
        finally:
            self.running -= 1

    async def reusable_tokens(self, prompt: tuple[int, ...], tenant: str) -> int:
        return 0


def cached_ids(place: int, size: int) -> int:
    """Cached ids: the first answer finds few, the others all but the last."""
    return size - 1 if place else 7


class Measured(Tracker):
    """The metrics of one request."""

    usage = Usage()

    def finish(self, result: str, usage: Usage) -> None:
        super().finish(result, usage)
        self.usage = usage


class Counting(SingleEngineHost):
    def tracker(self, api: str, *, stream: bool) -> Tracker:
        self.trackers.append(Measured(api))
        return self.trackers[-1]


def request(n: int = 4, **fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "Hello!"}]
    body = {"model": MODEL, "messages": messages, "tools": tools, "n": n, "seed": FIRST_SEED}
    return {**body, **fields}


async def complete(engine: Seeded, **fields: Any) -> Any:
    client, _ = clients(Counting(engine))
    return await client.chat.completions.create(**request(**fields))


async def stream_completion(engine: Seeded, **fields: Any) -> tuple[Any, list[int]]:
    """The completion as assembled by the official client, and the index of every chunk."""
    client, _ = clients(Counting(engine))
    state, indices = ChatCompletionStreamState(), []
    chunks = await client.chat.completions.create(
        **request(**fields), stream=True, stream_options={"include_usage": True}
    )
    async for chunk in chunks:
        state.handle_chunk(chunk)
        indices += [choice.index for choice in chunk.choices]
        assert (chunk.usage is None) == bool(chunk.choices)
    return state.current_completion_snapshot, indices


def summarize(completion: Any) -> list[tuple[Any, ...]]:
    """The choices, in the order of their indices."""
    summaries = []
    for choice in sorted(completion.choices, key=lambda item: item.index):
        message = choice.message
        calls = [call.function.arguments for call in message.tool_calls or ()]
        reasoning = getattr(message, "reasoning", None)
        summaries.append(
            (choice.index, reasoning, message.content or "", calls, choice.finish_reason)
        )
    return summaries


EXPECTED = [
    (0, "Hm.", "One.", [], "stop"),
    (1, None, "A second answer, which is longer than the first.", [], "stop"),
    (2, None, "", ['{"a":1}'], "tool_calls"),
    (3, ANSWERS[3].rpartition(">")[2], "", [], "length"),
]


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("remote", [False, True])
def test_choices_have_separate_answers(at_once: int, reports: bool, remote: bool) -> None:
    async def test() -> None:
        engine = Seeded(at_once=at_once, reports=reports, remote=remote)
        completion = await complete(engine)
        assert summarize(completion) == EXPECTED
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        again = Seeded(at_once=at_once, reports=reports, remote=remote)
        snapshot, indices = await stream_completion(again)
        assert summarize(snapshot) == EXPECTED
        assert snapshot.usage == completion.usage
        assert engine.begun == again.begun
        if at_once == 1:  # interleaved, not one after the other
            assert indices.index(1) < len(indices) - indices[::-1].index(0) - 1
        assert (engine.running, again.running) == (0, 0)

    run(test())


def test_usage_counts_prompt_once_and_sums_answers() -> None:
    async def test() -> None:
        alone = Seeded()
        host = Counting(Seeded(reports=True))
        client, _ = clients(host)
        together = (await client.chat.completions.create(**request())).usage
        prompt = (await complete(alone, n=1)).usage.prompt_tokens
        assert together is not None
        assert together.prompt_tokens == prompt
        assert together.completion_tokens == sum(len(ids_of(answer)) for answer in ANSWERS)
        assert together.prompt_tokens_details is not None
        assert together.prompt_tokens_details.cached_tokens == 7
        (tracker,) = host.trackers
        assert isinstance(tracker, Measured)
        assert tracker.results == ["success"]
        assert tracker.usage.prompt_tokens == prompt
        assert tracker.usage.completion_tokens == together.completion_tokens
        assert tracker.usage.call_tokens == len(ids_of('{"a":1}'))

    run(test())


@pytest.mark.parametrize(
    ("reports", "begun"),
    [(True, [SEEDS[0], "computed", *SEEDS[1:]]), (False, [*SEEDS])],
)
def test_other_choices_begin_after_prompt_is_computed(reports: bool, begun: list[Any]) -> None:
    engine = Seeded(reports=reports)
    run(complete(engine))
    assert engine.begun == begun
    assert len(engine.prompts) == 1


@pytest.mark.parametrize("n", [2, 8])
def test_engine_draws_seeds_if_none_is_given(n: int) -> None:
    engine = Seeded(answers=ANSWERS[1:2] * n)
    assert len(run(complete(engine, n=n, seed=None)).choices) == n
    assert engine.begun == [None] * n


def test_calls_of_choices_have_different_ids() -> None:
    completion = run(complete(Seeded(answers=(CALL,) * 4)))
    keys = {choice.message.tool_calls[0].id for choice in completion.choices}
    assert len(keys) == 4


def test_choices_have_separate_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(enforcement.GRAMMAR_VARIABLE)
    engine = Seeded()
    run(complete(engine))
    assert None not in engine.constraints
    assert len({id(constraint) for constraint in engine.constraints}) == 4
    assert (
        len({id(constraint.spec.grammar) for constraint in engine.constraints if constraint}) == 1
    )


@pytest.mark.parametrize("at", [0, 1, 3])
def test_failure_of_one_choice_ends_all(at: int) -> None:
    answers = [*ANSWERS[1:2] * 4]
    answers[at] = BREAKS
    engine = Seeded(answers=tuple(answers))
    with pytest.raises(openai.InternalServerError):
        run(complete(engine))
    assert engine.running == 0
    with pytest.raises(openai.APIError):
        run(stream_completion(engine))
    assert engine.running == 0


def test_prompt_progress_is_sent_once_and_first() -> None:
    host = Counting(Seeded(reports=True))
    with TestClient(application(host), base_url="http://localhost") as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        body = request(stream=True, return_progress=True)
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    chunks = documents(answer.text)
    progress = ["prompt_progress" in chunk for chunk in chunks]
    assert progress[0] is False  # the role
    assert 0 < sum(progress) == progress.index(False, 1) - 1
    assert sum(bool(chunk["choices"][0]["finish_reason"]) for chunk in chunks) == 4


def test_client_disconnect_ends_all_choices() -> None:
    async def test() -> None:
        host = Counting(Seeded(answers=(ANSWERS[1] * 50,) * 4))
        client, _ = clients(host)
        chunks = await client.chat.completions.create(**request(), stream=True)
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].index == 3:
                break
        await chunks.close()
        assert isinstance(host.engine, Seeded)
        for _ in range(1000):
            if not (host.engine.running or host.leases):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("they go on")

    run(test())
