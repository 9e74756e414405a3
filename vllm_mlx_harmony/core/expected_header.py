"""The header that the model is likely to write next: a guess, which an engine may compute ahead.

Most messages begin with one of a few headers: ``<|channel|>analysis<|message|>``, that of a final
message, and those of calls, which differ in the name of the tool. A grammar does not force them,
because everything that semantics B reads as a header is allowed. But once the model has written
``<|channel|>commentary``, all of these headers continue with `` to=functions.``, and once only one
tool has the letters written so far, the rest of its header is known as well.

The guess is the longest common continuation of all headers that begin with the ids written so far.
After two headers that were not expected, there are no more guesses for this output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from vllm_mlx_harmony.core import vocab

UNEXPECTED = 2
"""The number of unexpected headers after which guessing stops."""

_IN_PROMPT = 2
"""The ids of the first header with which the prompt ends: ``<|start|>assistant``."""


class ExpectedHeader:
    """Follows one output from its first id, in constant time per id of a body.

    ``headers`` begin with ``<|start|>assistant`` and end with ``<|message|>``. The first one is
    that of reasoning, with which most turns begin. ``answering``: the prompt contains the beginning
    of the answer, so that a body comes first.
    """

    def __init__(self, headers: Sequence[Sequence[int]], *, answering: bool = False) -> None:
        self._headers = list(headers)
        # The headers that match the ids written so far, and the number of those ids. Within a body
        # there are none.
        self._matching = [] if answering else self._headers
        self._written = _IN_PROMPT
        self._opens = True
        self._unexpected = 0

    def consume(self, token: int) -> None:
        if token == vocab.END and self._unexpected < UNEXPECTED:
            self._matching, self._written, self._opens = self._headers, 0, False
        elif self._matching:
            self._matching = [header for header in self._matching if header[self._written] == token]
            self._written += 1
            self._unexpected += not self._matching
            if token == vocab.MESSAGE:
                self._matching = []

    def next(self, most: int) -> list[int]:
        """The ids that are expected next, at most ``most``; empty within a body."""
        matching = self._matching
        if self._opens and matching[:1] == self._headers[:1]:
            matching = matching[:1]
        rest = (header[self._written :][:most] for header in matching)
        common = takewhile(lambda ids: len({*ids}) == 1, zip(*rest, strict=False))
        return [ids[0] for ids in common]
