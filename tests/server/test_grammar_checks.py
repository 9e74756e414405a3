"""The helper process that tries grammars: what it stops, whom it answers, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grammar_texts
import pytest
from grammar_texts import LARK, SCHEMAS, grammar, multiple_of

from vllm_mlx_harmony.server import grammar_checks
from vllm_mlx_harmony.server.grammar_checks import (
    TOO_MUCH,
    CheckUnavailable,
    GrammarCheck,
    GrammarChecks,
)

ENDLESS = grammar(multiple_of(99_999_989))

ATTACKS = {name: grammar(schema) for name, schema in SCHEMAS.items()} | LARK


@pytest.fixture(scope="module")
def checks() -> Iterator[GrammarChecks]:
    one = GrammarChecks()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of a test may have much else to do."""
    monkeypatch.setattr(grammar_checks, "PATIENCE", 300.0)
    monkeypatch.setattr(grammar_checks, "MAX_ELAPSED", 120.0)


def soon(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    return true()


def is_stopped(pid: int) -> bool:
    return "T" in subprocess.check_output(["ps", "-o", "stat=", "-p", str(pid)], text=True)


def processes_below(pid: int) -> list[int]:
    """The processes that ``pid`` has started, and theirs."""
    listed = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid="], text=True)
    parents = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found, below = [], [pid]
    while below:
        above = below.pop()
        children = [child for child, parent in parents if parent == above]
        found += children
        below += children
    return found


def helper(checks: GrammarChecks) -> int:
    process = checks._helper._process
    assert process is not None
    return process.pid


@pytest.mark.parametrize("name", ATTACKS)
def test_what_would_end_the_server_is_stopped(checks: GrammarChecks, name: str) -> None:
    problem = GrammarCheck(checks, "tenant")(ATTACKS[name])
    assert problem
    assert "panic" not in problem
    assert GrammarCheck(checks, "tenant")('start: "a"') == ""


def test_a_verdict_is_remembered_for_its_tenant(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    original = GrammarChecks.trial

    def counted(self, text, begun, wanted):  # type: ignore[no-untyped-def]
        tried.append(tenant)
        return original(self, text, begun, wanted)

    monkeypatch.setattr(GrammarChecks, "trial", counted)
    text = ATTACKS["5000 rules"]
    for tenant in ("a", "a", "b", "a", "b"):
        assert GrammarCheck(checks, tenant)(text) == TOO_MUCH
    assert tried == ["a", "b"]


def test_what_is_legitimately_large_passes(checks: GrammarChecks) -> None:
    values = [f"value-{index * 7_919 % 100_003}" for index in range(50_000)]
    large = grammar({"enum": values})
    verdict = GrammarCheck(checks, "large").verdict(large)
    assert not verdict.problem
    assert verdict.size > 2**20
    deep: grammar_texts.Schema = {"type": "string"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"x": deep}, "required": ["x"]}
    assert not GrammarCheck(checks, "large")(grammar(deep))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_helper_that_is_gone_or_hangs_is_replaced(sent: int, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    checks = GrammarChecks()
    try:
        assert GrammarCheck(checks, "t")('start: "a"') == ""
        monkeypatch.setattr(grammar_checks, "MAX_ELAPSED", 5.0)
        first = helper(checks)
        os.kill(first, sent)
        if sent == signal.SIGSTOP:  # on a busy machine a thread runs on for a moment
            assert soon(lambda: is_stopped(first))
        assert GrammarCheck(checks, "t")('start: "b"') == ""
        assert helper(checks) != first
    finally:
        checks.close()


@pytest.mark.parametrize(
    "text", [ATTACKS["9000 references"], grammar(multiple_of(96_999_989))], ids=["quick", "slow"]
)
def test_who_waited_for_a_slot_gets_the_verdict_of_the_first(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """It is tried once for each slot."""
    tried: list[str] = []
    all_here = threading.Event()
    original = GrammarChecks.trial

    def counted(self, text, begun, wanted):  # type: ignore[no-untyped-def]
        tried.append(text)
        if soon(lambda: all_here.is_set() or len(checks.slots._waiting) == 6):
            all_here.set()
        return original(self, text, begun, wanted)

    monkeypatch.setattr(GrammarChecks, "trial", counted)
    found: list[str] = []
    requests = [GrammarCheck(checks, "same") for _ in range(8)]
    threads = [
        threading.Thread(target=lambda each=each: found.append(each(text))) for each in requests
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [TOO_MUCH] * 8
    assert len(tried) == 2


def test_trials_end_when_the_client_has_gone(checks: GrammarChecks) -> None:
    request = GrammarCheck(checks, "gone")
    raised: list[BaseException] = []

    def asks() -> None:
        try:
            for number in range(20):
                request(grammar(multiple_of(99_999_989 + number)))
        except CheckUnavailable as error:
            raised.append(error)

    thread = threading.Thread(target=asks)
    thread.start()
    assert soon(lambda: bool(checks.slots._running))
    request.cancel()
    thread.join(60)
    assert not thread.is_alive()
    assert raised
    assert soon(lambda: not processes_below(helper(checks)))


def test_who_takes_long_keeps_nobody_waiting(checks: GrammarChecks) -> None:
    """Eight requests of one tenant with endless texts, and an ordinary one."""
    attackers = [GrammarCheck(checks, "everybody") for _ in range(8)]

    def attack(index: int) -> None:
        try:
            for number in range(20):
                attackers[index](grammar(multiple_of(99_000_000 + 100 * index + number)))
        except CheckUnavailable:
            pass

    threads = [threading.Thread(target=attack, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    try:
        assert soon(lambda: len(checks.slots._running) == grammar_checks.WIDTH)
        for number in range(10):
            other = GrammarCheck(checks, "everybody")
            assert other(grammar(multiple_of(number + 1))) == ""
            assert other.spent < 2 * grammar_checks.MAX_ELAPSED
    finally:
        for request in attackers:
            request.cancel()
        for thread in threads:
            thread.join(60)


def test_who_has_used_least_writes_next(checks: GrammarChecks) -> None:
    order: list[float] = []

    def write(spent: float) -> None:
        request = GrammarCheck(checks, "writing")
        request.spent = spent
        with request.turn():
            order.append(spent)
        assert request.spent > spent

    first = GrammarCheck(checks, "writing")
    threads = [threading.Thread(target=write, args=(spent,)) for spent in (0.3, 0.1, 0.2)]
    with first.turn():
        for thread in threads:
            thread.start()
        assert soon(lambda: len(checks.turns._waiting) == 3)
    for thread in threads:
        thread.join(60)
    assert order == [0.1, 0.2, 0.3]


def test_a_client_that_goes_is_not_written_for(checks: GrammarChecks) -> None:
    request = GrammarCheck(checks, "writing")
    with GrammarCheck(checks, "writing").turn():
        request.cancel()
        with pytest.raises(CheckUnavailable), request.turn():
            raise AssertionError
    with GrammarCheck(checks, "writing").turn():
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a niceness of its own on Linux")
def test_trials_have_a_lower_priority_than_the_server(checks: GrammarChecks) -> None:
    checks.start()
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    found: set[int] = set()

    def look() -> bool:
        for worker in processes_below(helper(checks)):
            with suppress(OSError):  # it may end meanwhile
                for task in Path(f"/proc/{worker}/task").iterdir():
                    fields = (task / "stat").read_text().rpartition(")")[2].split()
                    found.add(int(fields[16]))
        return min(19, mine + grammar_checks.NICE) in found

    slow = grammar(multiple_of(95_999_989))
    thread = threading.Thread(target=GrammarCheck(checks, "nice"), args=(slow,))
    thread.start()
    assert soon(look)
    thread.join(60)


def test_a_request_is_patient_for_so_long_alone(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checks, "PATIENCE", 0.3)
    monkeypatch.setattr(grammar_checks, "PROCESSOR", 10.0)
    text = grammar(multiple_of(98_999_999))
    with pytest.raises(CheckUnavailable):
        GrammarCheck(checks, "patient")(text)
    monkeypatch.setattr(grammar_checks, "PATIENCE", 300.0)
    monkeypatch.setattr(grammar_checks, "PROCESSOR", 1.0)
    assert GrammarCheck(checks, "patient")(text) == TOO_MUCH


def test_without_a_helper_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grammar_checks, "_PROGRAM", "raise SystemExit(3)")
    monkeypatch.setattr(grammar_checks, "FIRST_PAUSE", 0.0)
    checks = GrammarChecks()
    with pytest.raises(CheckUnavailable, match="cannot be started"):
        GrammarCheck(checks, "t")('start: "a"')
    assert "their checker cannot start" in caplog.text
    monkeypatch.undo()
    try:
        assert GrammarCheck(checks, "t")('start: "a"') == ""
    finally:
        checks.close()


def test_a_helper_that_does_not_start_is_started_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monotonic, program, skipped = time.monotonic, grammar_checks._PROGRAM, 0.0
    monkeypatch.setattr(grammar_checks.time, "monotonic", lambda: monotonic() + skipped)
    monkeypatch.setattr(grammar_checks, "_PROGRAM", "raise SystemExit(3)")
    checks = GrammarChecks()
    with pytest.raises(CheckUnavailable):
        GrammarCheck(checks, "t")('start: "a"')
    for pause in (2, 4, 8, 16, 32, 60, 60):
        for seconds, starts in ((pause - 1.5, 0), (1.6, 1)):
            skipped += seconds
            caplog.clear()
            with pytest.raises(CheckUnavailable, match="cannot be started"):
                GrammarCheck(checks, "t")('start: "a"')
            assert len(caplog.records) == starts
    monkeypatch.setattr(grammar_checks, "_PROGRAM", program)
    skipped += 61
    try:
        assert GrammarCheck(checks, "t")('start: "a"') == ""
        os.kill(helper(checks), signal.SIGKILL)
        assert GrammarCheck(checks, "t")('start: "b"') == "", "no pause after a start"
    finally:
        checks.close()


SERVER = """
import sys, json
sys.path[:] = json.loads(sys.argv[1])
import threading
from vllm_mlx_harmony.server import grammar_checks
check = grammar_checks.check_for("t")
print(check('start: "a"'), flush=True)
threading.Thread(target=check, args=(sys.argv[2],), daemon=True).start()
input()
"""


@pytest.mark.parametrize("busy", [False, True])
def test_nothing_is_left_when_the_server_is_killed(busy: bool) -> None:
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
        if busy:
            time.sleep(0.3)
        started = processes_below(server.pid)
        assert len(started) >= 1 + busy  # the helper process, and a worker
        server.kill()
        server.wait()

    def gone(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        command = ["ps", "-o", "stat=", "-p", str(pid)]
        state = subprocess.run(command, capture_output=True, check=False)
        return state.stdout.strip()[:1] in (b"", b"Z")

    assert soon(lambda: all(map(gone, started)))


def test_the_helper_is_of_the_server_s_session_and_of_no_process_group_of_it(
    checks: GrammarChecks,
) -> None:
    """Ctrl-C does not reach it, and the niceness of its workers counts beside the server."""
    checks.start()
    process = checks._helper._process
    assert process is not None
    assert os.getsid(process.pid) == os.getsid(0)
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)


def test_the_helper_imports_the_library_and_nothing_else() -> None:
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
    known = {name.partition(".")[0] for name in imported}
    foreign = known - sys.stdlib_module_names - {"__main__"}
    assert foreign == {"llguidance", "vllm_mlx_harmony"}
    ours = {name for name in imported if name.startswith("vllm_mlx_harmony.")}
    assert ours == {"vllm_mlx_harmony.server", "vllm_mlx_harmony.server.grammar_process"}


def test_a_forked_process_has_a_helper_of_its_own() -> None:
    assert grammar_checks.check_for("t")('start: "a"') == ""
    mine = helper(grammar_checks.checks())
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            problem = grammar_checks.check_for("t")('start: "e"')
            other = helper(grammar_checks.checks())
            grammar_checks.checks().close()
            os.write(write, json.dumps([problem, other]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        problem, other = json.loads(answer.read())
    os.waitpid(pid, 0)
    assert problem == ""
    assert other != mine
    assert grammar_checks.check_for("t")('start: "f"') == ""


def test_tenants_take_turns() -> None:
    """However many requests one of them has, and however long the other's has taken so far."""
    checks, order = grammar_checks.GrammarChecks(), []
    slots = grammar_checks._Slots(1)
    holder = grammar_checks.GrammarCheck(checks, "holder")

    def wait(tenant: str, spent: float) -> None:
        request = grammar_checks.GrammarCheck(checks, tenant)
        request.spent = spent
        with slots.slot(request, lambda: True):
            order.append(tenant)

    asked = [("a", 0.0), ("a", 0.1), ("a", 0.2), ("b", 0.5), ("b", 0.6)]
    threads = [threading.Thread(target=wait, args=one) for one in asked]
    with slots.slot(holder, lambda: True):
        for thread in threads:
            thread.start()
        while len(slots._waiting) < len(asked):
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "a", "b", "a"]
    assert slots._turns == {}
