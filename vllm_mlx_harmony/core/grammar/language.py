"""A turn into the Lark text of its grammar.

Knows which messages a turn may have and how their headers are written. Refuses to know what JSON
Schema means (`expressible`) and how a grammar is followed (`matching`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar.expressible import ANY_OBJECT, Expressed, express
from vllm_mlx_harmony.core.header import CHANNELS, NOBODY
from vllm_mlx_harmony.core.names import FUNCTIONS, Names
from vllm_mlx_harmony.core.turn import ResponseFormat, Tool, Turn


class Policy(str, Enum):
    """How much of what could be enforced is enforced; the value is the setting's word.

    ``AUTO``: arguments and answers as far as their schemas can be expressed, strict ones wholly or
    not at all. ``STRICT``: every tool and format as if its caller had asked for strictness.
    """

    AUTO = "auto"
    STRICT = "strict"
    OFF = "off"


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

_COMMON = f"""\
next: {_START} "assistant"
analysis: {_CHANNEL} "analysis" {_MESSAGE} text {_END}
preamble: {_CHANNEL} "commentary" {_MESSAGE} text {_END}
type: " "? {_CONSTRAIN} ("json" | "code")
typed: " json" | " code" | type
channel: {" | ".join(f'"{name}"' for name in sorted(CHANNELS))}
text: TEXT
TEXT: /(?s:.*)/
"""


def grammar_of(turn: Turn, names: Names, policy: Policy = Policy.AUTO) -> Grammar | None:
    """The grammar of what may follow the prompt of ``turn``; ``None``: whatever the model likes.

    ``names`` are those the turn was rendered with. Schemas are remembered, but new ones take up to
    some milliseconds each: not for an event loop. Raises ``RequestError`` naming tool and keyword
    when a strict schema, or a syntax, cannot be enforced; and naming ``tool_choice`` when a call is
    required that nothing can make.
    """
    if policy is Policy.OFF:
        return None
    return _Writer(turn, names, policy).grammar()


class _Writer:
    """Writes one grammar, rule by rule."""

    def __init__(self, turn: Turn, names: Names, policy: Policy) -> None:
        self._turn = turn
        self._names = names
        self._strict = policy is Policy.STRICT
        self._rules: list[str] = []
        self._notes: list[str] = []

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
            self._body(turn.response_format)
            begun = tuple(vocab.encode(turn.prefill))
        else:
            self._turn_rules()
        text = "".join(f"{rule}\n" for rule in self._rules) + _COMMON
        return Grammar(text, begun, tuple(self._notes))

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
        if turn.response_format is None or ends == ["call"]:
            self._rule("start", f"{opened} ({' | '.join(ends)})")
        else:
            reasoned = "(analysis next)*" if thinking else ""
            called = f"| preamble next {opened} call | call" if callable_ else ""
            self._rule("start", f"{reasoned} (answer {called})")
        if "answer" in ends:
            self._answer(turn.response_format)
        if callable_:
            self._call(callable_)

    # The answer

    def _answer(self, asked: ResponseFormat | None) -> None:
        self._rule("answer", f'{_CHANNEL} "final" type? {_MESSAGE} body {_RETURN}')
        self._body(asked)

    def _body(self, asked: ResponseFormat | None) -> None:
        if asked is None:
            self._rule("body", "text")
            return
        what = "the response format"
        self._rule("body", self._json(asked.schema, asked.strict, what, "response_format"))

    def _json(
        self,
        schema: Mapping[str, Any] | None,
        strict: bool,
        what: str,
        where: str,
        *,
        of_object: bool = False,
    ) -> str:
        """The JSON that is valid for ``schema``; the note or the error when it cannot be exact."""
        expressed = ANY_OBJECT if schema is None else express(schema, of_object=of_object)
        if expressed.dropped and (strict or self._strict):
            raise RequestError(
                f"{what}: {_cannot(expressed)}; without strict the rest of it is enforced",
                param=where,
            )
        if expressed.dropped:
            self._notes.append(f"{what}: {_cannot(expressed)}; the rest of it is")
        return f"%json {expressed.text}"

    # Calls

    def _calls(self) -> Iterator[tuple[str, str]]:
        """What may be called: the recipient, quoted, and the rule of its arguments."""
        names = self._turn.tool_choice.names
        for tool in self._turn.tools:
            if names is None or tool.name in names:
                yield self._recipient(tool), self._arguments(tool)
        if names is None:
            for namespace in self._turn.builtin_tools:
                yield from _BUILTIN.get(namespace, ())

    def _recipient(self, tool: Tool) -> str:
        """``functions.x``, or ``x`` alone where that addresses nobody else."""
        alias = self._names.alias(tool.name)
        taken = alias in NOBODY or alias.partition(".")[0] in self._turn.builtin_tools
        prefix = f"{FUNCTIONS}."
        return _quoted(prefix + alias) if taken else f'"{prefix}"? {_quoted(alias)}'

    def _arguments(self, tool: Tool) -> str:
        schema = _NO_PARAMETERS if tool.parameters is None else tool.parameters
        what = f"the parameters of tool {tool.name!r}"
        return self._json(schema, tool.strict, what, tool.where, of_object=True)

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

_BUILTIN: Mapping[str, Sequence[tuple[str, str]]] = {
    "browser": [
        (f'"browser.{function}"', f"%json {ANY_OBJECT.text}")
        for function in ("search", "open", "find")
    ],
    "python": [('"python"', "text")],
}
"""The tools that gpt-oss was trained with, and what it writes to them: JSON, and code."""


def _quoted(name: str) -> str:
    return json.dumps(name)


def _cannot(expressed: Expressed) -> str:
    return f"{', '.join(expressed.dropped)} cannot be enforced"
