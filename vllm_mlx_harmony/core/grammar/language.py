"""A turn into the Lark text of its grammar.

Knows which messages a turn may have and how their headers are written. Refuses to know what JSON
Schema means (`expressible`) and how a grammar is followed (`matching`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from vllm_mlx_harmony.core import lru, vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar import escaped, unordered
from vllm_mlx_harmony.core.grammar.expressible import Check, compile_error, express
from vllm_mlx_harmony.core.grammar.unordered import ANY_OBJECT, Rules, rules_of
from vllm_mlx_harmony.core.header import CHANNELS, NOBODY
from vllm_mlx_harmony.core.names import FUNCTIONS, Names
from vllm_mlx_harmony.core.turn import PYTHON, Namespace, ResponseFormat, Syntax, Tool, Turn


class Policy(str, Enum):
    """How much of what could be enforced is enforced; the value is the setting's word.

    ``AUTO``: arguments and answers as far as their schemas can be expressed, strict ones wholly or
    not at all. ``STRICT``: every tool and format as if its caller had asked for strictness.
    """

    AUTO = "auto"
    STRICT = "strict"
    OFF = "off"


MAX_TEXT = 500_000
"""Characters of a grammar of which llguidance is asked whether it takes it."""

MAX_CHECKED = 20
"""Schemas of which each is tried by itself when it does not take all of them together."""


@dataclass(frozen=True, slots=True)
class _Value:
    """JSON of which no order is asked, and what it is for."""

    what: str
    rules: Rules


def _alone(rules: Rules) -> str:
    return "".join(
        f"{line}\n" for line in (f"start: {rules.symbol}", *rules.lines, unordered.COMMON)
    )


_expressed: lru.ByteLRU[tuple[str, str], tuple[str, tuple[str, ...]]] = lru.ByteLRU(2**24)
"""Grammars as they were wanted, what llguidance takes of them, and the notes on the difference."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a turn may say. Equal turns have equal grammars: one is its own key.

    ``text`` is llguidance's: Lark, or a list of grammars in JSON. ``begun`` are the ids of the
    message that the prompt has begun already and that count as said. ``notes`` are sentences about
    what could not be enforced, one for each schema.
    """

    text: str
    begun: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def without_analysis(self) -> str:
        """``text`` of what may follow behind reasoning that was ended, and another
        ``<|start|>assistant``: everything but more of it.

        For engines that are given a grammar, and do not take part in following it. A rule must
        have something: here a reserved id, which no model writes.
        """
        return self.text.replace(_ANALYSIS, f"analysis: <[{_RESERVED}]>\n")


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

_RESERVED = vocab.CONTROL[-2]

_ANALYSIS = f'analysis: {_CHANNEL} "analysis" {_MESSAGE} text {_END}\n'

_COMMON = f"""\
next: {_START} "assistant"
{_ANALYSIS}\
preamble: {_CHANNEL} "commentary" {_MESSAGE} text {_END}
type: " "? {_CONSTRAIN} ("json" | "code")
typed: " json" | " code" | type
channel: {" | ".join(f'"{name}"' for name in sorted(CHANNELS))}
text: TEXT
TEXT: /(?s:.*)/
"""


def grammar_of(
    turn: Turn,
    names: Names,
    policy: Policy = Policy.AUTO,
    *,
    check: Check = compile_error,
) -> Grammar | None:
    """The grammar of what may follow the prompt of ``turn``; ``None``: whatever the model likes.

    ``names`` are those the turn was rendered with. Schemas are remembered, but new ones take up to
    some milliseconds each: not for an event loop. ``check`` says why a text cannot be compiled, for
    every text of which that is not known; the default compiles it in this process.

    Raises ``RequestError`` naming tool and keyword when a strict schema, or a syntax, cannot be
    enforced; and naming ``tool_choice`` when a call is required that nothing can make.
    """
    if policy is Policy.OFF:
        return None
    return _Writer(turn, names, policy, check).grammar()


class _Writer:
    """Writes one grammar, rule by rule."""

    def __init__(self, turn: Turn, names: Names, policy: Policy, check: Check) -> None:
        self._turn = turn
        self._check = check
        self._names = names
        self._strict = policy is Policy.STRICT
        self._rules: list[str] = []
        self._notes: list[str] = []
        self._values: list[_Value] = []

    def grammar(self) -> Grammar:
        turn = self._turn
        begun: tuple[int, ...] = ()
        if turn.prefill is not None:
            if turn.tool_choice.required:
                raise RequestError(
                    "an answer that has begun already cannot become the call that is required",
                    param="tool_choice",
                )
            self._rule("start", f"body {_RETURN}")
            self._body(turn.answer_format)
            begun = tuple(vocab.encode(turn.prefill))
        else:
            self._turn_rules()
        text = self._text(self._values)
        if self._values:
            text = self._expressible(text)
        return Grammar(text, begun, tuple(self._notes))

    def _text(self, values: Sequence[_Value]) -> str:
        rules = [*self._rules]
        rules += (f"json_{at}: JSON_BLANK? {one.rules.symbol}" for at, one in enumerate(values))
        rules += dict.fromkeys(line for one in values for line in one.rules.lines)
        common = unordered.COMMON if values else ""
        return "".join(f"{rule}\n" for rule in rules) + _COMMON + common

    def _expressible(self, text: str) -> str:
        """``text``, with less of the schemas that were not asked to be strict if it is too large,
        or if llguidance refuses it: those that it refuses by themselves become any JSON object,
        then the largest ones, then any text."""
        key = self._turn.tenant, text
        known = _expressed.get(key)
        if known is None:
            known = self._weakened(text)
            size = sum(map(len, known[1])) + len(text) + (0 if known[0] is text else len(known[0]))
            _expressed.put(key, known, size)
        self._notes += known[1]
        return known[0]

    def _weakened(  # noqa: C901 - one attempt after the other
        self, text: str
    ) -> tuple[str, tuple[str, ...]]:
        weakened: dict[int, Rules] = {}

        def written() -> str:
            return self._text(
                [
                    _Value(one.what, weakened.get(at, one.rules))
                    for at, one in enumerate(self._values)
                ]
            )

        def fits(text: str) -> bool:
            return len(text) <= MAX_TEXT and not self._check(text)

        typed = [at for at, one in enumerate(self._values) if one.rules.lines]
        typed.sort(key=lambda at: -sum(map(len, self._values[at].rules.lines)))
        if fits(text):
            return text, ()
        if len(text) <= MAX_TEXT and len(typed) <= MAX_CHECKED:
            for at in typed:
                if self._check(_alone(self._values[at].rules)):
                    weakened[at] = ANY_OBJECT
        excess = len(text) - MAX_TEXT
        for at in typed:
            if excess > 0:
                weakened[at] = ANY_OBJECT
                excess -= sum(map(len, self._values[at].rules.lines))
        while typed and not (weakened and fits(written())):
            left = [at for at in typed if at not in weakened]
            if not left:
                weakened = {at: Rules("text") for at in range(len(self._values))}
                break
            weakened |= dict.fromkeys(left[: (len(left) + 1) // 2], ANY_OBJECT)
        notes = (
            f"{self._values[at].what}: its schema cannot be enforced"
            f" ({'any JSON object' if rules is ANY_OBJECT else 'anything'} may come)"
            for at, rules in sorted(weakened.items())
        )
        return written(), tuple(notes)

    def _rule(self, name: str, *alternatives: str) -> None:
        self._rules.append(f"{name}: {' | '.join(alternatives)}")

    # Which messages

    def _turn_rules(self) -> None:
        """A preamble is content: it would stand before the JSON of a typed answer, and be part of
        it. So there it is only for a turn that goes on to a call."""
        turn = self._turn
        callable_ = list(self._calls())
        thinking = ["analysis"] if turn.thinking else []
        opening = " | ".join([*thinking, "preamble"] if thinking or callable_ else [])
        opened = f"(({opening}) next)*" if opening else ""
        ends = ["answer"] if not turn.tool_choice.required else []
        ends += ["call"] if callable_ else []
        if not ends:
            raise RequestError("a call is required, and there is no tool", param="tool_choice")
        if turn.answer_format is None or ends == ["call"]:
            self._rule("start", f"{opened} ({' | '.join(ends)})")
        else:
            reasoned = "(analysis next)*" if thinking else ""
            called = f"| preamble next {opened} call | call" if callable_ else ""
            self._rule("start", f"{reasoned} (answer {called})")
        if "answer" in ends:
            self._rule("answer", f'{_CHANNEL} "final" type? {_MESSAGE} body {_RETURN}')
            self._body(turn.answer_format)
        if callable_:
            self._call(callable_)

    # The answer

    def _body(self, requested: ResponseFormat | None) -> None:
        if requested is None:
            self._rule("body", "text")
            return
        what, where = "the response format", requested.where
        if requested.syntax is None:
            has_word = not requested.strict_implied
            body = self._json(requested.schema, requested.strict, what, where, has_word=has_word)
            self._rule("body", body)
            return
        try:
            body = _text_of(requested.syntax, self._turn.tenant, self._check)
        except escaped.NotExpressible as error:
            problem = f"{what}: {error} cannot be enforced"
            self._cannot(problem, requested.strict, where, has_word=False)
            body = "text"
        self._rule("body", body)

    def _json(
        self,
        schema: Mapping[str, Any] | None,
        strict: bool,
        what: str,
        where: str,
        *,
        of_object: bool = False,
        has_word: bool = True,
    ) -> str:
        """The JSON that is valid for ``schema``; the note or the error when it cannot be exact."""
        if not (strict or self._strict):
            rules = ANY_OBJECT
            if schema is not None:
                rules = rules_of(schema, of_object=of_object, tenant=self._turn.tenant)
            if rules.dropped:
                self._notes.append(
                    f"{what}: {', '.join(rules.dropped)} cannot be enforced; all the rest is"
                )
            return self._any_order(rules, what)
        if schema is None:
            return self._any_order(ANY_OBJECT, what)
        expressed = express(
            schema, of_object=of_object, tenant=self._turn.tenant, check=self._check
        )
        if expressed.dropped:
            names = ", ".join(expressed.dropped)
            problem = f"{what}: {names} cannot be enforced"
            self._cannot(problem, strict, where, has_word=has_word)
        return f"%json {expressed.text}"

    def _any_order(self, rules: Rules, what: str) -> str:
        """The rule of what ``rules`` say."""
        self._values.append(_Value(what, rules))
        return f"json_{len(self._values) - 1}"

    def _cannot(self, problem: str, strict: bool, where: str, *, has_word: bool) -> None:
        """The error or the note. ``has_word``: there is a ``strict`` that can be left out."""
        if strict or self._strict:
            helps = has_word and strict and not self._strict
            hint = "; without strict, all the rest is" if helps else ""
            raise RequestError(f"{problem}{hint}", param=where)
        self._notes.append(f"{problem}; all the rest is")

    # Calls

    def _calls(self) -> Iterator[tuple[str, str]]:
        """What may be called: the recipient, quoted, and the rule of its arguments."""
        names = self._turn.tool_choice.names
        for tool in self._turn.callable_tools:
            if names is None or tool.name in names:
                yield self._recipient(tool), self._arguments(tool)
        served = {each.name for each in self._turn.namespaces}
        if names is None:
            for builtin in self._turn.builtin_tools:
                if builtin not in served:
                    yield from self._trained(builtin)
        for namespace in self._turn.namespaces:
            for recipient, tool in namespace.by_recipient.items():
                if names is None or recipient in names:
                    yield _quoted(recipient), self._served(namespace, tool)

    def _served(self, namespace: Namespace, tool: Tool) -> str:
        """The arguments of a tool that the server runs; of a built-in, as the prompt shows it."""
        if namespace.name == PYTHON:
            return "text"
        return self._arguments(trained(tool) if namespace.trained else tool)

    def _trained(self, builtin: str) -> Iterator[tuple[str, str]]:
        """The tools that gpt-oss was trained with, and what it writes to them: JSON, and code."""
        if builtin == PYTHON:
            yield _quoted(builtin), "text"
        elif builtin == "browser":
            for function in ("search", "open", "find"):
                name = f"{builtin}.{function}"
                yield _quoted(name), self._any_order(ANY_OBJECT, f"the parameters of tool {name!r}")

    def _recipient(self, tool: Tool) -> str:
        """``functions.x``, or ``x`` alone: what the parser reads as this very tool."""
        alias = self._names.alias(tool.name)
        forms = [f"{FUNCTIONS}.{alias}"]
        if alias not in NOBODY and alias.partition(".")[0] not in self._turn.trained_namespaces:
            forms.append(alias)
        meant = [form for form in forms if self._names.addressee(form) == tool.name]
        return " | ".join(map(_quoted, meant or forms[:1]))

    def _arguments(self, tool: Tool) -> str:
        schema = _NO_PARAMETERS if tool.parameters is None else tool.parameters
        what = f"the parameters of tool {tool.name!r}"
        if tool.syntax is None:
            return self._json(schema, tool.strict, what, tool.where, of_object=True)
        if tool.syntax.kind == "regex":
            matching = {"type": "string", "pattern": f"^(?:{tool.syntax.definition})$"}
            what = f"the format of tool {tool.name!r}"
            return self._json(_with_input(matching), tool.strict, what, tool.where)
        try:
            return _input_of(tool.syntax, self._turn.tenant, self._check)
        except escaped.NotExpressible as error:
            problem = f"the format of tool {tool.name!r}: {error} cannot be enforced"
            self._cannot(problem, tool.strict, tool.where, has_word=False)
            return self._json(_with_input({"type": "string"}), False, "", tool.where)

    def _call(self, callable_: Sequence[tuple[str, str]]) -> None:
        roles, channels = [], []
        for index, (recipient, arguments) in enumerate(callable_):
            self._rule(f"name_{index}", recipient)
            self._rule(f"rest_{index}", f"typed? {_MESSAGE} args_{index} {_CALL}")
            self._rule(f"args_{index}", arguments)
            roles.append(f'name_{index} (" "? {_CHANNEL} channel)? rest_{index}')
            channels.append(f"name_{index} rest_{index}")
        self._rule("call", '" to=" role_call', f'{_CHANNEL} channel " to=" channel_call')
        self._rule("role_call", *roles)
        self._rule("channel_call", *channels)


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def trained(tool: Tool) -> Tool:
    """``tool`` of the browser with the parameters that gpt-oss knows it by."""
    from openai_harmony import ToolNamespaceConfig

    known = {each.name: each.parameters for each in ToolNamespaceConfig.browser().tools}
    return replace(tool, parameters=known.get(tool.name, tool.parameters))


# --- freeform tools, and answers with a syntax ---

_INPUT = r"""
OPENING: /\{[ \n]{0,4}"input"[ ]?:[ ]?"/
CLOSING: /"[ \n]{0,4}\}/
"""


def _with_input(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "type": "object",
        "properties": {"input": schema},
        "required": ["input"],
        "additionalProperties": False,
    }


def _input_of(syntax: Syntax, tenant: str, check: Check) -> str:
    """``{"input": "…"}``, where the string stands for a text that a Lark grammar has.

    Remembered for ``tenant``."""
    known = _inputs.get((tenant, syntax))
    if known is not None:
        return known
    for written in escaped.lark(syntax.definition):
        if "R_START" in written:
            start = "start: ALL\nALL: OPENING R_START CLOSING"
        else:
            start = "start: OPENING r_start CLOSING"
        nested = f"%lark {{\n{start}{_INPUT}{written}\n}}"
        if not check(f"start: {nested}"):
            _inputs.put((tenant, syntax), nested, len(nested))
            return nested
    raise escaped.NotExpressible("a Lark grammar that is recursive or that llguidance refuses")


def _text_of(syntax: Syntax, tenant: str, check: Check) -> str:
    """The text itself. Remembered for ``tenant``."""
    known = _texts.get((tenant, syntax))
    if known is not None:
        return known
    if syntax.kind == "regex":
        written = f"/{escaped.between_slashes(syntax.definition)}/"
    else:
        written = f"%lark {{\n{escaped.plain_lark(syntax.definition)}\n}}"
    if problem := check(f"start: {written}"):
        raise escaped.NotExpressible(f"its syntax ({problem})")
    _texts.put((tenant, syntax), written, len(written))
    return written


_inputs: lru.ByteLRU[tuple[str, Syntax], str] = lru.ByteLRU(2**22, most=32)
_texts: lru.ByteLRU[tuple[str, Syntax], str] = lru.ByteLRU(2**22, most=32)


def _quoted(name: str) -> str:
    return json.dumps(name)
