"""What a gateway is started with: flags, over the environment, over one TOML file, over defaults.

Every setting has one name: ``rate_limit`` is ``--rate-limit``, ``rate_limit = …`` in the file, and
``VLLM_MLX_HARMONY_GATEWAY_RATE_LIMIT``. Lists are comma-separated in the environment. Those of the
front end itself (grammars, reasoning budgets, replay, storage) are its own variables, as on
vllm-mlx: docs/api.md.

```toml
model = "openai/gpt-oss-120b"
keys = { alice = "…", ci = "…" }      # names are for this file alone; each key is a tenant
rate_limit = 600                      # requests per minute and key

[[engines]]
url = "http://gpu-1:8000"
kind = "vllm"                         # asked for where it is not given
key = "…"                             # the engine's own
```
"""

from __future__ import annotations

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

_Read: TypeAlias = Callable[[str, Any], Any]
"""Reads a value of the setting with this name. Raises ``HostError``."""

PREFIX = "VLLM_MLX_HARMONY_GATEWAY_"
"""Of environment variables; ``…CONFIG`` names the file."""

_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?")
"""What Kubernetes sets in every container for a service called ``vllm-mlx-harmony-gateway``
(https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables); of these
``PORT`` is ours as well, unless it is a URL."""

SHORTEST_KEY = 8
"""Characters: a shorter API key is soon guessed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Everything that a gateway is started with. Times are in seconds."""

    engines: tuple[Spec, ...] = field(metadata={"help": "an engine: URL, or KIND=URL; repeatable"})
    model: str = field(metadata={"help": "what clients call the model"})
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=8000, metadata={"help": "port to listen on"})
    keys: tuple[tuple[str, str], ...] = field(
        default=(), metadata={"help": "an API key, or NAME=KEY; each is a tenant; repeatable"}
    )
    engine_key: str = field(default="", metadata={"help": "the API key of the engines"})
    rate_limit: int = field(
        default=0, metadata={"help": "requests per minute and key (0: no limit)"}
    )
    timeout: float = field(
        default=600.0,
        metadata={"help": "seconds that a whole answer may take, or a pause in a streamed one"},
    )
    max_tokens: int = field(
        default=32_768, metadata={"help": "tokens of an answer that names none"}
    )
    most_tokens: int = field(
        default=131_072, metadata={"help": "tokens that a request may ask for at most"}
    )
    drain: float = field(
        default=30.0, metadata={"help": "seconds that answers may take to their ends at SIGTERM"}
    )
    reasoning_tokens: int | None = field(
        default=None, metadata={"help": "budget of reasoning where a request names none"}
    )
    reasoning_effort: str = field(
        default="medium", metadata={"help": "low, medium, high or none, where a request is silent"}
    )
    model_identity: str | None = field(
        default=None, metadata={"help": "the first sentence of the system message"}
    )
    builtin_tools: tuple[str, ...] = field(
        default=(), metadata={"help": f"of {', '.join(BUILTIN_TOOLS)}; repeatable"}
    )
    mcp_config: str | None = field(
        default=None,
        metadata={"help": "tool servers, JSON or YAML; VLLM_MLX_HARMONY_TOOLS=on or all runs them"},
    )
    temperature: float | None = field(default=None, metadata={"help": "where a request is silent"})
    top_p: float | None = field(default=None, metadata={"help": "where a request is silent"})
    access_log: Format = field(
        default="off",
        metadata={"help": f"a line for each request: {', '.join(FORMATS)}"},
    )
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})

    @property
    def open(self) -> bool:
        """Whether other machines may reach it, and nobody needs a key."""
        try:
            local = ip_address(self.host).is_loopback
        except ValueError:
            local = self.host == "localhost"
        return not (self.keys or local)

    @property
    def template_options(self) -> dict[str, Any]:
        """As ``server.defaults.read`` has them."""
        return {
            "reasoning_effort": self.reasoning_effort,
            "model_identity": self.model_identity,
            "builtin_tools": list(self.builtin_tools),
        }


REPEATABLE = ("engines", "keys", "builtin_tools")

