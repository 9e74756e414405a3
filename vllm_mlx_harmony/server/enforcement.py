"""What of a request is enforced while its answer is generated, and what the server is set to.

Knows the settings, and how a turn becomes the bounds of its output: its grammar, compiled where
nobody waits for it, and its limits. Refuses to know masks and logits (`logit_mask`), and what a
grammar says (`core.grammar`).

A turn is held to what it asks for under any setting but ``off``. There, what only a grammar can
promise is refused; formats and syntaxes that the prompt tells the model of are only shown. Budgets
of reasoning and ``min_tokens`` are no matter of grammars, and hold all the same.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, replace

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.constraint import Constraint, ConstraintSpec
from vllm_mlx_harmony.core.errors import HostError, OutputError, RequestError
from vllm_mlx_harmony.core.grammar import (
    Compiled,
    Policy,
    compiled,
    grammar_of,
    prepare,
    remembered,
)
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import Turn
from vllm_mlx_harmony.server.host import Tracker

logger = logging.getLogger(__name__)

GRAMMAR_VARIABLE = "VLLM_MLX_HARMONY_GRAMMAR"
"""Environment variable: ``auto``, ``strict`` (every tool and format as if strict) or ``off``."""

BUDGET_VARIABLE = "VLLM_MLX_HARMONY_REASONING_BUDGET"
"""Environment variable: tokens of reasoning, for requests that name no number."""

REPETITIONS_VARIABLE = "VLLM_MLX_HARMONY_REPETITIONS"
"""Environment variable: how often the same text stands in a row in reasoning that is ended."""

REPETITIONS = 8


@dataclass(frozen=True, slots=True)
class Enforcement:
    """What the server is set to. ``repetitions`` 0: reasoning may repeat itself."""

    policy: Policy = Policy.AUTO
    reasoning_tokens: int | None = None
    repetitions: int = REPETITIONS


def read() -> Enforcement:
    """What the environment says. Raises ``HostError`` for a variable that cannot be."""
    word = os.environ.get(GRAMMAR_VARIABLE, "").strip().lower() or Policy.AUTO.value
    if word not in {policy.value for policy in Policy}:
        known = ", ".join(policy.value for policy in Policy)
        raise HostError(f"{GRAMMAR_VARIABLE}: {word!r} is none of {known}")
    policy = Policy(word)
    repetitions = _number(REPETITIONS_VARIABLE)
    if repetitions is None:
        repetitions = 0 if policy is Policy.OFF else REPETITIONS
    return Enforcement(policy, _number(BUDGET_VARIABLE), repetitions)


def _number(variable: str) -> int | None:
    word = os.environ.get(variable, "").strip()
    if not word:
        return None
    if not word.isascii() or not word.isdigit():
        raise HostError(f"{variable}: {word!r} is not a number")
    return int(word)


def get_ready() -> None:
    """Begins what the first request would wait a second or two for, beside the loading of a model.

    Raises ``HostError`` when grammars are wanted and there is no library for them.
    """
    if read().policy is Policy.OFF:
        return
    try:
        importlib.import_module("llguidance")
    except ImportError as error:
        raise HostError(
            f"llguidance cannot be imported ({error}): install it, or set {GRAMMAR_VARIABLE}=off"
        ) from error
    threading.Thread(target=_prepare, name="harmony-grammar", daemon=True).start()


def _prepare() -> None:
    with suppress(Exception):  # whoever needs it tries again, and says what is wrong
        prepare()


async def constraint_for(turn: Turn, names: Names, by_flag: int | None = None) -> Constraint | None:
    """What the output of ``turn``, rendered with ``names``, is held to; ``None`` for nothing.

    ``by_flag`` is the budget of reasoning that a flag of the server sets: it comes before the
    environment's. Raises ``RequestError`` for what is asked for and cannot be enforced.
    """
    wanted = read()
    if by_flag is not None:
        wanted = replace(wanted, reasoning_tokens=by_flag)
    limits = turn.limits
    grammar = None
    if wanted.policy is Policy.OFF:
        _reject_unenforceable(turn)
    else:
        if not (turn.tools or turn.answer_format or turn.prefill):
            # Its grammar is short and, but for a tenant's first request, compiled: a thread would
            # take a tenth of a request's time.
            written = grammar_of(turn, names, wanted.policy)
            grammar = None if written is None else remembered(written, turn.tenant)
        if grammar is None:
            grammar = await asyncio.to_thread(_grammar, turn, names, wanted.policy)
    requested = limits.reasoning_tokens
    strict = wanted.policy is Policy.STRICT or any(tool.strict for tool in turn.callable_tools)
    chosen = turn.tool_choice.required or turn.tool_choice.names is not None
    spec = ConstraintSpec(
        grammar=grammar,
        reasoning_tokens=wanted.reasoning_tokens if requested is None else requested,
        repetitions=wanted.repetitions,
        min_tokens=limits.min_tokens,
        answering=turn.prefill is not None,
        binding=strict or chosen or turn.answer_format is not None,
    )
    return Constraint(spec) if spec else None


def _grammar(turn: Turn, names: Names, policy: Policy) -> Compiled | None:
    grammar = grammar_of(turn, names, policy)
    if grammar is None:
        return None
    for note in grammar.notes:
        if _noted.get(note) is None:
            _noted.put(note, True, len(note))
            logger.warning("%s", note)
    return compiled(grammar, turn.tenant)


_noted: lru.ByteLRU[str, bool] = lru.ByteLRU(1 << 18)
"""What was logged already: once for each schema."""


def _reject_unenforceable(turn: Turn) -> None:
    """Raises ``RequestError`` when ``turn`` asks for what only a grammar can promise."""
    choice, requested = turn.tool_choice, turn.answer_format
    strict = next((tool for tool in turn.callable_tools if tool.strict), None)
    if choice.required:
        what, where = "a call that is required", "tool_choice"
    elif choice.names:
        what, where = "a choice among the tools", "tool_choice"
    elif strict is not None:
        what, where = f"strict arguments of tool {strict.name!r}", strict.where
    elif requested is not None and requested.syntax is not None:
        what, where = "the syntax of an answer", requested.where
    else:
        return
    problem = f"{what} cannot be enforced on this server ({GRAMMAR_VARIABLE}=off)"
    raise RequestError(problem, param=where, code="unsupported_value")


def check(constraint: Constraint | None) -> None:
    """Raises ``OutputError`` when the output is not what its caller was promised any more."""
    if constraint is not None and constraint.failure:
        raise OutputError("the answer could not be held to what was asked for: the log says why")


def account(constraint: Constraint | None, id_seed: str, tracker: Tracker) -> None:
    """Logs and counts what was decided for the model in the answer ``id_seed``, which has ended."""
    reason = constraint.reasoning_ended_by if constraint is not None else ""
    if constraint is None or not reason:
        return
    logger.info(
        "%s: reasoning ended by %s, %d tokens", id_seed, reason, constraint.reasoning_tokens
    )
    tracker.reasoning_ended(reason)
