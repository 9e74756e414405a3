"""What is published: the links of README, the changelog's heading, the wheels of the formula."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zipfile
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


def wheel(name: str) -> dict[str, Any]:
    return {"url": f"https://files/{name}", "hashes": {"sha256": f"digest of {name}"}}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("a-1-py3-none-any.whl",), 0),
        (("a-1-py3-none-any.whl", "a-1-cp312-cp312-macosx_11_0_arm64.whl"), 1),
        (("a-1-cp312-cp312-macosx_14_0_arm64.whl", "a-1-cp312-cp312-macosx_12_0_arm64.whl"), 0),
        (("a-1-cp312-cp312-macosx_15_0_arm64.whl", "a-1-cp310-abi3-macosx_11_0_arm64.whl"), 1),
        (
            (
                "a-1-cp312-cp312-macosx_10_13_universal2.whl",
                "a-1-cp313-cp313-macosx_11_0_arm64.whl",
            ),
            0,
        ),
        (
            (
                "a-1-cp312-cp312-macosx_11_0_x86_64.whl",
                "a-1-cp312-cp312-manylinux_2_28_aarch64.whl",
            ),
            None,
        ),
    ],
)
def test_best_wheel_is_chosen(release: Any, names: tuple[str, ...], expected: int | None) -> None:
    wheels = [wheel(name) for name in names]
    if expected is None:
        with pytest.raises(ValueError, match=r"no wheel for macOS 14\.0"):
            release.best(wheels)
    else:
        assert release.best(wheels) == wheels[expected]


def test_formula_has_urls_and_digests(release: Any, tmp_path: Path) -> None:
    built = tmp_path / "a_b-1.0-py3-none-any.whl"
    with zipfile.ZipFile(built, "w") as opened:
        opened.writestr("a_b-1.0.dist-info/METADATA", "Name: a-b\nVersion: 1.0\n\nReadme")
    package = {"name": "rich", "wheels": [wheel("rich-1-py3-none-any.whl")]}
    server = tmp_path / "a_b_server-1.0-py3-none-any.whl"
    server.write_bytes(b"")
    text = release.formula(built, server, [package])
    assert "/packages/py3/a/a-b/a_b-1.0-py3-none-any.whl" in text
    assert 'resource "a-b-server"' in text
    assert "/packages/py3/a/a-b-server/a_b_server-1.0-py3-none-any.whl" in text
    assert 'homepage "https://pypi.org/project/a-b/"' in text
    assert 'sha256 "digest of rich-1-py3-none-any.whl"' in text
    assert 'shell_output("#{bin}/vllm-mlx-harmony' in text
