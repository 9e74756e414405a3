"""A cipher that tests can read: reversed text."""

from __future__ import annotations


class Reverse:
    """Encrypts by reversing the text."""

    def encrypt(self, text: str) -> str:
        """See ``Cipher``."""
        return text[::-1]

    def decrypt(self, encrypted: str) -> str | None:
        """See ``Cipher``."""
        return encrypted[::-1]
