#!/usr/bin/env python3
"""Runs legs of the CI matrix in virtual environments of its own.

`leg.py` runs the gate, what must pass before a commit; `leg.py --changed` the legs that test what
changed; `leg.py all` the nightly legs, too; `leg.py NAME…` those of these names.

Three legs run at a time unless `--jobs` is given, which suits two processors: tests of servers wait
part of the time. No test is run again: what fails beside other legs is a race, or waits for a time
where it should wait for a state.

Legs that install the same packages share an environment. Only this Python has to be installed: uv,
other versions of Python and all packages, Node.js and Redis among them, are installed below
`build`. The legs are defined in `legs.py`.

Why not nox: its sessions cannot share an environment, it buffers the output of parallel sessions
until they end, and on a fresh machine it would itself have to be installed first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from legs import LEGS, Leg, environment_of

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD = REPOSITORY / "build" / "legs"
OLDEST = (3, 11)
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
REPEATED, TRACEBACK = 10, 30
"""Failures that the summary repeats, and the lines of each."""


@dataclass(frozen=True)
class Outcome:
    """The result of a leg, and why it failed. ``processor`` is the processor time of its commands
    in seconds, ``failures`` are the failed tests, each with the end of its traceback."""

    leg: str
    result: str
    seconds: float = 0.0
    processor: float = 0.0
    tests: int = 0
    why: str = ""
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """``why`` a command failed, empty if it did not, and its processor time in seconds."""

    why: str
    processor: float


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
    if sys.version_info < OLDEST:
        return _complain(f"Python {'.'.join(map(str, OLDEST))} or later is needed")
    legs = changed(parsed.changed) if parsed.changed else chosen(parsed.legs)
    find_uv()  # before the legs, which would otherwise install it at the same time
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
        help="the legs of `all` that test what changed since a commit (HEAD)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the environment, use a kept one")
    parser.add_argument("--jobs", type=int, default=3, metavar="N", help="legs at a time (3)")
    parser.add_argument("--json", metavar="GROUP", help="print the matrix of a group, run nothing")
    return parser.parse_args(argv)


def chosen(names: Sequence[str]) -> list[Leg]:
    """The legs of these names or groups, in the order of the matrix. Exits for any other name."""
    known = dict.fromkeys(name for leg in LEGS for name in (leg.name, leg.group) if name)
    known["all"] = None
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(_complain(f"no leg is called {unknown[0]}: one of {', '.join(known)}"))
    if "all" in names:
        names = [*names, "gate", "nightly"]
    return [leg for leg in LEGS if leg.name in names or leg.group in names]


def changed(base: str) -> list[Leg]:
    """The legs that test what changed since the commit ``base``, files that git does not know yet
    included."""
    git = ("git", "-C", str(REPOSITORY))
    listed = answers([*git, "diff", "--name-only", base])
    listed += "\n" + answers([*git, "ls-files", "--others", "--exclude-standard"])
    return needed([path for path in listed.splitlines() if path])


def needed(paths: Sequence[str]) -> list[Leg]:
    """The legs that changes of these files need. Of a file that only `lint` reads, nobody knows
    what depends on it: the whole gate."""
    legs = chosen(["all"])
    claimed = {
        path: [leg for leg in legs if path.startswith(leg.paths) and leg.name != "lint"]
        for path in paths
    }
    if not all(claimed.values()):
        return chosen(["gate"])
    names = {leg.name for claims in claimed.values() for leg in claims} | {"lint"}
    return [leg for leg in legs if leg.name in names]


def matrix(group: str) -> list[dict[str, Any]]:
    """One job per leg of a group and runner."""
    return [
        {"leg": leg.name, "python": leg.python, "runner": runner}
        for leg in chosen([group])
        for runner in leg.runners
    ]


# --- One leg


class Environments:
    """The environments of this run: each is created for the first leg that needs it and removed
    after the last one, unless it is kept."""

    def __init__(self, legs: Sequence[Leg], *, keep: bool) -> None:
        self._keep = keep
        self._users = Counter(environment_of(leg) for leg in legs)
        self._made: set[str] = set()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def prepare(self, leg: Leg) -> Path:
        """Creates and checks the environment of a leg. Raises ``LegFailed`` and ``CannotRun``."""
        if platform.system() not in leg.systems:
            raise CannotRun(f"only on {' and '.join(leg.systems)}")
        name = environment_of(leg)
        environment = BUILD / name
        with self._locks[name]:
            if name not in self._made and not (self._keep and environment.exists()):
                shutil.rmtree(environment, ignore_errors=True)
                install(leg, environment)
            self._made.add(name)
        check(leg, environment)
        return environment

    def ended(self, leg: Leg) -> None:
        """A leg no longer needs its environment."""
        name = environment_of(leg)
        with self._locks[name]:
            self._users[name] -= 1
            if not self._users[name] and not self._keep:
                shutil.rmtree(BUILD / name, ignore_errors=True)


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
    processor = 0.0
    try:
        environment = environments.prepare(leg)
        steps = zip(leg.commands, reports, strict=True)
        ended = [execute(environment, *step, dict(leg.variables), prefix) for step in steps]
        processor = sum(step.processor for step in ended)
        why = "; ".join(filter(None, (step.why for step in ended)))
        result = FAILED if why else PASSED
    except LegFailed as error:
        result, why = FAILED, str(error)
    except CannotRun as error:
        result = FAILED if os.environ.get("CI") == "true" else NOT_RUN
        why = str(error)
    environments.ended(leg)
    run_tests = [case for report in reports if report.exists() for case in cases(report)]
    failures = tuple(text for case in run_tests for text in failures_of(case))
    seconds = time.monotonic() - began
    outcome = Outcome(leg.name, result, seconds, processor, len(run_tests), why, failures)
    print(f"\n=== {line_of(outcome)}", flush=True)
    return outcome


def install(leg: Leg, environment: Path) -> None:
    """Creates the environment and installs the leg's packages."""
    uv, python = find_uv(), find_python(leg.python)
    BUILD.mkdir(parents=True, exist_ok=True)
    must([uv, "venv", "--quiet", "--python", python, str(environment)])
    overrides = BUILD / f"{environment.name}.overrides"
    # An override replaces all requirements of a package: here, by one for no system.
    overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in leg.without))
    target = ["--python", str(environment / "bin" / "python"), "--override", str(overrides)]
    must([uv, "pip", "install", "--quiet", *target, *leg.install])
    share_bytecode(environment)


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


