"""README's table of what Chat accepts and ignores, against the code and the official client."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.protocols.chat.body import ChatBody

README = Path(__file__).parents[2] / "README.md"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def ignored() -> list[str]:
    section = README.read_text().partition("## Accepted and ignored")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| Chat |")]
    return [field for row in rows for field in re.findall(r"`([^`]+)`", row[2])]


def body(field: str, value: object) -> dict[str, Any]:
    for name in reversed(field.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return {**ASKED, **value}


def test_there_is_a_table() -> None:
    assert len(ignored()) > 20
    assert len(set(ignored())) == len(ignored())


@pytest.mark.parametrize("value", ["x", 1, True, 0.5, {"a": "b"}, ["a"], None], ids=repr)
@pytest.mark.parametrize("field", ignored())
def test_what_is_in_the_table_changes_nothing(field: str, value: object) -> None:
    assert chat.read(body(field, value), Defaults()) == chat.read(ASKED, Defaults())


def test_every_field_of_the_official_client_is_read_or_in_the_table() -> None:
    types = pytest.importorskip("openai.types.chat.completion_create_params")
    fields = set(get_type_hints(types.CompletionCreateParamsStreaming))
    assert fields - set(ChatBody.model_fields) - set(ignored()) == set()
