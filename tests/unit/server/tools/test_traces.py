"""Traces: the spans of an answer, as OpenTelemetry's SDK gets them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("opentelemetry.sdk")

from local_tool_servers import weather
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from vllm_mlx_harmony import inspector
from vllm_mlx_harmony.core.deltas import Progress
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Step, Steps
from vllm_mlx_harmony.server import traces
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.settings import ToolsMode
from vllm_mlx_harmony.server.tools.config import ToolsConfig
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

pytestmark = pytest.mark.usefixtures("no_grammars")

SECRET = "Where is it warm?"
CALL = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    'to=weather.now <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
)
ANSWER = "<|channel|>final<|message|>In Rome.<|return|>"
ROOT = f"chat {MODEL}"
LOCAL = (Step((), progress=Progress(9, place=1)), Step((), progress=Progress(9)))
REMOTE = (Step(()),)
ONCE = ["prefill", "decode", ROOT]
OUTSIDE = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass(eq=False)
class Engine(ScriptedEngine):
    """Yields ``before`` first; then fails, if ``fails`` is true."""

    before: Sequence[Step] = LOCAL
    fails: bool = False
    scripts: dict[str, str] = field(
        default_factory=lambda: {"Hello!": ANSWER, SECRET: CALL, "20 °C": ANSWER}
    )

    async def generate(self, request: GenerationRequest) -> Steps:
        for step in self.before:
            yield step
        async for step in super().generate(request):
            yield step
            if self.fails:
                raise OutputError("the engine has failed")


@pytest.fixture(name="spans")
def _spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def post_chat(
    engine: Engine,
    text: str,
    *,
    stream: bool = True,
    framework: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **headers: str,
) -> Any:
    """The response of an application that has the inspector, too."""
    host = SingleEngineHost(engine)
    host.toolbox = Toolbox((weather(),), ToolsConfig(), ToolsMode.ALL)
    app = application(host)
    inspector.install(app, list)
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "stream": stream}
    with TestClient(framework(app)) as client:
        headers = {"Authorization": f"Bearer {KEY}", **headers}
        return client.post("/v1/chat/completions", json=body, headers=headers)


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("text", "engine", "names"),
    [
        ("Hello!", Engine(), ["wait", *ONCE]),
        ("Hello!", Engine(before=()), ["wait", "decode", ROOT]),
        ("Hello!", Engine(before=REMOTE, remote=True), ["wait", *ONCE]),
        (
            SECRET,
            Engine(),
            ["wait", *ONCE[:2], "execute_tool weather.now", "wait", *ONCE],
        ),
    ],
    ids=["local", "silent", "remote", "tool"],
)
def test_answer_has_a_span_for_each_wait(
    spans: InMemorySpanExporter, text: str, engine: Engine, names: list[str], *, stream: bool
) -> None:
    assert post_chat(engine, text, stream=stream).status_code == 200
    *parts, root = finished = spans.get_finished_spans()
    assert [span.name for span in finished] == names
    assert root.parent is None and root.kind is trace.SpanKind.SERVER
    assert all(part.parent == root.context for part in parts)
    times = [time for part in parts for time in (part.start_time, part.end_time)]
    assert [root.start_time, *times, root.end_time] == sorted(
        [root.start_time, *times, root.end_time]
    )
    recorded = [str(value) for span in finished for value in (span.attributes or {}).values()]
    assert not [value for value in recorded if SECRET in value or "Rome" in value]


def test_spans_have_attributes(spans: InMemorySpanExporter) -> None:
    usage = post_chat(Engine(), SECRET, stream=False).json()["usage"]
    named_spans = by_name(spans)
    attributes = dict(named_spans[ROOT].attributes or {})
    assert attributes.pop("vllm_mlx_harmony.request_id")
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm_mlx_harmony",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": False,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.reasoning.output_tokens": 2,
        "vllm_mlx_harmony.api": "chat_completions",
        "vllm_mlx_harmony.result": "success",
    }
    tool = dict(named_spans["execute_tool weather.now"].attributes or {})
    assert tool.pop("gen_ai.tool.call.id")
    assert tool == {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather.now"}


def test_failure_ends_all_spans(spans: InMemorySpanExporter) -> None:
    assert "the engine has failed" in post_chat(Engine(fails=True), "Hello!").text
    named_spans = by_name(spans)
    assert list(named_spans) == ["wait", *ONCE]
    assert named_spans[ROOT].status.description == "the engine has failed"
    assert named_spans[ROOT].status.status_code is trace.StatusCode.ERROR
    assert (named_spans[ROOT].attributes or {})["error.type"] == "OutputError"


def test_trace_of_client_is_continued(spans: InMemorySpanExporter) -> None:
    post_chat(Engine(), "Hello!", traceparent=f"00-{'-'.join(OUTSIDE)}-01")
    parent = by_name(spans)[ROOT].parent
    assert parent is not None
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == OUTSIDE


def test_span_of_web_framework_is_parent(spans: InMemorySpanExporter) -> None:
    def framework(app: ASGIApp) -> ASGIApp:
        async def within(scope: Any, *channels: Any) -> None:
            with trace.get_tracer("framework").start_as_current_span(scope.get("method", "")):
                await app(scope, *channels)

        return within

    parent = f"00-{'-'.join(OUTSIDE)}-01"
    assert post_chat(Engine(), "Hello!", framework=framework, traceparent=parent).status_code == 200
    named_spans = by_name(spans)
    assert named_spans[ROOT].parent == named_spans["POST"].context
    assert named_spans[ROOT].kind is trace.SpanKind.INTERNAL


def test_nothing_is_observed_without_sdk() -> None:
    assert not traces.factories()


def test_package_is_optional() -> None:
    code = (
        "import importlib, sys; sys.modules['opentelemetry'] = None\n"
        "from vllm_mlx_harmony.server import serving, traces\n"
        "assert not traces.factories()\n"
        "del sys.modules['opentelemetry']  # a distribution may share the namespace alone\n"
        "sys.modules['opentelemetry.trace'] = None\n"
        "assert not importlib.reload(traces).factories()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
