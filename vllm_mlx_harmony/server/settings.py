"""The settings in environment variables: one frozen value, read and checked when a server starts.

A field is set by the variable ``VLLM_MLX_HARMONY_`` and its name in capitals. docs/configuration.md
has the same table. The gateway has settings of its own besides (`gateway.settings`).
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from math import inf
from typing import Annotated, Literal, TypeVar, cast, get_args, get_type_hints

from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import HostError, RequestError
from vllm_mlx_harmony.core.grammar import Policy
from vllm_mlx_harmony.core.reasoning import answering_budget
from vllm_mlx_harmony.core.turn import NO_THINKING, Effort, OutputLimits, ReasoningField
from vllm_mlx_harmony.engine_api.engine import Speculate
from vllm_mlx_harmony.sizes import parse_size

E = TypeVar("E", bound=Enum)

PREFIX = "VLLM_MLX_HARMONY_"

TODAY, NO_DATE = "today", "none"

REDIS = ("redis://", "rediss://", "unix://")
"""The beginnings of a Redis's URL."""


class ToolsMode(StrEnum):
    """The requests for which the server runs tools."""

    OFF = "off"
    ON = "on"
    ALL = "all"


def variable(name: str) -> str:
    """The environment variable of a field."""
    return f"{PREFIX}{name.upper()}"


STORE_VARIABLE = variable("store")


# --- Readers of the text of a variable, which is not empty. They raise ``ValueError``.


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < inf:
        raise ValueError(f"{text!r} is not a number of seconds")
    return value


def _count(text: str) -> int:
    """A number without a unit, which may be 0."""
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{text!r} is not a number")
    return int(text)


def _positive(text: str) -> int:
    if (value := _count(text)) < 1:
        raise ValueError(f"{text!r} is less than 1")
    return value


def _switch(text: str) -> bool:
    word = text.lower()
    if word not in (switches := {"1": True, "0": False}):
        raise ValueError(f"{text!r} is not one of {', '.join(switches)}")
    return switches[word]


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def _names(text: str) -> tuple[str, ...]:
    return () if text.lower() == "none" else _words(text)


def _choice(kind: type[E]) -> Callable[[str], E]:
    """A reader of the values of an enumeration, in any case."""
    members = {member.value: member for member in kind}
    return lambda text: members[_one_of(text, members)]


