"""The seal: what it opens, what it does not, and where its key comes from."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

pytest.importorskip("vllm_mlx")

from vllm_mlx_harmony.server import encryption as sealing
from vllm_mlx_harmony.server.encryption import KEY_VARIABLE, ServerSeal, server_seal

KEY, OTHER = bytes(32), bytes([1]) * 32


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    sealing._server_key.cache_clear()


@pytest.mark.parametrize("text", ["", "Need the weather.", "é 😀 <|end|>\n", "x" * 100_000])
def test_comes_back(text: str) -> None:
    sealed = ServerSeal(KEY, "a").seal(text)
    assert sealed.isascii()
    assert text == "" or text not in sealed
    assert ServerSeal(KEY, "a").unseal(sealed) == text


def test_sealed_twice_is_not_the_same() -> None:
    seal = ServerSeal(KEY, "a")
    assert seal.seal("a") != seal.seal("a")


def _flipped(sealed: str) -> str:
    last = sealed[-5]
    return sealed[:-5] + ("A" if last != "A" else "B") + sealed[-4:]


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(_flipped(ServerSeal(KEY, "a").seal("a" * 20)), id="changed"),
        pytest.param(ServerSeal(OTHER, "a").seal("a"), id="another server's"),
        pytest.param(ServerSeal(KEY, "b").seal("a"), id="another tenant's"),
        pytest.param("vmh1." + ServerSeal(KEY, "a").seal("a")[5:], id="an earlier format"),
        pytest.param(ServerSeal(KEY, "a").seal("a")[:20], id="shortened"),
        pytest.param("", id="empty"),
        pytest.param("gAAAAABo", id="another's format"),
        pytest.param("vmh2.", id="only the prefix"),
        pytest.param("vmh2.é", id="not ASCII"),
        pytest.param("vmh2.***", id="not base64"),
    ],
)
def test_what_is_forged_or_foreign_does_not_open(forged: str) -> None:
    assert ServerSeal(KEY, "a").unseal(forged) is None


def test_the_key_is_the_users_and_only_theirs() -> None:
    sealed = server_seal("tenant").seal("a")
    sealing._server_key.cache_clear()
    assert server_seal("tenant").unseal(sealed) == "a"
    path = sealing.state_dir() / sealing.FILE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_servers_given_the_same_secret_open_each_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "our secret")
    sealed = server_seal("tenant").seal("a")
    sealing._server_key.cache_clear()
    assert server_seal("tenant").unseal(sealed) == "a"
    assert not (sealing.state_dir() / sealing.FILE_NAME).exists()


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_file_that_is_no_key_is_left_alone(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = sealing.state_dir() / sealing.FILE_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    seal = server_seal("tenant")
    assert seal.unseal(seal.seal("a")) == "a"
    assert path.read_bytes() == content
    assert "no key" in caplog.text


def test_where_nothing_can_be_kept_it_lasts_as_long_as_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    monkeypatch.setattr(sealing, "state_dir", lambda: blocked / "state")
    seal = server_seal("tenant")
    assert seal.unseal(seal.seal("a")) == "a"
    assert "no key can be kept" in caplog.text
