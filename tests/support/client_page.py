"""The sections of docs/clients.md, and the code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")

ROOT = "http://127.0.0.1:8000"
"""The server's address on the page."""

PARIS = "What is the weather in Paris?"
"""The question of examples with a tool, and the tool's result."""
SUNNY = "18 °C, sunny"
OSLO = "What is in Oslo?"
"""The question of all others."""

ANSWERS = {OSLO: "A museum of Munch.", PARIS: "It is 18 °C and sunny in Paris."}


@dataclass(frozen=True, slots=True)
class Block:
    """Code of the page. ``file`` is the name in its first line, if it has to be stored."""

    language: str
    code: str

    @property
    def file(self) -> str:
        match = re.match(r"(?:#|//) ([\w-]+\.\w+)\n", self.code)
        return match[1] if match else ""


_SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections() -> dict[str, list[Block]]:
    """The blocks of each client, in their order."""
    return {
        name: [Block(*parts) for parts in _BLOCK.findall(text)]
        for name, text in _SECTION.findall(PAGE)
    }
