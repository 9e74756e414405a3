"""Log probabilities as OpenAI's two APIs write them, and the limits of what may be requested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from vllm_mlx_harmony.core.deltas import TextLogprob
from vllm_mlx_harmony.protocols.events import Document

TopLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=20)]
"""How many of the likeliest tokens are returned."""


def entries(logprobs: Iterable[TextLogprob], no_bytes: Any = None) -> list[Document]:
    """An entry for each token; ``no_bytes`` stands for the bytes of a control token."""

    def entry(each: TextLogprob) -> Document:
        content = no_bytes if each.content is None else list(each.content)
        return {"token": each.text, "logprob": each.logprob, "bytes": content}

    return [{**entry(each), "top_logprobs": [*map(entry, each.top)]} for each in logprobs]
