"""Chat Completions when something goes wrong: bad requests, full lines, clients that go, faults."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from server import FLAG, HARMONY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

PATH = "/v1/chat/completions"
PLACES = 2
"""How many requests may wait."""

SEQUENCES = 3
"""How many run at once."""

SCRIPTS = [
    Script("<|message|>Hi.<|end|>", "<|channel|>final<|message|>Hi.<|return|>"),
    Script(
        "<|message|>Slowly.<|end|>",
        "<|channel|>final<|message|>" + " word" * 6000 + "<|return|>",
        delay_ms=100,  # ten minutes: nothing here waits for its end
    ),
    Script(
        "<|message|>Very slowly.<|end|>",
        "<|channel|>final<|message|>" + " word" * 8 + "<|return|>",
        delay_ms=1500,
    ),
    Script("<|message|>Break.<|end|>", "<|channel|>final<|message|>Never said.", fail_at=5),
    Script("<|message|>Break now.<|end|>", "<|channel|>final<|message|>x", fail_at=0),
]


@pytest.fixture(scope="module")
def server(start: Start, standin_dir: Path) -> Iterator[Server]:
    standin.rescript(standin_dir, SCRIPTS)
    environment = {"VLLM_MLX_HARMONY_QUEUE": str(PLACES)}
    flags = ("--max-num-seqs", str(SEQUENCES))
    server = start(*FLAG, *flags, command=HARMONY, env=environment)
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def body(client: httpx.Client, text: str, **fields: Any) -> dict[str, Any]:
    model = client.get("/v1/models").json()["data"][0]["id"]
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def ask(client: httpx.Client, text: str, **fields: Any) -> httpx.Response:
    return client.post(PATH, json=body(client, text, **fields))


def error(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer that has nothing else, in OpenAI's shape."""
    document = response.json()
    assert document.keys() == {"error"}
    found = document["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert found["message"]
    assert isinstance(found["type"], str)
    return dict(found)


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, which ends as every stream does."""
    blocks = response.read().decode().split("\n\n")
    data = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


# --- Requests that are not right.

USER = {"role": "user", "content": "Hi."}
UNKNOWN = {"type": "hologram"}
TWICE = [{"type": "function", "function": {"name": "x"}}] * 2

BAD = [
    pytest.param({"messages": []}, "messages", id="no messages"),
    pytest.param({"messages": None}, "messages", id="null messages"),
    pytest.param({"messages": "Hi."}, "messages", id="messages as a string"),
    pytest.param({"messages": [{"content": "Hi."}]}, "messages[0].role", id="no role"),
    pytest.param(
        {"messages": [{**USER, "content": [UNKNOWN]}]}, "messages[0].content[0]", id="hologram"
    ),
    pytest.param(
        {"messages": [USER, {"role": "tool", "tool_call_id": "nobody", "content": "x"}]},
        "messages[1]",
        id="result of no call",
    ),
    pytest.param({"model": 3}, "model", id="model as a number"),
    pytest.param({"temperature": "hot"}, "temperature", id="temperature as a word"),
    pytest.param({"max_tokens": 0}, "max_tokens", id="no tokens"),
    pytest.param({"n": 9}, "n", id="nine answers"),
    pytest.param({"top_logprobs": 1}, "top_logprobs", id="likeliest tokens without logprobs"),
    pytest.param({"tool_choice": "required"}, "tool_choice", id="a forced call"),
    pytest.param({"reasoning_effort": "huge"}, "reasoning_effort", id="unknown effort"),
    pytest.param({"logit_bias": {"x": 1}}, "logit_bias", id="bias on no id"),
    pytest.param({"logit_bias": {"201088": 1}}, "logit_bias", id="bias beyond the model"),
    pytest.param({"tools": TWICE}, "tools[1]", id="two tools of a name"),
    pytest.param({"stream": "yes"}, "stream", id="stream as a word"),
    pytest.param({"timeout": -1}, "timeout", id="no time"),
]


@pytest.mark.nightly(sample=6)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), BAD)
def test_a_bad_request_names_the_field_and_generates_nothing(
    server: Server, client: httpx.Client, fields: dict[str, Any], param: str, stream: bool
) -> None:
    before = server.finished()
    response = ask(client, "Hi.", **{"stream": stream, **fields})
    assert response.status_code == 400, response.text
    assert error(response)["param"] == param
    assert error(response)["type"] == "invalid_request_error"
    assert server.finished() == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"nonsense", b"[1]", b'"x"', b"\xff\xfe", b"[" * 40_000, b"{}"]
)
def test_malformed_body_is_a_400(client: httpx.Client, content: bytes) -> None:
    response = client.post(PATH, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_a_404(client: httpx.Client, stream: bool) -> None:
    response = ask(client, "Hi.", model="somebody/else", stream=stream)
    assert response.status_code == 404
    assert (error(response)["code"], error(response)["param"]) == ("model_not_found", "model")
    response = client.get("/v1/models/somebody/else")
    assert response.status_code == 404
    assert error(response)["code"] == "model_not_found"


def test_error_for_long_prompt_has_both_numbers(client: httpx.Client) -> None:
    response = ask(client, "word " * 140_000)
    assert response.status_code == 400
    assert error(response)["code"] == "context_length_exceeded"
    assert "131072" in error(response)["message"]
    assert "1400" in error(response)["message"]


def test_the_official_client_raises_what_it_should(server: Server, client: httpx.Client) -> None:
    base = f"{server.base_url}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as official:
        with pytest.raises(openai.BadRequestError) as bad:
            official.chat.completions.create(**body(client, "Hi.", n=9))
        with pytest.raises(openai.NotFoundError):
            official.models.retrieve("nobody")
        with pytest.raises(openai.APIError) as failed:
            list(official.chat.completions.create(**body(client, "Break."), stream=True))
    assert bad.value.param == "n"
    assert failed.value.code == "generation_failed"


# --- Engines that fail.


@pytest.mark.parametrize("text", ["Break.", "Break now."])
def test_engine_failure_is_an_error(client: httpx.Client, text: str) -> None:
    response = ask(client, text)
    assert response.status_code == 500
    assert error(response)["code"] == "generation_failed"
    streamed = ask(client, text, stream=True)
    assert streamed.status_code == 200
    *_, last = events(streamed)
    assert last["error"]["code"] == "generation_failed"
    assert ask(client, "Hi.").json()["choices"][0]["message"]["content"] == "Hi."


@pytest.mark.parametrize("text", ["Very slowly."])
def test_time_that_runs_out(client: httpx.Client, text: str) -> None:
    response = ask(client, text, timeout=1)
    assert response.status_code == 504
    assert error(response)["code"] == "timeout"
    *_, last = events(ask(client, text, timeout=1, stream=True))
    assert last["error"]["code"] == "timeout"
    assert ask(client, "Hi.").json()["choices"][0]["message"]["content"] == "Hi."


# --- Clients that go, and the line.


@contextmanager
def slow_stream(server: Server) -> Iterator[httpx.Response]:
    """A slow answer that has begun; its client goes at the end of the context."""
    with server.client() as client:
        request = body(client, "Slowly.", stream=True)
        with client.stream("POST", PATH, json=request) as response:
            writes = response.iter_raw()  # without a reference to it, the response is closed
            next(writes)  # the role, before anything is generated
            next(writes)
            yield response


def test_disconnect_during_stream_frees_the_engine(server: Server, client: httpx.Client) -> None:
    with slow_stream(server):
        assert server.requests() == (1, 0)
    server.wait_for_requests()
    assert ask(client, "Hi.").status_code == 200


def sent(server: Server, text: str, *, stream: bool) -> AbstractContextManager[None]:
    messages = [{"role": "user", "content": text}]
    return server.sent(PATH, {"model": str(server.model), "messages": messages, "stream": stream})


def test_disconnect_before_document_frees_the_engine(server: Server, client: httpx.Client) -> None:
    with sent(server, "Slowly.", stream=False):
        server.wait_for_requests(running=1)
    server.wait_for_requests()
    assert ask(client, "Hi.").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_come_together_run_together(
    server: Server, client: httpx.Client, stream: bool
) -> None:
    with slow_stream(server), ThreadPoolExecutor(PLACES) as pool:
        asked = [pool.submit(ask, client, "Hi.", stream=stream) for _ in range(PLACES)]
        assert [each.result().status_code for each in asked] == [200] * PLACES
        assert server.requests() == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_in_queue_frees_its_place(
    server: Server, client: httpx.Client, stream: bool
) -> None:
    with ExitStack() as running, ThreadPoolExecutor(PLACES) as pool:
        for number in range(SEQUENCES):
            running.enter_context(sent(server, "Slowly.", stream=True))
            server.wait_for_requests(number + 1)
        with ExitStack() as waiting:
            for _ in range(PLACES):
                waiting.enter_context(sent(server, "Hi.", stream=stream))
            server.wait_for_requests(SEQUENCES, PLACES)
            assert error(ask(client, "Hi.", stream=stream))["code"] == "queue_full"
        server.wait_for_requests(SEQUENCES)
        patient = [pool.submit(ask, client, "Hi.", stream=stream) for _ in range(PLACES)]
        server.wait_for_requests(SEQUENCES, PLACES)
        running.close()
        assert [each.result().status_code for each in patient] == [200] * PLACES


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("attempt", range(5))
def test_clients_that_go_at_any_moment_leave_the_engine_free(
    server: Server, client: httpx.Client, attempt: int
) -> None:
    """Read a little, or nothing, then go: also when the server is just about to write."""
    for n in range(3):
        with server.client(timeout=60) as other:
            request = body(client, "Slowly.", stream=True)
            with other.stream("POST", PATH, json=request) as response:
                writes = response.iter_raw()
                for _ in range(n * 2):
                    next(writes)
                time.sleep(0.05 * attempt)
    server.wait_for_requests()
    assert ask(client, "Hi.", timeout=60).status_code == 200


@pytest.mark.of_vllm_mlx
def test_the_hosts_own_routes_and_ours_share_the_engine(
    server: Server, client: httpx.Client
) -> None:
    model = client.get("/v1/models").json()["data"][0]["id"]
    prompt = "<|start|>user<|message|>Slowly.<|end|><|start|>assistant"

    def hosts_own() -> int:
        with server.client() as other:
            request = {"model": model, "prompt": prompt, "max_tokens": 15}
            return other.post("/v1/completions", json=request).status_code

    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(hosts_own)
        time.sleep(0.4)
        assert ask(client, "Hi.").status_code == 200
        assert theirs.result() == 200


# --- API key and rate limit, on every route of ours.

KEY = {"Authorization": "Bearer open-sesame"}


@pytest.fixture(scope="module")
def guarded(start: Start, standin_dir: Path) -> Iterator[Server]:
    standin.rescript(standin_dir, SCRIPTS)
    server = start(*FLAG, "--api-key", "open-sesame", "--rate-limit", "2", command=HARMONY)
    yield server
    server.stop()


@pytest.mark.of_vllm_mlx
def test_key_and_limit_hold(guarded: Server) -> None:
    with guarded.client() as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for response in (
                client.post(PATH, json={}, headers=headers),
                client.get("/v1/models/x", headers=headers),
            ):
                assert response.status_code == 401
                assert error(response)["code"] == "invalid_api_key"
        client.headers.update(KEY)
        assert [ask(client, "Hi.").status_code for _ in range(2)] == [200, 200]
        limited = ask(client, "Hi.")
        assert limited.status_code == 429
        assert error(limited)["code"] == "rate_limit_exceeded"
        assert int(limited.headers["retry-after"]) > 0
        assert client.get("/v1/models/nobody").status_code == 404


@pytest.mark.of_vllm_mlx
def test_errors_of_the_hosts_own_routes_have_its_shape(guarded: Server) -> None:
    with guarded.client() as client:
        client.headers.update(KEY)
        assert "detail" in client.post("/v1/completions", json={"prompt": 3}).json()


# --- A real architecture with random weights.


def test_any_output_is_a_valid_answer(tiny_server: Server) -> None:
    """Random weights say random ids: never an error, never a control token."""
    with tiny_server.client() as client:
        for n in range(4):
            fields = {"temperature": 1.0, "max_tokens": 8 + 8 * n, "seed": n}
            response = ask(client, f"Say {n}.", tools=TWICE[:1], **fields)
            assert response.status_code == 200, response.text
            assert "<|" not in response.text
            assert response.json()["choices"][0]["finish_reason"] in (
                "stop",
                "length",
                "tool_calls",
            )
            streamed = ask(client, f"Say {n}.", stream=True, **fields)
            chunks = events(streamed)
            assert not any("error" in chunk for chunk in chunks)
            assert chunks[-1]["choices"][0]["finish_reason"]
