"""An engine without a model, for trying out a gateway (`gateway stand-in`).

It answers every request with the same text at a given speed. A gateway sees it as a ``vllm-mlx``,
since it serves the id endpoint (`server.ids`). If a grammar does not allow the text, it writes the
shortest valid call or answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

import uvicorn
from starlette.requests import Request

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine_api.engine import Finish, GenerationRequest, Step, Steps
from vllm_mlx_harmony.gateway.host import Gateway
from vllm_mlx_harmony.gateway.settings import GatewaySettings
from vllm_mlx_harmony.server import ids
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.connections import with_connection_limits
from vllm_mlx_harmony.server.front_end import installed_in
from vllm_mlx_harmony.server.host import Deadline, Lease
from vllm_mlx_harmony.server.shutdown import with_graceful_shutdown

TEXT = (
    "<|channel|>analysis<|message|>A stand-in has nothing to think about.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>"
    "This is a stand-in engine, not gpt-oss: it answers every request with this text.<|return|>"
)

ENDINGS = (
    *("<|return|>", "<|call|>", "<|end|>", '"', "}", "]", "{}", "[]", "null", " to", "final", ","),
    *(":", "{", "[", "false", "commentary", "<|message|>", "1", "<|channel|>"),
)
"""Tokens that end a message, a string or an object, or lead there: the first one that is allowed
replaces a token of the text that is not."""


class StandinEngine:
    """The engine. ``pace``: seconds between two tokens."""

    context_length: int | None = 131_072
    remote = False
    has_logprobs = False
    has_prediction = False

    def __init__(self, model: str, pace: float) -> None:
        self.model = model
        self._pace = pace
        encode = vocab.encoding().encode
        self._text = tuple(encode(TEXT, allowed_special="all"))
        self._endings = tuple(encode(ending, allowed_special="all")[0] for ending in ENDINGS)

    async def generate(self, request: GenerationRequest) -> Steps:
        """The ids of the text, one by one."""
        constraint = request.constraint
        matcher = None if constraint is None else constraint.start()
        text = iter(self._text)
        token, left = 0, request.settings.max_tokens
        while left and token not in vocab.TURN_ENDS:
            await asyncio.sleep(self._pace)
            token, left = next(text, vocab.RETURN), left - 1
            allowed = None if matcher is None else matcher.mask()
            if allowed is not None and token not in allowed:
                endings = (ending for ending in self._endings if ending in allowed)
                token = next(endings, None) or allowed.first()
            if matcher is not None:
                matcher.consume(token)
            ended: Finish = "stop" if token in vocab.TURN_ENDS else "length"
            yield Step((token,), None if left and ended == "length" else ended)

    async def reusable_tokens(self, prompt: Sequence[int], tenant: str) -> int:
        """Always 0: nothing is computed, and nothing cached."""
        return 0


class StandinGateway(Gateway):
    """A gateway whose engine is in its own process."""

    def __init__(self, settings: GatewaySettings, engine: StandinEngine) -> None:
        super().__init__(settings)
        self._engine = engine

    async def models(self) -> dict[str, Any]:
        document = await super().models()
        document["data"][0]["max_model_len"] = self._engine.context_length
        return document

    async def acquire(self, request: Request, model: str | None, deadline: Deadline) -> Lease:
        lease = await super().acquire(request, model, deadline)
        lease.engine = self._engine
        return lease


def serve(settings: GatewaySettings, pace: float) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    os.environ[ids.ID_ENDPOINT_VARIABLE] = "1"
    host = StandinGateway(settings, StandinEngine(settings.model, pace))
    app = application(host, host.sharing)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
    )
    draining_server = with_graceful_shutdown(
        with_connection_limits(uvicorn.Server),
        lambda: installed_in(app).answers,
        lambda: settings.shutdown_grace,
    )
    server = draining_server(config)
    logging.getLogger("uvicorn.error").setLevel("INFO")
    server.run()
    return 0 if server.started else 1
