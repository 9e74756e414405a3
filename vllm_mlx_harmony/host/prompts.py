"""Prompts for vllm-mlx's own chat messages, rendered as those of our routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from fastapi import HTTPException

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.host import entry_points
from vllm_mlx_harmony.host.server_globals import server
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.server import defaults

Messages: TypeAlias = Sequence[Any]


def prompt_ids(
    messages: Messages, tools: list[dict[str, Any]] | None, options: dict[str, Any] | None
) -> tuple[int, ...]:
    """The prompt of vllm-mlx's ``messages`` and ``tools``; ``options`` are its template options.

    Raises HTTPException 400, which vllm-mlx's routes return, for an invalid message.
    """
    known = ("reasoning_effort", "model_identity", "builtin_tools")
    body = {
        "model": "host",
        "messages": [  # sometimes pydantic models
            each.model_dump(exclude_none=True) if hasattr(each, "model_dump") else each
            for each in messages
        ],
        "tools": tools or None,
        "chat_template_kwargs": {name: (options or {}).get(name) for name in known},
    }
    options_given = defaults.read(server()._default_chat_template_kwargs or {})
    try:
        turn = chat.read(body, options_given).turn
        ids: tuple[int, ...] = entry_points.in_use().renderer(turn).ids
    except RequestError as error:
        raise HTTPException(status_code=error.status, detail=error.message) from error
    return ids
