"""The vocabulary: what is shipped, where it is rebuilt, which file wins, and which ids are text."""

from __future__ import annotations

import base64
import hashlib
import lzma
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.files import write_atomically

CACHED = Path("vllm-mlx-harmony") / vocab.FILE_NAME


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, and a process that has not loaded the vocabulary."""
    home = tmp_path / "cache"
    monkeypatch.setattr(vocab, "cache_dir", lambda: home / "vllm-mlx-harmony")
    monkeypatch.setattr(vocab, "_encoding", None)
    monkeypatch.delenv(vocab.BASE_VARIABLE, raising=False)
    return home


@pytest.fixture(scope="module")
def official() -> bytes:
    return vocab.official_file()


CONTROL_TOKENS = {
    "<|startoftext|>": vocab.STARTOFTEXT,
    "<|endoftext|>": vocab.ENDOFTEXT,
    "<|return|>": vocab.RETURN,
    "<|constrain|>": vocab.CONSTRAIN,
    "<|channel|>": vocab.CHANNEL,
    "<|start|>": vocab.START,
    "<|end|>": vocab.END,
    "<|message|>": vocab.MESSAGE,
    "<|call|>": vocab.CALL,
}


@pytest.mark.parametrize(("name", "token"), CONTROL_TOKENS.items())
def test_control_tokens_have_ids_of_library(name: str, token: int) -> None:
    assert vocab.encoding().encode(name, allowed_special="all") == [token]
    assert token in vocab.CONTROL
    assert vocab.token_bytes(token) == b""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<|start|>user<|message|>Hi.<|end|><|start|>assistant",
        "<|star|> <|reserved_200013|> x<|call|>",
        "word " * 5000 + "<|end|>" * 3000,
    ],
    ids=["empty", "a conversation", "no control token", "long"],
)
def test_spelled_control_tokens_can_be_encoded_as_control(text: str) -> None:
    whole = vocab.encoding().encode(text, allowed_special="all")
    assert vocab.encode_with_control(text) == whole


def test_control_tokens_are_special_tokens_of_library() -> None:
    encoding = vocab.encoding()
    special = [token for token in range(vocab.SIZE) if encoding.is_special_token(token)]
    assert special == list(vocab.CONTROL)
    assert not encoding.is_special_token(vocab.SIZE)


def test_token_bytes_match_official_file(official: bytes) -> None:
    for line in official.splitlines():
        token, rank = line.split()
        assert vocab.token_bytes(int(rank)) == base64.b64decode(token)


@pytest.mark.parametrize("token", [-1, *vocab.CONTROL[:30:7], vocab.SIZE - 1, vocab.SIZE, 2**70])
def test_ids_without_text_have_no_bytes(token: int) -> None:
    assert vocab.token_bytes(token) == b""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "<|start|>assistant<|channel|>final<|message|>hi<|return|>",
        "<|reserved_200013|>",
        "東京 🙂 \u200b\n\t  x",
        "\x00\ufffd",
    ],
)
def test_text_is_encoded_without_control_tokens(text: str) -> None:
    ids = vocab.encode(text)
    assert not set(ids) & set(vocab.CONTROL)
    assert b"".join(map(vocab.token_bytes, ids)).decode() == text


def test_lone_surrogates_become_replacement_characters() -> None:
    ids = vocab.encode("a\ud83db\udc00")
    assert b"".join(map(vocab.token_bytes, ids)).decode() == "a\ufffdb\ufffd"


def test_threads_share_one_encoding(cache: Path) -> None:
    encodings: list[Any] = []
    threads = [
        threading.Thread(target=lambda: encodings.append(vocab.encoding())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(encodings) == 8
    assert len(set(map(id, encodings))) == 1


def test_file_is_rebuilt_in_cache_and_reused(cache: Path, official: bytes) -> None:
    vocab.encoding()
    file = cache / CACHED
    assert file.read_bytes() == official
    assert os.listdir(file.parent) == [file.name]  # nothing half-written stays
    before = file.stat().st_mtime_ns
    vocab._encoding = None
    vocab.encoding()
    assert file.stat().st_mtime_ns == before


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("damage", [b"", b"junk\n", None], ids=["empty", "junk", "one line short"])
def test_damaged_cached_file_is_rebuilt(cache: Path, official: bytes, damage: bytes | None) -> None:
    file = cache / CACHED
    file.parent.mkdir(parents=True)
    short = official[: official.rindex(b"\n", 0, -1) + 1]  # every line of it is valid
    file.write_bytes(short if damage is None else damage)
    vocab.encoding()
    assert file.read_bytes() == official


def test_file_of_environment_variable_wins(
    cache: Path, tmp_path: Path, official: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / vocab.FILE_NAME).write_bytes(official)
    monkeypatch.setenv(vocab.BASE_VARIABLE, str(tmp_path))
    vocab.encoding()
    assert os.environ[vocab.BASE_VARIABLE] == str(tmp_path)
    assert not cache.exists()


def test_directory_without_the_file_is_ignored(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(vocab.BASE_VARIABLE, str(tmp_path))
    vocab.encoding()
    assert os.environ[vocab.BASE_VARIABLE] == str(tmp_path)
    assert (cache / CACHED).exists()


def test_invalid_file_of_environment_variable_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / vocab.FILE_NAME).write_bytes(b"not a vocabulary")
    monkeypatch.setenv(vocab.BASE_VARIABLE, str(tmp_path))
    environment = dict(os.environ)
    with pytest.raises(vocab.VocabularyError, match=str(tmp_path)):
        vocab.encoding()
    assert dict(os.environ) == environment


def test_loading_restores_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(os.environ)
    vocab.encoding()
    assert dict(os.environ) == environment


class _Full:
    """A disk that is full in some directories: they can be read, but not written to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *directories: Path) -> None:
        self._directories = directories
        self._mkstemp = vocab.tempfile.mkstemp
        monkeypatch.setattr(vocab.tempfile, "mkstemp", self.mkstemp)

    def mkstemp(self, **where: Any) -> tuple[int, str]:
        if any(where["dir"].is_relative_to(full) for full in self._directories):
            raise OSError(28, "No space left on device")
        return self._mkstemp(**where)


