"""The inspector's routes: its page, its files, and their data as JSON.

``/harmony`` is the page. Below ``/harmony/inspector/``: ``login`` and ``logout``; ``requests``, the
list; ``events``, its changes as server-sent events; ``requests/ID``, one request with its prompt;
``requests/ID/output``, what follows the ids and events that a client has already; ``requests/ID/
end``, and ``requests/ID/answer``, which ends the reasoning; ``server``, the state of the server.
"""

from __future__ import annotations

import asyncio
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from importlib.resources import files
from json import loads
from typing import TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.inspector.access import PATH, SECURITY, Sessions, check_origin
from vllm_mlx_harmony.inspector.record import Log, Record
from vllm_mlx_harmony.protocols.events import Event, encode
from vllm_mlx_harmony.server.answers import AnswerKey, ReasoningStop
from vllm_mlx_harmony.server.front_end import front_end_of
from vllm_mlx_harmony.server.streams import EventStream
from vllm_mlx_harmony.tasks import in_thread

PAGE = PATH
BELOW = f"{PATH}/inspector"

SECONDS = 0.25
"""Between two looks for changes of the list."""

MAX_SILENCE = 15.0
"""Seconds after which a comment shows proxies that the connection is alive."""

MAX_STREAMS = 32
"""Pages that may be open. Each of them looks for changes every ``SECONDS`` seconds, and the next
one gets 503."""

MAX_LOGIN = 4_096
"""Bytes of the body of a login."""

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

Section: TypeAlias = "tuple[str, Sequence[tuple[str, float | str | None, str]]]"
"""A title, and names with their values and units (``bytes``, ``tokens`` or empty)."""

Status: TypeAlias = Callable[[], Sequence[Section]]

Handler: TypeAlias = "Callable[[Request], Awaitable[Response]]"


class Pages:
    """The routes over a ``log``, and what the server knows of itself."""

    def __init__(self, log: Log, status: Status) -> None:
        self._log, self._status = log, status
        self._sessions = Sessions()
        self._streams = 0
        one = f"{BELOW}/requests/{{id}}"
        rows: tuple[tuple[str, str, Handler], ...] = (
            ("GET", f"{BELOW}/requests", self._list),
            ("GET", f"{BELOW}/events", self._events),
            ("GET", one, self._request),
            ("GET", f"{one}/output", self._output),
            ("POST", f"{one}/end", self._end),
            ("POST", f"{one}/answer", self._answer_now),
            ("GET", f"{BELOW}/server", self._server),
            ("POST", f"{BELOW}/login", self._login),
            ("POST", f"{BELOW}/logout", self._logout),
        )
        self.routes = [
            Route(PAGE, _file("index.html"), methods=["GET"]),
            *(Route(path, _own(handler), methods=[method]) for method, path, handler in rows),
            *(
                Route(f"{BELOW}/{file.name}", _file(file.name), methods=["GET"])
                for file in _STATIC.iterdir()
                if file.name != "index.html"
            ),
        ]

    # --- Access

    async def _login(self, request: Request) -> Response:
        response = JSONResponse({"logged_in": True})
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_LOGIN:
                raise HTTPException(413, "this is not a key")
        try:
            document = loads(body)
        except ValueError:
            document = None
        key = document.get("key") if isinstance(document, dict) else None
        if not isinstance(key, str):
            raise HTTPException(400, "key must be a string")
        await self._sessions.open(request, key, response)
        return response

    async def _logout(self, request: Request) -> Response:
        response = JSONResponse({"logged_in": False})
        self._sessions.close(request, response)
        return response

    # --- Requests

    async def _list(self, request: Request) -> Response:
        owner = await self._sessions.owner(request)
        rows = [record.summary() for record in self._log.of(owner)]
        return JSONResponse({"keyed": owner is not None, "requests": rows})

    async def _events(self, request: Request) -> Response:
        owner = await self._sessions.owner(request)
        if self._streams >= MAX_STREAMS:
            raise HTTPException(503, "too many pages of the inspector are open")
        return EventStream(request, self._changes(request, owner))

    async def _changes(self, request: Request, owner: str | None) -> AsyncIterator[Event]:
        """All rows, then those that have changed, until the server shuts down, or the key of the
        request is revoked or has expired."""
        answers = front_end_of(request).answers
        seen, silent = -1, 0.0
        self._streams += 1
        try:
            while answers.rejection() is None and await self._sessions.is_valid(request):
                version = self._log.version
                if version > seen:
                    changed = [record for record in self._log.of(owner) if record.version > seen]
                    rows = encode([record.summary() for record in changed])
                    yield Event(rows, "all" if seen < 0 else "")
                    seen, silent = version, 0.0
                elif silent >= MAX_SILENCE:
                    yield Event("", comment=True)
                    silent = 0.0
                await asyncio.sleep(SECONDS)
                silent += SECONDS
        finally:
            self._streams -= 1

    async def _found(self, request: Request) -> Record:
        owner = await self._sessions.owner(request)
        record = self._log.find(request.path_params["id"], owner)
        if record is None:
            raise HTTPException(404, "the log does not contain this request (any more)")
        return record

    async def _request(self, request: Request) -> Response:
        record = await self._found(request)
        return Response(await in_thread(_document, record), media_type="application/json")

    async def _output(self, request: Request) -> Response:
        record = await self._found(request)
        tokens, events = (_number(request, name) for name in ("tokens", "events"))
        shown = partial(_output, record, tokens, events)
        return Response(await in_thread(shown), media_type="application/json")

    async def _end(self, request: Request) -> Response:
        key = await self._key(request)
        return JSONResponse({"ended": front_end_of(request).answers.cancel(key)})

    async def _answer_now(self, request: Request) -> Response:
        key = await self._key(request)
        result = front_end_of(request).answers.end_reasoning(key)
        if result is not ReasoningStop.ENDED:
            raise HTTPException(409, "the server cannot end the reasoning of this answer")
        return JSONResponse({"ended": True})

    async def _key(self, request: Request) -> AnswerKey:
        observed = (await self._found(request)).observed
        return AnswerKey(observed.id_seed, observed.tenant)

    # --- The server

    async def _server(self, request: Request) -> Response:
        owner, log = await self._sessions.owner(request), self._log
        running = [record for record in log.of(None) if not record.result]
        requests: Section = (
            "Requests",
            [
                ("waiting", sum(record.state == "waiting" for record in running), ""),
                ("running", sum(record.state != "waiting" for record in running), ""),
                ("finished", log.finished, ""),
                ("prompt tokens", log.prompt_tokens, "tokens"),
                ("of these reused", log.cached_tokens, "tokens"),
                ("hit rate", log.cached_tokens / (log.prompt_tokens or 1), "share"),
            ],
        )
        errors = [
            {
                "at": failure.at,
                "what": f"{failure.method} {failure.path}".strip(),
                "status": failure.status,
            }
            | {"message": failure.message}
            for failure in reversed(log.failures)
            if owner in (None, failure.owner)
        ]
        sections = [requests, *self._status()]
        return JSONResponse({"sections": sections, "minutes": log.minutes(), "errors": errors})


