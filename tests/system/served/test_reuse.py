"""Through the real server and the official client: a turn computes only what is new in it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from server import FLAG, HARMONY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from openai import OpenAI
    from server import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

CALLS = 6
# Written as histories are rendered, so that the next prompt continues what was generated.
CALL = '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"page":%d}<|call|>'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a page up.",
            "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}},
        },
    }
]
SCRIPTS = [
    *(Script(f"Page {n} ", CALL % (n + 1)) for n in range(1, CALLS)),
    Script(f"Page {CALLS} ", "<|channel|>final<|message|>It is on page six.<|return|>"),
    Script("Slowly", "<|channel|>final<|message|>" + "word " * 200 + "<|return|>", delay_ms=50),
    Script("Where is it?", CALL % 1),
    *(
        Script(f"I am {n}.", f"<|channel|>final<|message|>{'Hi, ' * (n + 1)}{n}<|return|>")
        for n in range(8)
    ),
]
SYSTEM = "Answer as scripted. " * 60


@pytest.fixture(scope="module", autouse=True)
def _scripts(standin_dir: Path) -> None:
    standin.rescript(standin_dir, SCRIPTS)


@pytest.fixture(scope="module")
def server(open_server: Server) -> Server:
    return open_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    """Of a tenant of its own: nobody else has computed what it asks for."""
    with server.openai("reuse") as client:
        yield client


def ask(client: OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=messages,
        tools=TOOLS,
        temperature=0,
        **fields,
    )


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def words(seed: int, count: int) -> str:
    source = random.Random(seed)
    return " ".join(str(source.randrange(1000)) for _ in range(count))


def question(seed: int) -> list[Any]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{words(seed, 60)} Where is it?"},
    ]


def tool_loop(client: OpenAI, messages: list[Any]) -> list[Any]:
    """Answers up to the final one; ``messages`` grow by what a client echoes."""
    answers = []
    while True:
        answer = ask(client, messages)
        answers.append(answer)
        message = answer.choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        if not message.tool_calls:
            return answers
        call = message.tool_calls[0]
        page = f"Page {len(answers)} {words(len(answers), 150)}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": page})


def test_tool_loop_computes_each_token_once(client: OpenAI) -> None:
    answers = tool_loop(client, question(1))
    assert len(answers) == CALLS + 1 and answers[-1].choices[0].finish_reason == "stop"
    for before, answer in pairwise(answers):
        known = before.usage.prompt_tokens + before.usage.completion_tokens
        assert cached(answer) == known
    computed = sum(answer.usage.prompt_tokens - cached(answer) for answer in answers)
    assert computed <= 1.05 * answers[-1].usage.prompt_tokens


def test_next_turn_retry_and_branch(client: OpenAI) -> None:
    messages = question(2)
    answers = tool_loop(client, messages)
    again = ask(client, [*messages, {"role": "user", "content": "Where is it? Once more."}])
    assert cached(again) >= answers[-1].usage.prompt_tokens - 1
    retried = ask(client, messages[:4])
    assert cached(retried) == retried.usage.prompt_tokens - 1
    other = ask(client, [messages[0], {"role": "user", "content": "I am 3."}])
    assert other.choices[0].message.content == "Hi, " * 4 + "3"
    assert 0 < cached(other) < answers[0].usage.prompt_tokens


def test_streamed_and_not_say_the_same(client: OpenAI) -> None:
    messages = [{"role": "user", "content": f"{words(3, 80)} I am 5."}]
    whole = ask(client, messages)
    chunks = list(ask(client, messages, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(
        choice.delta.content or "" for chunk in chunks[:-1] for choice in chunk.choices
    )
    assert streamed == whole.choices[0].message.content == "Hi, " * 6 + "5"
    assert cached(chunks[-1]) == whole.usage.prompt_tokens - 1


def test_eight_conversations_at_once(client: OpenAI) -> None:
    def converse(n: int) -> list[tuple[str, int, int]]:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        streamed = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"{words(n * 9 + turn, 60)} I am {n}."})
            answer = ask(client, messages)
            content = answer.choices[0].message.content
            streamed.append((content, cached(answer), answer.usage.total_tokens))
            messages.append({"role": "assistant", "content": content})
        return streamed

    with ThreadPoolExecutor(8) as pool:
        for n, streamed in enumerate(pool.map(converse, range(8))):
            assert [content for content, _, _ in streamed] == [f"{'Hi, ' * (n + 1)}{n}"] * 3
            for (_, _, before), (_, known, _) in pairwise(streamed):
                assert known == before - 1  # all but what ended the answer


def test_disconnect_leaves_the_cache_intact(server: Server, client: OpenAI) -> None:
    messages = [{"role": "user", "content": f"{words(5, 60)} Slowly."}]
    stream = ask(client, messages, stream=True)
    part = ""
    for chunk in stream:
        part += chunk.choices[0].delta.content or ""
        if len(part) > 20:
            break
    stream.close()
    history = [*messages, {"role": "assistant", "content": part}]
    follow = ask(client, [*history, {"role": "user", "content": "I am 1."}])
    assert follow.choices[0].message.content == "Hi, Hi, 1"
    assert cached(follow) < follow.usage.prompt_tokens
    stats = httpx.get(f"{server.base_url}/v1/cache/stats").json()["engine_cache"]
    assert 0 < stats["harmony_prefix_reuse"]["nbytes"] <= stats["harmony_prefix_reuse"]["budget"]


@pytest.mark.parametrize(
    "path", ["/v1/cache", pytest.param("/v1/cache/prefix", marks=pytest.mark.of_vllm_mlx)]
)
def test_emptied_caches_are_empty(server: Server, client: OpenAI, path: str) -> None:
    messages = [{"role": "user", "content": f"{words(6, 60)} I am 2."}]
    ask(client, messages)
    assert cached(ask(client, messages)) > 0
    streamed = httpx.delete(f"{server.base_url}{path}").json()
    assert streamed["status"] == "cleared"
    assert cached(ask(client, messages)) == 0


def test_real_architecture_says_the_same_with_and_without(
    start: Start, tiny_server: Server, tiny_dir: Path
) -> None:
    without_cache = {"VLLM_MLX_HARMONY_CACHE": "0"}
    without = start(*FLAG, model=tiny_dir, command=HARMONY, env=without_cache)
    answers: list[list[tuple[Any, ...]]] = []
    for server in (tiny_server, without):
        answers.append([])
        messages = [{"role": "user", "content": words(7, 100)}]
        with server.openai() as client:
            for turn in range(3):
                answer = ask(client, messages, max_tokens=20)
                message = answer.choices[0].message
                answers[-1].append((message.content, message.model_extra, cached(answer) > 0))
                messages += [
                    {"role": "assistant", "content": "Yes."},
                    {"role": "user", "content": words(turn, 100)},
                ]
    assert without.stop() in {0, -15}
    assert [one[:2] for one in answers[0]] == [one[:2] for one in answers[1]]
    assert [one[2] for one in answers[0]] == [False, True, True]
    assert not any(one[2] for one in answers[1])


@pytest.mark.of_vllm_mlx
def test_unloading_an_idle_model_empties_its_cache(start: Start, standin_dir: Path) -> None:
    server = start(*FLAG, "--auto-unload-idle-seconds", "2", command=HARMONY)
    messages = [{"role": "user", "content": f"{words(8, 60)} I am 4."}]
    with server.openai() as client:
        first = ask(client, messages)
        assert cached(ask(client, messages)) == first.usage.prompt_tokens - 1
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline and '"unloaded"' not in _status(server):
            time.sleep(0.1)
        assert '"unloaded"' in _status(server)
        again = ask(client, messages)  # loads the model again
        assert cached(again) == 0
        assert again.choices[0].message == first.choices[0].message
    server.stop()
    assert not [path for path in server.home.rglob("*") if path.suffix == ".safetensors"]


def _status(server: Server) -> str:
    return httpx.get(f"{server.base_url}/v1/status", timeout=30).text.replace(" ", "")


def test_warm_prompts_serve_every_key(start: Start, tmp_path: Path) -> None:
    """A system prompt in the operator's file is computed once, before anybody asks."""
    path = tmp_path / "warm.json"
    path.write_text(json.dumps([[{"role": "system", "content": SYSTEM}]]))
    server = start(*FLAG, "--warm-prompts", str(path), command=HARMONY)
    asked = {
        "model": str(server.model),
        "max_tokens": 40,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "I am 3."},
        ],
    }
    for key in ("alice", "bob"):
        answer = httpx.post(
            f"{server.base_url}/v1/chat/completions",
            json=asked,
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        ).json()
        usage = answer["usage"]
        left = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert 1 < left < 20, usage
    server.stop()
