"""The tool parser for callers in vllm-mlx that have only text.

Encodes the text, including control tokens that are written out, and parses it as our routes parse
ids. Text usually lacks the end tokens.
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
"""A part of a control token at the end of a piece of text."""

_SHOWN = (Kind.PREAMBLE, Kind.ANSWER)


class HarmonyToolParser(ToolParser):  # type: ignore[misc]
    """Reads tool calls and content from the text of an answer, without its reasoning.

    An instance parses one answer at a time: until `reset()`, or a first piece of text.
    """

    SUPPORTS_NATIVE_TOOL_FORMAT = True
    REQUIRES_EAGER_STREAMING = True
    """vllm-mlx passes every piece, not only those after the first call."""

    def __init__(self, tokenizer: Any = None) -> None:
        super().__init__(tokenizer)
        self._stream: _Stream | None = None

    def extract_tool_calls(
        self, model_output: str, request: Any = None
    ) -> ExtractedToolCallInformation:
        """The calls and the content (None if there is none) of a whole answer."""
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
        """The delta of a piece: ``content``, ``tool_calls``, both, or None if there is neither.

        The first delta of a call has its id and name, the others parts of the arguments. Only
        ``delta_text`` is read, or ``delta_token_ids`` if given.
        """
        if self._stream is None or not previous_text:
            self._stream = _Stream(request)
            delta_text = current_text
        ids = delta_token_ids or self._stream.encode(delta_text)
        return _merged(self._stream.feed(ids))

    def finalize_streaming(self, current_text: str) -> dict[str, Any] | None:
        """The last delta, at the end of the answer."""
        stream, self._stream = self._stream, None
        return None if stream is None else _merged(stream.end())

    def reset(self) -> None:
        """Starts another answer."""
        super().reset()
        self._stream = None


class _Stream:
    """The parser of one answer."""

    def __init__(self, request: Any) -> None:
        self._parser = Parser(_names(request))
        self._info = ResponseInfo(uuid4().hex, 0, "")
        self._open = Opened(0, Kind.REASONING)
        self._calls = -1
        self._shown = False
        self._pending = ""

    def encode(self, text: str) -> list[int]:
        """Ids of the next piece; a part of a control token waits for the rest of it."""
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
    """The names of the request's tools; vllm-mlx has not validated them."""
    tools = request.get("tools") if isinstance(request, Mapping) else None
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, Mapping)]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    try:
        return Names.of(Turn((), tuple(Tool(name) for name in names if isinstance(name, str))))
    except RequestError:
        return Names()
