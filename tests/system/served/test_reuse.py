"""Prefix reuse on the real server, with the official client: a turn computes new tokens only."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from server_process import FLAG, HARMONY
from waiting import wait_until

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from openai import OpenAI
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

CALLS = 6
# Spelled as histories are rendered, so that the next prompt begins with the generated ids.
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
    """A client with a tenant of its own, which no other test has filled."""
    with server.openai("reuse") as client:
        yield client


def complete(client: OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=messages,
        tools=TOOLS,
        temperature=0,
        **fields,
    )


def cached_tokens(completion: Any) -> int:
    return int(completion.usage.prompt_tokens_details.cached_tokens)


def words(seed: int, count: int) -> str:
    source = random.Random(seed)
    return " ".join(str(source.randrange(1000)) for _ in range(count))


def question(seed: int) -> list[Any]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{words(seed, 60)} Where is it?"},
    ]


def tool_loop(client: OpenAI, messages: list[Any]) -> list[Any]:
    """Completions up to the final one. Extends ``messages`` as a client does."""
    completions = []
    while True:
        completion = complete(client, messages)
        completions.append(completion)
        message = completion.choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        if not message.tool_calls:
            return completions
        call = message.tool_calls[0]
        page = f"Page {len(completions)} {words(len(completions), 150)}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": page})


def test_tool_loop_computes_each_token_once(client: OpenAI) -> None:
    completions = tool_loop(client, question(1))
    assert len(completions) == CALLS + 1 and completions[-1].choices[0].finish_reason == "stop"
    for before, completion in pairwise(completions):
        expected = before.usage.prompt_tokens + before.usage.completion_tokens
        assert cached_tokens(completion) == expected
    computed = sum(
        completion.usage.prompt_tokens - cached_tokens(completion) for completion in completions
    )
    assert computed <= 1.05 * completions[-1].usage.prompt_tokens


def test_next_turn_retry_and_branch_reuse_prefix(client: OpenAI) -> None:
    messages = question(2)
    completions = tool_loop(client, messages)
    follow_up = complete(
        client, [*messages, {"role": "user", "content": "Where is it? Once more."}]
    )
    assert cached_tokens(follow_up) >= completions[-1].usage.prompt_tokens - 1
    retry = complete(client, messages[:4])
    assert cached_tokens(retry) == retry.usage.prompt_tokens - 1
    branch = complete(client, [messages[0], {"role": "user", "content": "I am 3."}])
    assert branch.choices[0].message.content == "Hi, " * 4 + "3"
    assert 0 < cached_tokens(branch) < completions[0].usage.prompt_tokens


def test_streamed_answer_equals_whole_one(client: OpenAI) -> None:
    messages = [{"role": "user", "content": f"{words(3, 80)} I am 5."}]
    whole = complete(client, messages)
    chunks = list(complete(client, messages, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(
        choice.delta.content or "" for chunk in chunks[:-1] for choice in chunk.choices
    )
    assert streamed == whole.choices[0].message.content == "Hi, " * 6 + "5"
    assert cached_tokens(chunks[-1]) == whole.usage.prompt_tokens - 1


def test_concurrent_conversations_reuse_their_own_prefixes(client: OpenAI) -> None:
    def converse(n: int) -> list[tuple[str, int, int]]:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        turns = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"{words(n * 9 + turn, 60)} I am {n}."})
            completion = complete(client, messages)
            content = completion.choices[0].message.content
            turns.append((content, cached_tokens(completion), completion.usage.total_tokens))
            messages.append({"role": "assistant", "content": content})
        return turns

    with ThreadPoolExecutor(8) as pool:
        for n, turns in enumerate(pool.map(converse, range(8))):
            assert [content for content, _, _ in turns] == [f"{'Hi, ' * (n + 1)}{n}"] * 3
            for (_, _, total), (_, cached, _) in pairwise(turns):
                assert cached == total - 1  # all but the id that ended the answer


def test_disconnect_leaves_the_cache_intact(server: Server, client: OpenAI) -> None:
    messages = [{"role": "user", "content": f"{words(5, 60)} Slowly."}]
    stream = complete(client, messages, stream=True)
    text = ""
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if len(text) > 20:
            break
    stream.close()
    history = [*messages, {"role": "assistant", "content": text}]
    completion = complete(client, [*history, {"role": "user", "content": "I am 1."}])
    assert completion.choices[0].message.content == "Hi, Hi, 1"
    assert cached_tokens(completion) < completion.usage.prompt_tokens
    stats = server.cache_stats()
    assert 0 < stats["nbytes"] <= stats["budget"]


@pytest.mark.parametrize(
    "path", ["/v1/cache", pytest.param("/v1/cache/prefix", marks=pytest.mark.of_vllm_mlx)]
)
def test_emptied_caches_are_empty(server: Server, client: OpenAI, path: str) -> None:
    messages = [{"role": "user", "content": f"{words(6, 60)} I am 2."}]
    complete(client, messages)
    assert cached_tokens(complete(client, messages)) > 0
    result = httpx.delete(f"{server.base_url}{path}").json()
    assert result["status"] == "cleared"
    assert cached_tokens(complete(client, messages)) == 0


@pytest.mark.nightly
def test_real_architecture_answers_the_same_without_cache(
    start: Start, tiny_server: Server, tiny_dir: Path
) -> None:
    env = {"VLLM_MLX_HARMONY_CACHE": "0"}
    uncached_server = start(*FLAG, model=tiny_dir, command=HARMONY, env=env)
    answers: list[list[tuple[Any, ...]]] = []
    for server in (tiny_server, uncached_server):
        answers.append([])
        messages = [{"role": "user", "content": words(7, 100)}]
        with server.openai() as client:
            for turn in range(3):
                completion = complete(client, messages, max_tokens=20)
                message = completion.choices[0].message
                answers[-1].append(
                    (message.content, message.model_extra, cached_tokens(completion) > 0)
                )
                messages += [
                    {"role": "assistant", "content": "Yes."},
                    {"role": "user", "content": words(turn, 100)},
                ]
    assert uncached_server.stop() in {0, -15}
    assert [answer[:2] for answer in answers[0]] == [answer[:2] for answer in answers[1]]
    assert [answer[2] for answer in answers[0]] == [False, True, True]
    assert not any(answer[2] for answer in answers[1])


@pytest.mark.of_vllm_mlx
def test_unloading_idle_model_empties_cache(start: Start, standin_dir: Path) -> None:
    server = start(*FLAG, "--auto-unload-idle-seconds", "2", command=HARMONY)
    messages = [{"role": "user", "content": f"{words(8, 60)} I am 4."}]
    with server.openai() as client:
        first = complete(client, messages)
        assert cached_tokens(complete(client, messages)) == first.usage.prompt_tokens - 1
        wait_until(lambda: server.residency() == "unloaded", "the model to be unloaded")
        second = complete(client, messages)  # loads the model again
        assert cached_tokens(second) == 0
        assert second.choices[0].message == first.choices[0].message
    server.stop()
    assert not [path for path in server.home.rglob("*") if path.suffix == ".safetensors"]


@pytest.mark.nightly
def test_warm_prompts_serve_every_key(start: Start, tmp_path: Path) -> None:
    """A system prompt in the operator's file is computed before the first request."""
    path = tmp_path / "warm.json"
    path.write_text(json.dumps([[{"role": "system", "content": SYSTEM}]]))
    server = start(*FLAG, "--warm-prompts", str(path), command=HARMONY)
    request = {
        "model": str(server.model),
        "max_tokens": 40,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "I am 3."},
        ],
    }
    for key in ("alice", "bob"):
        completion = httpx.post(
            f"{server.base_url}/v1/chat/completions",
            json=request,
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        ).json()
        usage = completion["usage"]
        new_tokens = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert 1 < new_tokens < 20, usage
    server.stop()
