"""Responses: compaction, in which the model summarizes a conversation that continues from there.

Two requests ask for it. ``POST /v1/responses/compact`` answers with a document of its own: the
user's messages and a ``compaction`` item. ``POST /v1/responses`` whose last input item is a
``compaction_trigger`` answers with a response that has the item as its only output, streamed,
stored and in the background like any other; Codex compacts that way.

https://developers.openai.com/api/docs/guides/compaction

The item contains the encrypted summary. When a client sends it back, it is read as a user message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm_mlx_harmony.core.deltas import Delta, Failed, Finished, Kind, Opened, Started, Text
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.core.turn import (
    AdditionalTools,
    Answer,
    EffortUpdate,
    FormatUpdate,
    Instructions,
    Message,
    Preamble,
    ResponseInfo,
    Summary,
    ToolChoice,
    Turn,
    User,
)
from vllm_mlx_harmony.protocols.encryption import Cipher
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.protocols.responses.emitter import Emitter
from vllm_mlx_harmony.protocols.responses.schema import Item
from vllm_mlx_harmony.protocols.server_calls import with_missing_results
from vllm_mlx_harmony.protocols.validation import invalid

TRIGGER = "compaction_trigger"

PROMPT = (
    "This conversation is about to be shortened: everything before your next message will be gone. "
    "Write that message now: what was asked for, what was found out and decided, what was done and "
    "with which result, what is left to do, and every name, path, number and piece of text that "
    "will be needed again. Do not call any tool. Write only the message."
)


def without_trigger(items: Sequence[Item]) -> Sequence[Item]:
    """``items`` without a ``compaction_trigger`` at their end.

    Raises ``RequestError`` naming one anywhere else: items after it would be neither summarized nor
    answered.
    """
    for at, item in enumerate(items[:-1]):
        if item.type == TRIGGER:
            raise invalid(f"input[{at}]", f"{TRIGGER} must be the last item of input")
    return items[:-1] if items and items[-1].type == TRIGGER else items


def compacting(turn: Turn) -> Turn:
    """``turn`` with a request to summarize the conversation, in plain text and without a call.

    The prompt still begins with the same tools, format and messages, so the prefix cache has it up
    to the end of the conversation.
    """
    plain = (FormatUpdate(None),) if turn.answer_format is not None else ()
    messages = (*with_missing_results(turn.messages), *plain, User(PROMPT))
    return replace(turn, messages=messages, tool_choice=ToolChoice(names=()), fixed_answer="")


def compacted(before: Iterable[Message], answer: Iterable[Message]) -> tuple[Message, ...]:
    """The conversation that the next response continues: the summary in ``answer``, after the
    instructions and declarations ``before`` it, which a summary does not replace."""
    lasting = (Instructions, AdditionalTools, EffortUpdate, FormatUpdate)
    texts = [message.text for message in answer if isinstance(message, (Preamble, Answer))]
    declared = (message for message in before if isinstance(message, lasting))
    return (*declared, Summary("\n".join(texts).strip()))


class CompactionEmitter(Emitter):
    """An ``Emitter`` whose only item is the answer as an encrypted summary, at the end of the turn.

    A turn without any text fails with ``compaction_failed``.
    """

    def __init__(self, cipher: Cipher, info: ResponseInfo, *args: Any, **options: Any) -> None:
        super().__init__(info, *args, **options)
        self._cipher = cipher
        self._id = f"cmp_{info.id_seed[:20]}0000"
        self._parts: list[str] = []
        self._answers = False

    def feed(self, delta: Delta) -> list[Event]:
        """The events for ``delta``: none between the start and the end of the turn."""
        match delta:
            case Started() | Failed():
                return super().feed(delta)
            case Opened(kind=kind):
                self._answers = kind in (Kind.ANSWER, Kind.PREAMBLE)
                self._parts += ["\n"] if self._answers else []
            case Text(text=text) if self._answers:
                self._parts.append(text)
            case Finished():
                summary = "".join(self._parts).strip()
                if not summary:
                    failure = OutputError("the model wrote no summary", code="compaction_failed")
                    return super().feed(Failed(failure))
                encrypted = self._cipher.encrypt(summary)
                item = {"id": self._id, "type": "compaction", "encrypted_content": encrypted}
                return [*self.add_item(item), *super().feed(delta)]
        return []
