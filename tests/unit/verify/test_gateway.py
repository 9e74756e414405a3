"""Every check passes through a gateway in front of a server of this project."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from app_server import run_server
from faulty_server import TIMES, BookEngine, outcomes, run_faulty_server
from scripted_host import KEY, MODEL

from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.settings import GatewaySettings, Key
from vllm_mlx_harmony.server.ids import ID_ENDPOINT_VARIABLE
from vllm_mlx_harmony.verify import wire
from vllm_mlx_harmony.verify.suite import CHECKS


@pytest.mark.nightly
def test_all_checks_pass_through_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ID_ENDPOINT_VARIABLE, "1")
    monkeypatch.setenv("VLLM_MLX_HARMONY_PING_SECONDS", "1")
    for name, seconds in TIMES.items():
        monkeypatch.setattr(wire, name, seconds)
    with run_faulty_server(engine=BookEngine(slow=True)) as url:
        keys = (Key("test", digest(KEY)),)
        settings = GatewaySettings(engines=(Spec(url, key=KEY),), keys=keys, model=MODEL)
        with run_server(gateway(settings)) as base:
            results = outcomes(base)
    assert {
        name: outcome.problem for name, outcome in results.items() if outcome.state != "passed"
    } == {}
    assert len(results) == len(CHECKS) == 266
