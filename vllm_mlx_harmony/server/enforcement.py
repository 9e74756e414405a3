"""Constraints on the output of a turn: grammars, reasoning budgets and ``min_tokens``.

Grammars are compiled unless the policy is ``off``. With ``off``, requests for what only a grammar
can guarantee are rejected; formats and syntaxes are only described in the prompt. Reasoning budgets
and ``min_tokens`` need no grammar and always apply.

A grammar that contains a strict schema or a syntax of a client is first tried in a helper process
(`grammar_checks`). If it cannot be compiled, a weaker grammar is used (`grammars_of`), or the
request is rejected if it asked for strictness. Other grammars need no helper.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.constraint import Constraint, ConstraintSpec
from vllm_mlx_harmony.core.errors import HostError, RequestError
from vllm_mlx_harmony.core.grammar import (
    Check,
    Compiled,
    Grammar,
    NotCompiled,
    Policy,
    compile_grammar,
    find_compiled,
    grammar_of,
    grammars_of,
    prepare,
)
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.reasoning import answering_budget
from vllm_mlx_harmony.core.render import expected_headers
from vllm_mlx_harmony.core.turn import Limits, Turn
from vllm_mlx_harmony.server.grammar_checks import (
    CheckUnavailable,
    GrammarCheck,
    check_for,
)
from vllm_mlx_harmony.server.settings import ServerSettings, variable

_R = TypeVar("_R")

logger = logging.getLogger(__name__)

GRAMMAR_VARIABLE = variable("grammar")

REPETITIONS = 32


@dataclass(frozen=True, slots=True)
class Enforcement:
    """The server's settings. ``repetitions`` 0: no limit. ``budgets``: without one, a small
    ``max_tokens`` sets a reasoning budget."""

    policy: Policy = Policy.AUTO
    reasoning_tokens: int | None = None
    repetitions: int = REPETITIONS
    budgets: bool = True

    @classmethod
    def of(cls, settings: ServerSettings) -> Enforcement:
        policy, repetitions = settings.grammar, settings.repetitions
        if repetitions is None:
            repetitions = 0 if policy is Policy.OFF else REPETITIONS
        budget = settings.reasoning_budget
        if budget == "off":
            return cls(policy, None, repetitions, budgets=False)
        return cls(policy, budget, repetitions, budgets=policy is not Policy.OFF)

    def reasoning_budget(self, limits: Limits, *, can_call: bool) -> int | None:
        """The reasoning budget of a turn, in which the model may or may not call a tool.

        Where it may, a small ``max_tokens`` sets none: without reasoning it would answer where it
        should call.
        """
        if limits.reasoning_tokens is not None:
            return limits.reasoning_tokens
        small = answering_budget(limits) if self.budgets and not can_call else None
        budgets = (self.reasoning_tokens, small)
        return min((each for each in budgets if each is not None), default=None)


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

    def start() -> None:
        with suppress(Exception):  # the first request that needs it tries again and reports it
            prepare()

    threading.Thread(target=start, name="harmony-grammar", daemon=True).start()


UnlessDisconnected: TypeAlias = "Callable[[Awaitable[Any]], Awaitable[Any]]"
"""``Received.unless_disconnected``."""


async def constraint_for(
    turn: Turn,
    names: Names,
    wanted: Enforcement,
    unless_disconnected: UnlessDisconnected | None = None,
) -> Constraint | None:
    """The constraint of the output of ``turn``, rendered with ``names``; ``None`` if unconstrained.

    ``unless_disconnected`` watches the client while a new grammar is compiled.

    Raises ``RequestError`` for what cannot be enforced, ``HostError`` 503 if that cannot be checked
    now, and ``ClientDisconnect``.
    """
    limits = turn.limits
    declared = turn.callable_tools or turn.builtin_namespaces or turn.namespaces
    grammar = None
    if wanted.policy is Policy.OFF:
        _reject_unenforceable(turn)
    else:
        if not (declared or turn.answer_format or turn.prefill):
            # The grammar is short and, after the tenant's first request, already compiled. A thread
            # would add a tenth to the request's time.
            written = grammar_of(turn, names, wanted.policy)
            grammar = None if written is None else find_compiled(written, turn.tenant)
        if grammar is None:
            request = check_for(turn.tenant)
            compiling = partial(_compiled, turn, names, wanted.policy, request)
            try:
                grammar = await _in_thread(compiling, request, unless_disconnected)
            except CheckUnavailable as error:
                problem = f"the grammar for these tools and formats cannot be checked now: {error}"
                raise HostError(problem, retry_after=1) from error
    strict = _is_strict(turn, wanted.policy)
    chosen = turn.tool_choice.required or turn.tool_choice.names is not None
    spec = ConstraintSpec(
        grammar=grammar,
        reasoning_tokens=wanted.reasoning_budget(limits, can_call=bool(declared)),
        repetitions=wanted.repetitions,
        min_tokens=limits.min_tokens,
        answering=turn.prefill is not None,
        names=names,
        binding=strict or chosen,
        headers=expected_headers(names, turn.tenant),
    )
    return Constraint(spec) if spec else None


def _is_strict(turn: Turn, policy: Policy) -> bool:
    """Whether ``turn`` has strict tools or a strict format, which must be enforced or rejected."""
    format_ = turn.answer_format
    return (
        policy is Policy.STRICT
        or any(tool.strict for tool in turn.callable_tools)
        or (format_ is not None and format_.strict)
    )


def _compiled(turn: Turn, names: Names, policy: Policy, check: GrammarCheck) -> Compiled | None:
    """The strongest grammar of ``turn`` that can be compiled; ``None`` if none can.

    Raises ``RequestError`` if the turn is strict and its grammar cannot be compiled, and where a
    call is required; ``CheckUnavailable`` if a strict one cannot be checked now.
    """
    strict = _is_strict(turn, policy)
    problem = "it is too large"
    # Usually every part of a client compiles: so only the whole is tried, in one question. If that
    # fails, each part by itself. If that fails, or cannot be known in time, none of them is used.
    ways: dict[str, Check] = {
        "assumed": lambda _: "",
        "checked": check,
        "refused": lambda _: "it cannot be checked now",
    }
    for way, check_part in ways.items():
        untrusted = False
        try:
            grammars = grammars_of(turn, names, policy, check=check_part, cache=way)
            # Those whose parts the helper process is asked for keep nobody else waiting.
            for grammar in grammars if way == "checked" else _written(check, grammars):
                found = _tried(grammar, turn, check)
                if isinstance(found, Compiled):
                    return found
                problem, untrusted = found, grammar.untrusted
                if untrusted and way == "assumed":
                    break
        except CheckUnavailable as error:
            if strict or check.cancelled:
                raise
            problem, untrusted = str(error), True
        if not untrusted or (strict and way == "checked"):
            break
    if strict:
        where = "tools" if turn.callable_tools else "response_format"
        refusal = f"the grammar for these tools and formats cannot be used: {problem}"
        raise RequestError(refusal, param=where)
    if turn.tool_choice.required:
        raise RequestError(f"tool_choice cannot be enforced: {problem}", param="tool_choice")
    many = len(turn.callable_tools)
    _note(f"no grammar is enforced for a request with {many} tools: {problem}")
    return None


def _written(check: GrammarCheck, grammars: Iterator[Grammar]) -> Iterator[Grammar]:
    """``grammars``, each written in turn."""
    while True:
        with check.turn():
            grammar = next(grammars, None)
        if grammar is None:
            return
        yield grammar


def _tried(grammar: Grammar, turn: Turn, check: GrammarCheck) -> Compiled | str:
    """``grammar``, compiled, or why it cannot be. Raises ``CheckUnavailable``."""
    found = find_compiled(grammar, turn.tenant)
    if found is None:
        size = 0
        if grammar.untrusted:
            verdict = check.verdict(grammar.text, turn.prefill or "")
            if verdict.problem:
                return verdict.problem
            size = verdict.size
        with check.turn():
            try:
                found = compile_grammar(grammar, turn.tenant, size)
            except NotCompiled as error:
                return error.message
    for note in grammar.notes:
        _note(note)
    return found


_threads = ThreadPoolExecutor(max_workers=256, thread_name_prefix="harmony-grammar")
"""Most of them wait for the helper process, so asyncio's few default threads are not used."""

