"""What is measured. Each measurement is repeated, so that its spread is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeAlias

from vllm_mlx_harmony.bench.requests import (
    SHORT_ANSWER_TOKENS,
    TOOL,
    Client,
    Message,
    Timed,
    step,
)
from vllm_mlx_harmony.verify.values import Failed

LENGTHS = (1_000, 8_000, 32_000, 100_000)
"""Tokens of prompts, up to most of the 131,072 of gpt-oss's context."""

STREAMS = (1, 2, 4, 8)
"""Answers that are generated at once."""

TURNS = 20
"""Requests of the tool loop. The last prompt has about 11,000 tokens: a model with less context is
measured without it."""

RESULT = 500
"""Tokens of a tool's result in the loop."""

ANSWER = 256
"""Tokens of an answer whose speed is measured."""

BESIDE = 8_000
"""Tokens of the prompt beside a running answer."""

STORY = "Write a long story about a lighthouse. Do not stop before 2000 words."


@dataclass(frozen=True, slots=True)
class Point:
    """One number of a curve, at ``x`` (tokens, streams, turns)."""

    curve: str
    x: int
    value: float


Points: TypeAlias = AsyncGenerator[Point, None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement and what it is called while it runs."""

    name: str
    run: Callable[[Client], Points]


CURVES = {
    "first token, cold": ("s", "prompt tokens"),
    "first token, warm": ("s", "prompt tokens"),
    "one stream's speed": ("tokens/s", "streams"),
    "all streams' speed": ("tokens/s", "streams"),
    "tool loop, first token": ("s", "turn"),
    "tool loop, computed": ("tokens", "turn"),
    "longest pause, undisturbed": ("s", "prompt tokens"),
    "longest pause beside a prompt": ("s", "prompt tokens"),
    "first token after a restart": ("s", "prompt tokens"),
}
"""The unit and the axis of each curve."""


def plan(context: int | None, most: int) -> Iterator[Measurement]:
    """All measurements that fit: prompts have ``most`` tokens at most, or those of the context."""
    room = min(most, context - ANSWER if context else most)
    for length in LENGTHS:
        if length <= room:
            yield Measurement(f"first token, {length:,} tokens", partial(_first, length))
    for count in STREAMS:
        yield Measurement(f"speed of {count} at once", partial(_speed, count))
    if room >= TURNS * (RESULT + 50):
        yield Measurement(f"tool loop of {TURNS} turns", _loop)
    if room >= BESIDE:
        yield Measurement("an answer beside a long prompt", _beside)


async def _first(length: int, client: Client) -> Points:
    prompt = client.prompt(length)
    cold = await client.answer(prompt, SHORT_ANSWER_TOKENS)
    yield Point("first token, cold", length, cold.first)
    yield Point(
        "first token, warm", length, (await client.answer(prompt, SHORT_ANSWER_TOKENS)).first
    )


def story(client: Client) -> list[Message]:
    return [{"role": "user", "content": f"{client.source.random()} {STORY}"}]


async def _speed(count: int, client: Client) -> Points:
    answers = await asyncio.gather(*(client.answer(story(client), ANSWER) for _ in range(count)))
    begin = min(answer.first for answer in answers)
    end = max(answer.times[-1] for answer in answers)
    tokens = sum(answer.output or len(answer.times) for answer in answers)
    yield Point("one stream's speed", count, median(answer.speed for answer in answers))
    yield Point("all streams' speed", count, (tokens - count) / (end - begin))


async def _loop(client: Client) -> Points:
    """The calls of the history are written here, so that every server gets the same prompts."""
    messages = client.text(50)
    for turn in range(1, TURNS + 1):
        timed = await client.answer(messages, SHORT_ANSWER_TOKENS, tools=[TOOL])
        yield Point("tool loop, first token", turn, timed.first)
        if timed.cached is not None:
            yield Point("tool loop, computed", turn, timed.prompt - timed.cached)
        words = round(RESULT / client.per_word)
        messages = [*messages, *step(turn, client.text(words)[0]["content"])]


async def _beside(client: Client) -> Points:
    """The answer runs for a while by itself, and then beside the computation of a prompt."""
    timed, beside = Timed(), None
    alone = 0
    async with aclosing(client.running(timed, story(client), 4 * ANSWER)) as events:
        async for _ in events:
            if beside is None and len(timed.times) == ANSWER // 4:
                alone = len(timed.times)
                beside = asyncio.create_task(
                    client.answer(client.prompt(BESIDE), SHORT_ANSWER_TOKENS)
                )
            if beside is not None and beside.done():
                break
    if beside is None:
        raise Failed(f"the answer ended after {len(timed.times)} tokens")
    await beside
    gaps = [after - before for before, after in zip(timed.times, timed.times[1:], strict=False)]
    yield Point("longest pause, undisturbed", BESIDE, max(gaps[: alone - 1]))
    yield Point("longest pause beside a prompt", BESIDE, max(gaps[alone - 1 :], default=0.0))
