"""kill -9 in the middle of storing: whatever a client saw completed is there, and whole."""

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
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

if TYPE_CHECKING:
    from target import Target

    Start = Callable[..., Target]

pytestmark = pytest.mark.served

KILLS = size(20, 1)

CLIENTS = 8


class Client:
    """Asks for one stored answer after the other, in one of three ways, until the server is gone.

    ``completed`` has the ids of the answers that it saw the end of, ``begun`` those of the others.
    """

    def __init__(self, target: Target, number: int) -> None:
        self.completed: list[str] = []
        self.begun: set[str] = set()
        self._target = target
        self._padding = "x" * (2_000 * (number % 4))
        ask = (self._whole, self._streamed, self._over_websocket)[number % 3]
        self.thread = threading.Thread(target=self._run, args=(ask,))
        self.thread.start()

    def _run(self, ask: Callable[[], None]) -> None:
        try:
            while True:
                ask()
        except (httpx.TransportError, OSError, WebSocketException):
            return  # killed

    @property
    def _body(self) -> dict[str, Any]:
        said = [{"role": "user", "content": "Twelve words."}]
        return {
            "model": self._target.model,
            "input": said,
            "instructions": self._padding,
            "store": True,
        }

    def _whole(self) -> None:
        with self._target.server.client() as client:
            while True:
                response = client.post("/v1/responses", json=self._body)
                self._note("response.completed", response.raise_for_status().json())

    def _streamed(self) -> None:
        body = {**self._body, "stream": True}
        with (
            self._target.server.client() as client,
            client.stream("POST", "/v1/responses", json=body) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    self._note(event["type"], event.get("response"))

    def _over_websocket(self) -> None:
        url = self._target.server.base_url.replace("http", "ws", 1) + "/v1/responses"
        with connect(url) as connection:
            while True:
                connection.send(json.dumps({"type": "response.create", **self._body}))
                kind = ""
                while kind != "response.completed":
                    event = json.loads(connection.recv(timeout=60))
                    kind = event["type"]
                    assert kind not in ("error", "response.failed"), event
                    self._note(kind, event.get("response"))

    def _note(self, kind: str, response: dict[str, Any] | None) -> None:
        if kind == "response.created" and response:
            self.begun.add(response["id"])
        if kind == "response.completed" and response and response["store"]:
            self.begun.discard(response["id"])
            self.completed.append(response["id"])


def test_completed_responses_survive_a_kill(start: Start, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    path = tmp_path / "responses.sqlite"
    env = {"VLLM_MLX_HARMONY_STORE": str(path)}
    seen = unseen = 0
    target = start(env)
    for _ in range(KILLS):
        clients = [Client(target, number) for number in range(CLIENTS)]
        wanted = chance.randint(10, 60)
        end = time.monotonic() + 300
        while sum(len(one.completed) for one in clients) < wanted and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.02)
        target.server.process.send_signal(signal.SIGKILL)
        target.server.process.wait(10)
        for one in clients:
            one.thread.join(30)
            assert not one.thread.is_alive()
        completed = [key for one in clients for key in one.completed]
        assert len(completed) >= wanted
        check_file(path)
        target = start(env)
        with target.server.client() as client:
            for key in completed:
                check_whole(client, key)
            for key in (key for one in clients for key in one.begun):
                if client.get(f"/v1/responses/{key}").status_code != 404:
                    check_whole(client, key)
                    unseen += 1
        seen += len(completed)
        assert "Traceback" not in target.server.log
    target.server.stop()
    figures.report(
        "kill",
        f"{KILLS} times kill -9 while {CLIENTS} clients had answers stored: all {seen} that were "
        f"seen completed are there, {unseen} more that were not, none is half-written",
    )


def check_file(path: Path) -> None:
    """The file opens, is sound, and has as many texts as it says."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        counted = "SELECT (SELECT COUNT(*) FROM responses), (SELECT COUNT(*) FROM response_texts)"
        responses, texts = file.execute(counted).fetchone()
        assert responses == texts
        for (text,) in file.execute("SELECT text FROM response_texts"):
            json.loads(text)
    file.close()


def check_whole(client: httpx.Client, key: str) -> None:
    """The answer is there, with all that was asked and said."""
    kept = client.get(f"/v1/responses/{key}")
    assert kept.status_code == 200, (key, kept.text)
    document = kept.json()
    assert document["status"] == "completed"
    said = [part["text"] for item in document["output"] for part in item.get("content", ())]
    assert said == [ANSWER]
    items = client.get(f"/v1/responses/{key}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["Twelve words."]
