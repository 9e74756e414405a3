"""The operator's configuration: tool servers, and the limits of calls.

The file has the format of vllm-mlx's ``--mcp-config`` (``servers``) or the one that MCP clients
share (``mcpServers``). It is JSON, or YAML if PyYAML is installed::

    {"servers": {"weather": {"command": "uvx", "args": ["mcp-server-weather"]},
                 "python": {"url": "http://127.0.0.1:8931/mcp", "timeout": 60}},
     "max_tool_calls": 10, "default_timeout": 30}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.server.settings import variable

TOOLS_VARIABLE = variable("tools")

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerConfig(_Read):
    """One MCP server: a ``command`` to start, or a ``url`` to connect to.

    ``tools`` restricts which of its tools are used. ``timeout`` is for one call, in seconds.
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
    def _transport(cls, raw: object) -> object:
        """Accepts ``type`` for ``transport`` and other names of HTTP, and infers a missing one."""
        if not isinstance(raw, Mapping):
            return raw
        fields = {key: value for key, value in raw.items() if key != "type"}
        named = raw.get("transport", raw.get("type"))
        if named is None:
            named = "streamable-http" if raw.get("url") else "stdio"
        known = {"http": "streamable-http", "streamable_http": "streamable-http"}
        return {**fields, "transport": known.get(named, named) if isinstance(named, str) else named}

    @model_validator(mode="after")
    def _reachable(self) -> ServerConfig:
        if self.transport == "stdio" and not self.command:
            raise ValueError("a stdio server requires `command`")
        if self.transport != "stdio" and not re.match(r"https?://[^/]", self.url):
            raise ValueError("a server over HTTP needs a url that begins with http:// or https://")
        return self


class ToolsConfig(_Read):
    """All servers by label, and the limits of calls.

    ``max_output_tokens`` and ``max_output_bytes`` limit the result of one call, ``max_seconds`` the
    time of a request from its first call on, and ``max_concurrent_calls`` the concurrent calls of
    all requests.
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
    def _servers(cls, raw: object) -> object:
        if isinstance(raw, Mapping) and "servers" not in raw and "mcpServers" in raw:
            return {**raw, "servers": raw["mcpServers"]}
        return raw


def read(path: str | Path) -> ToolsConfig:
    """Reads the configuration file. Raises ``HostError`` if it is invalid."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix not in (".yaml", ".yml"):
            return ToolsConfig.model_validate(json.loads(text))
        import yaml

        try:
            return ToolsConfig.model_validate(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise HostError(f"{file}: {error}") from error
    except ImportError as error:
        raise HostError(f"{file}: PyYAML is not installed; use JSON instead") from error
    except OSError as error:
        raise HostError(f"{file}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HostError(f"{file}: {where}: {first['msg']}") from error
    except ValueError as error:
        raise HostError(f"{file}: {error}") from error
