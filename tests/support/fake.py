"""A server that passes every check, and one switch for each fault: the real front end over an
engine that follows the stand-in's scripts, and between them and the client whatever is wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fake_engines import served
from fakes import KEY, MODEL, Alone, ScriptedEngine, ids
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
HEADER = ids("<|channel|>final<|message|>")
"""Of an answer, with which a prompt may end."""

SLOW = 5.0
TIMES = {"QUIET": 2.5, "BEGUN": 2.5}
"""Of `wire`, for a prompt that takes `SLOW` seconds."""


class BookEngine(ScriptedEngine):
    """Follows the stand-in's scripts. What an earlier prompt begins with, too, is cached.

    With ``slow``, a long prompt takes `SLOW` seconds; otherwise its script's delay does not count.
    With ``forgets``, a prompt that is cancelled meanwhile is not cached.
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
        begun = len(HEADER) if prompt[-len(HEADER) :] == HEADER else 0
        opened = list(prompt[: len(prompt) - begun])
        entry = cursor._find(opened, self.book, lambda ids: decode(list(ids)))
        cached = max((_common(prompt, each) for each in self.prompts), default=0)
        if self.slow and entry.prompt_ms:
            for done in range(cached, len(prompt), CHUNK):
                if not self.forgets:
                    self.prompts.append(prompt[:done])
                await asyncio.sleep(SLOW * CHUNK / len(prompt))
        output = entry.completion[begun:][: request.settings.max_tokens]
        self.prompts.append((*prompt, *entry.completion))
        for at, token in enumerate(output, 1):
            cut = "length" if output[-1] not in vocab.TURN_ENDS else "stop"
            finish: Finish | None = cut if at == len(output) else None  # type: ignore[assignment]
            logprob = -0.01
            found = TokenLogprob(token, logprob, ((token, logprob),))
            asked = request.settings.top_logprobs is not None
            yield Step((token,), finish, cached, logprobs=(found,) if asked else ())
            await asyncio.sleep(entry.delay_ms / 1000)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Host(Alone):
    """One that lists the context, and takes any number of tokens."""

    async def models(self) -> dict[str, Any]:
        listed = await super().models()
        context = self.engine.context_length
        return {**listed, "data": [{**each, "max_model_len": context} for each in listed["data"]]}

    def max_tokens(self, asked: int | None) -> int:
        return asked or CONTEXT

    async def check_rate_limit(self, connection: Any) -> None:
        if connection.headers.get("x-limited"):
            raise HTTPException(429)


@dataclass
class Reply:
    """A response, whole."""

    status: int
    text: str

    @property
    def document(self) -> Request:
        return json.loads(self.text)

    def events(self) -> list[tuple[str, Any]]:
        """Names and documents of a stream, without what is not JSON."""
        blocks = [block.splitlines() for block in self.text.split("\n\n") if "data: " in block]
        found = []
        for lines in blocks:
            fields = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
        return found


def stream(events: list[tuple[str, Any]]) -> str:
    """The text of a stream."""
    frames = []
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        frames.append((f"event: {name}\n" if name else "") + f"data: {text}\n\n")
    return "".join(frames)


@dataclass(frozen=True)
class Fault:
    """What is wrong with the requests for which ``when`` holds, given method, path and body.

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
        meant = self.fault.when(scope["method"], scope["path"], body)
        if meant and self.fault.request:
            self.fault.request(body)
            content = json.dumps(body).encode()
            rest = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
            scope = {**scope, "headers": [*rest, (b"content-length", b"%d" % len(content))]}
        given = [{"type": "http.request", "body": content}]

        async def receiving() -> Any:
            return given.pop() if given else await receive()

        if not (meant and self.fault.reply):
            await self.app(scope, receiving, send)
            return
        sent: list[Any] = []

        async def collect(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receiving, collect)
        start, text = sent[0], b"".join(each.get("body", b"") for each in sent[1:]).decode()
        reply = self.fault.reply(Reply(start["status"], text))
        kept = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        await send({**start, "status": reply.status, "headers": kept})
        await send({"type": "http.response.body", "body": reply.text.encode()})


class Deaf:
    """An application that goes on with a long answer whose client has gone; others wait for it."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.busy = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while self.busy:
            await asyncio.sleep(0.01)
        times: list[float] = []
        is_long = False

        async def receiving() -> Any:
            nonlocal is_long
            message = await receive()
            if str(wire.LONG.messages[0]).encode() in message.get("body", b""):
                is_long = self.busy = True
            return message

        async def sending(message: Any) -> None:
            times.append(time.monotonic())
            await send(message)

        try:
            await self.app(scope, receiving, sending)
        finally:
            if is_long:
                rest = (times[-1] - times[0]) / len(times) * wire.LONG.limit
                # Long enough to be noticed on a machine that does other things, too.
                await asyncio.sleep(max(rest, 5.0))
                self.busy = False


@contextmanager
def serving(
    fault: Fault | type[Deaf] | None = None, engine: BookEngine | None = None
) -> Iterator[str]:
    """The URL of a server, with a fault or without."""
    app: App = application(Host(engine or BookEngine()))
    if isinstance(fault, Fault):
        app = Broken(app, fault)
    elif fault is not None:
        app = fault(app)
    with served(app) as url:
        yield url


def outcomes(url: str, *only: str, repeat: int = 1) -> dict[str, checks.Outcome]:
    """What the checks find, by name."""
    from vllm_mlx_harmony.verify.suite import CHECKS

    async def run() -> list[checks.Outcome]:
        async with trial.client(url, KEY, 30) as client:
            listed = await trial.models(client)
            server = trial.Server(client, MODEL, KEY, listed[MODEL])
            rows = checks.chosen(CHECKS, only)
            return [outcome async for outcome in checks.run(server, rows, repeat)]

    return {outcome.name: outcome for outcome in asyncio.run(run())}
