"""The script that runs the legs: what passes, what fails, and what is selected."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[3]
leg = importlib.import_module("leg")
legs = importlib.import_module("legs")

HERE = Path(sys.executable).parent.parent
THIS = legs.Environment("this")

TESTS = {
    "passes": "def test_it(): pass",
    "fails": "def test_it(): assert False",
    "skips": "import pytest\ndef test_it(): pytest.skip('no host')\ndef test_other(): pass",
    "skips the module": "import pytest\npytest.importorskip('no_such_module')\ndef test_it(): pass",
    "expects to fail": "import pytest\n@pytest.mark.xfail\ndef test_it(): assert False",
    "has no tests": "",
}


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own for environments and reports."""
    monkeypatch.setattr(leg, "BUILD", tmp_path / "legs")
    (tmp_path / "legs").mkdir()
    return tmp_path


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the environments that were installed: all are links to this one."""
    installed: list[str] = []

    def install(environment: Any, directory: Path) -> None:
        installed.append(environment.name)
        if not directory.exists():
            directory.symlink_to(HERE)

    rmtree = shutil.rmtree

    def remove(path: Path, **options: Any) -> None:
        path.unlink() if path.is_symlink() else rmtree(path, **options)

    monkeypatch.setattr(leg, "find_uv", lambda: "uv")  # it would be installed
    monkeypatch.setattr(leg, "install", install)
    monkeypatch.setattr(leg.shutil, "rmtree", remove)
    return installed


def run(entry: Any) -> Any:
    return leg.run(entry, leg.Environments([entry], keep=False))


@pytest.mark.nightly(sample=3)
@pytest.mark.once
@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("passes", ""),
        ("fails", "exit code 1"),
        ("skips", "no host"),
        ("skips the module", "no_such_module"),
        ("expects to fail", ""),
        ("has no tests", "exit code 5"),
    ],
)
def test_leg_passes_only_if_its_tests_ran(
    build: Path, installed: list[str], what: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (build / "test_it.py").write_text(TESTS[what])
    (build / "test_beside.py").write_text(TESTS["passes"] if TESTS[what] else "")
    command = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull)
    bare = (("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1"),)  # half of its start
    pytest_command = (*command, "--rootdir", str(build), str(build))
    entry = legs.Leg("x", "a leg", THIS, (pytest_command,), variables=bare)
    outcome = run(entry)
    assert outcome.result == ("failed" if problem else "passed"), outcome
    assert problem in outcome.problem
    capsys.readouterr()
    leg.summarise([outcome])
    summary = capsys.readouterr().out
    assert ("x: test_it.test_it\n" in summary and "assert False" in summary) == (what == "fails")


def test_program_that_is_not_installed_fails_its_leg_alone(
    build: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [
        legs.Leg("x", "a leg", THIS, (("no-such-program",),)),
        legs.Leg("y", "a leg", THIS, (("python", "-c", ""),)),
    ]
    monkeypatch.setattr(leg, "LEGS", both)
    outcomes: list[Any] = []
    monkeypatch.setattr(leg, "summarise", outcomes.extend)
    leg.main(["x", "y"])
    assert [outcome.result for outcome in outcomes] == ["failed", "passed"]
    assert "no-such-program" in outcomes[0].problem
    assert not (leg.BUILD / "this").exists()


def test_uv_that_cannot_be_installed_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leg, "output_of", lambda *arguments, **options: "")
    leg.find_uv.cache_clear()
    assert leg.main(["lint"]) == 2
    assert "uv" in capsys.readouterr().err


@pytest.mark.once
def test_failed_command_is_not_repeated(
    build: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even beside other legs: a race is a failure."""
    script = "import pathlib; p = pathlib.Path('seen'); p.write_text(p.read_text() + 'x'); 1 / 0"
    (build / "seen").write_text("")
    monkeypatch.setattr(leg, "REPOSITORY", build)
    both = [
        legs.Leg("x", "a leg", THIS, (("python", "-c", script),)),
        legs.Leg("y", "a leg", THIS, (("python", "-c", ""),)),
    ]
    monkeypatch.setattr(leg, "LEGS", both)
    assert leg.main(["x", "y"]) == 1
    assert (build / "seen").read_text() == "x"
    assert not (leg.BUILD / "this").exists()


