"""Says what is installed, armed and supported here, whether each seam fits, and why not.

Looks and changes nothing; downloads nothing. What it looks for is known by `contract`, `models`
and `parts`; how a terminal shows it is kept to plain text, so that it can be pasted anywhere.
"""

from __future__ import annotations

import argparse
import os
import platform
import site
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import _startup
from . import gate

STARTUP_FILE = "vllm_mlx_harmony_startup.pth"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `ok` is None for what is neither right nor wrong."""

    ok: bool | None
    what: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in the order in which things depend on each other."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.ok is not False for finding in self.findings)

    def __str__(self) -> str:
        marks = {True: "ok  ", False: "NO  ", None: "    "}
        width = max(len(finding.what) for finding in self.findings)
        lines = [
            f"{marks[finding.ok]}{finding.what:<{width}}  {finding.detail}".rstrip()
            for finding in self.findings
        ]
        return "\n".join([*lines, "", _CONCLUSIONS[self.ok]])


_CONCLUSIONS = {
    True: "Everything is in place: vllm-mlx serve MODEL --tool-call-parser harmony",
    False: "Something is missing: see the lines with NO.",
}


def doctor(model: str | None = None) -> Report:
    """Looks at this installation and, if named, at a model: a directory or a cached repository."""
    parts: list[Callable[[], Iterator[Finding]]] = [_versions, _loading, _library, _host]
    findings = [finding for part in parts for finding in part()]
    if model is not None:
        findings.extend(_model(model))
    return Report(tuple(findings))


def main(argv: list[str] | None = None) -> int:
    """Prints the report; 0 when everything is in place, 1 when something is not."""
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony doctor", description="What is installed, armed, supported; why not."
    )
    parser.add_argument("model", nargs="?", help="a model directory or a cached repository id")
    report = doctor(parser.parse_args(argv).model)
    print(report)
    return 0 if report.ok else 1


def _versions() -> Iterator[Finding]:
    yield Finding(None, "python", f"{platform.python_version()} ({sys.executable})")
    versions = gate.versions()
    for name, version in versions.items():
        yield Finding(None, name, version)
    if "vllm-mlx" not in versions:
        yield Finding(False, "vllm-mlx", "not installed: pip install vllm-mlx")
    if not any(name in versions for name in gate.LIBRARIES):
        yield Finding(False, "openai-harmony", "not installed: pip install openai-harmony")


def _loading() -> Iterator[Finding]:
    explicit = "start with `vllm-mlx-harmony serve` instead of `vllm-mlx serve`"
    if _startup.switched_off():
        value = os.environ[_startup.SWITCH]
        yield Finding(False, "switch", f"{_startup.SWITCH}={value} keeps the plugin out")
    files = [path for path in _startup_files() if not _hidden(path)]
    if files:
        yield Finding(True, "startup file", str(files[0]))
    else:
        yield Finding(False, "startup file", f"no {STARTUP_FILE} in a site directory; {explicit}")
    if _startup.armed():
        yield Finding(True, "armed", f"waits for {_startup.HOST} in this process")
    else:
        yield Finding(False, "armed", f"does not wait for {_startup.HOST}; {explicit}")


def _startup_files() -> list[Path]:
    directories = dict.fromkeys([*site.getsitepackages(), site.getusersitepackages(), *sys.path])
    return [path for name in directories if (path := Path(name) / STARTUP_FILE).is_file()]


def _hidden(path: Path) -> bool:
    """Python does not read `.pth` files that have macOS's hidden flag."""
    return bool(getattr(path.stat(), "st_flags", 0) & stat.UF_HIDDEN)


def _library() -> Iterator[Finding]:
    try:
        from ..core import vocab

        vocab.encoding()
    except Exception as error:
        yield Finding(False, "vocabulary", _said(error))
    else:
        yield Finding(True, "vocabulary", f"o200k_harmony, cached in {vocab.cache_dir()}")


def _host() -> Iterator[Finding]:
    try:
        from . import contract

        reason = contract.unsupported()
    except Exception as error:
        yield Finding(False, "supported", _said(error))
        return
    yield Finding(reason is None, "supported", reason or f"vllm-mlx {contract.host_version()}")
    if reason is not None:
        return
    try:
        found = contract.parts()
        rows = contract.table(found)
    except Exception as error:
        yield Finding(False, "parts", _said(error))
        return
    for group, source in found.sources.items():
        yield Finding(True, group, source)
    for row in rows:
        problem = row.problem()
        yield Finding(problem is None, f"seam {row.label}", problem or row.why)


def _model(name: str) -> Iterator[Finding]:
    try:
        from .models import is_harmony_directory

        directory = _directory(name)
        harmony = None if directory is None else is_harmony_directory(directory)
    except Exception as error:
        yield Finding(False, "model", _said(error))
        return
    details = {
        True: f"{name} is a Harmony model",
        False: f"{name} is not a Harmony model: its tokenizer is not o200k_harmony",
        None: f"{name} is not here: no such directory, or no tokenizer.json in the cache",
    }
    yield Finding(harmony is True, "model", details[harmony])


def _directory(name: str) -> Path | None:
    """Of a model that is on this machine."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
    except ValueError:  # a path that does not exist is no repository id either
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
