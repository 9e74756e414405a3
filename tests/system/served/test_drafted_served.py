"""Answers that copy their prompt, computed several tokens at a time, as is the default: cancelled,
killed and continued. The scripted model reads the tokens in its caches, so a wrong one would show.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest
from server import FLAG, HARMONY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.engine.costs import RUNS
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server import Server

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
"""Whatever the other tests run with."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.write(tmp_path_factory.mktemp("drafted") / "gpt-oss-standin", SCRIPTS)


@pytest.fixture(scope="module")
def begin(
    start: Start, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Server]:
    """Starts a server; all use one disk, and on all of them every draft is worth trying: the costs
    that the first one has measured are replaced."""
    place = tmp_path_factory.mktemp("ssd")
    flags = (*FLAG, "--ssd-cache-dir", str(place))
    begin = partial(start, *flags, model=model, command=HARMONY, env=DRAFTS)
    begin().stop()
    (measured,) = place.rglob("step-costs.json")
    found = json.loads(measured.read_text())
    cheap = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05]
    measured.write_text(json.dumps({key: [cheap] * RUNS for key in found}))
    return begin


@pytest.fixture(scope="module")
def server(begin: Callable[[], Server]) -> Iterator[Server]:
    server = begin()
    yield server
    server.stop()


def status(server: Server) -> dict[str, Any]:
    """Of the only model: its steps so far, and the requests that it has."""
    (found,) = httpx.get(f"{server.base_url}/harmony/status", timeout=60).json()["models"]
    return {**found["steps"], "requests": found["requests"]}


def user(how: str) -> dict[str, Any]:
    return {"role": "user", "content": f"{how}:\n{FILE}"}


def chat(server: Server, *messages: Any) -> Any:
    with server.openai() as client:
        return client.chat.completions.create(model=str(server.model), messages=messages)


def by_chat(server: Server) -> tuple[str, Any]:
    found = chat(server, user("Edit by Chat"))
    return found.choices[0].message.content, found.usage.completion_tokens_details


def by_responses(server: Server) -> tuple[str, Any]:
    with server.openai() as client:
        asked = user("Edit by Responses")["content"]
        found = client.responses.create(model=str(server.model), input=asked, store=False)
    assert found.usage is not None
    return found.output_text, found.usage.output_tokens_details


def by_messages(server: Server) -> tuple[str, Any]:
    with anthropic.Anthropic(base_url=server.base_url, api_key="k", timeout=60) as client:
        found = client.messages.create(
            model=str(server.model), messages=[user("Edit by Messages")], max_tokens=9000
        )
    return "".join(block.text for block in found.content if block.type == "text"), None


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
def test_the_answer_takes_few_steps(server: Server, ask: Callable[..., tuple[str, Any]]) -> None:
    before = status(server)
    text, details = ask(server)
    assert text == EDITED
    after = status(server)
    names = ("completion_tokens", "executed", "accepted_prediction_tokens")
    tokens, steps, accepted = (after[name] - before[name] for name in names)
    assert tokens > 1500 and accepted > tokens / 2 and tokens > 3 * steps
    if details is not None:
        assert details.accepted_prediction_tokens == accepted
        assert details.rejected_prediction_tokens > 0  # at the edits


def test_headers_take_few_steps(server: Server) -> None:
    """They are not copies, and are not counted as such."""
    before = status(server)
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": city}}
    message = {"role": "user", "content": "What is the weather?"}
    with server.openai() as client:
        found = client.chat.completions.create(
            model=str(server.model), messages=[message], tools=[tool]
        )
    (call,) = found.choices[0].message.tool_calls or ()
    assert call.to_dict()["function"] == {"name": "get_weather", "arguments": '{"city":"Paris"}'}
    after = status(server)
    names = ("completion_tokens", "executed", "accepted_prediction_tokens")
    tokens, steps, accepted = (after[name] - before[name] for name in names)
    assert tokens - steps > 12
    assert accepted == 0


def until_drafting(server: Server) -> None:
    """Waits until the only answer has more tokens than it took steps."""
    before, deadline = status(server)["executed"], time.monotonic() + 120
    while time.monotonic() < deadline:
        found = status(server)
        generated = sum(each["generated"] for each in found["requests"])
        if generated > 100 and generated > 2 * (found["executed"] - before):
            return
        time.sleep(0.02)
    raise AssertionError("nothing was drafted")


def slowly(server: Server, name: str) -> Any:
    """A stream that takes a while."""
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="k", timeout=120)
    asked: list[Any] = [user(f"Slowly, edit {name}")]
    return client.chat.completions.create(model=str(server.model), messages=asked, stream=True)


def test_disconnect_ends_a_drafted_answer(server: Server) -> None:
    before = status(server)
    stream = slowly(server, "until I go")
    until_drafting(server)
    stream.close()
    deadline = time.monotonic() + 120
    while (after := status(server))["requests"] and time.monotonic() < deadline:
        time.sleep(0.02)
    tokens = after["completion_tokens"] - before["completion_tokens"]
    assert after["accepted_prediction_tokens"] - before["accepted_prediction_tokens"] > 20
    assert not after["requests"] and tokens > 100
    found = chat(server, user("Edit until I go"))
    assert found.choices[0].message.content == EDITED


def test_killed_while_it_drafts(server: Server, begin: Callable[[], Server]) -> None:
    """What was stored before is right, and what was being generated leaves nothing wrong."""
    first = chat(server, user("Edit, and continue"))
    deadline = time.monotonic() + 120
    stats = f"{server.base_url}/v1/cache/stats"
    while time.monotonic() < deadline:
        disk = httpx.get(stats, timeout=60).json()["engine_cache"]["harmony_prefix_reuse"]["disk"]
        if not disk["waiting"]:
            break
        time.sleep(0.05)
    stream = slowly(server, "until you are killed")
    until_drafting(server)
    server.process.kill()
    server.process.wait(60)
    stream.close()
    server = begin()
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    found = chat(server, user("Edit, and continue"), answer, {"role": "user", "content": "Thanks."})
    assert found.choices[0].message.content == "You are welcome."
    assert found.usage.prompt_tokens_details.cached_tokens > first.usage.total_tokens - 10
    again = chat(server, user("Edit, and continue"))
    assert again.choices[0].message.content == EDITED
    assert again.usage.completion_tokens_details.accepted_prediction_tokens > 500
    server.stop()
