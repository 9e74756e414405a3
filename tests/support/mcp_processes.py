"""Tool servers in processes of their own, and toolboxes that use them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from loops import run
from waiting import wait_for_port

from vllm_mlx_harmony.core.deltas import ToolFinished
from vllm_mlx_harmony.core.turn import ServerCall
from vllm_mlx_harmony.server.settings import ServerSettings, ToolsMode
from vllm_mlx_harmony.server.tools.config import ToolsConfig
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

SERVERS = Path(__file__).with_name("mcp_servers.py")
RAW = SERVERS.with_name("malformed_mcp_server.py")


def stdio(kind: str, **more: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(SERVERS), kind], **more}


def toolbox(servers: dict[str, dict[str, Any]], **limits: Any) -> Toolbox:
    config = ToolsConfig.model_validate({"servers": servers, "default_timeout": 600, **limits})
    return Toolbox.of(config, ServerSettings(tools=ToolsMode.ON))


def within(box: Toolbox, body: Callable[[], Awaitable[Any]], seconds: float = 60.0) -> Any:
    """The result of ``body`` while ``box`` runs. No task and no process may remain."""

    children = partial(psutil.Process().children, recursive=True)

    async def start_and_stop() -> Any:
        before = len(asyncio.all_tasks())
        await box.start()
        try:
            return await body()
        finally:
            await box.stop()
            assert len(asyncio.all_tasks()) == before

    before = set(children())
    result = run(start_and_stop(), seconds)
    assert set(children()) <= before
    return result


async def call_tool(
    box: Toolbox, name: str, arguments: str, *, seconds: float = 600.0, room: int = 10_000
) -> ToolFinished:
    return await box.execute(ServerCall("call_1", name, arguments), box.namespaces, seconds, room)


@contextmanager
def mcp_process(
    port: int, transport: str, kind: str = "weather"
) -> Iterator[subprocess.Popen[bytes]]:
    more = ["--sse"] if transport == "sse" else []
    command = [str(RAW)] if kind == "raw" else [str(SERVERS), kind]
    server = subprocess.Popen(
        [sys.executable, *command, str(port), *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port)
        yield server
    finally:
        server.kill()
        server.wait()
