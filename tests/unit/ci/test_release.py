"""What is published: the links of README, and the changelog's heading."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`hatch_build`, without hatchling."""
    name = "hatchling.metadata.plugin.interface"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(MetadataHookInterface=object))
    for parent in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    spec = importlib.util.spec_from_file_location("hatch_build", REPOSITORY / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        ("https://example.com/owner/name.git", "https://example.com/owner/name"),
        ("https://example.com/owner/name", "https://example.com/owner/name"),
        ("https://user:secret@example.com/owner/name.git", "https://example.com/owner/name"),
        ("git@example.com:owner/name.git", "https://example.com/owner/name"),
        ("ssh://git@example.com:2222/owner/name.git", "https://example.com/owner/name"),
        ("ssh://git@example.com/group/owner/name/", "https://example.com/group/owner/name"),
        ("/srv/git/name.git", ""),
        ("../name", ""),
        ("file:///srv/name.git", ""),
        ("", ""),
    ],
)
def test_web_address_of_a_remote_is_found(hook: Any, remote: str, expected: str) -> None:
    assert hook.web_address(remote) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md#b)", "[a](https://h/o/n/blob/v1.0/docs/a.md#b)"),
        ("![a b](docs/a.svg)", "![a b](https://h/o/n/raw/v1.0/docs/a.svg)"),
        ("[a](https://b/c) [d](#e)", "[a](https://b/c) [d](#e)"),
    ],
)
def test_relative_links_become_absolute(hook: Any, text: str, expected: str) -> None:
    assert hook.linked(text, "https://h/o/n", "1.0") == expected


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPOSITORY / "ci"))
    return importlib.import_module("release")


@pytest.mark.parametrize("page", [".github/workflows/publish.yml", "CONTRIBUTING.md"])
def test_every_distribution_is_published(release: Any, page: str) -> None:
    (pattern,) = re.findall(r"uv publish dist/([^\s`]+)", (REPOSITORY / page).read_text("utf-8"))
    for directory in (".", release.PLUGIN, release.VERIFY):
        project = tomllib.loads((REPOSITORY / directory / "pyproject.toml").read_text("utf-8"))
        name = project["project"]["name"].replace("-", "_")
        assert fnmatch.fnmatch(f"{name}-1.0-py3-none-any.whl", pattern)


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("[1.2.0] - 2026-11-23", True),
        ("[1.2.0]", False),
        ("[1x2.0] - 2026-11-23", False),
        ("[Unreleased]\n\n## [1.2.0] - 2026-11-23", False),
    ],
)
def test_release_needs_a_dated_heading(release: Any, heading: str, expected: bool) -> None:
    changelog = f"# Changelog\n\n## {heading}\n\n## [1.0.0] - 2026-01-01\n"
    assert release.is_dated(changelog, "1.2.0") is expected
