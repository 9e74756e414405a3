"""llama.cpp's ``llama-server``: ``POST /completion`` with ``prompt: [ids]``.

What is relied on stands in ``tools/server/README.md`` and ``tools/server/server-context.cpp`` of
https://github.com/ggml-org/llama.cpp: ``return_tokens``, ``n_predict``, ``cache_prompt``,
``logit_bias`` as pairs; an event is ``{"content", "tokens", "stop", "tokens_predicted", …}``, the
last one has ``stop: true``, ``stop_type`` (``eos``, ``limit``, ``word``), no tokens, and
``timings.cache_n``, the ids of the prompt that were not computed. An error is
``error: {"code", "message", "type"}``, or ``data: {"error": …}``. It stops by itself at the ids
that end a turn, which its vocabulary marks for gpt-oss (``<|return|>``, ``<|call|>``).

**Ids that are not streamed.** While the text ends within a character, ``process_token`` sends no
event, and the next one has the id that completed the character alone; ``tokens_predicted`` has
counted both. The text of the missing ids stands in ``content``: it is encoded anew, which gives the
same characters and, as models write what tokenizers make, the same ids as a rule. Where the number
is another, the answer fails rather than lose an id.

Grammars: builds with llguidance take Lark behind ``%llguidance``; all others end the *process* at
it. So it has to be said that a build is one of them: the kind ``llamacpp-llguidance``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.gateway.engines.dialect import (
    DONE,
    EMPTY,
    Capabilities,
    Chunk,
    EngineRequest,
    count_of,
    failure_in,
    finish_of,
    garbled,
    ids_of,
    parsed,
    sampling,
)
from vllm_mlx_harmony.server.engine import Finish

FINISHES: dict[str, Finish] = {"eos": "stop", "word": "stop", "limit": "length"}

LLGUIDANCE = Capabilities(grammar=True, cached_tokens=True, min_tokens=False)
CAPABILITIES = Capabilities(cached_tokens=True, min_tokens=False)


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama-server's own endpoint."""

    capabilities: Capabilities = CAPABILITIES
    name: str = "llamacpp"
    path: str = "/completion"

    def body(self, request: EngineRequest) -> dict[str, Any]:
        """See ``Dialect``. Penalties look at the whole context, as elsewhere, and not at 64 ids."""
        settings = request.settings
        body: dict[str, Any] = {
            **sampling(settings),
            "prompt": request.prompt,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
            "n_predict": settings.max_tokens,
            "repeat_penalty": settings.repetition_penalty,
            "repeat_last_n": -1,
        }
        if settings.seed is not None:
            body["seed"] = settings.seed & 0xFFFF_FFFF
        if settings.logit_bias:
            body["logit_bias"] = [list(pair) for pair in settings.logit_bias]
        if request.grammar is not None:
            body["grammar"] = f"%llguidance {{}}\n{request.grammar}"
        return body

    def reader(self) -> LlamaCppReader:
        """See ``Dialect``."""
        return LlamaCppReader()


class LlamaCppReader:
    """Events with the ids of text that is whole."""

    def __init__(self) -> None:
        self._seen = 0

    def read(self, data: str) -> Chunk:
        """See ``Reader``."""
        if data == DONE:
            return EMPTY
        event = parsed(data)
        if "error" in event:
            raise failure_in(event)
        if "stop" not in event:
            raise garbled(data)
        ids, total = ids_of(event.get("tokens")), count_of(event.get("tokens_predicted"))
        missing = total - self._seen - len(ids)
        if missing > 0:
            ids = _recovered(str(event.get("content", "")), ids, missing)
        self._seen += len(ids)
        if event["stop"] is not True:
            return Chunk(ids)
        timings = event.get("timings")
        cached = count_of(timings.get("cache_n")) if isinstance(timings, dict) else 0
        finish = finish_of(event.get("stop_type", "none"), FINISHES)
        return Chunk(ids, finish, cached)


def _recovered(content: str, ids: tuple[int, ...], missing: int) -> tuple[int, ...]:
    """``ids`` and the ``missing`` ones before them, from the text that all of them stand for."""
    text = tuple(token for token in ids if token not in vocab.CONTROL)
    found = tuple(vocab.encode(content))
    if len(found) != missing + len(text) or found[missing:] != text:
        raise OutputError("the engine did not hand on every id")
    return found[:missing] + ids
