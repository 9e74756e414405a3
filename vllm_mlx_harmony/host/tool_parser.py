"""The text-level tool parser, for callers in vllm-mlx that have only text.

Knows vllm-mlx's parser interface. Encodes the text, control tokens written out included, and runs
the same core as our routes: text is the poorer source, end tokens are missing from it as a rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from vllm_mlx.tool_parsers.abstract_tool_parser import ExtractedToolCallInformation, ToolParser

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Delta, Kind, Opened, Text
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.turn import ResponseInfo, Tool, Turn

_BEGUN = re.compile(r"<(?:\|\w*\|?)?\Z")
"""The beginning of what may become a control token, at the end of a piece of text."""

_SHOWN = (Kind.PREAMBLE, Kind.ANSWER)


class HarmonyToolParser(ToolParser):  # type: ignore[misc]
    """Tool calls and content out of a gpt-oss answer as text. Reasoning is left out.

    One per request: what streams in is kept until `reset()`, or until a piece comes with nothing
    before it.
    """

    SUPPORTS_NATIVE_TOOL_FORMAT = True
    REQUIRES_EAGER_STREAMING = True
    """Tells vllm-mlx to hand over every piece, not only those from the first call on."""

    def __init__(self, tokenizer: Any = None) -> None:
        super().__init__(tokenizer)
        self._stream: _Stream | None = None

    def extract_tool_calls(
        self, model_output: str, request: Any = None
    ) -> ExtractedToolCallInformation:
        """The calls and the content of a whole answer; content is None when there is none."""
        stream = _Stream(request)
        pieces = [*stream.feed(_encode(model_output)), *stream.end()]
        calls: dict[int, dict[str, Any]] = {}
        for call in (call for piece in pieces for call in piece.get("tool_calls", ())):
            function = call["function"]
            made = calls.setdefault(call["index"], {"arguments": ""})
            made.update({"id": call["id"], "name": function["name"]} if "id" in call else {})
            made["arguments"] += function["arguments"]
        content = "".join(piece.get("content", "") for piece in pieces)
        return ExtractedToolCallInformation(bool(calls), list(calls.values()), content or None)

    def extract_tool_calls_streaming(  # noqa: PLR0917 - vllm-mlx's own signature
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int] | None = None,
        current_token_ids: Sequence[int] | None = None,
        delta_token_ids: Sequence[int] | None = None,
        request: Any = None,
    ) -> dict[str, Any] | None:
        """What is new: ``content``, ``tool_calls``, both, or None when nothing is to be shown.

        Arguments come as they arrive: the first piece of a call has its id and name. Only
        ``delta_text`` is read, and ``delta_token_ids`` in its place when given.
        """
        if self._stream is None or not previous_text:
            self._stream = _Stream(request)
            delta_text = current_text
        ids = delta_token_ids or self._stream.encode(delta_text)
        return _merged(self._stream.feed(ids))

    def finalize_streaming(self, current_text: str) -> dict[str, Any] | None:
        """What is still to be shown now that the answer has ended, in the same shape."""
        stream, self._stream = self._stream, None
        return None if stream is None else _merged(stream.end())

    def reset(self) -> None:
        """Forgets the answer that streamed in."""
        super().reset()
        self._stream = None


class _Stream:
    """One answer on its way through the core."""

    def __init__(self, request: Any) -> None:
        self._parser = Parser(_names(request))
        self._info = ResponseInfo(uuid4().hex, 0, "")
        self._open = Opened(0, Kind.REASONING)
        self._calls = -1
        self._shown = False
        self._pending = ""

    def encode(self, text: str) -> list[int]:
        """Ids of the next piece; the beginning of a control token waits for the rest of it."""
        text = self._pending + text
        begun = _BEGUN.search(text)
        self._pending = begun.group() if begun else ""
        return _encode(text[: len(text) - len(self._pending)])

    def feed(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        return list(self._pieces(self._parser.feed(ids)))

    def end(self) -> list[dict[str, Any]]:
        deltas = [*self._parser.feed(_encode(self._pending)), *self._parser.close("stop")]
        return list(self._pieces(deltas))

    def _pieces(self, deltas: list[Delta]) -> Iterator[dict[str, Any]]:
        for delta in deltas:
            if isinstance(delta, Opened):
                self._open = delta
                if delta.kind is Kind.CALL:
                    self._calls += 1
                    signed = {"id": self._info.call_id(delta.index), "type": "function"}
                    yield {"tool_calls": [{**signed, **self._call(name=delta.name, arguments="")}]}
                elif delta.kind in _SHOWN:
                    if self._shown:
                        yield {"content": "\n"}
                    self._shown = True
            elif isinstance(delta, Text) and self._open.kind is Kind.CALL:
                yield {"tool_calls": [self._call(arguments=delta.text)]}
            elif isinstance(delta, Text) and self._open.kind in _SHOWN:
                yield {"content": delta.text}

    def _call(self, **function: str) -> dict[str, Any]:
        return {"index": self._calls, "function": function}


def _merged(pieces: list[dict[str, Any]]) -> dict[str, Any] | None:
    merged: dict[str, Any] = {}
    for piece in pieces:
        for field, value in piece.items():
            merged[field] = merged[field] + value if field in merged else value
    return merged or None


def _encode(text: str) -> list[int]:
    whole = text.encode("utf-8", "replace").decode()  # a lone surrogate has no ids
    return vocab.encoding().encode(whole, allowed_special="all")


def _names(request: Any) -> Names:
    """The names of the request's tools. What is not as it should be was let in by vllm-mlx."""
    tools = request.get("tools") if isinstance(request, Mapping) else None
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, Mapping)]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    try:
        return Names.of(Turn((), tuple(Tool(name) for name in names if isinstance(name, str))))
    except RequestError:
        return Names()
