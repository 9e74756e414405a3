"""Names that are used of another distribution, and whether the installed version has them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

from vllm_mlx_harmony.core.errors import HostError

Undo = Callable[[], None]

OTHERS = "..."
"""At the end of `Name.parameters`: further parameters are allowed if they have a default."""


class Requirement(Protocol):
    """A row of a table: something that a distribution must have.

    `label` is its name in reports, `why` what it is needed for. Without a `required` one the server
    does not start; one that is not required is left out with a warning.
    """

    @property
    def label(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def required(self) -> bool: ...

    def problem(self) -> str | None:
        """Why the installed version does not meet the requirement, or None."""

    def apply(self) -> Undo | None:
        """Makes the row's change, if any; returns a function that restores the same objects."""


@dataclass(frozen=True, slots=True)
class Name:
    """A name that is used as it is, `package.module:Object.attribute`: a function, a class, a
    global, or an attribute of the instances of a class.

    `parameters` are those of the function, in order and separated by spaces, or the ones that are
    passed by name and `OTHERS`; None if it is not called.
    """

    target: str
    why: str
    parameters: str | None = None
    required: bool = True

    @property
    def label(self) -> str:
        """The name without its module."""
        return self.target.partition(":")[2]

    def problem(self) -> str | None:
        return find_problem(self.target, self.parameters)

    def apply(self) -> Undo | None:
        return None


def check(requirements: Sequence[Requirement]) -> None:
    """Raises HostError if a required row has a problem, with the problems of all of them."""
    needed = (row for row in requirements if row.required)
    if problems := [problem for row in needed if (problem := row.problem())]:
        raise HostError("; ".join(problems), code="host_changed")


def locate(target: str) -> Any:
    """The object that `package.module:Object.attribute` (or just `package.module`) names."""
    module, _, path = target.partition(":")
    return reduce(getattr, filter(None, path.split(".")), importlib.import_module(module))


def find_problem(target: str, parameters: str | None = None) -> str | None:
    """What is wrong with a target: it is missing, or does not take these parameters."""
    try:
        found = locate(target)
    except (ImportError, AttributeError) as error:
        return None if _is_set_by_instances(target) else f"{target} is missing ({error})"
    if parameters is None:
        return None
    try:
        actual = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return f"{target} is not a function"
    wanted = parameters.split()
    fits = wanted == [*actual]
    if OTHERS in wanted:
        remaining = [
            parameter for name, parameter in actual.items() if name not in (*wanted, "self")
        ]
        fits = {*wanted} - {OTHERS} <= {*actual} and all(
            other.default is not other.empty
            or other.kind in (other.VAR_KEYWORD, other.VAR_POSITIONAL)
            for other in remaining
        )
    return None if fits else f"{target} takes ({', '.join(actual)}), not ({', '.join(wanted)})"


def _is_set_by_instances(target: str) -> bool:
    """Whether a target is an attribute that a class annotates, or sets in ``__init__``."""
    path, _, name = target.rpartition(".")
    try:
        owner = locate(path)
    except (ImportError, AttributeError, ValueError):
        return False
    for base in inspect.getmro(owner) if isinstance(owner, type) else ():
        initializer = getattr(vars(base).get("__init__"), "__code__", None)
        if name in inspect.get_annotations(base) or name in getattr(initializer, "co_names", ()):
            return True
    return False
