"""Prompts for vllm-mlx's own chat messages, rendered as our routes render them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from fastapi import HTTPException
from pydantic import BaseModel

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.host import entry_points
from vllm_mlx_harmony.host.server_globals import server
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.server import defaults

Json: TypeAlias = Mapping[str, object]
Messages: TypeAlias = Sequence[Json | BaseModel]


def prompt_ids(
    messages: Messages, tools: Sequence[Json] | None, options: Json | None
) -> tuple[int, ...]:
    """The prompt of vllm-mlx's ``messages`` and ``tools``; ``options`` are its template options.

    Raises HTTPException 400, which vllm-mlx's routes return, for an invalid message.
    """
    known = ("reasoning_effort", "model_identity", "builtin_tools")
    body = {
        "model": "host",
        "messages": [
            each.model_dump(exclude_none=True) if isinstance(each, BaseModel) else each
            for each in messages
        ],
        "tools": tools or None,
        "chat_template_kwargs": {name: (options or {}).get(name) for name in known},
    }
    given = defaults.read(server()._default_chat_template_kwargs or {})
    try:
        return entry_points.in_use().renderer(chat.read(body, given).turn).ids
    except RequestError as error:
        raise HTTPException(status_code=error.status, detail=error.message) from error
