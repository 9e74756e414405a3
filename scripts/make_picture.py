"""Draws the terminal of `vllm-mlx-harmony demo` as an SVG: `docs/pictures/demo.svg`.

It runs the demo with the real server, and needs what the demo needs:

    python3 ci/leg.py --keep demo && build/demo/bin/python scripts/make_picture.py
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from vllm_mlx_harmony.cli import demo

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "demo.svg"
COLUMNS = 100
DATE = "2026-11-23"
"""The date in its prompt."""

FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
"""Those of the reader's system. rich's own is on a server, which a browser does not ask for a font
of an image."""


def main() -> int:
    """Writes the picture if the demo succeeds."""
    os.environ["VLLM_MLX_HARMONY_DATE"] = DATE
    console = Console(record=True, highlight=False, width=COLUMNS, color_system="truecolor")
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache"}
        if code := demo.run(console=console):
            return code
    svg = console.export_svg(title="vllm-mlx-harmony demo", unique_id="demo")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", FONTS)
    PICTURE.write_text(svg, "utf-8")
    print(f"{PICTURE} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
