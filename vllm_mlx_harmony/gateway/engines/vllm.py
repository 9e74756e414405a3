"""vLLM: ``POST /v1/completions`` or ``POST /inference/v1/generate``, with ids in and out.

The sources are in vLLM 0.32, ``vllm/entrypoints/openai/completion/protocol.py``
(``CompletionRequest``, ``CompletionResponseStreamChoice``): ``prompt`` as a list of ids,
``return_token_ids`` (choices have ``token_ids``, the first one ``prompt_token_ids`` as well),
``stop_token_ids``, ``skip_special_tokens``, ``cache_salt``, ``structured_outputs.grammar`` and
``stream_options.include_usage``. A stream ends with ``data: [DONE]``; an error within it is
``data: {"error": {"message": …}}``. Closing the connection aborts the request
(``with_cancellation``). Ray Serve's ingress offers this endpoint, too.

The second endpoint exists with ``--enable-scale-out`` or ``--tokens-only``: ``GenerateRequest`` in
``vllm/entrypoints/scale_out/token_in_token_out/protocol.py``; its events have the same choices. It
is preferred: it neither detokenizes nor returns the prompt's ids, and ``reasoning_ended`` enforces
a grammar from the first id on. Completions need ``"enable_in_reasoning": true`` in
``--structured-outputs-config`` for that, because vLLM has a reasoning parser for gpt-oss
(``vllm/v1/structured_output/__init__.py``).

Grammars go to llguidance (``--structured-outputs-config.backend guidance``; ``auto`` falls back to
it), as Lark with ids: https://github.com/guidance-ai/llguidance, docs/syntax.md. vLLM reports
cached tokens only with ``--enable-prompt-tokens-details``.

Log probabilities are those of the model's own distribution (``--logprobs-mode raw_logprobs``, the
default), in the shapes of ``CompletionLogProbs`` and of ``_create_tokens_logprobs`` in
``vllm/entrypoints/scale_out/token_in_token_out/serving.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_mlx_harmony.engine_api.engine import Step
from vllm_mlx_harmony.gateway.engines.dialect import (
    Capabilities,
    Dialect,
    EngineRequest,
    Json,
    batch_sampling,
    count_of,
    finish_of,
    garbled,
    ids_of,
    logprobs_of,
)

MAX_LOGPROBS = 20
"""The default of ``--max-logprobs``."""


def _completion(request: EngineRequest) -> Json:
    fields = {
        **_common(request),
        **_sampling(request),
        "prompt": request.prompt,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    if request.settings.top_logprobs is not None:
        fields |= {
            "logprobs": request.settings.top_logprobs,
            "return_tokens_as_token_ids": True,
        }
    return fields


def _generate(request: EngineRequest) -> Json:
    sampling = {**_sampling(request), "detokenize": False}
    if request.settings.top_logprobs is not None:
        # The id itself counts as one of them, even if it is not among the likeliest.
        sampling["logprobs"] = min(request.settings.top_logprobs + 1, MAX_LOGPROBS)
    return {
        **_common(request),
        "token_ids": request.prompt,
        "sampling_params": sampling,
        "reasoning_ended": True,
    }


def _common(request: EngineRequest) -> Json:
    """The fields of both endpoints, apart from the prompt and sampling."""
    fields: Json = {
        "model": request.model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.salt:
        fields["cache_salt"] = request.salt
    return fields


def _sampling(request: EngineRequest) -> Json:
    """``SamplingParams``: top-level fields of completions, an object of the other endpoint."""
    fields = batch_sampling(request, max_tokens="max_tokens", min_tokens="min_tokens", seed="seed")
    if request.grammar is not None:
        fields["structured_outputs"] = {"grammar": request.grammar}
    return fields


def _step(event: Json, seen: int) -> Step:
    """An event of either endpoint: each has its new ids, and the last has the usage."""
    choices, usage = event.get("choices"), event.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = count_of(details.get("cached_tokens")) if isinstance(details, dict) else 0
    if choices == []:
        return Step((), cached_tokens=cached)
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        raise garbled(event)
    finish = finish_of(choices[0].get("finish_reason"))
    ids = ids_of(choices[0].get("token_ids"))
    if (logprobs := choices[0].get("logprobs")) is None:
        return Step(ids, finish, cached)
    return Step(ids, finish, cached, logprobs=logprobs_of(ids, _entries(logprobs)))


def _entries(logprobs: object) -> Iterator[tuple[object, list[tuple[object, object]]]]:
    """The log probability of each id, and the pairs of its likeliest ids.

    Completions have parallel lists, the other endpoint a list of objects. Tokens are ids in both:
    ``token_id:…``, or numbers in later versions (``logprobs_render.py``).
    """
    if not isinstance(logprobs, dict):
        return
    if isinstance(content := logprobs.get("content"), list):
        for entry in content:
            top = [(_id(one), one.get("logprob")) for one in entry.get("top_logprobs") or ()]
            yield entry.get("logprob"), top
    else:
        lists = (logprobs.get(name) or () for name in ("token_logprobs", "top_logprobs"))
        for own, likeliest in zip(*lists, strict=False):
            yield own, [(_id({"token": name}), one) for name, one in (likeliest or {}).items()]


def _id(entry: Json) -> object:
    name = str(entry.get("token", "")).removeprefix("token_id:")
    return entry["token_id"] if "token_id" in entry else int(name) if name.isdigit() else None


_CAPABILITIES = Capabilities(cached_tokens=True, tenant_salt=True, logprobs=True)

VLLM = Dialect("vllm", "/v1/completions", _CAPABILITIES, _completion, _step)
VLLM_TOKENS = Dialect("vllm-tokens", "/inference/v1/generate", _CAPABILITIES, _generate, _step)
