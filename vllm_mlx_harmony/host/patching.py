"""Changes to somebody else's program: all checked first, applied in order, undone backwards.

Knows attributes, dictionary entries and signatures in general. Refuses to know vllm-mlx's names:
they are in `contract`, with the theory; how a route is put in front of another is in `mount`.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from vllm_mlx_harmony.core.errors import HostError

Undo = Callable[[], None]
Replacement = Callable[[Any], Any]
"""Takes what is there (`None` when nothing is) and gives what shall be there instead."""

OTHERS = "..."
"""As the last of the parameters of a requirement: there may be more than the ones named."""

_MISSING = object()


class Requirement(Protocol):
    """One thing relied on in vllm-mlx, changed or not."""

    @property
    def label(self) -> str:
        """How it is called in a log line."""

    @property
    def why(self) -> str:
        """What it is needed for."""

    @property
    def required(self) -> bool:
        """Whether nothing works without it."""

    def problem(self) -> str | None:
        """Why it cannot be used in this host, or None. Changes nothing."""

    def apply(self) -> Undo:
        """Makes the change, and returns what takes it back, by identity."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something used as it is: it has to be there and, if named, take these parameters."""

    target: str
    why: str
    parameters: tuple[str, ...] | None = None
    required: bool = True

    @property
    def label(self) -> str:
        """The name without its module."""
        return self.target.partition(":")[2]

    def problem(self) -> str | None:
        """Why it cannot be relied on in this host, or None."""
        return find_problem(self.target, self.parameters)

    def apply(self) -> Undo:
        """Nothing to change, nothing to take back."""
        return lambda: None


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of objects of a class, used as it is: somewhere the class has to set it.

    `target` is `package.module:Class.attribute`. Its methods do not have to run for that.
    """

    target: str
    why: str
    required: bool = True

    @property
    def label(self) -> str:
        """The name without its module."""
        return self.target.partition(":")[2]

    def problem(self) -> str | None:
        """Why it cannot be relied on in this host, or None."""
        path, _, name = self.target.rpartition(".")
        try:
            found = locate(path)
        except (ImportError, AttributeError) as error:
            return f"{path} is missing ({error})"
        there = hasattr(found, name) or any(name in _assigned(each) for each in found.__mro__)
        return None if there else f"{path} has no {name}"

    def apply(self) -> Undo:
        """Nothing to change, nothing to take back."""
        return lambda: None


@cache
def _assigned(owner: type[Any]) -> frozenset[str]:
    """What the methods of a class assign to `self`, and what its body annotates.

    Read from bytecode: to parse the source of the host's engines took a second of every start.
    """
    functions: list[Any] = []
    for each in vars(owner).values():
        functions += (each.fget, each.fset) if isinstance(each, property) else (each,)
    code = [each.__code__ for each in map(inspect.unwrap, functions) if inspect.isfunction(each)]
    found = set(vars(owner).get("__annotations__", ()))
    while code:
        body = code.pop()
        code += filter(inspect.iscode, body.co_consts)  # functions within
        before: object = None
        for each in dis.get_instructions(body):
            # An object stands directly before its attribute; Python 3.13 loads two at a time.
            if each.opname == "STORE_ATTR" and before in ("self", ("self",)):
                found.add(each.argval)
            before = each.argval[-1:] if isinstance(each.argval, tuple) else each.argval
            if each.opname == "LOAD_ATTR":
                before = None  # another object's
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Patch:
    """An attribute of a module or class that is replaced.

    `target` is `package.module:Object.attribute`. `replacement` takes the original and returns the
    new one; as a string (`package.module:function`) it is imported when it is applied. `parameters`
    are the names the original must take, all of them (or those named, when the last is `...`).
    """

    target: str
    replacement: Replacement | str
    why: str
    parameters: tuple[str, ...] | None = None
    required: bool = True

    @property
    def label(self) -> str:
        """The name without its module."""
        return self.target.partition(":")[2]

    def problem(self) -> str | None:
        """Why it cannot be replaced in this host, or None."""
        return find_problem(self.target, self.parameters)

    def apply(self) -> Undo:
        """Replaces it. Taken back, the very same object is where it was."""
        path, _, name = self.target.rpartition("." if "." in self.label else ":")
        owner = locate(path)
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, load(self.replacement)(inspect.getattr_static(owner, name)))

        def undo() -> None:
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        return undo


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a dictionary that is replaced, or added when the key is new."""

    target: str
    key: str
    replacement: Replacement | str
    why: str
    required: bool = True

    @property
    def label(self) -> str:
        """The dictionary's name without its module, and the key."""
        return f"{self.target.partition(':')[2]}[{self.key}]"

    def problem(self) -> str | None:
        """Why it cannot be replaced in this host, or None."""
        missing = find_problem(self.target, None)
        if missing is None and not isinstance(locate(self.target), dict):
            return f"{self.target} is not a dictionary"
        return missing

    def apply(self) -> Undo:
        """Replaces it. Taken back, the very same value is there, or none."""
        table: dict[str, Any] = locate(self.target)
        before = table.get(self.key, _MISSING)
        table[self.key] = load(self.replacement)(None if before is _MISSING else before)

        def undo() -> None:
            if before is _MISSING:
                table.pop(self.key, None)
            else:
                table[self.key] = before

        return undo


def apply_all(requirements: Sequence[Requirement]) -> list[Undo]:
    """Applies all of them or none; what to call, last first, to take them back.

    Raises HostError, with nothing touched, when one of them has a problem; whatever applying one
    of them raises comes out after the others are taken back.
    """
    check(requirements)
    undos: list[Undo] = []
    try:
        undos.extend(row.apply() for row in requirements)
    except BaseException:
        undo_all(undos)
        raise
    return undos


def check(requirements: Sequence[Requirement]) -> None:
    """Raises HostError when a required one has a problem, naming every one that has."""
    needed = (row for row in requirements if row.required)
    if problems := [problem for row in needed if (problem := row.problem())]:
        raise HostError("; ".join(problems), code="host_changed")


def undo_all(undos: list[Undo]) -> None:
    """Takes changes back, last first, whatever happens to some; leaves the list empty."""
    while undos:
        with suppress(AttributeError, LookupError):  # somebody else took it away meanwhile
            undos.pop()()


def locate(target: str) -> Any:
    """The object that `package.module:Object.attribute` (or just `package.module`) names."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


def load(replacement: Replacement | str) -> Replacement:
    """The replacement itself, where only its name is given."""
    if callable(replacement):
        return replacement
    found: Replacement = locate(replacement)
    return found


def find_problem(target: str, parameters: tuple[str, ...] | None) -> str | None:
    """What is wrong with a target: not there, or with other parameters than the expected ones."""
    try:
        found = locate(target)
    except (ImportError, AttributeError) as error:
        return f"{target} is missing ({error})"
    if parameters is None:
        return None
    try:
        actual = tuple(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return f"{target} is not a function"
    expected = tuple(name for name in parameters if name != OTHERS)
    fits = actual == expected if expected == parameters else set(expected) <= set(actual)
    return None if fits else f"{target} takes ({', '.join(actual)}), not ({', '.join(parameters)})"
