"""Replaces names of another program (`required_names`), all or none, and restores them in reverse.

`contract` has the names of vllm-mlx, and explains why and when; routes and middleware are added in
`mount`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm_mlx_harmony.required_names import Name, Requirement, Undo, check, locate

logger = logging.getLogger("vllm_mlx_harmony")

Replacement = Callable[[Any], object]
"""Takes the original and returns what takes its place."""


@dataclass(frozen=True, slots=True)
class Patch(Name):
    """An attribute of a module or class that is replaced.

    `replacement` is called with the original; one given as `package.module:function` is imported
    only when it is applied.
    """

    replacement: Replacement | str = field(kw_only=True)

    def apply(self) -> Undo:
        path, _, name = self.target.rpartition("." if "." in self.label else ":")
        owner = locate(path)
        original = getattr(owner, name)
        replace = self.replacement if callable(self.replacement) else locate(self.replacement)
        setattr(owner, name, replace(original))
        return partial(setattr, owner, name, original)


def apply_all(requirements: Sequence[Requirement]) -> list[tuple[str, Undo]]:
    """Makes all changes or none, and returns their names with the functions that revert them.

    Raises HostError if a required row has a problem; an optional one that has one is left out with
    a warning.
    """
    check(requirements)
    applied: list[tuple[str, Undo]] = []
    try:
        for row in requirements:
            if not row.required and (problem := row.problem()):
                logger.warning("%s; continuing without it: %s", problem, row.why)
            elif undo := row.apply():
                applied.append((row.label, undo))
    except BaseException:
        undo_all(applied)
        raise
    return applied


def undo_all(applied: list[tuple[str, Undo]]) -> None:
    """Reverts changes, the last one first, and empties the list."""
    while applied:
        _, undo = applied.pop()
        with suppress(AttributeError, ValueError):  # other code has removed it already
            undo()
