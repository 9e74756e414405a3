"""An engine behind HTTP: one request, one stream of ids.

Connections, statuses and the end of a turn are handled here. Fields and events differ between kinds
of engines (`dialect`); `fleet` sends a request that this engine rejects to another one.

**Back-pressure.** The socket is read only after the last ids were consumed. A slow reader thus
fills the kernel's buffers, and the engine's server waits for room in them. **Abort.** Closing the
iterator closes the connection, which ends the request on every engine here.

**Costs.** The client is aiohttp: its parser is written in C and returns everything that a read of
the socket brought in one piece, which is then processed at once (figures:
``benchmarks/bench_gateway.py``).

**Forced ids.** No engine accepts ids in the middle of a request. When reasoning has to end
(`core.reasoning`), the request is closed and another one continues after the forced ids: the
engine's prefix cache has everything before them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from http import HTTPStatus

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
from pydantic_core import to_json

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint, ConstraintSpec
from vllm_mlx_harmony.core.deltas import Progress, TokenLogprob
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError, RequestError
from vllm_mlx_harmony.core.grammar import with_compact_json
from vllm_mlx_harmony.engine_api.engine import (
    Finish,
    GenerationRequest,
    GenerationSettings,
    Origin,
    Step,
    Steps,
)
from vllm_mlx_harmony.gateway.engines.dialect import (
    Capabilities,
    Dialect,
    EngineRequest,
    message_of,
)
from vllm_mlx_harmony.tasks import cancel_and_wait

CONNECT_SECONDS = 5.0
"""How long a connection may take, also with a lost packet or two: TCP sends a second SYN after one
second, and a third after three. Another engine gets the request then."""

KEEP_ALIVE_SECONDS = 4.0
"""How long an idle connection is kept. uvicorn, which serves vLLM and SGLang, closes it after 5
seconds, and a request sent at that moment would be lost."""

MAX_ERROR_BYTES = 65_536
"""Bytes of an error's body that are read."""

MAX_EVENT_BYTES = 4 * 2**20
"""Bytes of one event. The largest are those with log probabilities: some kilobytes an id."""

MAX_RETRY_AFTER = 3600
"""Seconds for which an engine can say that it is busy."""

FAILURES = (ClientError, OSError, asyncio.TimeoutError, ValueError)
"""Errors of a connection; ``ValueError`` for a response that is not HTTP and for an invalid URL."""

NOT_CONNECTED = (ClientConnectorError, ServerTimeoutError)
"""Those raised before a connection exists."""

ACCEPTED_AFTER_SECONDS = 2.0
"""A request without a response for so long counts as accepted: some engines send no status before
they have computed the prompt."""

END_SECONDS = 3.0
"""How long an engine may take to end the stream after the last id."""

ACCEPTED = Step(())
"""The engine has accepted the request."""

MAX_CONTINUATIONS = 4
"""The most requests that make up one turn: each after the first follows forced ids."""


class EngineUnavailable(HostError):
    """The engine did not accept the request, or lost it; another one may serve it."""

    code = "engine_unavailable"
    engine_status = 0
    """The HTTP status of its response; 0 if there was none."""
    connected = True
    """Whether there was a connection at all."""

    @property
    def is_full(self) -> bool:
        """Whether the engine is healthy but has no capacity."""
        return self.retry_after is not None or self.status == HTTPStatus.TOO_MANY_REQUESTS


class EngineSilent(EngineUnavailable):
    """The engine accepts requests and generates nothing, for this one or any other."""


class EngineLost(OutputError):
    """The connection broke in the middle of an answer."""


def client() -> ClientSession:
    """The HTTP client of a process, made in its event loop. It keeps connections alive.

    There is no limit to their number and none to silence: the front end limits the time of a
    request (``Host.deadline``).
    """
    connector = TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    return ClientSession(
        connector=connector, cookie_jar=DummyCookieJar(), timeout=silence(None), trust_env=False
    )


def silence(seconds: float | None) -> ClientTimeout:
    """A timeout for each read; ``None`` is no limit."""
    return ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=seconds)


