"""Scripts as a test or a demo writes them, and the file a stand-in reads them from.

Knows how a completion becomes ids. Refuses to know how it is found again (`cursor`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.turn import VOCAB_SIZE

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Script:
    """What the stand-in answers to a prompt: exactly these tokens.

    ``pattern`` is searched in the last message of the prompt as Harmony writes it, header and
    control tokens included (``<|start|>user<|message|>Hi<|end|>``): a string is found as it is, a
    compiled pattern as a regular expression. With ``whole_prompt`` it is searched in all of it.
    Of several that match the first one counts.

    ``completion`` is what follows ``<|start|>assistant``: text with the control tokens written out,
    or ids, for what text cannot say (a character cut in two, bytes that are no UTF-8).

    Each token takes ``delay_ms`` milliseconds longer than it must. Asked for token ``fail_at``
    (counted from 0) the model raises instead, every time.
    """

    pattern: str | re.Pattern[str]
    completion: str | Sequence[int]
    delay_ms: float = 0
    fail_at: int | None = None
    whole_prompt: bool = False


FALLBACK = Script(
    pattern="",
    completion=(
        "<|channel|>final<|message|>This is a scripted stand-in, not gpt-oss: "
        "none of its scripts answers this message.<|return|>"
    ),
)
"""Said when no script matches."""


def dump_book(scripts: Iterable[Script], encode: Encode) -> str:
    """The scripts, and the fallback after them, as the JSON that `cursor.parse_book` reads.

    ``encode`` turns text into ids, control tokens written out into their own. Raises ``ValueError``
    for a script whose ids are no rows of the model, that fails after its last token, or whose
    tokens take less than no time.
    """
    book = {
        "notice": "Scripts of a stand-in. This is not gpt-oss.",
        "opening": list(encode("<|start|>assistant")),
        "end": vocab.RETURN,
        "scripts": [_dump(script, encode) for script in (*scripts, FALLBACK)],
    }
    return json.dumps(book)


def _dump(script: Script, encode: Encode) -> dict[str, object]:
    pattern = script.pattern
    if isinstance(pattern, str):
        pattern = re.compile(re.escape(pattern))
    return {
        "pattern": pattern.pattern,
        "flags": pattern.flags,
        "completion": _ids(script, encode),
        "whole_prompt": script.whole_prompt,
        "delay_ms": script.delay_ms,
        "fail_at": script.fail_at,
    }


def _ids(script: Script, encode: Encode) -> list[int]:
    said = script.completion
    ids = list(encode(said) if isinstance(said, str) else said)
    if not all(0 <= token < VOCAB_SIZE for token in ids):
        raise ValueError(f"not an id of the model in the completion for {script.pattern!r}")
    if script.fail_at is not None and not 0 <= script.fail_at <= len(ids):
        raise ValueError(f"script {script.pattern!r} never says token {script.fail_at}")
    if script.delay_ms < 0:
        raise ValueError(f"a token of script {script.pattern!r} cannot take {script.delay_ms} ms")
    return ids
