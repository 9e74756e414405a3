"""Mistakes of operators: each is one line on standard error and exit code 2, before serving."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="needs the host")

import vllm_mlx.cli
import vllm_mlx.server

from vllm_mlx_harmony import host, standin
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host import engine_factories

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Starts a server with these arguments, and returns the line on standard error."""

    def start(*arguments: str, parser: str = "harmony") -> str:
        namespace: dict[str, Any] = {"serve_command": lambda _: pytest.fail("it was served")}
        host.install(namespace)
        command = ["serve", *arguments, "--tool-call-parser", parser]
        with pytest.raises(SystemExit) as ended:
            namespace["serve_command"](vllm_mlx.cli.create_parser().parse_args(command))
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("vllm-mlx-harmony: error: ")
        return line.removeprefix("vllm-mlx-harmony: error: ")

    return start


FLAGS: dict[str, tuple[list[str], str]] = {
    "no directory": (["./nowhere"], "./nowhere is not a directory"),
    "no absolute directory": (["/no/where"], "/no/where is not a directory"),
    "three parts": (["no/such/model"], "no/such/model is not a directory"),
    "a file": ([__file__], "is not a directory"),
    "no model in it": ([str(Path(__file__).parent)], "has no config.json that can be read"),
    "a large port": (["MODEL", "--port", "99999"], "--port: 99999 is not a number from 0 to 65535"),
    "a negative port": (["MODEL", "--port", "-1"], "--port: -1 is not"),
    "an empty key": (["MODEL", "--api-key", ""], "--api-key is empty"),
    "a blank key": (["MODEL", "--api-key", "  "], "--api-key is empty"),
    "a key with a line break": (["MODEL", "--api-key", "secret\n"], "not printable ASCII"),
    "a key with an umlaut": (["MODEL", "--api-key", "schlüssel"], "not printable ASCII"),
}


@pytest.mark.parametrize(("arguments", "expected"), FLAGS.values(), ids=FLAGS)
def test_invalid_argument_is_rejected(
    refused: Refused, arguments: list[str], expected: str
) -> None:
    assert expected in refused(*arguments)


VARIABLES: dict[str, tuple[str, str]] = {
    "DATE": ("tomorrow", "'tomorrow' is not a date"),
    "STORE": ("http://x", "'http://x' is neither a file nor the URL of a Redis"),
    "MAX_BODY": ("many", "'many' is not a number such as 32 or 64M"),
    "QUEUE": ("many", "'many' is not a number"),
    "CACHE": ("lots", "'lots' is not a number"),
    "REPLAY": ("64M", "'64M' is not a number"),
    "GRAMMAR": ("perhaps", "'perhaps' is not one of"),
    "SPECULATE": ("on", "'on' is not one of"),
    "STATUS_LINE": ("off", "'off' is not one of"),
    "TOOL_URLS": ("https://a.example", "has no effect without VLLM_MLX_HARMONY_TOOLS=on"),
    "TOOLS": ("on", "requires --mcp-config"),
}


@pytest.mark.parametrize(("name", "value", "expected"), [(n, *row) for n, row in VARIABLES.items()])
def test_invalid_variable_is_rejected(
    refused: Refused,
    name: str,
    value: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"VLLM_MLX_HARMONY_{name}", value)
    line = refused("MODEL")
    assert line.startswith(f"VLLM_MLX_HARMONY_{name}") and expected in line
    assert not [*tmp_path.iterdir()], "nothing is created"


def test_unknown_search_engine_is_an_error(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the error names a package that the browser needs."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_WEB_SEARCH", "google")
    line = refused("MODEL")
    assert line.startswith(("--web-search: 'google' is not one of ddgs", "--web-search needs the"))


@pytest.mark.parametrize("model", ["MODEL", "org/gpt-oss-20b", "org/gpt.oss_20b-MXFP4-Q8"])
def test_repository_is_not_taken_for_a_directory(refused: Refused, model: str) -> None:
    assert "--port" in refused(model, "--port", "99999")


# --- Models that cannot be loaded


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.write_tiny(tmp_path_factory.mktemp("tiny"), width=16)


def _truncate(file: Path, part: float) -> None:
    with file.open("r+b") as weights:
        weights.truncate(int(file.stat().st_size * part))


MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), "it has no tokenizer.json"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "No safetensors"),
    "half the weights": (lambda model: _truncate(model / "model.safetensors", 0.5), ""),
    "half a header": (lambda model: _truncate(model / "model.safetensors", 0.001), "incomplete"),
    "another architecture": (
        lambda model: (model / "config.json").write_text('{"model_type": "none"}'),
        "none",
    ),
}


@pytest.mark.parametrize(("damage", "expected"), MODELS.values(), ids=MODELS)
def test_unloadable_model_is_rejected(
    damage: Callable[[Path], object],
    expected: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    damage(model)
    monkeypatch.setattr(vllm_mlx.server, "_engine", object())
    with pytest.raises(HostError) as raised:
        engine_factories.load_model(lambda *_, **__: None)(str(model))
    message = raised.value.message
    assert message.startswith(f"{model} cannot be loaded: ") and expected in message
    assert "\n" not in message


def test_failed_download_is_an_error() -> None:
    def download(name: str) -> Path:
        raise RuntimeError(f"Failed to download {name!r}.\nRun the same command again.")

    with pytest.raises(HostError) as raised:
        engine_factories.ensure_model_downloaded(download)("org/name")
    assert raised.value.message == "Failed to download 'org/name'. Run the same command again."
