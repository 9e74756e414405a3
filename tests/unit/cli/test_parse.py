"""parse: the messages of a completion, in whatever form it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harmony_text import ids_of

from vllm_mlx_harmony.__main__ import main

TURN = (
    "<|channel|>analysis<|message|>Need it.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
    '<|message|>{"city":"Zürich"}<|call|>'
)
MESSAGES = [
    {"kind": "reasoning", "text": "Need it.", "complete": True},
    {"kind": "preamble", "text": "Let me look.", "complete": True},
    {"kind": "call", "name": "get_weather", "arguments": '{"city":"Zürich"}', "complete": True},
]


@pytest.fixture
def parse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on a completion: its exit code, standard output and standard error."""

    def run(content: str, *flags: str) -> tuple[int, str, str]:
        file = tmp_path / "completion"
        file.write_text(content, "utf-8", newline="")
        code = main(["parse", str(file), *flags])
        out, error = capsys.readouterr()
        return code, out, error

    return run


@pytest.mark.parametrize(
    "content",
    [TURN, f"{TURN}\n", f"<|start|>assistant{TURN}", json.dumps(ids_of(TURN))],
    ids=["text", "text and a line break", "from its start", "ids"],
)
def test_json_has_messages_and_usage(parse: Any, content: str) -> None:
    code, out, _ = parse(content, "--json")
    document = json.loads(out)
    assert (code, document["messages"]) == (0, MESSAGES)
    assert document["finish_reason"] == "tool_calls"
    assert document["usage"]["reasoning_tokens"] == len(ids_of("Need it."))


def test_every_message_stands_under_its_kind(parse: Any) -> None:
    code, out, _ = parse(TURN)
    assert code == 0
    assert [line for line in out.splitlines() if line][:-1] == [
        "── reasoning",
        "Need it.",
        "── preamble",
        "Let me look.",
        "── call get_weather",
        '{"city":"Zürich"}',
    ]
    assert out.splitlines()[-1].startswith("finish: tool_calls; ")


@pytest.mark.parametrize(
    ("flags", "complete", "reason"), [((), True, "stop"), (("--cut",), False, "length")]
)
def test_output_without_an_end_is_complete_unless_cut(
    parse: Any, flags: tuple[str, ...], complete: bool, reason: str
) -> None:
    _, out, _ = parse("<|channel|>final<|message|>Half of", "--json", *flags)
    document = json.loads(out)
    expected = {"kind": "answer", "text": "Half of", "complete": complete}
    assert document["messages"] == [expected]
    assert document["finish_reason"] == reason


@pytest.mark.parametrize("content", ["", "\n", "[]", "<|end|><|end|>", "[99999999, -1]"])
def test_empty_output_has_no_messages(parse: Any, content: str) -> None:
    code, out, _ = parse(content, "--json")
    assert (code, json.loads(out)["messages"]) == (0, [])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[1, 2", "not a JSON list"),
        ('[1, "a"]', '"a"'),
        ("[1, true]", "true"),
        ("[1.0]", "1.0"),
        ("[" * 100_000, "not a JSON list"),
        ("[1] 2", "not a JSON list"),
    ],
)
def test_invalid_ids_are_one_line(parse: Any, content: str, expected: str) -> None:
    code, out, error = parse(content)
    assert (code, out) == (2, "")
    assert error.startswith("vllm-mlx-harmony: error: ")
    assert expected in error
    assert error.count("\n") == 1


def test_output_that_looks_like_a_json_list_is_text(parse: Any) -> None:
    _, out, _ = parse("[1, 2]<|return|>", "--json")
    assert json.loads(out)["messages"] == [{"kind": "answer", "text": "[1, 2]", "complete": True}]
