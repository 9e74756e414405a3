"""Calls that the server ran, as a client gives them back: into the messages that they were.

An API that shows what ran has a client give it back with the rest of the history, in its own words
for the server (its label) and the tool. The model called a recipient, and code was no JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from json import loads

from vllm_mlx_harmony.core.names import carryable
from vllm_mlx_harmony.core.turn import PYTHON, Message, Namespace, ServerCall, ServerResult
from vllm_mlx_harmony.protocols.events import quote

NOT_RUN = "[the call was not run to its end]"
"""What the model reads where a history has no answer to a call."""


def recipient_of(namespaces: Iterable[Namespace], label: str, name: str) -> str:
    """What the model calls the tool ``name`` of the server ``label``, also one there is not."""
    for namespace in namespaces:
        if namespace.label == label:
            for known, tool in namespace.by_recipient.items():
                if tool.origin[-1] == name:
                    return known
            return f"{namespace.name}.{carryable(name, set())}"
    if label == name == PYTHON:
        return PYTHON
    return f"{carryable(label.replace('.', '_'), set())}.{carryable(name, set())}"


def with_results(messages: Iterable[Message]) -> Iterator[Message]:
    """``messages`` with an answer to every call that the server should have run, but to a last one.

    An answer stands right behind its call, under its name, wherever behind it the history has it:
    results of calls made in parallel come after all of them. One to no call is left out.
    """
    said: list[Message] = []
    answers: dict[int, ServerResult] = {}  # by the place of the call in ``said``
    waiting: dict[str, tuple[int, ServerCall]] = {}
    for message in messages:
        if not isinstance(message, ServerResult):
            if isinstance(message, ServerCall):
                waiting[message.id] = len(said), message
            said.append(message)
        elif message.call_id in waiting:
            place, call = waiting.pop(message.call_id)
            answers[place] = replace(message, name=call.name)
    for place, message in enumerate(said):
        yield message
        if place in answers:
            yield answers[place]
        elif isinstance(message, ServerCall) and place + 1 < len(said):
            yield not_run(message)


def last_call(messages: Sequence[Message]) -> ServerCall | None:
    """The call without an answer that ``messages`` end with, if they do: it is run before anything
    is generated. Where nobody may run it, ``not_run`` has to stand behind it.
    """
    last = messages[-1] if messages else None
    return last if isinstance(last, ServerCall) else None


def not_run(call: ServerCall) -> ServerResult:
    """What stands behind a call that was not run."""
    return ServerResult(call.id, call.name, NOT_RUN)


# --- Code as the arguments of a call, which are JSON.


_BEFORE, _BEHIND = '{"code":"', '"}'


def as_arguments(code: str) -> str:
    """``code`` as the JSON of a call's arguments."""
    return f"{_BEFORE}{quote(code)[1:-1]}{_BEHIND}"


class CodeArguments:
    """Writes ``as_arguments`` of code that comes in pieces; nothing where none comes."""

    def __init__(self) -> None:
        self._begun = False

    def feed(self, code: str) -> str:
        """The JSON of more code."""
        before, self._begun = "" if self._begun else _BEFORE, True
        return before + quote(code)[1:-1]

    def close(self) -> str:
        """The JSON behind the last."""
        return _BEHIND if self._begun else ""


def code_in(arguments: str) -> str:
    """The code in the arguments of a call of ``python``; all of them, where they are not such."""
    try:
        value = loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    code = value.get("code") if isinstance(value, dict) else None
    return code if isinstance(code, str) else arguments
