"""A gateway over another server of this project, whose id endpoint it detects and uses."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

import httpx
from app_server import run_server
from harmony_text import text_of
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from waiting import wait_until

from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import TRIAL, Spec
from vllm_mlx_harmony.gateway.settings import GatewaySettings
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.ids import ID_ENDPOINT_VARIABLE

TEXT = "Good day: été, ☀ and 你好."
SCRIPT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
USER = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]}


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_answer_passes_through_two_servers(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setenv(ID_ENDPOINT_VARIABLE, "1")
    engine = ScriptedEngine({"": f"{SCRIPT}{TEXT}<|return|>"}, at_once)  # for the trial, too
    host = SingleEngineHost(engine)
    with run_server(application(host)) as url:
        settings = GatewaySettings(engines=(Spec(url, key=KEY),), model=MODEL)
        with run_server(gateway(settings)) as base:
            ready = httpx.get(f"{base}/ready", timeout=180).json()
            assert ready["status"] == "ready", ready
            for stream in (False, True):
                body = {**USER, "stream": stream}
                answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=180)
                assert answer.status_code == 200
                if not stream:
                    message = answer.json()["choices"][0]["message"]
                    assert (message["content"], message["reasoning"]) == (TEXT, "Hm.")
                assert "你好" in answer.text or "\\u4f60" in answer.text
            wait_until(lambda: host.leases == 0, "the engine's lease")
    assert engine.prompts.pop(0) == TRIAL
    assert len(engine.prompts) == 2
    assert engine.prompts[0] == engine.prompts[1]
    assert "Hello!" in text_of(engine.prompts[0])
