"""How long reasoning may go on: counted, looked at for loops, and ended so that an answer follows.

Knows which ids of a turn are reasoning (semantics B), how many there were, and whether they go in
circles. Refuses to know logits and clocks: it is told every id, and says what must or must not come
next.

This is no part of the grammar. A budget is no property of a text, llguidance's own
(``max_tokens``) costs its rollback, and reasoning has to be bounded with the grammar off as well.

Used up, a budget ends the analysis where a word ends: behind white space or punctuation, or, where
there is none, after ``GRACE`` more ids. Then ``<|end|><|start|>assistant`` is written for the
model, and it goes on as it likes, except that no channel can be ``analysis`` any more.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from functools import lru_cache
from typing import Literal, TypeAlias

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.header import NOBODY, Header, HeaderReader

Reason: TypeAlias = Literal["", "budget", "repetition"]

GRACE = 32
"""Ids that may follow a budget that is used up, until a word ends."""

LONGEST_PERIOD = 2048
"""Ids of what is repeated, at most."""

SHORTEST_LOOP = 40
"""Ids that repeat what was there before, at least: short ones are a table's or a rhyme's."""

_GRAM = 8
"""Ids by which an earlier place is found again."""

_NO_IDS: frozenset[int] = frozenset()
_Decoder = getincrementaldecoder("utf-8")


class ReasoningWatch:
    """Watches one turn from its first id on. Constant time for each, and bounded memory.

    ``limit``: ids of reasoning after which the model is made to answer (``None``: any number).
    ``repetitions``: how often the same text may stand in a row before it is ended the same way
    (0: it is not looked for). ``answering``: the prompt has begun an answer already.
    """

    def __init__(
        self, limit: int | None = None, repetitions: int = 0, *, answering: bool = False
    ) -> None:
        self.tokens = 0
        """Ids of reasoning up to now."""
        self.ended_by: Reason = ""
        """Why the model was made to answer; empty as long as it was not."""
        self._limit = limit
        self._loop = Loop(repetitions) if repetitions else None
        self._over = 0
        self._header: HeaderReader | None = None if answering else HeaderReader(marked=False)
        self._decoder = _Decoder("replace")
        self._reasoning = False
        self._after_channel = False
        self._forced: tuple[int, ...] = ()
        self._end_if_due()

    @property
    def forced(self) -> tuple[int, ...]:
        """The ids that must come next, in this order; empty when the choice is the model's."""
        return self._forced

    @property
    def banned(self) -> frozenset[int]:
        """The ids that must not come next: those that could begin another analysis."""
        return _analysis_ids() if self.ended_by and self._after_channel else _NO_IDS

    def consume(self, token: int) -> None:
        """Takes in the next id, a forced one as well as one that was sampled."""
        self._forced = self._forced[1:] if self._forced[:1] == (token,) else ()
        self._after_channel = token == vocab.CHANNEL
        if token in vocab.CONTROL:
            self._control(token)
        elif self._header is not None:
            self._header.text(self._decoder.decode(vocab.token_bytes(token)))
            if self._header.overfull:  # as the parser has it: the text is the message itself
                header, _ = self._header.abandoned()
                self._begin_body(header, self._header.loose_ids)
                self._end_if_due(token)
        elif self._reasoning:
            self.tokens += 1
            if self._loop is not None:
                self._loop.consume(token)
            self._end_if_due(token)

    def _control(self, token: int) -> None:
        if token in (vocab.START, vocab.CHANNEL):
            if token == vocab.START or self._header is None:
                self._begin_header()
            if token == vocab.CHANNEL and self._header is not None:
                self._header.channel()
        elif token in (vocab.END, vocab.CALL, vocab.RETURN, vocab.ENDOFTEXT):
            self._begin_header()
        elif self._header is not None and token == vocab.MESSAGE:
            self._begin_body(self._header.header())
            self._end_if_due()
        elif self._header is not None and token == vocab.CONSTRAIN:
            self._header.constrain()

    def _begin_header(self) -> None:
        self._header = HeaderReader(marked=True)
        self._decoder.reset()
        self._reasoning = False

    def _begin_body(self, header: Header, ids: int = 0) -> None:
        """A message begins, ``ids`` of which have been read already."""
        self._header = None
        self._reasoning = header.channel == "analysis" and (
            not header.recipient or header.recipient in NOBODY
        )
        self.tokens += ids if self._reasoning else 0
        if self._loop is not None:
            self._loop.forget()

    def _end_if_due(self, last: int | None = None) -> None:
        if not self._reasoning or self._forced:
            return
        looping = self._loop is not None and self._loop.found
        if not looping and (self._limit is None or self.tokens < self._limit):
            return
        self._over += 1
        text = "" if last is None else vocab.token_bytes(last).decode("utf-8", "replace")
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return  # within a character
        if not text[-1:].isalnum() or self._over > GRACE:
            self.ended_by = self.ended_by or ("repetition" if looping else "budget")
            self._forced = (vocab.END, *_opening())


class Loop:
    """Finds out that a text goes in circles: the same ids again and again, ``often`` times."""

    def __init__(self, often: int) -> None:
        self.found = False
        self._often = max(often, 2)
        self.forget()

    def forget(self) -> None:
        """Another text begins."""
        self._ids: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        self._period = 0
        self._run = 0
        self.found = False

    def consume(self, token: int) -> None:
        """Takes in the next id. ``_run`` ids, this one the last, are those ``_period`` before."""
        ids = self._ids
        ids.append(token)
        gram = tuple(ids[-_GRAM:])
        at = len(ids)
        if self._period and at > self._period and ids[-1 - self._period] == token:
            self._run += 1
        else:
            self._period = at - self._places.get(gram, at)
            self._run = _GRAM if 0 < self._period <= LONGEST_PERIOD else 0
        if len(gram) == _GRAM:
            self._places[gram] = at
        repeated = self._run >= self._period * (self._often - 1) > 0
        self.found = self.found or (repeated and self._run >= SHORTEST_LOOP)
        if at > 4 * LONGEST_PERIOD:  # what lies further back than a period can be is forgotten
            gone = at - 2 * LONGEST_PERIOD
            del ids[:gone]
            self._places = {gram: at - gone for gram, at in self._places.items() if at > gone}


@lru_cache(maxsize=1)
def _opening() -> tuple[int, ...]:
    return (vocab.START, *vocab.encode("assistant"))


@lru_cache(maxsize=1)
def _analysis_ids() -> frozenset[int]:
    """All ids with which the channel's name, or a space and it, can begin."""
    names = (b"analysis", b" analysis")
    return frozenset(
        token
        for token in range(vocab.STARTOFTEXT)
        if (text := vocab.token_bytes(token)) and any(name.startswith(text) for name in names)
    )
