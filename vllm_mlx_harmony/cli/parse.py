"""parse: a completion as the messages in it.

Knows the two ways a completion is written down and the two ways of printing it. Refuses to know
what control tokens mean: `core.parse` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text as Painted

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
        """The message in what ``--json`` prints."""
        called_ = {"name": self.name, "arguments": self.text}
        said = called_ if self.kind is Kind.CALL else {"text": self.text}
        return {"kind": self.kind.value, **said, "complete": self.complete}


def run(name: str, *, cut: bool, as_json: bool) -> int:
    """Prints the messages of the completion in a file, coloured by channel where there are colours.

    Raises ``UsageError`` for a file that holds neither text nor ids.
    """
    messages, finished = parse(read_ids(name), cut=cut)
    if as_json:
        print(json.dumps(document(messages, finished), ensure_ascii=False, indent=2))
    else:
        show(messages, finished)
    return 0


def parse(ids: Iterable[int], *, cut: bool = False) -> tuple[list[ParsedMessage], Finished]:
    """The messages of a completion, and how it ended. ``cut``: by a limit, if at all."""
    parser = Parser()
    *deltas, finished = [*parser.feed(ids), *parser.close("length" if cut else "stop")]
    assert isinstance(finished, Finished)
    return messages(deltas), finished


def messages(deltas: Iterable[Delta]) -> list[ParsedMessage]:
    """Deltas put together."""
    said: list[ParsedMessage] = []
    for delta in deltas:
        if isinstance(delta, Opened):
            said.append(ParsedMessage(delta.kind, delta.name))
        elif isinstance(delta, Text):
            said[-1] = replace(said[-1], text=said[-1].text + delta.text)
        elif isinstance(delta, Closed):
            said[-1] = replace(said[-1], complete=delta.complete)
    return said


def document(messages: Sequence[ParsedMessage], finished: Finished) -> dict[str, object]:
    """What ``--json`` prints."""
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
    """The messages one after the other, each under what it is."""
    console = Console(highlight=False)
    for message in messages:
        console.print(heading(message), soft_wrap=True)
        console.print(Painted(message.text, KIND_STYLES[message.kind]), soft_wrap=True, end="\n\n")
    usage = finished.usage
    console.print(
        f"finish: {finished.reason}; {usage.completion_tokens} tokens, "
        f"{usage.reasoning_tokens} of them reasoning",
        style="dim",
    )


def heading(message: ParsedMessage) -> Painted:
    """What a message is, in a word or two."""
    words = f"{message.kind.value} {message.name}".strip() + ("" if message.complete else " (cut)")
    return Painted.assemble(("── ", "dim"), (words, f"bold {KIND_STYLES[message.kind]}"))


def read_ids(name: str) -> list[int]:
    """The completion in a file: text with the control tokens written out, or a JSON list of ids.

    Text begins with ``[`` only when a control token follows somewhere; one line break at the end
    of a file is the file's, not the completion's. Raises ``UsageError``.
    """
    content = read_text(name)
    if content.lstrip().startswith("[") and "<|" not in content:
        return _id_list(name, content)
    text = content.removesuffix("\n").removesuffix("\r")
    return list(vocab.encoding().encode(text, allowed_special="all"))


def _id_list(name: str, content: str) -> list[int]:
    try:
        ids: list[Any] = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{called(name)} is not a JSON list of ids: {error}") from error
    if not all(type(token) is int for token in ids):
        wrong = next(token for token in ids if type(token) is not int)
        raise UsageError(f"{called(name)} is not a list of ids: {json.dumps(wrong)[:40]} is in it")
    return ids
