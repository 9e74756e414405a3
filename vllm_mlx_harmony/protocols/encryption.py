"""Reasoning that a client carries for the server without being able to read or forge it.

Knows what the protocols need of a seal. Refuses to know keys and ciphers: the host brings them.
"""

from __future__ import annotations

from typing import Protocol


class Seal(Protocol):
    """Authenticated encryption of reasoning: ``encrypted_content``, ``signature``."""

    def seal(self, text: str) -> str:
        """``text`` as an opaque ASCII string."""

    def unseal(self, sealed: str) -> str | None:
        """The text that ``seal`` was given; ``None`` for what is forged, damaged or foreign."""
