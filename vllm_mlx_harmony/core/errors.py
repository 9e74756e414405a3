"""The errors of this package, named after the party at fault, each with its HTTP status.

Each protocol formats them in its own way.
"""

from __future__ import annotations

from itertools import islice
from reprlib import Repr
from typing import Any

INTERNAL = "internal error: see the server's log"
"""The message of an unexpected error, for clients."""


def quoted(value: object) -> str:
    """The ``repr`` of a client's ``value``, for an error or a log, truncated if it is long.

    The ``repr`` of 30 MB would take 50 ms, in which no other thread runs.
    """
    if not isinstance(value, str):
        return _BRIEF.repr(value)
    return f"{value[:_MAX_QUOTED]!r}…" if len(value) > _MAX_QUOTED else repr(value)


class _Brief(Repr):
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # Repr would sort all keys.
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_BRIEF = _Brief()
_BRIEF.maxlevel = 3

_MAX_QUOTED, _MAX_MESSAGE = 200, 4_000
"""The most characters of a quoted value, and of a whole message."""


class HarmonyFailure(Exception):
    """Base class of this package's errors.

    ``status`` is the HTTP status, ``code`` a stable word that programs can test for, ``param`` the
    path of the field at fault in the request (``messages[3].content``), and ``retry_after`` the
    number of seconds after which a client may try again.
    """

    status = 500
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after: int | None = None,
    ) -> None:
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]}…"
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.status = status or self.status
        self.retry_after = retry_after


class RequestError(HarmonyFailure):
    """The request is invalid or asks for something unsupported."""

    status = 400


class PromptTooLong(RequestError):
    """The prompt does not fit the ``window``; both are in tokens (semantics A11).

    If ``at_least`` is true, counting stopped at ``prompt_tokens``.
    """

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, window: int, *, at_least: bool = False) -> None:
        counted = f"at least {prompt_tokens}" if at_least else f"{prompt_tokens}"
        super().__init__(
            f"this model's maximum context length is {window} tokens, "
            f"but the messages have {counted} tokens",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.window = window
        self.at_least = at_least

    def within(self, window: int) -> PromptTooLong:
        """The same error for an engine with another ``window``."""
        return PromptTooLong(self.prompt_tokens, window, at_least=self.at_least)


class OutputError(HarmonyFailure):
    """The engine failed while generating: 500."""

    code = "generation_failed"


class HostError(HarmonyFailure):
    """The server is busy, full or too slow, or this installation lacks something: 503."""

    status = 503
    code = "server_unavailable"


class StoreError(HostError):
    """The store of responses cannot be read, or cannot be written, at the moment. 503."""

    code = "store_unavailable"
