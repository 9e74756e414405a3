"""Which distributions work together here, by their versions.

Reads package metadata and imports none of them.
"""

from __future__ import annotations

from importlib import metadata

from vllm_mlx_harmony import __version__

LIBRARIES = ("openai-harmony", "oss-harmony")
"""Distributions that provide `openai_harmony`; the second is a fork of the first."""


def versions() -> dict[str, str]:
    """Versions by distribution: ours, vllm-mlx's, and that of the Harmony library, if installed."""
    found = {"vllm-mlx-harmony": __version__}
    for name in ("vllm-mlx", *LIBRARIES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
