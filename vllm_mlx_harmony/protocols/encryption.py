"""Reasoning that a client carries for the server without being able to read or forge it.

Knows what the protocols need of encryption. Refuses to know keys and algorithms, which the server
brings.
"""

from __future__ import annotations

from typing import Protocol


class Cipher(Protocol):
    """Authenticated encryption of reasoning: ``encrypted_content``, ``signature``."""

    def encrypt(self, text: str) -> str:
        """``text`` as an opaque ASCII string."""

    def decrypt(self, encrypted: str) -> str | None:
        """The text that ``encrypt`` was given; ``None`` for what is forged, damaged or foreign."""
