"""Mutated requests on every route are answered or refused soon, in the shape of the API."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import figures
import mutations
import psutil
import pytest
from apis import ANSWER
from mutations import CONVERSATION, MESSAGES, STORED, WEBSOCKET, MutatedRequest, mutated_request
from size import SEED, size
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

if TYPE_CHECKING:
    from target import Target

pytestmark = pytest.mark.served

REQUESTS = size(10_000, 200)
SLOW = 1.0
"""Seconds after which an answer is late."""

CPU_MARGIN = size(SLOW, 10.0)
"""Processor seconds that an answer may take beyond a valid one with `top_p`, which is the engine's
work. Not wall time: on a busy machine, waits for a processor are not the server's fault.
"""

ANSWER_TIMEOUT = 120.0
"""Seconds after which no answer is expected."""

MOST_PROBLEMS = 20
UNAVAILABLE = (503, 504)

PLUGIN_PATHS = re.compile(
    r"(/v1/(chat/completions(/control)?|messages(/count_tokens)?|models(/.*)?|responses(/compact|/input_tokens"
    r"|/[^/]+(/input_items|/cancel)?)?|conversations(/[^/]+(/items(/[^/]+)?)?)?|decisions|systemone)|/api/(chat|generate|show|tags|ps|version|v0/models(/.*)?))"
    r"(\?.*)?|/(tokenize|detokenize|props)(\?.*)?"
)
"""Paths that the plugin answers itself."""

LAST_EVENTS = ("error", "response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True)
class Answer:
    """``status`` 0: no answer, and none was expected."""

    status: int
    body: bytes = b""
    kind: str = ""


@dataclass
class Attacker:
    """Sends requests one after the other; WebSocket messages share a connection while it lasts."""

    target: Target
    stored: str
    conversation: str
    connection: ClientConnection | None = None

    def send(self, request: MutatedRequest) -> Answer:
        """The server's answer. Raises ``TimeoutError``, or ``OSError`` when the server hangs up."""
        replacements = {
            b'"m"': json.dumps(self.target.model).encode(),
            STORED.encode(): self.stored.encode(),
            CONVERSATION.encode(): self.conversation.encode(),
        }
        body = request.body
        for name, actual in replacements.items():
            body = body.replace(name, actual)
        path = request.path.replace(STORED, self.stored).replace(CONVERSATION, self.conversation)
        if request.method == WEBSOCKET:
            return self._converse(body, text=bool(request.headers))
        growth = len(body) - len(request.body)
        length = None if request.length is None else request.length + growth
        return self._post(replace(request, path=path, body=body, length=length))

    def _post(self, request: MutatedRequest) -> Answer:
        url = self.target.server.base_url.removeprefix("http://")
        host, _, port = url.partition(":")
        head = [f"{request.method} {request.path} HTTP/1.1".encode()]
        if not any(name == "Host" for name, _ in request.headers):
            head.append(f"Host: {url}".encode())
        head += [name.encode() + b": " + value for name, value in request.headers]
        length = len(request.body) if request.length is None else request.length
        if not any(name == "Transfer-Encoding" for name, _ in request.headers):
            head.append(f"Content-Length: {length}".encode())
        with socket.create_connection((host, int(port)), timeout=ANSWER_TIMEOUT) as connection:
            try:
                connection.sendall(b"\r\n".join([*head, b"Connection: close", b"", request.body]))
                if request.length is not None or b"chunked" in b"".join(head):
                    connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it was refused before all was sent, and the refusal can be read
            response = http.client.HTTPResponse(connection, method=request.method)
            try:
                response.begin()
                return Answer(response.status, response.read(), response.headers.get_content_type())
            except (http.client.RemoteDisconnected, ConnectionResetError):
                if request.length is None and b"chunked" not in b"".join(head):
                    raise
                return Answer(0)  # half a request needs no answer

    def _converse(self, body: bytes, *, text: bool) -> Answer:
        if self.connection is None:
            url = self.target.server.base_url.replace("http", "ws", 1) + mutations.RESPONSES
            self.connection = connect(url, max_size=None, compression=None)
        try:
            self.connection.send(body, text=text)
            while True:
                event = strict(self.connection.recv(timeout=ANSWER_TIMEOUT))
                if event["type"] in LAST_EVENTS:
                    status = event.get("status", 500) if event["type"] == "error" else 200
                    return Answer(status, json.dumps(event).encode(), "application/json")
        except ConnectionClosed as closed:
            self.connection = None
            code = closed.rcvd.code if closed.rcvd else None
            if code in (1007, 1009, 1013):  # no UTF-8, too large, too many
                return Answer(0)
            raise OSError(f"the connection was closed: {code}") from closed


def strict(text: str | bytes) -> Any:
    """Parses strict JSON: no NaN, and no text that cannot be encoded."""
    decoded = text.decode() if isinstance(text, bytes) else text
    value = json.loads(decoded, parse_constant=_reject_constant)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def problem_of(request: MutatedRequest, answer: Answer) -> str:
    """The problem of an answer, or ""."""
    if answer.status >= 500 and answer.status not in UNAVAILABLE:
        return f"status {answer.status}: {answer.body[:500]!r}"
    if (
        request.method == "HEAD"
        or answer.status == 0
        or not PLUGIN_PATHS.fullmatch(unquote(request.path))
    ):
        return ""
    if any(name == "Upgrade" for name, _ in request.headers):
        return ""  # it may not reach any API
    if answer.status >= 400:
        return shape_problem(request, answer)
    try:
        for document in documents(answer):
            strict(document)
    except ValueError as error:
        return f"not JSON ({error}): {answer.body[:500]!r}"
    return ""


