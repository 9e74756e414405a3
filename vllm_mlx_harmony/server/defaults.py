"""What the server was started with and a request may override (semantics A1, A8).

Knows the host's default template options and sampling flags, the model's ``generation_config.json``
and three environment variables.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Any

from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import HostError, RequestError, quoted
from vllm_mlx_harmony.core.turn import (
    BUILTIN_TOOLS,
    NO_THINKING,
    RECOMMENDED,
    Defaults,
    Effort,
    Sampling,
)

OPTIONS = ("reasoning_effort", "enable_thinking", "model_identity", "builtin_tools")
"""What ``--default-chat-template-kwargs`` may say; the rest has no effect."""

DATE_VARIABLE = "VLLM_MLX_HARMONY_DATE"
"""Environment variable: the date in the system message, or ``none`` for no date."""

NONE_VARIABLE = "VLLM_MLX_HARMONY_NONE_EFFORT"
"""Environment variable: the effort that ``none`` is taken for. Not set: no thinking."""

ATTACHMENTS_VARIABLE = "VLLM_MLX_HARMONY_ATTACHMENTS"
"""Environment variable: ``omit`` pictures, audio and files (the default), or ``refuse`` them."""


def sampling(flags: Sampling, model: Mapping[str, Any]) -> Sampling:
    """How ids are drawn where a request does not say.

    A flag (``--default-temperature`` and the like) comes before what the model brings in its
    ``generation_config.json``, and that before what OpenAI recommends for gpt-oss: a server's own
    last resort (temperature 0.7, top_p 0.9) is meant for other models. A value in the file that
    cannot be one counts as none.
    """
    return Sampling(
        temperature=_first(
            flags.temperature, _number(model, "temperature"), RECOMMENDED.temperature
        ),
        top_p=_first(flags.top_p, _number(model, "top_p", 1.0), RECOMMENDED.top_p),
        top_k=_first(flags.top_k, _whole(model, "top_k")),
        min_p=_first(flags.min_p, _number(model, "min_p", 1.0)),
        presence_penalty=flags.presence_penalty,
        repetition_penalty=_first(
            flags.repetition_penalty, _number(model, "repetition_penalty") or None
        ),
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _number(model: Mapping[str, Any], name: str, largest: float = 100.0) -> float | None:
    value = model.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= largest else None


def _whole(model: Mapping[str, Any], name: str) -> int | None:
    value = _number(model, name, float(1 << 31))
    return int(value) if value is not None else None


def read(options: Mapping[str, Any]) -> Defaults:
    """What ``--default-chat-template-kwargs`` and the environment say.

    Raises ``HostError`` naming the option that is not what it has to be.
    """
    none_effort = _none_effort()
    try:
        effort, thinking = Defaults(none_effort=none_effort).reasoning(
            ("reasoning_effort", options.get("reasoning_effort")),
            ("enable_thinking", NO_THINKING if options.get("enable_thinking") is False else None),
        )
    except RequestError as error:
        raise _wrong(error.message) from error
    identity, builtin = options.get("model_identity"), options.get("builtin_tools")
    if not (identity is None or isinstance(identity, str)):
        raise _wrong("model_identity must be a string")
    if builtin is None:
        builtin = []
    if not isinstance(builtin, list) or any(name not in BUILTIN_TOOLS for name in builtin):
        raise _wrong(f"builtin_tools must be a list of {' and '.join(BUILTIN_TOOLS)}")
    return Defaults(
        effort=effort,
        identity=identity,
        date=current_date(),
        builtin_tools=tuple(dict.fromkeys(builtin)),
        thinking=thinking,
        none_effort=none_effort,
        attachments=_attachments(),
    )


def _attachments() -> Attachments:
    word = os.environ.get(ATTACHMENTS_VARIABLE, "").lower()
    try:
        return Attachments(word or Attachments.OMIT)
    except ValueError as error:
        known = " or ".join(each.value for each in Attachments)
        problem = f"{ATTACHMENTS_VARIABLE}: must be {known}, not {quoted(word)}"
        raise HostError(problem) from error


def _none_effort() -> Effort | None:
    word = os.environ.get(NONE_VARIABLE, "").lower()
    if word in ("", NO_THINKING):
        return None
    try:
        return Effort.parse(word, param=NONE_VARIABLE)
    except RequestError as error:
        raise HostError(error.message) from error


def _wrong(problem: str) -> HostError:
    return HostError(f"--default-chat-template-kwargs: {problem}")


def current_date() -> str | None:
    """The date of the system message as ``YYYY-MM-DD``: pinned, or today; ``None`` for none."""
    pinned = os.environ.get(DATE_VARIABLE, "")
    if pinned.lower() == "none":
        return None
    return pinned or datetime.date.today().isoformat()
