"""The host's own loader and engines accept the stand-in as a model. No plugin is involved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from server_process import SPELLINGS
from sse import arriving

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = [pytest.mark.served, pytest.mark.of_vllm_mlx]

# The host's own path shows text between control tokens, so plain text shows most of the ids.
NUMBERS = "|".join(f"{n} is {n * n}, 🙂 日本" for n in range(6))
PEOPLE = [f"person{n}" for n in range(8)]


def answer(text: str) -> str:
    """A completion with an answer only."""
    return f"<|channel|>final<|message|>{text}<|return|>"


def biography(person: str) -> str:
    """An answer with a unique text and length."""
    return f"{person}: " + f"{person} lives. " * (5 + 3 * PEOPLE.index(person))


SCRIPTS = [
    Script("Count.", answer(NUMBERS)),
    Script("Halves.", [200005, 17196, 200008, 4103, 99, 255, 200002]),
    Script("Slowly.", answer("one two three four five six"), delay_ms=100),
    Script("Break.", answer("This is never said to its end."), fail_at=5),
    Script("First.", answer("The first answer.")),
    Script("Second.", answer("The second answer.")),
    *(Script(f"Who is {person}?", answer(biography(person))) for person in PEOPLE),
]


@pytest.fixture(autouse=True, scope="module")
def _scripts(standin_dir: Path) -> None:
    standin.rescript(standin_dir, SCRIPTS)


@pytest.fixture
def client(bare_host: Server) -> Iterator[httpx.Client]:
    with bare_host.client() as client:
        yield client


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(client: httpx.Client, *messages: dict[str, str], **fields: Any) -> httpx.Response:
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": list(messages), "max_tokens": 3000, "temperature": 0}
    body.update(fields)
    return client.post("/v1/chat/completions", json=body)


def content(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"]).strip()


def complete(client: httpx.Client, prompt: str, **fields: Any) -> dict[str, Any]:
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 3000, "temperature": 0, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.nightly(sample=2)  # the second engine
def test_host_uses_directory_as_model_name(client: httpx.Client, standin_dir: Path) -> None:
    models = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == [str(standin_dir)]


@pytest.mark.nightly(sample=4)  # the second engine
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scripted_text_is_generated(client: httpx.Client, temperature: float) -> None:
    response = chat(client, user("Count."), temperature=temperature)
    assert content(response) == NUMBERS
    assert response.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.nightly(sample=2)  # the second engine
def test_completion_is_generated_token_by_token(client: httpx.Client) -> None:
    prompt = "<|start|>user<|message|>Count.<|end|><|start|>assistant"
    whole = complete(client, prompt)
    cut = complete(client, prompt, max_tokens=20)
    assert NUMBERS in whole["choices"][0]["text"]
    assert cut["usage"]["completion_tokens"] == 20
    assert cut["choices"][0]["finish_reason"] == "length"


@pytest.mark.nightly(sample=2)  # the second engine
def test_split_character_is_sent_whole(client: httpx.Client) -> None:
    assert content(chat(client, user("Halves."))) == "🦭"


@pytest.mark.nightly(sample=2)  # the second engine
def test_prompt_longer_than_window_and_prefill_step_is_answered(client: httpx.Client) -> None:
    padding = "A sentence that has no script at all. " * 700
    assert content(chat(client, user(padding + "Count."))) == NUMBERS


@pytest.mark.nightly(sample=2)  # the second engine
def test_unscripted_prompt_gets_an_explanation(client: httpx.Client) -> None:
    assert "stand-in, not gpt-oss" in content(chat(client, user("What is love?")))


@pytest.mark.nightly(sample=2)  # the second engine
def test_streamed_tokens_arrive_one_by_one(client: httpx.Client) -> None:
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [user("Slowly.")], "max_tokens": 100, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        times = [time.monotonic() for _ in arriving(response.iter_lines())]
    assert times[-1] - times[0] > 0.4


@pytest.mark.nightly(sample=2)  # the second engine
def test_second_turn_reuses_the_cached_prefix(bare_host: Server, spelling: str) -> None:
    system = {"role": "system", "content": "Answer as scripted. " * 300}
    before = len(bare_host.log)
    with bare_host.client() as client:
        first = content(chat(client, system, user("First.")))
        message = {"role": "assistant", "content": first}
        second = content(chat(client, system, user("First."), message, user("Second.")))
    assert [first, second] == ["The first answer.", "The second answer."]
    fetches = [line for line in bare_host.log[before:].splitlines() if "[cache_fetch]" in line]
    if spelling == "batched":  # the simple engine keeps no prefix of a model with sliding windows
        assert ["HIT" in line for line in fetches] == [False, True]


@pytest.mark.nightly(sample=2)  # the second engine
def test_scripts_of_a_running_server_can_change(client: httpx.Client, standin_dir: Path) -> None:
    assert content(chat(client, user("First."))) == "The first answer."
    standin.rescript(standin_dir, [Script("First.", answer("Another.")), *SCRIPTS])
    try:
        assert content(chat(client, user("First."))) == "Another."
    finally:
        standin.rescript(standin_dir, SCRIPTS)


@pytest.mark.nightly(sample=2)  # the second engine
def test_server_survives_a_scripted_failure(bare_host: Server) -> None:
    with bare_host.client() as client:
        response = chat(client, user("Break."))
    assert response.status_code == 500
    with bare_host.client() as client:  # the simple engine's host drops the connection as well
        assert content(chat(client, user("First."))) == "The first answer."
    assert "script says: fail here" in bare_host.log


@pytest.mark.nightly(sample=2)  # the second engine
def test_concurrent_requests_get_their_own_answers(bare_host: Server, spelling: str) -> None:
    if spelling == "simple":
        assert_one_at_a_time(bare_host)
        return
    with bare_host.client() as client, ThreadPoolExecutor(len(PEOPLE)) as pool:
        answers = pool.map(lambda person: chat(client, user(f"Who is {person}?")), PEOPLE)
        assert [content(response) for response in answers] == [biography(p).strip() for p in PEOPLE]
    assert any(f"running={count}" in bare_host.log for count in range(4, 9))


def assert_one_at_a_time(host: Server) -> None:
    """The simple engine answers one request and rejects the other, so that no answers are mixed."""
    responses: list[httpx.Response] = []
    with host.client() as client:
        slow_thread = threading.Thread(
            target=lambda: responses.append(chat(client, user("Slowly.")))
        )
        slow_thread.start()
        time.sleep(0.5)
        rejected = chat(client, user("First."))
        slow_thread.join()
    assert content(responses[0]) == "one two three four five six"
    assert (rejected.status_code, "busy" in rejected.text) == (503, True)


@pytest.mark.nightly(sample=2)
def test_tiny_gpt_oss_generates(start: Start, tiny_dir: Path, spelling: str) -> None:
    host = start(*SPELLINGS[spelling], model=tiny_dir)
    with host.client() as client:
        long = "word " * 300
        runs = [complete(client, long, max_tokens=12, temperature=0.0) for _ in range(2)]
    host.stop()
    assert runs[0]["usage"]["completion_tokens"] == 12
    assert runs[0]["choices"][0]["text"] == runs[1]["choices"][0]["text"] != ""
