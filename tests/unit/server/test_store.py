"""Stored responses: what comes back, what is dropped, and what survives a kill."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any, get_args

import pytest

from vllm_mlx_harmony.core.errors import StoreError
from vllm_mlx_harmony.core.turn import (
    AdditionalTools,
    Answer,
    Call,
    Effort,
    EffortUpdate,
    FormatUpdate,
    Instructions,
    Message,
    Preamble,
    Reasoning,
    ResponseFormat,
    Result,
    ServerCall,
    ServerResult,
    Summary,
    Syntax,
    Tool,
    User,
)
from vllm_mlx_harmony.server.storage import store as stores
from vllm_mlx_harmony.server.storage.store import (
    FileStore,
    MemoryStore,
    ResourceKey,
    Store,
    StoredResponse,
)

Open = Callable[..., Store]
TENANT = "the tenant"
MESSAGES: tuple[Message, ...] = (
    Instructions("Be é."),
    User("2+2?"),
    Reasoning("Hm."),
    Preamble("Let me see."),
    Call("call_1", "add", '{"a": "\\u00e9"}'),
    Result("call_1", "4", "input[3]"),
    Answer("4 😀"),
)


def response(key: str, size: int = 0) -> StoredResponse:
    return StoredResponse(
        key, {"id": key, "text": "é" * size}, [{"type": "message"}], MESSAGES, TENANT
    )


def key_of(response_id: str, tenant: str = TENANT) -> ResourceKey:
    return ResourceKey(response_id, tenant)


@pytest.fixture(params=["memory", "file"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    opened: list[FileStore] = []

    def open_with(**limits: int) -> Store:
        if request.param == "memory":
            return MemoryStore(**limits)
        opened.append(FileStore(tmp_path / "new" / "kept.db", **limits))
        return opened[-1]

    yield open_with
    for store in opened:
        store.close()


def test_response_comes_back_unchanged(open_store: Open) -> None:
    store = open_store()
    store.put(response("a"))
    assert store.get(key_of("a")) == response("a")
    assert store.get(key_of("b")) is None


def test_long_response_comes_back(open_store: Open) -> None:
    """It is written in parts: otherwise, others would wait 4 ms for each megabyte."""
    store = open_store()
    text = '"é😀\\\n' * 2**20
    items = [
        {
            "type": "message",
            "content": [{"text": text, "more": [None, 1.5, {}, []], text: {"a": 1, "b": [2, 3]}}],
        }
    ]
    long = replace(response("a"), input_items=items, document={"id": "a", "text": text})
    store.put(long)
    assert store.get(key_of("a")) == long


def test_every_kind_of_message_comes_back(open_store: Open) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, None, 2.5]}}}
    lark = Syntax("lark", 'start: "a"')
    find = Tool("crm__find", "Finds.", schema, "input[0]", True, origin=("find", "crm"))
    patch = Tool("patch", syntax=lark)
    messages = (
        Summary("They met."),
        ServerCall("call_1", "python", "1"),
        ServerResult("call_1", "python", "1"),
        AdditionalTools((find, patch)),
        EffortUpdate(Effort.HIGH),
        EffortUpdate(Effort.LOW, thinking=False),
        FormatUpdate(ResponseFormat(schema, "n", strict=True)),
        FormatUpdate(ResponseFormat(syntax=lark)),
        FormatUpdate(None),
    )
    store = open_store()
    store.put(StoredResponse("a", {}, [], messages, TENANT))
    stored = store.get(key_of("a"))
    assert stored is not None
    assert stored.messages == messages
    assert {type(message) for message in MESSAGES + messages} == {*get_args(Message)}
    assert stored.messages[3].tools[0].origin == ("find", "crm")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "Unknown", "text": "a"}',
        '{"kind": "User"}',
        '{"kind": "User", "text": "a", "more": "b"}',
        '{"kind": "User", "text": {}}',
        '{"text": "a"}',
        '["User", "a"]',
        "nonsense",
    ],
)
def test_what_another_version_wrote_is_absent(
    open_store: Open, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    with monkeypatch.context() as patch:
        patch.setattr(StoredResponse, "text", lambda _: f'["a", {{}}, [], [{text}], ""]')
        store.put(response("a"))
    assert store.get(key_of("a")) is None
    assert "cannot be read" in caplog.text
    store.put(response("a"))
    assert store.get(key_of("a")) == response("a")


def test_second_put_replaces_response(open_store: Open) -> None:
    store = open_store()
    store.put(response("a"))
    store.put(response("a", size=3))
    assert store.get(key_of("a")) == response("a", size=3)


def test_deleted_response_is_gone(open_store: Open) -> None:
    store = open_store()
    store.put(response("a"))
    assert store.delete(key_of("a"))
    assert not store.delete(key_of("a"))
    assert store.get(key_of("a")) is None


def stored_keys(store: Store, *keys: str) -> list[str]:
    return [key for key in keys if store.get(key_of(key)) is not None]


def test_least_recently_used_is_evicted_first(open_store: Open) -> None:
    store = open_store(max_count=2)
    store.put(response("a"))
    store.put(response("b"))
    store.get(key_of("a"))
    store.put(response("c"))
    assert stored_keys(store, "a", "b", "c") == ["a", "c"]


def test_store_is_bounded_by_bytes(open_store: Open) -> None:
    store = open_store(max_bytes=5000)
    for key in "abcdef":
        store.put(response(key, size=300))  # 6 bytes a character
    assert stored_keys(store, *"abcdef") == ["e", "f"]


def test_response_larger_than_store_is_not_stored(open_store: Open) -> None:
    store = open_store(max_bytes=5000)
    store.put(response("a"))
    store.put(response("b", size=5000))
    assert stored_keys(store, "a", "b") == ["a"]


def test_deeply_nested_response_comes_back(open_store: Open) -> None:
    """Bodies may have 500 levels, of which pydantic's parser reads 200."""
    nested: Any = "here"
    for _ in range(500):
        nested = {"a": [nested]} if len(str(nested)) % 2 else [nested]
    deep = replace(response("a"), document={"id": "a", "metadata": nested})
    store = open_store()
    store.put(deep)
    assert store.get(key_of("a")) == deep