@dataclass(eq=False)
class HttpEngine:
    """The engine at ``url``, which calls its model ``served_name``.

    ``model`` is the gateway's name for the weights: turns are remembered for it, whichever engine
    generated them. ``key`` is the engine's own API key.
    """

    http: ClientSession
    url: str
    dialect: Dialect
    model: str
    served_name: str
    context_length: int | None = None
    key: str = ""

    @property
    def capabilities(self) -> Capabilities:
        return self.dialect.capabilities

    async def generate(self, request: GenerationRequest) -> Steps:
        """Generates as ``engine_api.engine.Engine`` describes.

        Raises ``EngineUnavailable`` before the first id.
        """
        prompt, settings, constraint = request.prompt, request.settings, request.constraint
        spec = ConstraintSpec() if constraint is None else constraint.spec
        grammar, min_tokens = self._grammar(spec), spec.min_tokens
        prediction = settings.prediction if self.capabilities.prediction else ()
        at_least_one = max(1, settings.max_tokens)  # engines accept no other number
        sent = EngineRequest(
            model=self.served_name,
            prompt=prompt,
            settings=replace(settings, max_tokens=at_least_one, prediction=prediction),
            salt=_salt(request.tenant) if self.capabilities.tenant_salt else "",
            grammar=grammar,
            min_tokens=min_tokens,
        )
        # The engine itself follows the grammar: its version of llguidance may differ from ours.
        matcher = None if constraint is None else constraint.start(grammar=False)
        turn = _Turn(matcher, settings, len(prompt))
        for number in range(MAX_CONTINUATIONS):
            finish: Finish | None = None
            last = ACCEPTED
            async with aclosing(self.stream(sent)) as steps:
                async for step in steps:
                    finish = finish or step.finish
                    last = turn.take(step)
                    if turn.forced:
                        break  # other ids must follow than those of this stream
                    if last.ids or last.progress or (step is ACCEPTED and number == 0):
                        yield last
                    if (turn.ended or turn.full) and finish is None:
                        turn.count(cached=await _cached_at_end(steps))
                        finish = None if turn.ended else "length"
                        break
            if turn.ended or (finish is not None and not turn.forced):
                finish = finish if settings.max_tokens else "length"
                yield turn.step(finish="stop" if turn.ended else finish)
                return
            if not turn.forced:
                raise OutputError("the engine's response ended before the answer was complete")
            yield turn.force(last)
            count = len(turn.ids)
            if settings.max_tokens <= count:
                yield turn.step(finish="length")
                return
            if grammar is not None and spec.grammar is not None:
                grammar = self._written(spec.grammar.grammar.without_analysis)
            sent = replace(
                sent,
                prompt=(*prompt, *turn.ids),
                settings=replace(sent.settings, max_tokens=settings.max_tokens - count),
                grammar=grammar,
                min_tokens=max(0, min_tokens - count),
            )
        raise OutputError("the model did not stop reasoning")

    def _grammar(self, spec: ConstraintSpec) -> str | None:
        """The text of the grammar; ``None`` if there is none, or if the engine need not follow it.

        Raises ``RequestError`` if the engine has to, and cannot.
        """
        grammar = spec.grammar
        if grammar is None:
            return None
        if self.capabilities.grammar and not grammar.grammar.prefill_ids:
            return self._written(grammar.grammar.text)
        if spec.binding:
            raise RequestError(
                f"this server's engine ({self.dialect.name}) cannot enforce grammars: required "
                "calls, strict tools and response formats are not available",
                code="unsupported_value",
            )
        return None

    def _written(self, text: str) -> str:
        """A grammar in the form that this engine's version of llguidance reads."""
        return text if self.capabilities.grammar_white_space else with_compact_json(text)

    async def stream(self, request: EngineRequest, seconds: float | None = None) -> Steps:
        """The steps that the engine streams, ``ACCEPTED`` first.

        Raises ``EngineUnavailable`` before the first step, and if none comes for ``seconds``, and
        ``OutputError`` after it: ``EngineLost`` if the connection broke.
        """
        headers = {
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {self.key}"} if self.key else {}),
        }
        sending = asyncio.ensure_future(
            self.http.post(
                self.url + self.dialect.path,
                data=to_json(self.dialect.body(request)),
                headers=headers,
                timeout=silence(seconds),
                allow_redirects=False,
            )
        )
        ending: asyncio.TimerHandle | None = None
        try:
            try:
                await asyncio.wait({sending}, timeout=ACCEPTED_AFTER_SECONDS)
                if not sending.done():
                    yield ACCEPTED
                response = await sending
            except FAILURES as error:
                unavailable = EngineUnavailable("the engine cannot be reached")
                unavailable.connected = not isinstance(error, NOT_CONNECTED)
                raise unavailable from error
            await _check(response)
            yield ACCEPTED
            async with aclosing(_steps(response.content, self.dialect)) as groups:
                async for steps in groups:
                    for step in steps:
                        yield step
                    if ending is None and steps and steps[-1].finish is not None:
                        # Only usage and the end of the stream are left, after which the connection
                        # can be used again. Neither is worth a long wait.
                        loop = asyncio.get_running_loop()
                        ending = loop.call_later(END_SECONDS, response.close)
        except FAILURES as error:
            if ending is None:
                raise EngineLost("the connection to the engine broke") from error
        finally:
            if ending is not None:
                ending.cancel()
            await _closed(sending)


