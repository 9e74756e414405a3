"""What can go wrong, named after the party whose fault it is.

Knows the HTTP status and the machine-readable code of each failure.
Refuses to know how any API writes an error down: that is each protocol's own shape.
"""

from __future__ import annotations

INTERNAL = "internal error: the server's log says more"
"""To the client, of what is nobody's fault but ours."""


def quoted(value: object) -> str:
    """A client's ``value`` as an error or a log quotes it: as Python writes it, and not at length.

    However long it is: to write all of 30 MB takes 50 ms in which no other thread runs.
    """
    if isinstance(value, str) and len(value) > _LONGEST_QUOTED:
        return f"{value[:_LONGEST_QUOTED]!r}…"
    return repr(value)


_LONGEST_QUOTED, _LONGEST = 200, 4_000
"""Characters of a value in a message, and of the message."""


class HarmonyFailure(Exception):
    """Base of every error that this package raises on purpose.

    ``status`` is the HTTP status, ``code`` a stable word a program can test for (or ``None``),
    ``param`` the path of the guilty field in the request (``messages[3].content``) or ``None``,
    ``retry_after`` whole seconds after which trying again makes sense, or ``None``.
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
        if len(message) > _LONGEST:
            message = f"{message[:_LONGEST]}…"
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code
        self.status = status if status is not None else type(self).status
        self.retry_after = retry_after


class RequestError(HarmonyFailure):
    """The caller sent something that cannot be done. 400 unless said otherwise."""

    status = 400


class PromptTooLong(RequestError):
    """The prompt leaves no room in the model's ``window``; both are in tokens (semantics A11)."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, window: int) -> None:
        super().__init__(
            f"this model's maximum context length is {window} tokens; "
            f"the messages take {prompt_tokens} tokens",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.window = window


class OutputError(HarmonyFailure):
    """The engine failed while it was generating. 500."""

    status = 500
    code = "generation_failed"


class HostError(HarmonyFailure):
    """The server cannot do it now (busy, full, too slow) or not in this installation. 503."""

    status = 503
    code = "server_unavailable"
