"""Every name in docs/architecture.md exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGE = REPOSITORY / "vllm_mlx_harmony"

FOREIGN = {
    *("Authorization", "ToolParserManager.tool_parsers", "llguidance", "max_model_len", "mcp"),
    *("mlx_lm", "openai_harmony", "vllm_mlx", "vllm_mlx.server", "whitespace_pattern"),
    *("vllm_mlx.prompt_renderers", "vllm_mlx.streaming_contexts", "vllm_mlx.tool_parsers"),
    *("allOf", "oneOf", "propertyNames", "unevaluatedProperties"),
}
"""Names of other projects, formats and protocols."""


def code_names() -> set[str]:
    """All names in the package: of modules, functions, classes and variables."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        names |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for field in ("name", "id", "arg", "attr"):
                name = getattr(node, field, None)
                if isinstance(name, str):
                    names.add(name)
    return names


NAMES = code_names()


def exists(quoted: str) -> bool:
    name = quoted.partition("(")[0].strip()
    if name in FOREIGN or name.startswith(("/", "POST ", "GET ", "DELETE ")):
        return True
    if "/" in name or name.endswith((".py", ".toml")):
        path = name.rstrip("/")
        inside = (PACKAGE, REPOSITORY / "tests")
        return any(REPOSITORY.glob(path)) or any(any(root.rglob(path)) for root in inside)
    if re.fullmatch(r"[A-Za-z_][\w.]*", name):
        return all(part in NAMES for part in name.split("."))
    return True  # a command, a flag or an example


def quoted() -> list[str]:
    text = (REPOSITORY / "docs" / "architecture.md").read_text("utf-8")
    without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return sorted(set(re.findall(r"`([^`\n]+)`", without_blocks)))


def test_every_name_exists() -> None:
    assert [name for name in quoted() if not exists(name)] == []


@pytest.mark.parametrize("name", ["SchemaReader.one_of", "server/nothing.py", "no_such_function"])
def test_missing_name_is_found(name: str) -> None:
    assert not exists(name)
