#!/usr/bin/env python3
"""Runs legs of the CI matrix in virtual environments of its own.

`leg.py` runs the gate, what must pass before a commit; `leg.py --changed` the legs that test what
changed; `leg.py all` the nightly legs, too; `leg.py NAME…` those of these names.

Four legs run at a time unless `--jobs` is given, which suits two processors: tests of servers wait
most of the time. No test is run again: what fails beside other legs is a race, or waits for a time
where it should wait for a state.

Legs share environments, which `uv sync` makes from `uv.lock`. Only this Python has to be installed:
uv, other versions of Python and all packages, Node.js and Redis among them, are installed below
`build`. The legs and environments are defined in `legs.py`.

Why not tox or nox: their environments belong to one session each, they buffer the output of
parallel sessions until they end, and on a fresh machine they would have to be installed first.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 — before what an older Python could not import
    sys.exit("ci/leg.py: error: Python 3.11 or later is needed")

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from legs import LEGS, TESTED_BY, Environment, Leg

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD = REPOSITORY / "build" / "legs"
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
REPEATED, TRACEBACK = 10, 30
"""Failures that the summary repeats, and the lines of each."""


@dataclass(frozen=True)
class Outcome:
    """The result of a leg. ``cpu_seconds`` are those of its commands, ``problem`` is why it did not
    pass, ``failures`` are the failed tests, each with the end of its traceback."""

    leg: str
    result: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tests: int = 0
    problem: str = ""
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandResult:
    """``problem`` is why a command failed, empty if it did not."""

    problem: str
    cpu_seconds: float


class LegFailed(Exception):
    """A leg could not be set up; the message says why."""


class CannotRun(Exception):
    """A leg cannot run on this machine; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if no leg failed. With CI=true, a leg that cannot run has failed."""
    parsed = _arguments(argv)
    if parsed.json:
        print(json.dumps(matrix(parsed.json)))
        return 0
    legs = legs_for_changes(parsed.changed) if parsed.changed else legs_named(parsed.legs)
    try:
        find_uv()  # before the legs, which would otherwise install it at the same time
    except LegFailed as error:
        return _complain(str(error))
    environments = Environments(legs, keep=parsed.keep)
    # Measurements run alone, and a single leg has the terminal to itself.
    jobs = 1 if any(leg.alone for leg in legs) else min(parsed.jobs, len(legs))
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        one = partial(run, environments=environments, prefixed=jobs > 1)
        outcomes = list(pool.map(one, legs))
    if not parsed.keep:
        shutil.rmtree(BUILD / "bytecode", ignore_errors=True)
    return summarise(outcomes)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"  {leg.name:14} {leg.what}" for leg in LEGS)
    groups = {leg.group: "" for leg in LEGS if leg.group}
    for group in groups:
        groups[group] = ", ".join(leg.name for leg in LEGS if leg.group == group)
    grouped = "\n".join(f"  {group:14} {names}" for group, names in groups.items())
    parser = argparse.ArgumentParser(
        description="Runs legs of the CI matrix, in fresh virtual environments.",
        epilog=f"legs:\n{listed}\n\ngroups (`all` is gate and nightly):\n{grouped}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("legs", nargs="*", metavar="LEG", default=["gate"])
    parser.add_argument(
        "--changed",
        nargs="?",
        const="HEAD",
        metavar="BASE",
        help="the legs that test what changed since a commit (HEAD)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the environment, use a kept one")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="legs at a time (4)")
    parser.add_argument("--json", metavar="GROUP", help="print the matrix of a group, run nothing")
    return parser.parse_args(argv)


def legs_named(names: Collection[str]) -> list[Leg]:
    """The legs of these names or groups, in the order of the matrix. Exits for any other name."""
    known = dict.fromkeys(name for leg in LEGS for name in (leg.name, leg.group) if name)
    known["all"] = None
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(_complain(f"no leg is called {unknown[0]}: one of {', '.join(known)}"))
    if "all" in names:
        names = [*names, "gate", "nightly"]
    return [leg for leg in LEGS if leg.name in names or leg.group in names]


def legs_for_changes(base: str) -> list[Leg]:
    """The legs that test what changed since the commit ``base``, files that git does not know yet
    included. Exits if git cannot say."""
    paths = ""
    for command in (
        ("diff", "--name-only", "--no-renames", "-z", base, "--"),
        ("ls-files", "--others", "--exclude-standard", "-z"),
    ):
        try:
            paths += subprocess.check_output(["git", *command], cwd=REPOSITORY, text=True)
        except (OSError, subprocess.CalledProcessError):
            raise SystemExit(_complain(f"git cannot compare the files with {base}")) from None
    return legs_for_paths(paths.split("\0")[:-1])


def legs_for_paths(paths: Sequence[str]) -> list[Leg]:
    """The legs that test these files, and `lint`. The gate if ``TESTED_BY`` lacks one of them:
    nobody knows what depends on it."""
    names = {"lint"}
    for path in paths:
        found = [legs for prefix, legs in TESTED_BY.items() if path.startswith(prefix)]
        if not found:
            return legs_named(["gate"])
        names.update(*found)
    return legs_named(names)


def matrix(group: str) -> list[dict[str, Any]]:
    """One job per leg of a group and runner."""
    return [
        {"leg": leg.name, "python": leg.environment.python, "runner": runner}
        for leg in legs_named([group])
        for runner in leg.runners
    ]


# --- One leg


class Environments:
    """The environments of this run: each is created for the first leg that needs it and removed
    after the last one, unless it is kept."""

    def __init__(self, legs: Sequence[Leg], *, keep: bool) -> None:
        self._keep = keep
        self._users = Counter(leg.environment.name for leg in legs)
        self._created: set[str] = set()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def prepare(self, environment: Environment) -> Path:
        """Creates and checks an environment. Raises ``LegFailed`` and ``CannotRun``."""
        directory = BUILD / environment.name
        with self._locks[environment.name]:
            if environment.name not in self._created:
                if not self._keep:
                    shutil.rmtree(directory, ignore_errors=True)
                install(environment, directory)
                self._created.add(environment.name)
        check(environment, directory)
        return directory

    def release(self, environment: Environment) -> None:
        """A leg no longer needs its environment."""
        with self._locks[environment.name]:
            self._users[environment.name] -= 1
            if not self._users[environment.name] and not self._keep:
                shutil.rmtree(BUILD / environment.name, ignore_errors=True)


def run(leg: Leg, environments: Environments, *, prefixed: bool = False) -> Outcome:
    """Runs the commands of a leg in its environment.

    With ``prefixed``, other legs run beside it: every line of its output begins with its name.
    """
    began = time.monotonic()
    prefix = f"{leg.name:14} | " if prefixed else ""
    print(f"\n=== {leg.name}: {leg.what}", flush=True)
    for report in BUILD.glob(f"{leg.name}-*.xml"):
        report.unlink()
    reports = [BUILD / f"{leg.name}-{number}.xml" for number in range(len(leg.commands))]
    cpu_seconds = 0.0
    try:
        if platform.system() not in leg.systems:
            raise CannotRun(f"only on {' and '.join(leg.systems)}")
        environment = environments.prepare(leg.environment)
        steps = zip(leg.commands, reports, strict=True)
        results = [execute(environment, *step, dict(leg.variables), prefix) for step in steps]
        cpu_seconds = sum(step.cpu_seconds for step in results)
        problem = "; ".join(filter(None, (step.problem for step in results)))
        result = FAILED if problem else PASSED
    except (LegFailed, OSError) as error:  # OSError: a program of a command that is not there
        result, problem = FAILED, str(error)
    except CannotRun as error:
        result = FAILED if os.environ.get("CI") == "true" else NOT_RUN
        problem = str(error)
    finally:
        environments.release(leg.environment)
    run_tests = [case for report in reports if report.exists() for case in cases(report)]
    failures = tuple(text for case in run_tests for text in failures_of(case))
    seconds = time.monotonic() - began
    outcome = Outcome(leg.name, result, seconds, cpu_seconds, len(run_tests), problem, failures)
    print(f"\n=== {line_of(outcome)}", flush=True)
    return outcome


def install(environment: Environment, directory: Path) -> None:
    """Makes the environment what uv.lock says. Raises ``LegFailed`` and ``CannotRun``."""
    group = "--group" if environment.project else "--only-group"
    options = [
        *(f"--extra={extra}" for extra in environment.extras),
        *(f"{group}={name}" for name in environment.groups),
        *(f"--no-install-package={name}" for name in environment.without),
        *([] if environment.editable else ["--no-editable"]),
    ]
    command = [find_uv(), "sync", "--quiet", "--frozen", "--no-default-groups", *options]
    print(f"$ {' '.join(command)}", flush=True)
    variables = {
        "UV_PROJECT_ENVIRONMENT": str(directory),
        "UV_PYTHON": find_python(environment.python),
    }
    environ = {**os.environ, **variables}
    if subprocess.call(command, cwd=REPOSITORY, env=environ, stdin=subprocess.DEVNULL):
        raise LegFailed(f"could not be set up: {' '.join(command)}")
    share_bytecode(directory)


def share_bytecode(environment: Path) -> None:
    """Shares the bytecode of packages between all environments of a Python.

    Only if their files are hard links to uv's cache. Copies have modification times of their own,
    so that each environment would compile them again.
    """
    (library,) = (environment / "lib").glob("python*")
    if not any(path.stat().st_nlink > 1 for path in library.glob("site-packages/*/__init__.py")):
        return
    compiled = BUILD / "bytecode" / "packages" / library.name
    compiled.mkdir(parents=True, exist_ok=True)
    place = BUILD / "bytecode" / library.relative_to(library.anchor)
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.is_symlink():
        place.symlink_to(compiled)


def check(environment: Environment, directory: Path) -> None:
    """Raises ``LegFailed`` unless the environment lacks what it is to lack."""
    site_packages = map(str, (directory / "lib").glob("python*/site-packages"))
    found = {
        re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        for distribution in distributions(path=list(site_packages))
    }
    if surplus := found & {*environment.absent, *environment.without}:
        raise LegFailed(f"the environment has {', '.join(sorted(surplus))}")


def execute(
    environment: Path,
    command: Sequence[str],
    report: Path,
    variables: Mapping[str, str] | None = None,
    prefix: str = "",
) -> CommandResult:
    """Runs a command. A skipped test is a failure."""
    is_pytest = "pytest" in command
    arguments = list(command)
    if is_pytest:
        arguments += [f"--junit-xml={report}", f"-ocache_dir={BUILD / 'cache' / report.stem}"]
    executable = environment / "bin" / command[0]
    own = {
        "VIRTUAL_ENV": str(environment),
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        # A server imports thousands of files, and compiling them would double its start. They are
        # outside of the environment, which contains only what was installed.
        "PYTHONPYCACHEPREFIX": str(BUILD / "bytecode"),
    }
    unset = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    without = {k: v for k, v in os.environ.items() if k not in unset}
    # One write: another leg's line could come before a newline that is written by itself.
    print(f"{prefix}$ {' '.join(command)}\n", end="", flush=True)
    with subprocess.Popen(
        [str(executable), *arguments[1:]],
        cwd=REPOSITORY,
        env={**without, **own, **(variables or {})},
        # Without a prefix, the command has the terminal to itself.
        stdout=subprocess.PIPE if prefix else None,
        stderr=subprocess.STDOUT if prefix else None,
        stdin=subprocess.DEVNULL if prefix else None,
        text=True,
        errors="replace",
    ) as running:
        for line in running.stdout or ():
            print(prefix + line, end="", flush=True)
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    problem = ""
    if running.returncode != 0:
        problem = f"{' '.join(command)}: exit code {running.returncode}"
    elif is_pytest and (skips := skipped(report)):
        problem = f"skipped tests: {'; '.join(skips)}"
    return CommandResult(problem, usage.ru_utime + usage.ru_stime)


def cases(report: Path) -> list[ElementTree.Element]:
    """The tests in a JUnit report."""
    return list(ElementTree.parse(report).getroot().iter("testcase"))


def skipped(report: Path) -> list[str]:
    """The skipped tests of a JUnit report, with reasons. Expected failures are not skipped."""
    return [
        f"{case.get('classname')}.{case.get('name')} ({skip.text or skip.get('message')})"
        for case in cases(report)
        for skip in case.iter("skipped")
        if skip.get("type") != "pytest.xfail"
    ]


def failures_of(case: ElementTree.Element) -> list[str]:
    """What failed in a test of a JUnit report, with the last lines of each traceback."""
    name = f"{case.get('classname')}.{case.get('name')}"
    found = [*case.iter("failure"), *case.iter("error")]
    return ["\n".join([name, *(element.text or "").splitlines()[-TRACEBACK:]]) for element in found]


# --- Finding uv and Python


@cache
def find_uv() -> str:
    """A working uv: the one on the path, or one installed below `build`. Raises ``LegFailed``."""
    own = BUILD / "uv" / "bin"
    if output_of(["uv", "--version"]):
        return "uv"
    if not output_of([str(own / "uv"), "--version"]):
        # In an environment of its own: the Python may have no pip, or not be allowed to use it.
        output_of([sys.executable, "-m", "venv", str(own.parent)])
        output_of([str(own / "python"), "-m", "pip", "install", "--quiet", "uv"], seconds=600)
    if not output_of([str(own / "uv"), "--version"]):
        raise LegFailed("uv could not be installed: https://docs.astral.sh/uv")
    return str(own / "uv")


def find_python(version: str) -> str:
    """The path of a Python of this version: this one, one that uv or pyenv knows, or one that uv
    installs below `build`. Raises ``CannotRun`` if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    known = [Path(sys.executable).parent, *pyenv.glob(f"{version}.*/bin")]
    path = os.pathsep.join([*map(str, known), os.environ["PATH"]])
    variables = {"PATH": path, "UV_PYTHON_INSTALL_DIR": str(BUILD.parent / "python")}
    find = [find_uv(), "python", "find", "--no-project", "--no-python-downloads", version]
    install = [find_uv(), "python", "install", "--no-bin", version]
    found = output_of(find, variables)
    if not found:
        output_of(install, variables, seconds=600)
        found = output_of(find, variables)
    if not found:
        raise CannotRun(f"no Python {version} here, and uv could not install it")
    return found


