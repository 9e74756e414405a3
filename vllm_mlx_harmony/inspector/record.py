"""``Record``: what is known of one request, and ``Log``: the last requests, bounded in bytes.

Records are in memory only. Token ids are stored as arrays; their texts are looked up when a user
opens the request. Recording a token takes three appends to arrays and one to a list.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from json import dumps
from typing import Any

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import Progress, Usage
from vllm_mlx_harmony.core.turn import ServerCall
from vllm_mlx_harmony.engine_api.engine import Origin, Step
from vllm_mlx_harmony.protocols.events import Event, frame
from vllm_mlx_harmony.server.body import Document
from vllm_mlx_harmony.server.errors import failure_of
from vllm_mlx_harmony.server.observer import ObservedRequest

MAX_RECORDS = 200
"""Requests in the log."""

MAX_BYTES = 64 * 2**20
"""Bytes of all requests in the log. The oldest ones that have ended are dropped first."""

MAX_BODY = 8 * 2**20
"""Bytes of a request body; a longer one is left out."""

MAX_ANSWER = 2 * 2**20
"""Characters of an answer in the shape of its API; the rest is left out."""

MAX_FAILURES = 50
"""Error responses in the log. The page gets all of them each time that it asks for the server's
state."""

MINUTES = 60
"""Minutes of which the number of generated tokens is kept."""

SECRETS = frozenset({"authorization", "authorization_token", "headers"})
"""Fields of tools and of MCP servers that have credentials, which are passed on and never kept."""


class Record:
    """An ``Observer`` that stores what it sees. Times are in seconds since the prompt was ready.

    ``times`` and ``origins`` have the time and the ``Origin`` of each id in ``output``. ``results``
    are the parts of ``output`` that are not generated, but results of tools that the server ran.
    ``frames`` is the answer as its API has it: events, or one document. ``dropped`` counts the
    events that are left out.
    """

    def __init__(self, log: Log, observed: ObservedRequest) -> None:
        self.observed = replace(observed, document=Document(None))
        self.id = observed.id_seed
        self.began = time.time()
        self.body = _without_secrets(observed)
        self.prompt_ids = array("I")
        self.output = array("I")
        self.times = array("d")
        self.origins = bytearray()
        self.results: list[tuple[int, int]] = []
        self.progress: Progress | None = None
        self.grammar = False
        self.reasoning_ended_by = ""
        self.frames: list[str] = []
        self.dropped = 0
        self.finish = ""
        self.result = ""
        self.failure = ""
        self.usage = Usage()
        self.seconds: float | None = None
        self.version = 0
        self._cached = 0
        self._constraint: Constraint | None = None  # of the output that is generated now
        self._characters = 0
        self._log = log
        self._since = time.perf_counter()

    # --- As an observer

    def prompt(self, ids: tuple[int, ...], constraint: Constraint | None) -> None:
        """The prompt, and later its continuation, which has the results of tools in it."""
        self._constraint = constraint
        self.grammar = constraint is not None and constraint.spec.grammar is not None
        if not self.prompt_ids:
            self.prompt_ids.extend(ids)
        else:
            self._continue(ids[len(self.prompt_ids) :])
        self._log.changed(self)

    def step(self, step: Step) -> None:
        """Ids with their time, or progress of the prompt."""
        if step.progress is not None:
            self.progress = step.progress
        if step.cached_tokens and not self.results:
            self._cached = step.cached_tokens
        self.finish = step.finish or self.finish
        if ids := step.ids:
            now = time.perf_counter()
            self.output.extend(ids)
            self.origins += (step.origins or Origin.UNKNOWN * len(ids)).encode()
            self.times.extend([now - self._since] * len(ids))
            self._log.generated(len(ids), now)
        self._log.changed(self)

    def tool(self, call: ServerCall) -> None:
        """The result is in the next prompt."""

    def events(self, events: Sequence[Event]) -> None:
        for event in events:
            if self._characters > MAX_ANSWER:
                self.dropped += 1
            else:
                self._characters += len(event.data)
                self.frames.append(frame(event))

    def whole(self, document: dict[str, Any]) -> None:
        text = dumps(document)
        if len(text) <= MAX_ANSWER:
            self.frames, self._characters = [text], len(text)
        else:
            self.dropped = 1
        self._log.changed(self)

    def ended(self, result: str, usage: Usage, failure: Exception | None) -> None:
        self.result, self.usage = result, usage
        self.seconds = time.perf_counter() - self._since
        self._look()
        self._constraint = None  # it refers to the whole grammar
        if failure is not None:
            self.failure = failure_of(failure).message
        self._log.ended(self)

    # --- To be shown

    @property
    def nbytes(self) -> int:
        """Bytes that the record takes, approximately."""
        arrays = (self.prompt_ids, self.output, self.times)
        held = len(self.origins) + sum(values.itemsize * len(values) for values in arrays)
        return 1000 + held + len(self.body or b"") + self._characters

    @property
    def cached(self) -> int:
        """Ids of the prompt that were not computed again."""
        progress = 0 if self.progress is None else self.progress.cached
        return max(self.usage.cached_tokens, self._cached, progress)

    @property
    def state(self) -> str:
        """``waiting``, ``prompt`` or ``answer`` while it runs, then the result."""
        if self.result:
            return self.result
        if self.output:
            return "answer"
        return "waiting" if self.progress is None or self.progress.place else "prompt"

    @property
    def generated(self) -> int:
        return len(self.output) - sum(end - start for start, end in self.results)

    def summary(self) -> dict[str, Any]:
        """A row of the list. ``speed`` is in tokens per second, after the first token."""
        progress = self.progress or Progress(len(self.prompt_ids))
        first = self.times[0] if self.times else None
        span = self.times[-1] - self.times[0] if self.times else 0.0
        self._look()
        return {
            "id": self.id,
            "api": self.observed.api,
            "model": self.observed.model,
            "stream": self.observed.stream,
            "began": self.began,
            "state": self.state,
            "place": 0 if self.result else progress.place,
            "processed": progress.processed,
            "prompt": len(self.prompt_ids),
            "cached": self.cached,
            "generated": self.generated,
            "first": first,
            "seconds": self.seconds or time.perf_counter() - self._since,
            "speed": (self.generated - 1) / span if span > 0 else None,
            "finish": self.finish,
            "failure": self.failure,
            "grammar": self.grammar,
            "reasoning_ended_by": self.reasoning_ended_by,
            "tools": len(self.results),
        }

    def _look(self) -> None:
        if self._constraint is not None:
            self.reasoning_ended_by = self._constraint.reasoning_ended_by or self.reasoning_ended_by

    def _continue(self, after: tuple[int, ...]) -> None:
        """Replaces what was generated beyond the end of an output, and adds what follows it."""
        known = 0
        for ours, theirs in zip(self.output, after, strict=False):
            if ours != theirs:
                break
            known += 1
        del self.output[known:], self.times[known:], self.origins[known:]
        if known < len(after):
            self.output.extend(after[known:])
            self.origins.extend(Origin.UNKNOWN.encode() * (len(after) - known))
            now = time.perf_counter() - self._since
            self.times.extend([now] * (len(after) - known))
            self.results.append((known, len(after)))


def _without_secrets(observed: ObservedRequest) -> bytes | None:
    """The body of the request; ``None`` if it is too long."""
    document, raw = observed.document.value, observed.document.raw
    if len(raw) > MAX_BODY:
        return None
    if not isinstance(document, dict):
        return raw
    shown = dict(document)
    for name in ("tools", "mcp_servers"):
        if isinstance(entries := document.get(name), list):
            shown[name] = [_redacted(entry) for entry in entries]
    return raw if shown == document else dumps(shown).encode()


def _redacted(entry: object) -> object:
    if not isinstance(entry, dict):
        return entry
    return {key: "[redacted]" if key in SECRETS else value for key, value in entry.items()}


@dataclass(frozen=True, slots=True)
class Failure:
    """An error response."""

    at: float
    method: str
    path: str
    status: int
    message: str
    owner: str


class Log:
    """The last requests, by their ids, and what they sum up to."""

    def __init__(self) -> None:
        self.version = 0
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        self.finished = self.prompt_tokens = self.cached_tokens = 0
        self._records: dict[str, Record] = {}
        self._minutes: dict[float, int] = {}

    def observe(self, observed: ObservedRequest) -> Record:
        record = self._records[observed.id_seed] = Record(self, observed)
        self.changed(record)
        self._trim()
        return record

    def changed(self, record: Record) -> None:
        """Has readers look at ``record`` again."""
        self.version += 1
        record.version = self.version

    def ended(self, record: Record) -> None:
        self.changed(record)
        self.finished += 1
        self.prompt_tokens += len(record.prompt_ids)
        self.cached_tokens += record.cached
        if record.failure:
            path, owner = record.observed.path, record.observed.owner
            self.failures.append(Failure(time.time(), "", path, 0, record.failure, owner))
        self._trim()

    def generated(self, tokens: int, now: float) -> None:
        """Counts tokens in the current minute; ``now`` as ``time.perf_counter`` has it."""
        minute = now // 60
        self._minutes[minute] = self._minutes.get(minute, 0) + tokens
        if len(self._minutes) > MINUTES:
            del self._minutes[next(iter(self._minutes))]

    def minutes(self) -> list[int]:
        """Tokens generated in each of the last minutes, the current one last."""
        now = time.perf_counter() // 60
        return [self._minutes.get(now - ago, 0) for ago in reversed(range(MINUTES))]

    def of(self, owner: str | None) -> Iterator[Record]:
        """The requests of ``owner``, or all, the oldest first."""
        for record in self._records.values():
            if owner in (None, record.observed.owner):
                yield record

    def find(self, key: str, owner: str | None) -> Record | None:
        return next((record for record in self.of(owner) if record.id == key), None)

    def _trim(self) -> None:
        held = sum(record.nbytes for record in self._records.values())
        for key, record in list(self._records.items()):
            if len(self._records) <= MAX_RECORDS and held <= MAX_BYTES:
                return
            if record.result:
                held -= record.nbytes
                del self._records[key]
