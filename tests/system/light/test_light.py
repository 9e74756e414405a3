"""The light server with the official clients: three APIs, its prefix cache, its status."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest
from server_process import EXPLICIT, GATEWAY, KEY, Server
from starlette.testclient import TestClient

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.cli.process import free_port
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine import mlx_lm_names
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.settings import load
from vllm_mlx_harmony.required_names import Name
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from conftest import Start

MODEL = "gpt-oss-standin"
"""The name of the directory."""

FINAL = "<|channel|>final<|message|>{}<|return|>"
CALL = (
    "<|channel|>analysis<|message|>Ask the tool.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city":"Zürich"}<|call|>'
)
SCRIPTS = [
    Script("<|message|>Hello<|end|>", FINAL.format("Good day, 日本 🙂.")),
    Script("<|message|>Weather?<|end|>", CALL),
    Script("<|start|>functions.weather to=assistant", FINAL.format("It is 18 °C.")),
    Script("<|message|>Slowly<|end|>", FINAL.format("one two three " * 100), delay_ms=100),
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
ABSENT = ("vllm_mlx", "torch", "torchvision", "gradio", "cv2", "fastapi")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def flags(model: Path, disk: Path) -> tuple[str, ...]:
    standin.rescript(model, SCRIPTS)
    return (f"mlx:{model}", "--ssd-cache-dir", str(disk), "--inspect", "--key", KEY)


@pytest.fixture(scope="module")
def server(start: Start, flags: tuple[str, ...]) -> Server:
    """A server whose log has a line for each imported module."""
    python, *rest = GATEWAY
    return start(*flags, command=(python, "-X", "importtime", *rest))


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.base_url, auth_token=KEY, max_retries=0) as client:
        yield client


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(server.base_url + path, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chat_answer_has_text_and_finish_reason(client: openai.OpenAI, stream: bool) -> None:
    check_chat_answer(client, stream=stream)


def check_chat_answer(client: openai.OpenAI, *, stream: bool) -> None:
    request: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    if stream:
        with client.chat.completions.stream(**request) as events:
            completion = events.get_final_completion()
    else:
        completion = client.chat.completions.create(**request)
    assert completion.choices[0].message.content == "Good day, 日本 🙂."
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chat_calls_a_tool(client: openai.OpenAI, stream: bool) -> None:
    """The second prompt begins with the first one and its answer, which are cached."""
    function = {"name": "weather", "description": f"stream: {stream}", "parameters": SCHEMA}
    tools: Any = [{"type": "function", "function": function}]
    conversation: list[Any] = [{"role": "user", "content": "Weather?"}]
    request: Any = {"model": MODEL, "tools": tools, "messages": conversation}
    if stream:
        with client.chat.completions.stream(**request) as events:
            message: Any = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**request).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city":"Zürich"}')
    conversation += [
        message.model_dump(exclude_none=True, exclude={"parsed"}),
        {"role": "tool", "tool_call_id": call.id, "content": "18"},
    ]
    completion = client.chat.completions.create(**request)
    assert completion.choices[0].message.content == "It is 18 °C."
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    cached = completion.usage.prompt_tokens_details.cached_tokens or 0
    assert 0 < completion.usage.prompt_tokens - cached < 40


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_responses_calls_a_tool(client: openai.OpenAI, stream: bool) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    request: Any = {"model": MODEL, "tools": tools, "input": "Weather?"}
    if stream:
        with client.responses.stream(**request) as events:
            first = events.get_final_response()
    else:
        first = client.responses.create(**request)
    (call,) = (item for item in first.output if item.type == "function_call")
    assert (call.name, call.arguments) == ("weather", '{"city":"Zürich"}')
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "18"}]
    second = client.responses.create(
        model=MODEL, tools=tools, previous_response_id=first.id, input=result
    )
    assert second.output_text == "It is 18 °C."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages_calls_a_tool(anthropic_client: anthropic.Anthropic, stream: bool) -> None:
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    conversation: list[Any] = [{"role": "user", "content": "Weather?"}]
    request: Any = {"model": MODEL, "max_tokens": 200, "tools": tools, "messages": conversation}
    if stream:
        with anthropic_client.messages.stream(**request) as events:
            message = events.get_final_message()
    else:
        message = anthropic_client.messages.create(**request)
    (call,) = (block for block in message.content if block.type == "tool_use")
    assert (message.stop_reason, call.name, call.input) == (
        "tool_use",
        "weather",
        {"city": "Zürich"},
    )
    conversation += [
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "18"}],
        },
    ]
    final = anthropic_client.messages.create(**request)
    assert "".join(block.text for block in final.content if block.type == "text") == "It is 18 °C."


def test_schema_is_enforced(client: openai.OpenAI) -> None:
    """The scripted answer does not conform to the schema."""
    response_format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": SCHEMA},
    }
    request: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    completion = client.chat.completions.create(
        **request, response_format=response_format, max_tokens=60
    )
    assert (completion.choices[0].message.content or "").lstrip().startswith("{")


def test_model_is_listed_and_key_is_required(server: Server) -> None:
    (model_entry,) = get(server, "/v1/models").json()["data"]
    assert (model_entry["id"], model_entry["max_model_len"]) == (MODEL, 131_072)
    assert httpx.get(f"{server.base_url}/v1/models").status_code == 401
    assert httpx.get(f"{server.base_url}/harmony/status").status_code == 401


def test_client_disconnect_cancels_the_answer(server: Server, client: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Slowly"}]}
    with client.chat.completions.create(**request, stream=True) as stream:
        for _ in zip(range(3), stream, strict=False):
            pass
        (model,) = server.models()
        assert [request_status["state"] for request_status in model["requests"]] == ["generating"]
    server.wait_for_requests()


def test_status_metrics_and_inspector_show_state(server: Server, client: openai.OpenAI) -> None:
    check_chat_answer(client, stream=False)
    (model,) = server.models()
    assert model["model"] == MODEL
    assert model["memory"]["weights"] < model["memory"]["limit"]
    assert model["steps"]["completion_tokens"] > 0
    metrics = httpx.get(f"{server.base_url}/metrics").text
    for name in ("engine_healthy 1.0", "prefix_disk_bytes", "memory_limit_bytes"):
        assert f"\nvllm_mlx_harmony_{name}" in metrics
    assert get(server, "/harmony").status_code == 200
    sections = get(server, "/harmony/inspector/server").text
    assert MODEL in sections
    assert "Prefix cache" in sections
    assert httpx.get(f"{server.base_url}/health").json()["status"] == "ok"
    assert "context: 131,072 tokens; prefix cache: up to" in server.log


def test_prefix_cache_is_counted_and_cleared(server: Server, client: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    for _ in range(2):
        client.chat.completions.create(**request)
    counters = server.cache_stats()
    assert counters["hits"] > 0 and counters["nbytes"] > 0 and counters["disk"]
    headers = {"Authorization": f"Bearer {KEY}"}
    result = httpx.delete(f"{server.base_url}/v1/cache", headers=headers, timeout=30).json()
    assert result == {"status": "cleared", "engine_cache": {"harmony_prefix_reuse": True}}
    assert server.cache_stats()["nbytes"] == 0


def test_missing_endpoint_names_vllm_mlx(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="vllm-mlx"):
        client.embeddings.create(model=MODEL, input="Hello")


def test_prompts_on_disk_survive_a_restart(start: Start, model: Path, tmp_path: Path) -> None:
    system = {"role": "developer", "content": "Be brief. " * 100}
    request: Any = {"model": MODEL, "messages": [system, {"role": "user", "content": "Hello"}]}
    cached = []
    for _ in range(2):
        server = start(f"mlx:{model}", "--ssd-cache-dir", str(tmp_path))
        with server.openai() as client:
            usage = client.chat.completions.create(**request).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
        assert server.stop() in (0, -signal.SIGTERM)
    assert cached[0] == 0
    assert cached[1] > 200


def test_other_packages_are_not_imported(server: Server) -> None:
    names = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in server.log.splitlines()
        if line.startswith("import time:")
    }
    assert "mlx_lm" in names
    # mlx-lm imports transformers, which imports torch where it is installed
    assert not names & {name for name in ABSENT if name != "torch" or find_spec("torch") is None}


def test_dead_engine_thread_fails_health_checks(model: Path) -> None:
    """Also reloads settings, with a new key."""
    flags = {"engines": [f"mlx:{model}"]}
    app: Any = gateway(load(flags, {}))
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        app.host.reload(load({**flags, "keys": [KEY]}, {}))
        assert client.get("/v1/models").status_code == 401
        app.host.model.close()
        assert client.get("/health").json()["status"] == "unhealthy"
        assert client.get("/ready").status_code == 503
        (engine,) = client.get("/ready").json()["engines"]
        assert engine["problem"] == "the engine's thread has died: restart the server"
        request = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
        headers = {"Authorization": f"Bearer {KEY}"}
        response = client.post("/v1/chat/completions", json=request, headers=headers)
        assert response.status_code == 503


def test_incompatible_mlx_lm_is_rejected(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Name("mlx_lm.models.cache:KVCache.missing", "a name of another version")
    monkeypatch.setattr(mlx_lm_names, "NAMES", (missing,))
    with pytest.raises(HostError, match=r"KVCache\.missing is missing"):
        gateway(load({"engines": [f"mlx:{model}"]}, {}))


# --- serve, where vllm-mlx is not installed


def test_serve_accepts_flags_of_vllm_mlx(start: Start, model: Path, tmp_path: Path) -> None:
    flags = ["--tool-call-parser", "harmony", "--continuous-batching", "--max-tokens", "5"]
    flags += ["--max-num-seqs", "2", "--prefill-step-size", "64", "--stream-interval", "1"]
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[{"role": "system", "content": "Be brief."}], [{}]]))
    flags += ["--warm-prompts", str(prompts)]
    names = ["--served-model-name", "gpt-oss-20b", "--api-key", KEY]
    server = start(model, *names, command=(*EXPLICIT, *flags))
    with server.openai() as client:
        messages: Any = [{"role": "user", "content": "Hello"}]
        completion = client.chat.completions.create(model="gpt-oss-20b", messages=messages)
        assert completion.choices[0].finish_reason == "length"
        system: Any = {"role": "system", "content": "Be brief."}
        warm_completion = client.chat.completions.create(
            model="gpt-oss-20b", messages=[system, *messages]
        )
        assert (
            warm_completion.usage is not None
            and warm_completion.usage.prompt_tokens_details is not None
        )
        assert warm_completion.usage.prompt_tokens_details.cached_tokens
    assert get(server, "/v1/models").json()["data"][0]["id"] == "gpt-oss-20b"
    assert "tokens of 1 in" in server.log


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["MODEL", "--models-config", "x.yaml"], "--models-config is not a flag of the gateway"),
        (["/no/such/model"], "cannot be loaded"),
        (["MODEL", "--ssd-cache-max-gb", "0"], "should be greater than 0"),
    ],
)
def test_unusable_model_or_flag_is_an_error(
    model: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(model) if word == "MODEL" else word for word in arguments]
    assert main(["serve", *words, "--port", "1"]) == 2
    assert problem in capsys.readouterr().err


def test_model_with_other_tokenizer_is_rejected(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other_model = tmp_path / "other"
    shutil.copytree(model, other_model)
    tokenizer = (other_model / "tokenizer.json").read_text()
    changed = re.sub('"ancode": ?194000', '"ancode":194009', tokenizer)
    assert changed != tokenizer
    (other_model / "tokenizer.json").write_text(changed)
    assert main(["serve", str(other_model)]) == 2
    assert "its tokenizer is not o200k_harmony" in capsys.readouterr().err


@pytest.mark.nightly
def test_demo_runs_on_light_server() -> None:
    command = [sys.executable, "-m", "vllm_mlx_harmony", "demo"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "arrived in their own field" in process.stdout


def test_parser_of_another_model_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "MODEL", "--tool-call-parser", "qwen"])
    assert "choose from" in capsys.readouterr().err


def test_doctor_requires_no_plugin() -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "vllm_mlx_harmony", "doctor", "--verbose", "--port", port]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.stderr == ""
    problems = [line.split()[1] for line in process.stdout.splitlines() if "✗" in line]
    assert set(problems) <= {"disk", "memory"}, process.stdout  # these depend on the machine
    assert "vllm-mlx " not in process.stdout and "startup file" not in process.stdout
    assert not list(Path(sysconfig.get_path("purelib")).glob("vllm_mlx_harmony_startup*"))