def check(leg: Leg, environment: Path) -> None:
    """Raises ``LegFailed`` unless the environment has and lacks what the leg says."""
    site_packages = map(str, (environment / "lib").glob("python*/site-packages"))
    found = [
        distribution.metadata["Name"] for distribution in distributions(path=list(site_packages))
    ]
    names = [re.sub(r"[-_.]+", "-", name).lower() for name in found]
    missing = [name for name in leg.present if name not in names]
    surplus = [name for name in leg.absent if name in names]
    if missing or surplus:
        raise LegFailed(f"the environment is wrong: missing {missing}, surplus {surplus}")


def execute(
    environment: Path,
    command: Sequence[str],
    report: Path,
    variables: Mapping[str, str] | None = None,
    prefix: str = "",
) -> Ended:
    """Runs a command. A skipped test is a failure."""
    is_pytest = "pytest" in command
    arguments = list(command)
    if is_pytest:
        cache = BUILD / "cache" / report.stem
        arguments += [f"--junit-xml={report}", "-o", f"cache_dir={cache}"]
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
    processor = usage.ru_utime + usage.ru_stime
    if running.returncode != 0:
        return Ended(f"{' '.join(command)}: exit code {running.returncode}", processor)
    skips = skipped(report) if is_pytest else []
    return Ended(f"skipped tests: {'; '.join(skips)}" if skips else "", processor)


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


def must(command: Sequence[str]) -> None:
    """Runs a command that prepares a leg. Raises ``LegFailed``."""
    print(f"$ {' '.join(command)}", flush=True)
    if subprocess.run(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, check=False).returncode:
        raise LegFailed(f"could not be set up: {' '.join(command)}")


# --- Finding uv and Python


@cache
def find_uv() -> str:
    """A working uv: the one on the path, or one installed below `build`. Raises ``LegFailed``."""
    own = BUILD / "uv"
    for candidate in ("uv", str(own / "bin" / "uv")):
        if answers([candidate, "--version"]):
            return candidate
    BUILD.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(own), "uv"]
    if not answers([sys.executable, "-m", "pip", "--version"]):  # a Python without pip has venv
        must([sys.executable, "-m", "venv", str(BUILD / "pip")])
        pip[0] = str(BUILD / "pip" / "bin" / "python")
    must(pip)
    return str(own / "bin" / "uv")


VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def find_python(version: str) -> str:
    """The path of a Python of this version. Raises ``CannotRun`` if there is none."""
    for candidate in pythons(version):
        if answers([candidate, "-c", VERSION]) == version:
            return candidate
    raise CannotRun(f"no Python {version} here, and uv could not install it")


def pythons(version: str) -> Iterator[str]:
    """Paths that may be a Python of this version, the likeliest first; the last one is installed
    by uv below `build`."""
    yield sys.executable
    roots = [os.environ.get("PYENV_ROOT", ""), str(Path.home() / ".pyenv")]
    for root in filter(None, roots):
        found = Path(root).glob(f"versions/{version}.*/bin/python")
        yield from map(str, sorted(found, reverse=True))
    yield f"python{version}"
    uv, own = find_uv(), BUILD.parent / "python"
    yield answers([uv, "python", "find", "--no-python-downloads", version])
    answers([uv, "python", "install", "--no-bin", "--install-dir", str(own), version], seconds=600)
    yield from map(str, own.glob(f"cpython-{version}.*/bin/python{version}"))


def answers(command: Sequence[str], seconds: float = 60) -> str:
    """The output of a command; empty if it fails, takes too long or does not exist."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ended.stdout.strip()


# --- Output


def line_of(outcome: Outcome) -> str:
    """One line about a leg: seconds on the clock, and of a processor."""
    tests = f"{outcome.tests} tests" if outcome.tests else ""
    times = f"{outcome.seconds:6.1f} s {outcome.processor:6.1f} s CPU"
    return f"{outcome.leg:14} {outcome.result:8} {times}  {tests:10} {outcome.why}"


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
    processor = sum(o.processor for o in outcomes)
    return f"legs: {results}; {tests} tests in {seconds:.0f} s, {processor:.0f} s CPU"


def _complain(message: str) -> int:
    print(f"ci/leg.py: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
