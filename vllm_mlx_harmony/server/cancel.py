"""``POST /v1/requests/{id}/cancel``: cancels an answer by the id that its client received.

The ids of every API contain the answer's seed: ``chatcmpl-SEED``, ``resp_SEED``, ``msg_SEED``.
Requests for unknown ids are passed on to the host.
"""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.server import answer
from vllm_mlx_harmony.server.endpoint import OpenAIEndpoint
from vllm_mlx_harmony.server.host import host_of, tenant_of
from vllm_mlx_harmony.server.peers import answers as peers
from vllm_mlx_harmony.server.responses.background import BACKGROUND

_ID = re.compile(r"[a-z]+[-_](?P<seed>[0-9a-f]+)")


async def cancel_request(request: Request, request_id: str) -> Response:
    """Cancels the answer with this id. The response has the host's shape."""
    tenant, match = tenant_of(request), _ID.fullmatch(request_id)
    background = BACKGROUND.get(request_id, tenant)
    cancelled = background is not None and not background.done
    if background is not None and cancelled:
        await background.cancel()
    elif match is not None:
        seed = match["seed"]
        cancelled = answer.cancel(seed, tenant) or await peers.cancel(seed, tenant)
    if not cancelled:
        try:
            return await host_of(request).forward(request)
        except LookupError as error:
            problem = f"no running request has the id {request_id!r}"
            raise RequestError(problem, status=404, param="request_id") from error
    return JSONResponse(
        {
            "object": "request.cancel",
            "id": request_id,
            "cancelled": True,
            "model": host_of(request).model_name,
        }
    )


_WHY = "cancels answers of this front end"

ENDPOINTS = tuple(
    OpenAIEndpoint(path, (method,), cancel_request, _WHY)
    for path, method in (
        ("/v1/requests/{request_id}/cancel", "POST"),
        ("/v1/requests/{request_id}", "DELETE"),
    )
)
