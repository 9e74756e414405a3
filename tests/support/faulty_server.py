"""A server that passes every check, and switches for faults: the real front end over an engine that
follows the stand-in's scripts, with a fault in front of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from app_server import run_server
from harmony_text import ids_of
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.exceptions import HTTPException

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import TokenLogprob
from vllm_mlx_harmony.engine_api.engine import Finish, GenerationRequest, Step, Steps
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.standin import Script, cursor
from vllm_mlx_harmony.standin.scripts import dump_book
from vllm_mlx_harmony.verify import checks, trial, wire
from vllm_mlx_harmony.verify.samples import SCRIPTS

Request = dict[str, Any]
App = Callable[[Any, Any, Any], Any]

CONTEXT = 8192
CHUNK = 256
HEADER = ids_of("<|channel|>final<|message|>")
"""The header of an answer, with which a prompt may end."""

SLOW = 5.0
TIMES = {"MAX_SILENCE_SECONDS": 2.5, "CANCEL_AFTER_SECONDS": 2.5}
"""Values for `wire`, with a prompt that takes `SLOW` seconds."""


class BookEngine(ScriptedEngine):
    """Follows the stand-in's scripts. Prefixes of earlier prompts are cached.

    With ``slow``, a long prompt takes `SLOW` seconds; otherwise its script's delay is ignored.
    With ``forgets``, a prompt that is cancelled while it is computed is not cached.
    """

    def __init__(
        self, scripts: Sequence[Script] = SCRIPTS, *, slow: bool = False, forgets: bool = False
    ) -> None:
        super().__init__({}, context_length=CONTEXT)
        self.slow, self.forgets = slow, forgets
        encode = vocab.encoding().encode
        book = dump_book(scripts, lambda text: encode(text, allowed_special="all"))
        self.book = cursor.parse_book(book)

    async def generate(self, request: GenerationRequest) -> Steps:
        prompt, decode = request.prompt, vocab.encoding().decode
        forced_length = len(HEADER) if prompt[-len(HEADER) :] == HEADER else 0
        prompt_to_script = list(prompt[: len(prompt) - forced_length])
        entry = cursor.entry_for(prompt_to_script, self.book, lambda ids: decode(list(ids)))
        cached = max((_common(prompt, earlier) for earlier in self.prompts), default=0)
        if self.slow and entry.prompt_ms:
            for computed in range(cached, len(prompt), CHUNK):
                if not self.forgets:
                    self.prompts.append(prompt[:computed])
                await asyncio.sleep(SLOW * CHUNK / len(prompt))
        output = entry.completion[forced_length:][: request.settings.max_tokens]
        self.prompts.append((*prompt, *entry.completion))
        for position, token in enumerate(output, 1):
            last_finish = "length" if output[-1] not in vocab.TURN_ENDS else "stop"
            finish: Finish | None = last_finish if position == len(output) else None  # type: ignore[assignment]
            logprob = -0.01
            token_logprob = TokenLogprob(token, logprob, ((token, logprob),))
            wants_logprobs = request.settings.top_logprobs is not None
            yield Step(
                (token,), finish, cached, logprobs=(token_logprob,) if wants_logprobs else ()
            )
            await asyncio.sleep(entry.delay_ms / 1000)


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


class Host(SingleEngineHost):
    """A host that permits any number of tokens."""

    def max_tokens(self, requested: int | None) -> int:
        return requested or CONTEXT

    async def check_rate_limit(self, connection: Any) -> None:
        if connection.headers.get("x-limited"):
            raise HTTPException(429)


@dataclass
class Reply:
    """A whole response."""

    status: int
    text: str

    @property
    def document(self) -> Request:
        return json.loads(self.text)

    def events(self) -> list[tuple[str, Any]]:
        """Names and documents of a stream; [DONE] is a string."""
        blocks = [block.splitlines() for block in self.text.split("\n\n") if "data: " in block]
        events = []
        for lines in blocks:
            fields = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
            data = fields["data"]
            events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
        return events


def stream(events: list[tuple[str, Any]]) -> str:
    """The text of a stream."""
    frames = []
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        frames.append((f"event: {name}\n" if name else "") + f"data: {text}\n\n")
    return "".join(frames)


@dataclass(frozen=True)
class Fault:
    """A fault of requests for which ``when`` is true, given method, path and body.

    ``request`` changes the body before it is served, ``reply`` the response.
    """

    when: Callable[[str, str, Request], bool]
    request: Callable[[Request], None] | None = None
    reply: Callable[[Reply], Reply] | None = None


class Broken:
    """An application with a fault."""

    def __init__(self, app: App, fault: Fault) -> None:
        self.app = app
        self.fault = fault

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        content = b""
        while (message := await receive())["type"] == "http.request":
            content += message["body"]
            if not message.get("more_body"):
                break
        try:
            body = json.loads(content or b"{}")
        except ValueError:
            body = {"broken": content.decode()}
        is_faulty = self.fault.when(scope["method"], scope["path"], body)
        if is_faulty and self.fault.request:
            self.fault.request(body)
            content = json.dumps(body).encode()
            rest = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
            scope = {**scope, "headers": [*rest, (b"content-length", b"%d" % len(content))]}
        messages = [{"type": "http.request", "body": content}]

        async def receive_body() -> Any:
            return messages.pop() if messages else await receive()

        if not (is_faulty and self.fault.reply):
            await self.app(scope, receive_body, send)
            return
        sent_messages: list[Any] = []

        async def collect(message: Any) -> None:
            sent_messages.append(message)

        await self.app(scope, receive_body, collect)
        start, text = (
            sent_messages[0],
            b"".join(part.get("body", b"") for part in sent_messages[1:]).decode(),
        )
        reply = self.fault.reply(Reply(start["status"], text))
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        await send({**start, "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.text.encode()})


class Deaf:
    """An application that continues long answers after disconnects, while others wait."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.busy = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while self.busy:
            await asyncio.sleep(0.01)
        times: list[float] = []
        is_long = False

        async def receive_and_watch() -> Any:
            nonlocal is_long
            message = await receive()
            if str(wire.LONG.messages[0]).encode() in message.get("body", b""):
                is_long = self.busy = True
            return message

        async def send_and_time(message: Any) -> None:
            times.append(time.monotonic())
            await send(message)

        try:
            await self.app(scope, receive_and_watch, send_and_time)
        finally:
            if is_long:
                rest = (times[-1] - times[0]) / len(times) * wire.LONG.limit
                # Long enough to be noticed on a busy machine.
                await asyncio.sleep(max(rest, 5.0))
                self.busy = False


@contextmanager
def run_faulty_server(
    fault: Fault | type[Deaf] | None = None, engine: BookEngine | None = None
) -> Iterator[str]:
    """The URL of a server, with or without a fault."""
    app: App = application(Host(engine or BookEngine()))
    if isinstance(fault, Fault):
        app = Broken(app, fault)
    elif fault is not None:
        app = fault(app)
    with run_server(app) as url:
        yield url


def outcomes(url: str, *only: str, repeat: int = 1) -> dict[str, checks.Outcome]:
    """The outcomes of the checks, by name."""
    from vllm_mlx_harmony.verify.suite import CHECKS

    async def run() -> list[checks.Outcome]:
        async with trial.client(url, KEY, 30) as client:
            models = await trial.models(client)
            server = trial.Server(client, MODEL, KEY, models[MODEL])
            rows = checks.chosen(CHECKS, only)
            return [outcome async for outcome in checks.run(server, rows, repeat)]

    return {outcome.name: outcome for outcome in asyncio.run(run())}
