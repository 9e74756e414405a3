"""One normalised request, as frozen values: what every API is read into and what is rendered.

Knows what a conversation is made of. Refuses to know how an API spells it (protocols)
and how Harmony spells it (render).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias, get_args

from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import RequestError, quoted

VOCAB_SIZE = 201_088
"""Ids that gpt-oss has logits for, from 0 on: ``vocab_size`` in its ``config.json``."""


class Effort(str, Enum):
    """How long the model thinks. The value is the word the system message shows."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"

    @classmethod
    def parse(cls, word: object, *, param: str = "reasoning_effort") -> Effort:
        """The effort a request's word stands for (semantics A8).

        Raises ``RequestError`` naming ``param`` for any other word or type.
        """
        effort = EFFORTS.get(word.lower()) if isinstance(word, str) else None
        if effort is None:
            known = ", ".join(EFFORTS)
            raise RequestError(
                f"{param}: unknown effort {quoted(word)}, use one of {known}", param=param
            )
        return effort


NO_THINKING = "none"
"""The effort that is none: no analysis may be written."""

EFFORTS: dict[str, Effort] = {
    NO_THINKING: Effort.LOW,
    "minimal": Effort.LOW,
    "low": Effort.LOW,
    "medium": Effort.MEDIUM,
    "high": Effort.HIGH,
    "xhigh": Effort.HIGH,
    "max": Effort.HIGH,
}


@dataclass(frozen=True, slots=True)
class Instructions:
    """A system or developer message. The leading ones become one developer message (A2, A3)."""

    text: str


@dataclass(frozen=True, slots=True)
class User:
    """What the user said."""

    text: str


@dataclass(frozen=True, slots=True)
class Summary(User):
    """What is left of a conversation that was compacted. The model reads it as the user's."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the assistant thought: the analysis channel. Dropped or kept by A6."""

    text: str


@dataclass(frozen=True, slots=True)
class Preamble:
    """What the assistant told the user before a call: commentary without recipient."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the assistant answered: the final channel."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call by the assistant. ``arguments`` are kept byte for byte (A4)."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool answered to the call ``call_id``.

    ``where`` is the path of this message in the request, for the error when no earlier call
    has that id (A5).
    """

    call_id: str
    text: str
    where: str = "messages"


@dataclass(frozen=True, slots=True)
class ServerCall:
    """A call by the assistant of a tool that the server runs itself, within the same turn.

    ``name`` is the whole recipient: ``python``, ``browser.open``, ``weather.now``. Whatever the
    request at hand declares, it is rendered under that name.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ServerResult:
    """What the tool that the server ran for the call ``call_id`` answered. ``name``: the call's."""

    call_id: str
    name: str
    text: str


BuiltinTool: TypeAlias = Literal["browser", "python"]
"""The namespaces of the tools that gpt-oss was trained with."""

BUILTIN_TOOLS: tuple[str, ...] = get_args(BuiltinTool)


@dataclass(frozen=True, slots=True)
class Syntax:
    """What a text must match: a ``regex`` (all of it), or a grammar in ``lark``'s notation."""

    kind: Literal["regex", "lark"]
    definition: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. ``parameters`` is JSON Schema, ``None`` when it takes none.

    ``strict``: the caller wants arguments that are valid for the schema, or an error when that
    cannot be promised. ``syntax`` is what the input of a freeform tool must match: the string
    ``input`` that is its only parameter. ``origin`` is what the client's API knows the tool by,
    where ``name`` does not say all of it: for that API alone. ``read_only``: it changes nothing, as
    the server that has it says.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    where: str = "tools"
    strict: bool = False
    syntax: Syntax | None = None
    origin: tuple[str, ...] = field(default=(), compare=False)
    read_only: bool | None = None