WATCH_AFTER = 0.1
"""Seconds after which the client is watched for a disconnect."""


async def _in_thread(
    compiling: Callable[[], _R], check: GrammarCheck, unless_disconnected: UnlessDisconnected | None
) -> _R:
    """Calls ``compiling`` in a thread; cancelling this also cancels ``check``.

    Raises ``ClientDisconnect``.
    """
    coming = asyncio.get_running_loop().run_in_executor(_threads, compiling)
    # A cancelled trial may raise when the request is gone; asyncio would log that as unretrieved.
    coming.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        done, _ = await asyncio.wait({coming}, timeout=WATCH_AFTER)
        if not done and unless_disconnected is not None:
            await unless_disconnected(asyncio.wait({coming}))
        return await coming
    finally:
        check.cancel()


async def compile_untrusted(
    text: str, tenant: str, unless_disconnected: UnlessDisconnected | None = None
) -> Compiled:
    """Tries and compiles the grammar ``text`` of a gateway.

    Raises ``RequestError`` if it cannot be compiled, ``HostError`` 503 if that cannot be checked
    now, and ``ClientDisconnect``.
    """
    check = check_for(tenant)
    grammar = Grammar(text, untrusted=True)

    def compile_it() -> Compiled:
        try:
            found = _tried(grammar, Turn((), tenant=tenant), check)
        except CheckUnavailable as error:
            raise HostError(f"the grammar cannot be checked now: {error}", retry_after=1) from error
        if isinstance(found, str):
            raise RequestError(f"the grammar cannot be enforced: {found}", param="grammar")
        return found

    return await _in_thread(compile_it, check, unless_disconnected)


def _note(note: str) -> None:
    """Logs ``note`` as a warning, once."""
    if _noted.get(note) is None:
        _noted.put(note, True, len(note))
        logger.warning("%s", note)


_noted: lru.ByteLRU[str, bool] = lru.ByteLRU(1 << 18)
"""Notes that have been logged."""


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
