"""Streamed requests with times, and prompts of a given length in tokens.

Times are taken when an event arrives. Tokens are those that the server counts in ``usage``; of one
that counts none, each event with text counts as one.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx
from httpx_sse import SSEError

from vllm_mlx_harmony.verify.apis import DONE, Chat
from vllm_mlx_harmony.verify.trial import Exchange, stream
from vllm_mlx_harmony.verify.values import Failed, require

Message: TypeAlias = dict[str, Any]

WORDS = (
    *("river", "stone", "winter", "garden", "morning", "letter", "window", "mountain", "silver"),
    *("bridge", "paper", "candle", "forest", "harbour", "copper", "summer", "island", "thunder"),
)
TOOL = {
    "type": "function",
    "function": {
        "name": "read_page",
        "description": "The text of a page.",
        "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}},
    },
}


SHORT_ANSWER_TOKENS = 16
"""Tokens of an answer of which only the first counts: the first ones of a gpt-oss are a header."""


@dataclass(slots=True)
class Timed:
    """A streamed answer. ``times`` are seconds from the request to each event with output."""

    times: list[float] = field(default_factory=list)
    prompt: int = 0
    output: int = 0
    cached: int | None = None

    @property
    def first(self) -> float:
        """Seconds to the first token. Raises ``Failed`` if there is none."""
        require(self.times, "an answer without a token")
        return self.times[0]

    @property
    def speed(self) -> float:
        """Tokens per second, from the first token on. Raises ``Failed`` for fewer than two."""
        tokens = self.output or len(self.times)
        several = tokens > 1 and self.times[-1] > self.first
        require(several, "an answer with fewer than two tokens")
        return (tokens - 1) / (self.times[-1] - self.first)


@dataclass(slots=True)
class Client:
    """Chat Completions of one model. ``per_word`` and ``fixed`` are how its prompts are counted."""

    http: httpx.AsyncClient
    model: str
    source: random.Random = field(default_factory=random.Random)
    per_word: float = 1.0
    fixed: int = 0

    async def calibrate(self) -> None:
        """Learns how many tokens the prompts have. Raises ``Failed`` if they are not counted."""
        few, many = [
            await self.answer(self.text(count), SHORT_ANSWER_TOKENS) for count in (50, 250)
        ]
        counted = many.prompt > few.prompt
        require(counted, "usage does not count the tokens of prompts")
        self.per_word = (many.prompt - few.prompt) / 200
        self.fixed = max(0, round(few.prompt - 50 * self.per_word))

    def prompt(self, tokens: int) -> list[Message]:
        """A prompt of about so many tokens, which begins as none before."""
        return self.text(max(1, round((tokens - self.fixed) / self.per_word)))

    def text(self, words: int) -> list[Message]:
        text = " ".join(self.source.choices(WORDS, k=words))
        return [{"role": "user", "content": f"{self.source.random()} {text}"}]

    async def answer(self, messages: Sequence[Message], limit: int, **options: object) -> Timed:
        """The answer to a request, read to its end."""
        timed = Timed()
        async with aclosing(self.running(timed, messages, limit, **options)) as events:
            async for _ in events:
                pass
        return timed

    async def running(
        self, timed: Timed, messages: Sequence[Message], limit: int, **options: object
    ) -> AsyncGenerator[None, None]:
        """Yields at every event with output, after adding it to ``timed``. Raises ``Failed``."""
        body = {"model": self.model, "messages": messages, "max_tokens": limit, "stream": True}
        usage = {"stream_options": {"include_usage": True}}
        whole = {**body, **usage, **options}
        began = time.perf_counter()
        try:
            async with aclosing(stream(self.http, Chat.path, whole, Exchange())) as events:
                async for event in events:
                    if event.data == DONE:
                        break
                    if _read(timed, event.json()):
                        timed.times.append(time.perf_counter() - began)
                        yield
        except (SSEError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Failed(f"not a stream of Chat Completions: {error!r}") from error


def _read(timed: Timed, chunk: Message) -> bool:
    """Whether a chunk has output; its usage is added."""
    require("error" not in chunk, f"an error in the stream: {chunk.get('error')}")
    if usage := chunk.get("usage"):
        timed.prompt, timed.output = usage["prompt_tokens"], usage["completion_tokens"]
        timed.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    names = ("content", "reasoning", "reasoning_content", "tool_calls")
    return any(choice["delta"].get(name) for choice in chunk.get("choices") or () for name in names)


def step(page: int, text: str) -> list[Message]:
    """A call and its result, as the history of a tool loop has them."""
    call = {"name": "read_page", "arguments": f'{{"page":{page}}}'}
    calls = [{"id": f"call_{page}", "type": "function", "function": call}]
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": f"call_{page}", "content": text},
    ]
