"""The grammar of a turn in llguidance's Lark: its messages, their headers, and their bodies.

Headers are written here; bodies come from `any_order`, `strict` and `escaped` (the syntax of a
freeform tool).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_mlx_harmony.core import lru, vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar import any_order, escaped
from vllm_mlx_harmony.core.grammar.any_order import NOTHING, OBJECT_RULES, Rules, rules_of
from vllm_mlx_harmony.core.grammar.strict import (
    Check,
    CheckUnavailable,
    compile_error,
    strict_schema,
)
from vllm_mlx_harmony.core.header import CHANNELS, NOT_TOOLS
from vllm_mlx_harmony.core.names import FUNCTIONS, Names
from vllm_mlx_harmony.core.turn import BROWSER, PYTHON, ResponseFormat, Syntax, Tool, Turn

MAX_TEXT = 2**20
"""Characters of the longest grammar that is compiled."""

MAX_SCHEMAS = 500_000
"""Characters of the rules of all schemas in it."""


class Policy(StrEnum):
    """How much is enforced; the value is the word in the server's setting.

    ``AUTO`` enforces schemas as far as possible, and strict ones completely or not at all.
    ``STRICT`` treats every tool and format as if its caller had asked for ``strict``.
    """

    AUTO = "auto"
    STRICT = "strict"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of one turn. Hashable, so that it can serve as a cache key.

    ``text`` is llguidance's: Lark, or a list of grammars in JSON. ``prefill_ids`` are those of
    the message body that the prompt already contains; they are fed to the matcher first. ``notes``
    are sentences about what could not be enforced, one for each schema.

    Each of ``trials`` is the beginning of an output that continues with a strict schema, a regular
    expression or a grammar of the client. Any of these can bring llguidance down, when it is
    compiled or when output reaches it. All else that a client puts into the grammar is names and
    texts.
    """

    text: str
    prefill_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    trials: tuple[tuple[int, ...], ...] = ()

    @property
    def without_analysis(self) -> str:
        """The grammar after reasoning was cut short: another analysis message is not allowed.

        For engines that enforce grammars themselves.
        """
        return self.text.replace(_ANALYSIS, f"analysis: {NOTHING}\nblank_analysis: {NOTHING}\n")


_START, _END, _MESSAGE, _CHANNEL, _CONSTRAIN, _CALL, _RETURN = (
    f"<[{token}]>"
    for token in (
        vocab.START,
        vocab.END,
        vocab.MESSAGE,
        vocab.CHANNEL,
        vocab.CONSTRAIN,
        vocab.CALL,
        vocab.RETURN,
    )
)

_ANALYSIS = f"""\
analysis: {_CHANNEL} "analysis" {_MESSAGE} words {_END}
blank_analysis: {_CHANNEL} "analysis" {_MESSAGE} blank {_END}
"""

_COMMON = f"""\
next: {_START} "assistant"
{_ANALYSIS}\
preamble: {_CHANNEL} "commentary" {_MESSAGE} words {_END}
blank_preamble: {_CHANNEL} "commentary" {_MESSAGE} blank {_END}
type: " "? {_CONSTRAIN} ("json" | "code")
typed: " json" | " code" | type
channel: {" | ".join(f'"{name}"' for name in sorted(CHANNELS))}
text: TEXT
TEXT: /(?s:.*)/
words: WORDS
WORDS: /(?s:.*\\S.*)/
blank: BLANK
BLANK: /\\s*/
"""


def grammar_of(
    turn: Turn, names: Names, policy: Policy = Policy.AUTO, *, check: Check = compile_error
) -> Grammar | None:
    """The strongest grammar of what may follow the prompt of ``turn``; ``None`` if anything may.

    ``check`` tries clients' parts: strict schemas and syntaxes. Otherwise like `weakenings`.
    """
    if policy is Policy.OFF:
        return None
    return next(_GrammarWriter(turn, names, policy, check, "checked").grammars(), None)


