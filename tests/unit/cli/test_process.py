"""Free ports for servers."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.cli.process import ADDRESS, free_port


def test_free_port_is_below_those_of_outgoing_connections() -> None:
    with socket.socket() as picked, socket.socket() as free:
        picked.bind((ADDRESS, 0))
        port = free_port()
        free.bind((ADDRESS, port))
        assert port < 32_000 < picked.getsockname()[1]


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(UsageError, match="no free port"):
        free_port()
