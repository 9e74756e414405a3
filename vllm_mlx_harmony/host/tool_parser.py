"""The tool parser for callers in vllm-mlx that have only text, where a single model is served.

Encodes the text, including control tokens that are written out, and parses it as our routes parse
ids. Text usually lacks the end tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from vllm_mlx.tool_parsers.abstract_tool_parser import ExtractedToolCallInformation, ToolParser

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Finished
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.turn import ResponseInfo, Tool, Turn
from vllm_mlx_harmony.protocols.chat.emitter import Emitter

_BEGUN = re.compile(r"<(?:\|\w*\|?)?\Z")
"""A part of a control token at the end of a piece of text."""


class HarmonyToolParser(ToolParser):  # type: ignore[misc]
    """Reads tool calls and content from an answer's text; drops its reasoning.

    An instance parses one answer at a time: until `reset()`, or a first piece of text.
    """

    SUPPORTS_NATIVE_TOOL_FORMAT = True
    REQUIRES_EAGER_STREAMING = True
    """vllm-mlx passes every piece, not only those after the first call."""

    _answer: _Answer | None = None

    def extract_tool_calls(
        self, model_output: str, request: object = None
    ) -> ExtractedToolCallInformation:
        """The calls and the content (None if there is none) of a whole answer."""
        answer = _Answer(request, stream=False)
        answer.feed(_encode(model_output), ends=True)
        message = answer.emitter.result()["choices"][0]["message"]
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
        return ExtractedToolCallInformation(bool(calls), calls, message["content"] or None)

    def extract_tool_calls_streaming(  # noqa: PLR0917 - vllm-mlx's own signature
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int] | None = None,
        current_token_ids: Sequence[int] | None = None,
        delta_token_ids: Sequence[int] | None = None,
        request: object = None,
    ) -> dict[str, Any] | None:
        """The delta of a piece: ``content``, ``tool_calls``, both, or None if there is neither.

        The first delta of a call has its id and name, the others parts of the arguments. Only
        ``delta_text`` is read, or ``delta_token_ids`` if given.
        """
        if self._answer is None or not previous_text:
            self._answer = _Answer(request, stream=True)
            delta_text = current_text
        return self._answer.feed(delta_token_ids or self._answer.encode(delta_text))

    def finalize_streaming(self, current_text: str) -> dict[str, Any] | None:
        """The last delta, at the end of the answer."""
        answer, self._answer = self._answer, None
        return None if answer is None else answer.feed(_encode(answer.pending), ends=True)

    def reset(self) -> None:
        super().reset()
        self._answer = None


class _Answer:
    """The parser of one answer, whose pieces are Chat's deltas."""

    def __init__(self, request: object, *, stream: bool) -> None:
        self._parser = Parser(_names(request))
        info = ResponseInfo(uuid4().hex, 0, "")
        self.emitter = Emitter(info, stream=stream, shows_reasoning=False)
        self.stream, self.pending = stream, ""

    def encode(self, text: str) -> list[int]:
        """Ids of the next piece; a part of a control token waits for the rest of it."""
        text = self.pending + text
        begun = _BEGUN.search(text)
        self.pending = begun.group() if begun else ""
        return _encode(text[: len(text) - len(self.pending)])

    def feed(self, ids: Sequence[int], *, ends: bool = False) -> dict[str, Any] | None:
        deltas = [*self._parser.feed(ids), *(self._parser.close("stop") if ends else ())]
        joined: dict[str, Any] = {}
        shown = (delta for delta in deltas if not (self.stream and isinstance(delta, Finished)))
        for event in (event for delta in shown for event in self.emitter.feed(delta)):
            for field, value in json.loads(event.data)["choices"][0]["delta"].items():
                joined[field] = joined[field] + value if field in joined else value
        return joined or None


def _encode(text: str) -> list[int]:
    whole = text.encode("utf-8", "replace").decode()  # a lone surrogate has no ids
    return vocab.encoding().encode(whole, allowed_special="all")


def _names(request: object) -> Names:
    """The names of the request's tools; vllm-mlx does not validate them."""
    tools = request.get("tools") if isinstance(request, Mapping) else None
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, Mapping)]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    try:
        return Names.of(Turn((), tuple(Tool(name) for name in names if isinstance(name, str))))
    except RequestError:
        return Names()