@dataclass(frozen=True, slots=True)
class Namespace:
    """Tools that the server runs; the model calls one as ``NAMESPACE.TOOL``.

    One with the name of a built-in is shown as gpt-oss was trained to see it, whatever its
    ``tools`` say; ``python`` is called by that name alone, and what is written to it is code.
    ``label`` is what clients and the operator call it, ``problem`` why it has no tools now.
    ``approval`` are the names of tools that the caller wants to be asked about before one of their
    calls is run. ``given``: the request names the server by its URL, it is none of the operator's.
    """

    name: str
    tools: tuple[Tool, ...]
    description: str = ""
    label: str = ""
    problem: str = ""
    approval: frozenset[str] = frozenset()
    given: bool = False

    @property
    def trained(self) -> bool:
        """Whether it is one of the namespaces that gpt-oss was trained with."""
        return self.name in BUILTIN_TOOLS

    @property
    def recipients(self) -> tuple[str, ...]:
        """What calls of its tools are addressed to."""
        if self.name == PYTHON:
            return (PYTHON,)
        return tuple(f"{self.name}.{tool.name}" for tool in self.tools)

    @property
    def by_recipient(self) -> dict[str, Tool]:
        """Its tools, by what calls of them are addressed to."""
        return dict(zip(self.recipients, self.tools, strict=False))  # python has one of each

    def needs_approval(self, recipient: str) -> bool:
        """Whether the caller wants to be asked before a call to ``recipient`` is run."""
        tool = self.by_recipient.get(recipient)
        return tool is not None and tool.name in self.approval


PYTHON = "python"
"""The built-in namespace that is its own and only tool."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the turn may call: ``names`` as declared (``None``: all of them), the recipients
    of tools that the server runs among them.

    ``required``: it has to end in a call of one of them. That no tool may be called is said by a
    turn without tools (A9).
    """

    required: bool = False
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A JSON answer is asked for: by ``schema``, or any JSON object when it is ``None``.

    ``strict``: as for a ``Tool``. With ``syntax`` the answer is a text that matches it, no JSON.
    ``where`` is the field of the request that asks for it: what an error names. It is
    ``strict_implied`` where that field is strict by itself, and no word of its caller's.
    """

    schema: Mapping[str, Any] | None = None
    name: str = "response"
    description: str = ""
    strict: bool = False
    syntax: Syntax | None = None
    where: str = field(default="response_format", compare=False)
    strict_implied: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class AdditionalTools:
    """Tools that a conversation declares behind its beginning: callable from here on.

    One with the name of an earlier one takes its place. Nothing before it is rendered anew (A12).
    """

    tools: tuple[Tool, ...]


@dataclass(frozen=True, slots=True)
class EffortUpdate:
    """From here on, the effort is this one. ``thinking``: as of a ``Turn``."""

    effort: Effort
    thinking: bool = True


@dataclass(frozen=True, slots=True)
class FormatUpdate:
    """From here on, answers have this format; ``None``: none, they are plain text."""

    response_format: ResponseFormat | None


Message: TypeAlias = (
    Instructions
    | User
    | Summary
    | Reasoning
    | Preamble
    | Answer
    | Call
    | Result
    | ServerCall
    | ServerResult
    | AdditionalTools
    | EffortUpdate
    | FormatUpdate
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next id is chosen. ``None`` means: the server's default.

    ``seed`` is of 64 bits and signed: with the same one the same ids are drawn from the same
    logits; without one, others every time.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    frequency_penalty: float | None = None
    seed: int | None = None


RECOMMENDED = Sampling(temperature=1.0, top_p=1.0)
"""What OpenAI recommends for gpt-oss."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop: after ``max_tokens`` ids, or at a string in the content.

    ``None`` means: the server's default. ``one_call`` ends the turn with its first call. ``where``
    is the path of ``max_tokens`` in the request, for the error when a server allows fewer. After
    ``reasoning_tokens`` ids of analysis the model is made to answer; it may not end its turn before
    ``min_tokens`` ids.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    one_call: bool = False
    where: str = "max_tokens"
    reasoning_tokens: int | None = None
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """Everything the next assistant turn depends on.

    ``identity`` replaces the first line of the system message (``None``: openai-harmony's own),
    ``date`` is the current date in it as ``YYYY-MM-DD`` (``None``: no date line, A1),
    ``builtin_tools`` names the built-in namespaces (``browser``, ``python``) that are enabled,
    ``prefill`` is the beginning of the final answer, which the model continues. Without
    ``thinking`` no analysis may be written (the effort then says what the prompt shows).

    ``tools``, ``effort`` and ``response_format`` are what the beginning of the prompt shows;
    messages can change them later on: ``callable_tools`` and ``answer_format`` are what holds for
    the answer, and so does ``thinking``. ``tenant`` is whose turn it is: what is remembered of its
    texts serves nobody else. ``namespaces`` are the tools that the server runs for it, and
    ``max_tool_calls`` how many of their calls it runs (``None``: the server's default). At that
    limit a turn that ``pauses`` ends, until its caller gives it back; of any other the model is
    told, and goes on.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    effort: Effort = Effort.MEDIUM
    response_format: ResponseFormat | None = None
    identity: str | None = None
    date: str | None = None
    builtin_tools: tuple[str, ...] = ()
    prefill: str | None = None
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    tool_choice: ToolChoice = ToolChoice()
    thinking: bool = True
    tenant: str = ""
    namespaces: tuple[Namespace, ...] = ()
    max_tool_calls: int | None = None
    pauses: bool = False

    @property
    def trained_namespaces(self) -> tuple[str, ...]:
        """The built-in namespaces that the prompt shows, whoever runs their tools."""
        served = (each.name for each in self.namespaces if each.trained)
        return tuple(dict.fromkeys((*self.builtin_tools, *served)))

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the next assistant turn knows, each once, as declared last."""
        tools = {tool.name: tool for tool in self.tools}
        for message in self.messages:
            if isinstance(message, AdditionalTools):
                tools.update({tool.name: tool for tool in message.tools})
        return tuple(tools.values())

    @property
    def answer_format(self) -> ResponseFormat | None:
        """The format of the next answer."""
        for message in reversed(self.messages):
            if isinstance(message, FormatUpdate):
                return message.response_format
        return self.response_format

    @property
    def characters(self) -> int:
        """Characters of the conversation: how much work it is to render."""
        return sum(map(_characters, self.messages))


