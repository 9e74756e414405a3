"""The demo: run with and without batching, not on a terminal, and interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from xml.etree import ElementTree

import pytest
from waiting import wait_until

from vllm_mlx_harmony.cli import demo
from vllm_mlx_harmony.cli.parse import parse
from vllm_mlx_harmony.cli.process import Running
from vllm_mlx_harmony.core import vocab

Serving = Callable[..., AbstractContextManager[Running]]

pytestmark = pytest.mark.served
REPOSITORY = Path(__file__).resolve().parents[3]
PICTURE = REPOSITORY / "docs" / "pictures" / "demo.svg"
COLUMNS, DATE = 100, "2026-11-23"
"""Those of the picture (`ci/make_picture.py`)."""
SVG = "{http://www.w3.org/2000/svg}"


def start(tmp_path: Path) -> subprocess.Popen[str]:
    """The demo with a home of its own."""
    paths = filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
    own = {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / ".cache"),  # where the stand-in is written
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_mlx_harmony", "demo"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **own},
    )


def servers(home: Path) -> list[int]:
    """Processes that serve the stand-in of this home."""
    command = ["ps", "-wwaxo", "pid=,command="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = (line.split(maxsplit=1) for line in listed.stdout.splitlines())
    return [int(pid) for pid, line in lines if str(home) in line and " serve " in line]


@pytest.mark.parametrize(
    ("flags", "columns"), [((), 80), (("--continuous-batching",), 100)], ids=["simple", "batched"]
)
def test_demo_shows_what_the_model_generates(
    forked: Serving,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    columns: int,
) -> None:
    """Its server is forked. The leg `demo` runs it by its own command, and fails unless
    the client saw what the model generated."""
    monkeypatch.setattr(demo, "serving", forked)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("VLLM_MLX_HARMONY_DATE", DATE)
    assert demo.run(batched=bool(flags)) == 0
    out = capsys.readouterr().out
    assert "stand-in" in out
    assert "\x1b" not in out, "no colours in a pipe"
    assert max(map(len, out.splitlines())) <= columns
    right = [
        line[columns // 2 :] for line in out.splitlines()
    ]  # where two boxes stand side by side
    shown = re.sub(r"[\s│|]+", "", out + "".join(right))
    for script in (demo.CALLS, demo.ANSWERS):
        for message in parse(demo.ids_of(script))[0]:
            assert re.sub(r"[\s|]+", "", message.text) in shown
    if columns == COLUMNS:
        texts = (element.text or "" for element in ElementTree.parse(PICTURE).iter(f"{SVG}text"))
        assert characters("".join(texts)) == characters(out), "run ci/make_picture.py"


def characters(printed: str) -> list[str]:
    """The characters of the turns, sorted: how many tokens a delta has, and so where a line ends,
    differs from run to run."""
    turns = printed[printed.index("asks") :]
    return sorted(re.sub(r"[\s|─│╭╮╰╯]", "", turns))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT may be ignored where tests run in the background, and children would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "kill"])
def test_interrupted_demo_ends_its_server(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path)
    wait_until(lambda: servers(tmp_path) or process.poll() is not None, "the server")
    assert servers(tmp_path), "the demo has ended"
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, servers(tmp_path)) == (130, []), out
    assert "Traceback" not in out


def test_unwritable_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the home is read-only, the stand-in is written to that of the server."""
    occupied = tmp_path / "taken"
    occupied.touch()
    monkeypatch.setattr(vocab, "cache_dir", lambda: occupied / "cache")
    assert demo.written("standin", demo.SCRIPTS, tmp_path) == tmp_path / "standin"
    assert (tmp_path / "standin" / "config.json").is_file()
