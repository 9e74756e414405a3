"""llama.cpp's ``llama-server``: ``POST /completion`` with ``prompt: [ids]``.

The sources are ``tools/server/README.md`` and ``tools/server/server-context.cpp`` of
https://github.com/ggml-org/llama.cpp: ``return_tokens``, ``return_progress`` (events with
``prompt_progress`` and no tokens, before the first id), ``n_predict``, ``cache_prompt``,
``logit_bias`` as pairs; an event is ``{"content", "tokens", "stop", "tokens_predicted", …}``, the
last one has ``stop: true``, ``stop_type`` (``eos``, ``limit``, ``word``), no tokens, and
``timings.cache_n``, the ids of the prompt that were not computed. An error is
``error: {"code", "message", "type"}``, or ``data: {"error": …}``. It stops by itself at the ids
that end a turn, which its vocabulary marks for gpt-oss (``<|return|>``, ``<|call|>``).

**Ids that are not streamed.** While the text ends within a character, ``process_token`` sends no
event, and the next one has only the id that completed the character; ``tokens_predicted`` has
counted both. ``content`` has the text of the missing ids. It is encoded again, which gives the same
characters and, because models normally write what tokenizers produce, the same ids. If the number
of ids differs, the request fails rather than lose an id.

Log probabilities (``n_probs``) are not used: for the ids that are not streamed, there are none.

Grammars: builds with llguidance accept Lark after ``%llguidance``; in all others it ends the
*process*. Such builds must therefore be named: the kind ``llamacpp-llguidance``.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.engine_api.engine import Finish, Step
from vllm_mlx_harmony.gateway.engines.dialect import (
    Capabilities,
    Dialect,
    EngineRequest,
    Json,
    count_of,
    finish_of,
    garbled,
    ids_of,
    progress_of,
    sampling,
)

FINISHES: dict[str, Finish] = {"eos": "stop", "word": "stop", "limit": "length"}


def _body(request: EngineRequest) -> Json:
    """Penalties cover the whole context, as on other engines, instead of the last 64 ids."""
    settings = request.settings
    body: Json = {
        **sampling(settings),
        "prompt": request.prompt,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
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


def _step(event: Json, seen: int) -> Step:
    """An event with the ids of complete characters."""
    if "stop" not in event:
        raise garbled(event)
    ids, total = ids_of(event.get("tokens")), count_of(event.get("tokens_predicted"))
    missing = total - seen - len(ids)
    if missing > 0:
        ids = _recovered(str(event.get("content", "")), ids, missing)
    if event["stop"] is not True:
        return Step(ids, progress=progress_of(event.get("prompt_progress")))
    timings = event.get("timings")
    cached = count_of(timings.get("cache_n")) if isinstance(timings, dict) else 0
    return Step(ids, finish_of(event.get("stop_type", "none"), FINISHES), cached)


def _recovered(content: str, ids: tuple[int, ...], missing: int) -> tuple[int, ...]:
    """``ids`` preceded by the ``missing`` ones, which are encoded from the text of all of them."""
    text = tuple(token for token in ids if token not in vocab.CONTROL)
    found = tuple(vocab.encode(content))
    if len(found) != missing + len(text) or found[missing:] != text:
        raise OutputError("the engine did not return every id")
    return found[:missing] + ids


LLAMACPP = Dialect(
    "llamacpp",
    "/completion",
    Capabilities(cached_tokens=True, min_tokens=False),
    _body,
    _step,
)
LLAMACPP_LLGUIDANCE = replace(LLAMACPP, capabilities=replace(LLAMACPP.capabilities, grammar=True))
