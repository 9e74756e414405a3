"""Engines that come and go while a gateway serves: SIGHUP, and what it makes of a list."""

from __future__ import annotations

import asyncio
import json
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

pytest.importorskip("prometheus_client")

from fake_engines import FakeEngine, served, until
from gateway_in_process import MODEL, engine_at

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
    return {each.name: each.health for each in fleet.backends}


def test_a_list_of_engines() -> None:
    fleet = Fleet("m", [A, B])
    assert names(fleet) == {A.url: "down", B.url: "down"}  # not found yet
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
    assert [each.spec for each in fleet.backends] == [other]
    assert names(fleet) == {C.url: "down"}  # it is found anew


def test_engine_with_changed_key_stays() -> None:
    """What the one with the old key runs ends by itself, and takes nothing of the new one along."""
    fleet = Fleet("m", [A, B])
    first = fleet.backends[0]
    first.probed("")
    first.in_flight = 1
    other = Spec(A.url, key="another key")
    for specs in ([B], [other, B], [B], [other, B], [A, B], [other, B]):
        fleet.update(specs)
    assert [(each.spec, each.health) for each in fleet.backends] == [
        (A, "draining"),
        (B, "down"),
        (other, "down"),
    ]
    text = Metrics(fleet).text().decode()
    assert text.count(f'engine_up{{engine="{A.url}"}} 0.0') == 1
    first.in_flight = 0
    fleet.drained()
    assert [(each.spec, each.health) for each in fleet.backends] == [(B, "down"), (other, "down")]
    fleet.update([other])
    assert [each.spec for each in fleet.backends] == [other]


def test_probe_does_not_count_for_a_later_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGHUP while it is on its way: the engine with the new key is found all the same."""
    http: Any = None

    async def reloaded() -> None:
        there = asyncio.Event()

        async def slow(_: Any, spec: Spec, __: str) -> HttpEngine:
            await there.wait()
            return engine_at(spec.url, "vllm")

        async def well(*_: Any) -> None:
            """The server is the same."""

        monkeypatch.setattr(probes, "detect", slow)
        monkeypatch.setattr(probes, "get", well)
        fleet = Fleet("m", [A])
        (old,) = fleet.backends
        probing = asyncio.ensure_future(probes.probe(http, old, "m"))
        await asyncio.sleep(0)
        fleet.update([Spec(A.url, key="another key")])
        there.set()
        await probing
        (new,) = fleet.backends
        assert (new.up, new.health) == (False, "down")
        await probes.probe(http, old, "m")  # which was due before
        await probes.probe(http, new, "m")
        assert new.up

    asyncio.run(asyncio.wait_for(reloaded(), 60))
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
    """``busy``: for how long engines are; ``down``: when those are probed."""
    specs = [Spec(f"http://{number}") for number in range(len(busy) + len(down))]
    fleet = Fleet("m", specs)
    for backend, seconds in zip(fleet.backends, busy):  # noqa: B905 - the others are down
        backend.found(engine_at(backend.name, "vllm"))
        backend.busy(seconds)
    now = time.monotonic()
    for backend, left in zip(fleet.backends[len(busy) :], down, strict=True):
        fleet.routing._engines[backend].probe_at = now + left

    async def asked() -> None:
        settings = GenerationSettings(max_tokens=1, temperature=1.0, top_p=1.0)
        engine = FleetEngine(fleet, Deadline(600.0, now + 600.0))
        await anext(engine.generate(GenerationRequest((1,), settings, "")))

    with pytest.raises(EngineUnavailable, match=problem) as caught:
        asyncio.run(asked())
    assert caught.value.retry_after == expected


def test_sighup_has_the_engines_of_the_file(tmp_path: Path) -> None:
    """What runs on an engine that goes is answered to its end; a file that is wrong changes
    nothing."""
    file = tmp_path / "gateway.toml"
    with ExitStack() as stack:
        port = free_port()
        first, second = FakeEngine("sglang", SCRIPTS, held=True), FakeEngine("sglang", SCRIPTS)
        urls = [stack.enter_context(served(each.app)) for each in (first, second)]

        def engines(*urls: str) -> None:
            tables = "".join(f'[[engines]]\nurl = "{url}"\nkind = "sglang"\n' for url in urls)
            file.write_text(f'model = "{MODEL}"\nport = {port}\n{tables}')

        engines(urls[0])
        process = started(stack, file)
        gateway = f"http://127.0.0.1:{port}"
        health = partial(known, process, port)

        def ask(stream: bool = False) -> httpx.Response:
            messages = [{"role": "user", "content": "Hello"}]
            body: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": stream}
            return httpx.post(f"{gateway}/v1/chat/completions", json=body, timeout=180)

        until(lambda: health() == {urls[0]: "up"}, "the gateway to be ready", 180)
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(ask(stream=True)))
        asking.start()
        until(lambda: first.running == 1, "a request to run")
        engines(urls[1])
        process.send_signal(signal.SIGHUP)
        until(lambda: health().get(urls[1]) == "up", "the other engine")
        assert health()[urls[0]] == "draining"
        assert ask().json()["choices"][0]["message"]["content"] == LONG
        assert len(second.prompts) == 1
        first.held = False
        asking.join()
        lines = [line for line in answers[0].text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        choices = [choice for event in events for choice in event["choices"]]
        assert "".join(each["delta"].get("content") or "" for each in choices) == LONG
        until(lambda: health() == {urls[1]: "up"}, "the first engine to be taken away")
        file.write_text("engines = 1")
        process.send_signal(signal.SIGHUP)
        assert ask().status_code == 200 and health() == {urls[1]: "up"}


def test_sighup_before_an_engine_has_answered(tmp_path: Path) -> None:
    """While a gateway starts, and waits for an engine that takes connections and says nothing."""
    file = tmp_path / "gateway.toml"
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        silent.settimeout(180)
        url = stack.enter_context(served(FakeEngine("sglang", SCRIPTS).app))
        port = free_port()

        def engine(url: str) -> None:
            table = f'[[engines]]\nurl = "{url}"\nkind = "sglang"\n'
            file.write_text(f'model = "{MODEL}"\nport = {port}\n{table}')

        engine(f"http://127.0.0.1:{silent.getsockname()[1]}")
        process = started(stack, file)
        silent.accept()
        engine(url)
        process.send_signal(signal.SIGHUP)
        until(lambda: known(process, port) == {url: "up"}, "the other engine", 180)


def started(stack: ExitStack, file: Path) -> subprocess.Popen[bytes]:
    """A gateway with the settings of a file."""
    command = [sys.executable, "-m", "vllm_mlx_harmony", "gateway", "--config", str(file)]
    process = subprocess.Popen(command, env={**os.environ, "VLLM_MLX_HARMONY_GRAMMAR": "off"})
    stack.callback(process.wait, 180)
    stack.callback(process.kill)
    return process


def known(process: subprocess.Popen[bytes], port: int) -> dict[str, str]:
    """Its engines and their health; nothing before it listens."""
    try:
        listed = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=180).json()["engines"]
    except httpx.HTTPError:
        assert process.poll() is None
        return {}
    return {each["url"]: each["health"] for each in listed}
