"""The command line: vllm-mlx-harmony launch | serve | gateway | connect | demo | doctor | ….

A failure is one line on standard error and exit code 2. `cli` has one file per command, which is
imported when the command runs, so that `parse` does not load a server.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from vllm_mlx_harmony import __version__
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.core.errors import HarmonyFailure

DISTRIBUTION = "vllm-mlx-harmony"
INTERRUPTED = 130
MOST_CONTEXT = 2**31 - 1
PASSED_ON = {
    "serve": "run vllm-mlx serve with this plugin; takes the same arguments",
    "gateway": "serve the APIs in front of vLLM, SGLang, llama.cpp or vllm-mlx",
    "launch": "start a coding agent, and a server if none is running",
    "service": "run a server whenever you are logged in",
    "doctor": "check this installation and suggest fixes",
}
"""Commands that parse their own arguments, `--help` included."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 2 is a usage error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except (UsageError, HarmonyFailure) as error:
        return _fail(error)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == __package__:
            return _fail(
                UsageError(
                    "only the gateway is installed; for this command: pip install vllm-mlx-harmony"
                )
            )
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


def _run(arguments: list[str]) -> int:
    code: int
    if arguments and arguments[0] in PASSED_ON:
        command, *rest = arguments
        code = import_module(f"{__package__}.cli.{command}").main(rest)
    else:
        options = vars(parser().parse_args(arguments))
        code = import_module(f"{__package__}.cli.{options.pop('command')}").run(**options)
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


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def parser() -> argparse.ArgumentParser:
    """The parser of all commands but those in ``PASSED_ON``.

    ``command`` is the name of the module, and everything else an argument of its ``run``.
    """
    top = argparse.ArgumentParser(
        prog=DISTRIBUTION,
        description="Makes gpt-oss work with coding agents, on vllm-mlx or through a gateway.",
        epilog=f"To begin, run `{DISTRIBUTION} doctor` and then `{DISTRIBUTION} launch codex`.",
    )
    top.add_argument("--version", action="version", version=f"{DISTRIBUTION} {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for name, about in PASSED_ON.items():
        commands.add_parser(name, help=about)

    def command(name: str, about: str, description: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about, description=description)
        made.set_defaults(command=name)
        return made

    command(
        "stop",
        "stop the server that launch started",
        "Stops the server that `launch` has started.",
    )
    _add_connect(command)
    demo = command(
        "demo",
        "show a tool-call conversation, without model weights",
        "Shows a tool-call conversation through the real server, with a scripted stand-in for the "
        "model. Downloads nothing.",
    )
    demo.add_argument(
        "--continuous-batching",
        dest="batched",
        action="store_true",
        help="pass --continuous-batching to the server",
    )
    demo.add_argument(
        "--tools",
        dest="command",
        action="store_const",
        const="demo_tools",
        help="show a turn with tools that the server runs over MCP",
    )
    verify = command(
        "verify",
        "check that a server follows its APIs",
        "Checks any server of OpenAI's or Anthropic's APIs. The exit code is 0 only if everything "
        "that it supports passed; with --compare, if no check that passed fails now.",
    )
    _add_server(
        verify,
        model="name of the model (default: the only one of the server)",
        repeat="repetitions of the checks that depend on what the model writes",
        defaults=(1, 300),
    )
    verify.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="run these checks only: a name, its beginning or a pattern, such as wire, "
        "format.chat or *.messages.stop; repeatable",
    )
    verify.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="FILE",
        help="check only the request that the inspector saved in FILE; repeatable",
    )
    verify.add_argument(
        "--stand-in",
        action="store_true",
        help="check this package's own server, with a scripted stand-in for the model",
    )
    bench = command(
        "bench",
        "measure how fast a server is",
        "Measures any server with Chat Completions: the time to the first token and the speed of "
        "one request and of several at once, a tool loop, and how much a long prompt slows down "
        "another answer.",
    )
    _add_server(
        bench,
        model="name of the model at URL; without URL, its directory: a server of this package is "
        "started for it",
        repeat="runs per measurement",
        defaults=(3, 600),
    )
    bench.add_argument(
        "--longest",
        type=_positive,
        default=100_000,
        metavar="TOKENS",
        help="longest prompt (default: 100000, or what the context allows)",
    )
    render = command(
        "render",
        "print the prompt of a Chat Completions request",
        "Prints the exact prompt that a Chat Completions request becomes.",
    )
    render.add_argument(
        "name", metavar="REQUEST.json", help="the request body; - is standard input"
    )
    parse = command(
        "parse", "print the messages in a completion", "Prints the messages in a completion."
    )
    parse.add_argument(
        "name",
        metavar="FILE",
        help="the model's output: text with its control tokens, or a JSON list of token ids; "
        "- is standard input",
    )
    parse.add_argument("--cut", action="store_true", help="the output was cut off by a token limit")
    for made, printed in (
        (render, "the token ids, their count and the text"),
        (parse, "messages, finish reason and usage"),
    ):
        json = f"print {printed} as JSON"
        made.add_argument("--json", dest="as_json", action="store_true", help=json)
    return top


def _add_server(
    command: argparse.ArgumentParser, *, model: str, repeat: str, defaults: tuple[int, int]
) -> None:
    """Adds the arguments of the commands for any server: which one, how often, the results.

    ``defaults`` are those of ``--repeat`` and ``--timeout``.
    """
    repeated, timeout = defaults
    default = "(default: %(default)s)"
    command.add_argument(
        "url", nargs="?", metavar="URL", help="URL of the server, with or without /v1"
    )
    command.add_argument("--model", help=model)
    command.add_argument("--key", help="the server's API key")
    command.add_argument(
        "--repeat", type=_positive, default=repeated, metavar="N", help=f"{repeat} {default}"
    )
    command.add_argument(
        "--timeout",
        type=_positive,
        default=timeout,
        metavar="SECONDS",
        help=f"read timeout in seconds {default}",
    )
    command.add_argument("--json", metavar="FILE", help="write the results to FILE")
    command.add_argument("--html", metavar="FILE", help="write the results to FILE as a page")
    command.add_argument(
        "--compare",
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        help="compare two files written with --json",
    )


def _add_connect(command: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    from vllm_mlx_harmony.cli.connect import AGENTS, LEAST_CONTEXT, URL

    def context(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() else 0
        if not LEAST_CONTEXT <= number <= MOST_CONTEXT:
            problem = f"{text!r} is not a number of tokens, {LEAST_CONTEXT} or more"
            raise argparse.ArgumentTypeError(problem)
        return number

    connect = command(
        "connect",
        f"configure a coding agent for a server: {', '.join(AGENTS)}",
        "Prints the configuration of a coding agent for a server, or writes it.",
    )
    connect.add_argument("agent", metavar="AGENT", choices=AGENTS, help=", ".join(AGENTS))
    connect.add_argument("--url", default=URL, help=f"URL of the server (default: {URL})")
    connect.add_argument("--model", help="name of the model (default: the only one of the server)")
    connect.add_argument(
        "--key", help="the server's API key (default: $VLLM_API_KEY); never written to a file"
    )
    connect.add_argument(
        "--context",
        type=context,
        metavar="TOKENS",
        help="context length (default: the server's, or 131072)",
    )
    connect.add_argument(
        "--write", action="store_true", help="write the files; existing ones are backed up first"
    )
    connect.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="skip the test request before writing",
    )
    connect.add_argument(
        "--undo", action="store_true", help="restore the files as they were before"
    )


if __name__ == "__main__":
    sys.exit(main())
