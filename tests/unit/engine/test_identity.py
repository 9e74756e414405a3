"""The weights, layout and tenant that a piece on disk belongs to."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx_harmony.engine.disk import identity, index


def test_digest_depends_on_weights_and_config(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    digests = [identity.of_weights(str(model)), identity.of_weights(str(tiny))]
    weights = next(model.glob("*.safetensors"))
    os.utime(weights, ns=(0, 0))
    digests.append(identity.of_weights(str(model)))
    weights.rename(model / "renamed.safetensors")
    digests.append(identity.of_weights(str(model)))
    with (model / "renamed.safetensors").open("ab") as file:
        file.write(b"\0")
    os.utime(model / "renamed.safetensors", ns=(0, 0))
    digests.append(identity.of_weights(str(model)))
    config = model / "config.json"
    config.write_text(config.read_text().replace("32.0", "31.0"))
    digests.append(identity.of_weights(str(model)))
    (model / "README.md").write_text("of no matter")
    assert identity.of_weights(str(model)) == digests[-1]
    assert digests[0] == digests[1]  # a copy with the same times is the same model
    assert len(set(digests)) == len(digests) - 1 and None not in digests
    assert identity.of_weights(str(tmp_path / "nothing")) is None


def patch(path: Path, place: int, content: bytes) -> None:
    """Overwrites part of a file, and keeps its size and times."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        file.write(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (times.st_size, times.st_mtime_ns)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file in a model directory, with a header of 300 KB and 3 MB of tensors."""
    directory = tmp_path / "weights"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    path = directory / "model.safetensors"
    header = b"{" + b" " * 300_000 + b"}"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(3_000_000))
    return path


@pytest.mark.parametrize(
    ("place", "detected"),
    [
        (8, True),  # the start, middle and end of the header
        (150_000, True),
        (300_009, True),
        (1_320_000, True),  # one of the sampled blocks
        (-1, True),
        (-4096, True),
        (500_000, False),  # between two sampled blocks
    ],
)
def test_digest_depends_on_content(weights: Path, place: int, detected: bool) -> None:
    before, content = identity.of_weights(str(weights.parent)), weights.read_bytes()
    original = content[place % len(content) :][:1]
    patch(weights, place, b"x")
    assert (identity.of_weights(str(weights.parent)) != before) == detected
    patch(weights, place, original)
    assert identity.of_weights(str(weights.parent)) == before


@pytest.mark.parametrize("name", ["model.gguf", "weights.npz"])
@pytest.mark.parametrize("place", [0, -1])
def test_digest_depends_on_content_of_other_formats(weights: Path, name: str, place: int) -> None:
    path = weights.rename(weights.with_name(name))
    before = identity.of_weights(str(path.parent))
    patch(path, place, b"x")
    assert identity.of_weights(str(path.parent)) != before


@pytest.mark.parametrize("content", [b"", b"123", b"\xff" * 8, b"\xff" * 5000])
def test_malformed_safetensors_have_digest(weights: Path, content: bytes) -> None:
    weights.write_bytes(content)
    digest = identity.of_weights(str(weights.parent))
    assert digest is not None and digest == identity.of_weights(str(weights.parent))


def test_reads_of_large_weights_are_bounded(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """65 GB in fifteen sparse files, one with a header length of 65 GB."""
    for number in range(15):
        with weights.with_name(f"model-{number}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", 65 << 30 if number == 7 else 60_000))
            file.truncate((65 << 30) // 15)
    read: list[int] = []
    real = os.pread

    def count(opened: int, size: int, place: int) -> bytes:
        read.append(size)
        return real(opened, size, place)

    monkeypatch.setattr(os, "pread", count)
    assert identity.of_weights(str(weights.parent)) is not None
    assert sum(read) < 20 << 20 and len(read) < 16 * 20


def test_links_are_followed(weights: Path, tmp_path: Path) -> None:
    """As in the Hugging Face cache, which links to files named by their content."""
    before = identity.of_weights(str(weights.parent))
    blob = weights.rename(tmp_path / "blob")
    weights.symlink_to(blob)
    assert identity.of_weights(str(weights.parent)) == before
    patch(blob, -1, b"x")
    assert identity.of_weights(str(weights.parent)) != before


def a_broken_link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def a_circle(path: Path) -> None:
    path.symlink_to(path)


def an_unreadable_file(path: Path) -> None:
    path.write_bytes(b"weights")
    path.chmod(0)


@pytest.mark.parametrize("fault", [a_broken_link, a_circle, an_unreadable_file])
def test_unreadable_weights_have_no_digest(
    weights: Path, fault: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = weights.with_name("more.safetensors")
    fault(path)
    if fault is an_unreadable_file and not os.geteuid():  # root may read everything
        real = os.open

        def refusing(opened: Any, *more: Any) -> int:
            if Path(opened) == path:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(opened, *more)

        monkeypatch.setattr(os, "open", refusing)
    assert identity.of_weights(str(weights.parent)) is None


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_irregular_files_are_not_weights(weights: Path, make: Callable[[Path], None]) -> None:
    before = identity.of_weights(str(weights.parent))
    make(weights.with_name("more.safetensors"))
    assert identity.of_weights(str(weights.parent)) == before


def test_layout_depends_on_model_windows_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = identity.of_layout("Model", (128, 0))
    monkeypatch.setattr(identity, "VERSION", index.VERSION + 1)
    another_format = identity.of_layout("Model", (128, 0))
    monkeypatch.undo()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9.1")
    another_library = identity.of_layout("Model", (128, 0))
    monkeypatch.undo()
    others = [identity.of_layout("Model", (64, 0)), identity.of_layout("Other", (128, 0))]
    assert len({layout, another_format, another_library, *others}) == 5


@pytest.mark.parametrize("when", ["never", "while it is loaded", "afterwards", "unreadable"])
def test_model_is_identified_by_its_loaded_files(
    weights: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If other weights replace them meanwhile, pieces still belong to the loaded ones."""
    directory = str(weights.parent)
    if when == "unreadable":
        a_broken_link(weights.with_name("more.safetensors"))
    before = identity.of_weights(directory)

    def load() -> str:
        if when == "while it is loaded":
            patch(weights, -1, b"x")
        return "loaded"

    with caplog.at_level(logging.WARNING):
        loaded, digest = identity.load_and_identify(directory, load)
    if when == "afterwards":
        patch(weights, -1, b"x")
    unknown = when in {"while it is loaded", "unreadable"}
    assert loaded == "loaded" and digest == (None if unknown else before)
    assert len(caplog.records) == unknown


def test_missing_model_has_no_digest(tmp_path: Path) -> None:
    assert identity.load_and_identify(str(tmp_path / "nothing"), lambda: 1) == (1, None)
