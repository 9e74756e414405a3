"""Models for the engine: the scripted stand-in and the tiny random gpt-oss, written once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx_harmony import standin


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gpt-oss, 16 wide."""
    return standin.write_tiny(tmp_path_factory.mktemp("tiny"), width=16)


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs a coroutine in the loop of the module."""
    loop = asyncio.new_event_loop()
    yield lambda test: loop.run_until_complete(asyncio.wait_for(test, 120))
    loop.close()
