"""Agents at work for minutes, over every API: what the server takes does not grow with them."""

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
    from inspected import Left
    from target import Target

pytestmark = pytest.mark.served

SECONDS = size(180.0, 4.0)
"""Agents begin for as long as this."""

AT_ONCE = 4
TURNS = size(20, 6)
GROWTH_MIB = size(32.0, 96.0)
"""Resident memory that may come after the first third."""

STEP = {"type": "object", "properties": {"wanted": {"type": "integer"}}}
Body = dict[str, Any]


class Agent:
    """A conversation of ``TURNS`` turns, each of which but the last calls a tool.

    Now and then a turn is dropped in the middle, or cancelled by its id, and asked for again.
    """

    def __init__(self, target: Target, api: str, number: int) -> None:
        self.api, self.number = api, number
        self._target = target
        self._chance = random.Random(f"{SEED} {number}")
        self._said: list[Body] = [{"role": "user", "content": f"Work. {number} " + "more " * 200}]
        self._stored: list[str] = []
        self._stores = api == "responses" and number % 2 == 0

    def run(self) -> int:
        """How many requests it has sent."""
        sent = 0
        with self._target.server.client() as client:
            for turn in range(1, TURNS):
                if self._chance.random() < 0.2:
                    self._broken_off(client)
                    sent += 1
                text = "all is done" if turn == TURNS - 1 else f"step {turn} is done"
                self._append(self._answer(client), text)
                sent += 1
            assert "Done." in json.dumps(self._answer(client))
            for key in self._stored:
                assert client.delete(f"/v1/responses/{key}").status_code == 200
        return sent + 1 + len(self._stored)

    def _body(self) -> Body:
        function = {"name": "step", "description": "One step.", "parameters": STEP}
        body: Body = {"model": self._target.model}
        if self.api == "chat":
            tool: Body = {"type": "function", "function": function}
            return {**body, "messages": self._said, "tools": [tool], "max_tokens": 64}
        if self.api == "messages":
            tool = {"name": "step", "input_schema": STEP}
            return {**body, "messages": self._said, "tools": [tool], "max_tokens": 64}
        body |= {"tools": [{"type": "function", **function}], "store": self._stores}
        if self._stored:
            return {**body, "input": self._said[-1:], "previous_response_id": self._stored[-1]}
        return {**body, "input": self._said}

    def _answer(self, client: httpx.Client) -> Body:
        response = client.post(PATHS[self.api], json=self._body())
        assert response.status_code == 200, response.text
        answer: Body = response.json()
        if self._stores:
            self._stored.append(answer["id"])
        return answer

    def _append(self, answer: Body, text: str) -> None:
        """The call in the answer, and what came of it."""
        if self.api == "chat":
            message = answer["choices"][0]["message"]
            key = message["tool_calls"][0]["id"]
            self._said += [message, {"role": "tool", "tool_call_id": key, "content": text}]
        elif self.api == "messages":
            (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": text}
            self._said.append({"role": "assistant", "content": answer["content"]})
            self._said.append({"role": "user", "content": [result]})
        else:
            (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": text}
            self._said += [*answer["output"], result]

    def _broken_off(self, client: httpx.Client) -> None:
        """The turn, streamed: it ends after some events, or is cancelled by its id."""
        body = {**self._body(), "stream": True}
        cancels = self._chance.random() < 0.5
        reads = self._chance.randint(1, 6)
        with client.stream("POST", PATHS[self.api], json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                reads -= 1
                if cancels:
                    self._cancel(json.loads(line.removeprefix("data: ")))
                    cancels = False
                elif reads <= 0:
                    return

    def _cancel(self, event: Body) -> None:
        answer = event.get("response") or event.get("message") or event
        with self._target.server.client() as other:
            other.post(f"/v1/requests/{answer['id']}/cancel")


def test_memory_does_not_grow(target: Target) -> None:
    began = time.monotonic()
    sent = agents = 0
    seen: list[Left] = []
    apis = list(PATHS)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while not seen or time.monotonic() - began < SECONDS or len(seen) < 3:
            numbers = range(agents, agents + 2 * AT_ONCE)
            several = [Agent(target, apis[number % len(apis)], number) for number in numbers]
            sent += sum(pool.map(Agent.run, several))
            agents += len(several)
            look = target.inspection
            seen.append(look.quiet(seen[0]) if seen else look.baseline())
    settled, last = seen[len(seen) // 3], seen[-1]
    with target.server.client() as client:
        cache = client.get("/v1/cache/stats").json()["engine_cache"]["harmony_prefix_reuse"]
    assert not last.more_than(seen[0]), (seen[0], last)
    assert last.threads <= settled.threads + 8, (settled, last)
    assert last.rss - settled.rss <= GROWTH_MIB, [round(each.rss) for each in seen]
    assert cache["nbytes"] <= cache["budget"] == CACHE_MIB * 2**20
    assert "Traceback" not in target.server.log
    figures.report(
        "soak",
        f"{agents} agents of {TURNS} turns, {AT_ONCE} at once, {sent} requests in "
        f"{time.monotonic() - began:.0f} s: RSS {settled.rss:.0f} -> {last.rss:.0f} MiB, files "
        f"{settled.files} -> {last.files}, threads {settled.threads} -> {last.threads}, tasks "
        f"{settled.tasks} -> {last.tasks}, prefix cache {cache['nbytes'] // 1024} of "
        f"{CACHE_MIB * 1024} KiB after {cache['evictions']} evictions",
    )
