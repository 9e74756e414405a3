"""Engines of a real server: dead threads, small memory, two models, unloading when idle."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from server_process import FLAG, HARMONY
from sse import arriving
from waiting import wait_until

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

SCRIPTS = [
    Script("<|message|>Hi.<|end|>", "<|channel|>final<|message|>Hi.<|return|>"),
    Script(
        "<|message|>Slowly.<|end|>",
        "<|channel|>final<|message|>" + " word" * 400 + "<|return|>",
        delay_ms=100,
    ),
]


def body(path: str, text: str, **fields: Any) -> dict[str, Any]:
    """A request of at most 20 ids to ``path``."""
    if path == RESPONSES:
        return {"input": text, "max_output_tokens": 20, **fields}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 20, **fields}


# --- The engine's thread dies.


@pytest.fixture
def dying_server(start: Start, standin_dir: Path, tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    """A server whose engine fails as soon as the file exists."""
    standin.rescript(standin_dir, SCRIPTS)
    file = tmp_path / "die"
    command = f"""
import runpy
from pathlib import Path
from vllm_mlx_harmony.engine.scheduler import Scheduler
decide = Scheduler.next
def broken(self, *given):
    assert not Path({str(file)!r}).exists(), "a bug"
    return decide(self, *given)
Scheduler.next = broken
runpy.run_module("vllm_mlx_harmony", run_name="__main__")
"""
    server = start(*FLAG, command=(sys.executable, "-c", command, "serve"))
    yield server, file
    server.stop()


def test_dead_engine_thread_is_reported_everywhere(dying_server: tuple[Server, Path]) -> None:
    server, file = dying_server
    model = str(server.model)
    with server.client(300) as client:
        assert client.get("/health").status_code == 200
        request = {"model": model, **body(CHAT, "Slowly.", stream=True, max_tokens=500)}
        with client.stream("POST", CHAT, json=request) as streamed:
            lines = streamed.iter_lines()
            assert "word" in next(line for line in lines if "word" in line)
            file.touch()
            events = list(arriving(lines))
        assert "the engine stopped unexpectedly" in events[-1]["error"]["message"]
        assert client.get("/health").status_code == 503
        for path in (CHAT, RESPONSES, MESSAGES):
            for stream in (False, True):
                request = {"model": model, **body(path, "Hi.", stream=stream)}
                response = client.post(path, json=request)
                assert response.status_code == 503, response.text
                assert "the engine stopped unexpectedly" in response.json()["error"]["message"]
                assert response.headers["retry-after"]
        assert client.get("/v1/models").status_code == 200
    assert server.stop() in (0, -signal.SIGTERM), "it ends by itself"


# --- Little memory.

MEMORY = 30_000_000
"""Bytes. Weights take 25,844,832, and about 2,000 ids fit into nine tenths of all."""

WORD = " word"


def test_request_beyond_memory_is_rejected_and_others_wait(start: Start, tiny_dir: Path) -> None:
    env = {"VLLM_MLX_HARMONY_MEMORY": str(MEMORY), "VLLM_MLX_HARMONY_CACHE": "1M"}
    server = start(*FLAG, "--prefill-step-size", "64", model=tiny_dir, command=HARMONY, env=env)
    model = str(server.model)
    with server.client(300) as client, ThreadPoolExecutor(3) as pool:
        longest = client.get("/v1/models").json()["data"][0]["max_model_len"]
        assert 1_000 < longest < 10_000
        assert f"{longest:,} tokens fit in memory, of 131,072" in server.log
        for path in (CHAT, RESPONSES, MESSAGES):
            rejection = client.post(path, json={"model": model, **body(path, WORD * 5_000)})
            assert rejection.status_code == 400, rejection.text
            error = rejection.json()["error"]
            assert str(longest) in error["message"].replace(",", "")
            assert error.get("code") == "context_length_exceeded" or path == MESSAGES

        def send_chat(number: int) -> httpx.Response:
            text = f"{number}" + WORD * (longest * 2 // 3)
            return client.post(CHAT, json={"model": model, **body(CHAT, text)})

        for response in pool.map(send_chat, range(3)):
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["prompt_tokens"] > longest // 2
    server.stop()


# --- Two models.


@pytest.mark.of_vllm_mlx
def test_two_models_run_side_by_side(start: Start, standin_dir: Path, tmp_path: Path) -> None:
    """The second one is loaded while the first generates, and neither stops the other."""
    standin.rescript(standin_dir, SCRIPTS)
    other_model = standin.write(
        tmp_path / "other", [Script("Hi.", "<|channel|>final<|message|>Ho.<|return|>")]
    )
    config = tmp_path / "models.yaml"
    config.write_text(
        json.dumps(
            {
                "manager": {"memory_budget_gb": 4},
                "models": [
                    {"name": "first", "path": str(standin_dir)},
                    {"name": "second", "path": str(other_model)},
                ],
            }
        )
    )
    command = (*HARMONY, "--models-config")  # instead of a model
    server = start(*FLAG, model=config, command=command)
    with server.client(300) as client, server.client(300) as second_client:
        request = {"model": "first", **body(CHAT, "Slowly.", stream=True, max_tokens=60)}
        with client.stream("POST", CHAT, json=request) as stream:
            lines = stream.iter_lines()
            assert any("word" in line for line in lines)
            for path in (CHAT, RESPONSES, MESSAGES):
                whole = second_client.post(path, json={"model": "second", **body(path, "Hi.")})
                assert whole.status_code == 200
                assert "Ho." in whole.text
            status = second_client.get("/harmony/status").json()["models"]
            assert [len(entry["requests"]) for entry in status] in ([1, 0], [0, 1])
            rest = [line for line in lines if "word" in line]
        assert rest, "the first went on meanwhile"
        assert second_client.get("/health").status_code == 200
        response = second_client.post(CHAT, json={"model": "third", **body(CHAT, "Hi.")})
        assert response.status_code == 404
    server.stop()


# --- Unloading when idle.

IDLE = 0.3


@pytest.fixture(scope="module")
def unloading_server(start: Start, standin_dir: Path) -> Iterator[Server]:
    """A server that unloads its model as soon as nothing runs."""
    standin.rescript(standin_dir, SCRIPTS)
    server = start(*FLAG, "--auto-unload-idle-seconds", str(IDLE), command=HARMONY)
    yield server
    server.stop()


@pytest.mark.of_vllm_mlx
def test_requests_during_unloading_are_answered(unloading_server: Server) -> None:
    """Each wave arrives while the model is being unloaded, or just after that."""
    model = str(unloading_server.model)
    with unloading_server.client(300) as client, ThreadPoolExecutor(6) as pool:

        def send(path: str, stream: bool) -> httpx.Response:
            return client.post(path, json={"model": model, **body(path, "Hi.", stream=stream)})

        for _ in range(3):
            wait_until(lambda: unloading_server.residency().startswith("unload"), "the idle time")
            wave = [
                pool.submit(send, path, stream)
                for path in (CHAT, RESPONSES, MESSAGES)
                for stream in (False, True)
            ]
            for response in (future.result() for future in wave):
                assert response.status_code == 200, response.text
                assert '"Hi' in response.text and '"error":{' not in response.text
            assert client.get("/health").status_code == 200


@pytest.mark.nightly(sample=3)
@pytest.mark.of_vllm_mlx
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_answer_longer_than_idle_time_keeps_model_loaded(
    unloading_server: Server, path: str
) -> None:
    with unloading_server.client(300) as client:
        request = {"model": str(unloading_server.model), **body(path, "Slowly.", stream=True)}
        with client.stream("POST", path, json=request) as response:
            text = "".join(response.iter_lines())
        assert response.elapsed.total_seconds() > 4 * IDLE
        assert text.count(" word") >= 15, text
        wait_until(lambda: unloading_server.residency().startswith("unload"), "the idle time")


@pytest.mark.of_vllm_mlx
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_invalid_request_loads_no_model(unloading_server: Server, path: str) -> None:
    with unloading_server.client(300) as client:
        wait_until(lambda: unloading_server.residency() == "unloaded", "the model to be unloaded")
        for model_fields in ({}, {"model": str(unloading_server.model)}):
            request = {**model_fields, **body(path, "Hi.", temperature="warm")}
            assert client.post(path, json=request).status_code == 400
        assert unloading_server.residency() == "unloaded"
