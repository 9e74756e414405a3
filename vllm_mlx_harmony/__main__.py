"""The command line: vllm-mlx-harmony serve | gateway | connect | demo | doctor | render | parse.

Any failure is one line on standard error and exit code 2. `cli` has one file per command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from vllm_mlx_harmony import __version__
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.core.errors import HarmonyFailure

DISTRIBUTION = "vllm-mlx-harmony"
INTERRUPTED = 130
MOST_CONTEXT = 2**31 - 1
PASSED_ON = ("serve", "gateway", "doctor")
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
        _print_no_more()
        return 1
    except OSError as error:  # a full disk, a read-only home directory, …
        code = _fail(error)
        _print_no_more()
        return code


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in PASSED_ON:
        return _pass_on(*arguments)
    parsed = parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    return command(parsed)


def _print_no_more() -> None:
    """Discards buffered output: Python would fail again when it flushes that at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: Exception) -> int:
    param = getattr(error, "param", None)
    where = f" (at {param})" if param and param not in str(error) else ""
    print(f"{DISTRIBUTION}: error: {error}{where}", file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    """The parser of all commands but those in ``PASSED_ON``."""
    top = argparse.ArgumentParser(
        prog=DISTRIBUTION, description="Serves gpt-oss (the Harmony format) correctly on vllm-mlx."
    )
    top.add_argument("--version", action="version", version=f"{DISTRIBUTION} {version()}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser(
        "serve", help="run vllm-mlx serve with this plugin; takes the same arguments"
    )
    commands.add_parser(
        "gateway", help="serve the APIs in front of vLLM, SGLang, llama.cpp or vllm-mlx"
    )
    _add_connect(commands)
    _add_demo(commands)
    commands.add_parser(
        "doctor", help="check what is installed, active and supported, and name fixes"
    )
    _add_render(commands)
    _add_parse(commands)
    return top


def version() -> str:
    """The version of the installed package, or else of the source."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return __version__


def _add_connect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from vllm_mlx_harmony.cli.connect import AGENTS, URL

    connect = commands.add_parser(
        "connect",
        help=f"configure a coding agent for a server: {', '.join(AGENTS)}",
        description="Prints the configuration of a coding agent for a server, or writes it.",
    )
    connect.add_argument("agent", choices=AGENTS)
    connect.add_argument("--url", default=URL, help=f"URL of the server (default: {URL})")
    connect.add_argument("--model", help="default: the only model that the server lists")
    connect.add_argument(
        "--key", help="the server's API key, used to query it; never written to a file"
    )
    connect.add_argument(
        "--context",
        type=_context,
        metavar="TOKENS",
        help="context length (default: the server's, or 131072)",
    )
    connect.add_argument(
        "--write", action="store_true", help="write the files; existing ones are backed up first"
    )
    connect.set_defaults(command=_connect)


def _context(text: str) -> int:
    """Raises ``ArgumentTypeError`` for a context too short for any agent."""
    from vllm_mlx_harmony.cli.connect import LEAST_CONTEXT

    number = int(text) if text.isascii() and text.isdigit() else 0
    if not LEAST_CONTEXT <= number <= MOST_CONTEXT:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens, {LEAST_CONTEXT} or more"
        )
    return number


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="show a tool-call conversation, without model weights",
        description="Shows a tool-call conversation through the real server, with a scripted "
        "stand-in for the model. Downloads nothing.",
    )
    demo.add_argument(
        "--continuous-batching", action="store_true", help="use vllm-mlx's batched engine"
    )
    demo.add_argument(
        "--tools", action="store_true", help="show a turn with server-side tools over MCP"
    )
    demo.set_defaults(command=_demo)


def _add_render(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    render = commands.add_parser(
        "render",
        help="print the prompt of a Chat Completions request",
        description="Prints the exact prompt that a Chat Completions request becomes.",
    )
    render.add_argument(
        "request", metavar="REQUEST.json", help="the request body; - is standard input"
    )
    render.add_argument(
        "--json", action="store_true", help="print the token ids, their count and the text as JSON"
    )
    render.set_defaults(command=_render)


def _add_parse(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parse = commands.add_parser(
        "parse",
        help="print the messages in a completion",
        description="Prints the messages in a completion.",
    )
    parse.add_argument(
        "completion",
        metavar="FILE",
        help="the model's output: text with its control tokens, or a JSON list of token ids; "
        "- is standard input",
    )
    parse.add_argument("--cut", action="store_true", help="the output was cut off by a token limit")
    parse.add_argument(
        "--json", action="store_true", help="print messages, finish reason and usage as JSON"
    )
    parse.set_defaults(command=_parse)


# Commands import what they need when they run, so that `parse` does not load a server.


def _pass_on(command: str, *arguments: str) -> int:
    if command == "serve":
        from vllm_mlx_harmony.cli import serve

        return serve.run(arguments)
    if command == "gateway":
        from vllm_mlx_harmony.cli import gateway

        return gateway.main(arguments)
    from vllm_mlx_harmony.host import doctor

    return doctor.main(list(arguments))


def _connect(parsed: argparse.Namespace) -> int:
    from vllm_mlx_harmony.cli import connect

    return connect.run(
        parsed.agent,
        url=parsed.url,
        model=parsed.model,
        key=parsed.key,
        context=parsed.context,
        write=parsed.write,
    )


def _demo(parsed: argparse.Namespace) -> int:
    from vllm_mlx_harmony.cli import demo, demo_tools

    run = demo_tools.run if parsed.tools else demo.run
    return run(batched=parsed.continuous_batching)


def _render(parsed: argparse.Namespace) -> int:
    from vllm_mlx_harmony.cli import render

    return render.run(parsed.request, as_json=parsed.json)


def _parse(parsed: argparse.Namespace) -> int:
    from vllm_mlx_harmony.cli import parse

    return parse.run(parsed.completion, cut=parsed.cut, as_json=parsed.json)


if __name__ == "__main__":
    sys.exit(main())
