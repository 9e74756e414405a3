"""The header that the model is likely to write next: a guess, which an engine may compute ahead.

Most messages begin with one of a few headers: ``<|channel|>analysis<|message|>``, that of a final
message, and those of calls, which differ in the name of the tool. A grammar does not force them,
because everything that semantics B reads as a header is allowed. But once the model has written
``<|channel|>commentary``, all of these headers continue with `` to=functions.``, and once only one
tool has the letters written so far, the rest of its header is known as well.

What is expected is what all headers have in common that begin with the ids written so far. An
output with two other headers is left alone: this model writes them in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from vllm_mlx_harmony.core import vocab

UNEXPECTED = 2
"""So many other headers in an output end the guesses."""

_IN_PROMPT = 2
"""The ids of the first header with which the prompt ends: ``<|start|>assistant``."""


class ExpectedHeader:
    """Follows one output from its first id, in constant time per id of a body.

    ``headers`` begin with ``<|start|>assistant`` and end with ``<|message|>``. The first one is
    that of reasoning, with which most turns begin. ``answering``: the prompt contains the beginning
    of the answer, so that a body comes first.
    """

    def __init__(self, headers: Sequence[Sequence[int]], *, answering: bool = False) -> None:
        self._headers = [list(each) for each in headers]
        # The headers that begin as the one which is being written, and how many of its ids there
        # are: at first, those in the prompt. There are none within a body.
        self._matching = [] if answering else self._headers
        self._written = _IN_PROMPT
        self._opens = True
        self._unexpected = 0

    def consume(self, token: int) -> None:
        """Records the next id of the output."""
        if token == vocab.END and self._unexpected < UNEXPECTED:
            self._matching, self._written, self._opens = self._headers, 0, False
        elif self._matching:
            self._matching = [each for each in self._matching if each[self._written] == token]
            self._written += 1
            self._unexpected += not self._matching
            if token == vocab.MESSAGE:
                self._matching = []

    def next(self, most: int) -> list[int]:
        """The ids that are expected next, at most ``most``; empty within a body."""
        matching = self._matching
        if self._opens and matching[:1] == self._headers[:1]:
            matching = matching[:1]
        rest = (each[self._written :][:most] for each in matching)
        common = takewhile(lambda ids: len({*ids}) == 1, zip(*rest, strict=False))
        return [ids[0] for ids in common]
