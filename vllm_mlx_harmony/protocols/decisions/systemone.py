"""``POST /v1/systemone``, as Ollama, llama.cpp and TypeSafe's Jev have it.

https://docs.ollama.com/api/systemone, https://docs.typesafe.ai
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.core.errors import OutputError, quoted
from vllm_mlx_harmony.core.turn import User
from vllm_mlx_harmony.protocols.decisions.question import (
    MAX_LEVELS,
    MAX_OPTIONS,
    MAX_QUESTIONS,
    Content,
    Option,
    Question,
    confidence,
    likeliest,
    mean,
    true_or_false,
)
from vllm_mlx_harmony.protocols.decisions.request import DecisionRequest, Distributions
from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.request_body import UnsupportedFields, reject_unsupported
from vllm_mlx_harmony.protocols.validation import RequestModel, Variants, validate


class ChoiceQuestion(RequestModel):
    """``criteria``: the names of the options in order, each with its description."""

    type: Literal["choice"]
    instructions: Content
    criteria: Annotated[dict[str, str | None], Field(min_length=2, max_length=MAX_OPTIONS)]


class NoulQuestion(RequestModel):
    """``criteria``: what ``false`` and ``true`` mean."""

    type: Literal["noul"]
    instructions: Content
    criteria: dict[Literal["false", "true"], str] | None = None


class ScoreQuestion(RequestModel):
    """``criteria``: the descriptions of the levels, from the lowest to the highest."""

    type: Literal["score"]
    instructions: Content
    criteria: Annotated[list[str], Field(min_length=2, max_length=MAX_LEVELS)]


class OtherQuestion(RequestModel):
    """Always invalid."""

    type: Literal["choice", "noul", "score"]


AnyQuestion: TypeAlias = ChoiceQuestion | NoulQuestion | ScoreQuestion
_VARIANTS = Variants(
    {"choice": ChoiceQuestion, "noul": NoulQuestion, "score": ScoreQuestion}, OtherQuestion
)


class SystemOneBody(RequestModel):
    model: str = Field(min_length=1)
    state: Content
    questions: Annotated[
        dict[str, Annotated[AnyQuestion, _VARIANTS]],
        Field(min_length=1, max_length=MAX_QUESTIONS),
    ]


UNSUPPORTED: UnsupportedFields = (("images", bool, "the model cannot read images"),)


def read_systemone(body: object) -> DecisionRequest:
    """The request in ``body``. Raises ``RequestError`` naming the field."""
    request = validate(SystemOneBody, body)
    reject_unsupported(body, UNSUPPORTED)
    questions = tuple(_question(*item) for item in request.questions.items())
    return DecisionRequest(request.model, (User(request.state),), questions, _write)


def _question(name: str, question: AnyQuestion) -> Question:
    instructions = question.instructions
    if isinstance(question, NoulQuestion):
        criteria = {str(key): text for key, text in (question.criteria or {}).items()}
        return true_or_false(name, instructions, criteria)
    if isinstance(question, ChoiceQuestion):
        named = (Option(key, key, text or "") for key, text in question.criteria.items())
        return Question(name, "choice", instructions, tuple(named))
    levels = (Option(level, text) for level, text in enumerate(question.criteria))
    return Question(name, "score", instructions, tuple(levels))


def _write(
    model: str, questions: Sequence[Question], distributions: Distributions, usage: Usage
) -> Document:
    """Raises ``OutputError`` for a question without an answer: the API has no refusals."""
    answers = {
        str(question.name): _answer(question, distribution)
        for question, distribution in zip(questions, distributions, strict=True)
    }
    counted = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    return {"model": model, "answers": answers, "usage": counted}


def _answer(question: Question, distribution: Sequence[float]) -> Document:
    if not distribution:
        raise OutputError(f"the model answers {quoted(question.name)} with none of its options")
    if question.kind == "statement":
        return {"type": "noul", "noul": distribution[1]}
    names = [str(option.value) for option in question.options]
    common = {
        "probabilities": dict(zip(names, distribution, strict=True)),
        "confidence": confidence(distribution),
    }
    if question.kind == "choice":
        return {"type": "choice", "choice": likeliest(question, distribution).value, **common}
    legend = {name: option.text for name, option in zip(names, question.options, strict=True)}
    return {"type": "score", "score": mean(distribution), "legend": legend, **common}
