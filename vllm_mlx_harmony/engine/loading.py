"""Loads a model without its tokenizer: the front end encodes text, and every Harmony model has the
same vocabulary (`core.vocab`).

transformers' tokenizer of it takes a second to read, and 340 MB.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mlx_harmony.engine import resources
from vllm_mlx_harmony.engine.disk import identity
from vllm_mlx_harmony.engine.mlx_lm_compat import load_model
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.model_files import FILES

if TYPE_CHECKING:
    from mlx.nn import Module

CODE = "*.py"


def directory_of(source: str, *, trust_remote_code: bool = False) -> Path:
    """Where the files of a model are. Those of a repository that are not in the Hugging Face cache
    are downloaded."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    patterns = [*FILES, CODE] if trust_remote_code else [*FILES]
    return Path(snapshot_download(source, allow_patterns=patterns))


def load(
    source: str, directory: Path, *, trust_remote_code: bool = False
) -> tuple[Module, PrefixCache]:
    """The model and its prefix cache, for ``MlxEngine.load``: call it on the engine's thread."""
    read_model = partial(load_model, directory, trust_remote_code=trust_remote_code)
    weights_digest = None
    if resources.disk is None:
        module = read_model()
    else:
        module, weights_digest = identity.load_and_identify(source, read_model)
    return module, PrefixCache(module, resources.tree(), resources.disk, weights_digest)
