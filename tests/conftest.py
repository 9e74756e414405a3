"""For every test: generated examples have no time limit, and all HTTP clients share one TLS
context. httpx would load 140 certificates for each, in 15 ms, and everything here is plain HTTP.

Of a test that is marked `nightly(sample=N)`, every N-th row stays in the gate. One that is marked
`needs(...)` is deselected on a machine that does not have it.
"""

from __future__ import annotations

import functools
import itertools
import ssl
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from sizes import examples

# Failures in checks that tests share show values, too.
SUPPORT = {path.stem for path in Path(__file__).with_name("support").glob("*.py")}
pytest.register_assert_rewrite(*(SUPPORT - sys.modules.keys()))

settings.register_profile(
    "untimed",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")

ssl.create_default_context = functools.cache(ssl.create_default_context)


@pytest.fixture
def no_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines generate their scripts, also where a grammar would not let them."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_GRAMMAR", "off")


@pytest.fixture
def patient_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars are checked however busy the machine is, which is no reason to weaken one."""
    from vllm_mlx_harmony.server import grammar_checks

    monkeypatch.setattr(grammar_checks, "REQUEST_WAIT_SECONDS", 300.0)
    monkeypatch.setattr(grammar_checks, "MAX_ELAPSED", 120.0)
    monkeypatch.setattr(grammar_checks, "ANSWER_TIMEOUT", 300.0)
    monkeypatch.setattr(grammar_checks, "NICE", 0)


@pytest.fixture
def startup_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An interpreter as after an installation, which has read the startup file of its site."""
    from vllm_mlx_harmony import _startup
    from vllm_mlx_harmony.cli import doctor

    file = tmp_path / doctor.STARTUP_FILE
    file.write_text("import vllm_mlx_harmony._startup; vllm_mlx_harmony._startup.register()\n")
    monkeypatch.setattr(doctor.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [_startup.Finder(), *sys.meta_path])
    monkeypatch.delenv(_startup.SWITCH, raising=False)
    return file


NEEDS = {
    "linux": "test $(uname) = Linux",
    "mounts": "unshare --mount mount -t tmpfs none /tmp",
    "namespaces": "unshare -Urnpf --kill-child true",
}
"""For each argument of the mark `needs`, a command that succeeds where a machine has it."""


@functools.cache
def machine_has(need: str) -> bool:
    command = subprocess.run(NEEDS[need], shell=True, capture_output=True, check=False)
    return command.returncode == 0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    keep_samples(items)  # before `-m` looks at the marks
    yield
    missing = [
        item
        for item in items
        if not all(machine_has(need) for mark in item.iter_markers("needs") for need in mark.args)
    ]
    config.hook.pytest_deselected(items=missing)
    items[:] = [item for item in items if item not in missing]


def keep_samples(items: list[pytest.Item]) -> None:
    """Takes the mark `nightly(sample=N)` from every N-th row."""
    numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
    for item in items:
        mark = item.get_closest_marker("nightly")
        if mark and "sample" in mark.kwargs:
            if mark not in item.own_markers:
                raise pytest.UsageError(f"{item.nodeid}: only a function can be a sample")
            number = next(numbers[item.nodeid.partition("[")[0]])
            if number % mark.kwargs["sample"] == 0:
                item.own_markers[:] = [other for other in item.own_markers if other is not mark]
