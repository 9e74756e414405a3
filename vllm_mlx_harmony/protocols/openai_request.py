"""What both of OpenAI's APIs ask alike: template options, sampling, and what neither can have.

Knows fields of the same name and meaning. Refuses to know which others an API has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import BuiltinTool, Sampling
from vllm_mlx_harmony.protocols.validation import UNSUPPORTED, Wire

UnsupportedFields: TypeAlias = "tuple[tuple[str, Callable[[Any], object], str], ...]"
"""Fields that cannot be served, as ignoring them would change the answer: the name, for which
values (``None`` never is one), and why."""


class TemplateOptions(Wire):
    """``chat_template_kwargs``, a field of vLLM's."""

    reasoning_effort: Any = None
    model_identity: str | None = None
    builtin_tools: list[BuiltinTool] | None = None


class SamplingFields(Protocol):
    """How the next id is chosen, as both bodies have it."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None


def given(_: object) -> bool:
    """For ``UnsupportedFields``: any value at all."""
    return True


def reject_unsupported(body: object, fields: UnsupportedFields) -> None:
    """Raises ``RequestError`` naming the first of ``fields`` that ``body``, an object, gives.

    ``body`` is the parsed JSON: fields that are read for nothing else are not in any model.
    """
    for field, unsupported, why in fields:
        value = body.get(field) if isinstance(body, dict) else None
        if value is not None and unsupported(value):
            raise RequestError(f"{field}: {why}", param=field, code=UNSUPPORTED)


def sampling(body: SamplingFields, logit_bias: Iterable[tuple[int, float]] = ()) -> Sampling:
    """The sampling that ``body`` asks for."""
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=0 if body.top_k == -1 else body.top_k,  # -1 is vLLM's word for "all of them"
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=body.seed,
        logit_bias=tuple(logit_bias),
    )