class Row:
    """A test, as far as `tests/conftest.py` uses it for its marks."""

    def __init__(self, nodeid: str, mark: pytest.Mark) -> None:
        self.nodeid = nodeid
        self.own_markers = [mark]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.own_markers if mark.name == name), None)


@pytest.mark.parametrize(
    ("mark", "gate"),
    [
        (pytest.mark.nightly, []),
        (pytest.mark.nightly(sample=1), [0, 1, 2, 3, 4]),
        (pytest.mark.nightly(sample=2), [0, 2, 4]),
        (pytest.mark.nightly(sample=9), [0]),
        (pytest.mark.once, [0, 1, 2, 3, 4]),
    ],
)
def test_gate_has_every_nth_row(
    request: pytest.FixtureRequest, mark: pytest.MarkDecorator, gate: list[int]
) -> None:
    (conftest,) = (
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(REPOSITORY / "tests" / "conftest.py")
    )
    for name in "ab":
        rows = [Row(f"test_it.py::test_{name}[{number}]", mark.mark) for number in range(5)]
        conftest.keep_samples(rows)
        gate_rows = [
            number for number, row in enumerate(rows) if not row.get_closest_marker("nightly")
        ]
        assert gate_rows == gate


def test_parallel_legs_prefix_their_lines(
    build: Path,
    installed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    both = [
        legs.Leg(name, "a leg", THIS, (("python", "-c", "print('one\\ntwo')"),)) for name in "xy"
    ]
    monkeypatch.setattr(leg, "LEGS", both)
    assert leg.main(["x", "y"]) == 0
    printed = capfd.readouterr().out.splitlines()
    for name in "xy":
        assert [line[17:] for line in printed if line.startswith(f"{name} ") and "|" in line][
            1:
        ] == [
            "one",
            "two",
        ]
    assert leg.main(["x", "y", "--jobs", "1"]) == 0
    assert capfd.readouterr().out.splitlines().count("one") == 2


def test_legs_share_environments(
    build: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is installed once, and removed after the last leg that uses it, unless it is kept."""
    check = ("python", "-c", "import os; assert os.path.exists(os.environ['VIRTUAL_ENV'])")
    x, y = legs.Environment("x"), legs.Environment("y")
    environments = {"a": x, "b": y, "c": x, "d": x}
    entries = [
        legs.Leg(name, "a leg", environment, (check,)) for name, environment in environments.items()
    ]
    monkeypatch.setattr(leg, "LEGS", entries)
    assert leg.main(["all"]) == 0
    assert sorted(installed) == ["x", "y"]
    assert not (leg.BUILD / "x").exists()
    assert leg.main(["c", "--keep"]) == 0
    assert (leg.BUILD / "x").exists()


def test_bytecode_is_cached(build: Path, installed: list[str]) -> None:
    code = "import sys; assert not sys.dont_write_bytecode and sys.pycache_prefix"
    entry = leg.Leg("x", "a leg", THIS, (("python", "-c", code),))
    assert run(entry).result == "passed"


@pytest.mark.parametrize(("make", "shared"), [(os.link, True), (shutil.copy, False)])
def test_environments_of_one_python_share_bytecode(
    build: Path, monkeypatch: pytest.MonkeyPatch, make: Any, shared: bool
) -> None:
    """If their files are links to the same files."""
    (build / "cache.py").write_text("x = 1")
    monkeypatch.setattr(sys, "pycache_prefix", str(leg.BUILD / "bytecode"))
    files = []
    for name in "ab":
        package = leg.BUILD / name / "lib" / "python3.99" / "site-packages" / "package"
        package.mkdir(parents=True)
        files.append(package / "__init__.py")
        make(build / "cache.py", files[-1])
        leg.share_bytecode(leg.BUILD / name)
    py_compile.compile(str(files[0]))
    compiled = [importlib.util.cache_from_source(str(file)) for file in files]
    assert [os.path.exists(path) for path in compiled] == [True, shared]


def leg_called(name: str) -> Any:
    (entry,) = (row for row in legs.LEGS if row.name == name)
    return entry


@pytest.mark.parametrize("field", ["absent", "without"])
def test_environment_with_an_excluded_package_fails(field: str) -> None:
    leg.check(legs.Environment("x", **{field: ("no-such-thing",)}), HERE)
    with pytest.raises(leg.LegFailed, match="pytest"):
        leg.check(legs.Environment("x", **{field: ("pytest", "no-such-thing")}), HERE)


def test_environment_is_installed_from_the_lock(
    build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of `uv sync`, and its directory."""
    uv = build / "uv"
    uv.write_text('#!/bin/sh\necho "$UV_PROJECT_ENVIRONMENT $@" > "$0.log"; exit ${FAILS:-0}')
    uv.chmod(0o755)
    monkeypatch.setattr(leg, "find_uv", lambda: str(uv))
    monkeypatch.setattr(leg, "find_python", lambda version: version)
    monkeypatch.setattr(leg, "share_bytecode", lambda directory: None)
    environment = legs.Environment("x", ("a",), ("b",), without=("c",), editable=False)
    leg.install(environment, build / "x")
    assert (build / "uv.log").read_text() == (
        f"{build}/x sync --quiet --frozen --no-default-groups"
        " --extra=a --group=b --no-install-package=c --no-editable\n"
    )
    leg.install(legs.Environment("y", groups=("b",), project=False), build / "y")
    assert "--only-group=b" in (build / "uv.log").read_text()
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(leg.LegFailed):
        leg.install(environment, build / "x")


def test_lock_matches_the_project() -> None:
    """What pyproject.toml requires is what uv.lock was made for."""
    lock = tomllib.loads((REPOSITORY / "uv.lock").read_text("utf-8"))
    project, groups = pyproject()["project"], pyproject()["dependency-groups"]
    (package,) = (row for row in lock["package"] if row["name"] == project["name"])
    locked = package["metadata"]
    extras = project["optional-dependencies"]
    for extra in ("", *extras):
        texts = [*project["dependencies"], *extras.get(extra, ())]
        others = {
            other
            for text in texts
            if text.startswith(project["name"])
            for other in Requirement(text).extras
        }
        texts += [row for other in others for row in extras[other]]
        own = [text for text in texts if not text.startswith(project["name"])]
        assert _required(own) == _required(map(_text, locked["requires-dist"]), extra)
    assert locked["requires-dev"].keys() == groups.keys()
    for group, texts in groups.items():
        assert _required(texts) == _required(map(_text, locked["requires-dev"][group]))


def _text(locked: dict[str, Any]) -> str:
    """A requirement in uv.lock, as in pyproject.toml."""
    extras, marker = ",".join(locked.get("extras", [])), locked.get("marker")
    text = f"{locked['name']}[{extras}]{locked.get('specifier', '')}"
    return f"{text}; {marker}" if marker else text


def _required(texts: Iterable[str], extra: str = "") -> set[tuple[str, ...]]:
    """What these requirements are on each platform, with an extra."""
    return {
        (platform, row.name, *sorted(row.extras), str(row.specifier))
        for row in map(Requirement, texts)
        for platform in ("linux", "darwin", "win32")
        if not row.marker or row.marker.evaluate({"sys_platform": platform, "extra": extra})
    }


@pytest.mark.parametrize(("ci", "result"), [("", "not run"), ("true", "failed")])
@pytest.mark.parametrize(
    "missing", [{"environment": legs.Environment("x", python="3.99")}, {"systems": ("Plan 9",)}]
)
def test_missing_requirement_fails_in_ci(
    build: Path, monkeypatch: pytest.MonkeyPatch, ci: str, result: str, missing: dict[str, Any]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(leg, "find_uv", lambda: "false")  # it installs no Python
    entry = legs.Leg("x", "a leg", THIS, ())
    assert run(dataclasses.replace(entry, **missing)).result == result


def test_missing_python_is_installed(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = build / "uv"
    uv.write_text(
        """#!/bin/sh
        if [ "$2" = install ]; then mkdir -p "$UV_PYTHON_INSTALL_DIR/$4"
        else ls -d "$UV_PYTHON_INSTALL_DIR/$5"; fi
        """
    )
    uv.chmod(0o755)
    monkeypatch.setattr(leg, "find_uv", lambda: str(uv))
    assert leg.find_python("3.99") == str(build / "python" / "3.99")


def test_ci_hides_what_a_fresh_machine_lacks(tmp_path: Path) -> None:
    """The first program of a name counts, as on any path; hidden programs are not found."""
    script = "import shutil, sys; print(*map(shutil.which, ['uv', 'uvx', 'node', 'redis-server']))"
    for directory, names in {"a": ["uv", "mine"], "b": ["mine", "redis-server", "node"]}.items():
        (tmp_path / directory).mkdir()
        for name in names:
            program = tmp_path / directory / name
            program.write_text(f"#!/bin/sh\necho {directory}")
            program.chmod(0o755)
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "leg.py").write_text(
        f"{script}; import subprocess; subprocess.run(['mine'], check=True)"
    )
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci" / "run", tmp_path / ".ci")
    path = f"{tmp_path / 'a'}:{tmp_path / 'b'}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", str(tmp_path / ".ci" / "run")],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["None"] * 4 + ["a"]


@pytest.mark.parametrize(
    ("results", "code", "line"),
    [
        (["passed", "passed"], 0, "legs: 2 passed; 6 tests in 3 s, 1 s CPU"),
        (["passed", "not run"], 0, "legs: 1 passed, 1 not run; 6 tests in 3 s, 1 s CPU"),
        (["passed", "failed"], 1, "legs: 1 passed, 1 failed; 6 tests in 3 s, 1 s CPU"),
    ],
)
def test_closing_line_counts_results(
    results: list[str], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [leg.Outcome(f"leg{n}", result, 1.5, 0.5, 3) for n, result in enumerate(results)]
    assert leg.summarise(outcomes) == code
    assert capsys.readouterr().out.splitlines()[-1] == line


# --- The matrix


def test_names_are_unique_and_all_excludes_long_legs() -> None:
    names = [entry.name for entry in legs.LEGS]
    assert len(names) == len(set(names))
    everything = {entry.name for entry in leg.legs_named(["everything"])}
    pythons = {entry.environment.python for entry in leg.legs_named(["everything"])}
    assert pythons == {"3.11", "3.12", "3.13", "3.14", "3.15"}
    long = {
        "agents",
        "attack",
        "bench",
        "bench-gateway",
        "bench-start",
        "clients",
        "grammar",
        "pages",
        "peers",
        "release",
        "suites",
        "vllm",
        "yardstick",
    }
    long |= everything
    assert {entry.name for entry in leg.legs_named(["all"])} == set(names) - long
    assert sorted(entry.name for entry in leg.legs_named(["gate"])) == sorted(GATE)
    assert [entry.name for entry in leg.legs_named(["host", "lint"])] == ["host", "lint"]


def test_unknown_leg_is_an_error() -> None:
    with pytest.raises(SystemExit) as ended:
        leg.legs_named(["no-such-leg"])
    assert ended.value.code == 2


@pytest.mark.parametrize("group", ["gate", "nightly"])
def test_matrix_has_every_leg_of_its_group(group: str) -> None:
    jobs = {job["leg"] for job in leg.matrix(group)}
    assert jobs == {entry.name for entry in legs.LEGS if entry.group == group}


def test_matrix_has_every_runner() -> None:
    jobs = leg.matrix("gate")
    for runner in ("ubuntu-latest", "macos-14"):
        assert {"leg": "host", "python": legs.HOST_PYTHON, "runner": runner} in jobs


GATE = ["light", "served", "core", "gateway", "engine", "host", "front-end", "tools", "lint"]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["docs/api.md", "SECURITY.md"], ["lint", "pages"]),
        (["docs/architecture.md"], ["host", "lint", "pages"]),
        (["ci/leg.py", "benchmarks/bench.py"], ["lint"]),
        (["vllm_mlx_harmony/protocols/chat/schema.py"], ["core", "front-end", "lint"]),
        (["vllm_mlx_harmony/engine/batch.py"], ["light", "engine", "host", "lint"]),
        (["vllm_mlx_harmony/gateway/app.py"], ["gateway", "lint"]),
        (
            ["vllm_mlx_harmony/inspector/record.py"],
            ["browser", "front-end", "gateway", "lint"],
        ),
        (
            ["vllm_mlx_harmony/server/tools/toolbox.py"],
            ["light", "host", "front-end", "tools", "lint"],
        ),
        (
            ["tests/unit/host/test_vllm_mlx_engine.py", "docs/api.md"],
            ["host", "lint", "pages"],
        ),
        (["vllm_mlx_harmony/tasks.py"], GATE),
        (["tests/support/rows.py"], GATE),
        (["pyproject.toml", "docs/api.md"], GATE),
        ([], ["lint"]),
    ],
)
def test_changed_files_choose_their_legs(paths: list[str], expected: list[str]) -> None:
    assert sorted(entry.name for entry in leg.legs_for_paths(paths)) == sorted(expected)


