"""The names of the model: its own, and its aliases.

Agents come with built-in model names (``claude-…``, ``gpt-…``). A server with one model can have
them as aliases, in all APIs. On a server with several models a name always means one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of the only ``model``, ``None`` if there are several: its own and those that are
    ``configured``, which may be patterns."""

    model: str | None
    configured: tuple[str, ...]

    @property
    def aliases(self) -> tuple[str, ...]:
        """The aliases and patterns of them; empty if there are several models."""
        if not self.model:
            return ()
        return tuple(dict.fromkeys(name for name in self.configured if name != self.model))

    def is_alias(self, name: str) -> bool:
        return name != self.model and any(fnmatchcase(name, alias) for alias in self.aliases)

    def canonical_name(self, name: str) -> str:
        """The server's name for the model that a request calls ``name``."""
        return str(self.model) if self.is_alias(name) else name

    def echoed_name(self, name: str) -> str:
        """The model's name in a response: as in the request, because clients compare them."""
        return name if self.is_alias(name) else self.model or name
