"""The progress of a prompt, in the format of llama.cpp's server (``return_progress``).

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md: ``processed`` includes
``cache``, so ``processed / total`` is the overall progress, and ``time_ms`` counts from where the
prompt's processing began. While a request is in the queue, it has one field more: its ``place``.
"""

from __future__ import annotations

from typing import Any

from vllm_mlx_harmony.core.deltas import Progress
from vllm_mlx_harmony.protocols.events import Event, encode

FIELD = "prompt_progress"


def prompt_progress(progress: Progress) -> dict[str, Any]:
    document: dict[str, Any] = {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(progress.seconds * 1000),
    }
    return {**document, "place": progress.place} if progress.place else document


def progress_comment(progress: Progress) -> Event:
    """The same as a comment of an event stream, for APIs that have no field for it."""
    return Event(f"{FIELD} {encode(prompt_progress(progress))}", comment=True)
