"""All tools that this server can run, and one call of one of them, from its text to its answer.

A call always has an answer for the model to read. Whatever goes wrong - a tool that is unknown,
arguments that are no JSON, a server that is slow, refuses, dies or says nothing - is told to the
model in the words of the answer, and it goes on.

What a tool answers is data: it becomes ordinary text in a prompt (semantics A7), cut to the bytes
and tokens the operator allows. Arguments and answers are logged at ``debug`` and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import ToolFailure
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.names import carryable
from vllm_mlx_harmony.core.text_limits import is_parsed_soon
from vllm_mlx_harmony.core.turn import PYTHON, Namespace, ServerCall, Tool
from vllm_mlx_harmony.protocols.validation import mended
from vllm_mlx_harmony.server.body import in_thread
from vllm_mlx_harmony.server.tools.client_servers import ClientServers
from vllm_mlx_harmony.server.tools.config import ToolsConfig, Use
from vllm_mlx_harmony.server.tools.mcp_server import McpServer, check_package
from vllm_mlx_harmony.server.tools.tool_server import GROUP, ToolError, ToolServer

logger = logging.getLogger(__name__)

BROWSER_TOOLS = frozenset({"search", "open", "find"})
"""What a server has to have for the namespace that gpt-oss was trained with."""

CODE = "code"
"""What the parameter is called that takes the code, where a tool has several."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What the model gets to read of a call, and why it failed, if it did."""

    text: str
    failure: ToolFailure | None = None


@dataclass(slots=True)
class Counts:
    """Calls of one tool since the start: how many, how many failed, and their seconds."""

    calls: int = 0
    errors: int = 0
    seconds: float = 0.0


