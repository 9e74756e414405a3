"""Loop checks: a tool loop of 20 turns, as agents have it."""

from __future__ import annotations

from vllm_mlx_harmony.verify.apis import LENIENT
from vllm_mlx_harmony.verify.cases import schema
from vllm_mlx_harmony.verify.checks import Check
from vllm_mlx_harmony.verify.trial import Trial
from vllm_mlx_harmony.verify.values import (
    Ask,
    ReceivedAnswer,
    Result,
    Tool,
    Unsupported,
    Usage,
    require,
)
from vllm_mlx_harmony.verify.wire import CACHING, RAW_COT

TURNS = 20
PAGE = Tool("read_page", "The text of a page.", schema(page="integer"))
PROMPT = (
    f"Read the pages 1 to {TURNS} of the report with read_page: one page at a time, in order, and "
    "nothing else between. When you have read all of them, answer with the code of every page."
)
FILLER = "Nothing of interest was found in this part of the archive. " * 20
MAX_COMPUTATIONS = 2.0
"""How often a token of the last prompt may have been computed, on average: once if every prompt
continues the one before, about 11 times if nothing is reused."""


def code(page: int) -> str:
    """Four digits that the model cannot guess."""
    return str(1000 + page * 7919 % 9000)


def text(page: int) -> str:
    return f"Page {page}. {FILLER}The code of page {page} is {code(page)}."


async def remembers(trial: Trial) -> None:
    messages: tuple[str | ReceivedAnswer | Result, ...] = (PROMPT,)
    usages: list[Usage] = []
    trial.server.loops[trial.api.name] = usages
    for page in range(1, TURNS + 2):
        answer = await trial.streamed(Ask(messages, tools=(PAGE,)))
        usages.append(answer.usage)
        if not answer.calls:
            break
        results = (Result(call, text(page)) for call in answer.calls)
        messages = (*messages, answer, *results)
    require(len(usages) == TURNS + 1, f"the loop ended after {len(usages)} turns, not {TURNS + 1}")
    forgotten = [page for page in range(1, TURNS + 1) if code(page) not in answer.text]
    require(
        not forgotten, f"the codes of the pages {forgotten} are missing in {answer.text!r:.300}"
    )


async def cached(trial: Trial) -> None:
    """Of each prompt, all but the last result and call has been computed before."""
    if trial.api.name not in trial.server.loops:
        await remembers(trial)
    usages = trial.server.loops[trial.api.name]
    if all(usage.cached is None for usage in usages):
        raise Unsupported("usage does not count cached tokens")
    computed = sum(usage.prompt - (usage.cached or 0) for usage in usages)
    ratio = computed / usages[-1].prompt
    few = ratio <= MAX_COMPUTATIONS
    require(few, f"{computed} tokens were computed for a last prompt of {usages[-1].prompt}")


ROWS = (
    ("remembers", "after a tool loop of 20 turns, the model knows all results", RAW_COT, remembers),
    ("cached", "in a tool loop, earlier prompts are not computed again", CACHING, cached),
)

CHECKS = tuple(
    Check(f"loop.{api.name}.{name}", api, holds, link, run)
    for api in LENIENT
    for name, holds, link, run in ROWS
)
