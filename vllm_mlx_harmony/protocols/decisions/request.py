"""``DecisionRequest``: a parsed request, the same for both APIs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.core.turn import Message
from vllm_mlx_harmony.protocols.decisions.question import Question
from vllm_mlx_harmony.protocols.events import Document

Distributions: TypeAlias = Sequence[Sequence[float]]
"""The probabilities of the options of each question; empty for a question without an answer."""

Writer: TypeAlias = Callable[[str, Sequence[Question], Distributions, Usage], Document]
"""Makes the response of the model's name, the questions, their distributions, and the usage."""


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """``messages`` are the input that all questions are about."""

    model: str
    messages: tuple[Message, ...]
    questions: tuple[Question, ...]
    write: Writer