def output_of(
    command: Sequence[str], variables: Mapping[str, str] | None = None, *, seconds: float = 60
) -> str:
    """The output of a command; empty if it fails, takes too long or does not exist."""
    environment = {**os.environ, **(variables or {})}
    try:
        output = subprocess.check_output(
            command, env=environment, stderr=subprocess.DEVNULL, text=True, timeout=seconds
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return output.strip()


# --- Output


def line_of(outcome: Outcome) -> str:
    """One line about a leg: seconds on the clock, and of a processor."""
    tests = f"{outcome.tests} tests" if outcome.tests else ""
    times = f"{outcome.seconds:6.1f} s {outcome.cpu_seconds:6.1f} s CPU"
    return f"{outcome.leg:14} {outcome.result:8} {times}  {tests:10} {outcome.problem}"


def summarise(outcomes: Sequence[Outcome]) -> int:
    """Prints the result of every leg and a summary; returns the exit code."""
    failures = [f"{outcome.leg}: {text}" for outcome in outcomes for text in outcome.failures]
    if failures:  # again, and last: the end of a log is what people see of it
        print("\n=== failures", *failures[:REPEATED], sep="\n\n")
    print("\n=== summary")
    for outcome in outcomes:
        print(line_of(outcome).rstrip())
    print(closing_line(outcomes), flush=True)
    return 1 if any(outcome.result == FAILED for outcome in outcomes) else 0


def closing_line(outcomes: Sequence[Outcome]) -> str:
    """`legs: 9 passed, 1 not run; 812 tests in 540 s, 302 s CPU`"""
    counts = {r: sum(o.result == r for o in outcomes) for r in (PASSED, FAILED, NOT_RUN)}
    results = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
    tests, seconds = sum(o.tests for o in outcomes), sum(o.seconds for o in outcomes)
    cpu_seconds = sum(o.cpu_seconds for o in outcomes)
    return f"legs: {results}; {tests} tests in {seconds:.0f} s, {cpu_seconds:.0f} s CPU"


def _complain(message: str) -> int:
    print(f"ci/leg.py: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
