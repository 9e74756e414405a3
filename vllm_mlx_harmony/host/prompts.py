"""vllm-mlx's own prompt building, for Harmony engines: its messages rendered as ours are.

Knows what vllm-mlx's engines hand in and expect back. Our routes never come by here: this is for
whatever else in vllm-mlx builds a prompt (its own chat path).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import wraps
from itertools import groupby
from typing import Any, TypeAlias

from fastapi import HTTPException

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.host import entry_points
from vllm_mlx_harmony.host.models import is_harmony
from vllm_mlx_harmony.host.server_globals import server
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.server import defaults

Messages: TypeAlias = Sequence[Any]

_LOOKALIKE = re.compile(r"<(?=\|\w+\|>)")
_BROKEN = "<\u200b"


class PromptText(str):
    """A prompt as the text vllm-mlx wants, with the ``ids`` it stands for.

    vllm-mlx encodes the text again. Written-out control tokens become control tokens by that;
    what a user typed must not: a zero-width space breaks what looks like one. Whoever can take
    the ``ids`` has the prompt as it is.
    """

    ids: tuple[int, ...]

    @classmethod
    def of(cls, ids: Sequence[int]) -> PromptText:
        """The prompt of ``ids``."""
        pieces = []
        for control, run in groupby(ids, vocab.CONTROL.__contains__):
            piece = vocab.encoding().decode(list(run))
            pieces.append(piece if control else _LOOKALIKE.sub(_BROKEN, piece))
        text = cls("".join(pieces))
        text.ids = tuple(ids)
        return text


def prompt_text(
    messages: Messages, tools: list[dict[str, Any]] | None, options: dict[str, Any] | None
) -> PromptText:
    """The prompt of vllm-mlx's ``messages`` and ``tools``; ``options`` are its template options.

    Raises HTTPException 400, which vllm-mlx's routes pass on, for what cannot be rendered.
    """
    try:
        return PromptText.of(prompt_ids(messages, tools, options))
    except RequestError as error:
        raise HTTPException(status_code=error.status, detail=error.message) from error


def prompt_ids(
    messages: Messages, tools: list[dict[str, Any]] | None, options: dict[str, Any] | None
) -> tuple[int, ...]:
    known = ("reasoning_effort", "model_identity", "builtin_tools")
    body = {
        "model": "host",
        "messages": [  # pydantic models, at some places
            each.model_dump(exclude_none=True) if hasattr(each, "model_dump") else each
            for each in messages
        ],
        "tools": tools or None,
        "chat_template_kwargs": {name: (options or {}).get(name) for name in known},
    }
    options_given = defaults.read(server()._default_chat_template_kwargs or {})
    ids: tuple[int, ...] = entry_points.in_use().renderer(chat.read(body, options_given).turn).ids
    return ids


# --- What replaces functions of vllm-mlx: each takes the original and gives its replacement.


def simple_render_chat_prompt(original: Callable[..., Any]) -> Callable[..., Any]:
    """``SimpleEngine._render_chat_prompt``: prompt, template options, messages for the template.

    The last two serve a cache that renders the chat template: there is none for a Harmony prompt.
    """

    @wraps(original)
    def render(
        self: Any,
        messages: Messages,
        template_tools: list[dict[str, Any]] | None,
        chat_template_kwargs: dict[str, Any],
        enable_thinking: bool | None,
    ) -> Any:
        if not is_harmony(self.tokenizer):
            return original(self, messages, template_tools, chat_template_kwargs, enable_thinking)
        return prompt_text(messages, template_tools, chat_template_kwargs), None, None

    return render


def batched_apply_chat_template(original: Callable[..., Any]) -> Callable[..., Any]:
    """``BatchedEngine._apply_chat_template``: the prompt."""

    @wraps(original)
    def apply(  # noqa: PLR0917 - vllm-mlx's own signature
        self: Any,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        num_images: int = 0,
        num_audios: int = 0,
        chat_template_kwargs: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
    ) -> Any:
        if not is_harmony(self.tokenizer):
            media = {"num_images": num_images, "num_audios": num_audios}
            options = {
                "chat_template_kwargs": chat_template_kwargs,
                "enable_thinking": enable_thinking,
            }
            return original(self, messages, tools, **media, **options)
        return prompt_text(messages, tools, chat_template_kwargs)

    return apply


def simple_chat(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """``SimpleEngine.chat``: always by way of ``stream_chat``, whose prompt is ours.

    The original has a path of its own for requests without tools: the model's chat template. The
    last output of a stream has the whole text; it is cleaned as vllm-mlx does.
    """

    @wraps(original)
    async def answer(self: Any, messages: Messages, *args: Any, **kwargs: Any) -> Any:
        if not self._loaded:
            await self.start()
        if not is_harmony(self.tokenizer):
            return await original(self, messages, *args, **kwargs)
        from vllm_mlx.api.utils import clean_output_text
        from vllm_mlx.engine.base import GenerationOutput

        last = GenerationOutput(text="")
        async for output in self.stream_chat(messages, *args, **kwargs):
            last = output
        return replace(last, text=clean_output_text(last.text))

    return answer
