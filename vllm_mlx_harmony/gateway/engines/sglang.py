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

from typing import Any

from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.gateway.engines.dialect import (
    DONE,
    EMPTY,
    Capabilities,
    Chunk,
    Dialect,
    EngineRequest,
    batch_sampling,
    count_of,
    finish_of,
    garbled,
    ids_of,
    parsed,
)


def _body(request: EngineRequest) -> dict[str, Any]:
    fields = batch_sampling(
        request, max_tokens="max_new_tokens", min_tokens="min_new_tokens", seed="sampling_seed"
    )
    fields |= {"top_k": request.settings.top_k or -1, "no_stop_trim": True}
    if request.grammar is not None:
        fields["ebnf"] = request.grammar
    body = {"input_ids": request.prompt, "sampling_params": fields, "stream": True}
    if request.salt:
        body["extra_key"] = request.salt
    return body


class SGLangReader:
    """Events with all ids so far, or with the new ones only."""

    def __init__(self) -> None:
        self._seen = 0

    def read(self, data: str) -> Chunk:
        if data == DONE:
            return EMPTY
        event = parsed(data)
        about = event.get("meta_info")
        if not isinstance(about, dict):
            raise garbled(data)
        ids, total = ids_of(event.get("output_ids")), count_of(about.get("completion_tokens"))
        if len(ids) >= total:  # all of them; perhaps more than had been counted
            new = ids[self._seen :]
        elif len(ids) == total - self._seen:
            new = ids
        else:
            raise OutputError("the engine did not return every id")
        self._seen += len(new)
        reason, message = about.get("finish_reason"), None
        if isinstance(reason, dict):  # {"type": "stop", "matched": 200002} and the like
            reason, message = reason.get("type", ""), reason.get("message")
        finish = finish_of(reason, message=message)
        return Chunk(new, finish, count_of(about.get("cached_tokens")))


SGLANG = Dialect(
    "sglang", "/generate", Capabilities(cached_tokens=True, tenant_salt=True), _body, SGLangReader
)
