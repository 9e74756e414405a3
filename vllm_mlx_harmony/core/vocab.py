"""The o200k_harmony vocabulary: control ids, the encoding (loaded offline), the bytes of an id.

Loading reads the vocabulary file, or writes it if there is none, once per process. Only `vocab`
and `files` perform I/O.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sys
import tempfile
import threading
from array import array
from binascii import a2b_base64
from contextlib import suppress
from functools import lru_cache
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mlx_harmony.core.errors import HostError, PromptTooLong
from vllm_mlx_harmony.core.files import write_atomically
from vllm_mlx_harmony.core.pretokens import pieces
from vllm_mlx_harmony.core.text_limits import CONTEXT_TOKENS, MAX_PROMPT_TOKENS, clean

if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding

# Ids of o200k_harmony (https://cookbook.openai.com/articles/openai-harmony). Every id from
# STARTOFTEXT up is a control or reserved token: text is never encoded to it, nor decoded from it.
STARTOFTEXT = 199_998
ENDOFTEXT = 199_999
RETURN = 200_002
CONSTRAIN = 200_003
CHANNEL = 200_005
START = 200_006
END = 200_007
MESSAGE = 200_008
CALL = 200_012

TURN_ENDS = frozenset({RETURN, CALL, ENDOFTEXT})
"""Ids that end the model's turn: an engine stops at them (semantics B). `parse.TRANSITIONS` and
`grammar.language` have what each of them means."""

RETURN_ENDS = frozenset({RETURN, ENDOFTEXT})
"""Of these, the ones that never occur in a prompt: there, the message ends with ``END``."""

SIZE = 201_089
"""The number of ids in the encoding, with reserved ones: one more than `turn.VOCAB_SIZE`."""

UNUSED = SIZE - 2
"""The last id that has logits: reserved, and never generated."""

CONTROL = range(STARTOFTEXT, SIZE)
"""Ids that never decode to text: special and reserved ones."""

SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""The SHA-256 of the official `o200k_base.tiktoken`, as openai-harmony and tiktoken pin it."""

FILE_NAME = "o200k_base.tiktoken"
DATA_NAME = "o200k_base.xz"
BASE_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
"""The variable with the directory from which openai-harmony reads the vocabulary."""


class VocabularyError(HostError):
    """The vocabulary cannot be loaded. The message names the file at fault and the remedy."""

    code = "vocabulary_unavailable"


_encoding: HarmonyEncoding | None = None
_lock = threading.Lock()


def encoding() -> HarmonyEncoding:
    """The o200k_harmony encoding: the same object in every thread, never downloaded.

    Raises ``VocabularyError`` if there is no usable vocabulary file, and ``ImportError`` if neither
    openai-harmony nor oss-harmony is installed.
    """
    global _encoding
    if _encoding is None:
        with _lock:
            if _encoding is None:
                _encoding = _load()
    return _encoding


def encode(text: str) -> list[int]:
    """Ids of ``text`` as ordinary text: what looks like a control token stays text (semantics A7).

    A lone surrogate, which UTF-8 cannot represent, is encoded as U+FFFD. A long text is encoded in
    pieces, because the encoder holds the GIL (`pretokens` describes when that makes a difference).
    Raises ``PromptTooLong`` if it has more ids than any model accepts.
    """
    encode = encoding().encode
    ids: list[int] = []
    for piece in pieces(clean(text)):
        ids += encode(piece, disallowed_special=())
        if len(ids) > MAX_PROMPT_TOKENS:
            raise PromptTooLong(len(ids), CONTEXT_TOKENS, at_least=True)
    return ids


def encode_with_control(text: str) -> list[int]:
    """Ids of ``text`` in which the names of control tokens stand for these. Raises as ``encode``.

    For a prompt that an operator's client has written out as text, never for what a user types.
    """
    ids: list[int] = []
    for place, part in enumerate(_control_names().split(text)):
        ids += encoding().encode(part, allowed_special="all") if place % 2 else encode(part)
    return ids


@lru_cache(maxsize=1)
def _control_names() -> re.Pattern[str]:
    return re.compile(f"({'|'.join(map(re.escape, encoding().special_tokens_set))})")


def token_bytes(token: int) -> bytes:
    """The bytes of ``token``, which may be part of a character; empty for a control or reserved id,
    and for an id outside the vocabulary."""
    if not 0 <= token < STARTOFTEXT:
        return b""
    content, ends = _table()
    return content[ends[token] : ends[token + 1]]


