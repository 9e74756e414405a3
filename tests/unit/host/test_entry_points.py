"""The replaceable parts: whose is used, and what happens when it cannot be loaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.deltas import Delta
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.render import Rendered, render
from vllm_mlx_harmony.core.replay import ReplayScope
from vllm_mlx_harmony.core.turn import Turn, User
from vllm_mlx_harmony.host import entry_points


class FakeDistribution:
    """What an entry point knows of the package that declares it."""

    def __init__(self, name: str) -> None:
        self.name, self.version = name, "1.2"
        self.metadata = {"Name": name}


def entry(name: str, value: str, distribution: str) -> metadata.EntryPoint:
    entry_point = metadata.EntryPoint(name, value, entry_points.PROMPT_RENDERERS)
    vars(entry_point).update(dist=FakeDistribution(distribution))
    return entry_point


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
def test_foreign_part_takes_precedence(
    monkeypatch: pytest.MonkeyPatch, entries: list[metadata.EntryPoint], expected: str
) -> None:
    monkeypatch.setattr(entry_points.metadata, "entry_points", lambda **_: entries)
    part, _, source = entry_points.resolve(entry_points.PROMPT_RENDERERS, "harmony")
    assert part.__name__ == expected
    assert expected in source


def test_unknown_group_is_an_error() -> None:
    with pytest.raises(HostError, match=r"no\.such\.group"):
        entry_points.resolve("no.such.group", "harmony")


def test_part_that_fails_to_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = entry("harmony", "no_such_module:Thing", "other-renderer")
    monkeypatch.setattr(entry_points.metadata, "entry_points", lambda **_: [broken])
    with pytest.raises(HostError, match="no_such_module:Thing"):
        entry_points.resolve(entry_points.PROMPT_RENDERERS, "harmony")


def test_checkout_without_entry_points_uses_its_own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points.metadata, "entry_points", lambda **_: [])
    monkeypatch.setitem(entry_points.OWN, entry_points.PROMPT_RENDERERS, "os:getcwd")
    part, _, source = entry_points.resolve(entry_points.PROMPT_RENDERERS, "harmony")
    assert (part.__name__, source) == ("getcwd", "os:getcwd")


class Silent:
    """A part without the members of its protocol."""

    def __init__(self, turn: object, info: object, renderer: object) -> None: ...


class OldContext(StreamingHarmonyContext):
    """A context from before log probabilities."""

    def append_output(self, ids: Sequence[int]) -> list[Delta]:  # type: ignore[override]
        return super().append_output(ids)


def no_replay(turn: Turn) -> Rendered:
    return render(turn)


def extended(turn: Turn, replay: ReplayScope | None = None, style: str = "") -> Rendered:
    return render(turn, replay)


class Derived(StreamingHarmonyContext):
    """Adds nothing."""


RENDERERS, CONTEXTS = entry_points.PROMPT_RENDERERS, entry_points.STREAMING_CONTEXTS


@pytest.mark.parametrize(
    ("group", "part", "problem"),
    [
        (RENDERERS, "extended", None),
        (RENDERERS, "no_replay", r"no_replay takes \(turn\), not \(turn, replay, \.\.\.\)"),
        (RENDERERS, "ARCHITECTURE", "is not a function"),
        (CONTEXTS, "Derived", None),
        (CONTEXTS, "extended", r"not \(turn, info, renderer, \.\.\.\)"),
        (CONTEXTS, "Silent", "Silent.names is missing"),
        (CONTEXTS, "OldContext", r"append_output takes \(self, ids\)"),
        (entry_points.TOOL_PARSERS, "Silent", "Silent.extract_tool_calls is missing"),
    ],
)
def test_part_must_fit_its_protocol(
    monkeypatch: pytest.MonkeyPatch, group: str, part: str, problem: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "another_package", sys.modules[__name__])
    theirs = entry("harmony", f"another_package:{part}", "another-package")
    monkeypatch.setattr(
        entry_points.metadata,
        "entry_points",
        lambda **wanted: [theirs] if wanted["group"] == group else [],
    )
    if problem is None:
        assert "another-package 1.2" in entry_points.find("harmony").sources[group]
        return
    with pytest.raises(HostError, match=problem) as caught:
        entry_points.find("harmony")
    assert caught.value.message.startswith(f"{group} harmony = another_package:{part} cannot be")


ARCHITECTURE = (Path(__file__).resolve().parents[3] / "docs" / "architecture.md").read_text("utf-8")


def test_documented_renderer_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its module and its entry point, as another package would have them."""
    (code,) = re.findall(r"```python\n(.*?)```", ARCHITECTURE, re.DOTALL)
    (group, value) = re.findall(
        r'entry-points\."(.+?)"\]\nharmony = "(.+?)"', ARCHITECTURE, re.DOTALL
    )[0]
    (tmp_path / "dated_prompts.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    theirs = metadata.EntryPoint("harmony", value, group)
    vars(theirs).update(dist=FakeDistribution("dated-prompts"))
    monkeypatch.setattr(
        entry_points.metadata,
        "entry_points",
        lambda group, name="": [theirs] if group == theirs.group else [],
    )
    renderer = entry_points.find("harmony").renderer
    prompt = vocab.encoding().decode(list(renderer(Turn((User("Hi"),), date="2031-07-09")).ids))
    assert "Current date: 2026-01-01" in prompt
    assert "2031" not in prompt


def test_files_named_in_the_documentation_exist() -> None:
    package = Path(entry_points.__file__).resolve().parents[1]
    named = set(
        re.findall(
            r"`((?:core|protocols|server|host|cli|standin|tests|ci)/[\w./-]*)`", ARCHITECTURE
        )
    )
    assert len(named) > 30
    for name in named:
        assert (package / name).exists() or (package.parent / name).exists(), name
