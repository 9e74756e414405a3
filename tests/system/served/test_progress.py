"""Progress of a long prompt on the real server, in its stream and in the status."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from server_process import KEY

if TYPE_CHECKING:
    import httpx
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = [pytest.mark.served, pytest.mark.nightly]  # in process the gate tests it, too

WORDS = [str(number * 7919 % 99_991) for number in range(1_600)]
"""About 4,800 tokens: three chunks."""


@contextmanager
def stream_lines(
    client: httpx.Client, path: str, words: list[str] = WORDS, **body: Any
) -> Iterator[Iterator[str]]:
    """The lines of a streamed answer."""
    seed = time.time_ns()  # so that nothing is cached
    content = f"{seed} {' '.join(words)}"
    if path == "/v1/responses":
        body |= {"input": content, "store": False, "max_output_tokens": 4}
    else:
        body |= {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    with client.stream("POST", path, json={"stream": True, **body}, timeout=240) as response:
        assert response.status_code == 200
        yield response.iter_lines()


def progress_of(line: str) -> dict[str, int] | None:
    """The progress in a line of a stream."""
    if line.startswith(": prompt_progress "):
        return dict(json.loads(line.removeprefix(": prompt_progress ")))
    if '"prompt_progress"' in line:
        chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
        assert chunk["choices"] == [
            {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
        ]
        return dict(chunk["prompt_progress"])
    return None


def test_progress_matches_llama_cpp(tiny_server: Server, tiny_dir: Any) -> None:
    """Has the assertions of llama.cpp's test of ``return_progress``, and checks the status."""
    reports, requests = [], []
    options = {"model": str(tiny_dir), "return_progress": True}
    with (
        tiny_server.client() as client,
        stream_lines(client, "/v1/chat/completions", **options) as lines,
        tiny_server.client() as other,
    ):
        for line in lines:
            if (progress := progress_of(line)) is not None:
                reports.append(progress)
                requests += other.get("/harmony/status").json()["models"][0]["requests"]
    computed = [report for report in reports if "place" not in report]
    first, last = computed[0], computed[-1]
    assert first["processed"] == first["cache"] and first["total"] > 4_096
    assert last["processed"] == last["total"]
    assert {(report["total"], report["cache"]) for report in reports} == {
        (first["total"], first["cache"])
    }
    assert all(a["processed"] <= b["processed"] for a, b in pairwise(computed))
    assert all(a["time_ms"] <= b["time_ms"] for a, b in pairwise(computed))
    assert {request["total"] for request in requests} == {first["total"]}
    assert (
        {"computing"} <= {request["state"] for request in requests} <= {"computing", "generating"}
    )
    assert all(set(request) == REQUEST_FIELDS for request in requests)


REQUEST_FIELDS = {
    *("state", "place", "total", "cached", "computed", "generated"),
    *("seconds", "speed", "expected"),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_progress_is_no_event_unless_requested(
    tiny_server: Server, tiny_dir: Any, path: str
) -> None:
    """Comments depend on how long the prompt takes; `unit/server/test_progress.py` has them."""
    with (
        tiny_server.client() as client,
        stream_lines(client, path, WORDS[:800], model=str(tiny_dir)) as lines,
    ):
        started, reports = time.monotonic(), []
        for line in lines:
            assert '"prompt_progress"' not in line
            if (progress := progress_of(line)) is not None:
                reports.append(progress)
        seconds = time.monotonic() - started
    assert len(reports) <= seconds / 0.5
    if path == "/v1/chat/completions":
        assert not reports
    else:
        assert all(report["processed"] < report["total"] for report in reports[:-1])


def test_status_requires_key(keyed_server: Server) -> None:
    import httpx

    url = f"{keyed_server.base_url}/harmony/status"
    assert httpx.get(url, timeout=60).status_code == 401
    headers = {"authorization": f"Bearer {KEY}"}
    response = httpx.get(url, headers=headers, timeout=60)
    assert response.status_code == 200
    (model,) = response.json()["models"]
    assert set(model) == {"model", "memory", "steps", "requests", "finished_requests"}
    speculate = os.environ.get("VLLM_MLX_HARMONY_SPECULATE", "auto")
    assert model["steps"]["speculate"] == speculate
    assert model["steps"]["relative_costs"].get("1") == (1.0 if speculate == "auto" else None)
    assert model["memory"]["longest_request"] > 0 and model["memory"]["limit"] > 0
