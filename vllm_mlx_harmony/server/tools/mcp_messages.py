"""Repairs messages of MCP servers before the package ``mcp`` validates them.

The package validates a message as a whole. A single malformed tool would cost all other tools of
the server. A lone surrogate, which a server in JavaScript produces by truncating a string, would
cost the whole message, and the call that it answers would wait until its timeout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from vllm_mlx_harmony.core import typescript
from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.turn import Tool
from vllm_mlx_harmony.protocols.validation import repaired


def accept_half_surrogates() -> None:
    """Makes the package read lone surrogates as U+FFFD, in messages over every transport.

    All transports parse messages with the same object of the package. Drop when pydantic's JSON
    parser accepts lone surrogates.
    """
    from mcp_types import jsonrpc_message_adapter

    if "validate_json" in vars(jsonrpc_message_adapter):
        return
    strict = jsonrpc_message_adapter.validate_json

    def lenient(data: str | bytes, /, **options: Any) -> object:
        try:
            return strict(data, **options)
        except ValueError:
            try:
                body = json.dumps(repaired(json.loads(data)))
            except (ValueError, RecursionError, RequestError):
                body = None
            if body is None:
                raise
            return strict(body, **options)

    vars(jsonrpc_message_adapter)["validate_json"] = lenient


def malformed_tools(result: object, version: str) -> Iterator[tuple[int, str]]:
    """The indices of malformed tools in ``result``, each with a description of the problem.

    ``result`` is that of any request in the protocol's ``version``; only that of a ``tools/list``
    has tools. Takes about a millisecond per tool.
    """
    fields = result if isinstance(result, dict) else {}
    tools = fields.get("tools")
    # The tools are validated one by one, with the short fields beside them.
    short = {key: value for key, value in fields.items() if not isinstance(value, (dict, list))}
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        try:
            _check({**short, "tools": [tool]}, version)
        except (ValueError, RequestError, RecursionError) as error:
            name = tool.get("name") if isinstance(tool, dict) else None
            which = quoted(name) if isinstance(name, str) and name else f"number {place + 1}"
            problem = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                problem = f"{'.'.join(map(str, first['loc'][2:])) or 'tool'}: {first['msg']}"
            yield place, f"{which} ({problem})"


def _check(result: dict[str, Any], version: str) -> None:
    """Raises ``ValueError`` or ``RequestError`` if the only tool of ``result`` is malformed."""
    from mcp_types import ListToolsResult, methods

    methods.validate_server_result("tools/list", version, result)
    (tool,) = ListToolsResult.model_validate(result, by_name=False).tools
    if not tool.name:
        raise ValueError("it has no name")
    typescript.parameters(Tool(tool.name, parameters=tool.input_schema), typescript.SizeBudget())
