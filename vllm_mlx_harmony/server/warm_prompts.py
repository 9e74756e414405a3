"""``--warm-prompts``: computes how prompts begin before the first request, for all tenants.

The file is vllm-mlx's: a JSON list of conversations, each a list of messages as in Chat
Completions. What is computed is what all prompts with these messages begin with, whatever the last
user message is. A server is ready once they are in the prefix cache.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError
from vllm_mlx_harmony.core.render import Rendered
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.engine_api.engine import Engine, GenerationRequest, GenerationSettings
from vllm_mlx_harmony.protocols import chat

logger = logging.getLogger(__name__)

Messages: TypeAlias = Sequence[Mapping[str, object]]

FLAG = "--warm-prompts"

_SETTINGS = GenerationSettings(max_tokens=0, temperature=0.0, top_p=1.0)


@dataclass(frozen=True, slots=True)
class Warmed:
    """How many conversations were computed and skipped, the tokens, and the seconds."""

    computed: int
    skipped: int
    tokens: int
    seconds: float


def read(path: str) -> list[Messages]:
    """The conversations of a file. Raises ``HostError`` if it has none."""
    try:
        found = json.loads(Path(path).expanduser().read_bytes())
    except (OSError, ValueError) as error:
        raise HostError(f"{FLAG}: {path} cannot be read: {error}") from error
    if not (isinstance(found, list) and found and all(map(_is_conversation, found))):
        raise HostError(f"{FLAG}: {path} must be a list of lists of messages")
    return found


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) for m in value)


async def warm(
    engine: Engine,
    prompts: Sequence[Messages],
    defaults: Defaults,
    renderer: Callable[..., Rendered],
    tenant: str,
) -> Warmed:
    """Computes the beginnings of ``prompts`` for ``tenant``. A prompt that fails is skipped with a
    warning."""
    started, tokens, skipped = perf_counter(), 0, 0
    for index, messages in enumerate(prompts):
        try:
            prompt = beginning(messages, defaults, renderer)
            request = GenerationRequest(prompt, _SETTINGS, tenant)
            async with aclosing(engine.generate(request)) as steps:
                async for _ in steps:
                    pass
            tokens += len(prompt)
        except HarmonyFailure as error:
            logger.warning("warm-up prompt %d was skipped: %s", index, error)
            skipped += 1
    return Warmed(len(prompts) - skipped, skipped, tokens, perf_counter() - started)


def beginning(
    messages: Messages, defaults: Defaults, renderer: Callable[..., Rendered]
) -> tuple[int, ...]:
    """The ids that all prompts with ``messages`` begin with, whatever the last user message is.

    Raises ``RequestError`` for an invalid message.
    """
    before = messages[:-1] if messages and messages[-1].get("role") == "user" else messages
    prompts = []
    for word in ("Alpha", "Bravo"):
        body = {"model": "host", "messages": [*before, {"role": "user", "content": word}]}
        prompts.append(renderer(chat.read(body, defaults).turn).ids)
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*prompts, strict=False))
    return tuple(token for token, _ in pairs)
