"""Checks as rows, their outcomes, and the runner."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import Literal, TypeAlias

import httpx
from httpx_sse import SSEError

from vllm_mlx_harmony.verify.apis import Api
from vllm_mlx_harmony.verify.trial import Server, Trial
from vllm_mlx_harmony.verify.values import Ask, Failed, Unsupported

Run: TypeAlias = Callable[[Trial], Awaitable[None]]
"""Raises ``Failed`` if what is checked does not hold, ``Unsupported`` if it cannot be checked."""

ABSENT = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
"""Statuses of endpoints that a server does not have."""

PROBE = Ask(("Hello.",), limit=16)


@dataclass(frozen=True, slots=True)
class Check:
    """A check: ``KIND.API.NAME``, what must hold, and a link to its source.

    With ``repeats`` it depends on what the model writes, and is run several times on demand.
    """

    name: str
    api: Api
    holds: str
    link: str
    run: Run
    repeats: bool = False

    @property
    def kind(self) -> str:
        """``wire``, ``format`` or ``loop``."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check found. ``passed`` of ``runs`` runs passed.

    ``problem`` says why it failed or is unsupported; ``sent`` and ``received`` are the beginnings
    of the last exchange of the first run that failed.
    """

    name: str
    holds: str
    link: str
    state: Literal["passed", "failed", "unsupported"]
    seconds: float = 0.0
    passed: int = 0
    runs: int = 0
    problem: str = ""
    sent: str = ""
    received: str = ""


def chosen(checks: Iterable[Check], only: Sequence[str]) -> tuple[Check, ...]:
    """The checks that ``only`` names: patterns of whole names (``*.chat.stop``) or of beginnings
    (``wire``, ``wire.chat``). Without any, all."""
    return tuple(
        check
        for check in checks
        if not only
        or any(
            fnmatchcase(check.name, end) for pattern in only for end in (pattern, f"{pattern}.*")
        )
    )


async def run(server: Server, checks: Sequence[Check], repeat: int) -> AsyncIterator[Outcome]:
    """Runs checks one after the other."""
    absent: dict[str, str] = {}
    for check in checks:
        if check.api.name not in absent:
            absent[check.api.name] = await _absence(server, check.api)
        if problem := absent[check.api.name]:
            yield Outcome(check.name, check.holds, check.link, "unsupported", problem=problem)
        else:
            yield await _repeated(server, check, repeat if check.repeats else 1)


async def _absence(server: Server, api: Api) -> str:
    """Why an API cannot be checked; empty if it is there."""
    body = api.body(server.model, PROBE)
    try:
        status = (await Trial(server, api).send("POST", api.path, body)).status_code
    except httpx.HTTPError:
        return ""  # the checks say what is wrong
    return f"POST {api.path} is {status}" if status in ABSENT else ""


async def _repeated(server: Server, check: Check, repeat: int) -> Outcome:
    began, outcomes = time.monotonic(), list[Outcome]()
    while len(outcomes) < repeat and not (outcomes and outcomes[-1].state == "unsupported"):
        outcomes.append(await _once(server, check))
    first = next((outcome for outcome in outcomes if outcome.state != "passed"), outcomes[0])
    passed = sum(outcome.state == "passed" for outcome in outcomes)
    return replace(first, seconds=time.monotonic() - began, passed=passed, runs=repeat)


async def _once(server: Server, check: Check) -> Outcome:
    trial = Trial(server, check.api)
    outcome = Outcome(check.name, check.holds, check.link, "passed")
    try:
        await check.run(trial)
    except Unsupported as error:
        return replace(outcome, state="unsupported", problem=str(error))
    except (Failed, SSEError) as error:
        problem = str(error)
    except (TimeoutError, httpx.HTTPError) as error:
        problem = f"{type(error).__name__}: {error}"
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        problem = f"the response is not as expected: {error!r}"
    else:
        return outcome
    last = trial.exchange
    return replace(outcome, state="failed", problem=problem, sent=last.sent, received=last.received)
