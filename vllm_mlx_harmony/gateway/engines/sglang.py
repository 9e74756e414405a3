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

Its log probabilities are not used: they are those after temperature and masks, of the model's own
distribution only with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` (``layers/sampler.py``), and even then
after penalties.
"""

from __future__ import annotations

from vllm_mlx_harmony.core.errors import OutputError
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
)


def _body(request: EngineRequest) -> Json:
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


def _step(event: Json, seen: int) -> Step:
    """An event with all ids so far, or with the new ones only."""
    about = event.get("meta_info")
    if not isinstance(about, dict):
        raise garbled(event)
    ids, total = ids_of(event.get("output_ids")), count_of(about.get("completion_tokens"))
    if len(ids) >= total:  # all of them; perhaps more than had been counted
        ids = ids[seen:]
    elif len(ids) != total - seen:
        raise OutputError("the engine did not return every id")
    reason, message = about.get("finish_reason"), None
    if isinstance(reason, dict):  # {"type": "stop", "matched": 200002} and the like
        reason, message = reason.get("type", ""), reason.get("message")
    return Step(ids, finish_of(reason, message=message), count_of(about.get("cached_tokens")))


SGLANG = Dialect(
    "sglang", "/generate", Capabilities(cached_tokens=True, tenant_salt=True), _body, _step
)
