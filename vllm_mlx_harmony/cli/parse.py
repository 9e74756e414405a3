"""parse: prints the messages of a completion."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text as RichText

from vllm_mlx_harmony.cli.errors import UsageError, called, read_text
from vllm_mlx_harmony.cli.paint import KIND_STYLES
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Closed, Delta, Finished, Kind, Opened, Text
from vllm_mlx_harmony.core.parse import Parser


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """One message of a completion. ``name`` is the tool's, empty unless it is a call."""

    kind: Kind
    name: str
    text: str = ""
    complete: bool = True

    def document(self) -> dict[str, object]:
        """The message in the output of ``--json``."""
        call = {"name": self.name, "arguments": self.text}
        content = call if self.kind is Kind.CALL else {"text": self.text}
        return {"kind": self.kind.value, **content, "complete": self.complete}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony parse", description="Prints the messages in a completion."
    )
    parser.add_argument(
        "name",
        metavar="FILE",
        help="the model's output: text with its control tokens, or a JSON list of token ids; "
        "- is standard input",
    )
    cut = "treat the output as cut off by a token limit"
    parser.add_argument("--cut", action="store_true", help=cut)
    printed = "print messages, finish reason and usage as JSON"
    parser.add_argument("--json", action="store_true", help=printed)
    options = parser.parse_args(arguments)
    messages, finished = parse(read_ids(options.name), cut=options.cut)
    if options.json:
        print(json.dumps(document(messages, finished), ensure_ascii=False, indent=2))
    else:
        show(messages, finished)
    return 0


def parse(ids: Iterable[int], *, cut: bool = False) -> tuple[list[ParsedMessage], Finished]:
    """The messages of a completion and its end. ``cut``: an incomplete one ended at a limit."""
    parser = Parser()
    *deltas, finished = [*parser.feed(ids), *parser.close("length" if cut else "stop")]
    assert isinstance(finished, Finished)
    return messages(deltas), finished


def messages(deltas: Iterable[Delta]) -> list[ParsedMessage]:
    found: list[ParsedMessage] = []
    for delta in deltas:
        if isinstance(delta, Opened):
            found.append(ParsedMessage(delta.kind, delta.name))
        elif isinstance(delta, Text):
            found[-1] = replace(found[-1], text=found[-1].text + delta.text)
        elif isinstance(delta, Closed):
            found[-1] = replace(found[-1], complete=delta.complete)
    return found


def document(messages: Sequence[ParsedMessage], finished: Finished) -> dict[str, object]:
    """The output of ``--json``."""
    usage = finished.usage
    return {
        "messages": [message.document() for message in messages],
        "finish_reason": finished.reason,
        "usage": {
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
        },
    }


def show(messages: Sequence[ParsedMessage], finished: Finished) -> None:
    console = Console(highlight=False)
    for message in messages:
        style = KIND_STYLES[message.kind]
        cut = "" if message.complete else " (cut)"
        heading = f"{message.kind.value} {message.name}".strip() + cut
        console.print(RichText.assemble(("── ", "dim"), (heading, f"bold {style}")), soft_wrap=True)
        console.print(RichText(message.text, style), soft_wrap=True, end="\n\n")
    usage = finished.usage
    console.print(
        f"finish: {finished.reason}; {usage.completion_tokens} tokens, "
        f"{usage.reasoning_tokens} of them reasoning",
        style="dim",
    )


def read_ids(name: str) -> list[int]:
    """The completion in a file: text with the control tokens written out, or a JSON list of ids.

    A file that begins with ``[`` is a list, unless it contains a control token. A line break at the
    end of a file is ignored. Raises ``UsageError``.
    """
    content = read_text(name)
    if not content.lstrip().startswith("[") or "<|" in content:
        text = content.removesuffix("\n").removesuffix("\r")
        return list(vocab.encoding().encode(text, allowed_special="all"))
    try:
        ids: list[Any] = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{called(name)} is not a JSON list of ids: {error}") from error
    if not all(type(token) is int for token in ids):
        wrong = next(token for token in ids if type(token) is not int)
        raise UsageError(
            f"{called(name)} is not a list of ids: it contains {json.dumps(wrong)[:40]}"
        )
    return ids
