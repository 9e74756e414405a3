"""What the operator configured: which tool servers there are, and the limits of their calls.

The file has the shape of vllm-mlx's ``--mcp-config`` (``servers``), or that which MCP clients have
in common (``mcpServers``), in JSON, or YAML where PyYAML is installed::

    {"servers": {"weather": {"command": "uvx", "args": ["mcp-server-weather"]},
                 "python": {"url": "http://127.0.0.1:8931/mcp", "timeout": 60}},
     "max_tool_calls": 10, "default_timeout": 30}

Knows names and ranges. Refuses to know how a server is spoken to.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_mlx_harmony.core.errors import HostError

VARIABLE = "VLLM_MLX_HARMONY_TOOLS"
"""Environment variable: ``off``, ``on`` (for requests that ask) or ``all`` (for every request)."""


class Use(str, Enum):
    """For which requests the server runs tools; the value is the setting's word."""

    OFF = "off"
    ON = "on"
    ALL = "all"


def use() -> Use:
    """What the environment says. Raises ``HostError`` for a word that is none."""
    word = os.environ.get(VARIABLE, "").strip().lower() or Use.OFF.value
    if word not in {each.value for each in Use}:
        known = ", ".join(each.value for each in Use)
        raise HostError(f"{VARIABLE}: {word!r} is none of {known}")
    return Use(word)


Seconds = Annotated[float, Field(gt=0, le=86_400)]


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerConfig(_Read):
    """One MCP server: a ``command`` that is started, or a ``url`` that is connected to.

    ``tools``: the only ones of its tools that are used. ``timeout``: seconds for one call.
    """

    transport: Literal["stdio", "streamable-http", "sse"]
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str = ""
    headers: dict[str, str] = {}
    enabled: bool = True
    timeout: Seconds | None = None
    description: str = ""
    tools: tuple[str, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _transport(cls, given: Any) -> Any:
        """``type`` for ``transport``, other spellings of HTTP, and none where it is plain."""
        if not isinstance(given, Mapping):
            return given
        fields = {key: value for key, value in given.items() if key != "type"}
        named = given.get("transport", given.get("type"))
        if named is None:
            named = "streamable-http" if given.get("url") else "stdio"
        known = {"http": "streamable-http", "streamable_http": "streamable-http"}
        return {**fields, "transport": known.get(named, named) if isinstance(named, str) else named}

    @model_validator(mode="after")
    def _reachable(self) -> ServerConfig:
        if self.transport == "stdio" and not self.command:
            raise ValueError("a server over stdio needs a command")
        if self.transport != "stdio" and not re.match(r"https?://[^/]", self.url):
            raise ValueError("a server over HTTP needs a url that begins with http:// or https://")
        return self


class ToolsConfig(_Read):
    """All servers by their labels, and the limits of a request's calls.

    ``max_output_tokens`` and ``max_output_bytes`` bound what one call answers, ``max_seconds`` the
    time of a request from its first call on, ``max_concurrent_calls`` the calls of all requests
    that run at the same time.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")  # the host has fields of its own

    servers: dict[str, ServerConfig] = {}
    max_tool_calls: int = Field(default=10, ge=1)
    default_timeout: Seconds = 30.0
    max_output_tokens: int = Field(default=8192, ge=1)
    max_output_bytes: int = Field(default=262_144, ge=1)
    max_seconds: Seconds = 600.0
    max_concurrent_calls: int = Field(default=16, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _servers(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "servers" not in given and "mcpServers" in given:
            return {**given, "servers": given["mcpServers"]}
        return given


def read(path: str | Path) -> ToolsConfig:
    """The configuration in the file at ``path``. Raises ``HostError`` that says what is wrong."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        document = _yaml(text) if file.suffix in (".yaml", ".yml") else json.loads(text)
        return ToolsConfig.model_validate(document)
    except OSError as error:
        raise HostError(f"{file}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HostError(f"{file}: {where}: {first['msg']}") from error
    except ValueError as error:
        raise HostError(f"{file}: {error}") from error


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ValueError("PyYAML is not installed: write it as JSON") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
