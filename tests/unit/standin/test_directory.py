"""The contents of a stand-in's model directory."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.standin import cursor
from vllm_mlx_harmony.standin.directory import _encoder

Encode = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random gpt-oss."""
    return standin.write_tiny(tmp_path_factory.mktemp("tiny"), seed=1)


def test_stop_ids_are_those_of_gpt_oss(directory: Path, tiny: Path) -> None:
    for place in (directory, tiny):
        for name in ("config.json", "generation_config.json"):
            stops = json.loads((place / name).read_text())["eos_token_id"]
            assert stops == [vocab.RETURN, vocab.ENDOFTEXT, vocab.CALL]


def test_directories_state_they_are_not_gpt_oss(directory: Path, tiny: Path) -> None:
    for place in (directory, tiny):
        assert "not gpt-oss" in (place / "README.md").read_text().splitlines()[0]
    assert "not gpt-oss" in (directory / cursor.BOOK).read_text()
    assert "stand-in" in str(standin.FALLBACK.completion)


def test_layers_alternate_as_in_gpt_oss(directory: Path, tiny: Path) -> None:
    for place in (directory, tiny):
        config = json.loads((place / "config.json").read_text())
        assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
        assert config["sliding_window"] == 128


def test_no_partial_file_is_left(directory: Path, tiny: Path) -> None:
    assert not [*directory.glob("*.part"), *tiny.glob("*.part")]


def test_tiny_weights_fill_file(tiny: Path) -> None:
    with (tiny / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    del header["__metadata__"]
    ends = [0, *(entry["data_offsets"][1] for entry in header.values())]
    assert [entry["data_offsets"][0] for entry in header.values()] == ends[:-1]
    assert 8 + size + ends[-1] == (tiny / "model.safetensors").stat().st_size


def test_seed_determines_tiny_weights(tiny: Path, tmp_path: Path) -> None:
    def weights(place: Path) -> bytes:
        with (place / "model.safetensors").open("rb") as file:
            file.seek(50_000_000)
            return file.read(4096)

    assert weights(standin.write_tiny(tmp_path / "same", seed=1)) == weights(tiny)
    assert weights(standin.write_tiny(tmp_path / "other", seed=2)) != weights(tiny)


def test_rescript_replaces_book(tmp_path: Path, encode: Encode) -> None:
    standin.rescript(tmp_path, [standin.Script("a", "one")])
    before = cursor.read_book(tmp_path)
    assert cursor.read_book(tmp_path) is before
    standin.rescript(tmp_path, [standin.Script("a", "two")])
    assert cursor.read_book(tmp_path).entries[0].completion == tuple(encode("two"))


def test_text_is_encoded_without_openai_harmony(
    directory: Path, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ImportError

    pytest.importorskip("tokenizers", reason="comes with the host")
    text = "<|channel|>final<|message|>Zürich 🙂  日本\n<|return|>"
    expected = encode(text)
    monkeypatch.setattr(vocab, "encoding", missing)
    assert _encoder(directory)(text) == expected


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (standin.Script("a", [201_088]), "not an id of the model"),
        (standin.Script("a", [-1]), "not an id of the model"),
        (standin.Script("a", [1, 2], fail_at=3), "does not have token 3"),
        (standin.Script("a", [1, 2], fail_at=-1), "does not have token -1"),
        (standin.Script(re.compile("a.b"), [1], delay_ms=-1), "cannot take -1 ms"),
    ],
)
def test_impossible_scripts_are_rejected(
    tmp_path: Path, script: standin.Script, complaint: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        standin.rescript(tmp_path, [script])
    assert not (tmp_path / cursor.BOOK).exists()
