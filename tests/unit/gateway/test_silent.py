"""Engines that accept requests and generate nothing, although everything else looks healthy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

pytest.importorskip("prometheus_client")

from app_server import run_server
from fake_engines import EXCHANGES, EngineFault, FakeEngine, compact
from gateway_in_process import MODEL, CountingGateway
from waiting import wait_until, wait_until_async

from vllm_mlx_harmony.gateway import fleet
from vllm_mlx_harmony.gateway.app import _GatewayApp
from vllm_mlx_harmony.gateway.routing_policy import Rule
from vllm_mlx_harmony.server.app import application

CHAT = "/v1/chat/completions"
SCRIPTS = {"Question": "<|channel|>final<|message|>Good day to you.<|return|>"}
QUICK = Rule(min_silence=2.0, open_seconds=0.2, max_open_seconds=1.0)
CONVERSATIONS = 14


class Deployment:
    """A gateway with its probes on a socket, and the engines behind it."""

    def __init__(self, stack: ExitStack, *engines: FakeEngine, **options: Any) -> None:
        self.engines = engines
        urls = [stack.enter_context(run_server(engine.app)) for engine in engines]
        self.host = CountingGateway(
            "", *zip(engines, urls, strict=True), **{"rule": QUICK, **options}
        )
        self.url = stack.enter_context(run_server(_GatewayApp(self.host, application(self.host))))
        self.healthy = urls[-1]

    def limit(self, seconds: float) -> None:
        """Sets the time limit of requests."""
        settings = self.host.settings
        self.host.settings = replace(settings, timeout=seconds)
        self.host.fleet.limit = seconds

    @property
    def retried(self) -> float | None:
        return self.host.metrics.registry.get_sample_value("vllm_mlx_harmony_retried_total")

    def ask(
        self, numbers: Sequence[int], *, stream: bool = False, at_once: bool = True
    ) -> list[int]:
        """The statuses of one question in each of the conversations."""

        async def post_question(client: httpx.AsyncClient, number: int) -> int:
            message = {"role": "user", "content": f"Question {number}"}
            body = {"model": MODEL, "messages": [message], "stream": stream}
            answer = await client.post(self.url + CHAT, json=body)
            if stream and '"error"' in answer.text:
                return 504
            return answer.status_code

        async def post_all() -> list[int]:
            async with httpx.AsyncClient(timeout=180) as client:
                if at_once:
                    return await asyncio.gather(
                        *(post_question(client, number) for number in numbers)
                    )
                return [await post_question(client, number) for number in numbers]

        return asyncio.run(post_all())

    def home(self, count: int) -> list[int]:
        """``count`` conversations that go to the first engine."""
        numbers: list[int] = []
        for number in range(200):
            before = len(self.engines[0].prompts)
            assert self.ask([number]) == [200]
            if len(self.engines[0].prompts) > before:
                numbers.append(number)
            if len(numbers) == count:
                return numbers
        raise AssertionError


@pytest.mark.nightly(sample=8)
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("silent", ["status", "stream"])
def test_every_conversation_is_answered_beside_a_silent_engine(
    silent: str, stream: bool, at_once: bool
) -> None:
    with ExitStack() as stack:
        hung, well = FakeEngine("vllm", SCRIPTS, silent=silent), FakeEngine("vllm", SCRIPTS)
        deployment = Deployment(stack, hung, well, timeout=180.0)
        statuses = deployment.ask(range(CONVERSATIONS), stream=stream, at_once=at_once)
        assert statuses == [200] * CONVERSATIONS
        assert hung.prompts, "no conversation has its home on the silent engine"
        assert not deployment.host.fleet.backends[0].up
        before = len(hung.prompts)
        assert deployment.ask(range(CONVERSATIONS)) == [200] * CONVERSATIONS
        assert len(hung.prompts) == before
        hung.silent = ""
        wait_until(lambda: deployment.host.fleet.backends[0].up, "a probe to find it well")


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_timeout_without_output_moves_the_conversation(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule alone would give the engine more time than the gateway gives the request."""
    monkeypatch.setattr(fleet, "MAX_SILENT_FRACTION", 2)  # twice the time limit
    rule = Rule(min_silence=60.0, open_seconds=0.2, max_open_seconds=1.0, failure_threshold=2)
    with ExitStack() as stack:
        engines = FakeEngine("vllm", SCRIPTS), FakeEngine("vllm", SCRIPTS)
        deployment = Deployment(stack, *engines, rule=rule, timeout=180.0)
        (number,) = deployment.home(1)
        engines[0].silent = "stream"
        deployment.limit(5.0)
        assert deployment.ask([number], stream=stream) == [504]
        deployment.limit(180.0)
        assert deployment.ask([number], stream=stream) == [200]
        assert len(engines[1].prompts) >= 1


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_time_limit_of_a_client_takes_no_engine_down(stream: bool) -> None:
    """It may be too short for any engine. The next engine is tried, and the first is probed and
    generates. The requests of other tenants go on."""
    # So that only the time limit counts.
    rule = Rule(silence_factor=0.1, max_seconds_per_token=0.0, failure_threshold=2)
    with ExitStack() as stack:
        slow, other = FakeEngine("vllm", SCRIPTS), FakeEngine("vllm", SCRIPTS)
        deployment = Deployment(stack, slow, other, rule=rule)
        numbers = deployment.home(4)
        backend = deployment.host.fleet.backends[0]
        for number, timeout in zip(numbers, (6.0, 3.0, 3.0, 3.0), strict=True):
            slow.faults[:] = [EngineFault(then="hang", after=0)]
            messages = [{"role": "user", "content": f"Question {number}"}]
            body = {"model": MODEL, "messages": messages, "timeout": timeout, "stream": stream}
            httpx.post(deployment.url + CHAT, json=body, timeout=180)
            assert backend.health == "up"
        assert deployment.retried
        assert deployment.ask(numbers[1:]) == [200] * 3


