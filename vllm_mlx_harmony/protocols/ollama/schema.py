"""Ollama's API: the models of the request bodies, and the parameters that are rejected.

https://github.com/ollama/ollama/blob/main/docs/api.md, and the types of its official clients.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.request_body import UnsupportedFields
from vllm_mlx_harmony.protocols.validation import RequestModel, Seed, StopStrings, TopLogprobs

# --- Fields are optional, and null is the same as absent, unless a model says otherwise.


def _unlimited(value: object) -> object:
    """``None`` for the values of ``num_predict`` that mean no limit: -1, and -2, all that the
    context holds."""
    return None if value in (-1, -2) and not isinstance(value, bool) else value


def _as_strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _random(value: object) -> object:
    """``None`` for the seed -1, Ollama's default."""
    return None if value == -1 and not isinstance(value, bool) else value


class Options(RequestModel):
    num_predict: Annotated[
        Annotated[int, Field(ge=1)] | None,
        BeforeValidator(_unlimited),
    ] = None
    stop: Annotated[StopStrings | None, BeforeValidator(_as_strings)] = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: Annotated[Seed | None, BeforeValidator(_random)] = None
    repeat_penalty: float | None = Field(default=None, gt=0)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)


class Function(RequestModel):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: Document | None = None


class OllamaTool(RequestModel):
    type: Literal["function"] | None = None
    function: Function


class CalledFunction(RequestModel):
    name: str = Field(min_length=1)
    arguments: object = None


class OllamaCall(RequestModel):
    """A call in the history. The official Python client leaves the id out."""

    id: str | None = None
    function: CalledFunction


class OllamaMessage(RequestModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[object] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(RequestModel):
    """What both kinds of requests have. A stream is the default."""

    model: str = Field(min_length=1)
    stream: bool | None = None
    format: object = None
    think: bool | str | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    timeout: float | None = Field(default=None, gt=0, lt=1e9)


class ChatBody(OllamaBody):
    """The body of ``POST /api/chat``: the fields that are read."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class GenerateBody(OllamaBody):
    """The body of ``POST /api/generate``: the fields that are read."""

    prompt: str | None = None
    system: str | None = None
    images: list[object] | None = None


# --- Unsupported parameters that would change the answer: name, rejected values, reason.

_IMAGES = "not supported: the model generates text only"

UNSUPPORTED_FIELDS: UnsupportedFields = (
    ("suffix", bool, "not supported: the model does not fill in the middle"),
    ("template", bool, "not supported: prompts always have the Harmony format"),
    ("raw", bool, "not supported: prompts always have the Harmony format"),
    ("context", bool, "not available: /api/chat takes the history as messages"),
    ("width", bool, _IMAGES),
    ("height", bool, _IMAGES),
    ("steps", bool, _IMAGES),
)

_SAMPLER = "not supported"

UNSUPPORTED_OPTIONS: UnsupportedFields = (
    ("mirostat", bool, _SAMPLER),
    ("tfs_z", lambda value: value != 1, _SAMPLER),
    ("typical_p", lambda value: value != 1, _SAMPLER),
)
"""The same for fields of ``options``."""
