"""Constraints on the output of a turn: grammars, reasoning budgets and ``min_tokens``.

Grammars are compiled unless the policy is ``off``. With ``off``, requests for what only a grammar
can guarantee are rejected; formats and syntaxes are only described in the prompt. Reasoning budgets
and ``min_tokens`` need no grammar and always apply.

A grammar that contains a strict schema or a syntax of a client is first tried in a helper process
(`grammar_checks`). If it cannot be compiled, a weaker grammar is used (`weakenings`), or the
request is rejected if it asked for strictness. Other grammars need no helper.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TypeVar

from vllm_mlx_harmony.core.constraint import Constraint, ConstraintSpec
from vllm_mlx_harmony.core.errors import HostError, RequestError
from vllm_mlx_harmony.core.grammar import (
    CheckUnavailable,
    Compiled,
    Grammar,
    NotCompiled,
    Policy,
    compile_grammar,
    find_compiled,
    grammar_of,
    is_strict,
    prepare,
    weakenings,
)
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.render import expected_headers
from vllm_mlx_harmony.core.turn import Turn
from vllm_mlx_harmony.server.grammar_checks import POOL, GrammarCheck
from vllm_mlx_harmony.server.settings import Enforcement, variable
from vllm_mlx_harmony.tasks import in_thread

_R = TypeVar("_R")

logger = logging.getLogger(__name__)

GRAMMAR_VARIABLE = variable("grammar")


def warm_up(policy: Policy) -> None:
    """Prepares llguidance while the model is loaded: the first request would wait for it.

    Raises ``HostError`` if grammars are enabled and llguidance cannot be imported.
    """
    if policy is Policy.OFF:
        return
    try:
        importlib.import_module("llguidance")
    except ImportError as error:
        raise HostError(
            f"llguidance cannot be imported ({error}): install it, or set {GRAMMAR_VARIABLE}=off"
        ) from error
    threading.Thread(target=prepare, name="harmony-grammar", daemon=True).start()


async def constraint_for(turn: Turn, names: Names, enforcement: Enforcement) -> Constraint | None:
    """The constraint of the output of ``turn``, rendered with ``names``; ``None`` if unconstrained.

    Raises ``RequestError`` for what cannot be enforced, and ``HostError`` 503 if that cannot be
    checked now.
    """
    declared = turn.callable_tools or turn.builtin_namespaces or turn.namespaces
    grammar = None
    if enforcement.policy is Policy.OFF:
        _reject_unenforceable(turn)
    else:
        if not (declared or turn.answer_format or turn.prefill):
            # The grammar is short and, after the tenant's first request, already compiled. A thread
            # would add a tenth to the request's time.
            written = grammar_of(turn, names, enforcement.policy)
            grammar = None if written is None else find_compiled(written, turn.tenant)
        if grammar is None:
            compiling = partial(_compile_strongest, turn, names, enforcement.policy)
            grammar = await _with_check(compiling, turn.tenant)
    chosen = turn.tool_choice.required or turn.tool_choice.names is not None
    if names.aliases or names.server:  # a first request encodes the names of all tools
        headers = await in_thread(expected_headers, names, turn.tenant)
    else:
        headers = expected_headers(names, turn.tenant)
    spec = ConstraintSpec(
        grammar=grammar,
        reasoning_tokens=enforcement.reasoning_budget(turn.limits, can_call=bool(declared)),
        repetitions=enforcement.repetitions,
        min_tokens=turn.limits.min_tokens,
        answering=turn.prefill is not None,
        names=names,
        binding=is_strict(turn, enforcement.policy) or chosen,
        headers=headers,
    )
    return Constraint(spec) if spec else None


async def compile_untrusted(text: str, tenant: str) -> Compiled:
    """Tries and compiles the grammar ``text`` of a gateway.

    Raises ``RequestError`` if it cannot be compiled, and ``HostError`` 503 if that cannot be
    checked now.
    """

    def compiling(check: GrammarCheck) -> Compiled:
        try:
            return _compile(Grammar(text, trials=((),)), Turn((), tenant=tenant), check)
        except NotCompiled as error:
            problem = f"the grammar cannot be enforced: {error.message}"
            raise RequestError(problem, param="grammar") from error

    return await _with_check(compiling, tenant)


def _compile_strongest(
    turn: Turn, names: Names, policy: Policy, check: GrammarCheck
) -> Compiled | None:
    """The strongest grammar of ``turn`` that can be compiled; ``None`` if none can.

    Raises ``RequestError`` if the turn is strict and its grammar cannot be compiled, and where a
    call is required; ``CheckUnavailable`` if a strict one cannot be checked now.
    """
    strict = is_strict(turn, policy)
    problem = "it is too large"
    grammars = weakenings(turn, names, policy, check)
    with check.writing():  # the others are rarely needed, and ask the helper process
        strongest = next(grammars, None)
    for grammar in filter(None, chain([strongest], grammars)):
        try:
            return _compile(grammar, turn, check)
        except NotCompiled as error:
            problem = error.message
        except CheckUnavailable as error:
            if strict:
                raise
            problem = str(error)
    if strict:
        where = "tools" if turn.callable_tools else "response_format"
        refusal = f"the grammar for these tools and formats cannot be used: {problem}"
        raise RequestError(refusal, param=where)
    if turn.tool_choice.required:
        raise RequestError(f"tool_choice cannot be enforced: {problem}", param="tool_choice")
    many = len(turn.callable_tools)
    logger.warning("no grammar is enforced for a request with %d tools: %s", many, problem)
    return None


def _compile(grammar: Grammar, turn: Turn, check: GrammarCheck) -> Compiled:
    """``grammar``, compiled. Raises ``NotCompiled`` and ``CheckUnavailable``."""
    if (compiled := find_compiled(grammar, turn.tenant)) is not None:
        return compiled
    size = 0
    if grammar.trials:
        problem, size = check.verdict(grammar.text, grammar.trials)
        if problem:
            raise NotCompiled(problem)
    with check.writing():
        compiled = compile_grammar(grammar, turn.tenant, size)
    for note in grammar.notes:
        logger.warning("%s", note)
    return compiled


async def _with_check(compiling: Callable[[GrammarCheck], _R], tenant: str) -> _R:
    """Calls ``compiling`` in a thread, with a check of the tenant's grammars. Raises ``HostError``
    503 for ``CheckUnavailable``."""
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(POOL.threads, compiling, GrammarCheck(tenant))
    except CheckUnavailable as error:
        problem = f"the grammar for these tools and formats cannot be checked now: {error}"
        raise HostError(problem, retry_after=1) from error


def _reject_unenforceable(turn: Turn) -> None:
    """Raises ``RequestError`` if ``turn`` asks for what only a grammar can guarantee."""
    choice, requested = turn.tool_choice, turn.answer_format
    strict = next((tool for tool in turn.callable_tools if tool.strict), None)
    if choice.required:
        what, where = "a required call", "tool_choice"
    elif choice.names:
        what, where = "a choice among the tools", "tool_choice"
    elif strict is not None:
        what, where = f"strict arguments of tool {strict.name!r}", strict.where
    elif requested is not None and requested.syntax is not None:
        what, where = "the syntax of an answer", requested.where
    else:
        return
    problem = f"{what} cannot be enforced: grammars are disabled ({GRAMMAR_VARIABLE}=off)"
    raise RequestError(problem, param=where, code="unsupported_value")
