"""A gateway over a real vllm-mlx with this plugin, by way of the endpoint for ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from app_server import run_server
from server_process import FLAG, HARMONY, KEY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.settings import GatewaySettings
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

CALL = (
    "<|channel|>analysis<|message|>Ask the tool.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city":"Zürich"}<|call|>'
)
SCRIPTS = [
    Script("<|message|>How warm is it?<|end|>", CALL),
    Script(
        "<|start|>functions.weather to=assistant", "<|channel|>final<|message|>18 °C.<|return|>"
    ),
    Script("<|message|>On and on<|end|>", f"<|channel|>final<|message|>{'on ' * 500}<|return|>"),
]
WEATHER = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def base(start: Start, standin_dir: Path) -> Iterator[str]:
    """The URL of a gateway over a server with grammars and an API key."""
    standin.rescript(standin_dir, SCRIPTS)
    env = {"VLLM_MLX_HARMONY_GRAMMAR": "auto", "VLLM_MLX_HARMONY_ID_ENDPOINT": "1"}
    engine_server = start(*FLAG, "--api-key", KEY, command=HARMONY, env=env)
    models = httpx.get(
        f"{engine_server.base_url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}
    )
    spec = Spec(engine_server.base_url, key=KEY, model=models.json()["data"][0]["id"])
    with run_server(gateway(GatewaySettings(engines=(spec,), model="gpt-oss-20b"))) as url:
        ready = httpx.get(f"{url}/ready").json()
        assert ready["status"] == "ready", ready
        yield url


@pytest.mark.nightly
def test_strict_call_is_generated_and_answered(base: str) -> None:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
        instructions = "Answer as scripted. " * 60
        fields: Any = {
            "model": "gpt-oss-20b",
            "tools": [WEATHER],
            "temperature": 0,
            "instructions": instructions,
        }
        events = client.responses.create(
            **fields, input="How warm is it?", tool_choice="required", stream=True
        )
        response = [event for event in events if event.type == "response.completed"][-1].response
        call = response.output[-1]
        assert (call.type, call.name, call.arguments) == (
            "function_call",
            "weather",
            '{"city":"Zürich"}',
        )
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "18"}
        second = client.responses.create(**fields, input=[output], previous_response_id=response.id)
        assert second.output_text == "18 °C."
        # The second prompt begins with the generated ids, which the engine's server has cached.
        before = response.usage.input_tokens + response.usage.output_tokens
        cached = second.usage.input_tokens_details.cached_tokens
        assert before - 64 <= cached <= before, (before, second.usage)


@pytest.mark.nightly
def test_client_disconnect_frees_the_engine(base: str) -> None:
    body = {
        "model": "gpt-oss-20b",
        "stream": True,
        "messages": [{"role": "user", "content": "On and on"}],
    }
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    short_request = {**body, "stream": False, "max_tokens": 4}
    completion = httpx.post(f"{base}/v1/chat/completions", json=short_request, timeout=60).json()
    assert completion["choices"][0]["finish_reason"] == "length"
