"""Encrypted reasoning: clients store it and send it back, but cannot read, change or forge it.

The cipher is AES-256-GCM of the ``cryptography`` package.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vllm_mlx_harmony.core.files import write_atomically

logger = logging.getLogger("vllm_mlx_harmony")

FILE_NAME = "seal.key"
_KEY_BYTES, _NONCE_BYTES = 32, 12
_PREFIX = "vmh2."  # the version of the format


class ServerCipher:
    """Encrypts for one ``tenant``, and decrypts nothing that was encrypted for another."""

    def __init__(self, key: bytes, tenant: str) -> None:
        self._aead = AESGCM(key)
        self._bound = f"{_PREFIX}{tenant}".encode()

    def encrypt(self, text: str) -> str:
        """``text`` as an opaque ASCII string, which is different each time."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        encrypted = self._aead.encrypt(nonce, text.encode("utf-8", "replace"), self._bound)
        return _PREFIX + urlsafe_b64encode(nonce + encrypted).decode()

    def decrypt(self, encrypted: str) -> str | None:
        """The encrypted text; ``None`` if it is forged, damaged, or for another key or tenant."""
        if not encrypted.startswith(_PREFIX):
            return None
        try:
            raw = urlsafe_b64decode(encrypted.removeprefix(_PREFIX).encode())
            nonce, content = raw[:_NONCE_BYTES], raw[_NONCE_BYTES:]
            return self._aead.decrypt(nonce, content, self._bound).decode()
        except (ValueError, InvalidTag):
            return None


def key_of_secret(text: str) -> bytes:
    """The key that any secret ``text`` stands for."""
    return sha256(text.encode()).digest()


def own_key() -> bytes:
    """The key in the user's state directory, which is created if there is none.

    If it cannot be stored, it is a new one each time.
    """
    path = state_dir() / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            write_atomically(path, secrets.token_bytes(_KEY_BYTES), replace=False)
        key = path.read_bytes()
        if len(key) == _KEY_BYTES:
            return key
        problem = f"it does not have {_KEY_BYTES} bytes"
    except OSError as error:
        problem = str(error)
    logger.warning(
        "%s cannot be used as the key of encrypted reasoning (%s): reasoning that is encrypted now "
        "cannot be decrypted after a restart",
        path,
        problem,
    )
    return secrets.token_bytes(_KEY_BYTES)


def state_dir() -> Path:
    """The directory for this project's state. It may not exist yet."""
    if sys.platform == "darwin":
        base = "~/Library/Application Support"
    else:
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(base)) / "vllm-mlx-harmony"
