"""Traces: each answer is an OpenTelemetry span, with spans for what it waits for.

    chat gpt-oss-20b                          the answer, from its prompt to its end
      wait · prefill · decode                 the engine's queue, the prompt, the output
      execute_tool search · wait · …          a tool that the server runs, and the next output

Only the API of OpenTelemetry is used. Without an SDK, which ``opentelemetry-instrument`` sets up,
nothing is recorded. Names are those of the conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/); the contents of messages, which
are optional there, are never recorded.

The span is part of the trace that is current, such as that of an instrumented web framework, or of
the trace that the request's headers name.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.core.turn import ServerCall
from vllm_mlx_harmony.engine_api.engine import Step
from vllm_mlx_harmony.server.errors import failure_of
from vllm_mlx_harmony.server.observer import ObservedRequest, Observer, ObserverFactory

try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    INSTALLED = False
else:
    INSTALLED = True

NAME = "vllm_mlx_harmony"


def factories() -> tuple[ObserverFactory, ...]:
    """What makes the spans of an answer, if somebody has set up an SDK that records them."""
    if INSTALLED and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return (Trace,)
    return ()


class Trace(Observer):
    """An ``Observer`` that makes the spans of one answer. There is one span for each step."""

    def __init__(self, observed: ObservedRequest) -> None:
        self._tracer = trace.get_tracer(NAME)
        inside = trace.get_current_span().get_span_context().is_valid
        kind = trace.SpanKind.INTERNAL if inside else trace.SpanKind.SERVER
        outside = None if inside else TraceContextTextMapPropagator().extract(observed.trace)
        self._root = self._tracer.start_span(
            f"chat {observed.model}",
            outside,
            kind,
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": NAME,
                "gen_ai.request.model": observed.model,
                "gen_ai.request.stream": observed.stream,
                f"{NAME}.api": observed.api,
                f"{NAME}.request_id": observed.id_seed,
            },
        )
        self._within = trace.set_span_in_context(self._root)
        self._part: trace.Span | None = None
        self._state = ""
        self._finish = ""

    def prompt(self, ids: tuple[int, ...], constraint: Constraint | None) -> None:
        """An output begins to wait for the engine."""
        self._begin("wait")

    def step(self, step: Step) -> None:
        """The engine computes the prompt, or generates. One over HTTP begins with an empty step."""
        self._finish = step.finish or self._finish
        if step.ids:
            if self._state != "decode":
                self._begin("decode")
        elif self._state == "wait" and (step.progress is None or not step.progress.place):
            self._begin("prefill")

    def tool(self, call: ServerCall) -> None:
        operation = {"gen_ai.operation.name": "execute_tool"}
        named = {"gen_ai.tool.name": call.name, "gen_ai.tool.call.id": call.id}
        self._begin(f"execute_tool {call.name}", {**operation, **named})

    def ended(self, result: str, usage: Usage, failure: Exception | None) -> None:
        """Ends the spans; ``usage`` is known only of an answer that has succeeded."""
        if self._part is not None:
            self._part.end()
        self._root.set_attribute(f"{NAME}.result", result)
        if self._finish:
            self._root.set_attribute("gen_ai.response.finish_reasons", [self._finish])
        if usage.prompt_tokens:
            counts = {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
            }
            self._root.set_attributes(counts)
        if failure is not None:
            self._root.set_attribute("error.type", type(failure).__name__)
            self._root.set_status(trace.StatusCode.ERROR, failure_of(failure).message)
        self._root.end()

    def _begin(self, state: str, attributes: Mapping[str, str] | None = None) -> None:
        if self._part is not None:
            self._part.end()
        self._state = state
        self._part = self._tracer.start_span(state, self._within, attributes=attributes)
