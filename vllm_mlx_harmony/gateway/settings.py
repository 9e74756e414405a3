"""The settings of a gateway, from flags, environment variables and one TOML file.

Flags override variables, and variables override the file. A setting has one name: ``rate_limit`` is
``--rate-limit``, ``rate_limit = …`` in the file, and ``VLLM_MLX_HARMONY_GATEWAY_RATE_LIMIT``. Lists
are comma-separated in variables. What the front end shares with vllm-mlx (grammars, reasoning
budgets, replay, storage) is configured by the variables in docs/api.md.

```toml
model = "openai/gpt-oss-120b"
keys = { alice = "…", ci = "…" }      # each key is a tenant; clients never see the names
rate_limit = 600                      # requests per minute for each key

[[engines]]
url = "http://gpu-1:8000"
kind = "vllm"                         # detected if omitted
key = "…"                             # the API key that this engine requires
```

Why this is not pydantic-settings: a value that is rejected may be a key, so no message may quote
it; a misspelt variable must end the start, except those that Kubernetes sets under our prefix; and
messages name the flag. All three would have to be written around it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.turn import BUILTIN_TOOLS, EFFORTS
from vllm_mlx_harmony.gateway.access_log import FORMATS, Format
from vllm_mlx_harmony.gateway.engines.detection import KINDS, Spec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger("vllm_mlx_harmony")

_Read: TypeAlias = Callable[[str, Any], Any]
"""Validates and converts the value of the named setting. Raises ``HostError``."""

PREFIX = "VLLM_MLX_HARMONY_GATEWAY_"
"""The prefix of environment variables; ``…CONFIG`` is the path of the file."""

_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?")
"""The variables that Kubernetes sets in every container for a service that is called
``vllm-mlx-harmony-gateway``. ``PORT`` among them is also our setting, unless its value is a URL.
https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables"""

SHORTEST_KEY = 8
"""Characters: a shorter API key is easily guessed."""

LEVELS = ("debug", "info", "warning", "error")


ENGINES, SERVER, ACCESS = "engines", "server", "access"
GENERATION, TOOLS, LOGS = "generation", "tools", "logs"
"""The groups of ``--help``."""


def _about(group: str, metavar: str, text: str) -> dict[str, str]:
    """The metadata that ``--help`` is generated from."""
    return {"group": group, "metavar": metavar, "help": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The configuration of a gateway. Times are in seconds."""

    engines: tuple[Spec, ...] = field(
        metadata=_about(
            ENGINES,
            "[KIND=]URL",
            f"URL of an engine, detected unless KIND is given: {', '.join(KINDS)}; repeatable",
        )
    )
    model: str = field(
        metadata=_about(ENGINES, "NAME", "the model's name, as clients send it and engines know it")
    )
    engine_key: str = field(
        default="", metadata=_about(ENGINES, "KEY", "API key that the engines require")
    )
    host: str = field(default="127.0.0.1", metadata=_about(SERVER, "HOST", "address to listen on"))
    port: int = field(default=8000, metadata=_about(SERVER, "PORT", "port to listen on"))
    timeout: float = field(
        default=600.0,
        metadata=_about(
            SERVER,
            "SECONDS",
            "time limit of a request; of a streaming one, the longest time without a token",
        ),
    )
    shutdown_grace: float = field(
        default=30.0,
        metadata=_about(SERVER, "SECONDS", "grace period for running requests after SIGTERM"),
    )
    keys: tuple[tuple[str, str], ...] = field(
        default=(),
        metadata=_about(
            ACCESS, "[NAME=]KEY", "API key of a client; each key is a separate tenant; repeatable"
        ),
    )
    rate_limit: int = field(
        default=0,
        metadata=_about(ACCESS, "REQUESTS", "requests per minute for each key; 0: unlimited"),
    )
    default_max_output_tokens: int = field(
        default=32_768,
        metadata=_about(GENERATION, "TOKENS", "limit of the output if the request sets none"),
    )
    max_output_tokens: int = field(
        default=131_072,
        metadata=_about(GENERATION, "TOKENS", "highest limit that a request may set"),
    )
    reasoning_tokens: int | None = field(
        default=None,
        metadata=_about(GENERATION, "TOKENS", "reasoning budget if the request sets none"),
    )
    reasoning_effort: str = field(
        default="medium",
        metadata=_about(GENERATION, "EFFORT", f"default effort: {', '.join(EFFORTS)}"),
    )
    temperature: float | None = field(
        default=None, metadata=_about(GENERATION, "NUMBER", "default sampling temperature")
    )
    top_p: float | None = field(
        default=None, metadata=_about(GENERATION, "NUMBER", "default nucleus sampling probability")
    )
    model_identity: str | None = field(
        default=None, metadata=_about(GENERATION, "TEXT", "first sentence of the system message")
    )
    builtin_tools: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            TOOLS, "TOOL", f"built-in tool of the model: {', '.join(BUILTIN_TOOLS)}; repeatable"
        ),
    )
    mcp_config: str | None = field(
        default=None,
        metadata=_about(
            TOOLS, "FILE", "MCP servers, JSON or YAML; requires VLLM_MLX_HARMONY_TOOLS=on (or all)"
        ),
    )
    access_log: Format = field(
        default="off",
        metadata=_about(
            LOGS, "FORMAT", f"one line per request on standard output: {', '.join(FORMATS)}"
        ),
    )
    log_level: str = field(
        default="info", metadata=_about(LOGS, "LEVEL", f"one of {', '.join(LEVELS)}")
    )

    @property
    def open(self) -> bool:
        """Whether other machines can use the gateway without a key."""
        try:
            local = ip_address(self.host).is_loopback
        except ValueError:
            local = self.host == "localhost"
        return not (self.keys or local)

    @property
    def template_options(self) -> dict[str, Any]:
        """The options that ``server.defaults.read`` takes."""
        return {
            "reasoning_effort": self.reasoning_effort,
            "model_identity": self.model_identity,
            "builtin_tools": list(self.builtin_tools),
        }


