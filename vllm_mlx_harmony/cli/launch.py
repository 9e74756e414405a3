"""launch: starts a coding agent that uses gpt-oss, and a server for it if none is running.

The agent is set up for this run alone (see `agents`), and replaces this process: Ctrl-C and exit
codes are its own. The server stays for the next run until `vllm-mlx-harmony stop`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import Progress

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.cli import background, connect
from vllm_mlx_harmony.cli.agents import (
    AGENTS,
    KEY_VARIABLE,
    LATEST,
    LOCAL_KEY,
    Agent,
    Target,
)
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.cli.models import GIGABYTE, MODELS, Weights
from vllm_mlx_harmony.cli.process import LOCAL
from vllm_mlx_harmony.cli.standin import require_host
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.model_files import FILES
from vllm_mlx_harmony.standin import Script

STANDIN = "gpt-oss-standin"

COMMAND = "echo Hello from gpt-oss"

SHELLS: Mapping[str, Mapping[str, object]] = {
    "exec_command": {"cmd": COMMAND},
    "run_shell_command": {"command": COMMAND, "is_background": False},
    "run_commands": {"commands": [COMMAND]},
    "run_terminal_command": {"command": COMMAND, "description": "Say hello"},
    "execute_bash": {"command": COMMAND},
    "Execute": {"command": COMMAND, "riskLevel": "low", "riskLevelReason": "Says hello"},
    "exec": {"command": COMMAND},
    "terminal": {"command": COMMAND},
    "shell": {"command": COMMAND},
    "Bash": {"command": COMMAND},
    "bash": {"command": COMMAND, "description": "Say hello"},
    "bash_tool": {"command": COMMAND, "description": "Say hello"},
}
"""The stand-in's call of each tool with which an agent runs commands."""

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
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony launch",
        usage="%(prog)s [OPTIONS] AGENT [MODEL] [-- ARGUMENTS]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("agent", metavar="AGENT", choices=AGENTS, help="name of the agent")
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="20b, 120b, a directory (./DIRECTORY) or a repository on Hugging Face (default: the "
        "running server's, or the largest that fits into memory)",
    )
    parser.add_argument(
        "--latest",
        action="store_true",
        help="if the agent is not installed, use its newest version, not the tested one",
    )
    parser.add_argument(
        "--print",
        dest="shows",
        action="store_true",
        help="print the commands that would run, and run nothing",
    )
    parser.add_argument(
        "--no-disk-cache",
        dest="disk_cache",
        action="store_false",
        help="start a server that keeps its prefix cache in memory only; by default up to 10 GiB "
        "are on disk, too, so that conversations survive a restart",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help=f"use this server; its key is read from ${KEY_VARIABLE}")
    where.add_argument(
        "--stand-in",
        dest="standin",
        action="store_true",
        help="use a scripted stand-in model, which makes the agent run one command",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Becomes the agent. Raises ``UsageError`` if the agent or a server cannot be started."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser().parse_args(arguments[:end])
    if options.shows:
        print("\n".join(_commands(options, arguments[end + 1 :])))
    else:
        _become(options, arguments[end + 1 :])
    return 0


def _become(options: argparse.Namespace, arguments: Sequence[str]) -> NoReturn:
    agent = AGENTS[options.agent]
    console = Console(stderr=True, highlight=False)
    key = os.environ.get(KEY_VARIABLE) or None
    version = LATEST if options.latest else agent.version
    program = _which(agent.command) or _install(console, agent, version)
    if options.url:
        target = connect.look(options.url, options.model, key, None)
    elif options.standin:
        target = _standin(console)
    else:
        target = _server(console, options.model, key, _cache_flags(options.disk_cache))
    console.print(
        f"{agent.title} with {target.model} ({target.context:,} tokens) at {target.url}",
        style="dim",
    )
    directory = _run_directory(options.agent, target)
    run = agent.set_up(replace(target, keyed=True), key or LOCAL_KEY, directory)
    for name, content in run.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")
    sys.stdout.flush()
    command = [program, *run.arguments, *arguments]
    os.execvpe(program, command, {**os.environ, **run.variables})


# --- The agent's program
#
# Nothing is looked for in the working directory (semantics E6), which may be any repository that
# the user has just cloned: not its `node_modules/.bin`, not its `.npmrc` or `uv.toml`.


def _run_directory(name: str, target: Target) -> Path:
    """Where the files of an agent's runs with a server are."""
    return vocab.cache_dir() / "agents" / name / re.sub(r"\W+", "-", target.url)


def _which(program: str) -> str | None:
    """The path of a program in the absolute directories of `PATH`."""
    directories = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return shutil.which(program, path=os.pathsep.join(filter(os.path.isabs, directories)))


def _installation_directory(agent: Agent, version: str) -> Path:
    return vocab.cache_dir() / "agents" / "installed" / f"{agent.command}-{version}"


def _install(console: Console, agent: Agent, version: str) -> str:
    """The path of the agent's program in our own directory, where it is installed if it is not
    there, or to be the newest."""
    directory = _installation_directory(agent, version)
    program = agent.program(directory)
    if program.exists() and version != LATEST:
        return str(program)
    if _which(agent.installer) is None:
        missing = "uv (brew install uv)" if agent.python else "Node.js (brew install node)"
        raise UsageError(
            f"{agent.title} is not installed: install {missing}, and then run\n  {agent.install}"
        )
    console.print(f"Installing {agent.title} ({agent.package} {version}) in {directory}")
    shutil.rmtree(directory, ignore_errors=True)  # an installation that was interrupted
    directory.mkdir(parents=True)
    for command in agent.installation(directory, version):
        path = str(_which(command[0]))
        if subprocess.run([path, *command[1:]], cwd=directory, check=False).returncode:
            shutil.rmtree(directory, ignore_errors=True)
            raise UsageError(f"{agent.title} could not be installed: {shlex.join(command)}")
    return str(program)


def _commands(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """What `_become` would run, as lines of a shell; keys are shown by their variable."""
    agent = AGENTS[options.agent]
    version = LATEST if options.latest else agent.version
    lines: list[str] = []
    if options.url:
        key = os.environ.get(KEY_VARIABLE) or None
        target = connect.look(options.url, options.model, key, None)
    elif (server := background.running()) is not None:
        target = Target(server.url, server.model)
    else:
        source, name = str(vocab.cache_dir() / STANDIN), STANDIN
        flags: list[str] = []
        if not options.standin:
            source, name, _ = _model(options.model)
            flags = _cache_flags(options.disk_cache)
        target = Target(f"{LOCAL}:{background.PORT}", name)
        flags = ["--served-model-name", name, *flags]
        lines.append(shlex.join(background.command(source, background.PORT, flags)))
    program = _which(agent.command)
    if program is None:
        directory = _installation_directory(agent, version)
        program = str(agent.program(directory))
        if not Path(program).exists():
            lines.append(f"cd {shlex.quote(str(directory))}")
            lines += [shlex.join(command) for command in agent.installation(directory, version)]
    shown = f"${KEY_VARIABLE}"
    run = agent.set_up(replace(target, keyed=True), shown, _run_directory(options.agent, target))
    variables = [f"{name}={shlex.quote(value)}" for name, value in run.variables.items()]
    return [*lines, " ".join([*variables, shlex.join([program, *run.arguments, *arguments])])]


def _standin(console: Console) -> Target:
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


def _cache_flags(on_disk: bool) -> list[str]:
    return ["--ssd-cache-dir", str(vocab.cache_dir() / "prefix-cache")] if on_disk else []


def _server(console: Console, wanted: str | None, key: str | None, flags: Sequence[str]) -> Target:
    """The running server, or one that is started with ``flags``."""
    name = None
    if wanted is not None:
        name = MODELS[wanted].name if wanted in MODELS else _model(wanted)[1]
    server = background.running()
    if server is not None and server.standin:
        background.stop()
        server = None
    if server is not None:
        target = _ready(console, server)
    else:
        try:
            target = connect.look(connect.URL, None, key, None)
        except connect.Refused:
            raise
        except UsageError:  # nothing there, or another program
            return _started(console, wanted, flags)
    if name is not None and name not in target.model:
        raise UsageError(
            f"{target.url} serves {target.model}, not {name}: leave MODEL out to use it, or "
            "stop it with `vllm-mlx-harmony stop`"
        )
    return target


def _started(console: Console, wanted: str | None, flags: Sequence[str]) -> Target:
    require_host("launch")
    source, name, size = _model(wanted)
    if not os.path.isabs(source):
        _download(console, source, size)
    if flags:
        console.print(
            f"The prefix cache is on disk, too: {flags[-1]} (--no-disk-cache turns this off)",
            style="dim",
        )
    return _ready(console, background.start(source, name, flags))


def _model(wanted: str | None) -> tuple[str, str, int]:
    """Where the weights are, an absolute path or a repository; the model's name; and the size of
    its download in bytes, 0 if unknown."""
    if wanted is None or wanted in MODELS:
        from vllm_mlx_harmony.engine import device
        from vllm_mlx_harmony.server.settings import ServerSettings

        weights = _weights(wanted, device.memory(ServerSettings.read().memory))
        return weights.source, weights.name, weights.size
    if not _is_path(wanted):
        return wanted, Path(wanted).name, 0
    directory = Path(wanted).expanduser().resolve()
    if not directory.is_dir():
        raise UsageError(f"{wanted} is not a directory")
    return str(directory), directory.name, 0


def _is_path(wanted: str) -> bool:
    """Whether a model is a directory: `openai/gpt-oss-20b` is a repository, whatever is there."""
    return wanted.startswith(("/", "~", "./", "../")) or wanted in (".", "..")


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


def _ready(console: Console, server: background.Background) -> Target:
    console.print(f"The server's log: {background.log()}", style="dim", soft_wrap=True)
    with Progress(console=console, transient=True) as bars:
        loading = bars.add_task(f"Loading {server.model}", total=None)
        background.wait(server, lambda done: bars.update(loading, completed=done, total=100))
    return connect.look(server.url, server.model, None, None)
