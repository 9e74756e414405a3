"""The gpt-oss models by their short names, as `launch`, `serve` and `doctor` know them."""

from __future__ import annotations

from dataclasses import dataclass

GIGABYTE = 10**9


@dataclass(frozen=True, slots=True)
class Weights:
    """A model on Hugging Face: ``source`` is its repository, ``size`` its bytes.

    ``needed`` is the memory in bytes that it needs with a few long conversations.
    """

    name: str
    source: str
    size: int
    needed: int

    @property
    def gigabytes(self) -> str:
        return f"{self.needed / GIGABYTE:.0f}"


MODELS = {
    "120b": Weights(
        "gpt-oss-120b", "mlx-community/gpt-oss-120b-MXFP4-Q8", 63 * GIGABYTE, 73 * GIGABYTE
    ),
    "20b": Weights(
        "gpt-oss-20b", "mlx-community/gpt-oss-20b-MXFP4-Q8", 12 * GIGABYTE, 15 * GIGABYTE
    ),
}
"""The largest first. The sizes are the parameters at 4.25 and 8.5 bits."""
