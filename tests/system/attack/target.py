"""A server that is attacked, and what it was given little of."""

from __future__ import annotations

from dataclasses import dataclass

import inspected
import server as served

ROOM, SECONDS = 32 * 1024, 3
"""Of the buffer before a reader, and of its silence: small, so that few stalled readers do."""

CACHE_MIB = 1
"""Budget of the prefix cache: the model under attack has little to remember of each token."""


@dataclass(frozen=True)
class Target:
    """A server, the name of its model, and who asks what is in it."""

    server: served.Server
    model: str
    inspection: inspected.Inspection
