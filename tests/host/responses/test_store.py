"""Kept answers: what comes back, what is dropped, and what survives a kill."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest

pytest.importorskip("vllm_mlx")

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
    Syntax,
    Tool,
    User,
)
from vllm_mlx_harmony.host.responses import store as stores
from vllm_mlx_harmony.host.responses.store import (
    STORE_VARIABLE,
    FileStore,
    Kept,
    MemoryStore,
    Store,
    server_store,
)

Open = Callable[..., Store]
MESSAGES: tuple[Message, ...] = (
    Instructions("Be é."),
    User("2+2?"),
    Reasoning("Hm."),
    Preamble("Let me see."),
    Call("call_1", "add", '{"a": "\\u00e9"}'),
    Result("call_1", "4", "input[3]"),
    Answer("4 😀"),
)


def kept(key: str, size: int = 0) -> Kept:
    return Kept(key, {"id": key, "text": "é" * size}, [{"type": "message"}], MESSAGES)


@pytest.fixture(params=["memory", "file"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    opened: list[FileStore] = []

    def open_one(**limits: int) -> Store:
        if request.param == "memory":
            return MemoryStore(**limits)
        opened.append(FileStore(tmp_path / "new" / "kept.db", **limits))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def test_comes_back_as_it_was(open_store: Open) -> None:
    store = open_store()
    store.put(kept("a"))
    assert store.get("a") == kept("a")
    assert store.get("b") is None


def test_what_a_conversation_declares_comes_back(open_store: Open) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, None, 2.5]}}}
    lark = Syntax("lark", 'start: "a"')
    find = Tool("crm__find", "Finds.", schema, "input[0]", True, origin=("find", "crm"))
    patch = Tool("patch", syntax=lark)
    messages = (
        User("Hi"),
        AdditionalTools((find, patch)),
        EffortUpdate(Effort.HIGH),
        EffortUpdate(Effort.LOW, thinking=False),
        FormatUpdate(ResponseFormat(schema, "n", strict=True)),
        FormatUpdate(ResponseFormat(syntax=lark)),
        FormatUpdate(None),
    )
    store = open_store()
    store.put(Kept("a", {}, [], messages))
    back = store.get("a")
    assert back is not None
    assert back.messages == messages
    assert back.messages[1].tools[0].origin == ("find", "crm")  # type: ignore[union-attr]


def test_put_again_replaces(open_store: Open) -> None:
    store = open_store()
    store.put(kept("a"))
    store.put(kept("a", size=3))
    assert store.get("a") == kept("a", size=3)


def test_deleted_is_gone(open_store: Open) -> None:
    store = open_store()
    store.put(kept("a"))
    assert store.delete("a")
    assert not store.delete("a")
    assert store.get("a") is None


def there(store: Store, *keys: str) -> list[str]:
    return [key for key in keys if store.get(key) is not None]


def test_the_least_recently_used_goes_first(open_store: Open) -> None:
    store = open_store(max_count=2)
    store.put(kept("a"))
    store.put(kept("b"))
    store.get("a")
    store.put(kept("c"))
    assert there(store, "a", "b", "c") == ["a", "c"]


def test_bounded_by_bytes(open_store: Open) -> None:
    store = open_store(max_bytes=5000)
    for key in "abcdef":
        store.put(kept(key, size=300))  # 6 bytes a character
    assert there(store, *"abcdef") == ["e", "f"]


def test_what_is_larger_than_the_store_is_not_kept(open_store: Open) -> None:
    store = open_store(max_bytes=5000)
    store.put(kept("a"))
    store.put(kept("b", size=5000))
    assert there(store, "a", "b") == ["a"]


def test_memory_counts_what_it_holds() -> None:
    store = MemoryStore()
    store.put(kept("a", size=9))
    store.put(kept("a"))
    store.put(kept("b"))
    assert store.delete("a")
    assert store.delete("b")
    assert store.bytes == 0


def test_a_file_survives_a_restart(tmp_path: Path) -> None:
    before = FileStore(tmp_path / "kept.db")
    before.put(kept("a"))
    before.close()
    after = FileStore(tmp_path / "kept.db")
    assert after.get("a") == kept("a")
    after.close()


def test_a_file_that_cannot_be_written_can_be_read(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kept.db")
    store.put(kept("a"))
    store._file.execute("PRAGMA query_only=ON")
    with pytest.raises(sqlite3.OperationalError):
        store.put(kept("b"))
    assert there(store, "a", "b") == ["a"]
    store._file.execute("PRAGMA query_only=OFF")
    store.put(kept("b"))
    assert there(store, "a", "b") == ["a", "b"]
    store.close()


def test_a_text_that_is_not_asked_for_is_not_touched(tmp_path: Path) -> None:
    """What was written again stands in the log."""
    store = FileStore(tmp_path / "kept.db")
    for number in range(50):
        store.put(kept(f"r{number}", size=50_000))
    store._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.put(kept("a"))
    store.get("r0")
    store.get("a")
    assert (tmp_path / "kept.db-wal").stat().st_size < 100_000
    store.close()


def test_nothing_is_left_of_what_was_dropped(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kept.db", max_count=2)
    for key in ("a", "b", "b", "c", "d"):
        store.put(kept(key))
    store.delete("d")
    assert store._file.execute("SELECT id FROM texts").fetchall() == [("c",)]
    store.close()


def test_a_file_of_another_layout_is_no_obstacle(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "kept.db") as old:
        old.execute("CREATE TABLE kept (id TEXT PRIMARY KEY, text TEXT, size INT, used INT)")
        old.execute("CREATE INDEX kept_used ON kept (used)")
    old.close()
    store = FileStore(tmp_path / "kept.db")
    store.put(kept("a"))
    assert there(store, "a") == ["a"]
    store.close()


WRITER = dedent("""
    import sys
    from pathlib import Path
    from vllm_mlx_harmony.host.responses.store import FileStore, Kept

    store = FileStore(Path(sys.argv[1]))
    for number in range(100_000):
        store.put(Kept(f"r{number}", {"text": "x" * 100_000}, [], ()))
        print(number, flush=True)
""")


def test_a_file_survives_a_kill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert writer.stdout is not None
    told = [writer.stdout.readline() for _ in range(20)]
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read().split()
    writer.wait()
    last = int((rest or [told[-1]])[-1])
    store = FileStore(path)
    assert all(store.get(f"r{number}") is not None for number in range(last + 1))
    assert store.get(f"r{last + 2}") is None
    store.put(kept("a"))
    assert store.get("a") == kept("a")
    store.close()


@pytest.mark.parametrize("named", [True, False])
def test_the_servers_store(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores._opened.cache_clear()
    if named:
        monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "kept.db"))
    else:
        monkeypatch.delenv(STORE_VARIABLE, raising=False)
    store = server_store()
    assert isinstance(store, FileStore if named else MemoryStore)
    assert server_store() is store
    stores._opened.cache_clear()


def test_the_servers_store_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(MemoryStore):
        def __init__(self) -> None:
            time.sleep(0.05)
            super().__init__()

    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    monkeypatch.setattr(stores, "MemoryStore", Slow)
    stores._opened.cache_clear()
    with ThreadPoolExecutor(4) as threads:
        opened = [threads.submit(server_store) for _ in range(4)]
    assert len({id(one.result()) for one in opened}) == 1
    stores._opened.cache_clear()
