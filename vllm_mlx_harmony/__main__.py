"""The command line: vllm-mlx-harmony launch | serve | gateway | connect | demo | doctor | ….

A failure is one line on standard error and exit code 2. `cli` has one file per command, which is
imported when the command runs, so that `parse` does not load a server.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from vllm_mlx_harmony import __version__
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.core.errors import HarmonyFailure

DISTRIBUTION = "vllm-mlx-harmony"
INTERRUPTED = 130
COMMANDS = {
    "serve": "run vllm-mlx serve with this plugin; takes the same arguments",
    "gateway": "serve the APIs in front of vLLM, SGLang, llama.cpp or vllm-mlx",
    "launch": "start a coding agent, and a server if none is running",
    "service": "run a server whenever you are logged in",
    "doctor": "check this installation and suggest fixes",
    "stop": "stop the server that launch started",
    "connect": "configure a coding agent for a server, to last",
    "demo": "show a tool-call conversation, without model weights",
    "verify": "check that a server follows its APIs",
    "bench": "measure how fast a server is",
    "render": "print the prompt of a Chat Completions request",
    "parse": "print the messages in a completion",
}
"""The modules of `cli`. Their ``main`` parses the arguments, and may raise ``UsageError``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 2 is a usage error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    top = argparse.ArgumentParser(
        prog=DISTRIBUTION,
        description="Makes gpt-oss work with coding agents, on vllm-mlx or through a gateway.",
        epilog=f"To begin, run `{DISTRIBUTION} doctor` and then `{DISTRIBUTION} launch codex`.",
    )
    top.add_argument("--version", action="version", version=f"{DISTRIBUTION} {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        commands.add_parser(name, help=about)
    command = top.parse_args(arguments[:1]).command
    return _run(command, arguments[1:])


def verify() -> int:
    """The command of the distribution `harmony-verify`."""
    return _run("verify", sys.argv[1:], prog="harmony-verify")


def _run(command: str, arguments: Sequence[str], **options: str) -> int:
    try:
        code: int = import_module(f"{__package__}.cli.{command}").main(arguments, **options)
        return code
    except (UsageError, HarmonyFailure) as error:
        return _fail(error)
    except ImportError as error:
        if error.name != "openai_harmony":
            raise
        return _fail(UsageError("openai-harmony is not installed: pip install openai-harmony"))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `… | head`: the reader has closed the pipe
        _discard_output()
        return 1
    except OSError as error:  # a full disk, a read-only home directory, …
        code = _fail(error)
        _discard_output()
        return code


def _discard_output() -> None:
    """Discards buffered output: Python would fail again when it flushes that at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: Exception) -> int:
    param = getattr(error, "param", None)
    where = f" (at {param})" if param and param not in str(error) else ""
    print(f"{DISTRIBUTION}: error: {error}{where}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
