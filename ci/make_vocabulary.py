"""Makes the compressed vocabulary that the wheel ships, from the official `o200k_base.tiktoken`.

Knows the official file's line format and the shipped one; refuses any input whose SHA-256 is not
the official one. Run: `python ci/make_vocabulary.py path/to/o200k_base.tiktoken`
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import lzma
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vllm_mlx_harmony.core import vocab  # noqa: E402 - the checkout's own package, not an installed one

# One byte of length, then the bytes: there is no alignment to exploit (lp, pb 0), and four bits of
# the byte before (lc 4) tell the most about the next.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]


def compress(official: bytes) -> bytes:
    """The shipped form of the official file.

    Raises ValueError when a line is not `base64 rank`, or not in order.
    """
    tokens = []
    for expected, line in enumerate(official.splitlines()):
        token, rank = line.split(b" ")
        if int(rank) != expected:
            raise ValueError(f"rank {int(rank)} on line {expected}")
        tokens.append(base64.b64decode(token, validate=True))
    raw = b"".join(bytes([len(token)]) + token for token in tokens)
    return lzma.compress(raw, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=FILTERS)


def main(argv: list[str] | None = None) -> int:
    """Writes the data file; 1 when the input is not the official file or does not come back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("official", type=Path)
    source = parser.parse_args(argv).official.read_bytes()
    if hashlib.sha256(source).hexdigest() != vocab.SHA256:
        print("not the official o200k_base.tiktoken: its SHA-256 differs", file=sys.stderr)
        return 1
    packed = compress(source)
    if vocab.official_file(packed) != source:
        print("the compressed vocabulary does not give the official file back", file=sys.stderr)
        return 1
    target = ROOT / "vllm_mlx_harmony" / "data" / vocab.DATA_NAME
    target.write_bytes(packed)
    print(f"{target.relative_to(ROOT)}: {len(packed):,} bytes for {len(source):,}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
