"""Tools that a request declares, and that nobody runs here (semantics A13).

Clients declare tools that the servers of OpenAI and Anthropic run: web search, code, images. If
they were left out without a word, the model would imagine their results, and the client would show
them as real. So one line tells the model which tools it does not have, and a field of the answer
(``FIELD``) tells the client.

A request that asks for nothing but such tools is not given to the model. It is answered with the
API's own result of a failed call, and a text that says so: once in a conversation, since its user
may want to go on without the tool, in a client that declares it in every request; and whenever
a call is required.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from vllm_mlx_harmony.core.turn import Answer, Instructions, Message, Preamble

FIELD = "unavailable_tools"
"""The field of an answer that lists these tools, if there are any."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The names of the ``tools`` of a request that are not available.

    ``refused`` are those whose failed calls are the answer, and ``answer`` is its text. Both are
    empty if the model answers.
    """

    tools: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def announced(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """``messages`` with the line that tells the model, after the leading instructions."""
        if not self.tools:
            return tuple(messages)
        leading = [*takewhile(lambda message: isinstance(message, Instructions), messages)]
        return (*leading, notice(self.tools), *messages[len(leading) :])

    @property
    def answer(self) -> str:
        return _answer(self.refused) if self.refused else ""

    @property
    def fields(self) -> dict[str, object]:
        """``FIELD``, if there are such tools."""
        return {FIELD: list(self.tools)} if self.tools else {}


NONE = Unavailable()


def notice(tools: Iterable[str]) -> Instructions:
    """The line that tells the model that it does not have ``tools``."""
    names = ", ".join(tools)
    return Instructions(
        f"These tools are not available, even where they are mentioned: {names}. "
        "Never invent their results."
    )


def unavailable(
    tools: tuple[str, ...], requested: Iterable[str], messages: Iterable[Message], *, forced: bool
) -> Unavailable:
    """The ``tools`` that are not available.

    ``requested`` are those which the request asks for, if it asks for nothing else, and ``forced``
    whether it requires a call. Otherwise, the model answers once ``messages`` have the refusal.
    """
    refused = Unavailable(tools, tuple(requested))
    is_known = any(
        isinstance(message, (Answer, Preamble)) and message.text == refused.answer
        for message in messages
    )
    return Unavailable(tools) if is_known and not forced else refused


def _answer(tools: Iterable[str]) -> str:
    names = ", ".join(tools)
    return (
        f"Not available on this server: {names}. "
        "No search took place, nothing was fetched, and nothing was run."
    )
