"""``Engine``: the interface of engines. A prompt of token ids in, groups of token ids out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol, TypeAlias

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import Progress, TokenLogprob

Finish: TypeAlias = Literal["stop", "length"]

Speculate: TypeAlias = Literal["off", "forced", "auto"]
"""Which ids of an answer may be computed along with the next one: none; ``forced``: ids for which a
constraint leaves no alternative; ``auto``: copied ids as well, where that is faster."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """What an engine needs besides the prompt. If ``seed`` is ``None``, the engine chooses one.

    ``origins`` asks it to report the ``Origin`` of each id (``Step.origins``).
    ``prediction`` has ids that the answer is likely to repeat. ``top_logprobs`` as in ``Sampling``.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    frequency_penalty: float = 0.0
    seed: int | None = None
    origins: bool = False
    prediction: tuple[int, ...] = ()
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt of ids, and how it is continued. What is cached of it is for ``tenant`` alone."""

    prompt: tuple[int, ...]
    settings: GenerationSettings
    tenant: str
    constraint: Constraint | None = None


class Origin(StrEnum):
    """How a token was chosen, as a letter of ``Step.origins``.

    ``MASKED``: sampled after a constraint masked the likeliest token. ``FORCED``: by a constraint.
    ``COPIED``: accepted from a draft.
    """

    SAMPLED = "."
    MASKED = "m"
    FORCED = "f"
    COPIED = "c"
    UNKNOWN = "?"


class Step(NamedTuple):
    """The ids generated since the last step, usually one.

    ``finish`` is set on the last step of a turn. ``cached_tokens`` counts the ids of the prompt
    that were cached. ``progress`` is set on steps without ids, before the first id. ``origins`` is
    empty unless ``GenerationSettings.origins`` asks for it; then it has the letter of an ``Origin``
    for each id. ``accepted`` and ``rejected`` count the draft tokens of speculative decoding so
    far. ``logprobs`` are those of all ``ids``, if the settings ask for them. A named tuple, since
    every token makes several.
    """

    ids: tuple[int, ...]
    finish: Finish | None = None
    cached_tokens: int = 0
    progress: Progress | None = None
    origins: str = ""
    accepted: int = 0
    rejected: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


Steps: TypeAlias = AsyncGenerator[Step, None]


class Engine(Protocol):
    """A loaded model and what runs it.

    It accepts any number of requests at the same time, and queues those that it cannot run yet.
    """

    @property
    def model(self) -> str:
        """The identity of the weights. Generated turns are reused for the same weights only."""

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and output together; ``None`` if unknown."""

    @property
    def remote(self) -> bool:
        """Whether the engine is another server, and each request has its own connection to it.

        Its first step is empty and means that it has accepted the request: errors before it become
        HTTP statuses. Its output is read to the end of the stream, beyond the id that ends a turn,
        and it waits for a slow reader: neither delays other requests.
        """

    @property
    def has_logprobs(self) -> bool:
        """Whether it returns log probabilities; otherwise no request asks for them."""

    @property
    def has_prediction(self) -> bool:
        """Whether it looks for drafts in a ``prediction``; otherwise it gets none."""

    def generate(self, request: GenerationRequest) -> Steps:
        """Generates from ``request.prompt``, up to and including the first id that ends the turn.

        With ``max_tokens`` 0 only the prompt is computed and cached. Closing the iterator
        (``aclosing``) stops the engine, and returns when it is free.

        Every id must satisfy the ``constraint``: call its ``start()`` when the output begins, and
        ask the matcher for a mask before each id. An engine with its own grammars uses the text in
        ``constraint.spec.grammar.grammar``, which does not cover forced ids and ``min_tokens``.

        Before the first id, an engine that knows its progress with the prompt reports it, in steps
        of their own (``Step.progress``): when it begins, after every chunk, when the prompt is
        computed, and about twice a second while the request waits. The front end decides which
        reports are shown.

        With ``top_logprobs``, the log probabilities are those of the model's own distribution:
        before temperature, filters, penalties, biases and the constraint.

        The last step has a ``finish``; without one the output counts as complete, so an engine
        whose connection breaks must raise. Raises ``OutputError`` when the engine fails, and
        ``HostError`` when it does not accept the request. An exception that the call itself raises,
        before it returns an iterator, becomes an HTTP status.
        """

    async def reusable_tokens(self, prompt: Sequence[int], tenant: str) -> int:
        """The number of ids of ``prompt`` that are cached now."""
