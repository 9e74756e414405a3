"""The parameters that every API has."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import Field

from vllm_mlx_harmony.core.turn import Sampling
from vllm_mlx_harmony.protocols.validation import Wire


class RequestBody(Wire):
    """Base of a request body.

    Subclasses may add other fields of ``Sampling``, which are then read as well.
    """

    model: str = Field(min_length=1)
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)


def sampling(body: RequestBody, **others: Any) -> Sampling:
    """The sampling that ``body`` asks for; ``others`` are its fields that need a conversion."""
    given = {name: getattr(body, name) for name in _NAMES & type(body).model_fields.keys()}
    if body.top_k == -1:  # vLLM's value for "all tokens"
        given["top_k"] = 0
    return Sampling(**given, **others)


_NAMES = {each.name for each in fields(Sampling)} - {"logit_bias", "top_logprobs"}