FLAGS = {"engines": "engine", "keys": "key", "builtin_tools": "builtin-tool"}
"""Flags that are called otherwise than the setting: one is given at a time."""


def flag(name: str) -> str:
    """The flag of a setting."""
    return f"--{FLAGS.get(name, name.replace('_', '-'))}"


def load(
    flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ, file: str | None = None
) -> GatewaySettings:
    """The settings. What is ``None`` in ``flags`` was not given.

    Raises ``HostError`` that names the setting which is not what it has to be.
    """
    path = file or environment.get(f"{PREFIX}CONFIG")
    found: dict[str, Any] = {} if not path else _from_file(Path(path))
    found |= _from_environment(environment)
    found |= {name: value for name, value in flags.items() if value is not None}
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


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """What its variables say. Raises ``HostError`` for one of ours that is no setting: what it was
    to protect would be open.
    """
    names = {each.name.upper(): each.name for each in fields(GatewaySettings)}
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
            meant = f"; {PREFIX}{close} is meant" if close else ""
            raise HostError(f"{variable} is no setting{meant}")
    return found


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise HostError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HostError(f"{path} is not TOML: {error}") from error
    unknown = content.keys() - {each.name for each in fields(GatewaySettings)}
    if unknown:
        raise HostError(f"{path}: {', '.join(sorted(unknown))} is no setting")
    return dict(content)


def _split(word: str) -> list[str]:
    return [part.strip() for part in word.split(",") if part.strip()]


_LEVELS = ("debug", "info", "warning", "error")


def _value(name: str, value: Any) -> Any:
    """``value`` as the setting ``name`` has it. Raises ``HostError``."""
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
        raise HostError(f"{flag(name)}: {twice} is there twice")
    return specs


_ENGINE = ("url", "kind", "key")


def _engine(value: Any) -> Spec:
    """``URL``, ``KIND=URL``, or a table of a file."""
    if isinstance(value, Mapping):
        for name, content in value.items():
            if name not in _ENGINE:
                raise _wrong("engines", name, f"one of {', '.join(_ENGINE)}")
            if not isinstance(content, str):
                raise HostError(f"{flag('engines')}: the {name} of an engine is a string")
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
        # The URL is said in logs, in /ready and in /metrics.
        raise HostError(
            f"{flag('engines')}: the URL of an engine has no user, query or fragment; "
            f"a key goes into {flag('engine_key')}, or the engine's key in the file"
        )
    if spec.kind and spec.kind not in KINDS:
        raise _wrong("engines", spec.kind, f"one of {', '.join(KINDS)}")
    return spec


_NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]+)=(?!=*$)(.*)", re.DOTALL)
_NO_KEY = re.compile(r"[A-Za-z0-9_.-]+=")


def _keys(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Names and keys: a table of a file, or a list of ``KEY`` and ``NAME=KEY``.

    A key in base64 may end in ``=``, and then its length is a multiple of four.
    """
    rows: list[tuple[str, str, Any]] = []
    """Names, what a message says for the key, and keys."""
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
        raise HostError(f"{flag(name)}: no key is given; without the setting everybody may ask")
    names: dict[str, str] = {}
    for label, called, given in rows:
        key = given.strip() if isinstance(given, str) else ""  # as a header has it
        if not key or not key.isascii() or not key.isprintable():
            raise HostError(f"{flag(name)}: {called} is no ASCII text")
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
    "max_tokens": _number(int, 1e9),
    "most_tokens": _number(int, 1e9),
    "reasoning_tokens": _number(int, 1e9),
    "timeout": _number(float, 1e9),
    "drain": _number(float, 1e6),
    "temperature": _number(float, 100.0),
    "top_p": _number(float, 1.0),
    "access_log": _one_of(FORMATS),
    "log_level": _one_of(_LEVELS),
    "reasoning_effort": _one_of(EFFORTS),
}


def _wrong(name: str, value: object, wanted: str) -> HostError:
    """``value`` is quoted where it cannot be a key, nor hold one."""
    secret = name in ("keys", "engine_key") or not isinstance(value, (str, int, float))
    said = f"this {type(value).__name__}" if secret else repr(value)
    return HostError(f"{flag(name)}: {said} is not {wanted}")
