"""Ports of servers that are started."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.cli.process import ADDRESS, free_port


def test_a_free_port_is_none_of_an_outgoing_connection() -> None:
    with socket.socket() as picked, socket.socket() as free:
        picked.bind((ADDRESS, 0))
        port = free_port()
        free.bind((ADDRESS, port))
        assert port < 32_000 < picked.getsockname()[1]


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(UsageError, match="no free port"):
        free_port()