def test_unwritable_cache_falls_back_to_temporary_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(vocab.tempfile, "tempdir", str(temporary))
    _Full(monkeypatch, cache)
    assert vocab.encoding().name
    assert list(temporary.iterdir()) == []  # it is in memory now


def test_file_in_place_of_cache_falls_back(cache: Path) -> None:
    cache.write_text("")
    assert vocab.encoding().name


def test_missing_home_directory_falls_back(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab, "cache_dir", lambda: Path("~/.cache/vllm-mlx-harmony"))
    assert vocab.encoding().name
    assert not Path("~").exists()


def test_full_disk_is_a_clear_error(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(vocab.tempfile, "tempdir", str(temporary))
    _Full(monkeypatch, cache, temporary)
    environment = dict(os.environ)
    with pytest.raises(vocab.VocabularyError, match=vocab.BASE_VARIABLE):
        vocab.encoding()
    assert dict(os.environ) == environment


@pytest.mark.parametrize("full", [False, True], ids=["cache", "temporary"])
def test_unreadable_file_is_not_reported_as_unwritable(
    cache: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    def fail(_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("openai_harmony.load_harmony_encoding", fail)
    if full:
        _Full(monkeypatch, cache)
    with pytest.raises(vocab.VocabularyError, match=r"cannot be loaded .*Input/output error"):
        vocab.encoding()


def test_failed_write_leaves_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(cache / "file", b"content")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("replace", [True, False])
def test_existing_file_is_replaced_on_request_only(tmp_path: Path, replace: bool) -> None:
    file = tmp_path / "new" / "file"
    write_atomically(file, b"one", replace=replace)
    write_atomically(file, b"other", replace=replace)
    assert file.read_bytes() == (b"other" if replace else b"one")
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]


def test_shipped_file_is_official_file(official: bytes) -> None:
    assert hashlib.sha256(official).hexdigest() == vocab.SHA256


@pytest.mark.parametrize("packed", [b"", b"no xz"], ids=["empty", "not xz"])
def test_damaged_shipped_data_says_reinstall(packed: bytes) -> None:
    with pytest.raises(vocab.VocabularyError, match="reinstall"):
        vocab.official_file(packed)


def test_unofficial_data_says_reinstall() -> None:
    with pytest.raises(vocab.VocabularyError, match="reinstall"):
        vocab.official_file(lzma.compress(b""))


def test_missing_lzma_is_reported_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lzma", None)
    with pytest.raises(vocab.VocabularyError, match=vocab.BASE_VARIABLE):
        vocab.official_file()


@pytest.mark.parametrize(
    ("platform", "variable", "directory"),
    [
        ("linux", {}, "/home/me/.cache"),
        ("linux", {"XDG_CACHE_HOME": "/cache"}, "/cache"),
        ("darwin", {}, "/home/me/Library/Caches"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local"),
        ("win32", {}, "/home/me/AppData/Local"),
    ],
)
def test_cache_directory_follows_platform(
    monkeypatch: pytest.MonkeyPatch, platform: str, variable: dict[str, str], directory: str
) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variable}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert vocab.cache_dir() == Path(directory) / "vllm-mlx-harmony"


_CHILD = "from vllm_mlx_harmony.core import vocab; print(vocab.encode('hello'))"


@pytest.mark.nightly
@pytest.mark.once
def test_concurrent_processes_write_one_file(tmp_path: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if name != vocab.BASE_VARIABLE},
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "LOCALAPPDATA": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    children = [
        subprocess.Popen([sys.executable, "-c", _CHILD], env=environment, stdout=subprocess.PIPE)
        for _ in range(6)
    ]
    outputs = {child.communicate(timeout=120)[0] for child in children}
    assert outputs == {f"{vocab.encode('hello')}\n".encode()}
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file.name == vocab.FILE_NAME
