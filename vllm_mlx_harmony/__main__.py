"""The command line: vllm-mlx-harmony serve | gateway | connect | demo | doctor | render | parse.

Knows which commands there are, what they take and how a failure ends: one line on standard error
and exit code 2. Refuses to know what they do: `cli` has one file per command.
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
"""Commands whose arguments belong to a parser of their own, `--help` included."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. 2: it cannot be done as asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except (UsageError, HarmonyFailure) as error:
        return _fail(error)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == __package__:
            return _fail(UsageError("this is the gateway alone: pip install vllm-mlx-harmony"))
        if error.name != "openai_harmony":
            raise
        return _fail(UsageError("openai-harmony is not installed: pip install openai-harmony"))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `… | head`: nobody reads any more, which is no failure of ours
        _print_no_more()
        return 1
    except OSError as error:  # a full disk, a home that cannot be written, …
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
    """What is left in the buffer goes nowhere: Python would fail again when it writes that."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: Exception) -> int:
    param = getattr(error, "param", None)
    where = f" (at {param})" if param and param not in str(error) else ""
    print(f"{DISTRIBUTION}: error: {error}{where}", file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    """The parser of everything but what is passed on."""
    top = argparse.ArgumentParser(
        prog=DISTRIBUTION, description="gpt-oss (the Harmony format) done right on vllm-mlx."
    )
    top.add_argument("--version", action="version", version=f"{DISTRIBUTION} {version()}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("serve", help="vllm-mlx serve with this plugin, explicitly: same arguments")
    commands.add_parser("gateway", help="the APIs in front of vLLM, SGLang, llama.cpp or vllm-mlx")
    _add_connect(commands)
    _add_demo(commands)
    commands.add_parser("doctor", help="what is installed, active and supported here, and why not")
    _add_render(commands)
    _add_parse(commands)
    return top


def version() -> str:
    """Of the installed package; of the source, where it is not installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return __version__


def _add_connect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from vllm_mlx_harmony.cli.connect import AGENTS, URL

    about = "sets a coding agent up for a server"
    connect = commands.add_parser(
        "connect",
        help=f"{about}: {', '.join(AGENTS)}",
        description=f"{about.capitalize()}: prints what to put where, or writes it.",
    )
    connect.add_argument("agent", choices=AGENTS)
    connect.add_argument("--url", default=URL, help=f"the server's address (default: {URL})")
    connect.add_argument("--model", help="default: the one that the server serves")
    connect.add_argument("--key", help="the server's --api-key, to ask it; it is not written")
    connect.add_argument(
        "--context",
        type=_context,
        metavar="TOKENS",
        help="default: what the server says, or 131072",
    )
    connect.add_argument(
        "--write", action="store_true", help="write the files; one that is there is set aside"
    )
    connect.set_defaults(command=_connect)


def _context(text: str) -> int:
    """Raises ``ArgumentTypeError`` for a window in which no agent could work."""
    from vllm_mlx_harmony.cli.connect import LEAST_CONTEXT

    number = int(text) if text.isascii() and text.isdigit() else 0
    if not LEAST_CONTEXT <= number <= MOST_CONTEXT:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens from {LEAST_CONTEXT} on"
        )
    return number


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "a tool-call conversation with a scripted stand-in, through the real server"
    demo = commands.add_parser("demo", help=about, description=f"Shows {about}. No downloads.")
    demo.add_argument(
        "--continuous-batching", action="store_true", help="use the host's batched engine"
    )
    demo.add_argument(
        "--tools", action="store_true", help="a turn with tools that the server runs, over MCP"
    )
    demo.set_defaults(command=_demo)


def _add_render(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "prints the exact prompt of a Chat Completions request"
    render = commands.add_parser("render", help=about, description=f"{about.capitalize()}.")
    render.add_argument("request", metavar="REQUEST.json", help="the request's body; - is stdin")
    render.add_argument("--json", action="store_true", help="ids, pieces of text and their count")
    render.set_defaults(command=_render)


def _add_parse(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "prints the messages of a completion"
    parse = commands.add_parser("parse", help=about, description=f"{about.capitalize()}.")
    parse.add_argument(
        "completion",
        metavar="FILE",
        help="what the model generated: text with the control tokens written out, "
        "or a JSON list of ids; - is stdin",
    )
    parse.add_argument("--cut", action="store_true", help="a limit cut the output at its end")
    parse.add_argument("--json", action="store_true", help="messages, finish reason and usage")
    parse.set_defaults(command=_parse)


# The commands import what they need when they run: `parse` must not wait for a server's imports.


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
