"""Builds and checks what is published: all distributions, below `dist`.

Run by the leg `release`, whose environment has what this needs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DIST = REPOSITORY / "dist"
PLUGIN = "packaging/vllm-mlx-harmony"
VERIFY = "packaging/harmony-verify"


def main() -> int:
    """Builds and checks. The exit code is 0 only if all of it succeeded."""
    shutil.rmtree(DIST, ignore_errors=True)
    run("uv", "build", "--quiet", "--out-dir", str(DIST))
    for wheel in (PLUGIN, VERIFY):
        run("uv", "build", "--quiet", "--wheel", "--out-dir", str(DIST), wheel)
    files = sorted(DIST.glob("*harmony*"))
    run("twine", "check", "--strict", *map(str, files))
    plugin = next(DIST.glob("vllm_mlx_harmony-*.whl"))
    version = plugin.name.split("-")[1]
    if not is_dated((REPOSITORY / "CHANGELOG.md").read_text("utf-8"), version):
        print(f"CHANGELOG.md has no heading `## [{version}]` with a date", file=sys.stderr)
        return 1
    for path in files:
        print(f"{path.relative_to(REPOSITORY)}: {path.stat().st_size:,} bytes")
    return 0


def run(*command: str) -> None:
    """Runs a command. Raises ``CalledProcessError`` if it fails."""
    print(f"$ {' '.join(command)}", flush=True)
    subprocess.run(command, cwd=REPOSITORY, check=True)


def is_dated(changelog: str, version: str) -> bool:
    """Whether the newest version of a changelog is ``version``, with a date."""
    newest = re.search(r"^## (.*)$", changelog, re.MULTILINE)
    form = rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d"
    return newest is not None and re.fullmatch(form, newest[1]) is not None


if __name__ == "__main__":
    sys.exit(main())