REPEATABLE = ("engines", "keys", "builtin_tools")

FLAGS = {"engines": "engine", "keys": "key", "builtin_tools": "builtin-tool"}
"""Flags that differ from the name of their setting: each occurrence adds one value."""

RENAMED = {
    "max_tokens": "default_max_output_tokens",
    "most_tokens": "max_output_tokens",
    "drain": "shutdown_grace",
}
"""Former names, which flags, variables and files may still use."""


def flag(name: str) -> str:
    """The flag of a setting."""
    return f"--{FLAGS.get(name, name.replace('_', '-'))}"


def load(
    flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ, file: str | None = None
) -> GatewaySettings:
    """Reads the settings: flags override environment variables, which override the file.

    A flag that is ``None`` was not given. Raises ``HostError`` that names the invalid setting.
    """
    path = file or environment.get(f"{PREFIX}CONFIG")
    found: dict[str, Any] = {} if not path else _from_file(Path(path))
    found |= _from_environment(environment)
    given = {name: value for name, value in flags.items() if value is not None}
    found |= _renamed(given, flag)
    values = {name: _value(name, value) for name, value in found.items()}
    for name in ("engines", "model"):
        if not values.get(name):
            raise HostError(f"{flag(name)} is missing")
    key = values.get("engine_key")
    if key:
        values["engines"] = tuple(
            Spec(each.url, each.kind, each.key or key) for each in values["engines"]
        )
    return GatewaySettings(**values)


