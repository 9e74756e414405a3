"""Mutated requests on every route: each is answered or refused, in its API's words and soon."""

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
from mutations import CONVERSATION, MESSAGES, STORED, WEBSOCKET, Sent, mutated
from size import SEED, size
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

if TYPE_CHECKING:
    from target import Target

pytestmark = pytest.mark.served

REQUESTS = size(10_000, 200)
SLOW = 1.0
"""Seconds from which on an answer is late."""

TOO_SLOW = size(SLOW, 10.0)
"""Seconds of a processor that no answer may take beyond a proper one that is drawn with `top_p`,
which is the engine's work: on a busy machine everybody waits for one, which is no server's fault.
"""

PATIENCE = 120.0
"""Seconds after which nothing comes any more."""

MOST_PROBLEMS = 20
UNAVAILABLE = (503, 504)

OURS = re.compile(
    r"(/v1/(chat/completions(/control)?|messages(/count_tokens)?|models(/.*)?|responses(/compact|/input_tokens"
    r"|/[^/]+(/input_items|/cancel)?)?|conversations(/[^/]+(/items(/[^/]+)?)?)?|decisions|systemone)|/api/(chat|generate|show|tags|ps|version|v0/models(/.*)?))"
    r"(\?.*)?|/(tokenize|detokenize|props)(\?.*)?"
)
"""Paths that this plugin answers itself, whatever the request."""

