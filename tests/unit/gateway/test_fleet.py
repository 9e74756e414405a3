"""Engines that come and go while a gateway serves: updates of the list, and SIGHUP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from sse import documents

pytest.importorskip("prometheus_client")

from app_server import run_server
from fake_engines import FakeEngine
from gateway_in_process import MODEL, engine_at
from loops import run
from waiting import wait_until

from vllm_mlx_harmony.cli.process import free_port
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings
from vllm_mlx_harmony.gateway import probes
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.engines.http import EngineUnavailable, HttpEngine
from vllm_mlx_harmony.gateway.fleet import Fleet, FleetEngine
from vllm_mlx_harmony.gateway.metrics import Metrics
from vllm_mlx_harmony.server.host import Deadline

LONG = "word " * 100
SCRIPTS = {"Hello": f"<|channel|>final<|message|>{LONG}<|return|>"}
A, B, C = (Spec(f"http://{name}:1") for name in "abc")


def names(fleet: Fleet) -> dict[str, str]:
    return {backend.name: backend.health for backend in fleet.backends}


def test_update_adds_drains_and_removes_engines() -> None:
    fleet = Fleet("m", [A, B])
    assert names(fleet) == {A.url: "down", B.url: "down"}  # not detected yet
    for backend in fleet.backends:
        backend.probed("")
    fleet.update([B, C])
    assert names(fleet) == {B.url: "up", C.url: "down"}
    busy = fleet.backends[0]
    busy.in_flight = 1
    fleet.update([C])
    assert names(fleet) == {B.url: "draining", C.url: "down"}
    fleet.update([B, C])
    assert names(fleet) == {B.url: "up", C.url: "down"}
    fleet.update([C])
    busy.in_flight = 0
    fleet.drained()
    assert names(fleet) == {C.url: "down"} and fleet.routing.engines == fleet.backends
    other = Spec(C.url, key="another key")
    fleet.backends[0].probed("")
    fleet.update([other])
    assert [engine.spec for engine in fleet.backends] == [other]
    assert names(fleet) == {C.url: "down"}  # it must be detected again


def test_engine_with_changed_key_stays() -> None:
    """Requests under the old key end by themselves, and leave the engine with the new key alone."""
    fleet = Fleet("m", [A, B])
    first = fleet.backends[0]
    first.probed("")
    first.in_flight = 1
    other = Spec(A.url, key="another key")
    for specs in ([B], [other, B], [B], [other, B], [A, B], [other, B]):
        fleet.update(specs)
    assert [(backend.spec, backend.health) for backend in fleet.backends] == [
        (A, "draining"),
        (B, "down"),
        (other, "down"),
    ]
    text = Metrics(fleet).text().decode()
    assert text.count(f'engine_up{{engine="{A.url}"}} 0.0') == 1
    first.in_flight = 0
    fleet.drained()
    assert [(backend.spec, backend.health) for backend in fleet.backends] == [
        (B, "down"),
        (other, "down"),
    ]
    fleet.update([other])
    assert [backend.spec for backend in fleet.backends] == [other]


def test_probe_does_not_count_for_a_later_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGHUP comes during the probe: the engine with the new key is detected all the same."""
    http: Any = None

    async def reload_during_probe() -> None:
        answered = asyncio.Event()

        async def slow(_: Any, spec: Spec, __: str) -> HttpEngine:
            await answered.wait()
            return engine_at(spec.url, "vllm")

        async def answer(*_: Any) -> None:
            """The server is the same."""

        monkeypatch.setattr(probes, "detect", slow)
        monkeypatch.setattr(probes, "get", answer)
        fleet = Fleet("m", [A])
        (old,) = fleet.backends
        probing = asyncio.ensure_future(probes.probe(http, old, "m"))
        await asyncio.sleep(0)
        fleet.update([Spec(A.url, key="another key")])
        answered.set()
        await probing
        (new,) = fleet.backends
        assert (new.up, new.health) == (False, "down")
        await probes.probe(http, old, "m")  # which was due before
        await probes.probe(http, new, "m")
        assert new.up

    run(reload_during_probe())
    assert "could not be probed" not in caplog.text


