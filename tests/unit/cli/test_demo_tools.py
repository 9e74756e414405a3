"""``demo --tools`` with the real host and a real MCP server: neither is left running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.cli import demo_tools
from vllm_mlx_harmony.cli.process import Running


@pytest.mark.served
def test_demo_with_tools_ends_its_servers(
    forked: Callable[..., AbstractContextManager[Running]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import psutil  # vllm-mlx requires it

    started: list[psutil.Process] = []

    @contextmanager
    def serving(*arguments: Any) -> Iterator[Running]:
        with forked(*arguments) as server:
            yield server
            started.extend(psutil.Process(server.pid).children(recursive=True))

    monkeypatch.setattr(demo_tools, "serving", serving)
    assert main(["demo", "--tools"]) == 0
    printed = capsys.readouterr().out
    assert 'calculator.multiply {"a":119,"b":86400} -> 10281600' in printed
    assert demo_tools.ANSWER in printed
    assert started, "the MCP server"
    assert not psutil.wait_procs(started, timeout=60)[1]