async def _closed(sending: asyncio.Task[ClientResponse]) -> None:
    """Ends a request, whose response may arrive while it is being cancelled."""
    try:
        await cancel_and_wait(sending)
    finally:
        if not sending.cancelled() and sending.exception() is None:
            sending.result().close()  # no effect if all of it was read


async def _cached_at_end(steps: Steps) -> int:
    """The cached tokens that an engine reports after the id that ends the turn.

    The engine may finish, so that it caches what it computed, unless it goes on to generate or
    takes long.
    """
    cached = 0
    with suppress(StopAsyncIteration, TimeoutError, OutputError):
        while True:
            async with asyncio.timeout(END_SECONDS):
                step = await anext(steps)
            if step.ids:
                break
            cached = max(cached, step.cached_tokens)
    return cached


class _Turn:
    """One turn: its ids, where it ends, which ids are forced, and the counts of all its streams."""

    def __init__(
        self, matcher: Constraint | None, settings: GenerationSettings, prompt_tokens: int
    ) -> None:
        self._matcher, self._settings = matcher, settings
        self._prompt_tokens = prompt_tokens
        self._cached = self._accepted = self._rejected = 0
        self._accepted_before = self._rejected_before = 0
        """The drafted ids of earlier streams."""
        self.ids: list[int] = []
        self.ended = False
        self.full = False
        """Whether it has as many ids as it may have. Engines end it then, or should."""
        self.forced: tuple[int, ...] = ()
        """The ids that have to follow now, in place of the engine's."""

    def count(self, cached: int, accepted: int = 0, rejected: int = 0) -> None:
        if cached or accepted or rejected:
            self._cached = min(max(self._cached, cached), self._prompt_tokens)
            self._accepted = max(self._accepted, self._accepted_before + accepted)
            self._rejected = max(self._rejected, self._rejected_before + rejected)

    def step(
        self,
        ids: tuple[int, ...] = (),
        finish: Finish | None = None,
        origins: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
        progress: Progress | None = None,
    ) -> Step:
        """A step of the turn, with its counts."""
        counts = self._accepted, self._rejected
        return Step(ids, finish, self._cached, progress, origins, *counts, logprobs)

    def take(self, step: Step) -> Step:
        """The ids of ``step`` that belong to the turn: up to its end or to forced ids.

        None if the turn has no room for any. Raises ``OutputError`` if log probabilities were
        requested and some are missing.
        """
        self.count(step.cached_tokens, step.accepted, step.rejected)
        room, matcher = self._settings.max_tokens - len(self.ids), self._matcher
        ids = step.ids[:room]
        reasoning = None if matcher is None else matcher.reasoning
        for at, token in enumerate(ids):
            if reasoning is not None and token in reasoning.banned:
                self.forced = tuple(vocab.encode("final"))
                ids = ids[:at]
                break
            if matcher is not None:
                matcher.consume(token)
            if token in vocab.TURN_ENDS:
                self.ended = True
            elif reasoning is not None:
                self.forced = reasoning.forced
            if self.ended or self.forced:
                ids = ids[: at + 1]
                break
        self.ids += ids
        self.full = bool(step.ids) and len(self.ids) >= self._settings.max_tokens
        origins = ""
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._settings.origins:
            origins = step.origins[: len(ids)].ljust(len(ids), Origin.UNKNOWN)
        if (most := self._settings.top_logprobs) is not None:
            if len(step.logprobs) < len(ids):
                raise OutputError("the engine did not return every log probability")
            shown = step.logprobs[: len(ids)]
            logprobs = tuple(replace(logprob, top=logprob.top[:most]) for logprob in shown)
        progress = None if self.ids else step.progress
        return self.step(ids, None, origins, logprobs, progress)

    def force(self, last: Step) -> Step:
        """The ``last`` step with the forced ids, which now belong to the turn."""
        room = max(0, self._settings.max_tokens - len(self.ids))
        forced, self.forced = self.forced[:room], ()
        self._accepted_before, self._rejected_before = self._accepted, self._rejected
        if self._matcher is not None:
            for token in forced:
                self._matcher.consume(token)
        self.ids += forced
        origins, logprobs = last.origins, last.logprobs
        if self._settings.origins:
            origins += Origin.FORCED * len(forced)
        if self._settings.top_logprobs is not None:  # no content: they are not shown
            logprobs += tuple(TokenLogprob(token, 0.0) for token in forced)
        return self.step(last.ids + forced, None, origins, logprobs)


