"""The page of the yardstick: what counts as a failure of the server, and what is shown of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx_sse")

import yardstick


def outcome(name: str, state: str = "passed", problem: str = "", received: str = "") -> Any:
    texts = {"holds": "it holds", "problem": problem, "received": received}
    return {"name": name, "state": state, **texts}


def results(*checks: Any) -> Any:
    fields = {"name": "mlx-lm", "version": "1.2", "date": "2026-01-02"}
    return {**fields, "checks": list(checks), "problem": "", "tracebacks": 0}


def test_row_counts_what_is_offered() -> None:
    server_results = results(
        outcome("wire.chat.whole"),
        outcome("wire.chat.key", "unsupported", "no --key"),
        outcome("format.chat.call-time", "failed", "no call"),
        outcome("wire.messages.whole", "unsupported", "POST /v1/messages is 404"),
    )
    title, version, passed, wire, form, loop, absent = yardstick.row(server_results)
    assert (title, version, passed) == ("mlx-lm", "1.2", "1 of 4")
    assert (wire, form, loop, absent) == ("1/1", "0/1", "–", "messages")


def test_unknown_prompt_is_no_failure_of_the_server() -> None:
    unknown = 'data: {"choices":[{"delta":{"content":" scripted"}}]}'
    server_results = results(
        outcome("format.chat.call-time", "failed", "no call", unknown),
        outcome("wire.chat.stop", "failed", "the stop string `7` is\nin the text"),
        outcome("wire.chat.limit", "failed", "the answer ended"),
        outcome("wire.responses.limit", "failed", "the answer ended"),
    )
    lines = yardstick.section(server_results).splitlines()
    assert [line for line in lines if line.startswith("- ")] == [
        "- `wire.chat.stop`: it holds. `the stop string '7' is in the text`",
        "- `wire.chat.limit`: it holds. `the answer ended`",
    ]
    assert any("1 more failed; 1 unclear" in line for line in lines)
    assert yardstick.row(server_results)[3:5] == ("0/3", "–")


def test_check_that_needs_a_mac_is_no_failure_of_the_server() -> None:
    problem = f"status 502: {yardstick.PEERS['rapid-mlx'].needs_metal} could not be honored"
    server_results = results(
        outcome("format.chat.schema-person", "failed", problem),
        outcome("format.chat.call-time", "failed", "no call"),
        outcome("format.chat.whole"),
    )
    of_rapid = {**server_results, "name": "rapid-mlx"}
    assert (yardstick.row(server_results)[4], yardstick.row(of_rapid)[4]) == ("1/3", "1/2")
    assert "1 need Metal" in yardstick.section(of_rapid)
    assert "schema-person" not in yardstick.section(of_rapid)


def test_command_is_shown_as_it_is_typed() -> None:
    shown = yardstick.section(results())
    assert "mlx_lm.server --model gpt-oss-20b-stand-in --host 127.0.0.1 --port 8080" in shown
    for name, peer in yardstick.PEERS.items():
        assert "{" not in yardstick.section({**results(), "name": name}), peer.title


def test_readme_has_the_best_rows_between_its_marks() -> None:
    all_results = [results(outcome("wire.chat.whole"))] * 7
    text = yardstick.readme("a\n<!-- yardstick -->old<!-- /yardstick -->\nb", all_results)
    assert text.startswith("a\n<!-- yardstick -->\n") and text.endswith("<!-- /yardstick -->\nb")
    assert text.count("| mlx-lm | 1.2 | 1 of") == yardstick.IN_README
    assert "old" not in text
    empty = yardstick.readme(text, [])
    assert "mlx-lm" not in empty and "##" not in empty
    assert yardstick.readme(empty, all_results) == text


def test_unfinished_run_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yardstick, "BUILD", tmp_path)
    checks = [outcome(f"wire.chat.{at}") for at in range(len(yardstick.CHECKS))]
    for name, server_results in {
        "mlx-lm": results(*checks),
        "rapid-mlx": {**results(*checks[1:]), "name": "rapid-mlx"},
        "vmlx": {**results(), "name": "vmlx", "problem": "it does not start"},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(server_results))
    shown = yardstick.results_of(["mlx-lm", "rapid-mlx", "vmlx"])
    assert [result["name"] for result in shown] == ["mlx-lm", "vmlx"]
    assert "No server has been through all checks yet" in yardstick.written([])


def test_server_that_cannot_be_installed_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are."""

    def install(place: Path, _: object) -> None:
        raise subprocess.CalledProcessError(1, ["uv", "pip", "install", str(place)])

    monkeypatch.setattr(yardstick, "BUILD", tmp_path)
    monkeypatch.setattr(yardstick, "install", install)
    server_results = yardstick.measured("mlx-lm", keep=False, resume=False)
    assert yardstick.summary(server_results) == [
        "not checked",
        "it cannot be installed on this machine",
    ]
    assert "Not checked: it cannot be installed" in yardstick.section(server_results)
    assert yardstick.row(server_results)[:3] == ("mlx-lm", "–", "not checked")
