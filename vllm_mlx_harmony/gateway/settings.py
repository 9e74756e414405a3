"""The settings of a gateway, from flags, environment variables and one TOML file.

Flags override variables, and variables override the file. A setting has one name:
``tokens_per_day`` is ``--tokens-per-day``, ``tokens_per_day = …`` in the file, and
``VLLM_MLX_HARMONY_GATEWAY_TOKENS_PER_DAY``. Lists are comma-separated in variables. What the front
end shares with vllm-mlx (grammars, reasoning budgets, replay, storage) is configured by the
variables in docs/configuration.md.

```toml
model = "openai/gpt-oss-120b"
requests_per_minute = 600             # limits of each key
tokens_per_day = 20_000_000

[keys]                                # each key is a tenant; clients never see the names
alice = "sha256:…"                    # `vllm-mlx-harmony gateway keys add alice`
ci = { key = "sha256:…", requests_per_minute = 6000, concurrent_requests = 8 }

[[engines]]
url = "http://gpu-1:8000"
kind = "vllm"                         # detected if omitted
key = "…"                             # the API key that this engine requires
model = "gpt-oss"                     # its name for the model, if it differs
```

Pydantic validates the values. The sources are read here and not by pydantic-settings, which ignores
a misspelt variable, and takes what Kubernetes sets under our prefix.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.turn import BUILTIN_TOOLS, EFFORTS
from vllm_mlx_harmony.gateway.access_log import FORMATS, Format
from vllm_mlx_harmony.gateway.engines.detection import KINDS, LOCAL, Spec
from vllm_mlx_harmony.gateway.limits import KeyLimits, digest

logger = logging.getLogger("vllm_mlx_harmony")

PREFIX = "VLLM_MLX_HARMONY_GATEWAY_"
"""The prefix of environment variables; ``…CONFIG`` is the path of the file."""

_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?")
"""The variables that Kubernetes sets in every container for a service that is called
``vllm-mlx-harmony-gateway``. ``PORT`` among them is also our setting, unless its value is a URL.
https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables"""

DIGEST = "sha256:"
"""Marks a digest in place of a key."""

DIGEST_BYTES = 32

MIN_KEY_LENGTH = 8
"""Characters: a shorter API key is easily guessed."""


# --- Types of values. Validators raise a `ValueError` in which "Input" stands for the value, as it
# does in pydantic's messages.


def _one_of(known: Collection[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"Input is not one of {', '.join(known)}")
        return value

    return AfterValidator(check)


def _not_boolean(value: object) -> object:
    if isinstance(value, bool):  # pydantic takes it for an integer
        raise ValueError("Input should be a number")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("Input should be a list")
    return list(value)


def _engines(value: object) -> tuple[Spec, ...]:
    specs = tuple(map(_engine, _list(value)))
    urls = [spec.url.rstrip("/") for spec in specs]
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise ValueError(f"duplicate engine URL {twice}")
    if len(specs) > 1 and (local := next((spec.url for spec in specs if spec.local_model), None)):
        raise ValueError(
            f"{local} must be the only engine: the model runs in the gateway's process"
        )
    return specs


def _engine(value: object) -> Spec:
    """An engine from ``URL``, ``KIND=URL``, or a table of the file."""
    if isinstance(value, Mapping):
        for name, content in value.items():
            if name not in (known := [attribute.name for attribute in fields(Spec)]):
                raise ValueError(
                    f"unknown field {name!r} of an engine; expected {', '.join(known)}"
                )
            if not isinstance(content, str):
                raise ValueError(f"the {name} of an engine must be a string")
        spec = Spec(**{"url": "", **value})
    else:
        kind, equals, url = str(value).partition("=")
        spec = Spec(url, kind) if equals and not {"/", ":"} & {*kind} else Spec(str(value))
    if spec.local_model is None:
        _check_url(spec.url)
    elif not spec.local_model:
        raise ValueError(f"{LOCAL} must be followed by a directory or a repository")
    if spec.kind and spec.kind not in KINDS:
        raise ValueError(f"{spec.kind!r} is not one of {', '.join(KINDS)}")
    return spec


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError(
            f"{url.rpartition('@')[2]!r} is not a valid URL (expected http://host:port)"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        # The URL appears in logs, in /ready and in /metrics.
        raise ValueError(
            "the URL of an engine must have no user, query or fragment; "
            f"set its key with {flag('engine_key')}, or as `key` in the file"
        )


_NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]+)=(?!=*$)(.*)", re.DOTALL)
_NO_KEY = re.compile(r"[A-Za-z0-9_.-]+=")


@dataclass(frozen=True, slots=True)
class Key:
    """An API key. ``limits`` has the limits that are its own, in place of those of every key."""

    name: str
    digest: bytes
    limits: Mapping[str, int] = field(default_factory=dict)


def _keys(value: object) -> tuple[Key, ...]:
    """The keys of a table of the file, or of a list of ``KEY`` and ``NAME=KEY``.

    A key in base64 may end in ``=``; its length is then a multiple of four.
    """
    rows: list[tuple[str, str, object]] = []
    """Name, description in messages (never the key itself) and key."""
    if isinstance(value, Mapping):
        rows += [(str(label), f"the key of {label!r}", key) for label, key in value.items()]
    else:
        for number, entry in enumerate(_list(value), start=1):
            called, text = f"key {number}", entry.strip() if isinstance(entry, str) else ""
            if _NO_KEY.fullmatch(text) and len(text) % 4:
                raise ValueError(f"{called} has a name but no key")
            named = _NAMED_KEY.fullmatch(text)
            label, key = (f"key-{number}", text) if named is None else named.groups()
            rows.append((label, called, key))
    if not rows:
        raise ValueError("empty list; omit the setting to run without keys")
    keys: dict[bytes, Key] = {}
    for label, called, key_or_table in rows:
        table = key_or_table if isinstance(key_or_table, Mapping) else {"key": key_or_table}
        limits = {
            name: _limit(name, content, called) for name, content in table.items() if name != "key"
        }
        key = Key(label, _digest(table.get("key"), called), limits)
        if key.digest in keys:
            raise ValueError("two names have the same key")
        keys[key.digest] = key
    return tuple(keys.values())


def _digest(value: object, called: str) -> bytes:
    """The digest of a key, which is given itself or as ``sha256:`` and 64 hexadecimal digits."""
    key = value.strip() if isinstance(value, str) else ""  # as in an HTTP header
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{called} is not printable ASCII")
    if key.startswith(DIGEST):
        with suppress(ValueError):
            if len(found := bytes.fromhex(key.removeprefix(DIGEST))) == DIGEST_BYTES:
                return found
        raise ValueError(f"{called} is not {DIGEST} and {2 * DIGEST_BYTES} hexadecimal digits")
    if len(key.rstrip("=")) < MIN_KEY_LENGTH:
        raise ValueError(f"{called} is shorter than {MIN_KEY_LENGTH} characters")
    return digest(key)


def _limit(name: str, value: object, called: str) -> int:
    known = [limit.name for limit in fields(KeyLimits)]
    if name not in known:
        raise ValueError(f"unknown field {name!r} of {called}; expected key, {', '.join(known)}")
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{name} of {called} is not an integer from 0 to {MAX_COUNT}")
    return value


MAX_COUNT = 10**12
Count: TypeAlias = Annotated[int, BeforeValidator(_not_boolean), Field(ge=0, le=MAX_COUNT)]
Number: TypeAlias = Annotated[float, BeforeValidator(_not_boolean), Field(ge=0, le=10**9)]
Level: TypeAlias = Literal["debug", "info", "warning", "error"]


# --- The settings


class Help(NamedTuple):
    """A setting in ``--help``."""

    metavar: str
    text: str


GROUPS = {
    "engines": "engines",
    "cache_memory_mb": "model in this process",
    "host": "server",
    "keys": "access",
    "default_max_output_tokens": "generation",
    "builtin_tools": "tools",
    "inspect": "logs",
}
"""The groups of ``--help``, by the first setting of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The configuration of a gateway. Times are in seconds. ``load`` validates the values."""

    engines: Annotated[
        tuple[Spec, ...],
        PlainValidator(_engines),
        Help(
            "[KIND=]URL",
            f"URL of an engine, detected unless KIND is given: {', '.join(KINDS)}; repeatable; or "
            f"{LOCAL}MODEL, a directory or repository, for a model in this process",
        ),
    ]
    model: Annotated[str, Help("NAME", "model name, for clients and engines")]
    engine_model: Annotated[
        str, Help("NAME", "model name that the engines use, if different from --model")
    ] = ""
    engine_key: Annotated[str, Help("KEY", "API key that the engines require")] = ""
    cache_memory_mb: Annotated[
        Count | None,
        Help("MB", "prefix cache in memory, 0 for none (default: a sixteenth of the memory)"),
    ] = None
    ssd_cache_dir: Annotated[str | None, Help("DIR", "directory of the prefix cache on disk")] = (
        None
    )
    ssd_cache_max_gb: Annotated[
        Number, Field(gt=0), Help("GB", "maximum size of the prefix cache on disk")
    ] = 10.0
    gpu_memory_utilization: Annotated[
        Number, Field(gt=0, le=1), Help("PART", "part of the device's memory that it may use")
    ] = 0.9
    max_num_seqs: Annotated[
        Count | None, Field(ge=1), Help("NUMBER", "requests that run at the same time")
    ] = None
    prefill_batch_size: Annotated[
        Count | None, Field(ge=1), Help("NUMBER", "prompts that are computed in turns")
    ] = None
    completion_batch_size: Annotated[
        Count | None, Field(ge=1), Help("NUMBER", "answers that are generated at the same time")
    ] = None
    prefill_step_size: Annotated[
        Count | None, Field(ge=1), Help("TOKENS", "longest chunk of a prompt")
    ] = None
    chunked_prefill_tokens: Annotated[
        Count | None, Help("TOKENS", "longest chunk while answers are generated (0: as planned)")
    ] = None
    stream_interval: Annotated[
        Count | None, Field(ge=1), Help("TOKENS", "tokens between two events of a stream")
    ] = None
    warm_prompts: Annotated[
        str | None,
        Help("FILE", "JSON list of conversations whose beginnings are computed at the start"),
    ] = None
    host: Annotated[str, Help("HOST", "address to listen on")] = "127.0.0.1"
    port: Annotated[Count, Field(le=65_535), Help("PORT", "port to listen on")] = 8000
    workers: Annotated[
        Count,
        Field(ge=1, le=256),
        Help("NUMBER", "processes that share the port; more than one requires a Redis"),
    ] = 1
    timeout: Annotated[
        Number,
        Help(
            "SECONDS",
            "time limit of a request; for a streamed one, the longest time without a token",
        ),
    ] = 600.0
    shutdown_grace: Annotated[
        Number, Help("SECONDS", "grace period for running requests after SIGTERM")
    ] = 30.0
    keys: Annotated[
        tuple[Key, ...],
        PlainValidator(_keys),
        Help(
            "[NAME=]KEY",
            "API key of a client, or its sha256:DIGEST; each key is a separate tenant; repeatable",
        ),
    ] = ()
    requests_per_minute: Annotated[
        Count, Help("REQUESTS", "requests per minute per key (0: unlimited)")
    ] = 0
    tokens_per_minute: Annotated[
        Count, Help("TOKENS", "tokens per minute per key, in prompts and outputs (0: unlimited)")
    ] = 0
    requests_per_day: Annotated[
        Count, Help("REQUESTS", "requests per day (UTC) per key (0: unlimited)")
    ] = 0
    tokens_per_day: Annotated[Count, Help("TOKENS", "tokens per day per key (0: unlimited)")] = 0
    concurrent_requests: Annotated[
        Count, Help("REQUESTS", "concurrent requests per key (0: unlimited)")
    ] = 0
    default_max_output_tokens: Annotated[Count, Help("TOKENS", "default maximum output tokens")] = (
        32_768
    )
    max_output_tokens: Annotated[
        Count, Help("TOKENS", "upper bound for a request's maximum output tokens")
    ] = 131_072
    reasoning_tokens: Annotated[
        Count | None, Help("TOKENS", "reasoning budget of requests that set none")
    ] = None
    reasoning_effort: Annotated[
        str, _one_of(EFFORTS), Help("EFFORT", f"default effort: {', '.join(EFFORTS)}")
    ] = "medium"
    temperature: Annotated[
        Number | None, Field(le=100), Help("NUMBER", "default sampling temperature")
    ] = None
    top_p: Annotated[
        Number | None, Field(le=1), Help("NUMBER", "default nucleus sampling probability")
    ] = None
    model_identity: Annotated[str | None, Help("TEXT", "first sentence of the system message")] = (
        None
    )
    builtin_tools: Annotated[
        tuple[Annotated[str, _one_of(BUILTIN_TOOLS)], ...],
        BeforeValidator(_list),
        Help("TOOL", f"built-in tool of the model: {', '.join(BUILTIN_TOOLS)}; repeatable"),
    ] = ()
    mcp_config: Annotated[
        str | None,
        Help("FILE", "MCP servers, JSON or YAML; requires VLLM_MLX_HARMONY_TOOLS=on (or all)"),
    ] = None
    web_search: Annotated[
        str, Help("ENGINE", "let requests search the web: ddgs, searxng:URL, brave or tavily")
    ] = ""
    inspect: Annotated[bool, Help("", "show prompts and answers, token by token, at /harmony")] = (
        False
    )
    access_log: Annotated[
        Format, Help("FORMAT", f"one line per request on standard output: {', '.join(FORMATS)}")
    ] = "off"
    metrics_by_key: Annotated[
        bool, Help("", "label request and token metrics with the key's name")
    ] = False
    log_level: Annotated[Level, Help("LEVEL", f"log level: {', '.join(get_args(Level))}")] = "info"

    def limits(self, key: Key | None = None) -> KeyLimits:
        """The limits of a key; without one, those of all clients together."""
        every = {limit.name: getattr(self, limit.name) for limit in fields(KeyLimits)}
        return KeyLimits(**{**every, **(key.limits if key else {})})

    def reloaded(self, new: GatewaySettings) -> GatewaySettings:
        """The ``new`` settings, except for those that change only with a restart.

        Raises ``HostError`` if all keys were removed: the gateway would be open to everyone.
        """
        if self.keys and not new.keys:
            raise HostError("all keys were removed: to run without keys, restart the gateway")
        if new.local_model != self.local_model:
            raise HostError(f"engines: {LOCAL}MODEL changes only with a restart")
        kept = {name: getattr(self, name) for name in RESTART_REQUIRED}
        if changed := [name for name in RESTART_REQUIRED if getattr(new, name) != kept[name]]:
            logger.warning("%s: changes take effect after a restart", ", ".join(changed))
        return replace(new, **kept)

    @property
    def local_model(self) -> str | None:
        """The directory or repository of the model in this process, if there is one."""
        return next((engine.local_model for engine in self.engines if engine.local_model), None)

    @property
    def http_engines(self) -> tuple[Spec, ...]:
        return tuple(engine for engine in self.engines if engine.local_model is None)

    @property
    def open(self) -> bool:
        """Whether other machines can use the gateway without a key."""
        try:
            local = ip_address(self.host).is_loopback
        except ValueError:
            local = self.host == "localhost"
        return not (self.keys or local)

    @property
    def template_options(self) -> dict[str, object]:
        """The options that ``server.defaults.read`` takes."""
        return {
            "reasoning_effort": self.reasoning_effort,
            "model_identity": self.model_identity,
            "builtin_tools": list(self.builtin_tools),
        }


RESTART_REQUIRED = (
    *("model", "host", "port", "workers", "mcp_config", "web_search", "shutdown_grace"),
    *("inspect", "metrics_by_key", "log_level"),
    *("cache_memory_mb", "ssd_cache_dir", "ssd_cache_max_gb", "gpu_memory_utilization"),
    *("max_num_seqs", "prefill_batch_size", "completion_batch_size", "prefill_step_size"),
    *("chunked_prefill_tokens", "stream_interval", "warm_prompts"),
)
"""Settings that change only with a restart."""

FLAGS = {"engines": "engine", "keys": "key", "builtin_tools": "builtin-tool"}
"""The flags of lists, each occurrence of which adds one value."""

_NAMES = {setting.name for setting in fields(GatewaySettings)}
_SECRET = ("engines", "engine_key", "keys")
"""Settings whose values contain keys, which no message may quote."""


def flag(name: str) -> str:
    """The flag of a setting."""
    return f"--{FLAGS.get(name, name.replace('_', '-'))}"


# --- The sources


def load(
    flags: Mapping[str, object],
    environment: Mapping[str, str] = os.environ,
    file: str | None = None,
) -> GatewaySettings:
    """Reads the settings: flags override environment variables, which override the file.

    A flag that is ``None`` was not given. Raises ``HostError`` that names the invalid setting.
    """
    path = file or environment.get(f"{PREFIX}CONFIG")
    found = _from_file(Path(path)) if path else {}
    found |= _from_environment(environment)
    found |= {name: value for name, value in flags.items() if value is not None}
    if not found.get("engines"):
        raise HostError(f"{flag('engines')} is required")
    if not found.get("model"):
        found["model"] = _local_name(found["engines"])
    if not found["model"]:
        raise HostError(f"{flag('model')} is required")
    try:
        settings = TypeAdapter(GatewaySettings).validate_python(found)
    except ValidationError as invalid:
        error = invalid.errors(include_url=False)[0]
        name = str(error["loc"][0])
        value = "the value" if name in _SECRET else repr(error["input"])
        problem = error["msg"].removeprefix("Value error, ").replace("Input", value, 1)
        raise HostError(f"{flag(name)}: {problem}") from None  # `invalid` quotes keys
    key, model = settings.engine_key, settings.engine_model
    engines = (replace(e, key=e.key or key, model=e.model or model) for e in settings.engines)
    return replace(settings, engines=tuple(engines))


def _local_name(engines: object) -> str:
    """The name of a model in this process by default: that of its directory or repository."""
    first = engines[0] if isinstance(engines, (list, tuple)) and engines else ""
    url = first.get("url") if isinstance(first, Mapping) else first
    return Path(str(url).removeprefix(LOCAL)).name if str(url).startswith(LOCAL) else ""


def _from_file(path: Path) -> dict[str, object]:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise HostError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HostError(f"{path} is not TOML: {error}") from error
    for unknown in sorted(content.keys() - _NAMES):
        close = get_close_matches(unknown, sorted(_NAMES), 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise HostError(f"{path}: {unknown} is not a setting{meant}")
    return content


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """The settings in environment variables.

    Raises ``HostError`` for an unknown variable with our prefix: a gateway that ignored a misspelt
    ``…KEYS`` would be open to everyone.
    """
    names = {name.upper(): name for name in _NAMES}
    flags = {flag.upper().replace("-", "_"): name.upper() for name, flag in FLAGS.items()}
    found: dict[str, object] = {}
    for variable, word in environment.items():
        if not variable.startswith(PREFIX):
            continue
        given = variable.removeprefix(PREFIX)
        if _KUBERNETES.fullmatch(given) and (given != "PORT" or "://" in word):
            continue
        if name := names.get(given):
            parts = [part.strip() for part in word.split(",")]
            found[name] = list(filter(None, parts)) if name in FLAGS else word
        elif given != "CONFIG":
            close = flags.get(given) or next(iter(get_close_matches(given, [*names, "CONFIG"])), "")
            meant = f"; did you mean {PREFIX}{close}?" if close else ""
            raise HostError(f"{variable} is not a setting{meant}")
    return found
