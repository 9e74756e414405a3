"""What of a request is enforced while its answer is generated, and what the server is set to.

A turn is held to what it asks for under any setting but ``off``. There, what only a grammar can
promise is refused; formats and syntaxes that the prompt tells the model of are only shown. Budgets
of reasoning and ``min_tokens`` are no matter of grammars, and hold all the same.

Every text that has something of a client's in it is tried in a helper process (`grammar_checks`)
before this one compiles it. What cannot be compiled there is left out, or refused where strictness
was asked for.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.constraint import Constraint, ConstraintSpec
from vllm_mlx_harmony.core.errors import HostError, OutputError, RequestError
from vllm_mlx_harmony.core.grammar import (
    Compiled,
    Grammar,
    NotCompiled,
    Policy,
    compiled,
    grammar_of,
    prepare,
    remembered,
)
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import ResponseFormat, Tool, Turn
from vllm_mlx_harmony.server.grammar_checks import (
    GrammarCheck,
    Unchecked,
    check_for,
    checks,
)
from vllm_mlx_harmony.server.host import Tracker

_R = TypeVar("_R")

logger = logging.getLogger(__name__)

GRAMMAR_VARIABLE = "VLLM_MLX_HARMONY_GRAMMAR"
"""Environment variable: ``auto``, ``strict`` (every tool and format as if strict) or ``off``."""

BUDGET_VARIABLE = "VLLM_MLX_HARMONY_REASONING_BUDGET"
"""Environment variable: tokens of reasoning, for requests that name no number."""

REPETITIONS_VARIABLE = "VLLM_MLX_HARMONY_REPETITIONS"
"""Environment variable: how often the same text stands in a row in reasoning that is ended."""

REPETITIONS = 32


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
        checks().start()
    with suppress(Exception):
        prepare()


UnlessGone: TypeAlias = "Callable[[Awaitable[Any]], Awaitable[Any]]"
"""What is awaited; ``None`` when the client has gone, and then it is cancelled."""


async def constraint_for(
    turn: Turn, names: Names, by_flag: int | None = None, unless_gone: UnlessGone | None = None
) -> Constraint | None:
    """What the output of ``turn``, rendered with ``names``, is held to; ``None`` for nothing.

    ``by_flag`` is the budget of reasoning that a flag of the server sets: it comes before the
    environment's. ``unless_gone`` watches the client where a new grammar takes long.

    Raises ``RequestError`` for what is asked for and cannot be enforced, ``HostError`` 503 where
    that cannot be found out now, and ``ClientDisconnect``.
    """
    wanted = read()
    if by_flag is not None:
        wanted = replace(wanted, reasoning_tokens=by_flag)
    limits = turn.limits
    grammar = None
    if wanted.policy is Policy.OFF:
        _reject_unenforceable(turn)
    else:
        if not (turn.callable_tools or turn.namespaces or turn.answer_format or turn.prefill):
            # Its grammar is short and, but for a tenant's first request, compiled: a thread would
            # take a tenth of a request's time.
            with suppress(Unchecked):
                written = grammar_of(turn, names, wanted.policy, check=_unknown)
                grammar = None if written is None else remembered(written, turn.tenant)
        if grammar is None:
            request = check_for(turn.tenant)
            compiling = partial(_grammar, turn, names, wanted.policy, request)
            grammar = await _in_thread(compiling, request, unless_gone)
    requested = limits.reasoning_tokens
    strict = _is_strict(turn, wanted.policy)
    chosen = turn.tool_choice.required or turn.tool_choice.names is not None
    spec = ConstraintSpec(
        grammar=grammar,
        reasoning_tokens=wanted.reasoning_tokens if requested is None else requested,
        repetitions=wanted.repetitions,
        min_tokens=limits.min_tokens,
        answering=turn.prefill is not None,
        binding=strict or chosen,
    )
    return Constraint(spec) if spec else None


def _is_strict(turn: Turn, policy: Policy) -> bool:
    """Whether anything of ``turn`` is promised, so that it is refused where it cannot be had."""
    format_ = turn.answer_format
    return (
        policy is Policy.STRICT
        or any(tool.strict for tool in turn.callable_tools)
        or (format_ is not None and format_.strict)
    )


def _grammar(turn: Turn, names: Names, policy: Policy, check: GrammarCheck) -> Compiled | None:
    """The compiled grammar of ``turn``. Where it cannot be had, and is not promised, that of any
    arguments for the same tools."""
    try:
        grammar = _written(turn, names, policy, check)
        if grammar is None:
            return None
        for note in grammar.notes:
            _note(note)
        known = remembered(grammar, turn.tenant) or _checked(grammar, turn, check)
    except Unchecked as error:
        if check.cancelled:
            raise
        if _is_strict(turn, policy):
            problem = f"tools and formats cannot be checked now: {error}"
            raise HostError(problem, retry_after=1) from error
        problem = str(error)
    else:
        if isinstance(known, Compiled):
            return known
        problem = known
        if _is_strict(turn, policy):
            where = "tools" if turn.callable_tools else "response_format"
            refusal = f"tools and formats cannot be enforced: {problem}"
            raise RequestError(refusal, param=where)
    return _loosened_grammar(turn, names, policy, check, problem)


def _loosened_grammar(
    turn: Turn, names: Names, policy: Policy, check: GrammarCheck, problem: str
) -> Compiled | None:
    """The grammar of ``turn`` with any JSON object as the arguments of the larger half of its
    tools, or of all; ``None`` where that is too large as well.

    Raises ``RequestError`` when a call is required that cannot be had, because of ``problem``.
    """
    tools = sorted(turn.callable_tools, key=lambda tool: -len(str(tool.parameters)))
    for count in sorted({(len(tools) + 1) // 2, len(tools)}):
        loose = _loosened(turn, {tool.name for tool in tools[:count]})
        try:
            if count < len(tools):
                grammar = _written(loose, names, policy, check)
                found = grammar and _checked(grammar, turn, check)
            else:  # there is nothing of a client's in it but names
                grammar = grammar_of(loose, names)
                small = grammar is not None and len(grammar.text) <= LONGEST
                found = compiled(grammar, turn.tenant) if grammar and small else None
        except (NotCompiled, Unchecked):
            continue
        if isinstance(found, Compiled):
            _note(f"the arguments of {count} of {len(tools)} tools are any object: {problem}")
            return found
    if turn.tool_choice.required:
        raise RequestError(f"a call cannot be required: {problem}", param="tool_choice")
    _note(f"{len(tools)} tools are too large for any grammar: {problem}")
    return None


LONGEST = 2**20
"""Characters of a grammar that names tools without their schemas."""


def _written(turn: Turn, names: Names, policy: Policy, check: GrammarCheck) -> Grammar | None:
    """The grammar of ``turn``, of which every part can be compiled. Raises ``Unchecked``.

    As a rule all can be: then one question is enough, and it is asked of a grammar that was written
    as if every answer was yes. What is remembered of that is kept apart from what is known.
    """
    asked: list[str] = []

    def assumed(text: str) -> str:
        asked.append(text)
        return ""

    supposed = replace(turn, tenant=f"{turn.tenant} supposed")
    grammar = grammar_of(supposed, names, policy, check=assumed)
    if grammar is None or remembered(grammar, turn.tenant) is not None:
        return grammar
    parts = [(text, "") for text in asked]
    if check.try_all([*parts, (grammar.text, turn.prefill or "")]):
        return grammar
    return grammar_of(turn, names, policy, check=check)


def _checked(grammar: Grammar, turn: Turn, check: GrammarCheck) -> Compiled | str:
    """``grammar``, compiled once it has been tried; or why it cannot be. Raises ``Unchecked``."""
    verdict = check.verdict(grammar.text, turn.prefill or "")
    if verdict.problem:
        return verdict.problem
    with check.compiling(verdict):
        try:
            return compiled(grammar, turn.tenant, verdict.size)
        except NotCompiled as error:
            return error.message


def _loosened(turn: Turn, names: Collection[str]) -> Turn:
    """``turn``, with any arguments for those of its tools that have ``names`` and for all that the
    server runs, and any JSON as its answer."""

    def loose(tool: Tool) -> Tool:
        parameters = tool.parameters if tool.syntax is not None else {"type": "object"}
        return replace(tool, parameters=parameters, strict=False, syntax=None)

    asked = turn.answer_format
    return replace(
        turn,
        messages=(),
        tools=tuple(loose(tool) if tool.name in names else tool for tool in turn.callable_tools),
        response_format=None
        if asked is None or asked.syntax is not None
        else ResponseFormat(where=asked.where),
        namespaces=tuple(
            replace(each, tools=tuple(map(loose, each.tools))) for each in turn.namespaces
        ),
    )


def _unknown(_: str) -> str:
    raise Unchecked("nothing is tried on the event loop")


_threads = ThreadPoolExecutor(max_workers=256, thread_name_prefix="harmony-grammar")
"""Most of them only wait. Not asyncio's own, where others would wait for one of a few."""

