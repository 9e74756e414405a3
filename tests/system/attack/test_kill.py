"""kill -9 while responses are stored: all that a client saw completed are stored in full."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import figures
import httpx
import pytest
from apis import ANSWER
from size import SEED, size
from sse import arriving
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

if TYPE_CHECKING:
    from target import Target

    Start = Callable[..., Target]

pytestmark = pytest.mark.served

KILLS = size(20, 1)

CLIENTS = 8


class Sender:
    """Requests one stored response after the other, in one of three ways, until the server dies.

    ``completed`` has the ids of responses whose end it received, ``unfinished`` those of others.
    """

    def __init__(self, target: Target, number: int) -> None:
        self.completed: list[str] = []
        self.unfinished: set[str] = set()
        self._target = target
        self._padding = "x" * (2_000 * (number % 4))
        send = (self._send_whole, self._send_streamed, self._send_over_websocket)[number % 3]
        self.thread = threading.Thread(target=self._run, args=(send,))
        self.thread.start()

    def _run(self, send: Callable[[], None]) -> None:
        try:
            while True:
                send()
        except (httpx.TransportError, OSError, WebSocketException):
            return  # killed

    @property
    def _body(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Twelve words."}]
        return {
            "model": self._target.model,
            "input": messages,
            "instructions": self._padding,
            "store": True,
        }

    def _send_whole(self) -> None:
        with self._target.server.client() as client:
            while True:
                response = client.post("/v1/responses", json=self._body)
                self._record("response.completed", response.raise_for_status().json())

    def _send_streamed(self) -> None:
        body = {**self._body, "stream": True}
        with (
            self._target.server.client() as client,
            client.stream("POST", "/v1/responses", json=body) as response,
        ):
            for event in arriving(response.iter_lines()):
                self._record(event["type"], event.get("response"))

    def _send_over_websocket(self) -> None:
        url = self._target.server.base_url.replace("http", "ws", 1) + "/v1/responses"
        with connect(url) as connection:
            while True:
                connection.send(json.dumps({"type": "response.create", **self._body}))
                kind = ""
                while kind != "response.completed":
                    event = json.loads(connection.recv(timeout=60))
                    kind = event["type"]
                    assert kind not in ("error", "response.failed"), event
                    self._record(kind, event.get("response"))

    def _record(self, kind: str, response: dict[str, Any] | None) -> None:
        if kind == "response.created" and response:
            self.unfinished.add(response["id"])
        if kind == "response.completed" and response and response["store"]:
            self.unfinished.discard(response["id"])
            self.completed.append(response["id"])


def test_completed_responses_survive_kill(start: Start, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    path = tmp_path / "responses.sqlite"
    env = {"VLLM_MLX_HARMONY_STORE": str(path)}
    completed_count = unseen_count = 0
    target = start(env)
    for _ in range(KILLS):
        senders = [Sender(target, number) for number in range(CLIENTS)]
        minimum = chance.randint(10, 60)
        deadline = time.monotonic() + 300
        while (
            sum(len(sender.completed) for sender in senders) < minimum
            and time.monotonic() < deadline
        ):
            time.sleep(0.005)
        time.sleep(chance.random() * 0.02)
        target.server.process.send_signal(signal.SIGKILL)
        target.server.process.wait(10)
        for sender in senders:
            sender.thread.join(30)
            assert not sender.thread.is_alive()
        completed = [response_id for sender in senders for response_id in sender.completed]
        assert len(completed) >= minimum
        assert_file_is_sound(path)
        target = start(env)
        with target.server.client() as client:
            for response_id in completed:
                assert_response_is_whole(client, response_id)
            for unfinished_id in (
                response_id for sender in senders for response_id in sender.unfinished
            ):
                if client.get(f"/v1/responses/{unfinished_id}").status_code != 404:
                    assert_response_is_whole(client, unfinished_id)
                    unseen_count += 1
        completed_count += len(completed)
        assert "Traceback" not in target.server.log
    target.server.stop()
    figures.report(
        "kill",
        f"{KILLS} times kill -9 while {CLIENTS} clients had answers stored: all {completed_count} "
        f"that were seen completed are there, {unseen_count} more that were not, none is "
        "half-written",
    )


def assert_file_is_sound(path: Path) -> None:
    """Asserts that the database is intact, with a text for every response."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        query = "SELECT (SELECT COUNT(*) FROM responses), (SELECT COUNT(*) FROM response_texts)"
        responses, texts = file.execute(query).fetchone()
        assert responses == texts
        for (text,) in file.execute("SELECT text FROM response_texts"):
            json.loads(text)
    file.close()


def assert_response_is_whole(client: httpx.Client, response_id: str) -> None:
    """Asserts that the response is stored with its whole input and output."""
    response = client.get(f"/v1/responses/{response_id}")
    assert response.status_code == 200, (response_id, response.text)
    document = response.json()
    assert document["status"] == "completed"
    texts = [part["text"] for item in document["output"] for part in item.get("content", ())]
    assert texts == [ANSWER]
    items = client.get(f"/v1/responses/{response_id}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["Twelve words."]
