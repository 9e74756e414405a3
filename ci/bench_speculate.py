"""How many tokens a step gives when an answer copies what it has read: real edits, replayed.

    python ci/bench_speculate.py [--pairs 220]

Downloads two neighbouring releases of each package with pip. The prompt of a pair is a file as it
was, the answer is the file as it became, or a patch in the form of Codex. No model computes
anything: ids are drafted as by the engine, and compared with those of the answer. The last column
is what the drafts gain if a step of 2, 4, 8 and 16 ids costs as much as ``--costs`` of one id.
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from zipfile import ZipFile

from bench_table import Row, printed

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine.drafts import Costs, Drafts

RELEASES = {
    "click": ("8.1.3", "8.1.4"),
    "django": ("4.2.5", "4.2.6"),
    "fastapi": ("0.103.2", "0.104.0"),
    "flask": ("2.3.3", "3.0.0"),
    "httpx": ("0.25.0", "0.26.0"),
    "jinja2": ("3.1.2", "3.1.3"),
    "networkx": ("3.1", "3.2"),
    "pydantic": ("2.3.0", "2.4.0"),
    "pytest": ("7.4.2", "7.4.3"),
    "requests": ("2.31.0", "2.32.3"),
    "rich": ("13.5.3", "13.6.0"),
    "sphinx": ("7.1.0", "7.2.0"),
    "starlette": ("0.31.1", "0.32.0"),
    "urllib3": ("2.0.7", "2.1.0"),
    "werkzeug": ("2.3.8", "3.0.0"),
}
"""Packages without compiled parts, by their wheels."""

SIZES = range(1_000, 40_000)
"""Characters of the files that are replayed."""


def files(package: str, version: str, directory: Path) -> dict[str, str]:
    """The text of each Python file of a release, by its path."""
    command = ["pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(directory)]
    subprocess.run([*command, f"{package}=={version}"], check=True, stderr=subprocess.DEVNULL)
    (wheel,) = directory.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        return {name: archive.read(name).decode("utf-8", "replace") for name in names}


def edits(most: int) -> Iterator[tuple[str, str, str]]:
    """Path, old and new text of files that both releases of a package have, and that differ."""
    found = 0
    for package, versions in RELEASES.items():
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            before, after = (
                files(package, version, Path(directory))
                for version, directory in zip(versions, (one, other), strict=True)
            )
        for path, text in after.items():
            if before.get(path, text) != text and len(text) in SIZES and found < most:
                found += 1
                yield path, before[path], text


def patch(path: str, before: str, after: str) -> str:
    """The edit as Codex's ``apply_patch`` takes it."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=3, lineterm="")
    body = ["@@" if line.startswith("@@") else line for line in list(lines)[2:]]
    head = ["*** Begin Patch", f"*** Update File: {path}"]
    return "\n".join([*head, *body, "*** End Patch\n"])


def replay(prompt: Sequence[int], answer: Sequence[int], costs: Costs) -> tuple[int, float]:
    """The steps that ``answer`` takes, and their cost in steps of one id."""
    drafts, at, steps, cost = Drafts(prompt), 0, 0, 0.0
    while at < len(answer):
        drafts.extend(answer[at : at + 1])  # the id that is drawn in any case
        at += 1
        draft = drafts.next(costs, len(answer) - at)
        right = 0
        while right < len(draft) and draft[right] == answer[at + right]:
            right += 1
        drafts.extend(draft[:right])
        at += right
        steps += 1
        width = next(place for place, ids in enumerate(costs.ids) if ids > len(draft))
        cost += costs.seconds[width]
    return steps, cost


def rows(pairs: Sequence[tuple[str, str, str]], costs: Costs) -> Iterator[Row]:
    kinds: dict[str, tuple[Callable[[str, str, str], str], float]] = {
        "whole files": (lambda path, before, after: after, 3.0),
        "patches": (patch, 1.8),
    }
    for kind, (write, goal) in kinds.items():
        ids, steps, cost = 0, 0, 0.0
        for path, before, after in pairs:
            answer = vocab.encode(write(path, before, after))
            took = replay(vocab.encode(before), answer, costs)
            ids, steps, cost = ids + len(answer), steps + took[0], cost + took[1]
        rate = ids / steps
        yield Row(f"{kind}: {ids:,} tokens", "a step", None, rate, f">= {goal}", rate >= goal)
        yield Row(f"{kind}: speed by the costs", "times", None, ids / cost)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=400, help="edits, at most")
    parser.add_argument("--costs", type=float, nargs=4, default=[1.3, 1.5, 1.9, 2.6])
    given = parser.parse_args()
    pairs = list(edits(given.pairs))
    print(f"{len(pairs)} edits of {len(RELEASES)} packages; steps cost {given.costs}")
    return printed(rows(pairs, Costs((1, 2, 4, 8, 16), (1.0, *given.costs))))


if __name__ == "__main__":
    sys.exit(main())