class Toolbox:
    """Some tool servers, started and stopped together. ``use``: for which requests they are.

    ``clients`` has those that requests name by themselves, which live as long as their requests.
    """

    def __init__(
        self,
        servers: Sequence[ToolServer],
        config: ToolsConfig | None = None,
        use: Use = Use.ON,
        clients: ClientServers | None = None,
    ) -> None:
        self.servers = tuple(servers)
        self.config = config or ToolsConfig()
        self.use = use
        self.clients = clients or ClientServers((), self.config.default_timeout)
        self.counts: dict[tuple[str, str], Counts] = {}
        """By label and tool."""
        self._free = asyncio.Semaphore(self.config.max_concurrent_calls)
        self._names = _namespace_names([each.label for each in self.servers])
        self._shown: dict[str, tuple[tuple[Tool, ...], Namespace]] = {}

    @classmethod
    def of(cls, config: ToolsConfig, use: Use) -> Toolbox:
        """The MCP servers of ``config``, and whatever other packages bring.

        Raises ``HostError`` where the package ``mcp`` is missing or too old, and for a pattern of
        URLs in the environment that is none.
        """
        clients = ClientServers.of_environment(use, config.default_timeout)
        if config.servers:
            check_package()
        servers: list[ToolServer] = [
            McpServer(label, each, config.default_timeout)
            for label, each in config.servers.items()
            if each.enabled
        ]
        servers += [entry.load()() for entry in entry_points(group=GROUP)]
        return cls(servers, config, use, clients)

    async def start(self) -> None:
        """Starts all servers at once. What goes wrong is said in the log, and tried again."""
        await asyncio.gather(*(each.start() for each in self.servers))

    async def stop(self) -> None:
        """Ends all of them."""
        await asyncio.gather(*(each.stop() for each in self.servers), return_exceptions=True)

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """The tools as they are now: a turn that begins with them ends with them."""
        return tuple(map(self._namespace, self.servers))

    @property
    def lines(self) -> list[str]:
        """What is there, one line for each server, and one for what requests may name."""
        lines = [
            f"{each.label}: {', '.join(tool.origin[-1] for tool in each.tools) or each.problem}"
            for each in self.namespaces
        ]
        if self.clients.allowed:
            lines.append(f"requests may name {', '.join(self.clients.allowed)}")
        return lines

    def given(self, servers: Sequence[ToolServer]) -> tuple[Namespace, ...]:
        """The tools of ``servers`` that a request has named itself."""
        taken = {*_TAKEN, *self._names.values()}
        return tuple(
            replace(
                _shown(carryable(each.label.replace(".", "_"), taken), each, each.tools), given=True
            )
            for each in servers
        )

    def _namespace(self, server: ToolServer) -> Namespace:
        tools = server.tools
        if not tools:
            problem = server.problem or "it has no tools"
            return Namespace(self._names[server.label], (), label=server.label, problem=problem)
        known = self._shown.get(server.label)
        if known is None or known[0] is not tools:
            known = tools, _shown(self._names[server.label], server, tools)
            self._shown[server.label] = known
        return known[1]

    # One call

    async def run(
        self,
        call: ServerCall,
        namespaces: Sequence[Namespace],
        seconds: float,
        room: int,
        given: Sequence[ToolServer] = (),
    ) -> Answered:
        """The answer to ``call`` of a turn that has ``namespaces``, some of them ``given``.

        It comes within ``seconds``, and takes no more than ``room`` tokens of a prompt.
        """
        began = time.monotonic()
        found = _tool_of(call.name, namespaces)
        if isinstance(found, str):
            return self._failed(call, found)
        namespace, tool = found
        label, name = tool.origin
        server = next(
            each for each in (given if namespace.given else self.servers) if each.label == label
        )
        counted = GIVEN if namespace.given else (label, name)
        counts = self.counts.setdefault(counted, Counts())
        counts.calls += 1
        answered: Answered | None = None
        try:
            arguments = _arguments(call.arguments, namespace, tool)
            if isinstance(arguments, str):
                answered = self._failed(call, arguments)
                return answered
            logger.debug("%s: %s %s", call.id, call.name, call.arguments)
            answered = await self._answered(server, name, arguments, seconds)
            answered = await self._cut(answered, room)
            logger.debug("%s: %s", call.id, answered.text)
            return answered
        finally:
            failed = answered is None or answered.failure is not None
            counts.errors += failed
            took = time.monotonic() - began
            counts.seconds += took
            outcome = "cancelled" if answered is None else "failed" if failed else "answered"
            logger.info("%s: %s %s in %.2f s", call.id, call.name, outcome, took)

    async def _answered(
        self, server: ToolServer, name: str, arguments: Mapping[str, Any], seconds: float
    ) -> Answered:
        limit = min(server.timeout, seconds)

        async def running() -> Answered:
            async with self._free:
                answer = await server.call(name, arguments)
            text = str(mended(answer.text)) if answer.text.strip() else NOTHING
            failure = ToolFailure(text, by_tool=True) if answer.failed else None
            return Answered(text, failure)

        try:
            return await asyncio.wait_for(running(), limit)
        except asyncio.TimeoutError:
            text = f"the tool did not answer within {limit:.0f} seconds"
        except ToolError as error:
            text = str(error) or "the tool failed"
        except Exception:
            logger.exception("a tool server failed")
            text = "the tool failed"
        return Answered(f"Error: {text}", ToolFailure(text))

    async def _cut(self, answered: Answered, room: int) -> Answered:
        """No more of the answer than there is room for, in bytes and in tokens."""
        tokens = max(0, min(self.config.max_output_tokens, room))
        text = answered.text
        if len(text) <= min(tokens, self.config.max_output_bytes // 4):  # each at least a byte
            return answered
        kept = await in_thread(_beginning, text, self.config.max_output_bytes, tokens)
        if len(kept) == len(text):
            return answered
        note = f"[… {len(text) - len(kept)} more characters were cut off]"
        text = f"{kept}\n{note}" if kept else note
        failure = answered.failure
        return Answered(text, None if failure is None else replace(failure, text=text))

    def _failed(self, call: ServerCall, text: str) -> Answered:
        logger.debug("%s: %s", call.id, text)
        return Answered(f"Error: {text}", ToolFailure(text))


GIVEN = ("(of a request)", "")
"""What calls of servers that requests name are counted as: their names are without end."""

NOTHING = "[the tool returned nothing]"
"""What the model reads of an answer that says nothing."""


def _beginning(text: str, most_bytes: int, most_tokens: int) -> str:
    kept = text.encode("utf-8", "replace")[:most_bytes].decode("utf-8", "ignore")
    ids = vocab.encode(kept[: most_tokens * _LONGEST_TOKEN])
    if len(ids) <= most_tokens:
        return kept[: most_tokens * _LONGEST_TOKEN]
    return b"".join(map(vocab.token_bytes, ids[:most_tokens])).decode("utf-8", "ignore")


_LONGEST_TOKEN = 128
"""Characters that no token of the vocabulary is longer than."""


def _tool_of(name: str, namespaces: Sequence[Namespace]) -> tuple[Namespace, Tool] | str:
    """The tool that a call to ``name`` is for; else what the model is told."""
    known: list[str] = []
    for namespace in namespaces:
        tools = namespace.by_recipient
        if name in tools:
            return namespace, tools[name]
        known += tools
    return f"there is no tool {name}; there are: {', '.join(known) or 'none'}"


def _arguments(text: str, namespace: Namespace, tool: Tool) -> Mapping[str, Any] | str:
    """The arguments of a call; else what the model is told. Those of ``python`` are code."""
    if namespace.name == PYTHON:
        return {code_parameter(tool) or CODE: text}
    if not is_parsed_soon(text):
        return "the arguments are too long"
    try:
        arguments = mended(json.loads(text or "{}"))
    except (ValueError, RecursionError, RequestError) as error:
        return f"the arguments are not valid JSON ({error}): call the tool again"
    if not isinstance(arguments, dict):
        return "the arguments are no JSON object: call the tool again"
    return arguments


# --- How tools are shown to the model.


def code_parameter(tool: Tool) -> str | None:
    """The parameter that takes the code, of a tool that runs code; ``None`` when it has none."""
    schema = tool.parameters or {}
    properties = schema.get("properties", {})
    texts = [name for name, each in properties.items() if each.get("type") == "string"]
    if CODE in texts:
        return CODE
    needed = [name for name in texts if name in schema.get("required", ())]
    return needed[0] if len(needed) == 1 else None


def _shown(name: str, server: ToolServer, tools: Sequence[Tool]) -> Namespace:
    """The namespace; a built-in one only of a server that has its tools."""
    if name == PYTHON:
        code = [tool for tool in tools if tool.name == PYTHON] or (tools if len(tools) == 1 else [])
        if code and code_parameter(code[0]):
            runs = replace(code[0], origin=(server.label, code[0].name))
            return Namespace(name, (runs,), server.description, server.label)
    elif name == "browser":
        chosen = tuple(
            replace(tool, origin=(server.label, tool.name))
            for tool in tools
            if tool.name in BROWSER_TOOLS
        )
        if len(chosen) == len(BROWSER_TOOLS):
            return Namespace(name, chosen, server.description, server.label)
    if name in (PYTHON, "browser"):
        name = f"{name}_tools"
        logger.warning(
            "tool server %s is shown to the model as %s: it does not have the tools that gpt-oss "
            "knows under its name",
            server.label,
            name,
        )
    taken: set[str] = set()
    named = tuple(
        replace(tool, name=carryable(tool.name, taken), origin=(server.label, tool.name))
        for tool in tools
    )
    return Namespace(name, named, server.description, server.label)


def _namespace_names(labels: Sequence[str]) -> dict[str, str]:
    """What the model is shown each label as: names without dots, none of them taken."""
    repeated = [label for label, times in Counter(labels).items() if times > 1]
    if repeated:
        raise ValueError(f"two tool servers are named {repeated[0]!r}")
    taken = set(_TAKEN)
    return {label: carryable(label.replace(".", "_"), taken) for label in labels}


_TAKEN = frozenset(
    {"functions", "assistant", "user", "system", "developer", "tool", "all", "multi_tool_use"}
)
