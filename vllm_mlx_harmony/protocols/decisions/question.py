"""``Question``: a question with a closed list of answers, and the answer as probabilities.

A language model decides by *scoring*: the options get labels, which are single tokens, and the
probability of an option is that of its label as the first token of the answer, among the labels
alone. Nothing is generated. How sure a model *writes* that it is, and how often it is right when it
gives an option 0.8, are two other things: the probabilities are the model's own, not calibrated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from math import exp, log
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from vllm_mlx_harmony.core.deltas import TokenLogprob

MAX_QUESTIONS = 64
"""Questions of a request: each has a prompt of its own, which begins with the same input."""

MAX_OPTIONS = 255
"""As OpenAI's API."""

MAX_LEVELS = 10
"""Levels of a score, as in OpenAI's API and Jev's."""

INSTRUCTIONS = (
    "The conversation ends with a question about everything before it, and a list of options. "
    "Answer with the label of exactly one option, and with nothing else."
)

Kind: TypeAlias = Literal["choice", "score", "statement"]
"""``statement``: whether it is true, OpenAI's ``predicate`` and System One's ``noul``."""


@dataclass(frozen=True, slots=True)
class Option:
    """``value`` is what the answer contains: a name, for scores the level as a number."""

    value: str | bool | int
    text: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """``options`` are at least two, those of a score from the lowest level to the highest."""

    name: str | None
    kind: Kind
    instructions: str
    options: tuple[Option, ...]

    def text(self, labels: Sequence[str]) -> str:
        """The message of the user that asks it, with a label for each option."""
        lines = [self.instructions, "", "Options:"]
        for label, option in zip(labels, self.options, strict=False):
            description = f": {option.description}" if option.description else ""
            lines.append(f"{label}. {option.text}{description}")
        if self.kind == "score":
            lines.append("The options are ordered, from the lowest to the highest.")
        return "\n".join(lines)


def true_or_false(
    name: str | None, instructions: str, descriptions: Mapping[str, str] | None = None
) -> Question:
    """The question whether a statement is true."""
    options = (
        Option(value, text, (descriptions or {}).get(text, ""))
        for value, text in ((False, "false"), (True, "true"))
    )
    question = f"Is the following true? If it is a question, is its answer yes?\n{instructions}"
    return Question(name, "statement", question, tuple(options))


def probabilities(first: TokenLogprob, labels: Iterable[int]) -> list[float]:
    """The probabilities of the options, whose ``labels`` are ids; empty if no label is likely.

    ``first`` is the first token of the answer. A label that is not among the likeliest tokens has
    probability 0: it is less likely than all of them.
    """
    found = {**dict(first.top), first.token: first.logprob}
    weights = [exp(found[label]) if label in found else 0.0 for label in labels]
    total = sum(weights)
    return [weight / total for weight in weights] if total else []


def confidence(distribution: Sequence[float]) -> float:
    """1 if one option has all probability, 0 if all have the same: 1 minus the entropy in relation
    to its maximum, as Ollama's."""
    entropy = -sum(share * log(share) for share in distribution if share)
    return min(1.0, max(0.0, 1 - entropy / log(len(distribution))))


def mean(distribution: Sequence[float]) -> float:
    """The expected level, from 0."""
    return sum(level * share for level, share in enumerate(distribution))


def likeliest(question: Question, distribution: Sequence[float]) -> Option:
    return question.options[distribution.index(max(distribution))]


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (dict, list)):
        return dumps(value, ensure_ascii=False)
    raise PydanticCustomError("content_type", "must be a string, an object or a list")


Content: TypeAlias = Annotated[str, BeforeValidator(_as_text)]
"""A field with text, or with JSON, which the model sees as text."""
