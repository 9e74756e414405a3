"""The fields of a request body that all APIs share, and those that both of OpenAI's do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeAlias

from pydantic import Field

from vllm_mlx_harmony.core.text_limits import CONTEXT_TOKENS
from vllm_mlx_harmony.core.turn import BuiltinTool, Sampling
from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.validation import RequestModel, Seed, TopLogprobs, unsupported


class RequestBody(RequestModel):
    """Base of a request body.

    Subclasses may add other fields of ``Sampling``, which are then read as well.
    """

    model: str = Field(min_length=1)
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)


def sampling(body: RequestBody, **converted: Any) -> Sampling:
    """The sampling that ``body`` asks for; ``converted`` are its fields that need a conversion."""
    values = {name: getattr(body, name) for name in _NAMES & type(body).model_fields.keys()}
    if body.top_k == -1:  # vLLM's value for "all tokens"
        values["top_k"] = 0
    return Sampling(**values, **converted)


_NAMES = {field.name for field in fields(Sampling)} - {"logit_bias", "top_logprobs"}


# --- OpenAI's APIs, with the extensions of vLLM.

UnsupportedFields: TypeAlias = "tuple[tuple[str, Callable[[Any], object], str], ...]"
"""Fields that are rejected because ignoring them would change the answer: the name, a predicate for
the values that are rejected (null never is), and the reason."""


class TemplateOptions(RequestModel):
    """``chat_template_kwargs``, an extension of vLLM."""

    reasoning_effort: object = None
    model_identity: str | None = None
    builtin_tools: list[BuiltinTool] | None = None


class JsonSchema(RequestModel):
    """The schema of an answer, with its name and description."""

    name: str | None = None
    description: str | None = None
    json_schema: Document | None = Field(default=None, alias="schema")
    strict: bool | None = None


class OpenAIBody(RequestBody):
    """Base of a request body of either API."""

    timeout: float | None = Field(default=None, gt=0, lt=1e9)
    parallel_tool_calls: bool | None = None
    top_logprobs: TopLogprobs | None = None
    reasoning_effort: object = None
    thinking_token_budget: int | None = Field(default=None, ge=-1)
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None

    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    seed: Seed | None = None

    @property
    def fewest_tokens(self) -> int:
        """The tokens before which the turn cannot end: with vLLM's ``ignore_eos``, which
        benchmarks set, all that ``max_tokens`` allows."""
        return CONTEXT_TOKENS if self.ignore_eos else self.min_tokens or 0


def any_value(_: object) -> bool:
    """For ``UnsupportedFields``: any value at all."""
    return True


def reject_unsupported(body: object, rejected: UnsupportedFields) -> None:
    """Raises ``RequestError`` naming the first of ``rejected`` that ``body``, an object, gives.

    ``body`` is the parsed JSON: fields that are read for nothing else are not in any model.
    """
    for field, rejects, why in rejected:
        value = body.get(field) if isinstance(body, dict) else None
        if value is not None and rejects(value):
            raise unsupported(field, f"{field}: {why}")
