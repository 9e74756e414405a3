"""Rows of semantics B: a model's output, and the messages in it.

The tests of the parser, of emitters and of real servers share them, so that all APIs agree. Control
tokens are written out; ``expected`` lists (kind, text) and, for calls, (kind, name, arguments).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from harmony_text import ids_of

from vllm_mlx_harmony.core import vocab

REASONING, PREAMBLE, ANSWER, CALL = "reasoning", "preamble", "answer", "call"


@dataclass(frozen=True)
class Row:
    id: str
    output: str
    expected: tuple[tuple[str, ...], ...]
    finish: str = "stop"
    cut: bool = False
    """The engine stopped at its limit, after ``output``."""
    stop: tuple[str, ...] = ()
    stopped_by: str | None = None
    whole: bool = True
    """Whether the last message is complete."""
    tools: tuple[str, ...] = ("x",)
    one_call: bool = False
    """The caller permits one call at most."""


def row(name: str, output: str, *expected: tuple[str, ...], **more: object) -> Row:
    calls = any(part[0] == CALL for part in expected)
    more.setdefault("finish", "length" if more.get("cut") else "tool_calls" if calls else "stop")
    more.setdefault("whole", not (more.get("cut") and expected))
    return Row(name, output, expected, **more)  # type: ignore[arg-type]


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
        "a verdict of gpt-oss-safeguard",
        "<|channel|>analysis<|message|>SP1 applies.<|end|><|start|>assistant<|channel|>final"
        "<|message|>1<|return|>",
        (REASONING, "SP1 applies."),
        (ANSWER, "1"),
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
        "alias of a trained name",
        '<|channel|>commentary to=functions.python_tool<|message|>{"a":1}<|call|>',
        (CALL, "python", '{"a":1}'),
        tools=("python",),
    ),
    row(
        "trained name in place of its alias",
        "<|channel|>commentary to=python code<|message|>1 + 1<|call|>",
        (CALL, "python", "1 + 1"),
        tools=("python",),
    ),
    row(
        "alias of a trained name with a dot",
        "<|channel|>commentary to=functions.browser_search<|message|>{}<|call|>",
        (CALL, "browser.search", "{}"),
        tools=("browser.search", "container.exec", "bash"),
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

_GO_ON = "<|start|>assistant<|channel|>final<|message|>Never.<|return|>"

PLAYED = [
    row(
        f"the model plays {author!r}",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>{author}<|message|>No.<|end|>{_GO_ON}",
        (REASONING, "Hm."),
    )
    for author in (
        "user",
        "User:",
        "system",
        "developer",
        "tool",
        "x",
        "functions.x",
        "functions.x to=assistant<|channel|>commentary",
        "functions.y<|channel|>final",
        "other to=assistant<|channel|>commentary",
        "browser.search to=assistant<|channel|>analysis",
        "user<|channel|>final",
        "user to=functions.x",
    )
] + [
    row(
        "played at once",
        f"<|start|>user<|message|>No.<|end|>{_GO_ON}",
    ),
    row(
        "played behind an answer that it cuts",
        f"<|channel|>final<|message|>Hi.<|start|>user<|message|>No.<|end|>{_GO_ON}",
        (ANSWER, "Hi."),
    ),
    row(
        "played behind a call",
        '<|channel|>commentary to=functions.x<|message|>{"a":1}<|end|><|start|>functions.x '
        f"to=assistant<|channel|>commentary<|message|>42<|end|>{_GO_ON}",
        TO_X,
    ),
    row(
        "played without start",
        f"<|channel|>analysis<|message|>Hm.<|end|>user<|message|>No.<|end|>{_GO_ON}",
        (REASONING, "Hm."),
    ),
    row(
        "played without message",
        f"<|channel|>final<|message|>Hi.<|end|><|start|>user No, never.<|end|>{_GO_ON}",
        (ANSWER, "Hi."),
    ),
    row(
        "played, then begun anew",
        f"<|channel|>final<|message|>Hi.<|end|><|start|>user{_GO_ON}",
        (ANSWER, "Hi."),
    ),
    row(
        "played at the limit",
        "<|channel|>final<|message|>Hi.<|end|><|start|>user<|message|>No.",
        (ANSWER, "Hi."),
        cut=True,
        finish="stop",
        whole=True,
    ),
    row(
        "a user begun at the limit",
        "<|channel|>final<|message|>Hi.<|end|><|start|>user",
        (ANSWER, "Hi."),
        cut=True,
        whole=True,
    ),
    row(
        "played behind text that waits",
        f"Hi.<|end|><|start|>user<|message|>No.<|end|>{_GO_ON}",
        (ANSWER, "Hi."),
    ),
]

GARBLED_ROLES = [
    row(
        f"a garbled role is the assistant: {role!r}",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>{role}<|channel|>final<|message|>Hi."
        "<|return|>",
        (REASONING, "Hm."),
        (ANSWER, "Hi."),
    )
    for role in ("assist", "assistantassistant", "Assistant", "users", "um user", "y", "?")
]

TRANSCRIPTS = [
    row(
        f"results in a transcript: {between!r}",
        f'<|channel|>commentary to=functions.x<|message|>{{"a":1}}<|call|>{between}'
        "<|start|>assistant<|channel|>final<|message|>It is 42.<|return|>",
        TO_X,
        (ANSWER, "It is 42."),
    )
    for between in (
        "<|start|>functions.x to=assistant<|channel|>commentary<|message|>42<|end|>",
        "<|start|>functions.x to=assistant<|message|>42<|end|>"
        "<|start|>other to=assistant<|channel|>commentary<|message|>43<|end|>",
        "<|start|>tool<|message|>42<|end|>",
        "<|start|>x<|end|>",
        "<|start|>functions.x",
    )
] + [
    row(
        "a user in a transcript",
        '<|channel|>commentary to=functions.x<|message|>{"a":1}<|call|><|start|>user<|message|>No.'
        f"<|end|>{_GO_ON}",
        TO_X,
    ),
]

# Text ended by <|end|> without a <|message|>: it is held until the turn has anything else.
WAITING = [
    row("waits: alone", "Hi.<|end|>", (ANSWER, "Hi.")),
    row("waits: alone, cut", "Hi.<|end|>", (ANSWER, "Hi."), cut=True, whole=True),
    row("waits: returned", "Hi.<|end|><|return|>", (ANSWER, "Hi.")),
    row(
        "waits: a header given up, alone",
        "<|channel|>commentary?commentary?<|end|>",
        (ANSWER, "commentary?commentary?"),
    ),
    row("waits: a preamble", "<|channel|>commentary Look.<|end|>", (PREAMBLE, "Look.")),
    row("waits: reasoning", "<|channel|>analysis Look.<|end|>", (REASONING, "Look.")),
    row("waits: a call", 'to=functions.x {"a":1}<|end|>', TO_X),
    row("waits: a call, cut", 'to=functions.x {"a":1}<|end|>', TO_X, cut=True),
    row("waits: a call without text", "<|channel|>commentary to=x<|end|>", (CALL, "x", "{}")),
    row("waits: a call without text, cut", "<|channel|>commentary to=x<|end|>", cut=True),
    row(
        "waits: a call without text, cut in the next header",
        "<|channel|>commentary to=functions.x<|end|><|start|>assistant<|channel|>comment",
        cut=True,
    ),
    row("waits: the last", "One.<|end|>Two.<|end|><|start|>assistant", (ANSWER, "Two.")),
    row("waits: nothing", "<|channel|>commentary<|end|> <|end|>"),
    row(
        "waits: behind reasoning",
        "<|channel|>analysis<|message|>Hm.<|end|>Hi.<|end|>",
        (REASONING, "Hm."),
        (ANSWER, "Hi."),
    ),
    row(
        "waits: before reasoning",
        "um<|end|><|channel|>analysis<|message|>Hm.<|end|>",
        (REASONING, "Hm."),
    ),
    row(
        "waits: behind an answer",
        "<|channel|>final<|message|>Hi.<|end|>um<|end|>",
        (ANSWER, "Hi."),
    ),
    row(
        "waits: behind a call",
        "<|channel|>commentary to=x<|message|>{}<|end|>um<|end|>",
        (CALL, "x", "{}"),
    ),
    row("waits: before bare text", "um<|end|>Hi.<|return|>", (ANSWER, "Hi.")),
    row(
        "waits: before an empty message",
        "Hi.<|end|><|channel|>final<|message|><|return|>",
        (ANSWER, "Hi."),
    ),
    row(
        "waits: before a header, cut",
        "Hi.<|end|><|start|>assistant<|channel|>fin",
        (ANSWER, "Hi."),
        cut=True,
        whole=True,
    ),
    row(
        "waits: a stop string in it",
        "one two three<|end|>",
        (ANSWER, "one "),
        stop=("two",),
        stopped_by="two",
    ),
    row(
        "waits: a stop string in it, cut",
        "one two three<|end|>",
        (ANSWER, "one "),
        stop=("two",),
        stopped_by="two",
        cut=True,
        finish="stop",
        whole=True,
    ),
    row(
        "waits: too long to wait",
        "um " * 40 + "<|end|><|channel|>final<|message|>Hi.<|return|>",
        (ANSWER, "um " * 40),
        (ANSWER, "Hi."),
    ),
]

# Outputs of gpt-oss-20b.
RECORDED = [
    row(
        "recorded: a stray channel before reasoning",
        "<|channel|>commentary<|channel|>analysis<|message|>Hm.<|end|>",
        (REASONING, "Hm."),
    ),
    row(
        "recorded: a stray channel to the assistant before reasoning",
        "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|end|>",
        (REASONING, "Hm."),
    ),
    row(
        "recorded: a stray channel to the assistant before a call",
        "<|channel|>commentary to=assistant<|channel|>commentary to=functions.x <|constrain|>json"
        '<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "recorded: a tool in the channel's place before a call",
        '<|channel|>functions.x<|channel|>commentary to=assistant json<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "recorded: a tool in the channel's place before reasoning",
        "<|channel|>functions.x<|channel|>analysis<|message|>Hm.<|end|>",
        (REASONING, "Hm."),
    ),
    row(
        "recorded: a tool in the channel's place",
        '<|channel|>functions.x<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "recorded: a header given up before reasoning and a call",
        "<|channel|>commentary?commentary?<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.x <|constrain|>json"
        '<|message|>{"a":1}<|call|>',
        (REASONING, "Hm."),
        TO_X,
    ),
    *(
        row(
            f"recorded: {channel}", f"<|channel|>{channel}<|message|>Hm.<|end|>", (REASONING, "Hm.")
        )
        for channel in (
            "analysis…",
            "“analysis”",
            "**Analysis**",
            "ANALYSIS",
            "《analysis》",
            "—analysis?",
        )
    ),
    *(
        row(
            f"recorded: {recipient}",
            f'<|channel|>commentary {recipient}<|message|>{{"a":1}}<|call|>',
            TO_X,
        )
        for recipient in (
            "to=functions.x?",
            'to="functions.x"',
            "to=“functions.x”.",
            "to='x'",
            "to=`functions.x`,",
            "to=assistant to=functions.x",
            "to=user to=all to=x",
        )
    ),
    row(
        "recorded: to the assistant in role position, to a tool in the channel",
        ' to=assistant<|channel|>commentary to=functions.x<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "recorded: to a tool in role position, to the assistant in the channel",
        ' to=functions.x<|channel|>commentary to=assistant<|message|>{"a":1}<|call|>',
        TO_X,
    ),
]

NOISE = [
    row(
        "no message behind a channel in capitals",
        "<|channel|>Final. I forgot<|return|>",
        (ANSWER, "I forgot"),
    ),
    row(
        "glued to the role",
        '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistantto=functions.x<|message|>{"a":1}'
        "<|call|>",
        (REASONING, "Hm."),
        TO_X,
    ),
    row(
        "role and channel in one word",
        "<|start|>assistantanalysis<|message|>Hm.<|end|>",
        (REASONING, "Hm."),
    ),
    row(
        "a channel in capitals, without marker",
        "Analysis:<|message|>Hm.<|end|>",
        (REASONING, "Hm."),
    ),
    row(
        "bare text that begins like a channel",
        "Final answer: 4<|return|>",
        (ANSWER, "Final answer: 4"),
    ),
    row(
        "final, then text that begins like it",
        "<|channel|>final Final answer: 4<|return|>",
        (ANSWER, "Final answer: 4"),
    ),
    row(
        "a channel among punctuation",
        "<|channel|>commentary?commentary?<|message|>Look.<|end|>",
        (PREAMBLE, "Look."),
    ),
    row(
        "an empty channel last",
        "<|channel|>commentary<|channel|><|message|>Hi.<|return|>",
        (ANSWER, "Hi."),
    ),
    row(
        "quotes with nothing in them",
        '<|channel|>commentary to=""<|message|>Hi.<|end|>',
        (PREAMBLE, "Hi."),
    ),
    row(
        "a tool in other capitals",
        '<|channel|>commentary to=Functions.X<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "a tool's name in other capitals",
        '<|channel|>commentary to=functions.X<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "of two tools alike, neither",
        "<|channel|>commentary to=functions.GO<|message|>{}<|call|>",
        (CALL, "GO", "{}"),
        tools=("go", "Go"),
    ),
    row(
        "a name between underscores",
        "<|channel|>commentary to=_x_<|message|>{}<|call|>",
        (CALL, "_x_", "{}"),
        tools=("x", "_x_"),
    ),
    row("a tool cut in the channel's place", "<|channel|>functions.x", cut=True),
    row(
        "half a tool cut in the channel's place",
        "<|channel|>functions.get_w",
        cut=True,
        tools=("get_weather",),
    ),
    row(
        "an undeclared tool in the channel's place",
        "<|channel|>functions.y<|message|>Hi.<|return|>",
        (ANSWER, "Hi."),
    ),
    row(
        "a long name in the channel's place",
        f"<|channel|>functions.{'q7' * 100}<|message|>{{}}<|call|>",
        (CALL, "q7" * 100, "{}"),
        tools=("q7" * 100,),
    ),
    row(
        "the later of two earlier recipients",
        "<|channel|>commentary to=y<|channel|>commentary to=functions.x<|channel|>commentary "
        'json<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "an earlier recipient, no message",
        '<|channel|>functions.x<|channel|>commentary json {"a":1}<|call|>',
        TO_X,
    ),
    row(
        "two recipients in one channel",
        '<|channel|>commentary to=functions.x to=functions.y<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "a content type in capitals",
        '<|channel|>functions.x<|channel|>commentary JSON<|message|>{"a":1}<|call|>',
        TO_X,
    ),
    row(
        "a role before a channel is none",
        "user<|channel|>final<|message|>Hi.<|return|>",
        (ANSWER, "Hi."),
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
ROWS = [
    *WELL_FORMED,
    *CUT,
    *MALFORMED,
    *RECIPIENTS,
    *NO_HEADER,
    *PLAYED,
    *GARBLED_ROLES,
    *TRANSCRIPTS,
    *WAITING,
    *RECORDED,
    *NOISE,
    *STOPS,
    *ONE_CALL,
]


# --- Noisy headers as a product: what precedes a header, its role position, its prefix, its last
# channel. Beside each piece is its meaning, so that the expected messages follow from the rules
# (semantics B) alone.

_HM = "<|channel|>analysis<|message|>Hm.<|end|>"
POSITIONS = {
    "at first": "",
    "behind reasoning": f"{_HM}<|start|>assistant",
    "behind reasoning, without start": _HM,
    "behind a header given up": "<|channel|>commentary?commentary?<|end|><|start|>assistant",
}
_ROLE_POSITIONS = {"": "", " to=assistant": "", " to=functions.x": "x"}  # the addressed tool
PREFIXES = {
    "": "",
    "<|channel|>": "",
    "<|channel|>commentary": "",
    "<|channel|>Analysis um": "",
    "<|channel|>commentary to=assistant": "",
    "<|channel|>functions.y": "",  # undeclared, so it is a word
    "<|channel|>functions.y<|channel|>x?": "x",
    "<|channel|>functions.x": "x",
    "<|channel|>commentary to=functions.z <|constrain|>json": "z",
    "<|channel|>commentary to=functions.z<|channel|>analysis to=functions.x": "x",
}
_LAST_CHANNELS = {
    "“ANALYSIS…": REASONING,
    "commentary": PREAMBLE,
    "final": ANSWER,
    "um": ANSWER,
}
_LAST_RECIPIENTS = {"": "", " to=assistant": "", ' to=user to="functions.x"?': "x"}
_CONTENT_TYPES = {"": False, " <|constrain|>json": True, " code": True}


def noisy(position: str, prefix: str) -> Iterator[Row]:
    """Every header with a prefix of `PREFIXES`, in a position of `POSITIONS`."""
    before = ((REASONING, "Hm."),) if _HM in POSITIONS[position] else ()
    for role, channel, recipient, type_ in product(
        _ROLE_POSITIONS, _LAST_CHANNELS, _LAST_RECIPIENTS, _CONTENT_TYPES
    ):
        between = PREFIXES[prefix] if _CONTENT_TYPES[type_] else ""
        tool = _ROLE_POSITIONS[role] or _LAST_RECIPIENTS[recipient] or between
        expected = (CALL, tool, "{}") if tool else (_LAST_CHANNELS[channel], "{}")
        header = f"{role}{prefix}<|channel|>{channel}{recipient}{type_}"
        end = "<|call|>" if tool else "<|end|>"
        output = f"{POSITIONS[position]}{header}<|message|>{{}}{end}"
        yield row(output, output, *before, expected)


def can_be_generated(row: Row) -> bool:
    """Whether an engine can generate it: it is not empty, and nothing follows its end."""
    output = ids_of(row.output)
    return bool(output) and not any(token in vocab.TURN_ENDS for token in output[:-1])
