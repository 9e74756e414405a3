"""For engines in this process: a loop, and the tokenizer of all models, read from its file once.

Every model of these tests has the same 28 MB of it, which take transformers and mlx-lm seconds,
many times what the rest of an engine's start takes. Each engine has an object of its own around it,
as it has without. Servers that are started by their own command read it (`tests/system/served`).
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
def _libraries_are_no_garbage() -> Iterator[None]:
    """vllm-mlx collects garbage whenever an engine ends: not among what torch brought along."""
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
    read: dict[Any, Any] = {}

    @functools.wraps(load)
    def remembered(path: Path, *args: Any, **keywords: Any) -> Any:
        contents = [(path / name).read_bytes() for name in FILES if (path / name).exists()]
        digests = [hashlib.blake2b(content).digest() for content in contents]
        key = repr((digests, args, keywords))
        if key not in read:
            read[key] = load(path, *args, **keywords)
        return own(read[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_load_tokenizer", remembered)
        yield


def own(wrapper: Any) -> Any:
    """Another wrapper, around another Python object, around the same table."""
    there = object.__new__(type(wrapper))
    there.__dict__.update(wrapper.__dict__)
    inner = copy.copy(wrapper._tokenizer)
    inner.init_kwargs = dict(inner.init_kwargs)
    there.__dict__["_tokenizer"] = inner
    there.__dict__["_eos_token_ids"] = set(wrapper._eos_token_ids)
    return there


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs a coroutine in the loop of the module, which its engines belong to."""
    loop = asyncio.new_event_loop()
    yield lambda test: loop.run_until_complete(asyncio.wait_for(test, 120))
    loop.close()
