"""``--warm-prompts``: which files are accepted, and what prompts begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.server.warm_prompts import beginning, read

SYSTEM = {"role": "system", "content": "Answer in rhymes."}


@pytest.mark.parametrize("content", ["", "{}", "[]", "[[]]", "[1]", "[[1]]", "[null]"])
def test_file_without_conversations_is_rejected(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(content)
    with pytest.raises(HostError, match=r"--warm-prompts: .*prompts\.json"):
        read(str(file))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="none"):
        read(str(tmp_path / "none"))


def test_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([[SYSTEM]]))
    assert read(str(file)) == [[SYSTEM]]


@pytest.mark.parametrize("last", [[], [{"role": "user", "content": "Hello"}]], ids=["", "asked"])
def test_beginning_ends_before_last_question(last: list[Any]) -> None:
    token_ids = beginning([SYSTEM, *last], Defaults(), render)
    text = vocab.encoding().decode(token_ids)
    assert text.endswith("<|start|>user<|message|>") and "Answer in rhymes." in text
    body = {"model": "m", "messages": [SYSTEM, {"role": "user", "content": "Other"}]}
    assert render(chat.read(body, Defaults()).turn).ids[: len(token_ids)] == token_ids
