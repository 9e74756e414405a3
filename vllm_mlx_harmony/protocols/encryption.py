"""The interface for encrypting reasoning that clients store and send back.

The server provides the implementation, with its keys.
"""

from __future__ import annotations

from typing import Protocol


class Cipher(Protocol):
    """Authenticated encryption for ``encrypted_content`` and ``signature``."""

    def encrypt(self, text: str) -> str:
        """``text`` as an opaque ASCII string."""

    def decrypt(self, encrypted: str) -> str | None:
        """The original text; ``None`` if ``encrypted`` is forged, damaged or foreign."""
