"""A server for tests of commands that start one: it is forked, unless its start is tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from vllm_mlx_harmony.cli import process

Serving = Callable[..., AbstractContextManager[process.Running]]


@pytest.fixture
def forked() -> Serving:
    """Like `process.serving`, without the start of Python: see `tests/support/preloaded.py`."""
    import server_process

    @contextmanager
    def serving(
        model: Path, home: Path, flags: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> Iterator[process.Running]:
        server = server_process.start(
            model, *server_process.FLAG, *flags, home=home, command=server_process.HARMONY, env=env
        )
        port = int(server.base_url.rpartition(":")[2])
        command = tuple(process.command(model, port, flags))
        try:
            yield process.Running(server.pid, port, command, server.log_path)
        finally:
            server.stop()

    return serving