LAST = ("error", "response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True)
class Answer:
    """``status`` 0: none came, and none was due."""

    status: int
    body: bytes = b""
    kind: str = ""


@dataclass
class Attacker:
    """Sends requests one after the other; over a WebSocket, on one connection while it lasts."""

    target: Target
    stored: str
    conversation: str
    connection: ClientConnection | None = None

    def sends(self, sent: Sent) -> Answer:
        """What the server answers. Raises ``TimeoutError``, and ``OSError`` when it hangs up."""
        named = {
            b'"m"': json.dumps(self.target.model).encode(),
            STORED.encode(): self.stored.encode(),
            CONVERSATION.encode(): self.conversation.encode(),
        }
        body = sent.body
        for name, real in named.items():
            body = body.replace(name, real)
        path = sent.path.replace(STORED, self.stored).replace(CONVERSATION, self.conversation)
        if sent.method == WEBSOCKET:
            return self._converses(body, text=bool(sent.headers))
        grown = len(body) - len(sent.body)
        length = None if sent.length is None else sent.length + grown
        return self._asks(replace(sent, path=path, body=body, length=length))

    def _asks(self, sent: Sent) -> Answer:
        url = self.target.server.base_url.removeprefix("http://")
        host, _, port = url.partition(":")
        head = [f"{sent.method} {sent.path} HTTP/1.1".encode()]
        if not any(name == "Host" for name, _ in sent.headers):
            head.append(f"Host: {url}".encode())
        head += [name.encode() + b": " + value for name, value in sent.headers]
        length = len(sent.body) if sent.length is None else sent.length
        if not any(name == "Transfer-Encoding" for name, _ in sent.headers):
            head.append(f"Content-Length: {length}".encode())
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            try:
                connection.sendall(b"\r\n".join([*head, b"Connection: close", b"", sent.body]))
                if sent.length is not None or b"chunked" in b"".join(head):
                    connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it was refused before all was sent, and the refusal is there
            response = http.client.HTTPResponse(connection, method=sent.method)
            try:
                response.begin()
                return Answer(response.status, response.read(), response.headers.get_content_type())
            except (http.client.RemoteDisconnected, ConnectionResetError):
                if sent.length is None and b"chunked" not in b"".join(head):
                    raise
                return Answer(0)  # half a request: nobody is there to be answered

    def _converses(self, body: bytes, *, text: bool) -> Answer:
        if self.connection is None:
            url = self.target.server.base_url.replace("http", "ws", 1) + mutations.RESPONSES
            self.connection = connect(url, max_size=None, compression=None)
        try:
            self.connection.send(body, text=text)
            while True:
                event = strict(self.connection.recv(timeout=PATIENCE))
                if event["type"] in LAST:
                    status = event.get("status", 500) if event["type"] == "error" else 200
                    return Answer(status, json.dumps(event).encode(), "application/json")
        except ConnectionClosed as closed:
            self.connection = None
            code = closed.rcvd.code if closed.rcvd else None
            if code in (1007, 1009, 1013):  # no UTF-8, too large, too many
                return Answer(0)
            raise OSError(f"the connection was closed: {code}") from closed


def strict(text: str | bytes) -> Any:
    """JSON as it is in every language: no NaN, and nothing that cannot be encoded."""
    decoded = text.decode() if isinstance(text, bytes) else text
    value = json.loads(decoded, parse_constant=_refused)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def problem_of(sent: Sent, answer: Answer) -> str:
    """What is wrong with the answer; nothing, if nothing is."""
    if answer.status >= 500 and answer.status not in UNAVAILABLE:
        return f"status {answer.status}: {answer.body[:500]!r}"
    if sent.method == "HEAD" or answer.status == 0 or not OURS.fullmatch(unquote(sent.path)):
        return ""
    if any(name == "Upgrade" for name, _ in sent.headers):
        return ""  # it may not come to any API
    if answer.status >= 400:
        return wrong_shape(sent, answer)
    try:
        for each in documents(answer):
            strict(each)
    except ValueError as error:
        return f"not JSON ({error}): {answer.body[:500]!r}"
    return ""


def documents(answer: Answer) -> list[str]:
    """The documents of a stream, or the only one."""
    text = answer.body.decode()
    if answer.kind == "application/x-ndjson":
        return text.splitlines()
    if answer.kind != "text/event-stream":
        return [text] if text else []
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [each for each in data if each != "[DONE]"]


def wrong_shape(sent: Sent, answer: Answer) -> str:
    """Whether an error is not as its API has errors."""
    if answer.status == 400 and answer.body == b"Invalid HTTP request received.":
        return ""  # what is no HTTP comes to no API
    try:
        document = strict(answer.body)
        error = document["error"]
        if re.match(r"/api/(?!v0/)", sent.path):
            error = {"message": error, **dict.fromkeys(("type", "param", "code"))}
        if sent.path.startswith(MESSAGES):
            right = document["type"] == "error" and {"type", "message"} <= set(error)
        else:
            right = {"message", "type", "param", "code"} <= set(error)
        right = right and isinstance(error["message"], str) and bool(error["message"])
    except (ValueError, KeyError, TypeError):
        right = False
    return "" if right else f"not its API's error: {answer.status} {answer.body[:500]!r}"


def healthy(target: Target) -> str:
    """The id of a stored answer to a proper request. Raises ``AssertionError``."""
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


def conversation(target: Target) -> str:
    """The id of a new conversation."""
    with target.server.client() as client:
        return str(client.post(mutations.CONVERSATIONS, json={}).json()["id"])


def computed_for(target: Target) -> float:
    """Seconds of a processor for a proper answer that is drawn, with a tool's grammar."""
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
        for _ in range(2):  # the first one makes the grammar
            used = sum(process.cpu_times()[:2])
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    return sum(process.cpu_times()[:2]) - used


class Log:
    """What a server has printed since it was looked at last."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, path.stat().st_size

    def new(self) -> str:
        """What is new."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            printed = file.read()
        self._at += len(printed)
        return printed.decode("utf-8", "replace")


def test_every_request_is_answered(target: Target) -> None:
    began = time.monotonic()
    attacker = Attacker(target, healthy(target), conversation(target))
    problems: list[str] = []
    statuses: Counter[int] = Counter()
    slow, longest, most = [], 0.0, 0.0
    limit = TOO_SLOW + computed_for(target)
    log = Log(target.server.log_path)
    process = psutil.Process(target.server.pid)
    for index in range(REQUESTS):
        sent, answer, problem = mutated(SEED, index), Answer(0), ""
        asked, used = time.monotonic(), sum(process.cpu_times()[:2])
        try:
            answer = attacker.sends(sent)
            problem = problem_of(sent, answer)
            statuses[answer.status] += 1
        except (OSError, AssertionError, ValueError, http.client.HTTPException) as error:
            problem, attacker.connection = f"{type(error).__name__}: {error}", None
        seconds = time.monotonic() - asked
        computed = min(sum(process.cpu_times()[:2]) - used, seconds)
        longest, most = max(longest, seconds), max(most, computed)
        if seconds > SLOW:
            took = f"{seconds:.1f} s, {computed:.1f} s of them computing"
            slow.append(f"{took}: seed {SEED}, request {index}: {sent}")
        if computed > limit:
            problem = f"{problem} {computed:.1f} s of computing"
        if "Traceback" in (printed := log.new()):
            problem = f"{problem}\n{printed[-3_000:]}"
        if problem:
            problems.append(f"seed {SEED}, request {index}: {problem}\n    {sent}")
            if len(problems) >= MOST_PROBLEMS or target.server.process.poll() is not None:
                break
        if sent.method == "DELETE" and answer.status == 200:
            attacker.stored, attacker.conversation = healthy(target), conversation(target)
    if attacker.connection is not None:
        attacker.connection.close()
    figures.report(
        "fuzz",
        f"{sum(statuses.values())} mutated requests (seed {SEED}) in "
        f"{time.monotonic() - began:.0f} s, {len(problems)} answered wrongly, {len(slow)} later "
        f"than {SLOW:.0f} s, the last after {longest:.1f} s; none took more than {most:.1f} s of a "
        f"processor (limit {limit:.1f} s); by status: "
        + ", ".join(f"{status} {count}" for status, count in sorted(statuses.items())),
    )
    print("\n".join(slow))  # with -s, or when something is wrong
    assert not problems, "\n\n".join(problems)
    healthy(target)
    left = target.inspection.quiet()
    assert not left.objects["Job"], left.objects
