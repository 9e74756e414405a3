"""Engines that replay ids over real sockets, in the wire format of each kind, byte for byte.

Their events are as the engines write them: vLLM's were recorded from 0.32 (`data/vllm.sse`),
SGLang's and llama.cpp's are taken from their sources. An ``EngineFault`` in ``faults`` affects the
next request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from harmony_text import script_for
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from vllm_mlx_harmony.core import vocab

Json: TypeAlias = "dict[str, Any]"
Events = Callable[[Sequence[int], Sequence[int], str], Iterator[str]]

TOP_LOGPROBS = (
    (vocab.RETURN, -0.5),
    (5, -1.25),
    (vocab.END, -3.0),
    *((at, 96.0 - at) for at in range(100, 117)),
)
"""The likeliest ids at every position, of engines that return log probabilities."""


def logprob_of(token: int) -> float:
    return dict(TOP_LOGPROBS).get(token, -30 - token / 1000)


KINDS = ("vllm", "vllm-tokens", "sglang", "sglang-incremental", "llamacpp", "vllm-mlx")


def compact(value: Json) -> str:
    """Compact JSON, as pydantic, orjson and nlohmann::json write it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# --- Requests and events of each kind


@dataclass(frozen=True)
class Exchange:
    """The wire format of a kind: its path, the fields of a request, its events and errors."""

    path: str
    prompt: Callable[[Json], list[int]]
    max_tokens: Callable[[Json], int]
    events: Events
    """The events for a prompt, the generated ids and the finish reason."""
    error: Callable[[int, str], Json]


def _openai_error(status: int, message: str) -> Json:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}


def vllm_events(prompt: Sequence[int], output: Sequence[int], finish: str) -> Iterator[str]:
    base = {"id": "cmpl-a4a4b042414aac84", "object": "text_completion", "created": 1795351480}
    for at, token in enumerate(output):
        last = at == len(output) - 1
        choice = {
            "index": 0,
            "text": vocab.token_bytes(token).decode("utf-8", "replace"),
            "logprobs": None,
            "finish_reason": finish if last else None,
            "stop_reason": token if last and finish == "stop" else None,
            "prompt_token_ids": None if at else list(prompt),
            "token_ids": [token],
        }
        yield compact({**base, "model": "m", "choices": [choice]})
    usage = {
        "prompt_tokens": len(prompt),
        "total_tokens": len(prompt) + len(output),
        "completion_tokens": len(output),
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    yield compact({**base, "model": "m", "choices": [], "usage": usage})
    yield "[DONE]"


def vllm_token_events(prompt: Sequence[int], output: Sequence[int], finish: str) -> Iterator[str]:
    for at, token in enumerate(output):
        last = at == len(output) - 1
        choice = {"index": 0, "finish_reason": finish if last else None, "token_ids": [token]}
        yield compact({"request_id": "generate-tokens-8", "choices": [choice]})
    usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 16}}
    yield compact({"request_id": "generate-tokens-8", "choices": [], "usage": usage})
    yield "[DONE]"


def sglang_events(
    incremental: bool,
) -> Callable[[Sequence[int], Sequence[int], str], Iterator[str]]:
    def events(prompt: Sequence[int], output: Sequence[int], finish: str) -> Iterator[str]:
        for at in range(len(output)):
            last = at == len(output) - 1
            reason = {"type": "stop", "matched": output[-1]} if finish == "stop" else None
            reason = reason or {"type": "length", "length": len(output)}
            meta_info = {
                "id": "5b2b0a3f",
                "finish_reason": reason if last else None,
                "prompt_tokens": len(prompt),
                "weight_version": "default",
                "completion_tokens": at + 1,
                "cached_tokens": 16,
            }
            ids = output[at : at + 1] if incremental else output[: at + 1]
            yield compact({"text": "…", "output_ids": ids, "meta_info": meta_info})
        yield "[DONE]"

    return events


def llamacpp_events(prompt: Sequence[int], output: Sequence[int], finish: str) -> Iterator[str]:
    """No event is sent while the text ends within a character."""
    pending = b""
    for number, token in enumerate(output, start=1):
        pending += vocab.token_bytes(token)
        try:
            content = pending.decode()
        except UnicodeDecodeError:
            continue
        pending = b""
        yield compact(
            {
                "index": 0,
                "content": content,
                "tokens": [token],
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": number,
                "tokens_evaluated": len(prompt),
            }
        )
    yield compact(
        {
            "index": 0,
            "content": "",
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": "gpt-oss.gguf",
            "tokens_predicted": len(output),
            "tokens_evaluated": len(prompt),
            "stop_type": "eos" if finish == "stop" else "limit",
            "stopping_word": "",
            "tokens_cached": len(prompt) + len(output) - 1,
            "timings": {"cache_n": 16, "prompt_n": 3, "predicted_n": len(output)},
        }
    )


def plugin_events(prompt: Sequence[int], output: Sequence[int], finish: str) -> Iterator[str]:
    for token in output:
        yield compact({"ids": [token], "finish": None, "cached_tokens": 0})
    yield compact({"ids": [], "finish": finish, "cached_tokens": 16})


