"""What the largest requests of the newer routes cost: processor time and memory are bounded.

The texts and tools of the three older APIs are those of `test_event_loop`; here is what only these
routes take: ids, questions with options, conversations that grow, names of models.
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
"""Of a processor, for one request; what a prompt of the whole context costs here is most of it."""

MAX_MIB = 512.0
"""Resident memory above that before, while a request is read and answered."""

MIB = 2**20
ITEM = {"type": "message", "role": "user", "content": "Hi."}
OPTIONS = {f"option {at}": None for at in range(255)}
CHOICE = {"type": "choice", "instructions": "Which?", "criteria": OPTIONS}
NOUL = {"type": "noul", "instructions": "It rains."}
VALUES = [{"value": name} for name in OPTIONS]

Attack = Callable[[httpx.Client, str], httpx.Response]


def post(path: str, **body: Any) -> Attack:
    return lambda client, model: client.post(path, json={"model": model, **body})


def growing(client: httpx.Client, model: str) -> httpx.Response:
    """A conversation that gets as many items as it may have, and then some more."""
    path = f"/v1/conversations/{client.post('/v1/conversations', json={}).json()['id']}/items"
    response = httpx.Response(500)
    for _ in range(20):
        response = client.post(path, json={"items": [ITEM] * 2_000})
        if response.status_code != 200:
            break
    return response


def listed(client: httpx.Client, model: str) -> httpx.Response:
    """Page by page, each of which is found by the id of an item."""
    made = client.post("/v1/conversations", json={"items": [ITEM] * 10_000}).json()["id"]
    after, response = "", httpx.Response(500)
    for _ in range(20):
        query = {"limit": 100, "order": "asc", **({"after": after} if after else {})}
        response = client.get(f"/v1/conversations/{made}/items", params=query)
        after = response.json()["last_id"]
    return response


ROWS: dict[str, tuple[Callable[[], Attack], int]] = {
    # name -> how to make it, and the status of the answer
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
    "a conversation that grows": (lambda: growing, 413),
    "a conversation that is listed": (lambda: listed, 200),
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
    """Seconds of a processor, and MiB above the resident memory at the start."""

    seconds: float = 0.0
    mib: float = 0.0


@contextmanager
def measured(process: psutil.Process) -> Iterator[Cost]:
    """What a server takes meanwhile; memory is looked at every 10 ms."""
    cost, ended = Cost(), threading.Event()
    before, used = process.memory_info().rss, sum(process.cpu_times()[:2])

    def look() -> None:
        while not ended.wait(0.01):
            cost.mib = max(cost.mib, (process.memory_info().rss - before) / MIB)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield cost
    finally:
        ended.set()
        looking.join()
        cost.seconds = sum(process.cpu_times()[:2]) - used


@pytest.mark.parametrize("row", ROWS)
def test_a_request_costs_no_more(target: Target, row: str) -> None:
    make, status = ROWS[row]
    attack = make()
    began = time.monotonic()
    with target.server.client(timeout=300) as client:
        with measured(psutil.Process(target.server.pid)) as cost:
            response = attack(client, target.model)
        healthy = {"model": target.model, "messages": [ITEM], "max_tokens": 8}
        assert client.post("/v1/chat/completions", json=healthy).status_code == 200
    figures.report(
        "cost",
        f"{row:32} {response.status_code} in {time.monotonic() - began:5.1f} s, "
        f"{cost.seconds:5.1f} s of a processor, {cost.mib:4.0f} MiB",
    )
    assert response.status_code == status, response.text[:500]
    assert len(response.content) < 64 * MIB
    assert cost.seconds <= MAX_CPU_SECONDS
    assert cost.mib <= MAX_MIB
    assert "Traceback" not in target.server.log
