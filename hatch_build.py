"""Metadata of all distributions: README and project URLs on PyPI, and requirements of one version.

Read by hatchling. URLs and the links in README lead to the repository in which a distribution is
built. A build outside of a repository with a remote has no URLs. A wheel that is built from an
sdist has those of the sdist.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent
PAGES = {
    "Homepage": "",
    "Documentation": "/blob/main/docs/README.md",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}


def web_address(remote: str) -> str:
    """The web address of a git remote, without credentials; empty if it is a directory."""
    form = r"(?:(?:https|ssh)://(?:[^@/]+@)?|[\w.-]+@)([\w.-]+)(?::\d+/|[:/])(.+?)(?:\.git)?/?"
    parts = re.fullmatch(form, remote)
    return f"https://{parts[1]}/{parts[2]}" if parts else ""


def repository() -> str:
    """The web address of the repository; empty if it has none."""
    if "GITHUB_REPOSITORY" in os.environ:
        return f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return web_address(found.strip())


def linked(text: str, address: str, version: str) -> str:
    """The text of a page, its relative links to a version of the repository."""

    def absolute(link: re.Match[str]) -> str:
        mark, name, path = link.groups()
        return f"{mark}[{name}]({address}/{'raw' if mark else 'blob'}/v{version}/{path})"

    return re.sub(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]+)\)", absolute, text)


class Metadata(MetadataHookInterface):
    """Sets ``urls`` and ``readme``, unless they are in the metadata of an sdist.

    If the hook's configuration has requirements, it sets those, with the version for ``{version}``.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        address, version = repository(), metadata["version"]
        if "urls" not in metadata:
            metadata["urls"] = {name: address + page for name, page in PAGES.items() if address}
        if "readme" not in metadata:
            text = (ROOT / "README.md").read_text("utf-8")
            if address:
                text = linked(text, address, version)
            metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if "dependencies" in self.config:
            metadata["dependencies"] = _of(version, self.config["dependencies"])
            metadata["optional-dependencies"] = {
                extra: _of(version, requirements)
                for extra, requirements in self.config["optional-dependencies"].items()
            }


def _of(version: str, requirements: list[str]) -> list[str]:
    return [requirement.format(version=version) for requirement in requirements]