def test_unknown_base_is_an_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        leg.main(["--changed", "no-such-commit"])
    assert ended.value.code == 2
    assert "no-such-commit" in capfd.readouterr().err
    monkeypatch.setenv("PATH", "")  # no git
    with pytest.raises(SystemExit):
        leg.main(["--changed"])


def test_changes_are_moved_and_new_files_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file that is moved, both places need their legs."""

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    old, new, unknown = "tests/unit/host/test_a.py", "tests/unit/core/test_a.py", "docs/ä b.md"
    for path in (old, new, unknown):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / old).write_text("x = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "a")
    git("mv", old, new)
    (tmp_path / unknown).touch()
    monkeypatch.setattr(leg, "REPOSITORY", tmp_path)
    monkeypatch.setattr(leg, "legs_for_paths", sorted)
    assert leg.legs_for_changes("HEAD") == sorted([old, new, unknown])


def test_every_package_has_its_legs() -> None:
    package = REPOSITORY / "vllm_mlx_harmony"
    packages = {f"{path.name}/" for path in package.iterdir() if path.is_dir()}
    assert packages - {"__pycache__/"} <= legs.PACKAGES.keys()
    assert [path for path in legs.TESTED_BY if not (REPOSITORY / path).exists()] == []
    leg.legs_named([name for names in legs.TESTED_BY.values() for name in names])


def test_every_file_of_a_test_folder_needs_the_leg_that_runs_it() -> None:
    for entry in leg.legs_named(["gate"]):
        folders = {
            part for command in entry.commands for part in command if part.startswith("tests/")
        }
        for folder in folders:
            assert entry in leg.legs_for_paths([f"{folder}/test_x.py"]), folder


def test_every_folder_of_the_gate_has_its_nightly_rows_in_a_leg() -> None:
    def folders(entries: list[Any], marks: str) -> set[str]:
        commands = [command for entry in entries for command in entry.commands]
        return {
            part
            for command in commands
            if any(marks in argument for argument in command)
            for part in command
            if part.startswith("tests/unit/")
        }

    left_out = folders(leg.legs_named(["gate"]), "not nightly")
    nightly = folders(leg.legs_named(["nightly"]), "nightly and not served")
    assert left_out and left_out <= nightly


def test_pages_has_every_module_that_reads_the_documentation() -> None:
    """Of those that run in its environment: not those of the engine, the host and the stand-in."""
    folders = ("cli", "core", "gateway", "protocols", "server", "verify")
    reading = {
        str(path.relative_to(REPOSITORY))
        for folder in folders
        for path in (REPOSITORY / "tests" / "unit" / folder).glob("**/test_*.py")
        if re.search(r'/ "(docs|README\.md)"', path.read_text("utf-8"))
    }
    assert reading == set(legs.DOCUMENTATION_TESTS)


def test_gate_runs_without_arguments() -> None:
    assert leg.legs_named(leg._arguments([]).legs) == leg.legs_named(["gate"])


def pyproject() -> dict[str, Any]:
    """The project's metadata."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))


