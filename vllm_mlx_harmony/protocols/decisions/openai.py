"""``POST /v1/decisions``, OpenAI's (a public beta), apart from its input.

https://platform.openai.com/docs/api-reference/decisions; the types are those of openai-python
(``types/decision.py``). The input has the form of that of Responses, whose reader reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.core.turn import Message
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
from vllm_mlx_harmony.protocols.validation import (
    RequestModel,
    Variants,
    invalid,
    string_as_list,
    unsupported,
    validate,
)


class TextPart(RequestModel):
    type: Literal["input_text"]
    text: str


class JsonPart(RequestModel):
    type: Literal["input_json"]
    data: Content


class ImagePart(RequestModel):
    type: Literal["input_image"]


class OtherPart(RequestModel):
    """Always invalid."""

    type: Literal["input_text", "input_json", "input_image"]


Parts: TypeAlias = Annotated[
    list[
        Annotated[
            TextPart | JsonPart | ImagePart,
            Variants(
                {"input_text": TextPart, "input_json": JsonPart, "input_image": ImagePart},
                OtherPart,
            ),
        ]
    ],
    string_as_list("parts", type="input_text"),
]


class ChoiceValue(RequestModel):
    value: str | bool
    description: str | None = None


class Level(RequestModel):
    label: str
    description: str | None = None


class Predicate(RequestModel):
    type: Literal["predicate"]
    instructions: Parts
    name: str | None = None


class Choice(RequestModel):
    type: Literal["choice"]
    instructions: Parts
    choices: Annotated[list[ChoiceValue], Field(min_length=2, max_length=MAX_OPTIONS)]
    name: str | None = None


class Score(RequestModel):
    type: Literal["score"]
    instructions: Parts
    levels: Annotated[list[Level], Field(min_length=2, max_length=MAX_LEVELS)]
    name: str | None = None


class OtherQuestion(RequestModel):
    """Always invalid."""

    type: Literal["predicate", "choice", "score"]


AnyQuestion: TypeAlias = Predicate | Choice | Score


class DecisionBody(RequestModel):
    model: str = Field(min_length=1)
    input: Any
    questions: Annotated[
        list[
            Annotated[
                AnyQuestion,
                Variants({"predicate": Predicate, "choice": Choice, "score": Score}, OtherQuestion),
            ]
        ],
        Field(min_length=1, max_length=MAX_QUESTIONS),
    ]


def read_openai(
    body: object, conversation: Callable[[Mapping[str, Any]], Iterable[Message]]
) -> DecisionRequest:
    """The request in ``body``. Raises ``RequestError`` naming the field.

    ``conversation`` reads the input: it gets a request of Responses, and returns its messages.
    """
    request = validate(DecisionBody, body)
    messages = conversation({"model": request.model, "input": _as_text(request.input)})
    questions = tuple(
        _question(question, f"questions[{at}]") for at, question in enumerate(request.questions)
    )
    return DecisionRequest(request.model, tuple(messages), questions, _write)


def _as_text(value: Any) -> Any:
    """The input with its JSON parts as text, which Responses does not have."""
    if not isinstance(value, list):
        return value
    return [
        {**item, "content": [*map(_part, item["content"])]}
        if isinstance(item, dict) and isinstance(item.get("content"), list)
        else item
        for item in value
    ]


def _part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "input_json":
        return {"type": "input_text", "text": validate(JsonPart, part).data}
    return part


def _question(question: AnyQuestion, where: str) -> Question:
    instructions = _instructions(question.instructions, where)
    if isinstance(question, Predicate):
        return true_or_false(question.name, instructions)
    if isinstance(question, Score):
        levels = (
            Option(level, choice.label, choice.description or "")
            for level, choice in enumerate(question.levels)
        )
        return Question(question.name, "score", instructions, tuple(levels))
    # A string and a boolean with the same text are distinct.
    if len({(type(choice.value), choice.value) for choice in question.choices}) < len(
        question.choices
    ):
        raise invalid(f"{where}.choices", f"{where}.choices must be unique")
    named = (
        Option(choice.value, _text(choice.value), choice.description or "")
        for choice in question.choices
    )
    return Question(question.name, "choice", instructions, tuple(named))


def _text(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _instructions(parts: Parts, where: str) -> str:
    texts = []
    for at, part in enumerate(parts):
        if isinstance(part, ImagePart):
            field = f"{where}.instructions[{at}]"
            raise unsupported(field, f"{field}: the model cannot read images")
        texts.append(part.text if isinstance(part, TextPart) else part.data)
    return "\n".join(texts)


def _write(
    model: str, questions: Sequence[Question], distributions: Distributions, usage: Usage
) -> Document:
    return {
        "model": model,
        "answers": [*map(_answer, questions, distributions)],
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def _answer(question: Question, distribution: Sequence[float]) -> Document:
    """A question that the model answers with none of the options is refused."""
    if not distribution:
        return {"type": "refusal", "name": question.name}
    if question.kind == "statement":
        return {"type": "predicate", "name": question.name, "probability": distribution[1]}
    common = {"name": question.name, "confidence": confidence(distribution)}
    rows = zip(question.options, distribution, strict=True)
    if question.kind == "choice":
        return {
            "type": "choice",
            **common,
            "choice": likeliest(question, distribution).value,
            "probabilities": [{"value": choice.value, "probability": p} for choice, p in rows],
        }
    return {
        "type": "score",
        **common,
        "score": mean(distribution),
        "probabilities": [
            {"value": choice.value, "label": choice.text, "probability": p} for choice, p in rows
        ],
    }