SOON = 0.1
"""Seconds after which a request is looked at: has its client gone?"""


async def _in_thread(
    compiling: Callable[[], _R], check: GrammarCheck, unless_gone: UnlessGone | None
) -> _R:
    """What ``compiling`` gives, in a thread of its own. Its trials end when it is cancelled.

    Raises ``ClientDisconnect``.
    """
    coming = asyncio.get_running_loop().run_in_executor(_threads, compiling)
    # A cancelled trial raises after the request has gone: asyncio would log that as unretrieved.
    coming.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        done, _ = await asyncio.wait({coming}, timeout=SOON)
        if not done and unless_gone is not None:
            await unless_gone(asyncio.wait({coming}))
            if not coming.done():
                raise ClientDisconnect
        return await coming
    finally:
        check.cancel()


async def checked(text: str, tenant: str, unless_gone: UnlessGone | None = None) -> Compiled:
    """The grammar ``text`` of a gateway, compiled once it has been tried.

    Raises ``RequestError`` when it cannot be, ``HostError`` 503 when that cannot be found out now,
    and ``ClientDisconnect``.
    """
    check = check_for(tenant)
    grammar = Grammar(text)

    def compile_it() -> Compiled:
        try:
            found = remembered(grammar, tenant) or _checked(grammar, Turn(()), check)
        except Unchecked as error:
            raise HostError(f"the grammar cannot be checked now: {error}", retry_after=1) from error
        if isinstance(found, str):
            raise RequestError(f"the grammar cannot be enforced: {found}", param="grammar")
        return found

    return await _in_thread(compile_it, check, unless_gone)


def _note(note: str) -> None:
    """Logs ``note``, once for each schema."""
    if _noted.get(note) is None:
        _noted.put(note, True, len(note))
        logger.warning("%s", note)


_noted: lru.ByteLRU[str, bool] = lru.ByteLRU(1 << 18)
"""What was logged already."""


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


def account(constraint: Constraint, id_seed: str, tracker: Tracker) -> None:
    """Logs and counts that reasoning was ended in an output of the answer ``id_seed``."""
    reason = constraint.reasoning_ended_by
    logger.info(
        "%s: reasoning ended by %s, %d tokens", id_seed, reason, constraint.reasoning_tokens
    )
    tracker.reasoning_ended(reason)