def _number(request: Request, name: str) -> int:
    try:
        return max(0, int(request.query_params.get(name, "0")[:9]))
    except ValueError as error:
        raise HTTPException(400, f"{name} must be a number") from error


# --- Documents, which are made in a thread


def _document(record: Record) -> bytes:
    """A request: its row, its body as text, and its prompt."""
    body = None if record.body is None else record.body.decode("utf-8", "replace")
    ids = record.prompt_ids.tolist()
    prompt = {"ids": ids, "texts": _texts(ids)}
    path = record.observed.path
    found = {"summary": record.summary(), "path": path, "body": body, "prompt": prompt}
    return encode(found).encode()


def _output(record: Record, tokens: int, events: int) -> bytes:
    """What was generated after ``tokens`` ids and written after ``events`` events.

    Ends with a whole character, unless the answer has ended.
    """
    ids = record.output[tokens:].tolist()
    texts = _texts(ids)
    while not record.result and texts and not texts[-1]:
        texts.pop()
    found = {
        "summary": record.summary(),
        "ids": ids[: len(texts)],
        "texts": texts,
        "times": [round(seconds, 5) for seconds in record.times[tokens : tokens + len(texts)]],
        "origins": record.origins[tokens : tokens + len(texts)].decode("utf-8", "replace"),
        "results": record.results,
        "events": record.frames[events:],
        "dropped": record.dropped,
    }
    return encode(found).encode()


def _texts(ids: Sequence[int]) -> list[str]:
    """The text of each id. Of the ids of one character, the last one has it; others are empty."""
    texts: list[str] = []
    decoder = _Decoder("replace")
    for token in ids:
        if token in vocab.CONTROL:
            left = decoder.decode(b"", True)
            texts.append(left + vocab.encoding().decode([token]))
        else:
            texts.append(decoder.decode(vocab.token_bytes(token)))
    return texts


_Decoder = getincrementaldecoder("utf-8")


# --- Responses

_STATIC = files(__package__) / "static"


def _file(name: str) -> Handler:
    content = (_STATIC / name).read_bytes()
    kind = TYPES[name.rpartition(".")[2]]

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind, headers=SECURITY)

    return answer


def _own(handler: Handler) -> Handler:
    """``handler`` for the inspector's own pages, with errors as JSON."""

    async def answer(request: Request) -> Response:
        try:
            check_origin(request)
            response = await handler(request)
        except HTTPException as error:
            response = JSONResponse({"error": error.detail}, error.status_code)
        response.headers.update(SECURITY)
        return response

    return answer
