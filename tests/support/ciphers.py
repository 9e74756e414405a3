"""Ciphers that tests can read."""

from __future__ import annotations

TAG = "encrypted:"


class Tagged:
    """Encrypts by a prefix; what does not have it cannot be decrypted."""

    def encrypt(self, text: str) -> str:
        return TAG + text

    def decrypt(self, encrypted: str) -> str | None:
        return encrypted.removeprefix(TAG) if encrypted.startswith(TAG) else None


class Reverse:
    """Encrypts by reversing the text; anything can be decrypted."""

    def encrypt(self, text: str) -> str:
        return text[::-1]

    def decrypt(self, encrypted: str) -> str | None:
        return encrypted[::-1]


class Unusable:
    """For requests and answers in which nothing is encrypted."""

    def encrypt(self, text: str) -> str:
        raise NotImplementedError

    def decrypt(self, encrypted: str) -> str | None:
        raise NotImplementedError
