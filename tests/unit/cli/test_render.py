"""render: it prints the exact prompt; invalid input is one line and exit code 2."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.cli.render import _document
from vllm_mlx_harmony.core import vocab

REQUEST = {
    "model": "m",
    "messages": [{"role": "user", "content": "Tab\there, <|end|> and é 🙂\r\n"}],
}
PROMPT = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2026-01-02\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    "<|end|><|start|>user<|message|>Tab\there, <|end|> and é 🙂\r\n<|end|><|start|>assistant"
)


@pytest.fixture
def render(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> Any:
    """Runs the command on a request: its exit code, standard output and standard error."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_DATE", "2026-01-02")

    def run(content: str | bytes, *flags: str) -> tuple[int, bytes, str]:
        file = tmp_path / "request.json"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        code = main(["render", str(file), *flags])
        sys.stdout.flush()
        out, error = capfdbinary.readouterr()
        return code, out, error.decode()

    return run


def test_piped_output_is_the_exact_prompt(render: Any) -> None:
    assert render(json.dumps(REQUEST)) == (0, PROMPT.encode(), "")


def test_coloured_prompt_has_the_same_text_without_escapes(
    render: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    code, out, _ = render(json.dumps(REQUEST))
    text = out.decode()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    shown = PROMPT.replace("\r", "").expandtabs()
    assert code == 0
    assert "".join(shown.split()) in "".join(plain.split())
    assert "\x1b[32m" in text, "the user's text has its own colour"
    assert "\x1b[2m<|end|>" in text, "control tokens are dim"


def test_json_has_ids_count_and_pieces(render: Any) -> None:
    code, out, _ = render(json.dumps(REQUEST), "--json")
    document = json.loads(out)
    assert code == 0
    assert vocab.encoding().decode(document["ids"]) == PROMPT
    assert document["count"] == len(document["ids"])
    assert "".join(piece["text"] for piece in document["pieces"]) == PROMPT
    control = [piece["text"] for piece in document["pieces"] if piece["control"]]
    assert control == re.findall(r"<\|\w+\|>", PROMPT.replace("<|end|> and", "and"))


def test_request_is_read_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = io.TextIOWrapper(io.BytesIO(json.dumps(REQUEST).encode()))
    monkeypatch.setattr(sys, "stdin", content)
    assert main(["render", "-"]) == 0
    assert capsys.readouterr().out.endswith("<|start|>assistant")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        (b"\xff{}", "is not UTF-8 text"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "must be a JSON object"),
        ("{}", "model is required"),
        ('{"model":"m","messages":[]}', "messages"),
        ('{"model":"m","messages":[{"role":"tool","content":"x"}]}', "messages[0]"),
        ('{"model":"m","messages":[{"role":"user","content":"x"}],"n":9}', "n must be"),
    ],
)
def test_invalid_input_is_one_line(render: Any, content: str | bytes, expected: str) -> None:
    code, out, error = render(content)
    assert (code, out) == (2, b"")
    assert error.startswith("vllm-mlx-harmony: error: ")
    assert expected in error
    assert error.count("\n") == 1


def test_unreadable_file_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["render", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["render", str(tmp_path)]) == 2
    assert "directory" in capsys.readouterr().err


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.json", tmp_path / "marked.json"
    body = json.dumps(REQUEST)
    plain.write_text(body, "utf-8")
    marked.write_text(body, "utf-8-sig")
    assert _document(str(marked)) == _document(str(plain)) == REQUEST
