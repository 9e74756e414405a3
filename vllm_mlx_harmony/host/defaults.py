"""What the server was started with and a request may override (semantics A1, A8).

Knows the host's default template options and one environment variable.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from vllm_mlx_harmony.core.errors import HostError, RequestError
from vllm_mlx_harmony.core.turn import Defaults, Effort

DATE_VARIABLE = "VLLM_MLX_HARMONY_DATE"
"""Environment variable: the date in the system message, or ``none`` for no date."""


def defaults() -> Defaults:
    """The defaults in force now: the date changes at midnight.

    Raises ``HostError`` when ``--default-chat-template-kwargs`` has an unknown effort.
    """
    from vllm_mlx import server

    options: dict[str, Any] = server._default_chat_template_kwargs or {}
    return Defaults(
        effort=_effort(options.get("reasoning_effort")),
        identity=options.get("model_identity"),
        date=current_date(),
        builtin_tools=tuple(options.get("builtin_tools") or ()),
    )


def _effort(word: object) -> Effort:
    if word is None:
        return Defaults().effort
    try:
        return Effort.parse(word)
    except RequestError as error:
        raise HostError(f"--default-chat-template-kwargs: {error.message}") from error


def current_date() -> str | None:
    """The date of the system message as ``YYYY-MM-DD``: pinned, or today; ``None`` for none."""
    pinned = os.environ.get(DATE_VARIABLE, "")
    if pinned.lower() == "none":
        return None
    return pinned or datetime.date.today().isoformat()
