"""Computes prompts before the first request, for all tenants (``--warm-prompts``).

The file has a list of conversations, each a list of Chat Completions messages, as for vllm-mlx.
What is computed is the beginning that all prompts with these messages have.
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
from typing import Any, TypeAlias

from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.engine_api.engine import (
    SHARED_TENANT,
    Engine,
    GenerationRequest,
    GenerationSettings,
)
from vllm_mlx_harmony.protocols import chat

logger = logging.getLogger(__name__)

Messages: TypeAlias = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What was computed: conversations and ids; how many were ``skipped``, and the seconds."""

    conversations: int
    skipped: int
    tokens: int
    seconds: float


def read(path: str) -> list[Messages]:
    """The conversations in a file. Raises ``HostError``."""
    try:
        document = json.loads(Path(path).expanduser().read_bytes())
    except (OSError, ValueError) as error:
        raise HostError(f"--warm-prompts: {path} cannot be read: {error}") from error
    if not isinstance(document, list) or not all(_is_conversation(each) for each in document):
        raise HostError(f"--warm-prompts: {path} is not a list of lists of messages")
    return document


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


async def warm_up(
    engine: Engine,
    conversations: Sequence[Messages],
    defaults: Defaults,
    renderer: Callable[..., Any],
) -> WarmUp:
    """Computes the beginnings of all ``conversations``. Skips those that fail."""
    started, tokens, skipped = perf_counter(), 0, 0
    settings = GenerationSettings(max_tokens=0, temperature=0.0, top_p=1.0)
    for index, messages in enumerate(conversations):
        try:
            prompt = beginning(messages, defaults, renderer)
            request = GenerationRequest(prompt, settings, SHARED_TENANT)
            async with aclosing(engine.generate(request)) as steps:
                async for _ in steps:
                    pass
            tokens += len(prompt)
        except HarmonyFailure as error:
            logger.warning("warm-up prompt %d was skipped: %s", index, error)
            skipped += 1
    return WarmUp(len(conversations) - skipped, skipped, tokens, perf_counter() - started)


def beginning(
    messages: Messages, defaults: Defaults, renderer: Callable[..., Any]
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
