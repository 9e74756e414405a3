"""SGLang: ``POST /generate`` with ``input_ids``.

What is relied on stands in SGLang 0.5, ``sglang/srt/managers/io_struct.py`` (``GenerateReqInput``),
``sglang/srt/sampling/sampling_params.py`` and ``tokenizer_manager.py``: an event is
``{"text", "output_ids", "meta_info": {"finish_reason", "completion_tokens", "cached_tokens", …}}``.
``output_ids`` are all ids so far or, with ``--incremental-streaming-output``, the new ones;
``completion_tokens`` counts all of them either way, which tells one from the other. A stream ends
with ``data: [DONE]``, an error within it is ``data: {"error": {"message": …}}``, and closing the
connection aborts the request (``create_abort_task``). ``extra_key`` keeps prefixes apart.

``ebnf`` goes to llguidance as it is with ``--grammar-backend llguidance``, and takes Lark there
(``constrained/llguidance_backend.py``); other backends do not read ids of control tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_mlx_harmony.core.errors import OutputError
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
class SGLang:
    """SGLang's own endpoint."""

    capabilities: Capabilities = CAPABILITIES
    name: str = "sglang"
    path: str = "/generate"

    def body(self, request: EngineRequest) -> dict[str, Any]:
        """See ``Dialect``."""
        settings = request.settings
        fields: dict[str, Any] = {
            **sampling(settings),
            "top_k": settings.top_k or -1,
            "repetition_penalty": settings.repetition_penalty,
            "max_new_tokens": settings.max_tokens,
            "stop_token_ids": TURN_ENDS,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if settings.seed is not None:
            fields["sampling_seed"] = settings.seed
        if settings.logit_bias:
            fields["logit_bias"] = {str(token): bias for token, bias in settings.logit_bias}
        if request.min_tokens:
            fields["min_new_tokens"] = min(request.min_tokens, settings.max_tokens)
        if request.grammar is not None:
            fields["ebnf"] = request.grammar
        body = {"input_ids": request.prompt, "sampling_params": fields, "stream": True}
        if request.salt:
            body["extra_key"] = request.salt
        return body

    def reader(self) -> SGLangReader:
        """See ``Dialect``."""
        return SGLangReader()


class SGLangReader:
    """Events with all ids so far, or with new ones."""

    def __init__(self) -> None:
        self._seen = 0

    def read(self, data: str) -> Chunk:
        """See ``Reader``."""
        if data == DONE:
            return EMPTY
        event = parsed(data)
        if "error" in event:
            raise failure_in(event)
        about = event.get("meta_info")
        if not isinstance(about, dict):
            raise garbled(data)
        ids, total = ids_of(event.get("output_ids")), count_of(about.get("completion_tokens"))
        if len(ids) >= total:  # all of them; perhaps more than were counted a moment before
            new = ids[self._seen :]
        elif len(ids) == total - self._seen:
            new = ids
        else:
            raise OutputError("the engine did not hand on every id")
        self._seen += len(new)
        reason, said = about.get("finish_reason"), None
        if isinstance(reason, dict):  # {"type": "stop", "matched": 200002} and the like
            reason, said = reason.get("type", ""), reason.get("message")
        finish = finish_of(reason, said=said)
        return Chunk(new, finish, count_of(about.get("cached_tokens")))
