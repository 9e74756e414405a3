"""Answers that copy their prompt, with speculation as by default: cancelled, killed, continued.

The scripted model reads the tokens in its caches, so a wrong one would change the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest
from server_process import FLAG, HARMONY
from waiting import wait_until

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.engine.measure_costs import RUNS
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

FILE = "\n".join(f"row {n}: {n * 7919 % 1009}, {n * 104729 % 1013}" for n in range(150))
EDITED = FILE.replace("row 70:", "row seventy:").replace("row 120:", "row one hundred and twenty:")
ANSWER = f"<|channel|>final<|message|>{EDITED}<|return|>"
CALL = (
    "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris"}<|call|>'
)
SCRIPTS = [
    Script("weather", CALL),
    Script("Thanks.", "<|channel|>final<|message|>You are welcome.<|return|>"),
    Script("Slowly, edit", ANSWER, delay_ms=40),
    Script("Edit", ANSWER),
]

DRAFTS = {"VLLM_MLX_HARMONY_SPECULATE": "auto", "VLLM_MLX_HARMONY_GRAMMAR": "auto"}
"""Independent of the settings of other tests."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.write(tmp_path_factory.mktemp("drafted") / "gpt-oss-standin", SCRIPTS)


@pytest.fixture(scope="module")
def start_server(
    start: Start, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Server]:
    """Starts a server. All share one disk cache, and draft whenever they can: the step costs that
    the first one measured are replaced by lower ones."""
    place = tmp_path_factory.mktemp("ssd")
    flags = (*FLAG, "--ssd-cache-dir", str(place))
    start_server = partial(start, *flags, model=model, command=HARMONY, env=DRAFTS)
    start_server().stop()
    (costs_file,) = place.rglob("step-costs.json")
    costs = json.loads(costs_file.read_text())
    cheap = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05]
    costs_file.write_text(json.dumps({key: [cheap] * RUNS for key in costs}))
    return start_server


@pytest.fixture(scope="module")
def server(start_server: Callable[[], Server]) -> Iterator[Server]:
    server = start_server()
    yield server
    server.stop()


def status(server: Server) -> dict[str, Any]:
    """The steps so far and the requests of the only model."""
    (model_status,) = httpx.get(f"{server.base_url}/harmony/status", timeout=60).json()["models"]
    return {**model_status["steps"], "requests": model_status["requests"]}


def user(request: str) -> dict[str, Any]:
    return {"role": "user", "content": f"{request}:\n{FILE}"}


def chat(server: Server, *messages: Any) -> Any:
    with server.openai() as client:
        return client.chat.completions.create(model=str(server.model), messages=messages)


def by_chat(server: Server) -> tuple[str, Any]:
    completion = chat(server, user("Edit by Chat"))
    return completion.choices[0].message.content, completion.usage.completion_tokens_details


def by_responses(server: Server) -> tuple[str, Any]:
    with server.openai() as client:
        prompt = user("Edit by Responses")["content"]
        response = client.responses.create(model=str(server.model), input=prompt, store=False)
    assert response.usage is not None
    return response.output_text, response.usage.output_tokens_details


def by_messages(server: Server) -> tuple[str, Any]:
    with anthropic.Anthropic(base_url=server.base_url, api_key="k", timeout=60) as client:
        message = client.messages.create(
            model=str(server.model), messages=[user("Edit by Messages")], max_tokens=9000
        )
    return "".join(block.text for block in message.content if block.type == "text"), None


@pytest.mark.nightly
@pytest.mark.parametrize("send", [by_chat, by_responses, by_messages])
def test_copied_answer_takes_few_steps(
    server: Server, send: Callable[..., tuple[str, Any]]
) -> None:
    before = status(server)
    text, details = send(server)
    assert text == EDITED
    after = status(server)
    names = ("completion_tokens", "executed", "accepted_prediction_tokens")
    tokens, steps, accepted = (after[name] - before[name] for name in names)
    assert tokens > 1500 and accepted > tokens / 2 and tokens > 3 * steps
    if details is not None:
        assert details.accepted_prediction_tokens == accepted
        assert details.rejected_prediction_tokens > 0  # at the edits


@pytest.mark.nightly
def test_call_header_takes_few_steps(server: Server) -> None:
    """Its tokens are forced, not copied, and are not counted as accepted predictions."""
    before = status(server)
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": city}}
    message = {"role": "user", "content": "What is the weather?"}
    with server.openai() as client:
        completion = client.chat.completions.create(
            model=str(server.model), messages=[message], tools=[tool]
        )
    (call,) = completion.choices[0].message.tool_calls or ()
    assert call.to_dict()["function"] == {"name": "get_weather", "arguments": '{"city":"Paris"}'}
    after = status(server)
    names = ("completion_tokens", "executed", "accepted_prediction_tokens")
    tokens, steps, accepted = (after[name] - before[name] for name in names)
    assert tokens - steps > 12
    assert accepted == 0


def wait_for_drafting(server: Server) -> None:
    """Waits until the only answer has many more tokens than steps."""
    before = status(server)["executed"]

    def is_drafting() -> bool:
        current = status(server)
        generated = sum(request["generated"] for request in current["requests"])
        return generated > 100 and generated > 2 * (current["executed"] - before)

    wait_until(is_drafting, "drafted tokens")


def stream_slowly(server: Server, name: str) -> Any:
    """A stream with a delay after each token."""
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="k", timeout=120)
    messages: list[Any] = [user(f"Slowly, edit {name}")]
    return client.chat.completions.create(model=str(server.model), messages=messages, stream=True)


@pytest.mark.nightly
def test_disconnect_ends_drafted_answer(server: Server) -> None:
    before = status(server)
    stream = stream_slowly(server, "until I go")
    wait_for_drafting(server)
    stream.close()
    wait_until(lambda: not status(server)["requests"], "the end of the answer")
    after = status(server)
    tokens = after["completion_tokens"] - before["completion_tokens"]
    assert after["accepted_prediction_tokens"] - before["accepted_prediction_tokens"] > 20
    assert tokens > 100
    completion = chat(server, user("Edit until I go"))
    assert completion.choices[0].message.content == EDITED


@pytest.mark.nightly
def test_answers_are_right_after_kill_while_drafting(
    server: Server, start_server: Callable[[], Server]
) -> None:
    """Earlier turns are reused, and the interrupted one leaves no wrong tokens behind."""
    first = chat(server, user("Edit, and continue"))
    wait_until(lambda: server.cache_stats()["disk"]["waiting"] == 0, "the disk")
    stream = stream_slowly(server, "until you are killed")
    wait_for_drafting(server)
    server.process.kill()
    server.process.wait(60)
    stream.close()
    server = start_server()
    message = {"role": "assistant", "content": first.choices[0].message.content}
    second = chat(
        server, user("Edit, and continue"), message, {"role": "user", "content": "Thanks."}
    )
    assert second.choices[0].message.content == "You are welcome."
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.total_tokens - 10
    repeated = chat(server, user("Edit, and continue"))
    assert repeated.choices[0].message.content == EDITED
    assert repeated.usage.completion_tokens_details.accepted_prediction_tokens > 500
    server.stop()
