"""Rows of semantics B: what a model generates on the left, what it said on the right.

Used by the parser's tests and by every emitter's and every served test, so that all APIs are held
to the same story. Control tokens are written out; ``said`` lists (kind, text) and, for calls,
(kind, name, arguments).
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_mlx_harmony.core import vocab

REASONING, PREAMBLE, ANSWER, CALL = "reasoning", "preamble", "answer", "call"


@dataclass(frozen=True)
class Row:
    id: str
    output: str
    said: tuple[tuple[str, ...], ...]
    finish: str = "stop"
    cut: bool = False
    """The engine stopped at its limit, behind ``output``."""
    stop: tuple[str, ...] = ()
    stopped_by: str | None = None
    whole: bool = True
    """Whether what was said last is complete."""
    tools: tuple[str, ...] = ("x",)
    one_call: bool = False
    """The caller wants no more than one."""


def row(name: str, output: str, *said: tuple[str, ...], **more: object) -> Row:
    calls = any(part[0] == CALL for part in said)
    more.setdefault("finish", "length" if more.get("cut") else "tool_calls" if calls else "stop")
    more.setdefault("whole", not (more.get("cut") and said))
    return Row(name, output, said, **more)  # type: ignore[arg-type]


TO_X = (CALL, "x", '{"a":1}')

WELL_FORMED = [
    row("plain answer", "<|channel|>final<|message|>Hi.<|return|>", (ANSWER, "Hi.")),
    row(
        "reasoning, answer",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi."
        "<|return|>",
        (REASONING, "Hm."),
        (ANSWER, "Hi."),
    ),
    row(
        "reasoning, preamble, call",
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>Let me check.<|end|><|start|>assistant<|channel|>commentary to=functions.x "
        '<|constrain|>json<|message|>{"a":1}<|call|>',
        (REASONING, "Need it."),
        (PREAMBLE, "Let me check."),
        TO_X,
    ),
    row(
        "call in channel position",
        '<|channel|>commentary to=functions.x <|constrain|>json<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "call in role position",
        ' to=functions.x<|channel|>commentary <|constrain|>json<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "call with a lone content type",
        '<|channel|>commentary to=functions.x code<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "call without content type",
        '<|channel|>commentary to=functions.x<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "call on the analysis channel",
        '<|channel|>analysis to=functions.x code<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "two calls in a transcript",
        '<|channel|>commentary to=functions.x<|message|>{"a":1}<|call|><|start|>assistant'
        '<|channel|>commentary to=functions.x<|message|>{"a":1}<|call|>',
        TO_X,
        TO_X,
    ),
    row(
        "two reasonings",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Two.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
        (REASONING, "One."),
        (REASONING, "Two."),
        (ANSWER, "Hi."),
    ),
    row(
        "a tool's message in a transcript",
        '<|channel|>commentary to=functions.x<|message|>{"a":1}<|call|><|start|>functions.x '
        "to=assistant<|channel|>commentary<|message|>42<|end|><|start|>assistant<|channel|>final"
        "<|message|>It is 42.<|return|>",
        TO_X,
        (ANSWER, "It is 42."),
    ),
    row(
        "characters of several tokens",
        "<|channel|>final<|message|>\N{FAMILY}🧑🏽‍🚀 ﷽ 𒐫 né<|return|>",
        (ANSWER, "\N{FAMILY}🧑🏽‍🚀 ﷽ 𒐫 né"),
    ),
]

CUT = [
    row("cut at once", "", cut=True),
    row("cut in the channel", "<|channel|>comment", cut=True),
    row("cut behind the channel", "<|channel|>final", cut=True),
    row("cut in the recipient", "<|channel|>commentary to=functions.x", cut=True),
    row("cut behind the content type", "<|channel|>commentary to=x <|constrain|>json", cut=True),
    row("cut behind the header", "<|channel|>final<|message|>", cut=True),
    row(
        "cut in reasoning",
        "<|channel|>analysis<|message|>I th",
        (REASONING, "I th"),
        cut=True,
    ),
    row("cut in a preamble", "<|channel|>commentary<|message|>Let", (PREAMBLE, "Let"), cut=True),
    row("cut in an answer", "<|channel|>final<|message|>It is", (ANSWER, "It is"), cut=True),
    row(
        "cut in arguments",
        '<|channel|>commentary to=functions.x<|message|>{"a":',
        (CALL, "x", '{"a":'),
        cut=True,
    ),
    row(
        "cut before arguments",
        "<|channel|>commentary to=functions.x<|message|>",
        (CALL, "x", ""),
        cut=True,
    ),
    row(
        "cut between messages",
        "<|channel|>analysis<|message|>Hm.<|end|>",
        (REASONING, "Hm."),
        cut=True,
        whole=True,
    ),
    row("cut in loose text", "Hello wor", (ANSWER, "Hello wor"), cut=True),
    row(
        "the last id of the limit ends the turn",
        "<|channel|>final<|message|>Hi.<|return|>",
        (ANSWER, "Hi."),
        cut=True,
        finish="stop",
        whole=True,
    ),
    row(
        "the last id of the limit calls",
        '<|channel|>commentary to=functions.x<|message|>{"a":1}<|call|>',
        TO_X,
        cut=True,
        finish="tool_calls",
        whole=True,
    ),
]

MALFORMED = [
    row("nothing", ""),
    row("only an end", "<|return|>"),
    row("no terminator", "<|channel|>final<|message|>Hi.", (ANSWER, "Hi.")),
    row("no terminator of a call", "<|channel|>commentary to=x<|message|>{}", (CALL, "x", "{}")),
    row("final json is no tool", "<|channel|>final json<|message|>{}<|return|>", (ANSWER, "{}")),
    row(
        "final constrain json",
        "<|channel|>final <|constrain|>json<|message|>{}<|return|>",
        (ANSWER, "{}"),
    ),
    row("no channel", "<|message|>Hi.<|return|>", (ANSWER, "Hi.")),
    row("empty channel", "<|channel|><|message|>Hi.<|return|>", (ANSWER, "Hi.")),
    row("unknown channel", "<|channel|>thoughts<|message|>Hi.<|return|>", (ANSWER, "Hi.")),
    row("channel in punctuation", '<|channel|>"final".<|message|>Hi.<|return|>', (ANSWER, "Hi.")),
    row(
        "first known channel",
        "<|channel|>um analysis<|message|>Hm.<|end|>",
        (REASONING, "Hm."),
    ),
    row(
        "doubled channel",
        "<|channel|>analysis<|channel|>analysis<|message|>Hm.<|end|>",
        (REASONING, "Hm."),
    ),
    row("no channel marker", "final<|message|>Hi.<|return|>", (ANSWER, "Hi.")),
    row(
        "no channel marker behind role",
        "assistant analysis<|message|>Hm.<|end|>",
        (REASONING, "Hm."),
    ),
    row(
        "doubled start and role",
        "<|start|><|start|>assistant assistant<|channel|>final<|message|>Hi.<|return|>",
        (ANSWER, "Hi."),
    ),
    row(
        "no start between messages",
        "<|channel|>analysis<|message|>Hm.<|end|>assistant<|channel|>final<|message|>Hi.<|return|>",
        (REASONING, "Hm."),
        (ANSWER, "Hi."),
    ),
    row(
        "no role",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|><|channel|>final<|message|>Hi.<|return|>",
        (REASONING, "Hm."),
        (ANSWER, "Hi."),
    ),
    row(
        "junk between messages",
        "junk<|channel|>analysis<|message|>Hm.<|end|>more junk<|start|>assistant<|channel|>final"
        "<|message|>Hi.<|return|>",
        (REASONING, "Hm."),
        (ANSWER, "Hi."),
    ),
    row("message in a body", "<|channel|>final<|message|>a<|message|>b<|return|>", (ANSWER, "ab")),
    row(
        "constrain in a body",
        "<|channel|>final<|message|>a<|constrain|>b<|return|>",
        (ANSWER, "ab"),
    ),
    row(
        "reserved ids",
        "<|reserved_200013|><|channel|>final<|reserved_200004|><|message|>a<|reserved_201000|>b"
        "<|startoftext|><|return|>",
        (ANSWER, "ab"),
    ),
    row(
        "start in a body",
        "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
        (REASONING, "Hm."),
        (ANSWER, "Hi."),
    ),
    row(
        "channel in a body",
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi.<|return|>",
        (REASONING, "Hm."),
        (ANSWER, "Hi."),
    ),
    row("endoftext ends", "<|channel|>final<|message|>Hi.<|endoftext|>more", (ANSWER, "Hi.")),
    row(
        "nothing behind return",
        "<|channel|>final<|message|>Hi.<|return|><|start|>assistant<|channel|>final<|message|>No",
        (ANSWER, "Hi."),
    ),
    row(
        "junk behind call",
        '<|channel|>commentary to=x<|message|>{"a":1}<|call|>commentary to=x<|message|>{}<|call|>',
        TO_X,
    ),
    row(
        "empty messages", "<|channel|>analysis<|message|><|end|><|channel|>final<|message|><|end|>"
    ),
    row("end of an empty header", "<|channel|>final<|end|><|message|>Hi.<|end|>", (ANSWER, "Hi.")),
]

RECIPIENTS = [
    row(
        "channel and recipient in one word",
        '<|channel|>commentaryto=functions.x <|constrain|>json<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "channel and an empty recipient in one word",
        '<|channel|>analysisto= functions.x<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row("bare name", '<|channel|>commentary to=x<|message|>{"a":1}<|call|>', TO_X),
    row(
        "space behind to=", '<|channel|>commentary to= functions.x<|message|>{"a":1}<|call|>', TO_X
    ),
    row(
        "repeated",
        ' to=functions.x<|channel|>commentary to=functions.x<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row("nothing behind to=", "<|channel|>final to=<|message|>Hi.<|return|>", (ANSWER, "Hi.")),
    row(
        "nothing behind to= in role position",
        " to=<|channel|>commentary<|message|>Hi.<|end|>",
        (PREAMBLE, "Hi."),
    ),
    row(
        "a lone word is none",
        "<|channel|>commentary x<|message|>Hi.<|end|>",
        (PREAMBLE, "Hi."),
    ),
    row(
        "a lone function name is none",
        "<|channel|>commentary functions.x<|message|>Hi.<|end|>",
        (PREAMBLE, "Hi."),
    ),
    row(
        "undeclared",
        "<|channel|>commentary to=container.exec<|message|>{}<|call|>",
        (CALL, "container.exec", "{}"),
    ),
    row(
        "undeclared function",
        "<|channel|>commentary to=functions.y<|message|>{}<|call|>",
        (CALL, "y", "{}"),
    ),
    row(
        "prefix removed once",
        "<|channel|>commentary to=functions.functions.y<|message|>{}<|call|>",
        (CALL, "functions.y", "{}"),
    ),
    row(
        "dotted, declared",
        "<|channel|>commentary to=a.b<|message|>{}<|call|>",
        (CALL, "a.b", "{}"),
        tools=("a.b",),
    ),
    row(
        "declared with the prefix",
        "<|channel|>commentary to=functions.z<|message|>{}<|call|>",
        (CALL, "functions.z", "{}"),
        tools=("functions.z",),
    ),
    row(
        "alias",
        "<|channel|>commentary to=functions.get_the_weather<|message|>{}<|call|>",
        (CALL, "get the weather!", "{}"),
        tools=("get the weather!",),
    ),
    row(
        "to the assistant",
        "<|channel|>commentary to=assistant<|message|>Hi.<|end|>",
        (PREAMBLE, "Hi."),
    ),
    row("to the user", "<|channel|>final to=user<|message|>Hi.<|return|>", (ANSWER, "Hi.")),
    row("to all", "<|channel|>analysis to=all<|message|>Hm.<|end|>", (REASONING, "Hm.")),
    row(
        "a tool named assistant",
        "<|channel|>commentary to=functions.assistant<|message|>{}<|call|>",
        (CALL, "assistant", "{}"),
    ),
    row("behind junk", '<|channel|>commentary um to=functions.x<|message|>{"a":1}<|call|>', TO_X),
    row(
        "before a junk header",
        ' to=functions.x junk<|channel|>commentary<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "empty arguments",
        "<|channel|>commentary to=functions.x<|message|><|call|>",
        (CALL, "x", "{}"),
    ),
    row(
        "no arguments",
        "<|channel|>commentary to=functions.x <|constrain|>json<|call|>",
        (CALL, "x", "{}"),
    ),
    row(
        "arguments as they are",
        '<|channel|>commentary to=functions.x<|message|> {"a" : "é\\u00e9"}\n<|call|>',
        (CALL, "x", ' {"a" : "é\\u00e9"}\n'),
    ),
    row(
        "ended by end",
        '<|channel|>commentary to=functions.x<|message|>{"a":1}<|end|><|channel|>commentary'
        ' to=functions.x<|message|>{"a":1}<|end|>',
        TO_X,
        TO_X,
    ),
]

NO_HEADER = [
    row("final I forgot", "final I forgot<|return|>", (ANSWER, "I forgot")),
    row("call without message", 'to=functions.x {"a":1}<|call|>', TO_X),
    row(
        "call with channel, without message",
        '<|channel|>commentary to=functions.x json {"a":1}<|call|>',
        TO_X,
    ),
    row(
        "content type grown together with arguments",
        '<|channel|>commentary to=functions.x <|constrain|>json{"a":1}<|call|>',
        TO_X,
    ),
    row("bare text", "It is 4.<|return|>", (ANSWER, "It is 4.")),
    row("bare text keeps its space", " \n It  is\n4. <|return|>", (ANSWER, "It  is\n4. ")),
    row("bare word of a header", "json<|return|>", (ANSWER, "json")),
    row("bare text about users", "user data is safe<|return|>", (ANSWER, "user data is safe")),
    row("bare text with to=", "Set to=5 there<|return|>", (ANSWER, "Set to=5 there")),
    row("long bare text", "word " * 100 + "<|return|>", (ANSWER, "word " * 100)),
    row("long text without space", "你好，" * 50 + "<|return|>", (ANSWER, "你好，" * 50)),
    row("long bare text, cut", "word " * 100, (ANSWER, "word " * 100), cut=True),
    row(
        "a call's long loose arguments",
        "to=functions.x " + '{"a": "' + "b " * 60 + '"}<|call|>',
        (CALL, "x", '{"a": "' + "b " * 60 + '"}'),
    ),
    row(
        "an overlong name is none",
        f"to={'n' * 400}<|message|>Hi.<|return|>",
        (ANSWER, f"to={'n' * 400}Hi."),
    ),
    row(
        "loose text before start is junk",
        "some junk<|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
        (ANSWER, "Hi."),
    ),
]

HIDDEN = [
    row(
        f"hallucinated {role}",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>{role}<|message|>No.<|end|><|start|>"
        "assistant<|channel|>final<|message|>Hi.<|return|>",
        (REASONING, "Hm."),
        (ANSWER, "Hi."),
    )
    for role in ("user", "system", "developer", "tool", "functions.x to=assistant", "functions.x")
] + [
    row(
        "a named tool without prefix",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>x to=assistant<|channel|>commentary"
        "<|message|>42<|end|>",
        (REASONING, "Hm."),
    ),
    row(
        "a user without start",
        "<|channel|>analysis<|message|>Hm.<|end|>user<|message|>No.<|end|>",
        (REASONING, "Hm."),
    ),
]

STOPS = [
    row(
        "stop string",
        "<|channel|>final<|message|>one two three<|return|>",
        (ANSWER, "one "),
        stop=("two",),
        stopped_by="two",
    ),
    row(
        "stop string over several ids",
        "<|channel|>final<|message|>Hello, big wide world<|return|>",
        (ANSWER, "Hello, bi"),
        stop=("g wide w", "zzz"),
        stopped_by="g wide w",
    ),
    row(
        "the stop string completed first",
        "<|channel|>final<|message|>abcdef<|return|>",
        (ANSWER, "ab"),
        stop=("bcdef", "cd"),
        stopped_by="cd",
    ),
    row(
        "only the beginning of a stop string",
        "<|channel|>final<|message|>one tw<|return|>",
        (ANSWER, "one tw"),
        stop=("two",),
    ),
    row(
        "stop strings spare reasoning",
        "<|channel|>analysis<|message|>two<|end|><|channel|>final<|message|>one<|return|>",
        (REASONING, "two"),
        (ANSWER, "one"),
        stop=("two",),
    ),
    row(
        "stop strings spare arguments and headers",
        '<|channel|>commentary to=functions.x<|message|>{"a":1}<|call|>',
        TO_X,
        stop=("a", "functions"),
    ),
    row(
        "stop string in a preamble",
        "<|channel|>commentary<|message|>one two<|end|><|channel|>final<|message|>x<|return|>",
        (PREAMBLE, "one "),
        stop=("two",),
        stopped_by="two",
    ),
    row(
        "stop string in long bare text",
        "one two " * 30 + "<|start|>assistant<|channel|>final<|message|>No.<|return|>",
        (ANSWER, "one "),
        stop=("two one two",),
        stopped_by="two one two",
    ),
    row(
        "stop string in bare text",
        "one two three<|return|>",
        (ANSWER, "one "),
        stop=("two",),
        stopped_by="two",
    ),
]

_X = '<|channel|>commentary to=functions.x <|constrain|>json<|message|>{"a":1}'

ONE_CALL = [
    row("one call of two", f"{_X}<|end|><|start|>assistant{_X}<|call|>", TO_X, one_call=True),
    row(
        "one call, cut in the next",
        f"{_X}<|start|>assistant{_X}",
        TO_X,
        one_call=True,
        cut=True,
        finish="tool_calls",
        whole=True,
    ),
    row("one call alone", f"{_X}<|call|>", TO_X, one_call=True),
    row("one call, cut", _X, TO_X, one_call=True, cut=True),
    row(
        "one call, none made",
        "<|channel|>final<|message|>Hi.<|return|>",
        (ANSWER, "Hi."),
        one_call=True,
    ),
]
ROWS = [*WELL_FORMED, *CUT, *MALFORMED, *RECIPIENTS, *NO_HEADER, *HIDDEN, *STOPS, *ONE_CALL]

INVALID_UTF8: list[tuple[str, list[int], str]] = []


def ids(text: str) -> list[int]:
    """``text`` as token ids, the control tokens in it too."""
    return vocab.encoding().encode(text, allowed_special="all")


def can_be_generated(row: Row) -> bool:
    """Whether an engine can say it: there is something, and nothing comes after its end."""
    output = ids(row.output)
    return bool(output) and not any(token in vocab.TURN_ENDS for token in output[:-1])
