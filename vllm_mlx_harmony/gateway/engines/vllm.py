"""vLLM: ``POST /v1/completions`` or ``POST /inference/v1/generate``, with ids in and out.

What is relied on stands in vLLM 0.32, ``vllm/entrypoints/openai/completion/protocol.py``
(``CompletionRequest``, ``CompletionResponseStreamChoice``): ``prompt`` as a list of ids,
``return_token_ids`` (choices have ``token_ids``, the first one ``prompt_token_ids`` as well),
``stop_token_ids``, ``skip_special_tokens``, ``cache_salt``, ``structured_outputs.grammar`` and
``stream_options.include_usage``. A stream ends with ``data: [DONE]``; an error within it is
``data: {"error": {"message": …}}``. Closing the connection aborts the request
(``with_cancellation``). Ray Serve's ingress offers this endpoint, too.

The second one is there with ``--enable-scale-out`` or ``--tokens-only``: ``GenerateRequest`` in
``vllm/entrypoints/scale_out/token_in_token_out/protocol.py``; its events have the same choices. It
is taken where it is: nothing is turned into text there, ids of the prompt do not come back, and
``reasoning_ended`` has a grammar kept to from the first id on, which otherwise needs
``"enable_in_reasoning": true`` in ``--structured-outputs-config``, as vLLM has a reasoning parser
for gpt-oss (``vllm/v1/structured_output/__init__.py``).

Grammars go to llguidance (``--structured-outputs-config.backend guidance``; ``auto`` falls back to
it), as Lark with ids: https://github.com/guidance-ai/llguidance, docs/syntax.md. How many
tokens were cached it says with ``--enable-prompt-tokens-details`` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_mlx_harmony.gateway.engines.dialect import (
    DONE,
    EMPTY,
    TURN_ENDS,
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

CAPABILITIES = Capabilities(cached_tokens=True, tenant_salt=True)


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM's completions."""

    capabilities: Capabilities = CAPABILITIES
    name: str = "vllm"
    path: str = "/v1/completions"

    def body(self, request: EngineRequest) -> dict[str, Any]:
        """See ``Dialect``."""
        return {
            **_common(request),
            **_sampling(request),
            "prompt": request.prompt,
            "return_token_ids": True,
            "add_special_tokens": False,
        }

    def reader(self) -> VllmReader:
        """See ``Dialect``."""
        return VllmReader()


@dataclass(frozen=True, slots=True)
class VllmTokens:
    """vLLM's endpoint of ids alone."""

    capabilities: Capabilities = CAPABILITIES
    name: str = "vllm-tokens"
    path: str = "/inference/v1/generate"

    def body(self, request: EngineRequest) -> dict[str, Any]:
        """See ``Dialect``."""
        return {
            **_common(request),
            "token_ids": request.prompt,
            "sampling_params": {**_sampling(request), "detokenize": False},
            "reasoning_ended": True,
        }

    def reader(self) -> VllmReader:
        """See ``Dialect``."""
        return VllmReader()


def _common(request: EngineRequest) -> dict[str, Any]:
    """What both endpoints take beside the prompt and how ids are drawn."""
    fields: dict[str, Any] = {
        "model": request.model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.salt:
        fields["cache_salt"] = request.salt
    return fields


def _sampling(request: EngineRequest) -> dict[str, Any]:
    """``SamplingParams``: fields of completions, an object of its own for the endpoint of ids."""
    settings = request.settings
    fields: dict[str, Any] = {
        **sampling(settings),
        "repetition_penalty": settings.repetition_penalty,
        "max_tokens": settings.max_tokens,
        "stop_token_ids": TURN_ENDS,
        "skip_special_tokens": False,
    }
    if settings.seed is not None:
        fields["seed"] = settings.seed
    if settings.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in settings.logit_bias}
    if request.min_tokens:
        fields["min_tokens"] = min(request.min_tokens, settings.max_tokens)
    if request.grammar is not None:
        fields["structured_outputs"] = {"grammar": request.grammar}
    return fields


class VllmReader:
    """Events of both: each has the ids that are new; the last has the usage."""

    def read(self, data: str) -> Chunk:
        """See ``Reader``."""
        if data == DONE:
            return EMPTY
        event = parsed(data)
        if "error" in event:
            raise failure_in(event)
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise garbled(data)
        cached = 0
        usage = event.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            cached = count_of(details.get("cached_tokens")) if isinstance(details, dict) else 0
        if not choices:
            return Chunk(cached_tokens=cached)
        choice = choices[0]
        if not isinstance(choice, dict):
            raise garbled(data)
        finish = finish_of(choice.get("finish_reason"))
        return Chunk(ids_of(choice.get("token_ids")), finish, cached)
