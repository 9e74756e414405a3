"""A cipher that a test can read: text backwards."""

from __future__ import annotations


class Reverse:
    """Encrypts by writing backwards."""

    def encrypt(self, text: str) -> str:
        """See ``Cipher``."""
        return text[::-1]

    def decrypt(self, encrypted: str) -> str | None:
        """See ``Cipher``."""
        return encrypted[::-1]
