"""What the commands share that start the real server with a stand-in for the model."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.cli import light
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.standin import Script


def require_host(what: str) -> None:
    """Raises ``UsageError`` if the server that ``what`` runs cannot be imported."""
    linux = sys.platform == "linux"
    mlx = "pip install 'vllm-mlx-harmony-server[cpu]'" if linux else "pip install mlx"
    host = () if light.replaces_host() else (("vllm_mlx", light.INSTALL),)
    for module, fix in (*host, ("mlx.core", mlx)):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(
                f"{what} runs the real server, but {module} cannot be imported ({error}): {fix}"
            ) from error


@contextmanager
def home_directory() -> Iterator[Path]:
    prefix = "vllm-mlx-harmony-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as home:
        yield Path(home)


def written(name: str, scripts: Sequence[Script], home: Path) -> Path:
    """Writes the stand-in to the user's cache, or to ``home`` if that is not writable."""
    try:
        return standin.write(vocab.cache_dir() / name, scripts)
    except OSError:
        return standin.write(home / name, scripts)
