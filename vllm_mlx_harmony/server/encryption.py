"""The cipher of this server: reasoning that clients carry and cannot read, change or make up.

Knows the key, where it is kept, and the cipher (AES-256-GCM of the ``cryptography`` package).
Refuses to know which API carries what is encrypted.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from base64 import urlsafe_b64decode, urlsafe_b64encode
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vllm_mlx_harmony.core.files import write_atomically
from vllm_mlx_harmony.server.shared import server_shared

logger = logging.getLogger("vllm_mlx_harmony")

KEY_VARIABLE = "VLLM_MLX_HARMONY_SEAL_KEY"
"""Environment variable: a secret of any form, the same for servers that share their clients."""

FILE_NAME = "seal.key"
_KEY_BYTES, _NONCE_BYTES = 32, 12
_PREFIX = "vmh2."  # which format, so that a later one can tell


class ServerCipher:
    """Encrypts with one key for one ``tenant``; does not decrypt what was encrypted for another."""

    def __init__(self, key: bytes, tenant: str) -> None:
        self._aead = AESGCM(key)
        self._bound = f"{_PREFIX}{tenant}".encode()

    def encrypt(self, text: str) -> str:
        """``text`` as an opaque ASCII string, another one each time."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        encrypted = self._aead.encrypt(nonce, text.encode("utf-8", "replace"), self._bound)
        return _PREFIX + urlsafe_b64encode(nonce + encrypted).decode()

    def decrypt(self, encrypted: str) -> str | None:
        """The text that was encrypted; ``None`` for what is forged, damaged or foreign."""
        if not encrypted.startswith(_PREFIX):
            return None
        try:
            raw = urlsafe_b64decode(encrypted.removeprefix(_PREFIX).encode())
            nonce, content = raw[:_NONCE_BYTES], raw[_NONCE_BYTES:]
            return self._aead.decrypt(nonce, content, self._bound).decode()
        except (ValueError, InvalidTag):
            return None


def server_cipher(tenant: str) -> ServerCipher:
    """The cipher of this server for what ``tenant`` carries."""
    return ServerCipher(_server_key(), tenant)


@lru_cache(maxsize=1)
def _server_key() -> bytes:
    """The environment's key, that of all who share a Redis, or the user's own, made at first use.

    Where no key can be kept, one that lasts as long as the process, and one line in the log.
    """
    given = os.environ.get(KEY_VARIABLE)
    if given:
        return sha256(given.encode()).digest()
    shared = server_shared()
    return _stored_key(state_dir() / FILE_NAME) if shared is None else shared.encryption_key


def state_dir() -> Path:
    """This project's directory in the user's state; not necessarily there yet."""
    if sys.platform == "darwin":
        base = "~/Library/Application Support"
    else:
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(base)) / "vllm-mlx-harmony"


def _stored_key(path: Path) -> bytes:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            write_atomically(path, secrets.token_bytes(_KEY_BYTES), replace=False)
        key = path.read_bytes()
    except OSError as error:
        logger.warning(
            "no key can be kept in %s (%s): encrypted reasoning ends with us", path, error
        )
        return secrets.token_bytes(_KEY_BYTES)
    if len(key) == _KEY_BYTES:
        return key
    logger.warning("%s is no key: encrypted reasoning ends with this process", path)
    return secrets.token_bytes(_KEY_BYTES)
