"""launch: starts a coding agent that uses gpt-oss, and a server for it if none is running.

The agent is set up for this run alone (see `agents`), and replaces this process: Ctrl-C and exit
codes are its own. The server stays for the next run until `vllm-mlx-harmony stop`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.cli import background, connect
from vllm_mlx_harmony.cli.agents import AGENTS, KEY_VARIABLE, Agent, Served
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.cli.models import GIGABYTE, MODELS, Weights
from vllm_mlx_harmony.cli.stand_in import require_host
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.standin import Script

LOCAL_KEY = "local"
"""What agents that insist on a key send to a server without one."""


STANDIN = "gpt-oss-standin"

COMMAND = "echo Hello from gpt-oss"

SHELLS: Mapping[str, Mapping[str, object]] = {
    "exec_command": {"cmd": COMMAND},
    "run_shell_command": {"command": COMMAND, "is_background": False},
    "run_commands": {"commands": [COMMAND]},
    "terminal": {"command": COMMAND},
    "shell": {"command": COMMAND},
    "Bash": {"command": COMMAND},
    "bash": {"command": COMMAND, "description": "Say hello"},
    "bash_tool": {"command": COMMAND, "description": "Say hello"},
}
"""The stand-in's call of each tool with which an agent runs commands."""

FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Those of a repository that a server loads."""

DESCRIPTION = f"""\
Starts a coding agent that uses gpt-oss on this machine. If no server is running, it is started in
the background, where it stays until `vllm-mlx-harmony stop`. The agent's own configuration is not
changed.

agents: {", ".join(AGENTS)}
"""

EXAMPLES = """\
examples:
  vllm-mlx-harmony launch codex
  vllm-mlx-harmony launch claude 120b -- --continue
  vllm-mlx-harmony launch codex --stand-in -- exec "Run a command"
  vllm-mlx-harmony launch opencode --url http://studio.local:8000
"""


def parser() -> argparse.ArgumentParser:
    """The parser of everything before ``--``."""
    made = argparse.ArgumentParser(
        prog="vllm-mlx-harmony launch",
        usage="%(prog)s [-h] [--url URL | --stand-in] AGENT [MODEL] [-- ARGUMENTS]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("agent", metavar="AGENT", choices=AGENTS, help="name of the agent")
    made.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="20b, 120b, a directory or a repository on Hugging Face (default: the running "
        "server's, or the largest that fits into memory)",
    )
    where = made.add_mutually_exclusive_group()
    where.add_argument("--url", help=f"use this server; its key is read from ${KEY_VARIABLE}")
    where.add_argument(
        "--stand-in",
        dest="standin",
        action="store_true",
        help="use a scripted stand-in model, which makes the agent run one command",
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """Becomes the agent. Raises ``UsageError`` if the agent or a server cannot be started."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given = parser().parse_args(arguments[:end])
    agent = AGENTS[given.agent]
    program = _program(agent)
    console = Console(stderr=True, highlight=False)
    key = os.environ.get(KEY_VARIABLE) or None
    if given.url:
        served = connect.look(given.url, given.model, key, None)
    elif given.standin:
        served = _standin(console)
    else:
        served = _server(console, given.model, key)
    console.print(
        f"{agent.title} with {served.model} ({served.context:,} tokens) at {served.url}",
        style="dim",
    )
    directory = vocab.cache_dir() / "agents" / given.agent / re.sub(r"\W+", "-", served.url)
    run = agent.set_up(replace(served, keyed=True), key or LOCAL_KEY, directory)
    for name, content in run.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")
    sys.stdout.flush()
    command = [*program, *run.arguments, *arguments[end + 1 :]]
    os.execvpe(command[0], command, {**os.environ, **run.variables})


def _program(agent: Agent) -> tuple[str, ...]:
    """The command of an agent: the installed one, or else one that fetches it for this run."""
    if shutil.which(agent.command):
        return (agent.command,)
    if shutil.which(agent.runner[0]):
        return agent.runner
    missing = "uv (brew install uv)" if agent.python else "Node.js (brew install node)"
    raise UsageError(
        f"{agent.title} is not installed: install {missing}, and then run\n  {agent.install}"
    )


