"""Installing is all a user does: every later interpreter has the import hook.

The host in most rows is a few lines in the shape of the real one's command line, so that an
environment takes a second to make; the last rows use the real one from where the tests run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]
BIN = "Scripts" if os.name == "nt" else "bin"

HOST_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "vllm-mlx"
version = "0.6.0"

[project.scripts]
vllm-mlx = "vllm_mlx.cli:main"
"""

HOST_CLI = """\
import argparse

def serve_command(args):
    print("host serves", args.tool_call_parser)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--tool-call-parser")
    serve_command(parser.parse_args())

if __name__ == "__main__":
    main()
"""

# What activation says in an environment without openai-harmony: it was there, and open.
GATE_OPENED = "vllm-mlx-harmony: not active: openai-harmony cannot be imported"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    python = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}
    unset = {*python, "VIRTUAL_ENV", "VLLM_MLX_HARMONY"}
    clean = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [str(word) for word in command],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def succeed(*command: str | Path, **environment: str) -> str:
    done = run(*command, **environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def uv() -> str:
    found = shutil.which("uv")
    assert found, "these tests need uv: pip install uv"
    return found


GITHUB = {"GITHUB_SERVER_URL": "https://example.com", "GITHUB_REPOSITORY": "owner/name"}


def build(uv: str, project: Path, out: Path) -> Path:
    succeed(uv, "build", "--wheel", "--out-dir", out, project, **GITHUB)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheel(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(uv, ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def host_wheel(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("host")
    (project / "vllm_mlx").mkdir()
    (project / "vllm_mlx" / "__init__.py").write_text("")
    (project / "vllm_mlx" / "cli.py").write_text(HOST_CLI)
    (project / "pyproject.toml").write_text(HOST_PROJECT)
    return build(uv, project, tmp_path_factory.mktemp("host-wheel"))


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own."""

    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / BIN / "python"

    @property
    def site(self) -> Path:
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(succeed(self.python, "-c", code).strip())

    def files(self) -> set[str]:
        """All but what Python and pip compile of their own."""
        found = (path.relative_to(self.directory) for path in self.directory.rglob("*"))
        return {str(path) for path in found if "harmony" in str(path) or _kept(path)}

    def serve(self, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run(self.directory / BIN / "vllm-mlx", "serve", *flags, **environment)


@pytest.fixture
def environment(uv: str, tmp_path: Path, host_wheel: Path) -> Environment:
    """With the small host in it, and pip; without openai-harmony."""
    succeed(uv, "venv", "--seed", "--python", sys.executable, tmp_path / "venv")
    made = Environment(tmp_path / "venv")
    succeed(uv, "pip", "install", "--no-deps", "--python", made.python, host_wheel)
    return made


def _kept(path: Path) -> bool:
    return "__pycache__" not in path.parts


class Uv:
    """Installs as `uv pip` does."""

    def __init__(self, uv: str, environment: Environment) -> None:
        self._uv, self._python = uv, environment.python

    def install(self, *what: str | Path) -> None:
        succeed(self._uv, "pip", "install", "--no-deps", "--python", self._python, *what)

    def uninstall(self) -> None:
        succeed(self._uv, "pip", "uninstall", "--python", self._python, "vllm-mlx-harmony")


class Pip:
    """Installs as `pip` does."""

    def __init__(self, uv: str, environment: Environment) -> None:
        self._pip = (environment.python, "-m", "pip", "--disable-pip-version-check", "-q")

    def install(self, *what: str | Path) -> None:
        succeed(*self._pip, "install", "--no-deps", *what)

    def uninstall(self) -> None:
        succeed(*self._pip, "uninstall", "--yes", "vllm-mlx-harmony")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("installer", [Uv, Pip])
def test_installing_registers_and_uninstalling_leaves_nothing(
    uv: str, environment: Environment, wheel: Path, installer: type[Uv | Pip], kind: str
) -> None:
    tool = installer(uv, environment)
    environment.serve()  # whatever the first start of an interpreter writes, it has written
    before = environment.files()
    tool.install(*([wheel] if kind == "wheel" else ["--editable", ROOT]))

    asked = environment.serve("--tool-call-parser", "harmony")
    assert asked.stdout == "host serves harmony\n"
    assert asked.stderr.startswith(GATE_OPENED)
    as_module = run(
        *(environment.python, "-m", "vllm_mlx.cli", "serve", "--tool-call-parser", "gpt-oss")
    )
    assert as_module.stdout == "host serves gpt-oss\n"
    assert as_module.stderr.startswith(GATE_OPENED)
    for flags, variables in [
        (("--tool-call-parser", "qwen"), {}),
        ((), {}),
        (("--tool-call-parser", "harmony"), {"VLLM_MLX_HARMONY": "0"}),
    ]:
        quiet = environment.serve(*flags, **variables)
        assert quiet.stdout.startswith("host serves")
        assert quiet.stderr == ""

    tool.uninstall()
    assert environment.files() - before == set()
    after = environment.serve("--tool-call-parser", "harmony")
    assert (after.stdout, after.stderr) == ("host serves harmony\n", "")


def test_tool_installs_are_registered(
    uv: str, tmp_path: Path, wheel: Path, host_wheel: Path
) -> None:
    tools = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    arguments = ("--python", sys.executable, "--with", wheel, host_wheel)
    succeed(uv, "tool", "install", *arguments, **tools)
    asked = run(tmp_path / "bin" / "vllm-mlx", "serve", "--tool-call-parser", "harmony")
    # openai-harmony is there as a dependency, so it gets as far as checking this small host.
    assert asked.returncode == 2
    assert "vllm-mlx-harmony: error: " in asked.stderr
    assert "vllm_mlx.server" in asked.stderr
    assert run(tmp_path / "bin" / "vllm-mlx", "serve").stdout == "host serves None\n"


def test_half_removed_python_still_starts(uv: str, environment: Environment, wheel: Path) -> None:
    Uv(uv, environment).install(wheel)
    shutil.rmtree(environment.site / "vllm_mlx_harmony")
    assert environment.serve("--tool-call-parser", "harmony").stdout == "host serves harmony\n"


def names(archive: Path) -> Iterator[str]:
    with zipfile.ZipFile(archive) as opened:
        yield from opened.namelist()


def test_the_wheel_holds_what_it_needs_and_nothing_else(wheel: Path) -> None:
    held = set(names(wheel))
    package = ROOT / "vllm_mlx_harmony"
    sources = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    startup = {"vllm_mlx_harmony_startup.pth", "vllm_mlx_harmony_startup.start"}
    assert {name for name in held if ".dist-info/" not in name} == sources | startup
    assert "vllm_mlx_harmony/py.typed" in held
    assert "vllm_mlx_harmony/data/o200k_base.xz" in held


def test_its_links_lead_to_the_repository(wheel: Path) -> None:
    (name,) = (each for each in names(wheel) if each.endswith(".dist-info/METADATA"))
    metadata = zipfile.ZipFile(wheel).read(name).decode()
    assert "\nProject-URL: Issues, https://example.com/owner/name/issues\n" in metadata
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert "https://example.com/owner/name/blob/main/docs/README.md" not in links, "a version's own"
    assert any(link.endswith("/docs/mac.md") for link in links)
    assert [link for link in links if not link.startswith("https://")] == []


def test_every_entry_point_can_be_loaded(wheel: Path) -> None:
    pytest.importorskip("vllm_mlx")
    source = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from importlib import metadata\n"
        "(dist,) = metadata.distributions(name='vllm-mlx-harmony', path=[sys.argv[1]])\n"
        "for entry in dist.entry_points: entry.load()\n"
        "print(len(dist.entry_points))"
    )
    # A wheel is importable as it is, as long as it is pure.
    assert succeed(sys.executable, "-c", source, wheel) == "8\n"


# --- the real host ----------------------------------------------------------------------------


@pytest.fixture
def beside_the_host(uv: str, tmp_path: Path, wheel: Path) -> Environment:
    """The wheel, installed; the real host and the rest from the environment the tests run in."""
    pytest.importorskip("vllm_mlx")
    succeed(uv, "venv", "--python", sys.executable, tmp_path / "venv")
    made = Environment(tmp_path / "venv")
    Uv(uv, made).install(wheel)
    (made.site / "zz_host.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return made


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """A directory that looks like a model, but not like a Harmony one."""
    directory = tmp_path / "model"
    directory.mkdir()
    vocabulary = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
    (directory / "tokenizer.json").write_text(json.dumps({"model": vocabulary}))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


COMPILED = {name: os.environ[name] for name in ("PYTHONPYCACHEPREFIX",) if name in os.environ}
"""What is compiled of the real host need not be compiled again; nothing here looks for it."""

MAIN = "import sys; sys.argv[0] = 'vllm-mlx'; from vllm_mlx.cli import main; main()"


@pytest.mark.parametrize("way", [("-c", MAIN), ("-m", "vllm_mlx.cli")], ids=["script", "-m"])
def test_the_real_host_is_changed_by_the_flag_alone(
    beside_the_host: Environment, other_model: Path, tmp_path: Path, way: tuple[str, str]
) -> None:
    command = (beside_the_host.python, *way, "serve", other_model)
    home = {"HOME": str(tmp_path / "home"), **COMPILED}
    done = run(*command, "--tool-call-parser", "harmony", **home)
    assert done.returncode == 2, done.stderr
    assert "is not a gpt-oss (Harmony) model" in done.stderr.splitlines()[-1]
    without = run(*command, "--tool-call-parser", "qwen", **home)
    assert without.returncode not in {0, 2}  # there is nothing to load in that directory
    assert "vllm-mlx-harmony" not in without.stderr


def test_the_doctor_finds_everything_in_place(beside_the_host: Environment, tmp_path: Path) -> None:
    script = beside_the_host.directory / BIN / "vllm-mlx-harmony"
    home = {"HOME": str(tmp_path / "home"), **COMPILED}
    report = succeed(script, "doctor", "--verbose", **home)
    assert "vllm_mlx_harmony_startup.pth" in report
    assert "✗" not in report
