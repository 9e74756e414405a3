"""Builds and checks what is published, below `dist`: all distributions, and a Homebrew formula.

Run by the leg `release`, whose environment has what this needs. The formula is for a tap. Its
resources are wheels, since neither mlx nor torch can be built from source there, and they are
installed after Homebrew has rewritten the load commands of a keg's libraries, in which wheels leave
no room for longer paths.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

REPOSITORY = Path(__file__).resolve().parents[1]
DIST = REPOSITORY / "dist"
PLUGIN = "packaging/vllm-mlx-harmony"
VERIFY = "packaging/harmony-verify"

PYTHON = (3, 12)
MACOS = (14, 0)
"""The Python of the formula, and the oldest macOS."""

FORMULA = """\
class VllmMlxHarmony < Formula
  desc "Serves OpenAI's gpt-oss models correctly on vllm-mlx"
  homepage "{homepage}"
  url "{url}",
      using: :nounzip
  sha256 "{sha256}"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@{python}"

{resources}
  def install
    (libexec/"wheels").install Dir["*.whl"]
    resources.each {{ |wheel| wheel.stage(libexec/"wheels") }}
    bin.write_exec_script libexec/"venv/bin/vllm-mlx-harmony", libexec/"venv/bin/vllm-mlx"
  end

  def post_install
    python = Formula["python@{python}"].opt_bin/"python{python}"
    system python, "-m", "venv", "--clear", libexec/"venv"
    wheels = Dir[libexec/"wheels/*.whl"]
    system libexec/"venv/bin/pip", "install", "--no-index", "--no-deps", *wheels
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/vllm-mlx-harmony --version")
  end
end
"""

RESOURCE = """\
  resource "{name}" do
    url "{url}",
        using: :nounzip
    sha256 "{sha256}"
  end
"""


def main() -> int:
    """Builds and checks. The exit code is 0 only if all of it succeeded."""
    shutil.rmtree(DIST, ignore_errors=True)
    run("uv", "build", "--quiet", "--out-dir", str(DIST))
    for wheel in (PLUGIN, VERIFY):
        run("uv", "build", "--quiet", "--wheel", "--out-dir", str(DIST), wheel)
    files = sorted(DIST.glob("*harmony*"))
    run("twine", "check", "--strict", *map(str, files))
    plugin = next(DIST.glob("vllm_mlx_harmony-*.whl"))
    server = next(DIST.glob("vllm_mlx_harmony_server-*.whl"))
    version = plugin.name.split("-")[1]
    if not is_dated((REPOSITORY / "CHANGELOG.md").read_text("utf-8"), version):
        print(f"CHANGELOG.md has no heading `## [{version}]` with a date", file=sys.stderr)
        return 1
    tap = DIST / "vllm-mlx-harmony.rb"
    tap.write_text(formula(plugin, server, locked()), "utf-8")
    for path in (*files, tap):
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


def locked() -> list[dict[str, Any]]:
    """All packages that an installation on a Mac has beside ours, as in a `pylock.toml`."""
    target = ["--python-platform", "aarch64-apple-darwin", "--python-version", dotted(PYTHON)]
    command = ["uv", "pip", "compile", "--quiet", "--format", "pylock.toml", *target]
    ended = subprocess.run(
        [*command, "--find-links", str(DIST), f"{PLUGIN}/pyproject.toml"],
        cwd=REPOSITORY,
        env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": dotted(MACOS)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    packages: list[dict[str, Any]] = tomllib.loads(ended.stdout)["packages"]
    return [package for package in packages if package["name"] != "vllm-mlx-harmony-server"]


def formula(wheel: Path, server: Path, packages: Iterable[Mapping[str, Any]]) -> str:
    """The formula of two wheels that will be on PyPI, and of the packages that they need."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(opened.read(name).decode())
    urls = dict(entry.split(", ", 1) for entry in metadata.get_all("Project-URL", []))
    project = metadata["Name"]
    ours = {"url": published(server), "sha256": digest(server)}
    resources = [RESOURCE.format(name=f"{project}-server", **ours)]
    for package in packages:
        chosen = best(package["wheels"])
        values = {"url": chosen["url"], "sha256": chosen["hashes"]["sha256"]}
        resources.append(RESOURCE.format(name=package["name"], **values))
    return FORMULA.format(
        homepage=urls.get("Homepage", f"https://pypi.org/project/{project}/"),
        url=published(wheel),
        sha256=digest(wheel),
        python=dotted(PYTHON),
        resources="\n".join(resources),
    )


def published(wheel: Path) -> str:
    """The address of a wheel on PyPI."""
    project = wheel.name.partition("-")[0].replace("_", "-")
    return f"https://files.pythonhosted.org/packages/py3/{project[0]}/{project}/{wheel.name}"


def digest(file: Path) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def best(wheels: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The wheel that pip would choose on the formula's oldest macOS."""
    platforms = list(mac_platforms(MACOS, "arm64"))
    tags = [
        *cpython_tags(PYTHON, platforms=platforms),
        *compatible_tags(PYTHON, "cp312", platforms),
    ]
    ranks: dict[Tag, int] = {tag: rank for rank, tag in reversed(list(enumerate(tags)))}

    def rank(wheel: Mapping[str, Any]) -> int:
        fitting = parse_wheel_filename(wheel["url"].rsplit("/", 1)[1])[3]
        return min(ranks.get(tag, len(tags)) for tag in fitting)

    chosen = min(wheels, key=rank)
    if rank(chosen) == len(tags):
        raise ValueError(f"no wheel for macOS {dotted(MACOS)}: {chosen['url']}")
    return chosen


def dotted(version: tuple[int, int]) -> str:
    """`3.12`"""
    return ".".join(map(str, version))


if __name__ == "__main__":
    sys.exit(main())
