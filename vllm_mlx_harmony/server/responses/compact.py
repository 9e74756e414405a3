"""A conversation made shorter by the model itself, for ``POST /v1/responses/compact``.

Knows what the model is asked for and what of its answer is taken. Refuses to know the document
around it (protocols) and how the request is run (serving).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_mlx_harmony.core.deltas import Delta, Failed, Finished, Kind, Opened, Text, Usage
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.core.turn import Defaults, FormatUpdate, ResponseInfo, ToolChoice, User
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.protocols.responses import ResponsesRequest
from vllm_mlx_harmony.server.encryption import server_cipher
from vllm_mlx_harmony.server.responses.background import read
from vllm_mlx_harmony.server.serving import Api

ORDER = (
    "This conversation is about to go on without what was said so far: only your next message will "
    "be left of it. Write that message now: what was asked for, what was found out and decided, "
    "what was done and with which result, what is left to do, and every name, path, number and "
    "piece of text that will be needed again. Call no tool. Write nothing but the message."
)


def _read(body: object, defaults: Defaults, tenant: str) -> ResponsesRequest:
    parsed = read(body, defaults, tenant)
    messages = (*parsed.turn.messages, FormatUpdate(None), User(ORDER))
    if replace(parsed.turn, response_format=None).answer_format is None:
        messages = (*parsed.turn.messages, User(ORDER))
    turn = replace(
        parsed.turn, messages=messages, response_format=None, tool_choice=ToolChoice(names=())
    )
    return replace(parsed, turn=turn, stream=False, store=False, background=False)


class _Compaction:
    """Takes what the model answers as the text that stands for the conversation."""

    def __init__(self, parsed: ResponsesRequest, info: ResponseInfo, _: Any, tenant: str) -> None:
        self._parsed, self._info, self._tenant = parsed, info, tenant
        self._texts: list[str] = []
        self._answers = False
        self._usage = Usage()

    def feed(self, delta: Delta) -> list[Event]:
        """Nothing goes on the wire before the end."""
        if isinstance(delta, Opened):
            self._answers = delta.kind in (Kind.ANSWER, Kind.PREAMBLE)
        elif isinstance(delta, Text) and self._answers:
            self._texts.append(delta.text)
        elif isinstance(delta, Finished):
            self._usage = delta.usage
        elif isinstance(delta, Failed):
            raise delta.error
        return []

    def result(self) -> dict[str, Any]:
        """The compaction. Raises ``OutputError`` when the model said nothing that could stand."""
        text = "".join(self._texts).strip()
        if not text:
            raise OutputError("the model wrote no summary", code="compaction_failed")
        return self._parsed.compaction(text, server_cipher(self._tenant), self._info, self._usage)


COMPACT = Api(
    "responses_compact",
    _read,
    responses.error_body,
    writer=_Compaction,
    blocks=True,
    servers=responses.client_servers,
)
