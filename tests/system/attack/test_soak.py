"""Agents work for minutes, over every API: the server's memory does not grow."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import figures
import httpx
import pytest
from apis import PATHS
from size import SEED, size
from target import CACHE_MIB

if TYPE_CHECKING:
    from inspected import Snapshot
    from target import Target

pytestmark = pytest.mark.served

SECONDS = size(180.0, 4.0)
"""Seconds in which new agents start."""

AT_ONCE = 4
TURNS = size(20, 6)
GROWTH_MIB = size(32.0, 96.0)
"""Resident memory that may be added after the first third."""

STEP = {"type": "object", "properties": {"wanted": {"type": "integer"}}}
Body = dict[str, Any]


class Agent:
    """A conversation of ``TURNS`` turns, of which all but the last call a tool.

    Some turns are interrupted, by disconnecting or by cancelling their id, and repeated.
    """

    def __init__(self, target: Target, api: str, number: int) -> None:
        self.api, self.number = api, number
        self._target = target
        self._chance = random.Random(f"{SEED} {number}")
        self._messages: list[Body] = [
            {"role": "user", "content": f"Work. {number} " + "more " * 200}
        ]
        self._stored: list[str] = []
        self._stores = api == "responses" and number % 2 == 0

    def run(self) -> int:
        """Runs the conversation. Returns the number of requests sent."""
        request_count = 0
        with self._target.server.client() as client:
            for turn in range(1, TURNS):
                if self._chance.random() < 0.2:
                    self._interrupt_turn(client)
                    request_count += 1
                text = "all is done" if turn == TURNS - 1 else f"step {turn} is done"
                self._append_result(self._send_turn(client), text)
                request_count += 1
            assert "Done." in json.dumps(self._send_turn(client))
            for response_id in self._stored:
                assert client.delete(f"/v1/responses/{response_id}").status_code == 200
        return request_count + 1 + len(self._stored)

    def _body(self) -> Body:
        function = {"name": "step", "description": "One step.", "parameters": STEP}
        body: Body = {"model": self._target.model}
        if self.api == "chat":
            tool: Body = {"type": "function", "function": function}
            return {**body, "messages": self._messages, "tools": [tool], "max_tokens": 64}
        if self.api == "messages":
            tool = {"name": "step", "input_schema": STEP}
            return {**body, "messages": self._messages, "tools": [tool], "max_tokens": 64}
        body |= {"tools": [{"type": "function", **function}], "store": self._stores}
        if self._stored:
            return {**body, "input": self._messages[-1:], "previous_response_id": self._stored[-1]}
        return {**body, "input": self._messages}

    def _send_turn(self, client: httpx.Client) -> Body:
        response = client.post(PATHS[self.api], json=self._body())
        assert response.status_code == 200, response.text
        document: Body = response.json()
        if self._stores:
            self._stored.append(document["id"])
        return document

    def _append_result(self, document: Body, text: str) -> None:
        """Adds the answer's call, and its result."""
        if self.api == "chat":
            message = document["choices"][0]["message"]
            call_id = message["tool_calls"][0]["id"]
            self._messages += [message, {"role": "tool", "tool_call_id": call_id, "content": text}]
        elif self.api == "messages":
            (call,) = [block for block in document["content"] if block["type"] == "tool_use"]
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": text}
            self._messages.append({"role": "assistant", "content": document["content"]})
            self._messages.append({"role": "user", "content": [result]})
        else:
            (call,) = [item for item in document["output"] if item["type"] == "function_call"]
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": text}
            self._messages += [*document["output"], result]

    def _interrupt_turn(self, client: httpx.Client) -> None:
        """Streams the turn, and disconnects after some events or cancels it."""
        body = {**self._body(), "stream": True}
        cancels = self._chance.random() < 0.5
        remaining_events = self._chance.randint(1, 6)
        with client.stream("POST", PATHS[self.api], json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                remaining_events -= 1
                if cancels:
                    self._cancel(json.loads(line.removeprefix("data: ")))
                    cancels = False
                elif remaining_events <= 0:
                    return

    def _cancel(self, event: Body) -> None:
        document = event.get("response") or event.get("message") or event
        with self._target.server.client() as other_client:
            other_client.post(f"/v1/requests/{document['id']}/cancel")


def test_memory_does_not_grow_with_agents(target: Target) -> None:
    started = time.monotonic()
    request_count = agent_count = 0
    snapshots: list[Snapshot] = []
    apis = list(PATHS)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while not snapshots or time.monotonic() - started < SECONDS or len(snapshots) < 3:
            numbers = range(agent_count, agent_count + 2 * AT_ONCE)
            batch = [Agent(target, apis[number % len(apis)], number) for number in numbers]
            request_count += sum(pool.map(Agent.run, batch))
            agent_count += len(batch)
            inspection = target.inspection
            snapshots.append(
                inspection.wait_until_idle(snapshots[0]) if snapshots else inspection.baseline()
            )
    settled, last = snapshots[len(snapshots) // 3], snapshots[-1]
    with target.server.client() as client:
        cache = client.get("/v1/cache/stats").json()["engine_cache"]["harmony_prefix_reuse"]
    assert not last.more_than(snapshots[0]), (snapshots[0], last)
    assert last.threads <= settled.threads + 8, (settled, last)
    assert last.rss - settled.rss <= GROWTH_MIB, [round(snapshot.rss) for snapshot in snapshots]
    assert cache["nbytes"] <= cache["budget"] == CACHE_MIB * 2**20
    assert "Traceback" not in target.server.log
    figures.report(
        "soak",
        f"{agent_count} agents of {TURNS} turns, {AT_ONCE} at once, {request_count} requests in "
        f"{time.monotonic() - started:.0f} s: RSS {settled.rss:.0f} -> {last.rss:.0f} MiB, files "
        f"{settled.files} -> {last.files}, threads {settled.threads} -> {last.threads}, tasks "
        f"{settled.tasks} -> {last.tasks}, prefix cache {cache['nbytes'] // 1024} of "
        f"{CACHE_MIB * 1024} KiB after {cache['evictions']} evictions",
    )