def _one_of(text: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    if (word := text.lower()) not in known:
        raise ValueError(f"{text!r} is not one of {', '.join(known)}")
    return word


def _speculate(text: str) -> Speculate:
    return cast("Speculate", _one_of(text, get_args(Speculate)))


def _date(text: str) -> str:
    if (word := text.lower()) in (TODAY, NO_DATE):
        return word
    try:
        if datetime.date.fromisoformat(text).isoformat() == text:  # Python 3.11 reads more forms
            return text
    except ValueError:
        pass
    raise ValueError(f"{text!r} is not a date (YYYY-MM-DD) or {NO_DATE}")


def _effort(text: str) -> Effort | None:
    if text.lower() == NO_THINKING:
        return None
    try:
        return Effort.parse(text, param="")
    except RequestError as error:
        raise ValueError(error.message.removeprefix(": ")) from error


def _budget(text: str) -> int | Literal["off"]:
    return "off" if text.lower() == "off" else _count(text)


def without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _store(text: str) -> str:
    if "://" in text and not text.startswith(REDIS):
        url = without_password(text)
        raise ValueError(f"{url!r} is neither a file nor the URL of a Redis ({', '.join(REDIS)})")
    return text


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What operators set for a server. Sizes are in bytes.

    ``read`` is called when a server starts. Requests find the settings in `front_end.FrontEnd`.
    """

    # --- Prompts and answers

    date: Annotated[str, _date] = TODAY
    """The date in the system message: ``YYYY-MM-DD``, ``today``, or ``none`` for no date."""
    model_names: Annotated[tuple[str, ...] | None, _names] = None
    """Other names of the only model, and shell patterns of them (``claude-*``). ``None``: those
    that clients send by default (`model_names`)."""
    none_effort: Annotated[Effort | None, _effort] = None
    """The effort that ``none`` selects. ``None``: no reasoning."""
    attachments: Annotated[Attachments, _choice(Attachments)] = Attachments.OMIT
    """What becomes of images, audio and files."""
    reasoning_field: Annotated[ReasoningField, _choice(ReasoningField)] = ReasoningField.BOTH
    """Where Chat Completions sends reasoning."""

    # --- Enforcement

    grammar: Annotated[Policy, _choice(Policy)] = Policy.AUTO
    """What is enforced. With ``strict``, all tools and formats are strict."""
    reasoning_budget: Annotated[int | Literal["off"] | None, _budget] = None
    """Reasoning budget in tokens, for requests that set none. ``off``: not even a small
    ``max_tokens`` sets one."""
    repetitions: Annotated[int | None, _count] = None
    """Repetitions in a row of the same text after which reasoning is ended, 0: no limit. ``None``:
    32, and no limit if nothing is enforced."""

    # --- The engine, but for the gateway

    queue: Annotated[int, _positive] = 256
    """Maximum number of requests that wait to begin. More are rejected with 503."""
    pause_ms: Annotated[int, _positive] = 250
    """Longest pause of an answer while a prompt is computed, in ms."""
    speculate: Annotated[Speculate, _speculate] = "auto"
    """Whether several ids may be computed at once; see ``engine_api.engine.Speculate``."""
    cache: Annotated[int | None, parse_size] = None
    """Size of the prefix cache in memory, 0 for none. ``None``: a sixteenth of the memory."""
    ssd_writes: Annotated[int, parse_size] = 100 << 30
    """Bytes that may be written to the disk in a day, 0 for no limit. The default is some 4 million
    new tokens of gpt-oss-20b, every day for about four years until an SSD of 256 GB is worn out."""
    memory: Annotated[int | None, parse_size] = None
    """Memory for models where there is no Metal. ``None``: that of the machine or container."""
    wired: Annotated[int | None, parse_size] = None
    """Memory that Metal keeps for models, 0 for none. ``None``: see ``engine.device``."""
    status_line: Annotated[bool, _switch] = True
    """Whether the progress of prompts is shown on the server's terminal."""

    # --- Limits of requests and streams

    max_body: Annotated[int, parse_size] = 32 * 2**20
    """Maximum size of a request body."""
    max_values: Annotated[int, parse_size] = 50_000
    """Maximum number of JSON values in a body. Parsing this many takes 10 to 15 ms, and a garbage
    collection that visits the resulting objects about 15."""
    stream_bytes: Annotated[int, parse_size] = 8 * 2**20
    """Maximum unread bytes of an answer. An answer that has more is ended."""
    stream_seconds: Annotated[float, _seconds] = 60.0
    """Seconds after which a client that does not read is disconnected."""
    ping_seconds: Annotated[float, _seconds] = 5.0
    """Seconds of silence after which a ping is sent, or a comment in APIs that have no pings; 0:
    never."""
    background_bytes: Annotated[int, parse_size] = 256 * 2**20
    """Maximum bytes of all running background responses. More are rejected with 503."""

    # --- What is stored

    replay: Annotated[int, _count] = 64
    """MiB of generated turns that are kept in memory; 0 disables reuse."""
    store: Annotated[str, _store] = ""
    """The SQLite file, or the URL of the Redis, in which responses are stored; empty: in memory. A
    Redis also has the generated turns and the key of encrypted reasoning."""
    store_seconds: Annotated[int, _positive] = 7 * 24 * 3600
    """Seconds after which an entry in Redis expires."""
    seal_key: Annotated[str, str] = field(default="", repr=False)
    """The key of encrypted reasoning: any secret text; the same on all servers that have the same
    clients."""

    # --- Access

    origins: Annotated[tuple[str, ...], _words] = ()
    """Origins of pages that may use the server, as patterns such as ``https://*.example.com``,
    ``vscode-webview://*`` or ``*``."""
    hosts: Annotated[tuple[str, ...], _words] = ()
    """Names by which a server without a key may be reached, as patterns such as
    ``*.example.com``."""
    inspect: Annotated[bool, _switch] = False
    """Whether vllm-mlx's server has the inspector."""
    id_endpoint: Annotated[bool, _switch] = False
    """Whether ``/harmony/v1/generate`` is enabled."""

    # --- Tools

    tools: Annotated[ToolsMode, _choice(ToolsMode)] = ToolsMode.OFF
    """Whether the tools of ``--mcp-config`` are run."""
    tool_urls: Annotated[tuple[str, ...], _words] = ()
    """Patterns of the URLs of tool servers that requests may name."""
    web_search: Annotated[str, str] = ""
    """The search engine of the browser (`tools.browser.engines`); empty: there is no browser."""
    web_intranet: Annotated[tuple[str, ...], _words] = ()
    """Patterns of URLs that the browser may open although their hosts have private addresses."""

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> ServerSettings:
        """The settings in the environment. Raises ``HostError`` for the first invalid one."""
        values = {}
        for name, annotation in get_type_hints(cls, include_extras=True).items():
            text, reader = environment.get(variable(name), ""), annotation.__metadata__[0]
            try:
                if text.strip():
                    values[name] = reader(text if reader is str else text.strip())
            except ValueError as error:
                raise HostError(f"{variable(name)}: {error}") from error
        return cls(**values)

    @property
    def has_peers(self) -> bool:
        """Whether the server shares a Redis with others."""
        return self.store.startswith(REDIS)


REPETITIONS = 32
"""The default; `core.reasoning` explains why a table has fewer than a loop."""


@dataclass(frozen=True, slots=True)
class Enforcement:
    """What the settings say about constraints on outputs, for `server.enforcement`.

    ``repetitions`` 0: no limit. ``budgets``: without a reasoning budget, a small ``max_tokens``
    sets one.
    """

    policy: Policy = Policy.AUTO
    reasoning_tokens: int | None = None
    repetitions: int = REPETITIONS
    budgets: bool = True

    @classmethod
    def of(cls, settings: ServerSettings) -> Enforcement:
        policy, repetitions = settings.grammar, settings.repetitions
        if repetitions is None:
            repetitions = 0 if policy is Policy.OFF else REPETITIONS
        budget = settings.reasoning_budget
        if budget == "off":
            return cls(policy, None, repetitions, budgets=False)
        return cls(policy, budget, repetitions, budgets=policy is not Policy.OFF)

    def reasoning_budget(self, limits: OutputLimits, *, can_call: bool) -> int | None:
        """The reasoning budget of a turn, in which the model may or may not call a tool.

        Where it may, a small ``max_tokens`` sets none: without reasoning it would answer where it
        should call.
        """
        if limits.reasoning_tokens is not None:
            return limits.reasoning_tokens
        small = answering_budget(limits) if self.budgets and not can_call else None
        budgets = (self.reasoning_tokens, small)
        return min((budget for budget in budgets if budget is not None), default=None)