def _characters(message: Message) -> int:
    if isinstance(message, (Call, ServerCall)):
        return len(message.arguments)
    if isinstance(message, AdditionalTools):
        return sum(len(tool.description) for tool in message.tools)
    return 0 if isinstance(message, (EffortUpdate, FormatUpdate)) else len(message.text)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the server was started with and a request may override (A1, A8).

    ``none_effort`` is what the word ``none`` is taken for, thinking; ``None``: that it must not.
    What is ``None`` in ``sampling`` changes nothing. ``namespaces`` are the tools that the server
    can run, for requests that ask for them, and with ``tools_for_all`` for every other as well.
    ``attachments`` is not for a request to override.
    """

    effort: Effort = Effort.MEDIUM
    identity: str | None = None
    date: str | None = None
    builtin_tools: tuple[str, ...] = ()
    thinking: bool = True
    none_effort: Effort | None = None
    sampling: Sampling = RECOMMENDED
    namespaces: tuple[Namespace, ...] = ()
    tools_for_all: bool = False
    attachments: Attachments = Attachments.OMIT

    def unasked(self, tools: Sequence[Tool]) -> tuple[Namespace, ...]:
        """The tools that the server runs for a request that names none of them.

        Without the namespaces that one of the request's own ``tools`` has a name in
        (``weather.now``), and the built-in ones that one is named after (``python``): a client that
        brings its own wants no other. A function ``weather`` is no tool of the server ``weather``.
        """
        own = [tool.name.partition(".") for tool in tools]
        taken = {head for head, dot, _ in own if dot or head in BUILTIN_TOOLS}
        return tuple(
            each
            for each in (self.namespaces if self.tools_for_all else ())
            if each.tools and each.name not in taken
        )

    def enabled(self, requested: Sequence[str] | None) -> tuple[str, ...]:
        """The built-in namespaces of a turn: those ``requested``, each once, or the server's."""
        return self.builtin_tools if requested is None else tuple(dict.fromkeys(requested))

    def reasoning(self, *requested: tuple[str, object]) -> tuple[Effort, bool]:
        """The ``effort`` and the ``thinking`` of a turn (A8).

        ``requested`` are paths in the request and the words there; the first that is not ``None``
        counts. Raises ``RequestError`` naming its path when it is no effort.
        """
        for param, word in requested:
            if word is not None:
                effort = Effort.parse(word, param=param)
                if str(word).lower() != NO_THINKING:
                    return effort, True
                return (effort, False) if self.none_effort is None else (self.none_effort, True)
        return self.effort, self.thinking


@dataclass(frozen=True, slots=True)
class ResponseInfo:
    """What every answer says of itself: hexadecimal ``id_seed``, unix time ``created``, ``model``.

    Passed in, so that nothing below the host needs a clock or a source of random numbers.
    """

    id_seed: str
    created: int
    model: str

    def call_id(self, index: int) -> str:
        """The id of the call that is message ``index`` of the answer: the same in every API."""
        return f"call_{self.id_seed[:20]}{index:04x}"
