"""Errors of Chat Completions: bad requests, full queues, clients that disconnect, faults."""

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
from server_process import FLAG, HARMONY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

PATH = "/v1/chat/completions"
QUEUE_LENGTH = 2
"""The most requests that wait."""

CONCURRENT = 3
"""The most requests that run at once."""

SCRIPTS = [
    Script("<|message|>Hi.<|end|>", "<|channel|>final<|message|>Hi.<|return|>"),
    Script(
        "<|message|>Slowly.<|end|>",
        "<|channel|>final<|message|>" + " word" * 6000 + "<|return|>",
        delay_ms=100,  # ten minutes: no test waits for its end
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
    environment = {"VLLM_MLX_HARMONY_QUEUE": str(QUEUE_LENGTH)}
    flags = ("--max-num-seqs", str(CONCURRENT))
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


def post_chat(client: httpx.Client, text: str, **fields: Any) -> httpx.Response:
    return client.post(PATH, json=body(client, text, **fields))


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response in OpenAI's shape, which has nothing else."""
    document = response.json()
    assert document.keys() == {"error"}
    error_object = document["error"]
    assert error_object.keys() == {"message", "type", "param", "code"}
    assert error_object["message"]
    assert isinstance(error_object["type"], str)
    return dict(error_object)


def events_of(response: httpx.Response) -> list[Any]:
    """The events of a stream that ends with [DONE]."""
    blocks = response.read().decode().split("\n\n")
    data = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(event) for event in data]


# --- Bad requests.

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
def test_bad_request_names_field_and_generates_nothing(
    server: Server, client: httpx.Client, fields: dict[str, Any], param: str, stream: bool
) -> None:
    before = server.finished()
    response = post_chat(client, "Hi.", **{"stream": stream, **fields})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert error_of(response)["type"] == "invalid_request_error"
    assert server.finished() == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"nonsense", b"[1]", b'"x"', b"\xff\xfe", b"[" * 40_000, b"{}"]
)
def test_malformed_body_is_400(client: httpx.Client, content: bytes) -> None:
    response = client.post(PATH, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model_is_404(client: httpx.Client, stream: bool) -> None:
    response = post_chat(client, "Hi.", model="somebody/else", stream=stream)
    assert response.status_code == 404
    assert (error_of(response)["code"], error_of(response)["param"]) == ("model_not_found", "model")
    response = client.get("/v1/models/somebody/else")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_error_for_long_prompt_has_both_numbers(client: httpx.Client) -> None:
    response = post_chat(client, "word " * 140_000)
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert "131072" in error_of(response)["message"]
    assert "1400" in error_of(response)["message"]


def test_official_client_raises_matching_exceptions(server: Server, client: httpx.Client) -> None:
    base = f"{server.base_url}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as official_client:
        with pytest.raises(openai.BadRequestError) as bad_request:
            official_client.chat.completions.create(**body(client, "Hi.", n=9))
        with pytest.raises(openai.NotFoundError):
            official_client.models.retrieve("nobody")
        with pytest.raises(openai.APIError) as failure:
            list(official_client.chat.completions.create(**body(client, "Break."), stream=True))
    assert bad_request.value.param == "n"
    assert failure.value.code == "generation_failed"


# --- Engines that fail.


@pytest.mark.parametrize("text", ["Break.", "Break now."])
def test_engine_failure_is_an_error(client: httpx.Client, text: str) -> None:
    response = post_chat(client, text)
    assert response.status_code == 500
    assert error_of(response)["code"] == "generation_failed"
    streamed = post_chat(client, text, stream=True)
    assert streamed.status_code == 200
    *_, last = events_of(streamed)
    assert last["error"]["code"] == "generation_failed"
    assert post_chat(client, "Hi.").json()["choices"][0]["message"]["content"] == "Hi."


def test_timeout_is_an_error(client: httpx.Client) -> None:
    response = post_chat(client, "Very slowly.", timeout=1)
    assert response.status_code == 504
    assert error_of(response)["code"] == "timeout"
    *_, last = events_of(post_chat(client, "Very slowly.", timeout=1, stream=True))
    assert last["error"]["code"] == "timeout"
    assert post_chat(client, "Hi.").json()["choices"][0]["message"]["content"] == "Hi."


# --- Disconnects and the queue.


@contextmanager
def slow_stream(server: Server) -> Iterator[httpx.Response]:
    """A slow answer that has started. Its client disconnects at the end of the context."""
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
    assert post_chat(client, "Hi.").status_code == 200


def open_request(server: Server, text: str, *, stream: bool) -> AbstractContextManager[None]:
    messages = [{"role": "user", "content": text}]
    body = {"model": str(server.model), "messages": messages, "stream": stream}
    return server.open_request(PATH, body)


def test_disconnect_before_document_frees_the_engine(server: Server, client: httpx.Client) -> None:
    with open_request(server, "Slowly.", stream=False):
        server.wait_for_requests(running=1)
    server.wait_for_requests()
    assert post_chat(client, "Hi.").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_concurrent_requests_run_together(
    server: Server, client: httpx.Client, stream: bool
) -> None:
    with slow_stream(server), ThreadPoolExecutor(QUEUE_LENGTH) as pool:
        futures = [
            pool.submit(post_chat, client, "Hi.", stream=stream) for _ in range(QUEUE_LENGTH)
        ]
        assert [future.result().status_code for future in futures] == [200] * QUEUE_LENGTH
        assert server.requests() == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_in_queue_frees_its_place(
    server: Server, client: httpx.Client, stream: bool
) -> None:
    with ExitStack() as running, ThreadPoolExecutor(QUEUE_LENGTH) as pool:
        for number in range(CONCURRENT):
            running.enter_context(open_request(server, "Slowly.", stream=True))
            server.wait_for_requests(number + 1)
        with ExitStack() as waiting:
            for _ in range(QUEUE_LENGTH):
                waiting.enter_context(open_request(server, "Hi.", stream=stream))
            server.wait_for_requests(CONCURRENT, QUEUE_LENGTH)
            assert error_of(post_chat(client, "Hi.", stream=stream))["code"] == "queue_full"
        server.wait_for_requests(CONCURRENT)
        futures = [
            pool.submit(post_chat, client, "Hi.", stream=stream) for _ in range(QUEUE_LENGTH)
        ]
        server.wait_for_requests(CONCURRENT, QUEUE_LENGTH)
        running.close()
        assert [future.result().status_code for future in futures] == [200] * QUEUE_LENGTH


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("attempt", range(5))
def test_disconnect_at_any_moment_frees_the_engine(
    server: Server, client: httpx.Client, attempt: int
) -> None:
    """After reading a little or nothing, also just before the server writes."""
    for n in range(3):
        with server.client(timeout=60) as other_client:
            request = body(client, "Slowly.", stream=True)
            with other_client.stream("POST", PATH, json=request) as response:
                writes = response.iter_raw()
                for _ in range(n * 2):
                    next(writes)
                time.sleep(0.05 * attempt)
    server.wait_for_requests()
    assert post_chat(client, "Hi.", timeout=60).status_code == 200


@pytest.mark.of_vllm_mlx
def test_host_routes_and_plugin_routes_share_the_engine(
    server: Server, client: httpx.Client
) -> None:
    model = client.get("/v1/models").json()["data"][0]["id"]
    prompt = "<|start|>user<|message|>Slowly.<|end|><|start|>assistant"

    def complete_on_host_route() -> int:
        with server.client() as other_client:
            request = {"model": model, "prompt": prompt, "max_tokens": 15}
            return other_client.post("/v1/completions", json=request).status_code

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(complete_on_host_route)
        server.wait_for_requests(running=1)
        assert post_chat(client, "Hi.").status_code == 200
        assert future.result() == 200


# --- API key and rate limit, on every route of the plugin.

KEY = {"Authorization": "Bearer open-sesame"}


@pytest.fixture(scope="module")
def guarded_server(start: Start, standin_dir: Path) -> Iterator[Server]:
    standin.rescript(standin_dir, SCRIPTS)
    server = start(*FLAG, "--api-key", "open-sesame", "--rate-limit", "2", command=HARMONY)
    yield server
    server.stop()


@pytest.mark.of_vllm_mlx
def test_key_and_rate_limit_are_enforced(guarded_server: Server) -> None:
    with guarded_server.client() as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for response in (
                client.post(PATH, json={}, headers=headers),
                client.get("/v1/models/x", headers=headers),
            ):
                assert response.status_code == 401
                assert error_of(response)["code"] == "invalid_api_key"
        client.headers.update(KEY)
        assert [post_chat(client, "Hi.").status_code for _ in range(2)] == [200, 200]
        limited_response = post_chat(client, "Hi.")
        assert limited_response.status_code == 429
        assert error_of(limited_response)["code"] == "rate_limit_exceeded"
        assert int(limited_response.headers["retry-after"]) > 0
        assert client.get("/v1/models/nobody").status_code == 404


@pytest.mark.of_vllm_mlx
def test_errors_of_host_routes_have_host_shape(guarded_server: Server) -> None:
    with guarded_server.client() as client:
        client.headers.update(KEY)
        assert "detail" in client.post("/v1/completions", json={"prompt": 3}).json()


# --- A real architecture with random weights.


@pytest.mark.nightly
def test_any_output_is_a_valid_answer(tiny_server: Server) -> None:
    """Random weights generate random ids, which cause no errors and show no control tokens."""
    with tiny_server.client() as client:
        for n in range(4):
            fields = {"temperature": 1.0, "max_tokens": 8 + 8 * n, "seed": n}
            response = post_chat(client, f"Say {n}.", tools=TWICE[:1], **fields)
            assert response.status_code == 200, response.text
            assert "<|" not in response.text
            assert response.json()["choices"][0]["finish_reason"] in (
                "stop",
                "length",
                "tool_calls",
            )
            streamed = post_chat(client, f"Say {n}.", stream=True, **fields)
            chunks = events_of(streamed)
            assert not any("error" in chunk for chunk in chunks)
            assert chunks[-1]["choices"][0]["finish_reason"]
