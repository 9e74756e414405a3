"""Collects the first token of each question's answer, and writes the response."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_mlx_harmony.core.deltas import Delta, Finished, TokenLogprob, Usage
from vllm_mlx_harmony.protocols.decisions.question import probabilities
from vllm_mlx_harmony.protocols.decisions.request import DecisionRequest
from vllm_mlx_harmony.protocols.events import HEARTBEAT, Document, Event


class Emitter:
    """``labels`` are the ids of the labels, which each question has as many of as options."""

    def __init__(self, request: DecisionRequest, model: str, labels: Sequence[int]) -> None:
        self._request, self._model, self._labels = request, model, labels
        self._first: dict[int, TokenLogprob] = {}
        self._usage = Usage()

    def add(self, question: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Adds tokens to the answer of the question with this index."""
        if logprobs:
            self._first.setdefault(question, logprobs[0])

    def feed(self, delta: Delta) -> list[Event]:
        if isinstance(delta, Finished):
            self._usage = delta.usage
        return []

    def keep_alive(self) -> Event:
        """Never sent: no answer is streamed."""
        return HEARTBEAT

    def result(self) -> Document:
        questions = self._request.questions
        distributions = [
            probabilities(self._first[at], self._labels[: len(question.options)])
            if at in self._first
            else []
            for at, question in enumerate(questions)
        ]
        return self._request.write(self._model, questions, distributions, self._usage)
