"""What makes a piece on the disk valid: all of it is in the key that a look-up begins with.

- The weights: names, sizes and times of the files, and ``config.json``, which has shapes and types.
  Hashing gigabytes at each start would cost what is to be saved.
- The layout of a piece: which layers keep what, the version of tables and files (`index`).
- mlx-lm, whose caches it was cut from: there is no version of their format, so it is mlx-lm's own,
  up to the second number.
- The tenant.

Knows model directories. Refuses to know what is done with a key.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from vllm_mlx_harmony.host.kv.disk import Root
from vllm_mlx_harmony.host.kv.index import VERSION, key_of
from vllm_mlx_harmony.server.model_files import CONFIG, path_of

WEIGHTS = (".safetensors", ".npz", ".gguf")


def of_weights(model: str) -> bytes | None:
    """A digest of a model directory, or of a repository in the Hugging Face cache.

    ``None`` when it cannot be read.
    """
    try:
        config = path_of(model, CONFIG)
        parts = [config.read_bytes()]
        for path in sorted(config.parent.iterdir()):
            if path.suffix in WEIGHTS:
                state = path.stat()
                parts.append(f"{path.name} {state.st_size} {state.st_mtime_ns}".encode())
    except (OSError, ValueError):  # a path that is not there is no repository id either
        return None
    return key_of(*parts)


def of_layout(model: Any) -> bytes:
    """A digest of how pieces of a loaded model are laid out."""
    from vllm_mlx_harmony.host.kv.layers import kinds

    version = metadata.version("mlx-lm").split(".")[:2]
    return key_of(repr((VERSION, version, type(model).__name__, kinds(model))).encode())


def root(weights: bytes, layout: bytes, tenant: str) -> Root:
    """What sequences of ``tenant`` begin with on the disk."""
    return Root(key_of(weights, layout, tenant.encode()), weights)
