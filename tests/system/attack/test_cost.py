"""Processor time and memory of the largest requests of the newer routes are bounded.

`test_event_loop` has the texts and tools of the three older APIs; this module has inputs that only
these routes accept: ids, questions with options, conversations that grow, names of models.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import figures
import httpx
import psutil
import pytest
from size import size

if TYPE_CHECKING:
    from target import Target

pytestmark = pytest.mark.served

MAX_CPU_SECONDS = size(20.0, 40.0)
"""Processor seconds of one request. Most of them are for a prompt of the whole context."""

MAX_MIB = 512.0
"""Increase of the resident memory while a request is read and answered."""

MIB = 2**20
ITEM = {"type": "message", "role": "user", "content": "Hi."}
OPTIONS = {f"option {at}": None for at in range(255)}
CHOICE = {"type": "choice", "instructions": "Which?", "criteria": OPTIONS}
NOUL = {"type": "noul", "instructions": "It rains."}
VALUES = [{"value": name} for name in OPTIONS]

Attack = Callable[[httpx.Client, str], httpx.Response]


def post(path: str, **body: Any) -> Attack:
    return lambda client, model: client.post(path, json={"model": model, **body})


def fill_conversation(client: httpx.Client, model: str) -> httpx.Response:
    """Adds items to a conversation until they exceed the limit."""
    path = f"/v1/conversations/{client.post('/v1/conversations', json={}).json()['id']}/items"
    response = httpx.Response(500)
    for _ in range(20):
        response = client.post(path, json={"items": [ITEM] * 2_000})
        if response.status_code != 200:
            break
    return response


def list_conversation(client: httpx.Client, model: str) -> httpx.Response:
    """Reads a conversation page by page, each after the id of an item."""
    conversation_id = client.post("/v1/conversations", json={"items": [ITEM] * 10_000}).json()["id"]
    after, response = "", httpx.Response(500)
    for _ in range(20):
        query = {"limit": 100, "order": "asc", **({"after": after} if after else {})}
        response = client.get(f"/v1/conversations/{conversation_id}/items", params=query)
        after = response.json()["last_id"]
    return response


ROWS: dict[str, tuple[Callable[[], Attack], int]] = {
    # name -> a function that creates the attack, and the expected status
    "tokens of a text": (lambda: post("/tokenize", content=" a" * 120_000, with_pieces=True), 200),
    "tokens of too long a text": (lambda: post("/tokenize", prompt="a b " * 2**20), 400),
    "tokens of one letter": (lambda: post("/tokenize", prompt="a" * (20 * MIB)), 400),
    "text of ids": (lambda: post("/detokenize", tokens=[199_997] * 131_072), 200),
    "text of too many ids": (lambda: post("/detokenize", tokens=[1] * (5 * MIB)), 413),
    "64 questions of 255 options": (
        lambda: post("/v1/systemone", state="x", questions={f"q{at}": CHOICE for at in range(64)}),
        200,
    ),
    "64 questions about a long state": (
        lambda: post(
            "/v1/systemone", state=" a" * 20_000, questions={f"q{at}": NOUL for at in range(64)}
        ),
        200,
    ),
    "a state beyond the context": (
        lambda: post("/v1/systemone", state=" a" * 500_000, questions={"q": NOUL}),
        400,
    ),
    "65 questions": (
        lambda: post("/v1/systemone", state="x", questions={f"q{at}": CHOICE for at in range(65)}),
        400,
    ),
    "64 decisions of 255 choices": (
        lambda: post(
            "/v1/decisions",
            input="x",
            questions=[{"type": "choice", "instructions": "Which?", "choices": VALUES}] * 64,
        ),
        200,
    ),
    "a decision about JSON": (
        lambda: post(
            "/v1/systemone",
            state={str(at): [at] * 10 for at in range(1_000)},
            questions={"q": NOUL},
        ),
        200,
    ),
    "a conversation of 20,000 items": (
        lambda: post("/v1/conversations", items=[ITEM] * 20_000),
        413,
    ),
    "a conversation that grows": (lambda: fill_conversation, 413),
    "a conversation that is listed": (lambda: list_conversation, 200),
    "metadata": (lambda: post("/v1/conversations", metadata={"k": "a" * (20 * MIB)}), 400),
    "a control of a long id": (
        lambda: post(
            "/v1/chat/completions/control", id="a-" + "0" * (20 * MIB), action="reasoning_end"
        ),
        200,
    ),
    "an image for Ollama": (
        lambda: post(
            "/api/generate", prompt="Hi.", images=["a" * (20 * MIB)], options={"num_predict": 1}
        ),
        200,
    ),
    "a context for Ollama": (
        lambda: post("/api/generate", prompt="Hi.", context=[1] * 40_000),
        400,
    ),
    "a long name": (
        lambda: lambda client, model: client.post("/api/show", json={"model": "gpt-5" * (4 * MIB)}),
        404,
    ),
    "a long name in a path": (
        lambda: lambda client, model: client.get("/api/v0/models/" + "gpt-5" * 10_000),
        404,
    ),
    "an alias of 4,096 characters": (
        lambda: (
            lambda client, model: client.post(
                "/v1/chat/completions",
                json={"model": "claude-" + "a" * 4_089, "messages": [ITEM], "max_tokens": 1},
            )
        ),
        200,
    ),
}


@dataclass
class Cost:
    """Processor seconds, and MiB above the resident memory at the start."""

    seconds: float = 0.0
    mib: float = 0.0


@contextmanager
def measure_cost(process: psutil.Process) -> Iterator[Cost]:
    """Measures the cost of a process during the context, its memory every 10 ms."""
    cost, stop = Cost(), threading.Event()
    rss_before, cpu_before = process.memory_info().rss, sum(process.cpu_times()[:2])

    def watch_memory() -> None:
        while not stop.wait(0.01):
            cost.mib = max(cost.mib, (process.memory_info().rss - rss_before) / MIB)

    watcher = threading.Thread(target=watch_memory)
    watcher.start()
    try:
        yield cost
    finally:
        stop.set()
        watcher.join()
        cost.seconds = sum(process.cpu_times()[:2]) - cpu_before


@pytest.mark.parametrize("row", ROWS)
def test_request_cost_is_bounded(target: Target, row: str) -> None:
    make_attack, status = ROWS[row]
    attack = make_attack()
    started = time.monotonic()
    with target.server.client(timeout=300) as client:
        with measure_cost(psutil.Process(target.server.pid)) as cost:
            response = attack(client, target.model)
        ordinary_body = {"model": target.model, "messages": [ITEM], "max_tokens": 8}
        assert client.post("/v1/chat/completions", json=ordinary_body).status_code == 200
    figures.report(
        "cost",
        f"{row:32} {response.status_code} in {time.monotonic() - started:5.1f} s, "
        f"{cost.seconds:5.1f} s of a processor, {cost.mib:4.0f} MiB",
    )
    assert response.status_code == status, response.text[:500]
    assert len(response.content) < 64 * MIB
    assert cost.seconds <= MAX_CPU_SECONDS
    assert cost.mib <= MAX_MIB
    assert "Traceback" not in target.server.log
