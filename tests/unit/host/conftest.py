"""Fixtures for engines in this process: an event loop, and a tokenizer that is read only once.

All models of these tests have the same tokenizer of 28 MB. Transformers and mlx-lm take seconds to
read it, many times as long as the rest of an engine's start. Each engine still gets a tokenizer
object of its own. Servers that are started by their own command read it (`tests/system/served`).
"""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import hashlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="session", autouse=True)
def _frozen_libraries() -> Iterator[None]:
    """vllm-mlx collects garbage whenever an engine ends; frozen objects of torch are left out."""
    pytest.importorskip("vllm_mlx.server")
    pytest.importorskip("mlx_vlm")  # imported by the first engine
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _tokenizer_read_once() -> Iterator[None]:
    utils = pytest.importorskip("mlx_lm.utils")
    load = utils._load_tokenizer
    loaded: dict[Any, Any] = {}

    @functools.wraps(load)
    def load_once(path: Path, *args: Any, **keywords: Any) -> Any:
        contents = [(path / name).read_bytes() for name in FILES if (path / name).exists()]
        digests = [hashlib.blake2b(content).digest() for content in contents]
        key = repr((digests, args, keywords))
        if key not in loaded:
            loaded[key] = load(path, *args, **keywords)
        return copy_of(loaded[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_load_tokenizer", load_once)
        yield


def copy_of(wrapper: Any) -> Any:
    """Another wrapper around another Python object, which share the same table."""
    copied = object.__new__(type(wrapper))
    copied.__dict__.update(wrapper.__dict__)
    inner = copy.copy(wrapper._tokenizer)
    inner.init_kwargs = dict(inner.init_kwargs)
    copied.__dict__["_tokenizer"] = inner
    copied.__dict__["_eos_token_ids"] = set(wrapper._eos_token_ids)
    return copied


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs a coroutine in the event loop of the module, to which its engines belong."""
    loop = asyncio.new_event_loop()
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, 120))
    loop.close()