def documents(answer: Answer) -> list[str]:
    """The JSON texts of a stream, or the only one."""
    text = answer.body.decode()
    if answer.kind == "application/x-ndjson":
        return text.splitlines()
    if answer.kind != "text/event-stream":
        return [text] if text else []
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [part for part in data if part != "[DONE]"]


def shape_problem(request: MutatedRequest, answer: Answer) -> str:
    """The problem of an error that does not have the shape of its API, or ""."""
    if answer.status == 400 and answer.body == b"Invalid HTTP request received.":
        return ""  # invalid HTTP reaches no API
    try:
        document = strict(answer.body)
        error = document["error"]
        if re.match(r"/api/(?!v0/)", request.path):
            error = {"message": error, **dict.fromkeys(("type", "param", "code"))}
        if request.path.startswith(MESSAGES):
            is_right = document["type"] == "error" and {"type", "message"} <= set(error)
        else:
            is_right = {"message", "type", "param", "code"} <= set(error)
        is_right = is_right and isinstance(error["message"], str) and bool(error["message"])
    except (ValueError, KeyError, TypeError):
        is_right = False
    return "" if is_right else f"not its API's error: {answer.status} {answer.body[:500]!r}"


def assert_healthy(target: Target) -> str:
    """Asserts that valid requests are answered. Returns the id of a stored response."""
    body = {"model": target.model, "input": [{"role": "user", "content": "Twelve words."}]}
    with target.server.client(timeout=300) as client:
        response = client.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        document = response.json()
        assert document["output"][0]["content"][0]["text"] == ANSWER
        for path, limit in (("/v1/chat/completions", "max_tokens"), ("/v1/messages", "max_tokens")):
            chat = {"model": target.model, "messages": body["input"], limit: 64}
            assert ANSWER.strip() in client.post(path, json=chat).text
    return str(document["id"])


def create_conversation(target: Target) -> str:
    """Creates a conversation. Returns its id."""
    with target.server.client() as client:
        return str(client.post(mutations.CONVERSATIONS, json={}).json()["id"])


def cpu_seconds_of_drawn_answer(target: Target) -> float:
    """Processor seconds of a valid answer with sampling and a tool's grammar."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": "Twelve words."}],
        "tools": [{"type": "function", "function": function}],
        "temperature": 1.0,
        "top_p": 0.9,
        "max_tokens": 64,
    }
    process = psutil.Process(target.server.pid)
    with target.server.client(timeout=300) as client:
        for _ in range(2):  # the first one compiles the grammar
            cpu_before = sum(process.cpu_times()[:2])
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    return sum(process.cpu_times()[:2]) - cpu_before


class Log:
    """The new output of a server."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, path.stat().st_size

    def new(self) -> str:
        """The output since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            new_bytes = file.read()
        self._at += len(new_bytes)
        return new_bytes.decode("utf-8", "replace")


def test_mutated_requests_are_answered_or_rejected(target: Target) -> None:
    started = time.monotonic()
    attacker = Attacker(target, assert_healthy(target), create_conversation(target))
    problems: list[str] = []
    statuses: Counter[int] = Counter()
    slow_requests, longest, most_cpu_seconds = [], 0.0, 0.0
    cpu_limit = CPU_MARGIN + cpu_seconds_of_drawn_answer(target)
    log = Log(target.server.log_path)
    process = psutil.Process(target.server.pid)
    for index in range(REQUESTS):
        request, answer, problem = mutated_request(SEED, index), Answer(0), ""
        sent_at, cpu_before = time.monotonic(), sum(process.cpu_times()[:2])
        try:
            answer = attacker.send(request)
            problem = problem_of(request, answer)
            statuses[answer.status] += 1
        except (OSError, AssertionError, ValueError, http.client.HTTPException) as error:
            problem, attacker.connection = f"{type(error).__name__}: {error}", None
        seconds = time.monotonic() - sent_at
        cpu_seconds = min(sum(process.cpu_times()[:2]) - cpu_before, seconds)
        longest, most_cpu_seconds = max(longest, seconds), max(most_cpu_seconds, cpu_seconds)
        if seconds > SLOW:
            duration = f"{seconds:.1f} s, {cpu_seconds:.1f} s of them computing"
            slow_requests.append(f"{duration}: seed {SEED}, request {index}: {request}")
        if cpu_seconds > cpu_limit:
            problem = f"{problem} {cpu_seconds:.1f} s of computing"
        if "Traceback" in (output := log.new()):
            problem = f"{problem}\n{output[-3_000:]}"
        if problem:
            problems.append(f"seed {SEED}, request {index}: {problem}\n    {request}")
            if len(problems) >= MOST_PROBLEMS or target.server.process.poll() is not None:
                break
        if request.method == "DELETE" and answer.status == 200:
            attacker.stored, attacker.conversation = (
                assert_healthy(target),
                create_conversation(target),
            )
    if attacker.connection is not None:
        attacker.connection.close()
    figures.report(
        "fuzz",
        f"{sum(statuses.values())} mutated requests (seed {SEED}) in "
        f"{time.monotonic() - started:.0f} s, {len(problems)} answered wrongly, "
        f"{len(slow_requests)} later than {SLOW:.0f} s, the last after {longest:.1f} s; none took "
        f"more than {most_cpu_seconds:.1f} s of a processor (limit {cpu_limit:.1f} s); by status: "
        + ", ".join(f"{status} {count}" for status, count in sorted(statuses.items())),
    )
    print("\n".join(slow_requests))  # shown with -s, or on failure
    assert not problems, "\n\n".join(problems)
    assert_healthy(target)
    snapshot = target.inspection.wait_until_idle()
    assert not snapshot.objects["Job"], snapshot.objects