def token_text(token: int) -> str:
    """The text of ``token``, with U+FFFD for parts of characters; a control token's name."""
    if token in CONTROL:
        return encoding().decode([token])
    return token_bytes(token).decode("utf-8", "replace")


@lru_cache(maxsize=1)
def _table() -> tuple[bytes, array[int]]:
    """The bytes of all ids below the control ids, one after the other, and where each of them
    begins and ends: 2.4 MB, in 0.1 s. Objects of their own would take ten times as much, and
    decoding one id after the other five times as long."""
    encoding()  # which rejects a file with another content
    directory = _directory()
    file = official_file() if directory is None else (directory / FILE_NAME).read_bytes()
    tokens = [a2b_base64(line.partition(b" ")[0]) for line in file.splitlines()]
    return b"".join(tokens), array("I", accumulate(map(len, tokens), initial=0))


def cache_dir() -> Path:
    """This project's directory in the user's cache, which may not exist yet."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "vllm-mlx-harmony"


def official_file(packed: bytes | None = None) -> bytes:
    """The official `o200k_base.tiktoken`, rebuilt from the compressed file in the package. Raises
    ``VocabularyError`` if that file is missing or damaged."""
    try:
        import lzma  # not in every build of Python, and not needed with a cached file
    except ImportError as error:
        raise VocabularyError(
            f"this Python has no lzma module; set {BASE_VARIABLE} to a directory that contains "
            f"{FILE_NAME}"
        ) from error
    try:
        if packed is None:
            packed = (files("vllm_mlx_harmony") / "data" / DATA_NAME).read_bytes()
        raw = lzma.decompress(packed)
        lines: list[bytes] = []
        at = 0
        while at < len(raw):  # each token follows a byte with its length
            end = at + 1 + raw[at]
            lines.append(b"%s %d\n" % (base64.b64encode(raw[at + 1 : end]), len(lines)))
            at = end
        rebuilt = b"".join(lines)
    except (OSError, IndexError, lzma.LZMAError) as error:
        raise VocabularyError(f"{_DAMAGED}: {error}") from error
    if hashlib.sha256(rebuilt).hexdigest() != SHA256:
        raise VocabularyError(_DAMAGED)
    return rebuilt


_DAMAGED = f"the shipped vocabulary ({DATA_NAME}) is damaged; reinstall vllm-mlx-harmony"


def _load() -> HarmonyEncoding:
    """Loads the file that the user configured, else the one in the user's cache, else (if that is
    read-only or full) a temporary one."""
    if (directory := _directory()) is not None:
        return _load_from(directory)
    try:
        with tempfile.TemporaryDirectory(
            prefix="vllm-mlx-harmony-", ignore_cleanup_errors=True
        ) as name:
            write_atomically(Path(name) / FILE_NAME, official_file())
            return _load_from(Path(name))
    except OSError as error:
        raise VocabularyError(
            f"the vocabulary cannot be written to {cache_dir()} or to a temporary directory "
            f"({error}); free some space, or set {BASE_VARIABLE} to a directory that contains "
            f"{FILE_NAME}"
        ) from error


def _directory() -> Path | None:
    """The directory with the vocabulary file; ``None`` if it has to be a temporary one."""
    pointed = os.environ.get(BASE_VARIABLE)
    if pointed and (Path(pointed) / FILE_NAME).is_file():
        return Path(pointed)
    return _cached()


def _load_from(directory: Path) -> HarmonyEncoding:
    from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding

    before = os.environ.get(BASE_VARIABLE)
    os.environ[BASE_VARIABLE] = str(directory)
    try:
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except (HarmonyError, OSError) as error:
        raise VocabularyError(
            f"{directory / FILE_NAME} cannot be loaded ({error}); remove it, and unset "
            f"{BASE_VARIABLE} if it points there"
        ) from error
    finally:
        if before is None:
            del os.environ[BASE_VARIABLE]
        else:
            os.environ[BASE_VARIABLE] = before


def _cached() -> Path | None:
    """The cache directory with a valid vocabulary file; ``None`` if it is not writable."""
    directory = cache_dir()
    if not directory.is_absolute():  # without a home directory
        return None
    with suppress(OSError):
        content = (directory / FILE_NAME).read_bytes()
        if hashlib.sha256(content).hexdigest() == SHA256:
            return directory
    rebuilt = official_file()
    try:
        write_atomically(directory / FILE_NAME, rebuilt)
    except OSError:
        return None
    return directory
