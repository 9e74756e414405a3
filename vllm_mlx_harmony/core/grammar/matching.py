"""The interface to llguidance: its tokenizer, compiled grammars, and a matcher for each output."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_mlx_harmony.core import lru, vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar.language import Grammar
from vllm_mlx_harmony.core.turn import VOCAB_SIZE

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORDS = VOCAB_SIZE // 32
"""32-bit words of a mask: the lowest bit of the first one is id 0."""

CACHE_BYTES = 48 * 2**20
"""The approximate size of the cache of compiled grammars, in bytes."""

LIMITS: dict[str, Any] = {"max_items_in_row": 20_000, "verbose_errors": False}
"""For llguidance, and for the process that checks grammars first (`server.grammar_process`)."""


# --- the tokenizer: once per process ---

_tokenizer: LLTokenizer | None = None
_lock = threading.Lock()


class _Vocabulary:
    """The tokenizer that llguidance expects. Text is never encoded to a control id."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = vocab.ENDOFTEXT  # never in a grammar: <|call|> and <|return|> are, as tokens
    special_token_ids = range(vocab.STARTOFTEXT, VOCAB_SIZE)

    def __init__(self) -> None:
        self.tokens = [vocab.token_bytes(token) for token in range(vocab.STARTOFTEXT)]
        self.tokens += [b"<|%d|>" % token for token in self.special_token_ids]

    def __call__(self, text: str) -> list[int]:
        return vocab.encode(text)


def prepare() -> LLTokenizer:
    """The tokenizer, which takes 1 to 2 s of one core to build: call it while a model loads.

    Thread-safe. Raises what ``vocab.encoding`` raises, and ``ImportError`` without llguidance.
    """
    global _tokenizer
    if _tokenizer is None:
        with _lock:
            if _tokenizer is None:
                from llguidance import LLTokenizer

                _tokenizer = LLTokenizer(_Vocabulary())  # type: ignore[arg-type]
    return _tokenizer


# --- compiled grammars ---

_compiled: lru.ByteLRU[tuple[str, Grammar], Compiled] = lru.ByteLRU(CACHE_BYTES)


class NotCompiled(RequestError):
    """A grammar that llguidance rejects."""


def compile_grammar(grammar: Grammar, tenant: str = "", size: int = 0) -> Compiled:
    """Compiles ``grammar``, or returns it from the cache.

    A new grammar takes milliseconds, so this is not for an event loop; the GIL is released
    meanwhile.

    One with ``trials`` has to be tried in another process first; ``size`` is the memory that this
    took there, in bytes.

    The cache is per ``tenant``, so that no timing reveals another tenant's tools.

    Raises ``NotCompiled`` if llguidance rejects the grammar, and ``RequestError`` if the beginning
    of the answer in the prompt does not match it.
    """
    key = tenant, grammar
    known = _compiled.get(key)
    if known is None:
        from llguidance import LLMatcher, LLParserLimits

        # An object with n optional properties takes 4n items. Errors are logged, so they must not
        # quote the output.
        limits = LLParserLimits(**LIMITS)
        matcher = LLMatcher(prepare(), grammar.text, log_level=0, limits=limits)
        if matcher.is_error():
            problem = matcher.get_error().partition("\n")[0]
            problem = "the grammar is too large" if "panic" in problem else problem
            raise NotCompiled(problem, param="tools")
        if grammar.prefill_ids and not matcher.consume_tokens([*grammar.prefill_ids]):
            problem = "the beginning of the answer does not match the response format"
            raise RequestError(problem, param="messages")
        known = Compiled(grammar, matcher)
        _compiled.put(key, known, max(size, _BASE + _PER_CHARACTER * len(grammar.text)))
    return known


def find_compiled(grammar: Grammar, tenant: str = "") -> Compiled | None:
    """The result of ``compile_grammar`` if it is in the cache, else ``None``."""
    return _compiled.get((tenant, grammar))


_BASE = 100_000
_PER_CHARACTER = 100
"""The approximate size of a compiled grammar, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A compiled grammar, for any number of outputs. Thread-safe."""

    grammar: Grammar
    _template: LLMatcher

    def matcher(self) -> Matcher:
        return Matcher(self._template.deep_copy())


# --- one output ---


class Mask:
    """The ids that are allowed next: memory that is overwritten for every id.

    ``words`` views it as ``WORDS`` unsigned 32-bit integers.
    """

    def __init__(self) -> None:
        memory = (ctypes.c_uint32 * WORDS)()
        self.words = memoryview(memory).cast("B").cast("I")
        self.address = ctypes.addressof(memory)

    def __contains__(self, token: int) -> bool:
        return bool(self.words[token // 32] >> (token % 32) & 1)

    def __len__(self) -> int:
        """The number of ids that are allowed."""
        # Also its truth value; test ``is not None`` instead.
        return self._bits().bit_count()

    def first(self) -> int:
        bits = self._bits()
        return (bits & -bits).bit_length() - 1

    def _bits(self) -> int:
        return int.from_bytes(self.words.cast("B"), "little")

    def allow_all(self) -> None:
        ctypes.memset(self.address, 0xFF, 4 * WORDS)

    def only(self, token: int) -> None:
        ctypes.memset(self.address, 0, 4 * WORDS)
        self.words[token // 32] = 1 << token % 32

    def discard(self, tokens: Iterable[int]) -> None:
        """Removes ``tokens``, unless no others would remain."""
        before: dict[int, int] = {}
        for token in tokens:
            at = token // 32
            before.setdefault(at, self.words[at])
            self.words[at] &= ~(1 << token % 32) & 0xFFFF_FFFF
        if not any(self.words):
            for at, word in before.items():
                self.words[at] = word


class Matcher:
    """Follows one output. Use it from one thread at a time.

    Never raises: an id that the grammar rejects, or an error within llguidance, sets ``error``, and
    everything is allowed from then on.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.error = ""
        """Why everything is allowed; empty as long as the grammar holds."""

    def copy(self) -> Matcher:
        """Another matcher, at the same place of the same output."""
        return Matcher(self._matcher.deep_copy())

    @property
    def done(self) -> bool:
        """Whether the output is complete, so that nothing may follow."""
        return not self.error and self._matcher.is_stopped()

    def fill(self, mask: Mask) -> bool:
        """Writes the ids that are allowed next: a few microseconds, without the GIL.

        Returns false, without writing, if the output is complete or after an ``error``.
        """
        if self.error or self._matcher.is_stopped():
            return False
        self._matcher.unsafe_compute_mask_ptr(mask.address, 4 * WORDS)
        return not self._failed()

    def consume(self, token: int) -> bool:
        """Reads a generated id, and returns whether the grammar allows it."""
        if self.error:
            return False
        if self._matcher.is_stopped():
            return token in vocab.RETURN_ENDS
        self._matcher.consume_token(token)
        return not self._failed()

    def _failed(self) -> bool:
        if self._matcher.is_error():
            self.error = self._matcher.get_error() or "unknown"
        return bool(self.error)
