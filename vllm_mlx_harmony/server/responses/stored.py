"""A stored response, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from pydantic import TypeAdapter
from pydantic_core import from_json

from vllm_mlx_harmony.core.turn import Message
from vllm_mlx_harmony.protocols.events import encode, encode_slowly

MAX_BYTES = 256 * 1024 * 1024
"""Maximum bytes of all responses in a store."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response of ``tenant``: its ``document``, and the ``input_items`` of its request.

    ``messages`` are the conversation that ends with it, without the request's own instructions.
    """

    id: str
    document: Mapping[str, Any]
    input_items: Sequence[Mapping[str, Any]]
    messages: tuple[Message, ...]
    tenant: str = ""

    def text(self) -> str:
        """The response as JSON."""
        messages = (
            [type(message).__name__, *asdict(message).values()] for message in self.messages
        )
        # Encoded one by one, so that other threads run in between: 20,000 items take 100 ms.
        lists = (f"[{','.join(map(encode_slowly, each))}]" for each in (self.input_items, messages))
        document = encode_slowly(self.document)
        return f"[{encode(self.id)},{document},{','.join(lists)},{encode(self.tenant)}]"

    @classmethod
    def of_text(cls, text: str) -> StoredResponse:
        """The inverse of ``text``."""
        # Many times as fast as `json` for long strings.
        key, document, input_items, written, tenant = from_json(text, cache_strings="none")
        messages: list[Message] = []
        for name, *values in written:
            kind = _MESSAGES[name]
            if name in _NESTED:
                given = dict(zip((field.name for field in fields(kind)), values, strict=True))
                messages.append(TypeAdapter(kind).validate_python(given))
            else:
                messages.append(kind(*values))
        return cls(key, document, input_items, tuple(messages), tenant)


_MESSAGES: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}

_NESTED = frozenset({"AdditionalTools", "EffortUpdate", "FormatUpdate"})
"""Messages that contain other dataclasses."""
