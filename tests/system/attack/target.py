"""A server under attack, and its small limits."""

from __future__ import annotations

from dataclasses import dataclass

import inspected
import server_process

STREAM_BYTES, SECONDS = 32 * 1024, 3
"""The limits of unread bytes and of a reader's silence: small, so that few readers suffice."""

CACHE_MIB = 1
"""The budget of the prefix cache. The stand-in needs few bytes per token."""


@dataclass(frozen=True)
class Target:
    """A server, the name of its model, and an inspection of its process."""

    server: server_process.Server
    model: str
    inspection: inspected.Inspection
