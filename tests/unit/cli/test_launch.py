"""launch: the configuration of each agent, its server, and how servers are started and stopped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.cli import background, launch, process
from vllm_mlx_harmony.cli.agents import AGENTS
from vllm_mlx_harmony.cli.errors import UsageError

KEY = "secret-key"

SERVER = """
import json, os, sys
from pathlib import Path
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        models = [{"id": sys.argv[2], "max_model_len": 8192}]
        body = json.dumps({"data": models} if self.path == "/v1/models" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

print("a log line", flush=True)
if "crashes" in sys.argv[2]:
    runs = Path(os.environ["HOME"], "runs")
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    if sys.argv[2] == "crashes" or len(runs.read_text()) < 3:
        os.abort()
if sys.argv[2] == "broken":
    sys.exit("no such model")
print("Loading:  40%|####      | 4.8G/12.0G", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A program that answers as a server does where `launch` looks."""


REAL = background.command


def fake(source: str, port: int, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", SERVER, str(port), flags[flags.index("--served-model-name") + 1]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with an agent of every name; servers are fake ones, each on a port of its own."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for agent in AGENTS.values():
        (programs / agent.command).write_text("#!/bin/sh\n")
        (programs / agent.command).chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(programs))
    for name in ("XDG_CACHE_HOME", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(background, "command", fake)
    monkeypatch.setattr(background, "is_free", lambda port: False)
    monkeypatch.setattr(launch.connect, "URL", "http://127.0.0.1:1")
    yield tmp_path
    background.stop()


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands that would have replaced the process, with their environments."""
    executed: list[Any] = []

    def execute(program: str, command: list[str], environment: dict[str, str]) -> None:
        executed.append((command, environment))
        raise SystemExit(7)

    monkeypatch.setattr(os, "execvpe", execute)
    return executed


def run_launch(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", *arguments])
    assert ended.value.code == 7


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("name", AGENTS)
def test_agent_is_set_up_for_this_run_only(
    name: str, home: Path, became: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = background.start("m", "gpt-oss-20b")
    background.wait(server)
    before = {path for path in home.rglob("*") if path.is_file()}
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    run_launch(name, "--url", f"{server.url}/v1", "--", "--help", "a b", "--", "--url")
    ((command, environment),) = became
    assert command[0] == str(home / "programs" / AGENTS[name].command)
    assert command[-4:] == ["--help", "a b", "--", "--url"]
    written = {path for path in home.rglob("*") if path.is_file()} - before
    texts = [path.read_text("utf-8") for path in written]
    configuration = "\n".join([*command, *environment.values(), *texts])
    assert (
        all(fact in configuration for fact in (server.url, "gpt-oss-20b", "8192", KEY))
        or name in NO_WINDOW
    )
    assert KEY not in "".join(texts)
    assert (KEY in "".join(command)) == (name == "cline"), "others read it from the environment"
    assert [path for path in written if "vllm-mlx-harmony" not in str(path)] == []
    assert environment["HOME"] == str(home)


NO_WINDOW = ("qwen", "cline", "copilot", "grok")
"""Agents that have no setting for the context length, or one for parts of it, or read it from the
server."""


INSTALLER = """#!/bin/sh
echo "$PWD: ${0##*/} $*" >> "$HOME/installed"
case "$*" in *broken*) exit 1;; esac
/bin/mkdir -p node_modules/.bin venv/bin
for program in node_modules/.bin/codex venv/bin/hermes; do echo "#!/bin/sh" > $program; done
"""
"""Takes the place of npm and uv."""


@pytest.mark.parametrize(
    ("agent", "installer", "expected", "program"),
    [
        ("codex", "npm", "@openai/codex@{}", "node_modules/.bin/codex"),
        ("hermes", "uv", "hermes-agent=={}", "venv/bin/hermes"),
    ],
)
def test_agent_is_installed_in_a_directory_of_ours(
    agent: str,
    installer: str,
    expected: str,
    program: str,
    home: Path,
    became: list[Any],
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, in the version that was tested; nothing is looked for in the working directory."""
    server = background.start("m", "gpt-oss-20b")
    background.wait(server)
    programs, repository = home / "programs", home / "repository"
    (programs / agent).unlink()
    (repository / "node_modules" / ".bin").mkdir(parents=True)
    for hostile in (agent, f"node_modules/.bin/{agent}"):
        (repository / hostile).write_text("#!/bin/sh\n")
        (repository / hostile).chmod(0o755)
    monkeypatch.chdir(repository)
    monkeypatch.setenv("PATH", f"node_modules/.bin:.::{programs}")
    assert main(["launch", agent, "--url", server.url]) == 2
    assert AGENTS[agent].install in capsys.readouterr().err
    (programs / installer).write_text(INSTALLER)
    (programs / installer).chmod(0o755)
    for _ in range(2):
        run_launch(agent, "--url", server.url, "--", "exec")
    version = AGENTS[agent].version
    directory = background.directory().parent / "agents" / "installed" / f"{agent}-{version}"
    assert {command[0] for command, _ in became} == {str(directory / program)}
    calls = (home / "installed").read_text().splitlines()
    assert {call.partition(": ")[0] for call in calls} == {str(directory)}
    assert calls[-1].endswith(expected.format(version))
    run_launch(agent, "--url", server.url, "--latest")
    newest = (home / "installed").read_text().splitlines()[len(calls) :]
    assert len(newest) == len(calls)
    assert newest[-1].endswith(("@openai/codex@latest", " hermes-agent"))


def test_failed_installation_of_an_agent_is_reported(home: Path, capsys: Any) -> None:
    server = background.start("m", "gpt-oss-20b")
    background.wait(server)
    (home / "programs" / "codex").unlink()
    (home / "programs" / "npm").write_text(INSTALLER.replace("*broken*", "*codex*"))
    (home / "programs" / "npm").chmod(0o755)
    assert main(["launch", "codex", "--url", server.url]) == 2
    assert "Codex could not be installed: npm install" in capsys.readouterr().err
    assert list((background.directory().parent / "agents" / "installed").iterdir()) == []


def test_print_runs_nothing(home: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "programs" / "codex").unlink()
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    before = {path for path in home.rglob("*") if path.is_file()}
    assert main(["launch", "codex", "./programs", "--print", "--", "exec"]) == 2
    monkeypatch.chdir(home)
    monkeypatch.setattr(background, "command", REAL)
    assert main(["launch", "codex", "./programs", "--print", "--", "exec", "a b"]) == 0
    serve, move, install, run = capsys.readouterr().out.splitlines()
    assert str(home / "programs") in serve and "--port 8000" in serve
    cache_flag = f"--ssd-cache-dir {background.directory().parent / 'prefix-cache'}"
    assert serve.endswith(f" {cache_flag}")
    assert move.startswith("cd ") and install.startswith("npm install --prefix")
    assert run.startswith("VLLM_API_KEY='$VLLM_API_KEY' ") and run.endswith("exec 'a b'")
    assert main(["launch", "codex", "./programs", "--print", "--no-disk-cache"]) == 0
    assert "--ssd-cache-dir" not in capsys.readouterr().out
    assert background.running() is None
    after = {path for path in home.rglob("*") if path.is_file()}
    assert {path.name for path in after - before} <= {"server.lock"}


@pytest.mark.parametrize("module", ["vllm_mlx_harmony", "vllm_mlx_harmony.__main__"])
def test_module_is_not_imported_from_the_working_directory(module: str, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / "vllm_mlx_harmony").mkdir(parents=True)
    for name in ("argparse", "uvicorn", "runpy", "vllm_mlx_harmony/__init__"):
        (repository / f"{name}.py").write_text("raise SystemExit('imported from here')")
    command = process.python(module, "parse", "--help")
    result = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "vllm-mlx-harmony parse" in result.stdout


@pytest.mark.parametrize("wanted", ["openai/gpt-oss-20b", "my-model"])
def test_name_is_not_taken_for_a_directory(
    wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository that the user has cloned may contain such a directory, with code in it."""
    (tmp_path / wanted).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    source, name, _ = launch._model(wanted)
    assert not os.path.isabs(source) and name.endswith(Path(wanted).name)
    assert launch._model(f"./{wanted}")[0] == str(tmp_path / wanted)


@pytest.mark.served  # mlx knows the memory of the device
def test_all_agents_use_one_server(home: Path, became: list[Any], capsys: Any) -> None:
    model = home / "my-gpt-oss"
    model.mkdir()
    launch_in_background(model, became)
    server = background.running()
    assert server is not None and server.model == "my-gpt-oss"
    run_launch("codex")
    run_launch("claude", "my-gpt-oss")
    assert background.running() == server
    assert "my-gpt-oss (8,192 tokens)" in capsys.readouterr().err
    assert main(["launch", "codex", "120b"]) == 2
    assert "serves my-gpt-oss, not gpt-oss-120b" in capsys.readouterr().err
    assert main(["stop"]) == 0
    assert f"stopped my-gpt-oss at {server.url}" in capsys.readouterr().out
    assert background.running() is None
    assert main(["stop"]) == 0
    assert "no server is running" in capsys.readouterr().out


def launch_in_background(model: Path, became: list[Any]) -> None:
    """Without the check for the host, which is not installed everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_mlx_harmony.cli.standin.require_host", lambda what: None)
        run_launch("codex", str(model))


def test_server_outlives_its_starter_and_is_recognized(home: Path) -> None:
    """Its lock says whether it lives; its process id may belong to another process by now."""
    code = (
        "from pathlib import Path; import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_launch import fake\n"
        "from vllm_mlx_harmony.cli import background\n"
        "background.command, background.is_free = fake, lambda port: False\n"
        "print(background.start('m', 'm').pid)"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    started = subprocess.run(command, capture_output=True, text=True, check=True)
    server = background.running()
    assert server is not None and server.pid == int(started.stdout)
    percentages: list[int] = []
    background.wait(server, percentages.append)
    assert set(percentages) == {40}, "the server prints it before it listens"
    assert background.start("m", "other") == server
    os.killpg(server.pid, 9)
    until = time.monotonic() + 20
    while background.running() is not None:
        assert time.monotonic() < until
        time.sleep(0.05)
    description = background.directory() / "server.json"
    description.write_text(json.dumps({**json.loads(description.read_bytes()), "pid": os.getpid()}))
    assert background.running() is None
    assert background.stop() is None, "this process is still here"


def test_failed_start_shows_the_log(home: Path) -> None:
    server = background.start("m", "broken")
    with pytest.raises(UsageError, match=r"could not start(.|\n)*a log line\nno such model"):
        background.wait(server)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The supervisor restarts at once."""
    code = (
        "import sys; from vllm_mlx_harmony.cli import supervise; "
        "supervise.PAUSES = (0.1,) * 4; sys.exit(supervise.main(sys.argv[1:]))"
    )
    command = process.python

    def python(module: str, *arguments: str) -> list[str]:
        if module == background.SUPERVISOR:
            return [sys.executable, "-c", code, *arguments]
        return command(module, *arguments)

    monkeypatch.setattr(process, "python", python)


def test_server_that_crashes_is_started_again(home: Path, impatient: None) -> None:
    """Errors of the GPU end its process (mlx throws them where nobody can catch them)."""
    server = background.start("m", "sometimes crashes")
    background.wait(server)
    assert background.running() == server
    assert (home / "runs").read_text() == "..."
    log = background.log().read_text("utf-8")
    assert log.count("the server was ended by SIGABRT; starting it again in 0 s") == 2
    assert background.stop() == server and background.running() is None


def test_server_that_crashes_too_often_is_given_up(home: Path, impatient: None) -> None:
    server = background.start("m", "crashes")
    with pytest.raises(UsageError, match=r"could not start(.|\n)*SIGABRT again; it is not started"):
        background.wait(server)
    assert (home / "runs").read_text() == "....."


def test_stop_ends_the_server_and_its_parent(home: Path) -> None:
    server = background.start("m", "m")
    background.wait(server)
    assert background.stop() == server
    with suppress(ChildProcessError):
        os.waitpid(server.pid, 0)  # this process is its parent here
    with pytest.raises(ProcessLookupError):
        os.killpg(server.pid, 0)


def test_stop_between_two_runs_prevents_the_next(home: Path) -> None:
    server = background.start("m", "crashes")
    until = time.monotonic() + 20
    while not (home / "runs").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert background.stop() == server
    assert (home / "runs").read_text() == "."


GB = 10**9
FITS: list[tuple[str | None, int, str]] = [
    (None, 77 * GB, "gpt-oss-120b"),  # 96 GB of memory
    (None, 51 * GB, "gpt-oss-20b"),
    ("20b", 400 * GB, "gpt-oss-20b"),
    (None, 17 * GB, "gpt-oss-20b"),  # 24 GB
    (None, 11 * GB, "gpt-oss-20b needs 15 GB of memory, and models may use 11 GB"),
    ("120b", 51 * GB, "gpt-oss-120b needs 73 GB of memory, and models may use 51 GB"),
]


@pytest.mark.parametrize(("wanted", "memory", "expected"), FITS)
def test_largest_model_that_fits_is_chosen(wanted: str | None, memory: int, expected: str) -> None:
    if "needs" in expected:
        with pytest.raises(UsageError, match=expected):
            launch._weights(wanted, memory)
    else:
        assert launch._weights(wanted, memory).name == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: AGENT"),
        (("emacs",), "invalid choice: 'emacs'"),
        (("codex", "--url", "http://h:1", "--stand-in"), "not allowed with argument"),
        (("codex", "20b", "exec"), "unrecognized arguments: exec"),
    ],
)
def test_wrong_command_line_is_an_error(
    arguments: tuple[str, ...], message: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", *arguments])
    assert message in capsys.readouterr().err


def test_help_has_every_agent(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["launch", "--help"])
    shown = capsys.readouterr().out
    assert all(re.search(rf"\b{name}\b", shown) for name in AGENTS)


@pytest.mark.served
def test_standin_uses_the_shell_of_any_agent(
    home: Path, became: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real server, started by `launch`: every tool of `SHELLS` is called and answered."""
    from vllm_mlx_harmony.cli import client

    monkeypatch.setattr(background, "command", REAL)
    run_launch("codex", "--stand-in")
    server = background.running()
    assert server is not None and server.standin
    for tool, arguments in launch.SHELLS.items():
        properties = {name: {} for name in arguments}
        function = {"name": tool, "parameters": {"type": "object", "properties": properties}}
        body: dict[str, Any] = {
            "model": server.model,
            "messages": [{"role": "user", "content": "Try your shell"}],
            "tools": [{"type": "function", "function": function}],
        }
        called = client.ask(server.port, body)
        (call,) = called.calls
        assert (call.name, json.loads(call.text)) == (tool, arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "Hello from gpt-oss"}
        body["messages"] += [called.message(), result]
        answer = client.ask(server.port, body)
        assert "It works" in answer.message()["content"]  # type: ignore[operator]
    assert "vllm-mlx-harmony launch codex" in background.log().read_text("utf-8"), "what to type"
