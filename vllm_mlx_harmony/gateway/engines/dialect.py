"""How one kind of engine differs from another: fields, events and capabilities. No I/O.

A ``Dialect`` writes the body of a request and reads the events of its stream. Each kind of server
has its own file beside this one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from pydantic_core import from_json

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import LOWEST_LOGPROB, Progress, TokenLogprob
from vllm_mlx_harmony.core.errors import HarmonyFailure, OutputError, RequestError
from vllm_mlx_harmony.engine_api.engine import Finish, GenerationSettings, Step

TURN_ENDS = sorted(vocab.TURN_ENDS)
"""The stop ids of every request."""

DONE = b"[DONE]"
"""The last event of OpenAI's streams, and of those modelled on them."""

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine supports.

    ``grammar``: llguidance's Lark, with control tokens as ids. ``grammar_white_space``: JSON with
    white space, bounded as llguidance 1.9 does. ``tenant_salt``: tenants never share cached
    prefixes. ``penalties``: of presence and frequency. ``logprobs``: of each id, and of the model's
    own distribution. ``prediction``: drafts of the answer are looked up in it.
    """

    grammar: bool = False
    grammar_white_space: bool = False
    cached_tokens: bool = False
    min_tokens: bool = True
    tenant_salt: bool = False
    penalties: bool = True
    logprobs: bool = False
    prediction: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """What it does not support, for logs; a prediction is only a hint."""
        names = [field.name for field in fields(self) if not getattr(self, field.name)]
        names = [name for name in names if name != "prediction"]
        if not self.grammar:
            names.remove("grammar_white_space")
        return tuple(name.replace("_", " ") for name in names)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request to an engine. ``grammar`` is text for llguidance; ``salt`` the tenant's."""

    model: str
    prompt: tuple[int, ...]
    settings: GenerationSettings
    salt: str = ""
    grammar: str | None = None
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of server; shared by all requests to it.

    ``name`` is its kind in flags, logs and metrics, ``path`` where requests are posted, and
    ``body`` makes the JSON of a request. ``step`` reads an event of the stream, which has brought
    a number of ids so far: its new ids, the cached ids of the prompt if it reports them, and
    progress or a finish reason. It raises ``OutputError`` for anything malformed.
    """

    name: str
    path: str
    capabilities: Capabilities
    body: Callable[[EngineRequest], Json]
    step: Callable[[Json, int], Step]

    def read(self, data: bytes, seen: int) -> Step:
        """The step of one event behind ``seen`` ids.

        Raises ``OutputError`` for a malformed event, and the exception for an error event.
        """
        if data == DONE:
            return Step(())
        try:
            try:
                event = from_json(data)
            except ValueError:  # for invalid UTF-8 and lone surrogates, too
                event = json.loads(data.decode("utf-8", "replace"))
        except ValueError as error:
            raise garbled(data) from error
        if not isinstance(event, dict):
            raise garbled(data)
        if "error" in event:
            raise failure_in(event)
        try:
            return self.step(event, seen)
        except (AttributeError, TypeError, ValueError) as error:  # in what is nested deeper
            raise garbled(data) from error


def sampling(settings: GenerationSettings) -> Json:
    """The sampling fields that have the same names on every engine."""
    return {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
    }


def batch_sampling(request: EngineRequest, *, max_tokens: str, min_tokens: str, seed: str) -> Json:
    """The sampling fields of vLLM and SGLang, which differ in three names."""
    settings = request.settings
    body: Json = {
        **sampling(settings),
        "repetition_penalty": settings.repetition_penalty,
        max_tokens: settings.max_tokens,
        "stop_token_ids": TURN_ENDS,
        "skip_special_tokens": False,
    }
    if settings.seed is not None:
        body[seed] = settings.seed
    if settings.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in settings.logit_bias}
    if request.min_tokens:
        body[min_tokens] = min(request.min_tokens, settings.max_tokens)
    return body


def garbled(data: object) -> OutputError:
    """The error for a malformed event; the message quotes its beginning."""
    return OutputError(f"the engine sent a malformed event: {str(data)[:80]!r}")


def failure_in(event: Mapping[str, Any]) -> HarmonyFailure:
    """The exception for an error event: the request's fault (4xx), or the engine's."""
    error = event["error"]
    status = error.get("code") if isinstance(error, Mapping) else None
    message = message_of(event) or "no reason given"
    if type(status) is int and 400 <= status < 500:  # noqa: PLR2004
        return RequestError(f"the engine refused the request: {message}", code="engine_refused")
    return OutputError(f"the engine failed: {message}")


FINISHES: Mapping[str, Finish] = {"stop": "stop", "length": "length"}


def finish_of(
    reason: object, finishes: Mapping[str, Finish] = FINISHES, message: object = None
) -> Finish | None:
    """The finish reason for the engine's own name of it; ``None`` while the turn continues.

    ``message`` is the engine's explanation. Raises ``OutputError`` for any other reason: the engine
    has aborted the request.
    """
    if reason is None:
        return None
    finish = finishes.get(reason) if isinstance(reason, str) else None
    if finish is None:
        about = f"{reason}: {message}" if message else reason
        raise OutputError(f"the engine aborted the request ({about})")
    return finish


def ids_of(value: object) -> tuple[int, ...]:
    """``value`` as ids; empty for ``None``. Raises ``OutputError`` for anything but a list of
    integers."""
    if value is None:
        return ()
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise garbled(value)
    return tuple(value)


def logprobs_of(
    ids: tuple[int, ...], entries: Iterable[tuple[object, Iterable[tuple[object, object]]]]
) -> tuple[TokenLogprob, ...]:
    """The log probabilities of ``ids``, from each one's own and the pairs of its likeliest ids.

    Raises ``OutputError`` for anything malformed.
    """

    def finite(value: object) -> float:
        if type(value) not in (int, float):
            raise garbled(value)
        return max(float(value), LOWEST_LOGPROB)  # type: ignore[arg-type]

    found = []
    for token, (own, pairs) in zip(ids, entries, strict=False):
        top = [(id_, finite(logprob)) for id_, logprob in pairs if type(id_) is int]
        top.sort(key=lambda pair: -pair[1])
        found.append(TokenLogprob(token, finite(own), tuple(top)))
    return tuple(found)


MAX_COUNT = 2**40
"""More than any number of tokens or milliseconds; clients and metrics have to hold it."""


def count_of(value: object) -> int:
    """``value`` as a number of tokens; 0 for anything but a positive integer of a size that can
    be one."""
    return value if type(value) is int and 0 < value < MAX_COUNT else 0


def progress_of(value: object) -> Progress | None:
    """``prompt_progress`` as llama.cpp and this project's id endpoint write it; else ``None``."""
    if not isinstance(value, Mapping):
        return None
    total, cached, processed, milliseconds, place = (
        count_of(value.get(name)) for name in ("total", "cache", "processed", "time_ms", "place")
    )
    return Progress(total, cached, processed, milliseconds / 1000, place) if total else None


def message_of(body: object) -> str:
    """The message of an error body, in any of the engines' shapes; empty if there is none."""
    if isinstance(body, Mapping):
        for name in ("error", "message", "detail", "object"):
            if found := message_of(body.get(name)):
                return found
        return ""
    return body if isinstance(body, str) else ""
