"""How many random faults in the package do the tests find?

`python ci/mutate.py --count 40 --seed 1`, in an environment with everything installed, as in
docs/tests.md. Each fault is put into one place of the package and is gone afterwards: a condition
is negated, a comparison is negated or its bound shifted, a number is one more, a statement is gone.
The gate's tests that need no server run until the first failure: those of the file, of its package,
then all others. For a fault that they miss, those of its package that the gate leaves to the night.
Each is printed as a difference. Of those that neither finds, some change nothing that anybody sees;
the others lack a test.

Before the first fault, all of these tests must pass, and none may be skipped.

Not a leg: it takes minutes for each fault.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from leg import legs_for_paths, legs_named
from legs import CI_TESTS, TOOL_TESTS, Leg

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "vllm_mlx_harmony"

GATE, NIGHTLY = "not nightly and not served", "nightly and not served"

SHIFTED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
NEGATED = {
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
            yield Fault(path, number, "shifted" if type(node.ops[0]) in SHIFTED else "negated")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield Fault(path, number, "one more")
        elif isinstance(node, REMOVABLE) and not _is_docstring(node):
            yield Fault(path, number, "removed")


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def faulty_text(fault: Fault) -> str:
    """The text of the file with the fault: only the lines of its node differ."""
    text = fault.path.read_text("utf-8")
    node: ast.AST = list(ast.walk(ast.parse(text)))[fault.node]
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        condition = node.test
        node, new = condition, f"(not ({ast.unparse(condition)}))"
    elif isinstance(node, ast.Compare):
        node.ops[0] = (SHIFTED | NEGATED)[type(node.ops[0])]()
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


def sample(count: int, seed: int) -> list[Fault]:
    """Faults of the package, each place as likely as any other."""
    every = [fault for path in sorted(PACKAGE.rglob("*.py")) for fault in faults(path)]
    return random.Random(seed).sample(every, count)


def folders(legs: Iterable[Leg]) -> list[str]:
    """The folders of the package's tests that these legs run without a server. Those of tools are
    in the server's."""
    parts = (part for leg in legs for command in leg.commands for part in command)
    return [
        part
        for part in dict.fromkeys(parts)
        if part.startswith("tests/unit/") and part not in {CI_TESTS, TOOL_TESTS}
    ]


def run_tests(tests: str, marks: str) -> tuple[bool, str]:
    """Whether none of these tests fails, and the last line of the output."""
    # A process each: the host binds mlx's stream to a thread for good.
    command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests, "-m", marks]
    try:
        result = subprocess.run(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env={**os.environ, "EXAMPLES": "few", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, "timeout"  # a loop without an end
    # 5: no test has these marks
    return result.returncode in {0, 5}, "".join(result.stdout.splitlines()[-1:])


def finder_of(fault: Fault) -> str:
    """Who finds a fault: `gate`, `rest` or `nobody`. The file is as it was afterwards."""
    name = str(fault.path.relative_to(REPOSITORY))
    own = (REPOSITORY / "tests" / "unit").rglob(f"test_{fault.path.stem}*.py")
    tests = [*(str(path.relative_to(REPOSITORY)) for path in own), *folders(legs_for_paths([name]))]
    stages = (
        ("gate", GATE, dict.fromkeys([*tests, *folders(legs_named(["gate"]))])),
        ("rest", NIGHTLY, tests),
    )
    before, after = fault.path.read_text("utf-8"), faulty_text(fault)
    try:
        fault.path.write_text(after, "utf-8")
        found = (
            who
            for who, marks, suites in stages
            if not all(run_tests(suite, marks)[0] for suite in suites)
        )
        who = next(found, "nobody")
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
    chosen = sample(parsed.count, parsed.seed)
    if parsed.list:
        for fault in chosen:
            print(f"{fault.kind:13} {fault.path.relative_to(REPOSITORY)} (node {fault.node})")
        return 0
    for folder, marks in itertools.product(folders(legs_named(["gate"])), (GATE, NIGHTLY)):
        passed, line = run_tests(folder, marks)
        print(f"{folder}: {line}", flush=True)
        if not passed or "skipped" in line:
            return 1
    who = [finder_of(fault) for fault in chosen]
    print(", ".join(f"{who.count(group)} by {group}" for group in ("gate", "rest", "nobody")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