EXCHANGES: dict[str, Exchange] = {
    "vllm": Exchange(
        "/v1/completions",
        lambda body: body["prompt"],
        lambda body: body["max_tokens"],
        vllm_events,
        _openai_error,
    ),
    "vllm-tokens": Exchange(
        "/inference/v1/generate",
        lambda body: body["token_ids"],
        lambda body: body["sampling_params"]["max_tokens"],
        vllm_token_events,
        _openai_error,
    ),
    **{
        name: Exchange(
            "/generate",
            lambda body: body["input_ids"],
            lambda body: body["sampling_params"]["max_new_tokens"],
            sglang_events(incremental),
            lambda status, message: {"error": {"message": message}},
        )
        for name, incremental in (("sglang", False), ("sglang-incremental", True))
    },
    "llamacpp": Exchange(
        "/completion",
        lambda body: body["prompt"],
        lambda body: body["n_predict"],
        llamacpp_events,
        lambda status, message: {
            "error": {"code": status, "message": message, "type": "invalid_request_error"}
        },
    ),
    "vllm-mlx": Exchange(
        "/harmony/v1/generate",
        lambda body: body["prompt"],
        lambda body: body["settings"]["max_tokens"],
        plugin_events,
        _openai_error,
    ),
}

METADATA: dict[str, Json] = {
    "vllm": {"/version": {"version": "0.32.0"}},
    "vllm-tokens": {"/version": {"version": "0.32.0"}},
    "sglang": {
        "/get_model_info": {"model_path": "openai/gpt-oss-20b", "is_generation": True},
        "/get_server_info": {"grammar_backend": "xgrammar"},
    },
    "llamacpp": {"/props": {"default_generation_settings": {"n_ctx": 4096}, "total_slots": 4}},
    "vllm-mlx": {
        "/harmony/v1/generate": {"harmony": 1, "settings": ["top_logprobs", "prediction"]}
    },
}


# --- Faults


HANGS = 3600.0
"""Seconds, far more than any test waits, so that a hang never ends by itself."""


@dataclass(frozen=True)
class EngineFault:
    """A fault of a request: a ``status``, or ``then`` ``after`` so many events.

    ``then``: ``die`` (the connection is reset), ``close`` (the stream ends properly, but the answer
    is incomplete), ``garbage``, ``error`` (an event with an error), ``hang``, ``wait`` (a pause).
    ``die`` and ``hang`` with ``after`` ``None`` come before the status.
    """

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    then: str = ""
    after: int | None = 0


