"""What an engine is to the front end: token ids in, groups of token ids out.

Whoever brings an engine implements ``Engine``; nothing else of it is seen from here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import Progress
from vllm_mlx_harmony.server.sampling import Settings

Finish: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Step:
    """What an engine generated since the last step: one id as a rule, several at times.

    ``finish`` is set on the last step of a turn. ``cached_tokens`` counts the ids of the prompt
    that were not prefilled. ``progress`` is set on steps without ids, before the first id.
    """

    ids: tuple[int, ...]
    finish: Finish | None = None
    cached_tokens: int = 0
    progress: Progress | None = None


Steps: TypeAlias = AsyncGenerator[Step, None]


class Engine(Protocol):
    """A model that is loaded, and whatever runs it.

    It serves any number of requests at the same time, and has a queue of its own where it cannot.
    """

    @property
    def model(self) -> str:
        """Which weights: what is remembered of generated turns is theirs."""

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together; ``None`` when it is not known."""

    @property
    def remote(self) -> bool:
        """Whether it runs elsewhere, behind a connection of this request's own.

        Then its first step is empty and says that the engine has taken the request: what fails
        before it is answered with an HTTP status. It is read to its own end behind the id that ends
        a turn, and waits for a slow reader, since neither holds anybody else up.
        """

    def generate(
        self,
        prompt: tuple[int, ...],
        settings: Settings,
        tenant: str,
        constraint: Constraint | None,
    ) -> Steps:
        """The ids that follow ``prompt``, up to and with the first that ends the turn.

        With ``max_tokens`` 0 there are none: the prompt is computed, and what can be reused of it
        is kept, for ``tenant`` alone. Closing the iterator (``aclosing``) stops it: the engine is
        free again when that returns.

        Only ids come that ``constraint`` lets through: call ``constraint.start()`` when the output
        begins, and ask the matcher for the mask of each id. An engine with grammars of its own
        takes ``constraint.spec.grammar.grammar.text``; forced ids and ``min_tokens`` are not in it,
        and stay the engine's to handle.

        Before the first id, an engine that knows how far it is with the prompt reports it in steps
        of their own (``Step.progress``): when it begins, after every chunk, when the prompt is
        computed, and about twice a second while the request waits. The front end decides which of
        them are shown.

        The last step has a ``finish``. An iterator that ends without one counts as one that ended
        by itself: an engine whose connection breaks must raise.
        Raises ``OutputError`` when the engine fails, ``HostError`` for one that takes no ids. An
        error that the call itself raises, in place of an iterator, is answered with its status.
        """

    async def reusable_tokens(self, prompt: Sequence[int], tenant: str) -> int:
        """How many ids of ``prompt`` would not be computed if it were generated from now."""
