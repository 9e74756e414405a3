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
"""

from __future__ import annotations

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
)
from vllm_mlx_harmony.server.engine import Step


def _completion(request: EngineRequest) -> Json:
    return {
        **_common(request),
        **_sampling(request),
        "prompt": request.prompt,
        "return_token_ids": True,
        "add_special_tokens": False,
    }


def _generate(request: EngineRequest) -> Json:
    return {
        **_common(request),
        "token_ids": request.prompt,
        "sampling_params": {**_sampling(request), "detokenize": False},
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
    return Step(ids_of(choices[0].get("token_ids")), finish, cached)


_CAPABILITIES = Capabilities(cached_tokens=True, tenant_salt=True)

VLLM = Dialect("vllm", "/v1/completions", _CAPABILITIES, _completion, _step)
VLLM_TOKENS = Dialect("vllm-tokens", "/inference/v1/generate", _CAPABILITIES, _generate, _step)
