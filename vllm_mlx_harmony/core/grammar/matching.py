"""Grammars followed id by id: llguidance's tokenizer, compiled grammars, one output's matcher."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_mlx_harmony.core import lru, vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar.language import Grammar
from vllm_mlx_harmony.core.turn import VOCAB_SIZE

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORDS = VOCAB_SIZE // 32
"""32-bit words of a mask: the lowest bit of the first one is id 0."""

REMEMBERED = 64 * 2**20
"""Bytes of compiled grammars that are remembered, about."""


# --- the tokenizer: once per process ---

_tokenizer: LLTokenizer | None = None
_lock = threading.Lock()


class _Vocabulary:
    """What llguidance asks of a tokenizer. No text is ever a control id, in no direction."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = vocab.ENDOFTEXT  # never in a grammar: <|call|> and <|return|> are, as tokens
    special_token_ids = range(vocab.STARTOFTEXT, VOCAB_SIZE)

    def __init__(self) -> None:
        self.tokens = [vocab.token_bytes(token) for token in range(vocab.STARTOFTEXT)]
        self.tokens += [b"<|%d|>" % token for token in self.special_token_ids]

    def __call__(self, text: str) -> list[int]:
        return vocab.encode(text)


def prepare() -> None:
    """Builds the tokenizer (1–2 s of one core) unless it is there: while a model loads, say.

    Any thread; several wait for one. Raises what ``vocab.encoding`` raises, and ``ImportError``
    without llguidance.
    """
    _prepared()


def _prepared() -> LLTokenizer:
    global _tokenizer
    if _tokenizer is None:
        with _lock:
            if _tokenizer is None:
                from llguidance import LLTokenizer

                _tokenizer = LLTokenizer(_Vocabulary())  # type: ignore[arg-type]
    return _tokenizer


# --- compiled grammars ---

_compiled: lru.ByteLRU[tuple[str, Grammar], Compiled] = lru.ByteLRU(REMEMBERED)


class NotCompiled(RequestError):
    """A grammar that llguidance does not take."""


def compiled(grammar: Grammar, tenant: str = "", size: int = 0) -> Compiled:
    """``grammar`` ready to be followed, remembered. Takes milliseconds for a new one, without the
    interpreter's lock: any thread, but not an event loop's.

    llguidance has limits, but none that a text cannot evade: some exhaust its stack, which ends the
    process. So a grammar with anything of a client's in it has to be tried somewhere else first;
    ``size`` is how many bytes it took there.

    It is remembered for ``tenant`` alone: how long it takes must not tell one what tools another
    has.

    Raises ``NotCompiled`` when it is too large for llguidance, and ``RequestError`` when what the
    prompt has begun does not fit it.
    """
    key = tenant, grammar
    known = _compiled.get(key)
    if known is None:
        known = Compiled(grammar, _fresh(grammar))
        _compiled.put(key, known, max(size, _BASE + _PER_CHARACTER * len(grammar.text)))
    return known


def remembered(grammar: Grammar, tenant: str = "") -> Compiled | None:
    """What ``compiled`` would not take any time for; ``None`` where it would."""
    return _compiled.get((tenant, grammar))


def _fresh(grammar: Grammar) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    # An object with n optional properties takes 4n items. An error quotes no output in the log.
    limits = LLParserLimits(max_items_in_row=20_000, verbose_errors=False)
    matcher = LLMatcher(_prepared(), grammar.text, log_level=0, limits=limits)
    if matcher.is_error():
        problem = matcher.get_error().partition("\n")[0]
        if "panic" in problem:
            problem = "they are too large"
        raise NotCompiled(problem, param="tools")
    if grammar.begun and not matcher.consume_tokens(list(grammar.begun)):
        problem = "the answer as it was begun does not fit the response format"
        raise RequestError(problem, param="messages")
    return matcher


_BASE = 100_000
_PER_CHARACTER = 100
"""Bytes that a compiled grammar takes, about."""


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A grammar that any number of outputs can be held to, from any thread."""

    grammar: Grammar
    _template: LLMatcher

    def matcher(self) -> Matcher:
        """For one output, at its beginning."""
        return Matcher(self._template.deep_copy())


# --- one output ---


class Mask:
    """Which ids may come next: memory that is written anew for every id, and belongs to the caller.

    ``words`` views it as ``WORDS`` unsigned integers of 32 bits, for whoever takes buffers.
    """

    def __init__(self) -> None:
        memory = (ctypes.c_uint32 * WORDS)()
        self.words = memoryview(memory).cast("B").cast("I")
        self.address = ctypes.addressof(memory)

    def __contains__(self, token: int) -> bool:
        return bool(self.words[token // 32] >> token % 32 & 1)

    def __iter__(self) -> Iterator[int]:
        """All allowed ids, in order."""
        for first, word in zip(range(0, VOCAB_SIZE, 32), self.words, strict=True):
            if word:
                yield from (first + bit for bit in range(32) if word >> bit & 1)

    def allow_all(self) -> None:
        """Allows every id."""
        ctypes.memset(self.address, 0xFF, 4 * WORDS)

    def only(self, token: int) -> None:
        """Allows this id alone."""
        ctypes.memset(self.address, 0, 4 * WORDS)
        self.words[token // 32] = 1 << token % 32

    def discard(self, tokens: Iterable[int]) -> None:
        """Allows none of ``tokens`` any more, unless nothing but them is left: then all stays."""
        before: dict[int, int] = {}
        for token in tokens:
            at = token // 32
            before.setdefault(at, self.words[at])
            self.words[at] &= ~(1 << token % 32) & 0xFFFF_FFFF
        if not any(self.words):
            for at, word in before.items():
                self.words[at] = word


class Matcher:
    """Follows one output. One thread at a time; different ones do not know of each other.

    Never raises: an id that the grammar does not have, or an error within llguidance, sets
    ``error``, and from then on everything is allowed.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.error = ""
        """What went wrong; empty as long as nothing did."""

    @property
    def done(self) -> bool:
        """Whether the output is whole: nothing may follow."""
        return not self.error and self._matcher.is_stopped()

    def fill(self, mask: Mask) -> bool:
        """Writes which ids may come next; a few microseconds, without the interpreter's lock.

        False when nothing was written and everything is allowed: the output is whole, or ``error``.
        """
        if self.error or self._matcher.is_stopped():
            return False
        self._matcher.unsafe_compute_mask_ptr(mask.address, 4 * WORDS)
        return not self._failed()

    def consume(self, token: int) -> bool:
        """Takes in an id that was generated; false when it may not stand here."""
        if self.error:
            return False
        if self._matcher.is_stopped():
            return token in vocab.LAST
        self._matcher.consume_token(token)
        return not self._failed()

    def _failed(self) -> bool:
        if self._matcher.is_error():
            self.error = self._matcher.get_error() or "unknown"
        return bool(self.error)
