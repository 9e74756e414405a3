"""What MCP servers send, before the package ``mcp`` checks it.

The package checks a message as a whole. One malformed tool would take away the server with all its
other tools, and half a surrogate pair, which a server written in JavaScript produces when it
shortens a text, the whole message, whose call would then wait until its time is over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from vllm_mlx_harmony.core import schema
from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.turn import Tool
from vllm_mlx_harmony.protocols.validation import mended


def accept_half_surrogates() -> None:
    """Makes the package read half a surrogate pair as U+FFFD, in messages over every transport.

    All transports parse with one object of the package, and only there is the text of a message at
    hand. Drop when pydantic's JSON parser accepts lone surrogates.
    """
    from mcp_types import jsonrpc_message_adapter

    if "validate_json" not in vars(jsonrpc_message_adapter):
        lenient = partial(_validate_json, jsonrpc_message_adapter.validate_json)
        vars(jsonrpc_message_adapter)["validate_json"] = lenient


def _validate_json(strict: Any, data: str | bytes, /, **options: Any) -> Any:
    try:
        return strict(data, **options)
    except ValueError:
        try:
            whole = json.dumps(mended(json.loads(data)))
        except (ValueError, RecursionError, RequestError):
            whole = None
        if whole is None:
            raise
        return strict(whole, **options)


def malformed_tools(result: object, version: str) -> Iterator[tuple[int, str]]:
    """The places of malformed tools in ``result``, and what is wrong with each.

    ``result`` is that of a request in the protocol's ``version``; only a ``tools/list`` has tools.
    Takes about a millisecond for each.
    """
    fields = result if isinstance(result, dict) else {}
    tools = fields.get("tools")
    # What is long beside the tools is not checked again with each of them.
    short = {key: value for key, value in fields.items() if not isinstance(value, (dict, list))}
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        try:
            _check({**short, "tools": [tool]}, version)
        except (ValueError, RequestError, RecursionError) as error:
            name = tool.get("name") if isinstance(tool, dict) else None
            which = quoted(name) if isinstance(name, str) and name else f"number {place + 1}"
            yield place, f"{which} ({_summary(error)})"


def _check(result: dict[str, Any], version: str) -> None:
    """Raises ``ValueError`` or ``RequestError`` when the only tool of ``result`` is malformed."""
    from mcp_types import ListToolsResult, methods

    methods.validate_server_result("tools/list", version, result)
    (tool,) = ListToolsResult.model_validate(result, by_name=False).tools
    if not tool.name:
        raise ValueError("it has no name")
    schema.parameters(Tool(tool.name, parameters=tool.input_schema), schema.SizeBudget())


def _summary(error: Exception) -> str:
    """One line that says where a tool is malformed."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    first = errors()[0]
    return f"{'.'.join(map(str, first['loc'][2:])) or 'tool'}: {first['msg']}"
