"""Models, the pieces they compute, and disk caches on one directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from engine_models import IDS, PLACES, PLENTY, load_module
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.gpt_oss import GptOssMoeModel

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.engine.disk.cache import DiskCache
from vllm_mlx_harmony.engine.pieces import Piece, cut, windows


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gpt-oss, 16 wide."""
    return standin.write_tiny(tmp_path_factory.mktemp("tiny"), width=16)


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs a coroutine on the module's event loop."""
    loop = asyncio.new_event_loop()
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, 120))
    loop.close()


@pytest.fixture(scope="session")
def model(tiny: Path) -> Any:
    return load_module(tiny)


@pytest.fixture(scope="session")
def pieces(model: Any) -> list[Piece]:
    """Computes the pieces of ``IDS`` that end at ``PLACES``."""
    cache, pieces, start = model.make_cache(), [], 0
    for place in PLACES:
        model(mx.array([IDS[start:place]]), cache=cache)
        pieces.append(cut(cache, start, place))
        start = place
    return pieces


class Windows(GptOssMoeModel):  # type: ignore[misc, unused-ignore]
    """mlx-lm's gpt-oss with the windows of ``LAYOUT``; 0 is full attention."""

    LAYOUT = (128, 0, 320, 0)

    def __call__(self, inputs: Any, cache: Any = None, input_embeddings: Any = None) -> Any:
        x = self.embed_tokens(inputs)
        for layer, layer_cache, window in zip(self.layers, cache, self.LAYOUT, strict=True):
            x = layer(
                x, create_attention_mask(x, layer_cache, window_size=window or None), layer_cache
            )
        return self.norm(x)

    def make_cache(self) -> list[Any]:
        return [RotatingKVCache(window) if window else KVCache() for window in self.LAYOUT]


@pytest.fixture(scope="module", params=["gpt-oss", "several windows"])
def load_random(request: pytest.FixtureRequest, tiny: Path) -> Callable[[], Any]:
    """Loads a real architecture with random weights, on the calling thread."""

    def load() -> Any:
        model = load_module(tiny)
        if request.param == "several windows":
            model.model.__class__ = Windows
            model.make_cache = model.model.make_cache
            assert windows(model) == Windows.LAYOUT
        return model

    return load


@pytest.fixture(scope="module")
def random_model(load_random: Callable[[], Any]) -> Any:
    return load_random()


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Callable[..., DiskCache]]:
    """Opens disk caches on one directory, as several processes would."""
    opened: list[DiskCache] = []

    def open_cache(budget: int = PLENTY, **more: Any) -> DiskCache:
        opened.append(DiskCache(tmp_path / "ssd", budget, **more))
        return opened[-1]

    yield open_cache
    for cache in opened:
        cache.close(1.0)


@pytest.fixture
def disk(open_disk: Callable[..., DiskCache]) -> DiskCache:
    return open_disk()