@pytest.mark.nightly
def test_slow_prompt_is_no_failure() -> None:
    """An engine that sends ids to others is not silent, however long one request waits."""
    with ExitStack() as stack:
        slow = FakeEngine("vllm", SCRIPTS)
        deployment = Deployment(stack, slow, FakeEngine("vllm", SCRIPTS), timeout=180.0)
        first, second = deployment.home(2)
        slow.pause = 0.1
        slow.scripts["Question"] = "<|channel|>final<|message|>" + "word " * 60 + "<|return|>"
        slow.faults[:] = [EngineFault(), EngineFault(then="wait", after=0)]
        slow.wait_seconds = 4.0  # twice the patience, in which the other answer goes on
        before = len(slow.prompts)
        assert deployment.ask([first, second]) == [200, 200]
        assert len(slow.prompts) == before + 2
        assert deployment.retried == 0 and deployment.host.fleet.backends[0].up


@pytest.mark.nightly
@pytest.mark.parametrize("advances", [True, False])
def test_progress_that_advances_ends_a_silence(
    advances: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that takes several times longer than expected, on an engine that reports it."""
    exchange = EXCHANGES["llamacpp"]

    def events(prompt: Sequence[int], output: Sequence[int], finish: str) -> Iterator[str]:
        for number in range(1, 13):
            processed = number if advances else 1
            report = {"total": 100, "cache": 0, "processed": processed, "time_ms": number}
            event = {"content": "", "tokens": [], "stop": False, "prompt_progress": report}
            yield compact({**event, "tokens_predicted": 0})
        yield from exchange.events(prompt, output, finish)

    with ExitStack() as stack:
        slow, other = FakeEngine("llamacpp", SCRIPTS), FakeEngine("llamacpp", SCRIPTS)
        deployment = Deployment(
            stack, slow, other, rule=replace(QUICK, silence_factor=0.0, max_seconds_per_token=0.0)
        )
        (number,) = deployment.home(1)
        monkeypatch.setitem(EXCHANGES, "llamacpp", replace(exchange, events=events))
        slow.pause, before = 0.5, len(other.prompts)  # three times the patience, in all
        assert deployment.ask([number]) == [200]
        assert deployment.retried == (0 if advances else 1)
        assert len(other.prompts) == before + (not advances)
        assert deployment.host.fleet.backends[0].up is advances


def test_only_engine_is_waited_for() -> None:
    """There is nothing to gain: its next id may come before the deadline."""
    with ExitStack() as stack:
        slow = FakeEngine(
            "vllm", SCRIPTS, faults=[EngineFault(then="wait", after=0)], wait_seconds=4.0
        )
        deployment = Deployment(stack, slow, timeout=180.0)
        assert deployment.ask([1]) == [200]
        assert len(slow.prompts) == 1


def test_client_disconnect_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is probed, and generates."""
    monkeypatch.setattr(fleet, "SHORT_SECONDS", 0.0)  # any silence is a reason for a probe
    with ExitStack() as stack:
        slow = FakeEngine("vllm", SCRIPTS)
        rule = Rule(min_silence=60.0)
        deployment = Deployment(stack, slow, FakeEngine("vllm", SCRIPTS), rule=rule)
        number, *_ = deployment.home(1)
        backend = deployment.host.fleet.backends[0]
        message = {"role": "user", "content": f"Question {number}"}
        body = {"model": MODEL, "messages": [message]}

        async def leave() -> None:
            async with httpx.AsyncClient(timeout=180) as client:
                asking = asyncio.ensure_future(client.post(deployment.url + CHAT, json=body))
                await wait_until_async(lambda: slow.running == 1, "the request to run")
                asking.cancel()

        for _ in range(4):
            slow.faults[:], slow.trial_faults[:] = (
                [EngineFault(then="hang", after=0)],
                [EngineFault()],
            )
            asyncio.run(leave())
            wait_until(lambda: backend.in_flight == slow.running == 0, "the request to be closed")
            wait_until(lambda: not slow.trial_faults, "a probe")
        wait_until(lambda: not deployment.host.fleet.routing.doubted(backend), "the probe's result")
        assert backend.up and deployment.ask([number]) == [200]


CAUSED: dict[str, tuple[EngineFault, int]] = {
    "500": (EngineFault(status=500), 503),
    "breaks off": (EngineFault(then="die", after=None), 503),
    "error in the stream": (EngineFault(then="error", after=0), 500),
    "ends without an id": (EngineFault(then="close", after=0), 500),
}


@pytest.mark.parametrize(("fault", "status"), CAUSED.values(), ids=CAUSED)
def test_failure_of_a_request_does_not_count(fault: EngineFault, status: int) -> None:
    """It fails in the same way on two engines, and a third does not get it."""
    rule = Rule(failure_threshold=1)
    with ExitStack() as stack:
        engines = [FakeEngine("vllm", SCRIPTS) for _ in range(3)]
        deployment = Deployment(stack, *engines, rule=rule)
        for number in range(4):
            for engine in engines:
                engine.faults[:] = [fault]
            before = sum(len(engine.prompts) for engine in engines)
            assert deployment.ask([number]) == [status]
            assert sum(len(engine.prompts) for engine in engines) == before + 2
            assert all(backend.up for backend in deployment.host.fleet.backends)
        for engine in engines:
            engine.faults.clear()
        assert deployment.ask(range(4)) == [200] * 4


@pytest.mark.parametrize(("fault", "status"), CAUSED.values(), ids=CAUSED)
def test_failure_of_an_engine_counts(fault: EngineFault, status: int) -> None:
    """Another one answers: the first was at fault, and its probe fails, too."""
    # Once down, it stays down: otherwise it would be detected again, without grammars.
    rule = replace(QUICK, probe_interval=0.2, open_seconds=60.0, max_open_seconds=60.0)
    with ExitStack() as stack:
        engines = [FakeEngine("vllm", SCRIPTS) for _ in range(3)]
        deployment = Deployment(stack, *engines, rule=rule)
        number, *_ = deployment.home(1)
        engines[0].faults[:], engines[0].trial_faults[:] = [fault] * 50, [fault] * 50
        assert deployment.ask([number] * 4, at_once=False) == [200] * 4
        wait_until(lambda: not deployment.host.fleet.backends[0].up, "the engine to be taken down")
        assert [backend.up for backend in deployment.host.fleet.backends[1:]] == [True, True]
