"""The cipher: what it decrypts, what it does not, and where its key comes from."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from scripted_host import ScriptedEngine, SingleEngineHost

from vllm_mlx_harmony.server import encryption as sealing
from vllm_mlx_harmony.server.encryption import ServerCipher
from vllm_mlx_harmony.server.front_end import FrontEnd
from vllm_mlx_harmony.server.storage.single_server import SingleServer
from vllm_mlx_harmony.server.storage.store import MemoryStore

KEY, OTHER = bytes(32), bytes([1]) * 32


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VLLM_MLX_HARMONY_SEAL_KEY", raising=False)


def front_end() -> FrontEnd:
    """The front end of a server that has just started."""
    host = SingleEngineHost(ScriptedEngine({}))
    return FrontEnd(host, SingleServer(MemoryStore()))


@pytest.mark.parametrize("text", ["", "Need the weather.", "é 😀 <|end|>\n", "x" * 100_000])
def test_encrypted_text_is_decrypted(text: str) -> None:
    encrypted = ServerCipher(KEY, "a").encrypt(text)
    assert encrypted.isascii()
    assert text == "" or text not in encrypted
    assert ServerCipher(KEY, "a").decrypt(encrypted) == text


def test_same_text_is_encrypted_differently_each_time() -> None:
    cipher = ServerCipher(KEY, "a")
    assert cipher.encrypt("a") != cipher.encrypt("a")


def _flipped(encrypted: str) -> str:
    last = encrypted[-5]
    return encrypted[:-5] + ("A" if last != "A" else "B") + encrypted[-4:]


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(_flipped(ServerCipher(KEY, "a").encrypt("a" * 20)), id="changed"),
        pytest.param(ServerCipher(OTHER, "a").encrypt("a"), id="another server's"),
        pytest.param(ServerCipher(KEY, "b").encrypt("a"), id="another tenant's"),
        pytest.param("vmh1." + ServerCipher(KEY, "a").encrypt("a")[5:], id="an earlier format"),
        pytest.param(ServerCipher(KEY, "a").encrypt("a")[:20], id="shortened"),
        pytest.param("", id="empty"),
        pytest.param("gAAAAABo", id="another's format"),
        pytest.param("vmh2.", id="only the prefix"),
        pytest.param("vmh2.é", id="not ASCII"),
        pytest.param("vmh2.***", id="not base64"),
    ],
)
def test_forged_or_foreign_reasoning_is_not_decrypted(forged: str) -> None:
    assert ServerCipher(KEY, "a").decrypt(forged) is None


def test_key_file_is_private_to_the_user() -> None:
    encrypted = front_end().cipher("tenant").encrypt("a")
    assert front_end().cipher("tenant").decrypt(encrypted) == "a"
    path = sealing.state_dir() / sealing.FILE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_servers_with_the_same_secret_decrypt_each_others_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_MLX_HARMONY_SEAL_KEY", "our secret")
    encrypted = front_end().cipher("tenant").encrypt("a")
    assert front_end().cipher("tenant").decrypt(encrypted) == "a"
    assert not (sealing.state_dir() / sealing.FILE_NAME).exists()


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_file_without_a_key_is_left_alone(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = sealing.state_dir() / sealing.FILE_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    cipher = front_end().cipher("tenant")
    assert cipher.decrypt(cipher.encrypt("a")) == "a"
    assert path.read_bytes() == content
    assert "cannot be used as the key" in caplog.text


def test_key_lasts_for_the_process_without_a_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    monkeypatch.setattr(sealing, "state_dir", lambda: blocked / "state")
    cipher = front_end().cipher("tenant")
    assert cipher.decrypt(cipher.encrypt("a")) == "a"
    assert "cannot be used as the key" in caplog.text
