"""Results of measurements: a file without anything personal, a table, a page with plots."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from rich.table import Table

from vllm_mlx_harmony.bench.plan import CURVES, Point
from vllm_mlx_harmony.verify import page
from vllm_mlx_harmony.verify.report import grid, versions

Results: TypeAlias = dict[str, Any]

KIND = "vllm-mlx-harmony bench"
COLOURS = ("#0969da", "#bf3989", "#1a7f37", "#9a6700")


def document(model: str, server: Mapping[str, str], points: Sequence[Point]) -> Results:
    """The results file. Of the model's path, only the last part; no host names and no addresses."""
    curves: dict[str, dict[str, list[float]]] = {}
    for point in points:
        values = curves.setdefault(point.curve, {}).setdefault(str(point.x), [])
        values.append(round(point.value, 5))
    return {
        "kind": KIND,
        "model": Path(model).name,
        "server": dict(server),
        "machine": machine(),
        "curves": curves,
    }


def machine() -> dict[str, str]:
    name = platform.machine()
    with suppress(OSError, subprocess.SubprocessError):
        if platform.system() == "Darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        else:
            lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
            name = next((line.split(":")[1] for line in lines if "model name" in line), name)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": f"{name.strip()}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        **versions("vllm-mlx-harmony-server", "vllm-mlx", "mlx", "mlx-lm"),
    }


def rows(results: Results) -> list[tuple[str, str, str, str]]:
    """Curve, place on it, median with unit, spread."""
    return [
        (name, f"{int(x):,}", shown(median(values), name), f"{min(values):.4g} – {max(values):.4g}")
        for name, curve in results["curves"].items()
        for x, values in curve.items()
    ]


def shown(value: float, curve: str) -> str:
    return f"{value:.4g} {CURVES[curve][0]}"


def table(results: Results) -> Table:
    return grid(("at", "median", "spread"), rows(results))


def compared(before: Results, after: Results) -> Table:
    """The medians of two files, and how many times the first the second is."""
    found = []
    for name, curve in before["curves"].items():
        for x, values in curve.items():
            new_values = after["curves"].get(name, {}).get(x)
            if new_values:
                one, other = median(values), median(new_values)
                ratio = f"{other / one:.2f}" if one else "–"
                found.append((name, f"{int(x):,}", shown(one, name), shown(other, name), ratio))
    return grid(("at", "before", "after", "ratio"), found)


def html(results: Results) -> str:
    """One page: plots, the table and the machine."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, curve in results["curves"].items():
        if len(curve) > 1:
            groups.setdefault(CURVES[name], []).append(name)
    plots = [plot(results["curves"], names, axes) for axes, names in groups.items()]
    about = [*results["machine"].items(), *results["server"].items()]
    titles = ("", "at", "median", "spread")
    body = (page.table(titles, rows(results)), "<h2>Machine</h2>", page.table(("", ""), about))
    return page.page(f"{KIND}: {results['model']}", *plots, *body)


def plot(
    curves: Mapping[str, Mapping[str, Sequence[float]]], names: Sequence[str], axes: tuple[str, str]
) -> str:
    """Medians as lines, from zero; the horizontal axis has the places in equal distances."""
    width, height, left, top = 640, 240, 60, 20
    places = sorted({int(x) for name in names for x in curves[name]})
    most = max(median(values) for name in names for values in curves[name].values()) or 1.0
    across = {
        x: left + (width - left - 20) * at / max(1, len(places) - 1) for at, x in enumerate(places)
    }
    bottom = height - 30
    parts = [
        f'<line x1="{left}" y1="{bottom}" x2="{width}" y2="{bottom}" stroke="currentColor"/>',
        f'<text x="0" y="{top + 4}">{most:.3g} {axes[0]}</text><text x="0" y="{bottom}">0</text>',
        f'<text x="{width}" y="{height}" text-anchor="end">{axes[1]}</text>',
    ]
    parts += [
        f'<text x="{across[x]:.0f}" y="{height - 14}">{x:,}</text>'
        for x in places[:: -(-len(places) // 8)]
    ]
    for name, colour in zip(names, COLOURS, strict=False):
        line = " ".join(
            f"{across[int(x)]:.1f},{bottom - (bottom - top) * median(values) / most:.1f}"
            for x, values in curves[name].items()
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    legend = " · ".join(
        f'<span style="color:{colour}">{escape(name)}</span>'
        for name, colour in zip(names, COLOURS, strict=False)
    )
    drawn = "".join(parts)
    return f'<p>{legend}</p><svg viewBox="0 0 {width} {height}" role="img">{drawn}</svg>'
