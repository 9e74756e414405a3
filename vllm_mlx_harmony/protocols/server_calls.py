"""Calls that the server ran, read back from a client's history.

Clients send back the calls that a response contained, with the server's label and the tool's name.
The prompt has them as the model wrote them: with a recipient, and with code that is not JSON.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from json import loads

from vllm_mlx_harmony.core.names import valid_name
from vllm_mlx_harmony.core.turn import PYTHON, Message, Namespace, ServerCall, ServerResult
from vllm_mlx_harmony.protocols.events import quote

NOT_RUN = "[this call did not finish]"
"""What the model reads in place of a result that the history does not have."""


def recipients_of(
    namespaces: Iterable[Namespace], label: str | None, name: str | None
) -> tuple[str, ...]:
    """The recipients of the tools ``name`` of the server ``label``; ``None`` stands for any."""
    return tuple(
        recipient
        for namespace in namespaces
        if label in (None, namespace.label)
        for recipient, tool in namespace.by_recipient.items()
        if name in (None, tool.origin[-1])
    )


def label_and_name(namespaces: Iterable[Namespace], recipient: str) -> tuple[str, str]:
    """The server's label and the tool's name at ``recipient``, which need not exist."""
    head, _, rest = recipient.partition(".")
    for namespace in namespaces:
        if namespace.name == head:
            tool = namespace.by_recipient.get(recipient)
            return namespace.label, tool.origin[-1] if tool else rest or head
    return head, rest or head


def recipient_of(namespaces: Sequence[Namespace], label: str, name: str) -> str:
    """The recipient of the tool ``name`` of the server ``label``, which need not exist."""
    if known := recipients_of(namespaces, label, name):
        return known[0]
    for namespace in namespaces:
        if namespace.label == label:
            return f"{namespace.name}.{valid_name(name, set())}"
    if label == name == PYTHON:
        return PYTHON
    return f"{valid_name(label.replace('.', '_'), set())}.{valid_name(name, set())}"


def with_results_moved(messages: Iterable[Message]) -> list[Message]:
    """``messages`` with each result of a server-run call moved right after its call.

    In a history it may be anywhere after the call: results of parallel calls follow all of them.
    Each result is given the call's name. A result without a call is left out.
    """
    groups: list[list[Message]] = []  # a call with its result, or another message alone
    waiting: dict[str, tuple[ServerCall, list[Message]]] = {}
    for message in messages:
        if not isinstance(message, ServerResult):
            groups.append([message])
            if isinstance(message, ServerCall):
                waiting[message.id] = message, groups[-1]
        elif message.call_id in waiting:
            call, group = waiting.pop(message.call_id)
            group.append(replace(message, name=call.name))
    return [*chain.from_iterable(groups)]


def with_missing_results(
    messages: Sequence[Message], to_run: Collection[str] = ()
) -> Iterator[Message]:
    """``messages`` in the order of `with_results_moved`, with ``NOT_RUN`` after each open call.

    ``to_run`` are the ids of calls that are run before anything is generated, and so stay open: of
    several calls with the same id, the last one.
    """
    last = {
        message.id: place
        for place, message in enumerate(messages)
        if isinstance(message, ServerCall) and message.id in to_run
    }
    for place, (message, after) in enumerate(zip_longest(messages, messages[1:])):
        yield message
        has_result = isinstance(after, ServerResult)
        if isinstance(message, ServerCall) and not (has_result or last.get(message.id) == place):
            yield ServerResult(message.id, message.name, NOT_RUN)


def last_call(messages: Sequence[Message]) -> ServerCall | None:
    """The last of ``messages``, if it is a call without a result."""
    last = messages[-1] if messages else None
    return last if isinstance(last, ServerCall) else None


# --- Code as the arguments of a call, which are JSON.


_OPENING, _CLOSING = '{"code":"', '"}'


def as_arguments(code: str) -> str:
    """``code`` as the JSON of a call's arguments."""
    return f"{_OPENING}{quote(code)[1:-1]}{_CLOSING}"


class CodeArguments:
    """``as_arguments`` of code that arrives in pieces; nothing if none arrives."""

    def __init__(self) -> None:
        self._is_open = False

    def feed(self, code: str) -> str:
        before, self._is_open = "" if self._is_open else _OPENING, True
        return before + quote(code)[1:-1]

    def close(self) -> str:
        return _CLOSING if self._is_open else ""


def code_in(arguments: str) -> str:
    """The code in ``arguments`` of ``python``; ``arguments`` itself if it has another form."""
    try:
        value = loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    code = value.get("code") if isinstance(value, dict) else None
    return code if isinstance(code, str) else arguments
