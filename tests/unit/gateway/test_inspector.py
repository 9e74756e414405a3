"""The inspector of a gateway: each key sees its own requests, and the engines."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

import httpx
from app_server import run_server
from fake_engines import FakeEngine
from harmony_text import ids_of

from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.settings import load

SCRIPT = "<|channel|>final<|message|>Good day.<|return|>"
KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}
MODEL = "gpt-oss-20b"


def _get(base: str, name: str, path: str) -> Any:
    headers = {"Authorization": f"Bearer {KEYS[name]}"}
    return httpx.get(f"{base}/harmony/inspector/{path}", headers=headers, timeout=180).json()


@pytest.mark.parametrize("inspect", [True, False])
def test_key_sees_only_its_own_requests(inspect: bool) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(run_server(FakeEngine("sglang", {"Hello": SCRIPT}).app))
        settings = load({"engines": [url], "model": MODEL, "keys": KEYS, "inspect": inspect}, {})
        base = stack.enter_context(run_server(gateway(settings)))
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
        headers = {"Authorization": f"Bearer {KEYS['alice']}"}
        response = httpx.post(
            f"{base}/v1/chat/completions", json=body, headers=headers, timeout=180
        )
        assert response.status_code == 200
        page = httpx.get(f"{base}/harmony", timeout=180)
        assert page.status_code == (200 if inspect else 404)
        if not inspect:
            return
        (row,) = _get(base, "alice", "requests")["requests"]
        assert (row["state"], row["generated"]) == (
            "success",
            response.json()["usage"]["completion_tokens"],
        )
        assert "".join(_get(base, "alice", f"requests/{row['id']}/output")["texts"]) == SCRIPT
        assert _get(base, "bob", "requests")["requests"] == []
        title, rows = _get(base, "bob", "server")["sections"][1]
        assert title == url and ["health", "up", ""] in rows


class Thinking(FakeEngine):
    """Thinks until its prompt ends with a second ``<|start|>assistant``."""

    def output_ids(self, prompt: Any) -> tuple[int, ...]:
        opened = ids_of("<|end|><|start|>assistant")
        ended = len(self.prompts) > 1 and tuple(prompt[-len(opened) :]) == opened
        return ids_of(SCRIPT if ended else "<|channel|>analysis<|message|>" + "And so on. " * 9)


@pytest.mark.parametrize("kind", ["sglang", "vllm-mlx"])
@pytest.mark.parametrize("inspect", [True, False])
def test_ids_forced_by_a_budget_are_marked(kind: str, inspect: bool) -> None:
    with ExitStack() as stack:
        engine = Thinking(kind, {})
        url = stack.enter_context(run_server(engine.app))
        flags = {"engines": [url], "model": MODEL, "keys": KEYS, "inspect": inspect}
        base = stack.enter_context(run_server(gateway(load(flags, {}))))
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
        headers = {"Authorization": f"Bearer {KEYS['alice']}"}
        body |= {"thinking_token_budget": 10}
        response = httpx.post(f"{base}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert response.json()["choices"][0]["message"]["content"] == "Good day."
        if kind == "vllm-mlx":
            requested = {sent["settings"].get("origins") for sent in engine.bodies}
            expected = {True} if inspect else {None}  # older servers reject unknown fields
            assert requested == expected
        if inspect:
            (row,) = _get(base, "alice", "requests")["requests"]
            output = _get(base, "alice", f"requests/{row['id']}/output")
            forced = [at for at, letter in enumerate(output["origins"]) if letter == "f"]
            assert set(output["origins"]) == {"f", "?"} and len(output["origins"]) == len(
                output["ids"]
            )
            ended = "".join(output["texts"][at] for at in forced)
            assert ended == "<|end|><|start|>assistant" and forced[-1] - forced[0] == 2


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ({}, {}, False),
        ({"inspect": True}, {}, True),
        ({}, {"VLLM_MLX_HARMONY_GATEWAY_INSPECT": "1"}, True),
        ({}, {"VLLM_MLX_HARMONY_GATEWAY_INSPECT": "0"}, False),
    ],
)
def test_inspect_is_read_from_flag_or_environment(
    flags: dict[str, Any], environment: dict[str, str], expected: bool
) -> None:
    settings = {"engines": ["http://127.0.0.1:9"], "model": MODEL, **flags}
    assert load(settings, environment).inspect is expected
