"""The tool parser for callers that have only the text of an answer; our routes parse its ids.

Encodes the text, including control tokens that are written out, and parses it as our routes parse
ids. Text usually lacks the end tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

from vllm_mlx.tool_parsers.abstract_tool_parser import ExtractedToolCallInformation, ToolParser

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.turn import ResponseInfo, Tool, Turn
from vllm_mlx_harmony.protocols.chat.emitter import Emitter


class HarmonyToolParser(ToolParser):  # type: ignore[misc]
    """Reads tool calls and content from a whole answer's text; drops its reasoning.

    vllm-mlx's own routes, which would parse text piece by piece, are behind ours.
    """

    SUPPORTS_NATIVE_TOOL_FORMAT = True

    def extract_tool_calls(
        self, model_output: str, request: object = None
    ) -> ExtractedToolCallInformation:
        """The calls and the content (None if there is none) of a whole answer."""
        text = model_output.encode("utf-8", "replace").decode()  # a lone surrogate has no ids
        parser = Parser(_names(request))
        emitter = Emitter(ResponseInfo(uuid4().hex, 0, ""), stream=False, shows_reasoning=False)
        ids = vocab.encoding().encode(text, allowed_special="all")
        for delta in (*parser.feed(ids), *parser.close("stop")):
            emitter.feed(delta)
        message = emitter.result()["choices"][0]["message"]
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
        return ExtractedToolCallInformation(bool(calls), calls, message["content"] or None)


def _names(request: object) -> Names:
    """The names of the request's tools; vllm-mlx does not validate them."""
    tools = request.get("tools") if isinstance(request, Mapping) else None
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, Mapping)]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    try:
        return Names.of(Turn((), tuple(Tool(name) for name in names if isinstance(name, str))))
    except RequestError:
        return Names()
