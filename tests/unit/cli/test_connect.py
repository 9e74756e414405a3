"""connect: the configuration of each agent, where its values come from, and what is overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.cli import agents, connect, process
from vllm_mlx_harmony.cli.connect import Target

KEY = "secret-key"
ONE_MODEL = [{"id": "gpt-oss-20b", "max_model_len": 4096}]


class Models(ThreadingHTTPServer):
    """A server that lists ``models``, to clients with the key if there is one."""

    models: Any = ONE_MODEL
    key: str | None = None
    answers: int = 200
    """The status of its responses to test requests."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests: list[tuple[str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Listing(BaseHTTPRequestHandler):
    server: Models

    def do_GET(self) -> None:
        self.reply(
            200 if self.path == "/v1/models" else 404,
            {"object": "list", "data": self.server.models},
        )

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.requests.append((self.path, json.loads(self.rfile.read(length))))
        answer = {"usage": {}} if self.server.answers == 200 else {"error": {"message": "because"}}
        self.reply(self.server.answers, answer)

    def reply(self, status: int, document: object) -> None:
        admitted = self.server.key is None or self.headers["Authorization"] == f"Bearer {KEY}"
        body = json.dumps(document).encode()
        self.send_response(status if admitted else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def server() -> Iterator[Models]:
    server = Models(("127.0.0.1", 0), Listing)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(connect, "URL", "http://127.0.0.1:1")
    for name in ("CODEX_HOME", "CLAUDE_CONFIG_DIR", "XDG_CONFIG_HOME", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


FILES = {
    "codex": [".codex/config.toml", ".codex/vllm-mlx-models.json"],
    "claude": [".claude/vllm-mlx.json"],
    "opencode": [".config/opencode/vllm-mlx.json"],
    "qwen": ["start.sh"],
    "pi": ["provider.js", "start.sh"],
    "cn": ["config.yaml", "start.sh"],
    "cline": ["settings/providers.json", "start.sh"],
    "copilot": ["start.sh"],
    "kilo": ["start.sh"],
    "goose": ["start.sh"],
    "hermes": ["config.yaml", "start.sh"],
    "grok": ["start.sh"],
    "kimi": ["start.sh"],
    "vibe": ["start.sh"],
    "droid": ["settings.json", "start.sh"],
    "openclaw": ["openclaw.json", "start.sh"],
    "nanocoder": ["start.sh"],
    "aider": ["metadata.json", "settings.yml", "start.sh"],
}
SCRIPTED = [agent for agent, files in FILES.items() if "start.sh" in files]
FILES |= {
    agent: [f".config/vllm-mlx/{agent}/{file}" for file in FILES[agent]] for agent in SCRIPTED
}

NO_WINDOW = ("qwen", "cline", "copilot", "grok")
"""Agents that have no setting for the context length, or one for parts of it, or read it from the
server."""


def test_every_agent_has_a_row() -> None:
    assert set(FILES) == set(connect.AGENTS) == set(agents.AGENTS)


@pytest.mark.parametrize("agent", FILES)
def test_configuration_is_printed_or_written(
    agent: str, server: Models, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["connect", agent, "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert "with gpt-oss-20b (4,096 tokens)" in shown
    assert [path for path in home.rglob("*") if path.is_file()] == []
    assert main(["connect", agent, "--url", f"{server.url}/v1/", "--write"]) == 0
    files = (path for path in home.rglob("*") if path.is_file() and path.stat().st_size)
    written = sorted(str(path.relative_to(home)) for path in files)
    assert written == FILES[agent]
    for name in written:
        assert (home / name).read_text("utf-8") in shown
        assert ("4096" in shown) == (agent not in NO_WINDOW)


@pytest.mark.parametrize(
    ("agent", "existing"),
    [*((agent, []) for agent in FILES), ("codex", [".codex/config.toml"])],
)
def test_undo_restores_what_was_there(
    agent: str, existing: list[str], server: Models, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However often it is written, there is only one backup, that of the original."""
    paths = [home / name for name in existing]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('mine = "✓"\n', "utf-8")
    command = ["connect", agent, "--url", server.url, "--write"]
    assert main(command) == 0
    for path in paths:
        backup = Path(f"{path}.before-vllm-mlx")
        assert backup.read_text("utf-8") == 'mine = "✓"\n'
        assert server.url in path.read_text("utf-8")
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert main(command) == 0
    assert "is up to date" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before
    server.models = [{"id": "gpt-oss-120b", "max_model_len": 9999}]
    assert main(command) == 0
    assert main(["connect", agent, "--undo"]) == 0
    remaining = {path for path in home.rglob("*") if path.is_file() and path.suffix != ".undone"}
    assert {path for path in remaining if "locks" not in path.parts} == set(paths)
    assert {path.read_text("utf-8") for path in paths} <= {'mine = "✓"\n'}
    capsys.readouterr()
    assert main(["connect", agent, "--undo"]) == 0
    assert "nothing to undo" in capsys.readouterr().out


def test_undo_keeps_later_changes_beside_the_file(server: Models, home: Path) -> None:
    path = home / ".codex" / "config.toml"
    path.parent.mkdir()
    path.write_text("a = 1\n")
    assert main(["connect", "codex", "--url", server.url, "--write"]) == 0
    path.write_text(path.read_text() + "[mcp_servers.mine]\n")
    assert main(["connect", "codex", "--undo"]) == 0
    assert path.read_text() == "a = 1\n"
    assert "[mcp_servers.mine]" in (path.parent / "config.toml.undone").read_text()


def test_manually_restored_file_is_backed_up_again(server: Models, home: Path) -> None:
    path = home / ".codex" / "config.toml"
    path.parent.mkdir()
    for content in ("a = 1\n", "a = 2\n"):
        path.write_text(content)
        assert main(["connect", "codex", "--url", server.url, "--write"]) == 0
        assert Path(f"{path}.before-vllm-mlx").read_text() == content


QUESTIONS = {"codex": "/v1/responses", "claude": "/v1/messages"}


@pytest.mark.parametrize("agent", FILES)
def test_server_is_tried_before_anything_is_written(
    agent: str, server: Models, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["connect", agent, "--url", server.url]
    assert main(command) == 0
    assert server.requests == [], "nothing is written, nothing is tried"
    assert main([*command, "--write", "--no-check"]) == 0
    assert server.requests == []
    assert main([*command, "--write"]) == 0
    ((path, body),) = server.requests
    question = QUESTIONS.get(agent, "/v1/chat/completions")
    assert (path, body["model"]) == (question, "gpt-oss-20b")
    assert "✓ gpt-oss-20b has answered a test request" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        (429, "answered 429: its rate limit is reached: try again in a minute (because)"),
        (503, "answered 503: it is starting, overloaded or shutting down"),
        (500, "answered 500: look at its log (because)"),
        (404, "answered 404: is it vllm-mlx?"),
    ],
)
def test_without_an_answer_nothing_is_written(
    status: int, meaning: str, server: Models, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = status
    assert main(["connect", "codex", "--url", server.url, "--write"]) == 2
    assert meaning in capsys.readouterr().err
    assert [path for path in home.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("agent", FILES)
def test_key_is_not_written(
    agent: str, server: Models, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = KEY
    assert main(["connect", agent, "--url", server.url, "--key", KEY, "--write"]) == 0
    printed = capsys.readouterr().out
    assert KEY not in printed
    assert "VLLM_API_KEY" in printed
    for name in FILES[agent]:
        assert KEY not in (home / name).read_text("utf-8")


def test_documented_script_is_the_real_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text("utf-8")
    shown = page.partition("start.sh\n# Starts ")[2].partition("…")[0]
    *_, text = connect.AGENTS["grok"](Target("http://127.0.0.1:8000", "gpt-oss-20b")).files.values()
    assert text == f"# Starts {shown}"


PROGRAM = f"""\
#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "a key"])
@pytest.mark.parametrize("agent", SCRIPTED)
def test_script_starts_the_agent_as_launch_does(
    agent: str, key: str | None, server: Models, home: Path
) -> None:
    """Followed by the user's arguments."""
    server.key = key
    programs = home / "bin"
    programs.mkdir()
    program = programs / agents.AGENTS[agent].command
    program.write_text(PROGRAM)
    program.chmod(0o755)
    assert main(["connect", agent, "--url", server.url, "--key", KEY, "--write"]) == 0
    directory = home / ".config" / "vllm-mlx" / agent
    command = ["sh", str(directory / "start.sh"), "a b", "$c"]
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
    if key is not None:
        failed = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert failed.returncode and b"VLLM_API_KEY" in failed.stderr
        environment["VLLM_API_KEY"] = key
    started = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    arguments, variables = json.loads(started.stdout)
    target = Target(server.url, "gpt-oss-20b", 4096, keyed=True)
    run = agents.AGENTS[agent].set_up(target, key or "local", directory)
    assert arguments == [*run.arguments, "a b", "$c"]
    assert {name: variables[name] for name in run.variables} == run.variables
    for name, content in run.files.items():
        assert (directory / name).read_text("utf-8") == content


def test_model_name_cannot_add_a_command_to_a_script(home: Path) -> None:
    target = Target("http://127.0.0.1:8000", "gpt-oss\necho added >&2 #'\"$(y)")
    *_, text = connect.AGENTS["grok"](target).files.values()
    read = subprocess.run(
        ["sh", "-c", text.replace('exec grok "$@"', "env")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not read.stderr
    assert f"GROK_DEFAULT_MODEL={target.model}\n" in read.stdout


def test_key_is_read_from_the_environment(
    server: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert main(["connect", "codex", "--url", server.url]) == 0
    assert "env_key" not in capsys.readouterr().out, "this server has no key"
    server.key = KEY
    assert main(["connect", "codex", "--url", server.url, "--write"]) == 0
    assert "export VLLM_API_KEY" in capsys.readouterr().out
    monkeypatch.setenv("VLLM_API_KEY", "another")
    assert main(["connect", "codex", "--url", server.url]) == 2
    assert "does not accept the key in VLLM_API_KEY" in capsys.readouterr().err


TWO_MODELS = [{"id": "a", "max_model_len": 1}, {"id": "b"}]

LOOKS: list[tuple[Any, dict[str, Any], tuple[str, int] | str]] = [
    (ONE_MODEL, {}, ("gpt-oss-20b", 4096)),
    (ONE_MODEL, {"context": 9}, ("gpt-oss-20b", 9)),
    (ONE_MODEL, {"model": "gpt-oss-20b"}, ("gpt-oss-20b", 4096)),
    (ONE_MODEL, {"model": "other"}, "serves gpt-oss-20b, not other"),
    (ONE_MODEL, {"model": "other", "context": 5}, ("other", 5)),
    (TWO_MODELS, {"model": "b"}, ("b", 131_072)),
    (TWO_MODELS, {}, "serves a, b: choose one with --model"),
    ([], {}, "serves nothing: choose one with --model"),
    ("what", {}, "it does not list its models"),
]


@pytest.mark.parametrize(("models", "given", "expected"), LOOKS)
def test_model_and_context_come_from_the_server(
    server: Models, models: Any, given: dict[str, Any], expected: tuple[str, int] | str
) -> None:
    server.models = models
    options = {"model": None, "context": None, "key": None, **given}
    if isinstance(expected, str):
        with pytest.raises(connect.UsageError, match=expected):
            connect.look(server.url, **options)
        return
    target = connect.look(server.url, **options)
    assert (target.model, target.context) == expected


def test_missing_server_is_an_error_without_model(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = "http://127.0.0.1:1"
    assert main(["connect", "codex", "--url", nowhere]) == 2
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err
    assert main(["connect", "codex", "--url", nowhere, "--model", "gpt-oss-120b"]) == 0
    assert "gpt-oss-120b (131,072 tokens)" in capsys.readouterr().out


def test_wrong_key_is_reported(server: Models, capsys: pytest.CaptureFixture[str]) -> None:
    server.key = KEY
    assert main(["connect", "claude", "--url", server.url]) == 2
    assert "answered 401: it requires a key: set VLLM_API_KEY or --key" in capsys.readouterr().err


def test_catalog_of_codex_is_complete(home: Path) -> None:
    """It has the fields that Codex 0.169.0 requires, and the abilities of the model."""
    catalog, _ = connect.codex(Target("http://h:1", "gpt-oss-20b", 5000)).files.values()
    (model,) = json.loads(catalog)["models"]
    needed = {
        *("slug", "display_name", "supported_reasoning_levels", "shell_type", "visibility"),
        *("supported_in_api", "priority", "truncation_policy", "experimental_supported_tools"),
        *("support_verbosity", "base_instructions"),
    }
    assert needed <= set(model)
    assert (model["context_window"], model["max_context_window"]) == (5000, 5000)
    assert model["apply_patch_tool_type"] == "freeform"
    assert [level["effort"] for level in model["supported_reasoning_levels"]] == [
        *("low", "medium", "high")
    ]


def test_claude_has_one_model_under_every_name() -> None:
    (settings,) = connect.claude(Target("http://h:1", "m", 100_000)).files.values()
    environment = json.loads(settings)["env"]
    models = {name for name in environment if "MODEL" in name}
    assert {environment[name] for name in models} == {"m"}
    assert {"ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"} <= models
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "100000"
    assert json.loads(settings)["permissions"] == {"deny": ["WebSearch"]}


def test_agents_search_the_web_where_the_server_does(server: Models) -> None:
    assert not connect.look(server.url, None, None, None).searches
    server.models = [{**ONE_MODEL[0], "web_search": True}]
    assert connect.look(server.url, None, None, None).searches
    target = Target("http://h:1", "m", searches=True)
    (settings,) = connect.claude(target).files.values()
    assert "permissions" not in json.loads(settings)
    for searches in (True, False):
        _, config = connect.codex(replace(target, searches=searches)).files.values()
        assert tomlkit.parse(config).get("web_search") == ("live" if searches else None)


MINE = """\
# mine
model = "gpt-6"  # best
approval_policy = "on-request"

[model_providers.vllm-mlx]
name = "old"

[model_providers.other]
name = "other"

# below
[tui]
theme = "x"
"""

MERGED = """\
# mine
model = "m" # was "gpt-6"; best
approval_policy = "on-request"
model_provider = "vllm-mlx"
model_catalog_json = "CATALOG"

[model_providers.vllm-mlx]
name = "vllm-mlx"
base_url = "http://h:1/v1"
wire_api = "responses"
stream_idle_timeout_ms = 14400000

[model_providers.other]
name = "other"

# below
[tui]
theme = "x"
"""

PLAIN_TEXT = """\
instructions = \"\"\"
model = "x"
[model_providers.vllm-mlx]
mine
\"\"\"

[model_providers.vllm-mlx] # for work
name = "old" # to be renamed
# do not trust this one
[projects."/x"]
trust_level = "untrusted"
"""


def _ours(home: Path) -> tuple[str, str]:
    (catalog, _), (path, ours) = connect.codex(Target("http://h:1", "m")).files.items()
    assert path == home / ".codex" / "config.toml"
    return ours, str(catalog)


def test_codex_keeps_what_the_user_wrote(home: Path) -> None:
    ours, catalog = _ours(home)
    expected = MERGED.replace("CATALOG", catalog)
    assert connect.merged(MINE, ours) == expected
    assert connect.merged(expected, ours) == expected
    assert connect.merged("", ours) == ours


@pytest.mark.parametrize(
    "before",
    [
        PLAIN_TEXT,
        "# only\na = 1 # c\n",
        "a = 1\r\n[t]\r\nb = 2\r\n",
        '[tui]\ntheme = "x"',
        '[model_providers]\nother = {name = "x"}\n# c\n[z]\nq = 1\n',
        "[model_providers.a]\nn = 1\n[z] # last\nq = 1\n[model_providers.b]\nn = 2\n",
        "a = [\n[1], # one\n]\n[[servers]]\nx = 1\n[[servers]]\nx = 2\n",
    ],
)
def test_codex_loses_no_comment_and_no_value(home: Path, before: str) -> None:
    ours, _ = _ours(home)
    once = connect.merged(before, ours)
    assert connect.merged(once, ours) == once
    comments = [line.partition("#")[2] for line in before.splitlines() if "#" in line]
    assert [comment for comment in comments if comment not in once] == []
    merged, mine, added = (tomlkit.parse(text).unwrap() for text in (once, before, ours))
    providers = {**mine.get("model_providers", {}), **added["model_providers"]}
    assert merged == {**mine, **added, "model_providers": providers}


@pytest.mark.parametrize(
    "before",
    [
        "not toml at all [",
        'model_providers = {other = {name = "x"}}\n',
        'model_providers.other.name = "x"\n[t]\na = 1\n',
        'model_providers = "mine"\n',
        "[model_providers]\nvllm-mlx = 3\n",
    ],
)
def test_unmergeable_file_of_codex_is_left_alone(
    home: Path, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / ".codex" / "config.toml"
    path.parent.mkdir()
    path.write_text(before)
    arguments = ["connect", "codex", "--model", "m", "--context", "5000", "--write"]
    assert main(arguments) == 2
    assert "run without --write" in capsys.readouterr().err
    assert path.read_text() == before


WRITE = ["connect", "codex", "--model", "m", "--context", "5000", "--write"]


def test_line_endings_are_kept(home: Path) -> None:
    path = home / ".codex" / "config.toml"
    path.parent.mkdir()
    path.write_bytes(b'# mine\r\nother = "a"\r\n\r\n[tui]\r\ntheme = "x"\r\n')
    assert main(WRITE) == 0
    after = path.read_bytes()
    assert after.startswith(b'# mine\r\nother = "a"\r\n') and b'theme = "x"\r\n' in after
    assert main(["connect", "codex", "--undo"]) == 0
    assert path.read_bytes() == b'# mine\r\nother = "a"\r\n\r\n[tui]\r\ntheme = "x"\r\n'


def test_read_only_file_is_restored(home: Path) -> None:
    path = home / ".codex" / "config.toml"
    path.parent.mkdir()
    path.write_text("a = 1\n")
    path.chmod(0o444)
    assert main(WRITE) == 0
    assert path.stat().st_mode & 0o777 == 0o444
    assert main(["connect", "codex", "--undo"]) == 0
    assert path.read_text() == "a = 1\n" and path.stat().st_mode & 0o777 == 0o444


@pytest.mark.once
def test_original_survives_several_commands_at_once(home: Path) -> None:
    path = home / ".codex" / "config.toml"
    path.parent.mkdir()
    original = "# mine\n" + "".join(f"key{number} = {number}\n" for number in range(2000))
    path.write_text(original)
    command = process.python("vllm_mlx_harmony", *WRITE)
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(4)]
    assert [child.wait(60) for child in running] == [0] * 4
    assert "key1999 = 1999" in path.read_text() and "[model_providers.vllm-mlx]" in path.read_text()
    assert main(["connect", "codex", "--undo"]) == 0
    assert path.read_text() == original


def test_undo_without_a_directory_changes_nothing(home: Path) -> None:
    assert main(["connect", "codex", "--undo"]) == 0
    assert not (home / ".codex").exists()


def test_catalog_of_codex_is_written_before_it_is_named(home: Path) -> None:
    directory = home / ".codex"
    (directory / "vllm-mlx-models.json").mkdir(parents=True)
    assert main(["connect", "codex", "--model", "m", "--context", "5000", "--write"]) == 2
    assert not (directory / "config.toml").exists()


def test_symlink_and_mode_are_kept(home: Path) -> None:
    target = home / "dotfiles.toml"
    target.write_text("a = 1\n")
    target.chmod(0o640)
    path = home / ".codex" / "config.toml"
    path.parent.mkdir()
    path.symlink_to(target)
    assert main(["connect", "codex", "--model", "m", "--context", "5000", "--write"]) == 0
    assert path.is_symlink() and "vllm-mlx" in target.read_text()
    assert target.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("given", [{}, {"model": "gpt-oss-20b"}])
def test_refusing_server_is_not_configured(server: Models, given: dict[str, str]) -> None:
    server.key = KEY
    with pytest.raises(connect.UsageError, match="answered 401: it requires a key"):
        connect.look(server.url, **{"model": None, "key": None, "context": None, **given})
