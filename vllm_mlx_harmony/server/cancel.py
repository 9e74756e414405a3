"""``POST /v1/requests/{id}/cancel``, for the ids that clients of ours are given.

Each API makes its ids out of one seed: ``chatcmpl-SEED``, ``resp_SEED``, ``msg_SEED``. Ids that are
not known here are the host's, and are answered by it.
"""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.server import answer, cancellations
from vllm_mlx_harmony.server.endpoint import Endpoint
from vllm_mlx_harmony.server.errors import error_response, with_error_body
from vllm_mlx_harmony.server.host import host_of, tenant_of
from vllm_mlx_harmony.server.responses.background import BACKGROUND
from vllm_mlx_harmony.server.shared import SharedError

_ID = re.compile(r"[a-z]+[-_](?P<seed>[0-9a-f]+)")


async def cancel_request(request: Request, request_id: str) -> Response:
    """Cancels the answer with this id; the reply has the shape of the host's."""
    try:
        cancelled = await _cancelled(request_id, tenant_of(request))
    except SharedError as error:
        return error_response(chat.error_body, error)
    if not cancelled:
        try:
            return await host_of(request).forward(request)
        except LookupError:
            problem = f"no request {request_id!r} is being answered"
            return error_response(
                chat.error_body, RequestError(problem, status=404, param="request_id")
            )
    return JSONResponse(
        {
            "object": "request.cancel",
            "id": request_id,
            "cancelled": True,
            "model": host_of(request).model_name,
        }
    )


async def _cancelled(request_id: str, tenant: str) -> bool:
    running = BACKGROUND.get(request_id, tenant)
    if running is not None and not running.done:
        await running.cancel()
        return True
    match = _ID.fullmatch(request_id)
    if match is None:
        return False
    seed = match["seed"]
    return answer.cancel(seed, tenant) or await cancellations.cancel_elsewhere(seed, tenant)


_WHY = "the ids of answers from token ids are not the engines'"

ENDPOINTS: tuple[Endpoint, ...] = tuple(
    with_error_body(chat.error_body, Endpoint(path, (method,), cancel_request, _WHY))
    for path, method in (
        ("/v1/requests/{request_id}/cancel", "POST"),
        ("/v1/requests/{request_id}", "DELETE"),
    )
)
