"""The globals of ``vllm_mlx.server``, typed: vllm-mlx's server is one module of them.

The only place where that module is reached. Its names are looked up when they are used, because the
host sets them while it loads and unloads models; each stands in the table (`contract`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol, cast

from starlette.requests import HTTPConnection, Request


class Metrics(Protocol):
    """vllm-mlx's metrics; ``_prom`` has those of Prometheus by name, if they are on."""

    _prom: dict[str, Any] | None

    def track_inference(self, endpoint: str, *, stream: bool) -> Any:
        """The accounting of one request."""


class Server(Protocol):
    """What is used of the module, as it is in vllm-mlx 0.6."""

    _api_key: str | None
    _default_chat_template_kwargs: dict[str, Any] | None
    _default_min_p: float | None
    _default_presence_penalty: float | None
    _default_repetition_penalty: float | None
    _default_temperature: float | None
    _default_thinking_token_budget: int | None
    _default_timeout: float
    _default_top_k: int | None
    _default_top_p: float | None
    _engine: Any
    _mcp_executor: Any
    _mcp_manager: Any
    _metrics: Metrics
    _model_manager: Any
    _model_name: str | None
    _model_path: str | None
    security: Any

    async def _acquire_default_engine_for_request(
        self, raw_request: Request, *, total_timeout: float, deadline: float, model: str | None
    ) -> Any: ...
    def _disconnect_guard(
        self, generator: Any, raw_request: Request, *, timeout: float
    ) -> AsyncIterator[str]: ...
    def _find_uvicorn_cycle(self, obj: Any) -> Any: ...
    async def _release_engine_for_request(self, raw_request: Request) -> None: ...
    def _resolve_request_max_tokens(self, requested_value: int | None) -> int: ...
    def _start_request_budget(self, timeout: float | None) -> tuple[float, float]: ...
    def _validate_model_name(self, request_model: str) -> None: ...
    async def _wait_with_disconnect(
        self,
        coro: Awaitable[Any],
        raw_request: Request,
        *,
        timeout: float,
        timeout_detail_seconds: float,
    ) -> Any: ...
    async def check_rate_limit(self, request: HTTPConnection) -> None: ...
    async def list_models(self) -> Any: ...
    async def verify_api_key(self, credentials: Any) -> Any: ...


def server() -> Server:
    """The module, imported when it is asked for: most processes never need it."""
    from vllm_mlx import server

    return cast(Server, server)
