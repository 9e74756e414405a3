"""A canitoolcall adapter, like those of vLLM and others: fixtures go through this project's
parser and the emitter of Chat Completions, in process.

    cd tests/system/suites
    canitoolcall run --engine canitoolcall_adapter:HarmonyAdapter --env PYTHONPATH=.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from canitoolcall.adapters.base import Adapter, ReplayInput, Support, ToolSpec
from canitoolcall.results import ParsedToolCall, ParseResult, StreamAccumulator

import vllm_mlx_harmony
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.turn import VOCAB_SIZE, Defaults, ResponseInfo
from vllm_mlx_harmony.protocols.chat import read
from vllm_mlx_harmony.protocols.events import DONE

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 0, "gpt-oss-20b")


class HarmonyAdapter(Adapter):
    name: ClassVar[str] = "vllm-mlx-harmony"
    pinned_version: ClassVar[str] = vllm_mlx_harmony.__version__

    def version(self) -> str:
        return vllm_mlx_harmony.__version__

    def supports(self, family: str, model: str) -> Support:
        return Support(family == "gpt-oss", "not in the Harmony format")

    def parser_config(self, raw: ReplayInput) -> dict[str, Any]:
        return {"parser": "vllm_mlx_harmony.core.context.StreamingHarmonyContext"}

    def units(self, raw: ReplayInput) -> list[int]:
        ids = raw.token_ids or vocab.encoding().encode(raw.text, allowed_special="all")
        return list(ids)

    def special_token_ids(self, raw: ReplayInput) -> Collection[int]:
        return range(vocab.STARTOFTEXT, VOCAB_SIZE)

    def parse(self, raw: ReplayInput, tools: Sequence[ToolSpec]) -> ParseResult:
        document, _ = _replay([self.units(raw)], raw, tools, stream=False)
        message = document["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return ParseResult(
            message["content"],
            message.get("reasoning_content"),
            tuple(ParsedToolCall(call["name"], call["arguments"]) for call in calls),
        )

    def parse_stream(
        self, raw: ReplayInput, chunks: Sequence[Sequence[int]], tools: Sequence[ToolSpec]
    ) -> ParseResult:
        joined = StreamAccumulator()
        for event in _replay(chunks, raw, tools, stream=True)[1]:
            for choice in event["choices"]:
                joined.add_openai_delta(choice["delta"])
        return joined.result()


def _replay(
    chunks: Sequence[Sequence[int]], raw: ReplayInput, tools: Sequence[ToolSpec], *, stream: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer (empty when streamed) and the events that the server would send."""
    user = {"role": "user", "content": "Use the tools to answer."}
    body = {"model": raw.model, "messages": [user], "tools": list(tools), "stream": stream}
    request = read(body, Defaults())
    context = StreamingHarmonyContext(request.turn, INFO)
    emitter = request.emitter(INFO)
    deltas = context.start()
    for chunk in chunks:
        deltas += context.append_output(chunk)
    deltas += context.finish("length" if raw.truncated else "stop")
    events = [event for delta in deltas for event in emitter.feed(delta)]
    documents = [json.loads(event.data) for event in events if event != DONE]
    return ({} if stream else dict(emitter.result())), documents
