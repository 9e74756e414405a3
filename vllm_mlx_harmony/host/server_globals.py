"""Types for the parts of vllm-mlx that are used.

The globals of vllm-mlx's server change as models are loaded and unloaded; they are looked up at
each use, through ``server()``. Each attribute of the protocols below is a row: mypy checks our
calls against it, and `contract` the installed host.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast, get_type_hints

from starlette.requests import HTTPConnection, Request

from vllm_mlx_harmony.required_names import OTHERS, Name

if TYPE_CHECKING:
    from pydantic import BaseModel


class ModelSpec(Protocol):
    """A model that is loaded when it is asked for."""

    model_name: Annotated[str, "the name of a model that is loaded on demand"]
    model_path: Annotated[str | None, "its directory"]


class RegisteredModel(Protocol):
    """One of several models, loaded or not."""

    name: Annotated[str, "the name of one of several models"]
    source: Annotated[str, "the directory or the repository of one of several models"]


class ModelManager(Protocol):
    """The models of ``--models-config``."""

    _engine_factory: Annotated[
        Callable[[object], object] | None, "makes the engine of one of several models"
    ]
    _loaded: Annotated[Mapping[str, object], "which of several models are loaded"]
    _registry: Annotated[Mapping[str, RegisteredModel], "the models by name"]


class InferenceTracker(Protocol):
    """vllm-mlx's metrics of one request."""

    def observe_ttft(self) -> None:
        """records the time to the first token"""

    def finish(self, *, result: str, prompt_tokens: int, completion_tokens: int) -> None:
        """records the end of a request"""


class Metrics(Protocol):
    """vllm-mlx's metrics."""

    _prom: Annotated[dict[str, Any] | None, "Prometheus metrics by name, None when disabled"]

    def track_inference(self, endpoint: str, *, stream: bool) -> InferenceTracker:
        """records the metrics of a request"""


class Server(Protocol):
    """The module, as it is in vllm-mlx 0.6; each name with what it is used for."""

    _api_key: Annotated[str | None, "the key that requests need"]
    _default_chat_template_kwargs: Annotated[dict[str, object] | None, "rendering defaults"]
    _default_max_tokens: Annotated[int, "the default of max_tokens"]
    _default_min_p: Annotated[float | None, "a sampling default"]
    _default_presence_penalty: Annotated[float | None, "a sampling default"]
    _default_repetition_penalty: Annotated[float | None, "a sampling default"]
    _default_temperature: Annotated[float | None, "a sampling default"]
    _default_thinking_token_budget: Annotated[int | None, "the default reasoning budget"]
    _default_timeout: Annotated[float, "the deadline of a request"]
    _default_top_k: Annotated[int | None, "a sampling default"]
    _default_top_p: Annotated[float | None, "a sampling default"]
    _engine: Annotated[object, "the engine of the only model"]
    _max_request_tokens: Annotated[int, "the limit of max_tokens"]
    _mcp_executor: Annotated[object, "runs a tool for /v1/mcp/execute"]
    _mcp_manager: Annotated[object, "lists the tool servers, and stops them at shutdown"]
    _metrics: Annotated[Metrics, "the metrics"]
    _model_manager: Annotated[ModelManager | None, "the models of --models-config"]
    _model_name: Annotated[str | None, "the name of the only model"]
    _model_path: Annotated[str | None, "the directory of the only model"]
    security: Annotated[
        Callable[[HTTPConnection], Awaitable[object]], "reads the API key from the headers"
    ]

    async def _acquire_default_engine_for_request(
        self, raw_request: Request, *, total_timeout: float, deadline: float, model: str | None
    ) -> object:
        """lends an engine to a request"""

    async def _release_engine_for_request(self, raw_request: Request) -> None:
        """returns the engine of a request"""

    def _validate_model_name(self, request_model: str) -> None:
        """rejects an unknown model"""

    async def check_rate_limit(self, request: HTTPConnection) -> None:
        """limits requests, and messages on a WebSocket"""

    async def health(self) -> Mapping[str, object]:
        """the answer of /health"""

    async def list_models(self) -> BaseModel:
        """the models of /v1/models"""

    async def verify_api_key(self, credentials: object) -> object:
        """checks the API key of requests and WebSockets"""


def server() -> Server:
    """The module, imported on first use: most processes never need it."""
    from vllm_mlx import server

    return cast(Server, server)


def names() -> Iterator[Name]:
    """A row of the table for each name of the protocols."""
    for specification, owner in (
        (Server, "vllm_mlx.server:"),
        (Metrics, "vllm_mlx.server:_metrics."),
        (InferenceTracker, "vllm_mlx.metrics:InferenceTracker."),
        (ModelSpec, "vllm_mlx.lifecycle:ModelSpec."),
        (RegisteredModel, "vllm_mlx.model_registry:RegisteredModel."),
        (ModelManager, "vllm_mlx.model_registry:ModelManager."),
    ):
        for name, hint in get_type_hints(specification, include_extras=True).items():
            yield Name(f"{owner}{name}", hint.__metadata__[0])
        for name, function in inspect.getmembers(specification, inspect.isfunction):
            if not name.startswith("__"):
                parameters = " ".join([*inspect.signature(function).parameters, OTHERS][1:])
                yield Name(f"{owner}{name}", inspect.getdoc(function) or "", parameters)