def with_logprobs(kind: str, body: Json, events: Iterator[str]) -> Iterator[str]:
    """``events`` with the log probabilities that ``body`` requests, as each kind writes them."""
    count = {
        "vllm": body.get("logprobs"),
        "vllm-tokens": body.get("sampling_params", {}).get("logprobs"),
        "vllm-mlx": body.get("settings", {}).get("top_logprobs"),
    }.get(kind)
    for data in events:
        event: Json = json.loads(data) if count is not None and data[0] == "{" else {}
        choice = event["choices"][0] if event.get("choices") else event
        tokens = choice.get("token_ids") or choice.get("ids")
        if count is None or not tokens:
            yield data
            continue
        # vLLM puts the id itself first, in addition to the likeliest or as one of them.
        tops = [{token: logprob_of(token)} | dict(TOP_LOGPROBS[:count]) for token in tokens]
        if kind == "vllm":
            choice["logprobs"] = {
                "text_offset": [0] * len(tokens),
                "tokens": [f"token_id:{token}" for token in tokens],
                "token_logprobs": [logprob_of(token) for token in tokens],
                "top_logprobs": [
                    {f"token_id:{token}": logprob for token, logprob in top.items()} for top in tops
                ],
            }
        elif kind == "vllm-tokens":
            token_logprobs = [
                [
                    {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
                    for token, logprob in top.items()
                ]
                for top in tops
            ]
            choice["logprobs"] = {
                "content": [
                    {**entries[0], "top_logprobs": entries[: max(count, 1)]}
                    for entries in token_logprobs
                ]
            }
        else:
            event["logprobs"] = [
                {"logprob": logprob_of(token), "top": TOP_LOGPROBS[:count]} for token in tokens
            ]
        yield compact(event)


@dataclass(eq=False)
class FakeEngine:
    """Generates the script whose key is last in the prompt, with a ``pause`` between events."""

    kind: str
    scripts: dict[str, str]
    pause: float = 0.0
    at_once: int = 1
    """The number of events per piece."""
    grammar: bool = True
    """Whether it conforms to the grammar of a trial."""
    name: str = "gpt-oss-20b"
    """The name of the model."""
    length: int = 4096
    """The context length."""
    held: bool = False
    """While set, it sends at most the next piece of an answer. Trials are answered."""
    silent: str = ""
    """It generates nothing, though other endpoints answer: ``status`` (no status is sent) or
    ``stream`` (the stream stays empty)."""
    limitless: bool = False
    """It ignores the limit of a request."""
    wait_seconds: float = 0.0
    """Seconds of a fault ``wait``, after which the answer continues."""
    faults: list[EngineFault] = field(default_factory=list)
    trial_faults: list[EngineFault] = field(default_factory=list)
    """Faults of the next trials of grammars."""
    bodies: list[Json] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    aborted: int = 0
    bytes_sent: int = 0
    """To sockets."""

    def output_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The script for a prompt."""
        return script_for(prompt, self.scripts)

    async def generate(self, request: Request) -> Response:
        """The endpoint for ids."""
        exchange = EXCHANGES[self.kind]
        body = await request.json()
        trial = _is_trial(body)
        faults = self.trial_faults if trial else self.faults
        fault = faults.pop(0) if faults else None
        prompt = exchange.prompt(body)
        if not trial:
            self.bodies.append(body)
            self.prompts.append(tuple(prompt))
        if self.silent:
            fault = EngineFault(then="hang", after=None if self.silent == "status" else 0)
        if fault is not None and fault.after is None:
            await self._before(request, fault)
        if fault is not None and fault.status != 200:
            return JSONResponse(
                exchange.error(fault.status, "as it was asked to"),
                fault.status,
                dict(fault.headers),
            )
        if trial:
            event_data = exchange.events([1], [vocab.RETURN if self.grammar else 1], "stop")
            events = self._events(request, event_data, fault, trial=True)
            return StreamingResponse(events, media_type="text/event-stream")
        output_ids = self.output_ids(prompt)
        limit = len(output_ids) if self.limitless else exchange.max_tokens(body)
        finish = "length" if len(output_ids) > limit else "stop"
        plain = exchange.events(prompt, output_ids[:limit], finish)
        event_data = with_logprobs(self.kind, body, plain)
        return _Abortable(self, request, self._events(request, event_data, fault))

    async def _before(self, request: Request, fault: EngineFault) -> None:
        if fault.then == "hang":
            await asyncio.sleep(HANGS)
        _reset(request)

    async def _events(
        self,
        request: Request,
        events: Iterator[str],
        fault: EngineFault | None,
        *,
        trial: bool = False,
    ) -> AsyncIterator[bytes]:
        piece = b""
        for number, event in enumerate(events):
            if fault is not None and fault.then == "wait" and number == fault.after:
                await asyncio.sleep(self.wait_seconds)
                fault = None
            if fault is not None and number == fault.after and fault.then:
                if fault.then == "hang":
                    await asyncio.sleep(HANGS)
                if fault.then == "die":
                    await asyncio.sleep(0.05)  # what was sent has arrived
                    _reset(request)
                    await asyncio.sleep(HANGS)
                if fault.then == "error":
                    yield b'data: {"error": {"message": "CUDA error", "code": 500}}\n\n'
                if fault.then == "garbage":
                    yield b"data: \xff\xfe{nonsense\n\n"
                return
            piece += f"data: {event}\n\n".encode()
            if (number + 1) % self.at_once == 0:
                yield piece
                self.bytes_sent += len(piece)
                piece = b""
                await self._pause(trial)
        if piece:
            yield piece

    async def _pause(self, trial: bool) -> None:
        await asyncio.sleep(self.pause)
        while self.held and not trial:
            await asyncio.sleep(0.01)

    async def list_models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        entry = {"id": self.name, "object": "model", "owned_by": self.kind}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": self.length}]})

    @property
    def app(self) -> Starlette:
        """The application with all endpoints."""
        routes = [
            Route(EXCHANGES[self.kind].path, self.generate, methods=["POST"]),
            Route("/v1/models", self.list_models),
        ]
        for path, content in METADATA[self.kind.removesuffix("-incremental")].items():
            routes.append(Route(path, _constant_endpoint(content)))
        return Starlette(routes=routes)


def _is_trial(body: Json) -> bool:
    sampling = body.get("sampling_params", body)
    constraint = sampling.get("structured_outputs")
    if isinstance(constraint, dict):
        return bool(constraint["grammar"].startswith(("start: <[", "start: %json")))
    prompt = next(body[name] for name in ("prompt", "token_ids", "input_ids") if name in body)
    return tuple(prompt) == (vocab.START, *vocab.encode("assistant"))


def _constant_endpoint(content: Json) -> Callable[[Request], Any]:
    async def answer(_: Request) -> Response:
        return JSONResponse(content)

    return answer


def _reset(request: Request) -> None:
    """Resets the connection."""
    request.receive.__self__.transport.abort()  # type: ignore[attr-defined]


class _Abortable(StreamingResponse):
    """A response that counts as aborted if it is not read to its end."""

    def __init__(self, engine: FakeEngine, request: Request, pieces: AsyncIterator[bytes]) -> None:
        self._engine = engine
        super().__init__(self._track_request(pieces), media_type="text/event-stream")

    async def _track_request(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        engine = self._engine
        engine.running += 1
        engine.most_running = max(engine.most_running, engine.running)
        finished = False
        try:
            async for piece in pieces:
                yield piece
            finished = True
        finally:
            engine.running -= 1
            engine.aborted += not finished
