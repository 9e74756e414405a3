"""The replaceable parts: whose is taken, and what happens when it cannot be loaded."""

from __future__ import annotations

from importlib import metadata

import pytest

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host import parts


class FakeDistribution:
    """What an entry point knows of the package that brings it."""

    def __init__(self, name: str) -> None:
        self.name, self.version = name, "1.2"
        self.metadata = {"Name": name}


def entry(name: str, value: str, distribution: str) -> metadata.EntryPoint:
    found = metadata.EntryPoint(name, value, parts.PROMPT_RENDERERS)
    vars(found).update(dist=FakeDistribution(distribution))
    return found


OURS = entry("harmony", "os:getcwd", "vllm_mlx_harmony")
FOREIGN = entry("harmony", "os:getpid", "other-renderer")
AFTER = entry("harmony", "os:getppid", "z-renderer")


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([OURS], "getcwd"),
        ([OURS, FOREIGN], "getpid"),
        ([FOREIGN, OURS], "getpid"),
        ([AFTER, OURS, FOREIGN], "getpid"),
    ],
)
def test_somebody_elses_part_wins(
    monkeypatch: pytest.MonkeyPatch, entries: list[metadata.EntryPoint], expected: str
) -> None:
    monkeypatch.setattr(parts.metadata, "entry_points", lambda **_: entries)
    assert parts.resolve(parts.PROMPT_RENDERERS, "harmony").__name__ == expected
    assert expected in parts.source(parts.PROMPT_RENDERERS, "harmony")


def test_an_unknown_group_is_an_error() -> None:
    with pytest.raises(HostError, match=r"no\.such\.group"):
        parts.resolve("no.such.group", "harmony")


def test_a_part_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = entry("harmony", "no_such_module:Thing", "other-renderer")
    monkeypatch.setattr(parts.metadata, "entry_points", lambda **_: [broken])
    with pytest.raises(HostError, match="no_such_module:Thing"):
        parts.resolve(parts.PROMPT_RENDERERS, "harmony")


def test_a_checkout_on_the_path_uses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.metadata, "entry_points", lambda **_: [])
    monkeypatch.setitem(parts.OWN, parts.PROMPT_RENDERERS, "os:getcwd")
    assert parts.resolve(parts.PROMPT_RENDERERS, "harmony").__name__ == "getcwd"
    assert parts.source(parts.PROMPT_RENDERERS, "harmony") == "os:getcwd"