@pytest.mark.parametrize(
    ("busy", "down", "expected", "problem"),
    [
        ((30, 40), (), 30, "every engine is busy"),
        ((30,), (0.2,), 1, "every engine is busy"),
        ((2,), (20.0,), 2, "every engine is busy"),
        ((), (20.0, 25.0), 20, "no engine is available"),
        ((), (), 1, "no engine is available"),
    ],
)
def test_retry_after_is_when_the_first_engine_may_be_there(
    busy: tuple[int, ...], down: tuple[float, ...], expected: int, problem: str
) -> None:
    """``busy``: seconds for which engines are; ``down``: seconds until the others are probed."""
    specs = [Spec(f"http://{number}") for number in range(len(busy) + len(down))]
    fleet = Fleet("m", specs)
    for backend, seconds in zip(fleet.backends, busy):  # noqa: B905 - the others are down
        backend.found(engine_at(backend.name, "vllm"))
        backend.busy(seconds)
    now = time.monotonic()
    for backend, delay in zip(fleet.backends[len(busy) :], down, strict=True):
        fleet.routing._engines[backend].probe_at = now + delay

    async def generate() -> None:
        settings = GenerationSettings(max_tokens=1, temperature=1.0, top_p=1.0)
        engine = FleetEngine(fleet, Deadline(600.0, now + 600.0))
        await anext(engine.generate(GenerationRequest((1,), settings, "")))

    with pytest.raises(EngineUnavailable, match=problem) as caught:
        asyncio.run(generate())
    assert caught.value.retry_after == expected


def test_sighup_reads_the_engines_of_the_file(tmp_path: Path) -> None:
    """Requests on a removed engine are answered to their end; an invalid file changes nothing."""
    file = tmp_path / "gateway.toml"
    with ExitStack() as stack:
        port = free_port()
        first, second = FakeEngine("sglang", SCRIPTS, held=True), FakeEngine("sglang", SCRIPTS)
        urls = [stack.enter_context(run_server(engine.app)) for engine in (first, second)]

        def write_engines(*urls: str) -> None:
            tables = "".join(f'[[engines]]\nurl = "{url}"\nkind = "sglang"\n' for url in urls)
            file.write_text(f'model = "{MODEL}"\nport = {port}\n{tables}')

        write_engines(urls[0])
        process = start_gateway(stack, file)
        gateway = f"http://127.0.0.1:{port}"
        health = partial(engine_health, process, port)

        def ask(stream: bool = False) -> httpx.Response:
            messages = [{"role": "user", "content": "Hello"}]
            body: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": stream}
            return httpx.post(f"{gateway}/v1/chat/completions", json=body, timeout=180)

        wait_until(lambda: health() == {urls[0]: "up"}, "the gateway to be ready", 180)
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(ask(stream=True)))
        asking.start()
        wait_until(lambda: first.running == 1, "a request to run")
        write_engines(urls[1])
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: health().get(urls[1]) == "up", "the other engine")
        assert health()[urls[0]] == "draining"
        assert ask().json()["choices"][0]["message"]["content"] == LONG
        assert len(second.prompts) == 1
        first.held = False
        asking.join()
        choices = [choice for event in documents(answers[0].text) for choice in event["choices"]]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == LONG
        wait_until(lambda: health() == {urls[1]: "up"}, "the first engine to be taken away")
        file.write_text("engines = 1")
        process.send_signal(signal.SIGHUP)
        assert ask().status_code == 200 and health() == {urls[1]: "up"}


@pytest.mark.nightly
def test_sighup_is_handled_before_an_engine_answers(tmp_path: Path) -> None:
    """A gateway that is starting waits for an engine that accepts connections and sends nothing."""
    file = tmp_path / "gateway.toml"
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        silent.settimeout(180)
        url = stack.enter_context(run_server(FakeEngine("sglang", SCRIPTS).app))
        port = free_port()

        def write_engine(url: str) -> None:
            table = f'[[engines]]\nurl = "{url}"\nkind = "sglang"\n'
            file.write_text(f'model = "{MODEL}"\nport = {port}\n{table}')

        write_engine(f"http://127.0.0.1:{silent.getsockname()[1]}")
        process = start_gateway(stack, file)
        silent.accept()
        write_engine(url)
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: engine_health(process, port) == {url: "up"}, "the other engine", 180)


def start_gateway(stack: ExitStack, file: Path) -> subprocess.Popen[bytes]:
    """A gateway with the settings of a file."""
    command = [sys.executable, "-m", "vllm_mlx_harmony", "gateway", "--config", str(file)]
    process = subprocess.Popen(command, env={**os.environ, "VLLM_MLX_HARMONY_GRAMMAR": "off"})
    stack.callback(process.wait, 180)
    stack.callback(process.kill)
    return process


def engine_health(process: subprocess.Popen[bytes], port: int) -> dict[str, str]:
    """The engines and their health; none before the gateway listens."""
    try:
        listed = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=180).json()["engines"]
    except httpx.HTTPError:
        assert process.poll() is None
        return {}
    return {engine["url"]: engine["health"] for engine in listed}
