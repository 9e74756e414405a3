"""The helper process that tries grammars: what it stops, whom it serves, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import psutil
import pytest
from grammar_texts import LARK, Schema, grammar, multiple_of
from waiting import wait_until

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.grammar import weakenings
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import VOCAB_SIZE, Tool, Turn
from vllm_mlx_harmony.server import grammar_checks, grammar_process
from vllm_mlx_harmony.server.grammar_checks import (
    LIMIT_EXCEEDED,
    CheckUnavailable,
    GrammarCheck,
    WorkerPool,
)

pytestmark = pytest.mark.usefixtures("patient_checks")

ENDLESS = grammar(multiple_of(99_999_989))


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with closing(WorkerPool()) as worker_pool:
        yield worker_pool


def in_threads(*functions: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def worker(pool: WorkerPool) -> int:
    """The process that checks the next grammar."""
    GrammarCheck("any", pool)(f'start: "{time.monotonic()}"')
    return pool.idle[-1].process.pid


@pytest.mark.parametrize("name", LARK)
def test_dangerous_grammar_is_stopped(pool: WorkerPool, name: str) -> None:
    """For schemas, see `test_grammar_limits`."""
    problem = GrammarCheck("tenant", pool)(LARK[name])
    assert problem
    assert "panic" not in problem
    assert GrammarCheck("tenant", pool)('start: "a"') == ""


def test_verdict_is_cached_for_its_tenant(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    original = WorkerPool.trial

    def counted(self, text, trials):  # type: ignore[no-untyped-def]
        tried.append(tenant)
        return original(self, text, trials)

    monkeypatch.setattr(WorkerPool, "trial", counted)
    for tenant in ("a", "a", "b", "a", "b"):
        assert GrammarCheck(tenant, pool)(LARK["5000 rules"]) == LIMIT_EXCEEDED
    assert tried == ["a", "b"]
    tried.clear()
    tenant, verdicts = "c", list[str]()

    def ask() -> None:
        verdicts.append(GrammarCheck(tenant, pool)(ENDLESS))

    for thread in in_threads(*[ask] * 8):
        thread.join()
    assert verdicts == [LIMIT_EXCEEDED] * 8
    assert tried == ["c"], "who waited for a place gets the verdict of the first"


def test_large_valid_grammar_passes(pool: WorkerPool) -> None:
    values = [f"value-{index * 7_919 % 100_003}" for index in range(50_000)]
    problem, size = GrammarCheck("large", pool).verdict(grammar({"enum": values}))
    assert not problem
    assert size > 2**20
    deep: Schema = {"type": "string"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"x": deep}, "required": ["x"]}
    assert not GrammarCheck("large", pool)(grammar(deep))


def test_each_trial_is_made_from_its_own_start(pool: WorkerPool) -> None:
    """Also behind one whose output was complete."""
    text = f'start: "a" "b" | "ac" slow\n{LARK["terminals, 20 levels of 2"]}'
    text = text.replace("start: T20", "slow: T20")
    a, ac = vocab.encode("a"), vocab.encode("ac")
    assert GrammarCheck("t", pool).verdict(text, (a, ac))[0]
    assert not GrammarCheck("t", pool).verdict(text, (a,))[0]
    assert GrammarCheck("t", pool).verdict('start: "a" ("b" | "c" "d")', (a, ac, ()))[0] == ""


def test_strict_schemas_of_many_tools_pass(pool: WorkerPool) -> None:
    pattern = {"type": "string", "pattern": r"^[a-z0-9._]+@[a-z]+\.[a-z]{2,5}$"}
    schema = {"type": "object", "properties": {"to": pattern}, "required": ["to"]}
    schema["additionalProperties"] = False
    tools = tuple(Tool(f"tool_{at}", parameters=schema, strict=True) for at in range(500))
    strongest = next(weakenings(Turn((), tools), Names.of(Turn((), tools))))
    assert len(strongest.trials) == 500
    assert GrammarCheck("many", pool).verdict(strongest.text, strongest.trials)[0] == ""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_hanging_process_is_replaced(signum: int) -> None:
    with closing(WorkerPool()) as pool:
        first = worker(pool)
        pool.idle[0]._socket.settimeout(0.5)
        os.kill(first, signum)
        with pytest.raises(CheckUnavailable):
            GrammarCheck("t", pool)('start: "b"')
        assert not psutil.pid_exists(first)
        assert GrammarCheck("t", pool)('start: "b"') == ""
        assert worker(pool) != first


def test_memory_of_a_check_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that writes to `grammar_process.MEMORY` bytes is stopped."""
    take = "lambda *_: (bytearray(b'x') * {size}, __import__('time').sleep(1)) and ''"
    limit = grammar_process.MEMORY
    for size, verdict in ((limit // 4, ""), (limit, LIMIT_EXCEEDED)):
        program = grammar_checks._PROGRAM.replace(
            "; from vllm_mlx_harmony.server.grammar_process import main",
            "; from vllm_mlx_harmony.server import grammar_process"
            f"; grammar_process._problem = {take.format(size=size)}; main = grammar_process.main",
        )
        with monkeypatch.context() as patch, closing(WorkerPool()) as pool:
            patch.setattr(grammar_checks, "_PROGRAM", program)
            assert GrammarCheck("t", pool)('start: "a"') == verdict


def test_check_without_helper_process_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(WorkerPool()) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(grammar_checks, "_PROGRAM", "raise SystemExit(3)")
            with pytest.raises(CheckUnavailable, match="does not answer"):
                GrammarCheck("t", pool)('start: "a"')
        assert "cannot be checked" in caplog.text
        assert GrammarCheck("t", pool)('start: "a"') == ""


# --- places ---


def test_tenants_take_turns() -> None:
    """However many requests one of them has."""
    pool, order = WorkerPool(), list[str]()

    def write(tenant: str) -> None:
        with GrammarCheck(tenant, pool).writing():
            order.append(tenant)

    threads: list[threading.Thread] = []
    with GrammarCheck("holder", pool).writing():
        for tenant in ("a", "a", "a", "b", "b"):
            threads.extend(in_threads(partial(write, tenant)))
            wait_until(lambda: len(pool.writing.waiting) == len(threads), "all threads to wait")
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "a", "b", "a"]
    assert not pool.writing.waiting
    assert not pool.writing.holders


def test_request_that_times_out_moves_no_other() -> None:
    """Only a tenant that gets a place lets the others' requests go first."""
    pool, order = WorkerPool(), list[str]()

    def write(tenant: str) -> None:
        with pool.writing.place(tenant):
            order.append(tenant)

    threads: list[threading.Thread] = []
    with pool.writing.place("holder"):
        threads.extend(in_threads(partial(write, "a")))
        wait_until(lambda: len(pool.writing.waiting) == 1, "the first thread to wait")
        threads.extend(in_threads(partial(write, "b")))
        wait_until(lambda: len(pool.writing.waiting) == 2, "the second thread to wait")
        with pytest.raises(CheckUnavailable), pool.writing.place("a", until=0.0):
            pass
    for thread in threads:
        thread.join()
    assert order == ["a", "b"]


@pytest.mark.nightly
def test_slow_check_does_not_delay_other_tenants(pool: WorkerPool) -> None:
    stop = threading.Event()

    def attack(index: int) -> None:
        for number in range(20):
            if not stop.is_set():
                text = grammar(multiple_of(99_000_000 + 100 * index + number))
                GrammarCheck("attacker", pool)(text)

    threads = in_threads(*(partial(attack, index) for index in range(8)))
    try:
        for number in range(10):
            assert GrammarCheck("other", pool)(grammar(multiple_of(number + 1))) == ""
        assert any(thread.is_alive() for thread in threads)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_request_waits_for_limited_time(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool.checking.place("slow"):
        monkeypatch.setattr(grammar_checks, "REQUEST_WAIT_SECONDS", 0.1)
        with pytest.raises(CheckUnavailable, match="timed out"):
            GrammarCheck("slow", pool)('start: "slow"')
    assert GrammarCheck("slow", pool)('start: "slow"') == ""


# --- the process ---


@pytest.mark.needs("linux")  # where a thread has a niceness of its own
def test_process_is_nice_and_in_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C does not reach it. It stays in the server's session, within which niceness counts."""
    monkeypatch.setattr(grammar_checks, "NICE", 3)
    with closing(WorkerPool()) as pool:
        pid = worker(pool)
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, niceness + 3)
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid != os.getpgid(0)


SERVER = """
import sys, json
sys.path[:] = json.loads(sys.argv[1])
import threading
from vllm_mlx_harmony.server.grammar_checks import GrammarCheck
check = GrammarCheck("t")
print(check('start: "a"'), flush=True)
threading.Thread(target=check, args=(sys.argv[2],), daemon=True).start()
input()
"""


@pytest.mark.parametrize("busy", [False, True])
def test_killed_server_leaves_no_process(busy: bool) -> None:
    text = ENDLESS if busy else 'start: "b"'
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, json.dumps(sys.path), text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdin is not None
    with server.stdout, server.stdin:
        assert server.stdout.readline() == b"\n"
        children = partial(psutil.Process(server.pid).children, recursive=True)
        wait_until(lambda: len(children()) > busy, "a process")  # the helper process, and its child
        started = children()
        server.kill()
        server.wait()
    assert psutil.wait_procs(started, 60)[1] == []


def test_process_imports_only_library() -> None:
    program = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
        "from vllm_mlx_harmony.server import grammar_process\n"
        "grammar_process._tokenizer()\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, json.dumps(sys.path)],
        capture_output=True,
        check=True,
    )
    imported = json.loads(run.stdout)
    packages = {name.partition(".")[0] for name in imported}
    assert packages - sys.stdlib_module_names - {"__main__"} == {"llguidance", "vllm_mlx_harmony"}
    ours = {name for name in imported if name.startswith("vllm_mlx_harmony.")}
    assert ours == {"vllm_mlx_harmony.server", "vllm_mlx_harmony.server.grammar_process"}


def test_control_tokens_have_their_real_ids() -> None:
    tokenizer = grammar_process._Bytes()
    assert len(tokenizer.tokens) == VOCAB_SIZE
    assert tokenizer.special_token_ids.start == vocab.STARTOFTEXT
    assert tokenizer.eos_token_id == vocab.ENDOFTEXT
    assert range(vocab.RETURN, vocab.CALL + 1) == grammar_process._HARMONY
