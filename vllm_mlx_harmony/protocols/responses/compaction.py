"""Responses: compaction.

The model summarizes the conversation, which then continues from the summary.

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
from vllm_mlx_harmony.protocols.server_calls import without_gaps
from vllm_mlx_harmony.protocols.validation import invalid

TRIGGER = "compaction_trigger"

ORDER = (
    "This conversation is about to go on without what was said so far: only your next message will "
    "be left of it. Write that message now: what was asked for, what was found out and decided, "
    "what was done and with which result, what is left to do, and every name, path, number and "
    "piece of text that will be needed again. Call no tool. Write nothing but the message."
)


def without_trigger(items: Sequence[Item]) -> Sequence[Item]:
    """``items`` without a ``compaction_trigger`` at their end.

    Raises ``RequestError`` naming one that stands anywhere else: items after it would be neither
    summarized nor answered.
    """
    for at, item in enumerate(items[:-1]):
        if item.type == TRIGGER:
            raise invalid(f"input[{at}]", f"{TRIGGER} must be the last item of input")
    return items[:-1] if items and items[-1].type == TRIGGER else items


def compacting(turn: Turn) -> Turn:
    """``turn``, whose answer is the summary of its conversation: plain text, and no call.

    The prompt begins as it would without that, tools and format included: it is in the prefix cache
    as far as the conversation goes.
    """
    plain = (FormatUpdate(None),) if turn.answer_format is not None else ()
    messages = (*without_gaps(turn.messages), *plain, User(ORDER))
    return replace(turn, messages=messages, tool_choice=ToolChoice(names=()))


def compacted(before: Iterable[Message], answer: Iterable[Message]) -> tuple[Message, ...]:
    """The conversation ``before`` a summary as the next response continues it: instructions and
    declarations, which a summary does not replace, and the summary, which is in ``answer``."""
    stays = (Instructions, AdditionalTools, EffortUpdate, FormatUpdate)
    texts = [each.text for each in answer if isinstance(each, (Preamble, Answer))]
    kept = (each for each in before if isinstance(each, stays))
    return (*kept, Summary("\n".join(texts).strip()))


class CompactionEmitter(Emitter):
    """Takes what the model answers as the summary; the response has one item, which is there at the
    end of the turn. A turn without any text fails with ``compaction_failed``. ``cipher`` encrypts
    the item; everything else is an ``Emitter``'s.
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