def weakenings(
    turn: Turn, names: Names, policy: Policy = Policy.AUTO, check: Check = compile_error
) -> Iterator[Grammar]:
    """Yields grammars of what may follow the prompt of ``turn``, each weaker than the one before
    (semantics C4). Use the first one that llguidance compiles.

    1. Nothing is weakened. Usually all of a client's parts (strict schemas and syntaxes) compile,
       so they are not tried one by one.
    2. Parts that ``check`` rejects are left out, or are errors that name the keyword if they are
       strict.
    3. Any JSON object is accepted in place of schemas that are not strict: first of the largest
       ones, as many as exceed `MAX_SCHEMAS`, then of all. Then any text for all.
    4. All of a client's parts are left out, unless one is strict. This also follows if ``check``
       raises `CheckUnavailable`.

    Yields nothing if anything may follow, and if all are too large. ``names`` are those that the
    turn was rendered with. A schema that is not cached takes up to some milliseconds, so this is
    not for an event loop. What ``check`` finds is cached, by tenant.

    Raises ``RequestError`` naming the tool and the keyword if a strict schema or a syntax cannot be
    enforced, and ``RequestError`` naming ``tool_choice`` if a call is required and there is nothing
    to call; ``CheckUnavailable`` if a part is strict.
    """
    if policy is Policy.OFF:
        return
    written = _GrammarWriter(turn, names, policy, lambda _: "", "assumed").grammars()
    strongest = next(written, None)
    if strongest is not None:
        yield strongest
        if not strongest.trials:
            yield from written
            return
    try:
        yield from _GrammarWriter(turn, names, policy, check, "checked").grammars()
    except CheckUnavailable:
        if is_strict(turn, policy):
            raise
    if not is_strict(turn, policy):
        unavailable = "it cannot be checked now"
        yield from _GrammarWriter(turn, names, policy, lambda _: unavailable, "none").grammars()


def is_strict(turn: Turn, policy: Policy) -> bool:
    """Whether ``turn`` has strict tools or a strict format, which must be enforced or rejected."""
    parts = (*turn.callable_tools, turn.answer_format)
    return policy is Policy.STRICT or any(part is not None and part.strict for part in parts)


