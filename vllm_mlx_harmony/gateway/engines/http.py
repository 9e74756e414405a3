"""An engine behind HTTP as the front end's ``Engine``: one request, one stream of ids.

Knows connections, statuses and how a turn ends. Refuses to know what fields and events are called
(`dialect`), and where a request goes that this engine does not take (`router`).

**Back-pressure.** Nothing is read from the engine's socket before the last ids were taken: whoever
reads slowly fills the kernel's buffers, and the engine's server waits for room in them. **Abort.**
Closing the iterator closes the connection, which ends the request on every engine here.

**Costs.** The client is aiohttp's: its parser is in C and hands on what a socket brought in one
piece, and all that follows is done once for a piece (``ci/bench_gateway.py`` has the figures).

**Ids that are forced.** No engine lets ids be put into a running request. Where reasoning has to
end (`core.reasoning`), the request is closed and another one begun behind the forced ids: the
engine's prefix cache has everything before them.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from http import HTTPStatus
from typing import Any

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    ServerTimeoutError,
    StreamReader,
    TCPConnector,
)

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint, ConstraintMatcher, ConstraintSpec
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError, RequestError
from vllm_mlx_harmony.core.grammar import with_compact_json
from vllm_mlx_harmony.gateway.engines.dialect import (
    Capabilities,
    Chunk,
    Dialect,
    EngineRequest,
    message_of,
)
from vllm_mlx_harmony.server.engine import Finish, Step, Steps
from vllm_mlx_harmony.server.generation import stopped
from vllm_mlx_harmony.server.sampling import Settings

CONNECT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 4.0
"""For which a connection without a request is kept: uvicorn, which vLLM and SGLang run under,
closes it after 5, and a request that is on its way just then would be lost."""
LONGEST_ERROR = 65_536
"""Bytes of an error's body that are read."""

FAILURES = (ClientError, OSError, asyncio.TimeoutError, ValueError)
"""Of a connection; ``ValueError``: what came is no HTTP, or there is no such URL."""

NOT_CONNECTED = (ClientConnectorError, ServerTimeoutError)
"""Those of a connection that was never there."""

PATIENCE_SECONDS = 2.0
"""After which a request that has no answer yet counts as accepted: some engines send no status
before they have computed the prompt."""

END_SECONDS = 3.0
"""For what an engine sends behind the last id."""

ACCEPTED = Chunk()
"""Says that the engine has accepted the request."""

MOST_CONTINUATIONS = 4
"""Requests that one turn is made of, at most: each after the first follows ids that were forced."""


class EngineUnavailable(HostError):
    """The engine did not take the request, or lost it: another one may do it.

    ``answered`` is the HTTP status that it answered with; 0 where it did not. ``reached`` is
    whether there was a connection at all.
    """

    code = "engine_unavailable"
    answered = 0
    reached = True

    @property
    def is_full(self) -> bool:
        """Whether the engine is well, and has no room."""
        return self.retry_after is not None or self.status == HTTPStatus.TOO_MANY_REQUESTS


class EngineSilent(EngineUnavailable):
    """The engine takes requests and generates nothing, for this one or any other."""


class EngineLost(OutputError):
    """The connection broke in the middle of an answer."""


def client(receive_buffer: int | None = None) -> ClientSession:
    """The one client of a process: connections are kept alive, and there is no limit to them.

    Of an event loop that runs. Silence has no limit here: that of a request is the front end's
    (``Host.deadline``). ``receive_buffer``: bytes that the kernel takes of a stream nobody reads;
    as it likes, where it is not given.
    """
    connector = TCPConnector(
        limit=0,
        keepalive_timeout=KEEP_ALIVE_SECONDS,
        socket_factory=None if receive_buffer is None else partial(_socket, receive_buffer),
    )
    return ClientSession(
        connector=connector, cookie_jar=DummyCookieJar(), timeout=silence(None), trust_env=False
    )