def test_every_extra_has_a_leg_with_it_and_one_without() -> None:
    for extra in pyproject()["project"]["optional-dependencies"]:
        assert {extra in entry.environment.extras for entry in legs.LEGS} == {True, False}, extra


def test_every_test_directory_is_in_a_leg() -> None:
    parts = {part for entry in legs.LEGS for command in entry.commands for part in command}
    paths = [path.relative_to(REPOSITORY) for path in (REPOSITORY / "tests").glob("*/**/test_*.py")]
    assert [path for path in paths if not {str(path), str(path.parent)} & parts] == []


def test_paths_of_legs_exist() -> None:
    parts = {part for entry in legs.LEGS for command in entry.commands for part in command}
    paths = {part for part in parts if part.startswith(("tests/", "benchmarks/", "ci/"))}
    assert paths
    assert sorted(path for path in paths if not (REPOSITORY / path).exists()) == []


def test_old_python_is_told_which_one_is_needed() -> None:
    """Any `python3` may run it: its message must not need what only a newer one has."""
    script = REPOSITORY / "ci" / "leg.py"
    ast.parse(script.read_text("utf-8"), feature_version=(3, 8))
    code = (
        "import sys; sys.version_info = (3, 8); sys.modules['argparse'] = None;"
        f"exec(compile(open({str(script)!r}).read(), 'leg.py', 'exec'))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "Python 3.11" in result.stderr
