"""The server's defaults for what requests do not set (semantics A1, A8)."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TypeVar

from vllm_mlx_harmony.core.errors import HostError, RequestError
from vllm_mlx_harmony.core.turn import (
    BUILTIN_TOOLS,
    NO_THINKING,
    RECOMMENDED,
    Defaults,
    Sampling,
)
from vllm_mlx_harmony.server.settings import NO_DATE, TODAY, ServerSettings

T = TypeVar("T")

OPTIONS = ("reasoning_effort", "enable_thinking", "model_identity", "builtin_tools")
"""Options read from ``--default-chat-template-kwargs``. Others have no effect."""


def read_sampling(flags: Sampling, model: Mapping[str, object]) -> Sampling:
    """The sampling settings of requests that do not set them.

    A flag of the server (``--default-temperature`` and the like) comes first, then the model's
    ``generation_config.json``, then what OpenAI recommends for gpt-oss. The host's own last resort
    (temperature 0.7, top_p 0.9) is meant for other models. Invalid values in the file are ignored.
    """

    def number(name: str, largest: float = 100.0) -> float | None:
        value = model.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if 0 <= value <= largest else None

    top_k = number("top_k", float(1 << 31))
    return Sampling(
        temperature=_first(flags.temperature, number("temperature"), RECOMMENDED.temperature),
        top_p=_first(flags.top_p, number("top_p", 1.0), RECOMMENDED.top_p),
        top_k=_first(flags.top_k, None if top_k is None else int(top_k)),
        min_p=_first(flags.min_p, number("min_p", 1.0)),
        presence_penalty=flags.presence_penalty,
        repetition_penalty=_first(flags.repetition_penalty, number("repetition_penalty") or None),
    )


def _first(*values: T | None) -> T | None:
    return next((value for value in values if value is not None), None)


def read(options: Mapping[str, object], settings: ServerSettings) -> Defaults:
    """The defaults in ``--default-chat-template-kwargs`` and in the settings, today.

    Raises ``HostError`` for invalid options.
    """
    try:
        effort, thinking = Defaults(none_effort=settings.none_effort).reasoning(
            ("reasoning_effort", options.get("reasoning_effort")),
            ("enable_thinking", NO_THINKING if options.get("enable_thinking") is False else None),
        )
        identity, builtin = options.get("model_identity"), options.get("builtin_tools")
        if not (identity is None or isinstance(identity, str)):
            raise RequestError("model_identity must be a string")
        builtin = [] if builtin is None else builtin
        if not isinstance(builtin, list) or any(name not in BUILTIN_TOOLS for name in builtin):
            raise RequestError(f"builtin_tools must be a list of {' and '.join(BUILTIN_TOOLS)}")
    except RequestError as error:
        raise HostError(f"--default-chat-template-kwargs: {error.message}") from error
    return Defaults(
        effort=effort,
        identity=identity,
        date=current_date(settings.date),
        builtin_tools=tuple(dict.fromkeys(builtin)),
        thinking=thinking,
        none_effort=settings.none_effort,
        attachments=settings.attachments,
        reasoning_field=settings.reasoning_field,
    )


def current_date(configured: str) -> str | None:
    """The date of the system message as ``YYYY-MM-DD``; ``configured`` as in the settings."""
    if configured == TODAY:
        return datetime.date.today().isoformat()
    return None if configured == NO_DATE else configured