def _standin(console: Console) -> Served:
    """A server of a scripted model, in place of any other that `launch` has started."""
    require_host("the stand-in")
    server = background.running()
    if server is not None and not server.standin:
        raise UsageError(
            f"a server of {server.model} is running: stop it with `vllm-mlx-harmony stop`"
        )
    if server is None:
        model = standin.write(vocab.cache_dir() / STANDIN, _scripts())
        server = background.start(str(model), STANDIN, standin=True)
    return _ready(console, server)


def _scripts() -> list[Script]:
    """What the stand-in writes: a command for the shell of any agent, and then a last message."""
    final = "<|channel|>final<|message|>{}<|return|>"
    call = (
        "<|channel|>analysis<|message|>This is a scripted stand-in: I run one command.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
        "<|call|>"
    )
    done = (
        "It works: your agent ran the command, and its output came back to the model. This model "
        "is a scripted stand-in; for gpt-oss, leave --stand-in out."
    )
    shells = [
        Script(
            re.compile(rf"^type {tool} = \(", re.MULTILINE),
            call.format(tool, json.dumps(call_arguments)),
            whole_prompt=True,
        )
        for tool, call_arguments in SHELLS.items()
    ]
    return [
        Script(re.compile(r"<\|start\|>functions\.\S+ to=assistant"), final.format(done)),
        *shells,
    ]


def _server(console: Console, wanted: str | None, key: str | None) -> Served:
    """The running server, or one that is started."""
    name = MODELS[wanted].name if wanted in MODELS else Path(wanted).name if wanted else None
    server = background.running()
    if server is not None and server.standin:
        background.stop()
        server = None
    if server is not None:
        served = _ready(console, server)
    else:
        try:
            served = connect.look(connect.URL, None, key, None)
        except connect.Refused:
            raise
        except UsageError:  # nothing there, or another program
            return _started(console, wanted)
    if name is not None and name not in served.model:
        raise UsageError(
            f"{served.url} serves {served.model}, not {name}: leave MODEL out to use it, or "
            "stop it with `vllm-mlx-harmony stop`"
        )
    return served


def _started(console: Console, wanted: str | None) -> Served:
    require_host("launch")
    from vllm_mlx_harmony.engine import device

    weights = _weights(wanted, device.memory()) if wanted is None or wanted in MODELS else None
    source = weights.source if weights else str(wanted)
    if not Path(source).is_dir():
        _download(console, source, weights.size if weights else 0)
    server = background.start(source, weights.name if weights else Path(source).name)
    return _ready(console, server)


def _weights(wanted: str | None, memory: int) -> Weights:
    """The model that was asked for, or the largest that fits into ``memory`` bytes.

    Raises ``UsageError`` if it does not fit.
    """
    choice = [MODELS[wanted]] if wanted else list(MODELS.values())
    for weights in choice:
        if weights.needed <= memory:
            return weights
    least = choice[-1]
    raise UsageError(
        f"{least.name} needs {least.gigabytes} GB of memory, and models may use "
        f"{memory / GIGABYTE:.0f} GB on this machine. Use a server on another machine (--url), "
        "or try it with --stand-in"
    )


def _download(console: Console, source: str, size: int) -> None:
    """Fetches a model into the cache of Hugging Face, with its progress bars."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(source, "config.json"), str):
        about = f" (about {size / GIGABYTE:.0f} GB)" if size else ""
        console.print(f"Downloading {source}{about}. An interrupted download is resumed.")
    try:
        snapshot_download(source, allow_patterns=list(FILES))
    except (OSError, ValueError) as error:
        raise UsageError(f"{source} cannot be downloaded: {error}") from error


def _ready(console: Console, server: background.Background) -> Served:
    console.print(f"The server's log: {background.log()}", style="dim", soft_wrap=True)
    with Progress(console=console, transient=True) as bars:
        loading = bars.add_task(f"Loading {server.model}", total=None)
        background.wait(server, lambda done: bars.update(loading, completed=done, total=100))
    return connect.look(server.url, server.model, None, None)
