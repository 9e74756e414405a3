"""Scripts as a test or a demo writes them, and the file that a stand-in reads (`cursor`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.turn import VOCAB_SIZE

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Script:
    """The tokens with which the stand-in answers a prompt.

    ``pattern`` is searched for in the last message of the prompt in Harmony's format, with its
    header and control tokens (``<|start|>user<|message|>Hi<|end|>``), or with ``whole_prompt`` in
    the entire prompt. A string matches literally, a compiled pattern as a regular expression. The
    first script that matches is used.

    ``completion`` follows ``<|start|>assistant``: text with control tokens by name, or ids for what
    text cannot express, such as half a character.

    Each token is delayed by ``delay_ms`` milliseconds. In place of token ``fail_at`` (from 0) the
    model raises an error. Each token of the prompt is delayed by ``prompt_ms`` from where the
    script's message begins, which its pattern must recognise by its first words.
    """

    pattern: str | re.Pattern[str]
    completion: str | Sequence[int]
    delay_ms: float = 0
    fail_at: int | None = None
    whole_prompt: bool = False
    prompt_ms: float = 0


FALLBACK = Script(
    pattern="",
    completion=(
        "<|channel|>final<|message|>This is a scripted stand-in, not gpt-oss: "
        "none of its scripts answers this message.<|return|>"
    ),
)
"""The answer if no script matches."""


def dump_book(scripts: Iterable[Script], encode: Encode) -> str:
    """The scripts, followed by the fallback, as the JSON that `cursor.parse_book` reads.

    ``encode`` turns text into ids, names of control tokens included. Raises ``ValueError`` for ids
    that the model does not have, a failure after the last token, or a negative delay.
    """
    entries = []
    for script in (*scripts, FALLBACK):
        pattern, completion = script.pattern, script.completion
        ids = list(encode(completion) if isinstance(completion, str) else completion)
        if not all(0 <= token < VOCAB_SIZE for token in ids):
            raise ValueError(f"not an id of the model in the completion for {pattern!r}")
        if script.fail_at is not None and not 0 <= script.fail_at <= len(ids):
            raise ValueError(f"script {pattern!r} does not have token {script.fail_at}")
        if (least := min(script.delay_ms, script.prompt_ms)) < 0:
            raise ValueError(f"a token of script {pattern!r} cannot take {least} ms")
        compiled = re.compile(re.escape(pattern)) if isinstance(pattern, str) else pattern
        written = {"pattern": compiled.pattern, "flags": compiled.flags, "completion": ids}
        entries.append({**asdict(script), **written})
    book = {
        "notice": "Scripts of a stand-in. This is not gpt-oss.",
        "opening": list(encode("<|start|>assistant")),
        "end": vocab.RETURN,
        "scripts": entries,
    }
    return json.dumps(book)