def test_memory_limit_is_in_bytes() -> None:
    store = MemoryStore(max_bytes=10_000)
    for key, text in {"a": "😀" * 700, "b": "x" * 7000}.items():
        store.put(replace(response(key), document={"id": key, "text": text}))
    held = sum(sys.getsizeof(store._texts.get(key_of(key)) or "") for key in "ab")
    assert 7000 < held <= 10_000


def test_emptied_memory_store_has_size_zero() -> None:
    store = MemoryStore()
    store.put(response("a", size=9))
    store.put(response("a"))
    store.put(response("b"))
    assert store.delete(key_of("a"))
    assert store.delete(key_of("b"))
    assert store._texts.size == 0


def test_file_survives_restart(tmp_path: Path) -> None:
    before = FileStore(tmp_path / "kept.db")
    before.put(response("a"))
    before.close()
    after = FileStore(tmp_path / "kept.db")
    assert after.get(key_of("a")) == response("a")
    after.close()


def test_read_only_file_can_be_read(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kept.db")
    store.put(response("a"))
    store._database.connection.execute("PRAGMA query_only=ON")
    with pytest.raises(StoreError):
        store.put(response("b"))
    assert stored_keys(store, "a", "b") == ["a"]
    store._database.connection.execute("PRAGMA query_only=OFF")
    store.put(response("b"))
    assert stored_keys(store, "a", "b") == ["a", "b"]
    store.close()


def test_get_does_not_rewrite_text(tmp_path: Path) -> None:
    """Rewritten texts would be in the write-ahead log."""
    store = FileStore(tmp_path / "kept.db")
    for number in range(50):
        store.put(response(f"r{number}", size=50_000))
    store._database.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.put(response("a"))
    store.get(key_of("r0"))
    store.get(key_of("a"))
    assert (tmp_path / "kept.db-wal").stat().st_size < 100_000
    store.close()


def test_evicted_response_leaves_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kept.db", max_count=2)
    for key in ("a", "b", "b", "c", "d"):
        store.put(response(key))
    store.delete(key_of("d"))
    assert store._database.read("SELECT id FROM response_texts") == [("c",)]
    store.close()


def test_other_tenants_get_nothing(open_store: Open) -> None:
    store = open_store()
    store.put(response("a"))
    assert store.get(key_of("a", "another")) is None
    assert not store.delete(key_of("a", "another"))
    store.put(replace(response("a", size=3), tenant="another"))
    assert store.get(key_of("a")) == response("a")


# --- What can happen to a file.


def directory(path: Path) -> None:
    path.mkdir()


def text(path: Path) -> None:
    path.write_text("These are my notes.\n" * 100)


def damaged(path: Path) -> None:
    store = FileStore(path)
    for number in range(50):
        store.put(response(f"r{number}", size=1000))
    store.close()
    with path.open("r+b") as file:
        for page in range(2, 40):
            file.seek(page * 4096 + 100)
            file.write(b"\xff" * 2000)


def from_the_future(path: Path) -> None:
    FileStore(path).close()
    with sqlite3.connect(path) as file:
        file.execute(f"PRAGMA user_version={stores.VERSION + 1}")
    file.close()


def below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("")


@pytest.mark.parametrize("create", [directory, text, damaged, from_the_future, below_a_file])
def test_unusable_file_is_rejected(create: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "dir" / "kept.db"
    path.parent.mkdir()
    create(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StoreError) as refused:
        FileStore(path)
    assert str(path) in refused.value.message
    assert refused.value.message.endswith("unset VLLM_MLX_HARMONY_STORE")
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_file_is_private_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kept.db"
    FileStore(path).close()
    path.chmod(0o644)
    store = FileStore(path)
    store.put(response("a"))
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == dict.fromkeys(
        ["kept.db", "kept.db-wal", "kept.db-shm", "kept.db.reserve"], 0o600
    )
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    store.close()


def test_reads_do_not_write(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kept.db", max_count=2)
    store.put(response("a"))
    store.put(response("b"))
    log = tmp_path / "kept.db-wal"
    before = log.stat()
    for _ in range(20):
        assert store.get(key_of("a")) is not None
    after = log.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    store.put(response("c"))  # a read counts as use all the same
    assert stored_keys(store, "a", "b", "c") == ["a", "c"]
    store.close()


def test_foreign_lock_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_BUSY", 0.3)
    monkeypatch.setattr(stores, "_PAUSE", 3600)
    store = FileStore(tmp_path / "kept.db")
    store.put(response("a"))
    other = sqlite3.connect(tmp_path / "kept.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    def put(number: int) -> bool:
        """Whether SQLite has waited for the lock."""
        with pytest.raises(StoreError) as refused:
            store.put(response(f"r{number}"))
        return isinstance(refused.value.__cause__, sqlite3.OperationalError)

    with ThreadPoolExecutor(20) as threads:
        assert sum(threads.map(put, range(20))) == 1
    other.execute("ROLLBACK")
    other.close()
    store._paused_until = 0.0  # as after `_PAUSE`
    store.put(response("b"))
    assert stored_keys(store, "a", "b") == ["a", "b"]
    store.close()


def test_readers_do_not_wait_for_writer(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kept.db")
    store.put(response("a"))
    other = sqlite3.connect(tmp_path / "kept.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert store.get(key_of("a")) == response("a")
    other.execute("ROLLBACK")
    other.close()
    store.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_removed_file_is_recreated(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "kept.db"
    store = FileStore(path)
    store.put(response("a"))
    for file in tmp_path.iterdir():
        file.unlink()
    if replaced:
        other = FileStore(path)
        other.put(response("b"))
        other.close()
    assert stored_keys(store, "a", "b") == (["b"] if replaced else [])
    store.put(response("c"))
    store.close()
    after = FileStore(path)
    assert stored_keys(after, "a", "b", "c") == [*(["b"] if replaced else []), "c"]
    after.close()


def test_removed_directory_is_a_store_error(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "dir" / "kept.db")
    store.put(response("a"))
    shutil.rmtree(tmp_path / "dir")
    (tmp_path / "dir").write_text("")
    for call in (lambda: store.put(response("b")), lambda: store.get(key_of("a"))):
        with pytest.raises(StoreError) as failed:
            call()
        assert failed.value.status == 503


def test_temporarily_missing_file_is_opened_again(tmp_path: Path) -> None:
    """Even after a failed read in the meantime, as with a directory that is mounted again."""
    path, away = tmp_path / "dir" / "kept.db", tmp_path / "away"
    store = FileStore(path)
    store.put(response("a"))
    path.parent.rename(away)
    path.parent.write_text("")
    with pytest.raises(StoreError):
        store.get(key_of("a"))
    path.parent.unlink()
    away.rename(path.parent)
    assert stored_keys(store, "a") == ["a"]
    store.put(response("b"))
    assert stored_keys(store, "a", "b") == ["a", "b"]
    store.close()


class FullDisk(sqlite3.Connection):
    """Refuses all writes as long as the reserve beside the file takes up the last space."""

    reserve: Path

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if self.reserve.exists() and sql.startswith(("INSERT", "DELETE", "UPDATE")):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return super().execute(sql, *args)


def test_full_disk_stores_nothing_but_still_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.db"
    monkeypatch.setattr(FullDisk, "reserve", path.with_name("kept.db.reserve"), raising=False)
    first = FileStore(path)
    first.put(response("a"))
    first.put(response("b"))
    first.close()
    connect = partial(sqlite3.connect, factory=FullDisk)
    monkeypatch.setattr(sqlite3, "connect", connect)
    store = FileStore(path)
    with pytest.raises(StoreError, match="full"):
        store.put(response("c"))
    assert store.delete(key_of("a"))
    assert stored_keys(store, "a", "b", "c") == ["b"]
    assert FullDisk.reserve.stat().st_size > 0
    store.close()


def test_reserve_that_the_disk_has_no_room_for_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of it could take the space that a deletion needs."""

    def urandom(size: int) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "urandom", urandom)
    store = FileStore(tmp_path / "kept.db")
    store.put(response("a"))
    assert not (tmp_path / "kept.db.reserve").exists()
    store.close()


def test_file_of_other_layout_is_usable(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "kept.db") as old:
        old.execute("CREATE TABLE kept (id TEXT PRIMARY KEY, text TEXT, size INT, used INT)")
        old.execute("CREATE INDEX kept_used ON kept (used)")
    old.close()
    store = FileStore(tmp_path / "kept.db")
    store.put(response("a"))
    assert stored_keys(store, "a") == ["a"]
    store.close()


WRITER = dedent("""
    import sys
    from pathlib import Path
    from vllm_mlx_harmony.server.storage.store import FileStore
    from vllm_mlx_harmony.server.storage.store import StoredResponse

    store = FileStore(Path(sys.argv[1]))
    for number in range(100_000):
        store.put(StoredResponse(f"r{number}", {"text": "x" * 100_000}, [], (), "the tenant"))
        print(number, flush=True)
""")


def test_file_survives_kill_during_write(tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert writer.stdout is not None
    lines = [writer.stdout.readline() for _ in range(20)]
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read().split()
    writer.wait()
    last = int((rest or [lines[-1]])[-1])
    store = FileStore(path)
    assert all(store.get(key_of(f"r{number}")) is not None for number in range(last + 1))
    assert store.get(key_of(f"r{last + 2}")) is None
    store.put(response("a"))
    assert store.get(key_of("a")) == response("a")
    store.close()


@pytest.mark.parametrize("named", [True, False])
def test_named_store_is_a_file(named: bool, tmp_path: Path) -> None:
    store = stores.open_store(str(tmp_path / "kept.db") if named else "")
    assert isinstance(store, FileStore if named else MemoryStore)
