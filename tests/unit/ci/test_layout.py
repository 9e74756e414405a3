"""Rules for every file: its name, and that its imports are declared and have no cycle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGE = REPOSITORY / "vllm_mlx_harmony"
MODULES = sorted(PACKAGE.rglob("*.py"))

EMPTY_NAMES = {"utils", "helpers", "common", "manager", "handler", "wrapper", "misc"}

THROUGH_THE_HOST = {
    "huggingface_hub",
    "mlx",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "yaml",
}
"""What `vllm-mlx` or `mlx-lm` itself depends on: the version that it requires is the right one."""

DISTRIBUTIONS = {
    "openai_harmony": "openai-harmony",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",
    "mlx_lm": "mlx-lm",
    "vllm_mlx": "vllm-mlx",
}
"""By import name, where the distribution has another name."""


def test_names_are_not_empty_words() -> None:
    assert {path.stem for path in MODULES} & EMPTY_NAMES == set()


EXTRAS = {
    "anthropic",
    "anyio",
    "ddgs",
    "httpx",
    "httpx2",
    "httpx_sse",
    "jsonschema",
    "lxml",
    "mcp",
    "mcp_types",
    "openai",
    "opentelemetry",
    "redis",
}
"""Packages of extras: they are imported where they are needed."""

OF_VLLM = {"torch", "vllm"}
"""Packages that are there when vLLM imports `standin.vllm`."""

LOADED_BY_OTHERS = {"websockets"}
"""uvicorn uses it if it is installed."""

WITH_A_MODEL = {"mlx-lm", "tqdm"}
"""What runs a model in this process: the server's extra `mlx`, and the plugin."""


def test_imported_packages_are_declared() -> None:
    server, plugin = _declared("."), _declared("packaging/vllm-mlx-harmony")
    host = [path for path in MODULES if PACKAGE / "host" in path.parents]
    needed = _needed(path for path in MODULES if path not in host) | LOADED_BY_OTHERS
    assert needed == server | WITH_A_MODEL
    assert (needed | _needed(host)) - server == plugin - {"vllm-mlx-harmony-server"}


def _declared(directory: str) -> set[str]:
    """Names of the distributions that the one in this directory requires."""
    project = (REPOSITORY / directory / "pyproject.toml").read_text("utf-8")
    (listed,) = re.findall(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    return set(re.findall(r'"([a-z0-9-]+)', listed))


def _needed(paths: Iterable[Path]) -> set[str]:
    """Names of the distributions that these files import, without those of extras."""
    own = {*sys.stdlib_module_names, "tomllib", PACKAGE.name} | THROUGH_THE_HOST | EXTRAS | OF_VLLM
    imported = {name for path in paths for name in _imports(path)} - own
    return {DISTRIBUTIONS.get(name, name) for name in imported}


def _imports(path: Path) -> set[str]:
    """Top-level names of what a file imports by absolute name, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_imports_have_no_cycle() -> None:
    """Imports inside of functions count: they would only hide a cycle."""
    imports = {_dotted(path): _within(path) for path in MODULES}
    finished: set[str] = set()

    def walk(name: str, importers: tuple[str, ...]) -> None:
        assert name not in importers, " -> ".join((*importers[importers.index(name) :], name))
        if name not in finished:
            for other in sorted(imports[name]):
                walk(other, (*importers, name))
            finished.add(name)

    for name in imports:
        walk(name, ())


def test_public_names_are_imported_when_they_are_used() -> None:
    code = (
        "import sys, vllm_mlx_harmony as package; before = len(sys.modules)\n"
        "public = [name for name in dir(package) if name[0] != '_' and name != 'TYPE_CHECKING']\n"
        "assert before == len(sys.modules)\n"
        "print(*public, *(getattr(package, name).__name__ for name in public))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    names = ["Parser", "StreamingHarmonyContext", "install", "render"]
    assert result.stdout.split() == names * 2


def _dotted(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _within(path: Path) -> set[str]:
    """The modules of the package that a file imports; for a package, its `__init__`."""
    own = _dotted(path)
    modules = {_dotted(module) for module in MODULES}
    package = own.split(".") if path.stem == "__init__" else own.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in modules else base)
    # The package's own name is there before any of its modules, and imports nothing by itself.
    return (found & modules) - {own, PACKAGE.name}


PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_table_rows_lose_no_cells(path: Path) -> None:
    """GitHub and mdformat drop what follows a ``|`` that is not escaped, even in code."""
    columns = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1 if line.startswith("|") else 0
        columns = columns if columns and cells else cells
        assert cells == columns, f"{path.name}:{number} has {cells} cells, not {columns}"


TEST_MODULES = sorted((REPOSITORY / "tests").rglob("test_*.py"))


def test_no_test_is_skipped_by_a_condition() -> None:
    """A skipped test fails its leg: what depends on the machine is marked `needs(...)`. A module
    may be skipped as a whole, where packages are missing: its leg has them."""
    found = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in TEST_MODULES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("pytest.skip", "pytest.mark.skip", "pytest.mark.skipif")
        and "allow_module_level" not in (keyword.arg for keyword in node.keywords)
    ]
    assert found == []
