"""How many random faults in the package do the tests find?

`python ci/mutate.py --count 40 --seed 1`, in an environment with everything installed (see
CONTRIBUTING.md). Each fault is put into one place of the package and is gone afterwards: a
condition is negated, a comparison is turned around, a number is one more, a statement is gone. The
tests of the gate that concern the file run until the first failure, those of its own first; for a
fault that they miss, those that the gate leaves to the night. Each is printed as a difference. Of
those that neither finds, some change nothing that anybody sees; the others lack a test.

Not a leg: it takes minutes for each fault.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "vllm_mlx_harmony"

CONCERNED = {
    "core": ("tests/unit/core", "tests/unit/protocols", "tests/unit/server"),
    "protocols": ("tests/unit/protocols", "tests/unit/server"),
    "engine_api": ("tests/unit/server", "tests/unit/engine"),
    "inspector": ("tests/unit/server",),
    "server": ("tests/unit/server", "tests/unit/host"),
    "engine": ("tests/unit/engine", "tests/unit/host"),
    "standin": ("tests/unit/standin",),
    "host": ("tests/unit/host",),
    "cli": ("tests/unit/cli",),
}
"""The tests of the gate that concern a package. Those of modules at the top are in every folder;
what the gate does not test, as gateway/, is left out."""

ELSEWHERE = (
    "tests/unit/host",
    "tests/unit/engine",
    "tests/unit/core",
    "tests/unit/protocols",
    "tests/unit/server",
)

TURNED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
REMOVABLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Return)


@dataclass(frozen=True)
class Fault:
    """One place in a file: the number of the node in the order of ``ast.walk``, and its kind."""

    path: Path
    node: int
    kind: str


def faults(path: Path) -> Iterator[Fault]:
    """All faults that can be put into the functions of a file."""
    tree = ast.parse(path.read_text("utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for statement in function.body
        for node in ast.walk(statement)
    }
    for number, node in enumerate(ast.walk(tree)):
        if id(node) not in inside:
            continue
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield Fault(path, number, "negated")
        elif isinstance(node, ast.Compare):
            yield Fault(path, number, "turned around")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield Fault(path, number, "one more")
        elif isinstance(node, REMOVABLE) and not _is_docstring(node):
            yield Fault(path, number, "removed")


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def broken(fault: Fault) -> str:
    """The text of the file with the fault: only the lines of its node differ."""
    text = fault.path.read_text("utf-8")
    node: ast.AST = list(ast.walk(ast.parse(text)))[fault.node]
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        condition = node.test
        node, new = condition, f"(not ({ast.unparse(condition)}))"
    elif isinstance(node, ast.Compare):
        node.ops[0] = TURNED[type(node.ops[0])]()
        new = f"({ast.unparse(node)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        new = str(node.value + 1)
    else:
        new = "pass"
    assert isinstance(node, (ast.expr, ast.stmt))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = text.encode().splitlines(keepends=True)
    first, last = lines[node.lineno - 1], lines[node.end_lineno - 1]
    changed = first[: node.col_offset] + new.encode() + last[node.end_col_offset :]
    return b"".join([*lines[: node.lineno - 1], changed, *lines[node.end_lineno :]]).decode()


def drawn(count: int, seed: int) -> list[Fault]:
    """Faults of the package, each place as likely as any other."""
    files = sorted(PACKAGE.rglob("*.py"))
    covered = [
        path
        for path in files
        if path.relative_to(PACKAGE).parts[0] in CONCERNED or path.parent == PACKAGE
    ]
    return random.Random(seed).sample([fault for path in covered for fault in faults(path)], count)


def found(tests: Sequence[str], marks: str) -> bool:
    """Whether one of these tests fails."""
    for folder in tests:  # a process each: the host binds mlx's stream to a thread for good
        command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", folder, "-m", marks]
        environment = {**os.environ, "EXAMPLES": "few", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ended = subprocess.run(
                [sys.executable, *command],
                cwd=REPOSITORY,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=1200,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True  # a loop without an end
        if ended.returncode not in {0, 5}:  # 5: no test has these marks
            return True
    return False


def tried(fault: Fault) -> str:
    """Who finds a fault: `gate`, `rest` or `nobody`. The file is as it was afterwards."""
    part = fault.path.relative_to(PACKAGE).parts[0]
    tests = CONCERNED.get(part, ELSEWHERE)
    own = (REPOSITORY / "tests" / "unit").rglob(f"test_{fault.path.stem}*.py")
    tests = (*(str(path.relative_to(REPOSITORY)) for path in own), *tests)
    before, after = fault.path.read_text("utf-8"), broken(fault)
    name = fault.path.relative_to(REPOSITORY)
    try:
        fault.path.write_text(after, "utf-8")
        if found(tests, "not nightly and not served"):
            who = "gate"
        else:
            who = "rest" if found(tests, "nightly and not served") else "nobody"
    finally:
        fault.path.write_text(before, "utf-8")
    print(f"{who:6} {fault.kind:13} {name}", flush=True)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    print("\n".join(f"       {line}" for line in list(lines)[2:]), flush=True)
    return who


def main() -> int:
    """Puts faults into the package, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print the faults, run nothing")
    parsed = parser.parse_args()
    chosen = drawn(parsed.count, parsed.seed)
    if parsed.list:
        for fault in chosen:
            print(f"{fault.kind:13} {fault.path.relative_to(REPOSITORY)} (node {fault.node})")
        return 0
    who = [tried(fault) for fault in chosen]
    print(", ".join(f"{who.count(group)} by {group}" for group in ("gate", "rest", "nobody")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