class _GrammarWriter:
    """``cache`` is the name under which what ``check`` finds is cached."""

    def __init__(self, turn: Turn, names: Names, policy: Policy, check: Check, cache: str) -> None:
        self._turn = turn
        self._owner = f"{turn.tenant} {cache}"
        self._check = check
        self._names = names
        self._all_strict = policy is Policy.STRICT
        self._rules: list[str] = []
        self._notes: list[str] = []
        self._trials: list[tuple[int, ...]] = []
        # The rules of JSON in any order, which become ``json_0``, ``json_1``, …, each with its
        # name in notes. They may be weakened at the end, so they are not among ``_rules`` yet.
        self._values: list[tuple[str, Rules]] = []

    def grammars(self) -> Iterator[Grammar]:
        prefill_ids: tuple[int, ...] = ()
        turn = self._turn
        if turn.prefill is None:
            self.turn_rules()
        elif turn.tool_choice.required:
            raise RequestError(
                "tool_choice requires a call, but the last message already begins the answer",
                param="tool_choice",
            )
        else:
            self.rule("start", f"body {_RETURN}")
            prefill_ids = tuple(vocab.encode(turn.prefill))
            if _is_clients(self.body(turn.answer_format)):
                self._trials.append(prefill_ids)
        strongest = [rules for _, rules in self._values]
        for values in self.weakened(strongest):
            text = self.text(values)
            notes = [
                f"{what}: its schema is not enforced ({_ACCEPTED[value]} is accepted)"
                for (what, rules), value in zip(self._values, values, strict=True)
                if value is not rules
            ]
            if len(text) <= MAX_TEXT:
                yield Grammar(text, prefill_ids, (*self._notes, *notes), tuple(self._trials))

    def text(self, values: Sequence[Rules]) -> str:
        """The whole grammar, with ``values`` as the rules of ``json_0``, ``json_1``, …"""
        rules = [*self._rules]
        rules += (f"json_{at}: JSON_BLANK? {value.symbol}" for at, value in enumerate(values))
        rules += dict.fromkeys(line for value in values for line in value.lines)
        common = any_order.COMMON if values else ""
        return "".join(f"{rule}\n" for rule in rules) + _COMMON + common

    def weakened(self, values: list[Rules]) -> Iterator[list[Rules]]:
        """Yields rules in place of ``values``: all of them, but any JSON object for the largest
        ones if they exceed `MAX_SCHEMAS`; any object for all; any text for all."""
        left, within = MAX_SCHEMAS, {*range(len(values))}
        for at in sorted(within, key=lambda at: values[at].size):
            left -= values[at].size
            if left < 0 and values[at].lines:
                within.discard(at)
        yield [rules if at in within else OBJECT_RULES for at, rules in enumerate(values)]
        if any(rules.lines for rules in values):
            yield [OBJECT_RULES if rules.lines else rules for rules in values]
        if values:
            yield [_ANYTHING] * len(values)

    def rule(self, name: str, *alternatives: str) -> None:
        self._rules.append(f"{name}: {' | '.join(alternatives)}")

    def turn_rules(self) -> None:
        """The rules of a whole turn: messages that leave it open, and one that ends it.

        Behind a message without words comes one with words or the last one: a model may otherwise
        write such messages without end.
        """
        turn = self._turn
        recipients = list(self.callables())
        thinking = ["analysis"] if turn.thinking else []
        kinds = [*thinking, "preamble"] if thinking or recipients else []
        opening = " | ".join(kinds)
        opened, blank = "", ""
        if kinds:
            blank = f"(({' | '.join(f'blank_{kind}' for kind in kinds)}) next)?"
            opened = f"({blank} ({opening}) next)*"
        ends = ["answer"] if not turn.tool_choice.required else []
        ends += ["call"] if recipients else []
        if not ends:
            problem = "tool_choice requires a call, but there is no tool to call"
            raise RequestError(problem, param="tool_choice")
        if turn.answer_format is None or ends == ["call"]:
            self.rule("start", f"{opened} {blank} ({' | '.join(ends)})")
        else:
            # A preamble is content. Before a typed answer it would become part of the answer's
            # JSON, so only a turn that goes on to a call may have one.
            pause = "(blank_analysis next)?" if thinking else ""
            reasoned = f"({pause} analysis next)*" if thinking else ""
            last = [f"{pause} answer"]
            if recipients:
                last += [
                    f"{pause} preamble next {opened} {blank} call",
                    f"blank_preamble next (({opening}) next {opened} {blank})? call",
                    f"{pause} call",
                ]
            self.rule("start", f"{reasoned} ({' | '.join(last)})")
        if "answer" in ends:
            self.rule("answer", f'{_CHANNEL} "final" type? {_MESSAGE} body {_RETURN}')
            if _is_clients(self.body(turn.answer_format)):
                self._trials.append(_header("final"))
        if not recipients:
            return
        after_role, after_channel = [], []
        for at, (recipient, arguments) in enumerate(recipients):
            if _is_clients(arguments):
                self._trials.append(_header(f"commentary to={recipient[0]}"))
            self.rule(f"name_{at}", *map(json.dumps, recipient))
            self.rule(f"rest_{at}", f"typed? {_MESSAGE} args_{at} {_CALL}")
            self.rule(f"args_{at}", arguments)
            after_role.append(f'name_{at} (" "? {_CHANNEL} channel)? rest_{at}')
            after_channel.append(f"name_{at} rest_{at}")
        self.rule("call", '" to=" role_call', f'{_CHANNEL} channel " to=" channel_call')
        self.rule("role_call", *after_role)
        self.rule("channel_call", *after_channel)

    def callables(self) -> Iterator[tuple[list[str], str]]:  # noqa: C901 - one case per kind
        """What the turn may call: the names of each recipient, and the rule of its arguments."""
        turn, names = self._turn, self._turn.tool_choice.names
        for tool in turn.callable_tools:
            if names is not None and tool.name not in names:
                continue
            # ``functions.x``, or ``x`` alone where the parser reads that as this very tool.
            alias = self._names.alias(tool.name)
            forms = [f"{FUNCTIONS}.{alias}"]
            if alias not in NOT_TOOLS and alias.partition(".")[0] not in turn.builtin_namespaces:
                forms.append(alias)
            meant = [form for form in forms if self._names.addressee(form) == tool.name]
            yield meant or forms[:1], self.arguments(tool)
        for builtin in self._names.builtin if names is None else ():
            if builtin == PYTHON:
                yield [builtin], "text"  # gpt-oss writes code to it, not JSON
            elif builtin == BROWSER:
                for function in ("search", "open", "find"):
                    name = f"{builtin}.{function}"
                    what = f"the parameters of tool {name!r}"
                    yield [name], self.in_any_order(OBJECT_RULES, what)
        for namespace in turn.namespaces:
            for recipient, tool in namespace.by_recipient.items():
                if names is not None and recipient not in names:
                    continue
                if namespace.name == PYTHON:
                    yield [recipient], "text"
                else:
                    shown = as_trained(tool) if namespace.is_builtin else tool
                    yield [recipient], self.arguments(shown)

    def arguments(self, tool: Tool) -> str:
        if tool.syntax is None:
            what = f"the parameters of tool {tool.name!r}"
            schema = _NO_PARAMETERS if tool.parameters is None else tool.parameters
            return self.json_rule(schema, tool.strict, what, tool.where, of_object=True)
        what = f"the format of tool {tool.name!r}"
        rule = self.syntax_rule(tool.syntax, what, tool.strict, tool.where, as_input=True)
        return rule or self.json_rule(_ANY_INPUT, False, what, tool.where)

    def body(self, requested: ResponseFormat | None) -> str:
        """Adds the rule of an answer's text, and returns it."""
        body = ""
        if requested is not None:
            strict, what, where = requested.strict, "the response format", requested.where
            if requested.syntax is not None:
                body = self.syntax_rule(requested.syntax, what, strict, where, as_input=False)
            else:
                can_relax = not requested.strict_implied
                body = self.json_rule(requested.schema, strict, what, where, can_relax=can_relax)
        self.rule("body", body or "text")
        return body

    def json_rule(
        self,
        schema: Mapping[str, object] | None,
        strict: bool,
        what: str,
        where: str,
        *,
        of_object: bool = False,
        can_relax: bool = True,
    ) -> str:
        """The rule of JSON that is valid for ``schema``: any object if that is ``None``.

        ``can_relax`` tells whether the request has a ``strict`` that its caller could leave out.
        """
        if schema is None:
            return self.in_any_order(OBJECT_RULES, what)
        if strict or self._all_strict:
            enforced = strict_schema(
                schema, of_object=of_object, tenant=self._owner, check=self._check
            )
            if enforced.unsupported:
                problem = f"{what}: {', '.join(enforced.unsupported)} cannot be enforced"
                if can_relax and not self._all_strict:
                    problem += "; set strict to false to enforce the remaining keywords only"
                raise RequestError(problem, param=where)
            return f"%json {enforced.text}"
        rules = rules_of(schema, of_object=of_object, tenant=self._turn.tenant)
        if rules.dropped:
            problem = f"{what}: {', '.join(rules.dropped)} cannot be enforced"
            self._notes.append(f"{problem}; the rest is enforced")
        return self.in_any_order(rules, what)

    def in_any_order(self, rules: Rules, what: str) -> str:
        """Adds the rules of a value; returns its symbol."""
        self._values.append((what, rules))
        return f"json_{len(self._values) - 1}"

    def syntax_rule(
        self, syntax: Syntax, what: str, strict: bool, where: str, *, as_input: bool
    ) -> str:
        """The rule of a text that matches ``syntax``, by itself or ``as_input`` within the JSON of
        a freeform tool: ``{"input": "…"}``. Empty if it cannot be enforced."""
        key = self._owner, syntax, as_input
        rule = _syntaxes.get(key)
        if rule is None:
            try:
                rule = self.rule_of_syntax(syntax, as_input)
            except escaped.NotExpressible as error:
                problem = f"{what}: {error} cannot be enforced"
                if strict or self._all_strict:
                    raise RequestError(problem, param=where) from error
                self._notes.append(f"{problem}; the rest is enforced")
                return ""
            _syntaxes.put(key, rule, len(rule))
        return rule

    def rule_of_syntax(self, syntax: Syntax, as_input: bool) -> str:
        definition, problem = syntax.definition, "it is recursive"
        if syntax.kind == "regex":
            definition = f"start: /{escaped.between_slashes(definition)}/"
        for grammar in escaped.inputs(definition) if as_input else [escaped.plain(definition)]:
            rule = f"%lark {{\n{grammar}\n}}"
            problem = self._check(f"start: {rule}")
            if not problem:
                return rule
        raise escaped.NotExpressible(f"its syntax ({problem})")


def _is_clients(rule: str) -> bool:
    """Whether ``rule`` is a strict schema or a syntax, which are grammars of their own."""
    return rule.startswith(("%json", "%lark"))


def _header(text: str) -> tuple[int, ...]:
    return (vocab.CHANNEL, *vocab.encode(text), vocab.MESSAGE)


_syntaxes: lru.ByteLRU[tuple[str, Syntax, bool], str] = lru.ByteLRU(2**22, most=64)

_ANYTHING = Rules("text")
_ACCEPTED = {OBJECT_RULES: "any JSON object", _ANYTHING: "anything"}

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

_ANY_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def as_trained(tool: Tool) -> Tool:
    """A ``tool`` of the browser with the parameters that gpt-oss was trained on."""
    from openai_harmony import ToolNamespaceConfig

    known = {trained.name: trained.parameters for trained in ToolNamespaceConfig.browser().tools}
    return replace(tool, parameters=known.get(tool.name, tool.parameters))