def silence(seconds: float | None) -> ClientTimeout:
    """A server may say nothing for so long; ``None``: for ever."""
    return ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=seconds)


def _socket(receive_buffer: int, address: Any) -> socket.socket:
    """For a connection to ``address``, as ``getaddrinfo`` gives it."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    return made


class HttpEngine:
    """The engine at ``url``, which speaks ``dialect`` and calls its model ``served_name``.

    ``model`` is what the weights are called here: turns are remembered for it, whichever engine
    generated them. ``key`` is the engine's own API key.
    """

    remote = True

    def __init__(
        self,
        http: ClientSession,
        url: str,
        dialect: Dialect,
        *,
        model: str,
        served_name: str = "",
        context_length: int | None = None,
        key: str = "",
    ) -> None:
        self.url = url.rstrip("/")
        self.dialect = dialect
        self.model = model
        self.context_length = context_length
        self.served_name = served_name or model
        self._http = http
        self._headers = {
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self.dialect.capabilities

    async def reusable_tokens(self, prompt: Sequence[int], tenant: str) -> int:
        """See ``server.engine.Engine``. No engine says it before it has computed."""
        return 0

    async def generate(
        self,
        prompt: tuple[int, ...],
        settings: Settings,
        tenant: str,
        constraint: Constraint | None,
    ) -> Steps:
        """See ``server.engine.Engine``. Raises ``EngineUnavailable`` before anything came."""
        grammar = self._grammar(constraint.spec) if constraint is not None else None
        request = EngineRequest(
            model=self.served_name,
            prompt=prompt,
            settings=replace(settings, max_tokens=max(settings.max_tokens, 1)),
            salt=_salt(tenant) if self.capabilities.tenant_salt else "",
            grammar=grammar,
            min_tokens=constraint.spec.min_tokens if constraint is not None else 0,
        )
        # The grammar is the engine's to follow: its llguidance may be another version than ours.
        turn = _Turn(None if constraint is None else constraint.start(grammar=False))
        cached = 0
        for number in range(MOST_CONTINUATIONS):
            finish: Finish | None = None
            ids: tuple[int, ...] = ()
            async with aclosing(self.chunks(request)) as chunks:
                async for chunk in chunks:
                    cached = max(cached, chunk.cached_tokens)
                    finish = finish or chunk.finish
                    ids = turn.take(chunk.ids) if settings.max_tokens else ()
                    if turn.forced:
                        break  # what it says from here on is not wanted
                    progress = None if turn.ids else chunk.progress
                    if ids or progress or (chunk is ACCEPTED and number == 0):
                        yield Step(ids, None, cached, progress)
                    if turn.ended and finish is None:
                        cached = max(cached, await _cached_behind(chunks))
                        break
            if turn.ended or (finish is not None and not turn.forced):
                finish = finish if settings.max_tokens else "length"
                yield Step((), "stop" if turn.ended else finish, cached)
                return
            if not turn.forced:
                raise OutputError("the engine ended before the answer did")
            yield Step(ids + turn.force(), None, cached)
            request = _behind(request, prompt, settings, turn.ids)
            if grammar is not None and constraint is not None and constraint.spec.grammar:
                text = constraint.spec.grammar.grammar.without_analysis
                request = replace(request, grammar=self._written(text))
            if request.settings.max_tokens < 1:
                yield Step((), "length", cached)
                return
        raise OutputError("the model would not stop to reason")

    def _grammar(self, spec: ConstraintSpec) -> str | None:
        """The text of the grammar, where it can be kept to. Raises ``RequestError`` otherwise."""
        grammar = spec.grammar
        if grammar is None:
            return None
        if self.capabilities.grammar and not grammar.grammar.begun:
            return self._written(grammar.grammar.text)
        if spec.binding:
            raise RequestError(
                f"this server's engine ({self.dialect.name}) cannot be held to a grammar: required "
                "calls, strict tools and response formats are not possible",
                code="unsupported_value",
            )
        return None

    def _written(self, text: str) -> str:
        """A grammar, as this engine's llguidance reads it."""
        return text if self.capabilities.grammar_white_space else with_compact_json(text)

    async def chunks(
        self, request: EngineRequest, seconds: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """What the engine streams, ``ACCEPTED`` first; never silent for longer than ``seconds``.

        Raises ``EngineUnavailable`` before anything came, and ``OutputError`` behind that:
        ``EngineLost`` where the connection broke.
        """
        body = json.dumps(self.dialect.body(request), separators=(",", ":")).encode()
        sending = asyncio.ensure_future(
            self._http.post(
                self.url + self.dialect.path,
                data=body,
                headers=self._headers,
                timeout=silence(seconds),
                allow_redirects=False,
            )
        )
        ending: asyncio.TimerHandle | None = None
        try:
            try:
                await asyncio.wait({sending}, timeout=PATIENCE_SECONDS)
                if not sending.done():
                    yield ACCEPTED
                response = await sending
            except FAILURES as error:
                unavailable = EngineUnavailable(
                    f"the engine cannot be reached ({reason_of(error)})"
                )
                unavailable.reached = not isinstance(error, NOT_CONNECTED)
                raise unavailable from error
            await _check(response)
            yield ACCEPTED
            read = self.dialect.reader().read
            async with aclosing(_events(response.content)) as groups:
                async for group in groups:
                    found, failure = _read(read, group)
                    for chunk in found:
                        yield chunk
                    if failure is not None:
                        raise failure
                    if ending is None and found and found[-1].finish is not None:
                        # What is left is numbers and the end, after which the connection is free:
                        # no engine has a reason to keep us waiting for it.
                        loop = asyncio.get_running_loop()
                        ending = loop.call_later(END_SECONDS, response.close)
        except FAILURES as error:
            if ending is None:
                problem = f"the connection to the engine broke ({reason_of(error)})"
                raise EngineLost(problem) from error
        finally:
            if ending is not None:
                ending.cancel()
            await _closed(sending)


async def _closed(sending: asyncio.Task[ClientResponse]) -> None:
    """Ends a request, whose answer may have come when nobody waited for it."""
    try:
        await stopped(sending)
    finally:
        if not sending.cancelled() and sending.exception() is None:
            sending.result().close()  # free already, if all of it was read


async def _cached_behind(chunks: AsyncGenerator[Chunk, None]) -> int:
    """The cached tokens that an engine counts behind the id that ends the turn.

    It is let come to its end, so that it keeps what it computed, unless it goes on to generate or
    takes long.
    """
    cached = 0
    with suppress(StopAsyncIteration, asyncio.TimeoutError, OutputError):
        while True:
            chunk = await asyncio.wait_for(anext(chunks), END_SECONDS)
            if chunk.ids:
                break
            cached = max(cached, chunk.cached_tokens)
    return cached


class _Turn:
    """One turn, id by id: where it ends, and where ids are forced."""

    def __init__(self, matcher: ConstraintMatcher | None) -> None:
        self._matcher = matcher
        self.ids: list[int] = []
        """All so far."""
        self.ended = False
        self.forced: tuple[int, ...] = ()
        """What has to follow now, whatever the engine says."""

    def take(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Those of ``ids`` that are the turn's: up to its end, or to where others are forced."""
        matcher = self._matcher
        if matcher is None:
            for at, token in enumerate(ids, start=1):
                if token in vocab.TURN_ENDS:
                    self.ended = True
                    ids = ids[:at]
                    break
            self.ids += ids
            return ids
        reasoning = matcher.reasoning
        for at, token in enumerate(ids, start=1):
            if reasoning is not None and token in reasoning.banned:
                self.forced = tuple(vocab.encode("final"))
                return self._taken(ids[: at - 1])
            matcher.consume(token)
            if token in vocab.TURN_ENDS:
                self.ended = True
                return self._taken(ids[:at])
            if reasoning is not None and reasoning.forced:
                self.forced = reasoning.forced
                return self._taken(ids[:at])
        return self._taken(ids)

    def force(self) -> tuple[int, ...]:
        """What is forced: said from now on."""
        forced, self.forced = self.forced, ()
        if self._matcher is not None:
            for token in forced:
                self._matcher.consume(token)
        self.ids += forced
        return forced

    def _taken(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        self.ids += ids
        return ids


def _behind(
    request: EngineRequest, prompt: tuple[int, ...], settings: Settings, said: Sequence[int]
) -> EngineRequest:
    """``request`` of what follows ``said``."""
    left = replace(settings, max_tokens=settings.max_tokens - len(said))
    missing = max(0, request.min_tokens - len(said))
    return replace(request, prompt=(*prompt, *said), settings=left, min_tokens=missing)


def _salt(tenant: str) -> str:
    """What keeps one tenant's prefixes apart: not what its key can be guessed by elsewhere."""
    return blake2b(tenant.encode(), digest_size=16, person=b"cache salt").hexdigest()


def _joined(chunks: list[Chunk]) -> list[Chunk]:
    """Chunks that came at once, as one, behind the last progress among them; empty ones are left
    out."""
    reported = [Chunk(progress=each.progress) for each in chunks if each.progress][-1:]
    chunks = [each for each in chunks if each.ids or each.finish or each.cached_tokens]
    if len(chunks) < 2:  # noqa: PLR2004
        return reported + chunks
    finish = next((each.finish for each in chunks if each.finish is not None), None)
    ids = tuple(token for each in chunks for token in each.ids)
    cached = max(each.cached_tokens for each in chunks)
    return [*reported, Chunk(ids, finish, cached)]


def _read(
    read: Callable[[str], Chunk], group: list[str]
) -> tuple[list[Chunk], HarmonyFailure | None]:
    """What came at once, and the failure that ended it: ids before that were generated."""
    chunks: list[Chunk] = []
    try:
        for data in group:
            chunks.append(read(data))  # noqa: PERF401 - those before a failure are wanted
    except HarmonyFailure as failure:
        return _joined(chunks), failure
    return _joined(chunks), None


async def _events(content: StreamReader) -> AsyncGenerator[list[str], None]:
    """The data of the events, in the groups that they came in.

    As https://html.spec.whatwg.org/multipage/server-sent-events.html has it, of which ``data`` is
    all that counts here; lines end with LF or CRLF.
    """
    rest = b""
    data: list[bytes] = []
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        group: list[str] = []
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[5:].strip())
            elif data and not line.strip():
                group.append(b"\n".join(data).decode("utf-8", "replace"))
                data = []
        if group:
            yield group


async def _check(response: ClientResponse) -> None:
    """Raises what a status, or another kind of answer than a stream, means."""
    status = response.status
    if status == HTTPStatus.OK:
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            problem = f"the engine answered with {kind or 'nothing'}, not a stream"
            unavailable = EngineUnavailable(problem)
            unavailable.answered = status
            raise unavailable
        return
    said = await _said(response)
    if status in (400, 413, 422):
        raise RequestError(f"the engine refused the request: {said}", code="engine_refused")
    retry_after = response.headers.get("retry-after", "")
    unavailable = EngineUnavailable(
        f"the engine answered {status}: {said}",
        status=429 if status == HTTPStatus.TOO_MANY_REQUESTS else 503,
        retry_after=int(retry_after) if retry_after.isdigit() else None,
    )
    unavailable.answered = status
    raise unavailable


async def _said(response: ClientResponse) -> str:
    """What an error says, or how it begins."""
    content = b""
    with suppress(*FAILURES):  # the status is there
        async for piece in response.content.iter_any():
            content += piece
            if len(content) > LONGEST_ERROR:
                break
    text = content.decode("utf-8", "replace")
    try:
        return message_of(json.loads(text)) or text[:200]
    except ValueError:
        return text[:200]


def reason_of(error: Exception) -> str:
    """What ``error`` says of itself: the name of its kind where it says nothing."""
    return str(error) or type(error).__name__
