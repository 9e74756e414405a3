"""Draws the terminal of the demo, or of `verify`, as an SVG in `docs/pictures`.

The demo runs with the real server, and needs what it needs; of `verify`, the results are drawn:

    python3 ci/leg.py --keep demo && build/legs/demo/bin/python ci/make_picture.py
    vllm-mlx-harmony verify URL --json results.json; python ci/make_picture.py results.json
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from vllm_mlx_harmony.cli import demo

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
COLUMNS = 100
DATE = "2026-11-23"
"""The date in its prompt."""

FAILURES = 2
"""Failures of `verify` that are shown; the rest is in its verdict."""

FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
"""Those of the reader's system. rich's own is on a server, which a browser does not ask for a font
of an image."""


def main() -> int:
    """Writes a picture: of `verify` if there is a file of results, else of the demo."""
    console = Console(record=True, highlight=False, width=COLUMNS, color_system="truecolor")
    if len(sys.argv) > 1:
        verified(console, Path(sys.argv[1]))
        return written(console, "verify")
    os.environ["VLLM_MLX_HARMONY_DATE"] = DATE
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache"}
        return demo.run(console=console) or written(console, "demo")


def verified(console: Console, file: Path) -> None:
    """Prints what `verify` printed, with the first failures only."""
    from vllm_mlx_harmony.verify import report
    from vllm_mlx_harmony.verify.checks import Outcome
    from vllm_mlx_harmony.verify.suite import CHECKS

    outcomes = [Outcome(**check) for check in json.loads(file.read_text("utf-8"))["checks"]]
    console.print("[bold]$ vllm-mlx-harmony verify http://127.0.0.1:8000[/]\n")
    failures = [outcome for outcome in outcomes if outcome.state == "failed"]
    for failure in failures[:FAILURES]:
        console.print(report.failure(failure))
    if len(failures) > FAILURES:
        console.print(f"[dim]… {len(failures) - FAILURES} more[/]\n")
    made = {outcome.name for outcome in outcomes}
    console.print(report.verdict([check for check in CHECKS if check.name in made], outcomes))


def written(console: Console, name: str) -> int:
    """Writes what was printed."""
    svg = console.export_svg(title=f"vllm-mlx-harmony {name}", unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", FONTS)
    picture = PICTURES / f"{name}.svg"
    picture.write_text(svg, "utf-8")
    print(f"{picture} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
