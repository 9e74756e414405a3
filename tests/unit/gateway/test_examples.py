"""Programs of examples/ against a gateway over a fake engine."""

from __future__ import annotations

import runpy
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("openai")

from app_server import run_server
from fake_engines import FakeEngine

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.settings import GatewaySettings
from vllm_mlx_harmony.server import enforcement

EXAMPLES = Path(__file__).parents[3] / "examples"

VERDICT = '{"violation":true,"rules":["SP1"],"rationale":"It sells followers."}'
CLASSIFIED = (
    "<|channel|>analysis<|message|>SP1 applies.<|end|><|start|>assistant"
    f"<|channel|>final <|constrain|>json<|message|>{VERDICT}<|return|>"
)


def test_safeguard_example_applies_its_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, "auto")
    engine = FakeEngine("vllm", {"Buy followers now!": CLASSIFIED}, name="gpt-oss-safeguard")
    with ExitStack() as stack:
        url = stack.enter_context(run_server(engine.app))
        settings = GatewaySettings(engines=(Spec(url),), model="gpt-oss-safeguard")
        base = stack.enter_context(run_server(gateway(settings)))
        monkeypatch.setenv("OPENAI_BASE_URL", f"{base}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        monkeypatch.setattr(sys, "argv", ["safeguard.py", "Buy followers now!"])
        policy = runpy.run_path(str(EXAMPLES / "safeguard.py"), run_name="__main__")["POLICY"]
    printed = capsys.readouterr().out
    assert "reasoning: SP1 applies." in printed
    assert '"rules": ["SP1"]' in printed
    prompt = vocab.encoding().decode(list(engine.prompts[-1]))
    assert f"<|start|>developer<|message|># Instructions\n\n{policy}\n\n# Response" in prompt
    assert prompt.endswith("<|start|>user<|message|>Buy followers now!<|end|><|start|>assistant")
