"""Installation from wheels and editable projects: every later interpreter has the import hook.

Most tests use a stub of the host's command line, so that an environment takes a second to create.
The last ones use the real host of the environment that runs the tests.
"""

from __future__ import annotations

import csv
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
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "packaging/vllm-mlx-harmony"
VERIFY = ROOT / "packaging/harmony-verify"
NAMES = ("vllm-mlx-harmony", "vllm-mlx-harmony-server")
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

# The message of an activation without openai-harmony, which proves that activation was attempted.
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


def output_of(*command: str | Path, **environment: str) -> str:
    process = run(*command, **environment)
    assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
    return process.stdout


@pytest.fixture(scope="session")
def uv() -> str:
    found = shutil.which("uv")
    assert found, "these tests need uv: pip install uv"
    return found


GITHUB = {"GITHUB_SERVER_URL": "https://example.com", "GITHUB_REPOSITORY": "owner/name"}


def build(uv: str, project: Path, out: Path) -> Path:
    output_of(uv, "build", "--wheel", "--out-dir", out, project, **GITHUB)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def server(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with the package."""
    return build(uv, ROOT, tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="session")
def plugin(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with the startup files."""
    return build(uv, PLUGIN, tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="session")
def host_wheel(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("host")
    (project / "vllm_mlx").mkdir()
    (project / "vllm_mlx" / "__init__.py").write_text("")
    (project / "vllm_mlx" / "cli.py").write_text(HOST_CLI)
    (project / "pyproject.toml").write_text(HOST_PROJECT)
    return build(uv, project, tmp_path_factory.mktemp("host-wheel"))


@dataclass(frozen=True)
class VirtualEnvironment:
    """A virtual environment of its own."""

    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / BIN / "python"

    @property
    def site(self) -> Path:
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(output_of(self.python, "-c", code).strip())

    def files(self) -> set[str]:
        """All files but the bytecode of other packages."""
        paths = (path.relative_to(self.directory) for path in self.directory.rglob("*"))
        return {str(path) for path in paths if "harmony" in str(path) or _is_source(path)}

    def serve(self, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run(self.directory / BIN / "vllm-mlx", "serve", *flags, **environment)


@pytest.fixture
def environment(uv: str, tmp_path: Path, host_wheel: Path) -> VirtualEnvironment:
    """Has the stub host and pip, but not openai-harmony."""
    output_of(uv, "venv", "--seed", "--python", sys.executable, tmp_path / "venv")
    environment = VirtualEnvironment(tmp_path / "venv")
    output_of(uv, "pip", "install", "--no-deps", "--python", environment.python, host_wheel)
    return environment


def _is_source(path: Path) -> bool:
    return "__pycache__" not in path.parts


class Uv:
    """Installs as `uv pip` does."""

    def __init__(self, uv: str, environment: VirtualEnvironment) -> None:
        self._uv, self._python = uv, environment.python

    def install(self, *packages: str | Path) -> None:
        output_of(self._uv, "pip", "install", "--no-deps", "--python", self._python, *packages)

    def uninstall(self, *names: str) -> None:
        output_of(self._uv, "pip", "uninstall", "--python", self._python, *names)


class Pip:
    """Installs as `pip` does."""

    def __init__(self, uv: str, environment: VirtualEnvironment) -> None:
        self._pip = (environment.python, "-m", "pip", "--disable-pip-version-check", "-q")

    def install(self, *packages: str | Path) -> None:
        output_of(*self._pip, "install", "--no-deps", *packages)

    def uninstall(self, *names: str) -> None:
        output_of(*self._pip, "uninstall", "--yes", *names)


def installable(kind: str, project: Path, wheel: Path) -> tuple[str | Path, ...]:
    """The installer's arguments for a project, as a wheel or editable."""
    return (wheel,) if kind == "wheel" else ("--editable", project)


@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("installer", [Uv, Pip])
def test_install_registers_plugin_and_uninstall_leaves_nothing(
    uv: str,
    environment: VirtualEnvironment,
    server: Path,
    plugin: Path,
    installer: type[Uv | Pip],
    kind: str,
) -> None:
    tool = installer(uv, environment)
    environment.serve()  # the first start writes files of its own
    before = environment.files()
    tool.install(*installable(kind, ROOT, server), *installable(kind, PLUGIN, plugin))

    process = environment.serve("--tool-call-parser", "harmony")
    assert process.stdout == "host serves harmony\n"
    assert process.stderr.startswith(GATE_OPENED)
    module_process = run(
        *(environment.python, "-m", "vllm_mlx.cli", "serve", "--tool-call-parser", "gpt-oss")
    )
    assert module_process.stdout == "host serves gpt-oss\n"
    assert module_process.stderr.startswith(GATE_OPENED)
    for flags, variables in [
        (("--tool-call-parser", "qwen"), {}),
        ((), {}),
        (("--tool-call-parser", "harmony"), {"VLLM_MLX_HARMONY": "0"}),
    ]:
        quiet = environment.serve(*flags, **variables)
        assert quiet.stdout.startswith("host serves")
        assert quiet.stderr == ""

    tool.uninstall(*NAMES)
    assert environment.files() - before == set()
    after = environment.serve("--tool-call-parser", "harmony")
    assert (after.stdout, after.stderr) == ("host serves harmony\n", "")


VERSIONS = """\
import sys
from importlib import metadata
import vllm_mlx_harmony
for name in sys.argv[1:]:
    print(metadata.version(name) == vllm_mlx_harmony.__version__, end=" ")
"""


@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("installer", [Uv, Pip])
def test_server_survives_uninstall_of_plugin(
    uv: str, tmp_path: Path, server: Path, plugin: Path, installer: type[Uv | Pip], kind: str
) -> None:
    output_of(uv, "venv", "--seed", "--python", sys.executable, tmp_path / "venv")
    environment = VirtualEnvironment(tmp_path / "venv")
    tool = installer(uv, environment)
    tool.install(*installable(kind, ROOT, server))

    def assert_works_alone() -> None:
        program = environment.directory / BIN / "vllm-mlx-harmony"
        assert output_of(program, "--version").startswith("vllm-mlx-harmony ")
        python = (environment.python, "-c", VERSIONS)
        assert output_of(*python, "vllm-mlx-harmony-server").split() == ["True"]
        assert "PackageNotFoundError" in run(*python, "vllm-mlx-harmony").stderr
        assert not list(environment.site.glob("vllm_mlx_harmony_startup*"))
        assert not (environment.site / "vllm_mlx").exists()

    assert_works_alone()
    alone = {file for file in environment.files() if "__pycache__" not in file}
    tool.install(*installable(kind, PLUGIN, plugin))
    assert output_of(environment.python, "-c", VERSIONS, *NAMES).split() == ["True", "True"]
    assert (environment.site / "vllm_mlx_harmony_startup.pth").exists()
    server_files, plugin_files = (recorded_files(environment, name) for name in NAMES)
    assert server_files & plugin_files == set()

    tool.uninstall("vllm-mlx-harmony")
    assert {file for file in environment.files() if "__pycache__" not in file} == alone
    assert_works_alone()


def recorded_files(environment: VirtualEnvironment, name: str) -> set[str]:
    """The files that a distribution owns."""
    (record,) = environment.site.glob(f"{name.replace('-', '_')}-[0-9]*.dist-info/RECORD")
    return {row[0] for row in csv.reader(record.read_text("utf-8").splitlines())}


def test_uv_tool_install_is_registered(
    uv: str, tmp_path: Path, server: Path, plugin: Path, host_wheel: Path
) -> None:
    tools = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    wheels = ("--with", plugin, "--find-links", server.parent)
    programs = ("--with-executables-from", "vllm-mlx-harmony-server")
    output_of(
        uv, "tool", "install", "--python", sys.executable, *wheels, *programs, host_wheel, **tools
    )
    version = output_of(tmp_path / "bin" / "vllm-mlx-harmony", "--version")
    assert version.startswith("vllm-mlx-harmony ")
    process = run(tmp_path / "bin" / "vllm-mlx", "serve", "--tool-call-parser", "harmony")
    # openai-harmony is installed as a dependency, so activation proceeds to check the stub host.
    assert process.returncode == 2
    assert "vllm-mlx-harmony: error: " in process.stderr
    assert "vllm_mlx.server" in process.stderr
    assert run(tmp_path / "bin" / "vllm-mlx", "serve").stdout == "host serves None\n"


def test_python_starts_after_partial_removal(
    uv: str, environment: VirtualEnvironment, server: Path, plugin: Path
) -> None:
    Uv(uv, environment).install(server, plugin)
    shutil.rmtree(environment.site / "vllm_mlx_harmony")
    assert environment.serve("--tool-call-parser", "harmony").stdout == "host serves harmony\n"


def test_verify_runs_without_host_and_mlx(uv: str, tmp_path: Path, server: Path) -> None:
    """As `uvx harmony-verify` does: the command without a server, and the stand-in model."""
    wheel = build(uv, VERIFY, tmp_path / "wheel")
    assert contents(wheel) == set()
    output_of(uv, "venv", "--python", sys.executable, tmp_path / "venv")
    environment = VirtualEnvironment(tmp_path / "venv")
    links = ("--find-links", server.parent)
    output_of(uv, "pip", "install", *links, "--python", environment.python, wheel)
    for module in ("torch", "mlx", "numpy", "vllm_mlx", "tokenizers", "safetensors"):
        assert not (environment.site / module).exists()
    command = tmp_path / "venv" / BIN / "harmony-verify"
    process = run(command, "http://127.0.0.1:9")
    assert process.returncode == 2
    assert "no server answers at http://127.0.0.1:9" in process.stderr
    assert output_of(command, "--help").startswith("usage: harmony-verify ")
    model = tmp_path / "gpt-oss-20b-stand-in"
    assert str(model) in output_of(command, "--write-stand-in", model)
    assert {"config.json", "tokenizer.json", "standin_model.py"} <= {
        path.name for path in model.iterdir()
    }


def names(archive: Path) -> Iterator[str]:
    with zipfile.ZipFile(archive) as zipped:
        yield from zipped.namelist()


def contents(wheel: Path) -> set[str]:
    """The files that a wheel installs, without its metadata."""
    return {name for name in names(wheel) if ".dist-info/" not in name}


def metadata_of(wheel: Path) -> Message:
    (name,) = (entry for entry in names(wheel) if entry.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as zipped:
        return Parser().parsestr(zipped.read(name).decode())


def test_wheels_contain_required_files_only(server: Path, plugin: Path) -> None:
    files = contents(server)
    package = ROOT / "vllm_mlx_harmony"
    sources = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files == sources
    startup = {"vllm_mlx_harmony_startup.pth", "vllm_mlx_harmony_startup.start"}
    assert contents(plugin) == startup
    assert "vllm_mlx_harmony/py.typed" in files
    assert "vllm_mlx_harmony/data/o200k_base.xz" in files


def test_sdist_builds_both_wheels(uv: str, tmp_path: Path, server: Path, plugin: Path) -> None:
    output_of(uv, "build", "--sdist", "--out-dir", tmp_path, ROOT)
    (archive,) = tmp_path.glob("vllm_mlx_harmony_server-*.tar.gz")
    shutil.unpack_archive(archive, tmp_path)
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    assert contents(build(uv, unpacked, tmp_path / "server")) == contents(server)
    rebuilt = build(uv, unpacked / PLUGIN.relative_to(ROOT), tmp_path / "plugin")
    assert contents(rebuilt) == contents(plugin)
    requirements = [metadata_of(wheel).get_all("Requires-Dist") for wheel in (rebuilt, plugin)]
    assert requirements[0] == requirements[1]


def test_plugin_requires_server_of_its_version(server: Path, plugin: Path) -> None:
    plugin_metadata, server_metadata = metadata_of(plugin), metadata_of(server)
    requirements = [
        requirement
        for requirement in plugin_metadata.get_all("Requires-Dist", [])
        if requirement.startswith(NAMES[1])
    ]
    extras = plugin_metadata.get_all("Provides-Extra", [])
    assert requirements == [
        f"{NAMES[1]}=={server_metadata['Version']}",
        *(
            f"{NAMES[1]}[{extra}]=={server_metadata['Version']}; extra == '{extra}'"
            for extra in extras
        ),
    ]
    assert set(extras) == set(server_metadata.get_all("Provides-Extra", [])) - {
        "fast",
        "mlx",
        "test",
    }


@pytest.mark.parametrize("name", ["server", "plugin"])
def test_readme_links_lead_to_repository(name: str, request: pytest.FixtureRequest) -> None:
    metadata = metadata_of(request.getfixturevalue(name))
    assert "Issues, https://example.com/owner/name/issues" in metadata.get_all("Project-URL", [])
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert "https://example.com/owner/name/blob/main/docs/README.md" not in links, "a version's own"
    assert any(link.endswith("/docs/mac.md") for link in links)
    assert [link for link in links if not link.startswith("https://")] == []


def test_every_entry_point_can_be_loaded(server: Path, plugin: Path) -> None:
    pytest.importorskip("vllm_mlx")
    source = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from importlib import metadata\n"
        "dists = metadata.distributions(path=sys.argv[1:])\n"
        "entries = [entry for dist in dists for entry in dist.entry_points]\n"
        "for entry in entries: entry.load()\n"
        "print(len(entries))"
    )
    # A pure wheel can be imported without installation.
    assert output_of(sys.executable, "-c", source, server, plugin) == "8\n"


# --- the real host ----------------------------------------------------------------------------


@pytest.fixture
def installed_beside_host(
    uv: str, tmp_path: Path, server: Path, plugin: Path
) -> VirtualEnvironment:
    """The installed wheels, with the real host and all else of the tests' environment."""
    pytest.importorskip("vllm_mlx")
    output_of(uv, "venv", "--python", sys.executable, tmp_path / "venv")
    environment = VirtualEnvironment(tmp_path / "venv")
    Uv(uv, environment).install(server, plugin)
    (environment.site / "zz_host.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


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
"""Keeps the real host's bytecode cache, so that it is not compiled again."""

MAIN = "import sys; sys.argv[0] = 'vllm-mlx'; from vllm_mlx.cli import main; main()"


@pytest.mark.parametrize("way", [("-c", MAIN), ("-m", "vllm_mlx.cli")], ids=["script", "-m"])
def test_real_host_is_changed_only_by_flag(
    installed_beside_host: VirtualEnvironment,
    other_model: Path,
    tmp_path: Path,
    way: tuple[str, str],
) -> None:
    command = (installed_beside_host.python, *way, "serve", other_model)
    home = {"HOME": str(tmp_path / "home"), **COMPILED}
    process = run(*command, "--tool-call-parser", "harmony", **home)
    assert process.returncode == 2, process.stderr
    assert "is not a gpt-oss (Harmony) model" in process.stderr.splitlines()[-1]
    other_process = run(*command, "--tool-call-parser", "qwen", **home)
    assert other_process.returncode not in {0, 2}  # there is nothing to load in that directory
    assert "vllm-mlx-harmony" not in other_process.stderr


def test_doctor_finds_no_problem(installed_beside_host: VirtualEnvironment, tmp_path: Path) -> None:
    script = installed_beside_host.directory / BIN / "vllm-mlx-harmony"
    home = {"HOME": str(tmp_path / "home"), **COMPILED}
    report = run(script, "doctor", "--verbose", **home).stdout
    assert "vllm_mlx_harmony_startup.pth" in report
    problems = [line.split()[1] for line in report.splitlines() if "✗" in line]
    assert set(problems) <= {"disk", "memory"}, report  # these depend on the machine
