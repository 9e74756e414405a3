"""The command line as a program: help, version, failures, pipes, what it passes to the host."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_mlx_harmony import __version__, _startup, host
from vllm_mlx_harmony.__main__ import main

PROGRAM = (sys.executable, "-m", "vllm_mlx_harmony")
REPOSITORY = Path(__file__).resolve().parents[3]


RunMain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str]) -> RunMain:
    """Runs a command line; returns its exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as exited:
            code = int(exited.code or 0)
        return code, *capsys.readouterr()

    return run


def test_help_names_every_command(run_main: RunMain) -> None:
    code, shown, _ = run_main("--help")
    assert code == 0
    for command in ("serve", "connect", "demo", "doctor", "verify", "bench", "render", "parse"):
        assert re.search(rf"^    {command} ", shown, re.MULTILINE)


def test_version_is_printed() -> None:
    """In a process of its own."""
    shown = subprocess.run([*PROGRAM, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"vllm-mlx-harmony {__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("render",), ("parse", "--what")])
def test_wrong_command_line_exits_with_2(run_main: RunMain, arguments: tuple[str, ...]) -> None:
    code, _, errors = run_main(*arguments)
    assert code == 2
    assert "usage: vllm-mlx-harmony" in errors


WRONG: dict[str, tuple[str, str]] = {
    "a directory": ("render .", "Is a directory"),
    "an empty file": ("render /dev/null", "is not JSON"),
    "no window": ("connect codex --model m --context -5", "'-5' is not a number of tokens"),
    "a small window": ("connect codex --model m --context 3", "'3' is not a number of tokens"),
    "no number": ("connect codex --model m --context x", "'x' is not a number of tokens"),
    "no address": ("connect codex --model m --context 9999 --url foo", "'foo' is not a server"),
    "no port": ("connect codex --model m --context 9999 --url http://a:99999", "not a server"),
    "an empty model": ("connect codex --model '' --context 9999", "--model is empty"),
    "no server": ("verify", "give the URL of a server, or --stand-in"),
    "a silent server": ("verify http://127.0.0.1:9", "no server answers at http://127.0.0.1:9"),
    "no URL": ("verify nonsense", "'nonsense' is not a server's address"),
    "no check": ("verify http://a --only nothing", "no check is called nothing"),
    "no repetition": ("verify http://a --repeat 0", "'0' is not a positive number"),
    "doctor": ("doctor --port 99999", "'99999' is not a port"),
    "the stand-in's port": ("gateway stand-in --port 99999", "'99999' is not a port"),
    "the stand-in's key": ("gateway stand-in --key ''", "--key is empty"),
}
"""What is typed, and what is on standard error."""


@pytest.mark.parametrize(("typed", "expected"), WRONG.values(), ids=WRONG)
def test_impossible_command_is_one_line(run_main: RunMain, typed: str, expected: str) -> None:
    code, _, errors = run_main(*shlex.split(typed))
    assert code == 2
    assert expected in errors and "Traceback" not in errors


LINUX = pytest.mark.needs("linux")
ODD = [
    pytest.param("render - <&-", 2, "standard input is closed", id="no input"),
    pytest.param("parse FILE >&-", 0, "", id="no output"),
    pytest.param("parse nowhere 2>&-", 2, "", id="no errors"),
    pytest.param("parse FILE >/dev/full", 2, "No space left", id="a full disk", marks=LINUX),
]
"""What is typed in a shell, the exit code, and what is on standard error."""


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize(("typed", "code", "expected"), ODD)
def test_odd_streams_cause_no_traceback(
    typed: str, code: int, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "completion"
    file.write_text("<|channel|>final<|message|>Good day.<|return|>")
    program = " ".join(map(shlex.quote, PROGRAM))
    line = f"{program} {typed.replace('FILE', shlex.quote(str(file)))}"
    result = subprocess.run(
        line, shell=True, capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr and expected in result.stderr


def test_closed_output_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "completion"
    file.write_text("<|channel|>final<|message|>" + "a line\n" * 30_000)
    command = subprocess.Popen(
        [*PROGRAM, "parse", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert command.stdout is not None
    assert command.stderr is not None
    command.stdout.readline()
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait(30) == 1


def test_missing_library_is_an_error_with_a_fix(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['openai_harmony'] = None; from vllm_mlx_harmony import __main__;"
        f"sys.exit(__main__.main(['parse', {str(tmp_path / 'c')!r}]))"
    )
    (tmp_path / "c").write_text("<|return|>")
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "pip install openai-harmony" in result.stderr


# --- serve calls the host


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines with which the host was started."""
    started: list[list[str]] = []
    module = types.ModuleType("vllm_mlx.cli")
    monkeypatch.setattr(module, "main", lambda: started.append(sys.argv), raising=False)
    monkeypatch.setitem(sys.modules, "vllm_mlx", types.ModuleType("vllm_mlx"))
    monkeypatch.setitem(sys.modules, "vllm_mlx.cli", module)
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.delenv(_startup.SWITCH, raising=False)
    return started


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--help"],
        ["some/model", "--port", "1234"],
        ["some/model", "--tool-call-parser", "gpt-oss"],
        ["--models-config", "models.yaml", "--", "x"],
    ],
)
def test_serve_puts_the_flag_before_the_arguments(
    given: list[str], command_line: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[bool] = []
    monkeypatch.setattr(host, "install", lambda: installed.append(True))
    assert main(["serve", *given]) == 0
    assert installed == [True]
    assert command_line == [["vllm-mlx", "serve", "--tool-call-parser", "harmony", *given]]


def test_serve_knows_the_models_of_launch(
    command_line: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "install", lambda: None)
    assert main(["serve", "20b", "--port", "1"]) == 0
    assert main(["serve", "--port", "20b"]) == 0
    first, second = command_line
    model = ["mlx-community/gpt-oss-20b-MXFP4-Q8", "--served-model-name", "gpt-oss-20b"]
    assert first[4:] == [*model, "--port", "1"]
    assert second[4:] == ["--port", "20b"]


@pytest.mark.parametrize(
    "given",
    [
        ["m", "--tool-urls", "https://a,https://b=c", "--port", "1"],
        ["--tool-urls=https://a,https://b=c", "m", "--port", "1"],
    ],
)
def test_serve_puts_patterns_of_urls_in_the_environment(
    given: list[str], command_line: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "install", lambda: None)
    monkeypatch.setenv(TOOL_URLS, "before")
    assert main(["serve", *given]) == 0
    assert command_line == [
        ["vllm-mlx", "serve", "--tool-call-parser", "harmony", "m", "--port", "1"]
    ]
    assert os.environ[TOOL_URLS] == "https://a,https://b=c"
    assert main(["serve", "m", "--tool-urls"]) == 2


TOOL_URLS = "VLLM_MLX_HARMONY_TOOL_URLS"


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("-h", 0), ("--what", 2)])
def test_serve_help_has_our_flags(
    argument: str,
    code: int,
    command_line: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def parse_for_host() -> None:
        parser = argparse.ArgumentParser("vllm-mlx")
        serve = parser.add_subparsers().add_parser("serve")
        serve.add_argument("--tool-call-parser")
        parser.parse_args(sys.argv[1:])

    monkeypatch.setattr(host, "install", lambda: None)
    monkeypatch.setattr(sys.modules["vllm_mlx.cli"], "main", parse_for_host)
    with pytest.raises(SystemExit) as exited:
        main(["serve", argument])
    assert exited.value.code == code
    shown = capsys.readouterr().out
    assert ("--tool-call-parser" in shown) is (code == 0)
    for flag in (
        *("--id-endpoint ", "--log-file FILE ", "--tool-urls PATTERNS", "--inspect "),
        *("--speculate MODE ", "--web-search ENGINE"),
    ):
        assert (f"\n  {flag}" in shown) is (code == 0)


def test_serve_installs_before_it_runs(
    command_line: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[bool] = []
    served = sys.modules["vllm_mlx.cli"]

    def original(args: object) -> None:
        """The host's own."""

    served.serve_command = original  # type: ignore[attr-defined]
    served.main = lambda: installed.append(served.serve_command is not original)  # type: ignore[attr-defined]
    try:
        assert main(["serve", "m"]) == 0
    finally:
        host.uninstall()
    assert installed == [True]
    assert served.serve_command is original  # type: ignore[attr-defined]


def test_serve_fails_if_switched_off(
    command_line: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(_startup.SWITCH, "0")
    assert main(["serve", "m"]) == 2
    assert _startup.SWITCH in capsys.readouterr().err
    assert command_line == []


def test_serve_without_a_host_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(_startup.SWITCH, raising=False)
    monkeypatch.setitem(sys.modules, "vllm_mlx", None)
    monkeypatch.setitem(sys.modules, "vllm_mlx.cli", None)
    assert main(["serve", "m"]) == 2
    assert "pip install vllm-mlx" in capsys.readouterr().err


def test_demo_without_mlx_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm_mlx", types.ModuleType("vllm_mlx"))
    monkeypatch.setitem(sys.modules, "mlx", None)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.setattr(sys, "platform", "linux")
    assert main(["demo"]) == 2
    assert "pip install 'vllm-mlx-harmony-server[cpu]'" in capsys.readouterr().err