def _salt(tenant: str) -> str:
    """Separates the cached prefixes of tenants, and reveals nothing about their keys."""
    return blake2b(tenant.encode(), digest_size=16, person=b"cache salt").hexdigest()


async def _steps(content: StreamReader, dialect: Dialect) -> AsyncGenerator[list[Step], None]:
    """The steps of a stream. Those that arrived at once are joined, except for progress.

    Raises ``HarmonyFailure`` for an error event or a malformed one, after the steps before it.
    """
    seen = 0
    async with aclosing(_events(content)) as groups:
        async for group in groups:
            steps: list[Step] = []
            failure: HarmonyFailure | None = None
            try:
                for data in group:
                    steps.append(dialect.read(data, seen))
                    seen += len(steps[-1].ids)
            except HarmonyFailure as error:
                failure = error
            if len(steps) == 1 and failure is None:
                yield steps  # the usual case, and the faster one
                continue
            progress = [Step((), progress=step.progress) for step in steps if step.progress][-1:]
            ids = tuple(token for step in steps for token in step.ids)
            logprobs = tuple(one for step in steps for one in step.logprobs)
            finish = next((step.finish for step in steps if step.finish is not None), None)
            cached = max((step.cached_tokens for step in steps), default=0)
            origins = "".join(step.origins for step in steps)
            accepted = max((step.accepted for step in steps), default=0)
            rejected = max((step.rejected for step in steps), default=0)
            step = Step(ids, finish, cached, None, origins, accepted, rejected, logprobs)
            yield [*progress, step] if ids or finish or cached else progress
            if failure is not None:
                raise failure


async def _events(content: StreamReader) -> AsyncGenerator[list[bytes], None]:
    """The data of server-sent events, in the groups in which they arrived.

    https://html.spec.whatwg.org/multipage/server-sent-events.html; fields other than ``data`` are
    ignored, and lines end with LF or CRLF.
    """
    rest = b""
    data: list[bytes] = []
    size = 0  # of ``data``
    while piece := await content.readany():
        *lines, rest = (rest + piece).split(b"\n")
        group: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[5:].strip())
                size += len(line)
            elif data and not line.strip():
                group.append(b"\n".join(data))
                data, size = [], 0
        if size + len(rest) > MAX_EVENT_BYTES:
            raise OutputError("the engine sent an event that is too large")
        if group:
            yield group


async def _check(response: ClientResponse) -> None:
    """Raises the exception for an error status, and for a response that is not a stream."""
    status = response.status
    if status == HTTPStatus.OK:
        kind = response.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            return
        unavailable = EngineUnavailable(
            f"the engine answered with {kind or 'nothing'}, not a stream"
        )
    else:
        content = b""
        with suppress(*FAILURES):  # the status is enough
            async for piece in response.content.iter_any():
                content += piece
                if len(content) > MAX_ERROR_BYTES:
                    break
        text = content.decode("utf-8", "replace")
        message = text[:200]
        with suppress(ValueError):
            message = message_of(json.loads(text)) or message
        if status in (400, 413, 422):
            raise RequestError(f"the engine refused the request: {message}", code="engine_refused")
        unavailable = EngineUnavailable(
            f"the engine answered {status}: {message}",
            status=429 if status == HTTPStatus.TOO_MANY_REQUESTS else 503,
            retry_after=_retry_after(response.headers.get("retry-after", "")),
        )
    unavailable.engine_status = status
    raise unavailable


def _retry_after(header: str) -> int | None:
    """The seconds of a `Retry-After`; ``None`` if it has no number."""
    if not (header.isascii() and header.isdigit()):
        return None
    return min(int(header[: len(str(MAX_RETRY_AFTER)) + 1]), MAX_RETRY_AFTER)


def reason_of(error: BaseException) -> str:
    """The message of ``error``, or its type if it has none."""
    return str(error) or type(error).__name__