def _renamed(
    found: dict[str, Any], spelled: Callable[[str], str], where: str = ""
) -> dict[str, Any]:
    """The settings of one source under their present names; a warning names each former one.

    Raises ``HostError`` where a source has a setting under both names.
    """
    for old in RENAMED.keys() & found.keys():
        new = RENAMED[old]
        names = spelled(old), spelled(new)
        if new in found:
            raise HostError(f"{where}{names[0]} is the former name of {names[1]}: set only one")
        logger.warning("%s%s is now called %s; the old name still works", where, *names)
        found[new] = found.pop(old)
    return found


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings in environment variables.

    Raises ``HostError`` for an unknown variable with our prefix: a gateway that ignored a misspelt
    ``…KEYS`` would be open to everyone.
    """
    names = {name.upper(): name for name in _names()}
    flags = {flag.upper().replace("-", "_"): name.upper() for name, flag in FLAGS.items()}
    found: dict[str, Any] = {}
    for variable, word in environment.items():
        if not variable.startswith(PREFIX):
            continue
        given = variable.removeprefix(PREFIX)
        if _KUBERNETES.fullmatch(given) and (given != "PORT" or "://" in word):
            continue
        if given in names:
            name = names[given]
            found[name] = _split(word) if name in REPEATABLE else word
        elif given != "CONFIG":
            close = flags.get(given) or next(iter(get_close_matches(given, [*names, "CONFIG"])), "")
            meant = f"; did you mean {PREFIX}{close}?" if close else ""
            raise HostError(f"{variable} is not a setting{meant}")
    return _renamed(found, lambda name: f"{PREFIX}{name.upper()}")


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise HostError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HostError(f"{path} is not TOML: {error}") from error
    for unknown in sorted(content.keys() - _names()):
        close = get_close_matches(unknown, sorted(_names()), 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise HostError(f"{path}: {unknown} is not a setting{meant}")
    return _renamed(content, str, f"{path}: ")


def _names() -> set[str]:
    """What a source may call a setting."""
    return {each.name for each in fields(GatewaySettings)} | RENAMED.keys()


def _split(word: str) -> list[str]:
    return [part.strip() for part in word.split(",") if part.strip()]


def _value(name: str, value: Any) -> Any:
    """``value``, validated and converted for the setting ``name``. Raises ``HostError``."""
    read = _READ.get(name)
    if read is not None:
        return read(name, value)
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def _one_of(known: Collection[str]) -> _Read:
    def read(name: str, value: Any) -> Any:
        if value not in known:
            raise _wrong(name, value, f"one of {', '.join(known)}")
        return value

    return read


def _tools(name: str, value: Any) -> tuple[str, ...]:
    return tuple(map(partial(_one_of(BUILTIN_TOOLS), name), _listed(name, value)))


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise _wrong(name, value, "a list")
    return list(value)


def _engines(name: str, value: Any) -> tuple[Spec, ...]:
    specs = tuple(map(_engine, _listed(name, value)))
    urls = [spec.url.rstrip("/") for spec in specs]
    twice = next((url for url in urls if urls.count(url) > 1), None)
    if twice is not None:
        raise HostError(f"{flag(name)}: {twice} is given twice")
    return specs


_ENGINE = ("url", "kind", "key")


def _engine(value: Any) -> Spec:
    """An engine from ``URL``, ``KIND=URL``, or a table of the file."""
    if isinstance(value, Mapping):
        for name, content in value.items():
            if name not in _ENGINE:
                raise _wrong("engines", name, f"one of {', '.join(_ENGINE)}")
            if not isinstance(content, str):
                raise HostError(f"{flag('engines')}: the {name} of an engine must be a string")
        spec = Spec(value.get("url", ""), value.get("kind", ""), value.get("key", ""))
    else:
        kind, equals, url = str(value).partition("=")
        spec = Spec(url, kind) if equals and "/" not in kind else Spec(str(value))
    try:
        parts = urlsplit(spec.url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise _wrong("engines", spec.url.rpartition("@")[2], "a URL: http://host:port")
    if "@" in parts.netloc or parts.query or parts.fragment:
        # The URL appears in logs, in /ready and in /metrics.
        raise HostError(
            f"{flag('engines')}: the URL of an engine must have no user, query or fragment; "
            f"set its key with {flag('engine_key')}, or as `key` in the file"
        )
    if spec.kind and spec.kind not in KINDS:
        raise _wrong("engines", spec.kind, f"one of {', '.join(KINDS)}")
    return spec


_NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]+)=(?!=*$)(.*)", re.DOTALL)
_NO_KEY = re.compile(r"[A-Za-z0-9_.-]+=")


def _keys(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Names and keys, from a table of the file or a list of ``KEY`` and ``NAME=KEY``.

    A key in base64 may end in ``=``; its length is then a multiple of four.
    """
    rows: list[tuple[str, str, Any]] = []
    """Name, description in messages (never the key itself) and key."""
    if isinstance(value, Mapping):
        rows += [(str(label), f"the key of {label!r}", key) for label, key in value.items()]
    else:
        for number, each in enumerate(_listed(name, value), start=1):
            called, text = f"key {number}", each.strip() if isinstance(each, str) else ""
            if _NO_KEY.fullmatch(text) and len(text) % 4:
                raise HostError(f"{flag(name)}: {called} is a name without a key")
            named = _NAMED_KEY.fullmatch(text)
            label, key = (f"key-{number}", text) if named is None else named.groups()
            rows.append((label, called, key))
    if not rows:
        raise HostError(
            f"{flag(name)}: the list is empty; leave the setting out to run without keys"
        )
    names: dict[str, str] = {}
    for label, called, given in rows:
        key = given.strip() if isinstance(given, str) else ""  # as in an HTTP header
        if not key or not key.isascii() or not key.isprintable():
            raise HostError(f"{flag(name)}: {called} is not printable ASCII")
        if len(key.rstrip("=")) < SHORTEST_KEY:
            raise HostError(f"{flag(name)}: {called} is shorter than {SHORTEST_KEY} characters")
        if key in names:
            raise HostError(f"{flag(name)}: two names have the same key")
        names[key] = label
    return tuple((label, key) for key, label in names.items())


def _number(kind: type[int] | type[float], most: float) -> _Read:
    what = f"a {'whole ' if kind is int else ''}number from 0 to {most:g}"

    def read(name: str, value: Any) -> Any:
        try:
            number = kind(value) if isinstance(value, str) or kind is float else value
        except (TypeError, ValueError) as error:
            raise _wrong(name, value, what) from error
        if isinstance(number, bool) or not isinstance(number, kind) or not 0 <= number <= most:
            raise _wrong(name, value, what)
        return number

    return read


_READ: dict[str, _Read] = {
    "engines": _engines,
    "keys": _keys,
    "builtin_tools": _tools,
    "port": _number(int, 65_535),
    "rate_limit": _number(int, 1e9),
    "default_max_output_tokens": _number(int, 1e9),
    "max_output_tokens": _number(int, 1e9),
    "reasoning_tokens": _number(int, 1e9),
    "timeout": _number(float, 1e9),
    "shutdown_grace": _number(float, 1e6),
    "temperature": _number(float, 100.0),
    "top_p": _number(float, 1.0),
    "access_log": _one_of(FORMATS),
    "log_level": _one_of(LEVELS),
    "reasoning_effort": _one_of(EFFORTS),
}


def _wrong(name: str, value: object, wanted: str) -> HostError:
    """Quotes ``value`` only where it can neither be nor contain a key."""
    secret = name in ("keys", "engine_key") or not isinstance(value, (str, int, float))
    quoted = f"a value of type {type(value).__name__}" if secret else repr(value)
    return HostError(f"{flag(name)}: {quoted} is not {wanted}")
