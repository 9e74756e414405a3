"""A turn: one request as frozen values, the same for every API.

First the messages of a conversation, then tools and formats, then what a request sets (`Turn`), and
what the server provides (`Defaults`, `ResponseInfo`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias, get_args

from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import RequestError, quoted

# Here and not in `vocab`, because `protocols` may not import `vocab` (`pyproject.toml`).
VOCAB_SIZE = 201_088
"""The number of ids that gpt-oss has logits for: ``vocab_size`` in its ``config.json``. The
encoding has one more (`vocab.SIZE`)."""


class Effort(StrEnum):
    """The reasoning effort. The value is the word in the system message."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"

    @classmethod
    def parse(cls, word: object, *, param: str = "reasoning_effort") -> Effort:
        """The effort of a word (semantics A8). Raises ``RequestError`` naming ``param``."""
        effort = EFFORTS.get(word.lower()) if isinstance(word, str) else None
        if effort is None:
            known = ", ".join(EFFORTS)
            raise RequestError(
                f"{param}: unknown effort {quoted(word)}; use one of {known}", param=param
            )
        return effort


NO_THINKING = "none"
"""The word that turns reasoning off: the model may not write analysis."""

EFFORTS: dict[str, Effort] = {
    NO_THINKING: Effort.LOW,
    "minimal": Effort.LOW,
    "low": Effort.LOW,
    "medium": Effort.MEDIUM,
    "high": Effort.HIGH,
    "xhigh": Effort.HIGH,
    "max": Effort.HIGH,
    "ultra": Effort.HIGH,
}


@dataclass(frozen=True, slots=True)
class Instructions:
    """A system or developer message. The leading ones become one developer message (A2, A3)."""

    text: str


@dataclass(frozen=True, slots=True)
class User:
    text: str


@dataclass(frozen=True, slots=True)
class Summary(User):
    """The summary of a compacted conversation, which the model sees as a message of the user."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning of the assistant: the analysis channel. A6 defines when it is dropped."""

    text: str


@dataclass(frozen=True, slots=True)
class Preamble:
    """Text of the assistant before a call: the commentary channel, without a recipient."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of the assistant: the final channel."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call by the assistant. ``arguments`` are exactly what the model wrote (A4)."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Result:
    call_id: str
    text: str
    where: str = "messages"
    """The path of this message in the request, for the error if there is no such call (A5)."""


@dataclass(frozen=True, slots=True)
class ServerCall:
    """A call of a tool that the server runs within the same turn. ``name`` is the whole recipient:
    ``python``, ``browser.open``, ``weather.now``."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ServerResult:
    """The result of the ``ServerCall`` with the id ``call_id`` and the same ``name``."""

    call_id: str
    name: str
    text: str


BuiltinTool: TypeAlias = Literal["browser", "python"]
"""The built-in tools: the prompt can declare them as gpt-oss was trained to see them."""

BUILTIN_TOOLS: tuple[str, ...] = get_args(BuiltinTool)

TRAINED = frozenset({*BUILTIN_TOOLS, "container"})
"""Namespaces of all tools that gpt-oss was trained with. openai-harmony cannot declare the last."""


SyntaxKind: TypeAlias = Literal["regex", "lark"]


@dataclass(frozen=True, slots=True)
class Syntax:
    """A regular expression, or a grammar in Lark's notation, that a whole text must match."""

    kind: SyntaxKind
    definition: str


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """A JSON Schema; ``None`` if the function takes no parameters."""
    where: str = "tools"
    """The path of the tool in the request, for errors."""
    strict: bool = False
    """Whether the caller wants valid arguments, or an error if they cannot be guaranteed."""
    syntax: Syntax | None = None
    """Restricts the input of a freeform tool: the string ``input``, its only parameter."""
    origin: tuple[str, ...] = field(default=(), compare=False)
    """Identifies the tool in the client's API, where ``name`` is not enough."""
    read_only: bool | None = None
    """Whether the tool changes nothing, as far as its server declares that."""


@dataclass(frozen=True, slots=True)
class WebLimits:
    """What a request permits a browser: domains with their subdomains, and numbers of calls.

    ``allowed`` empty: all domains but the ``blocked`` ones. A domain may have a path.
    """

    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    searches: int | None = None
    fetches: int | None = None

    def permits(self, url: str) -> bool:
        """Whether the page at ``url`` may be shown."""
        if any(_is_in(url, domain) for domain in self.blocked):
            return False
        return not self.allowed or any(_is_in(url, domain) for domain in self.allowed)


def _is_in(url: str, domain: str) -> bool:
    host, _, path = url.partition("://")[2].partition("/")
    site, _, below = domain.lower().rstrip("/").partition("/")
    host = host.rpartition("@")[2].partition(":")[0].lower()
    if host != site and not host.endswith(f".{site}"):
        return False
    return not below or f"{path}/".startswith(f"{below}/")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Tools that the server runs; the model calls one as ``NAMESPACE.TOOL``.

    A built-in namespace is shown as gpt-oss was trained to see it, whatever its ``tools``;
    ``python`` has no tool name, and its input is code.
    """

    name: str
    tools: tuple[Tool, ...]
    description: str = ""
    label: str = ""
    """The name that clients and the operator use."""
    problem: str = ""
    """Why it has no tools at present."""
    approval: frozenset[str] = frozenset()
    """The tools whose calls need the caller's approval."""
    from_request: bool = False
    """Whether the URL of the tool server is in the request, not in the operator's configuration."""
    limits: WebLimits | None = None
    """What the request permits; ``None``: the tool server cannot be limited."""

    @property
    def is_builtin(self) -> bool:
        return self.name in BUILTIN_TOOLS

    @property
    def recipients(self) -> tuple[str, ...]:
        if self.name == PYTHON:
            return (PYTHON,)
        return tuple(f"{self.name}.{tool.name}" for tool in self.tools)

    @property
    def by_recipient(self) -> dict[str, Tool]:
        return dict(zip(self.recipients, self.tools, strict=False))  # python has one recipient

    def needs_approval(self, recipient: str) -> bool:
        tool = self.by_recipient.get(recipient)
        return tool is not None and tool.name in self.approval


PYTHON = "python"
"""The built-in namespace that is its own and only tool."""

BROWSER = "browser"
"""The built-in namespace that searches the web and shows pages (`core.pages`)."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the turn may call. If it is ``required``, the turn ends in such a call.

    ``names`` restricts the choice to these declared tools and server-tool recipients; ``None``
    allows all.

    ``tool_choice: none`` is a turn without tools instead (A9).
    """

    required: bool = False
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The requested format of the answer: JSON that fits ``schema`` (``None``: any object).

    ``strict`` as for a ``Tool``. With ``syntax``, the answer is a text that matches it instead.
    ``where`` is the path of the field in the request, for errors. ``strict_implied``: that field
    has no ``strict`` of its own, so the caller cannot relax it.
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
    """Tools that are callable from here on, in place of earlier ones with the same name. Earlier
    messages stay as rendered (A12)."""

    tools: tuple[Tool, ...]


@dataclass(frozen=True, slots=True)
class EffortUpdate:
    """Changes the effort from here on. ``thinking`` as in a ``Turn``."""

    effort: Effort
    thinking: bool = True


@dataclass(frozen=True, slots=True)
class FormatUpdate:
    """Changes the format of answers from here on; ``None`` for plain text."""

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
"""Responses are stored with the names of these classes and of their fields (`server.storage`): a
renamed one makes them unreadable."""


def latest_tools(tools: tuple[Tool, ...], messages: Iterable[Message]) -> tuple[Tool, ...]:
    """``tools`` and those that ``messages`` declare, each as it was declared last."""
    latest = {tool.name: tool for tool in tools}
    for message in messages:
        if isinstance(message, AdditionalTools):
            latest.update({tool.name: tool for tool in message.tools})
    return tuple(latest.values())


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next id is sampled. ``None`` means the server's default.

    ``seed`` is a signed 64-bit integer: with the same seed, the same logits give the same ids.
    ``top_logprobs``: the log probability of each id is returned, and as many of the likeliest ids
    in its place.
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
    top_logprobs: int | None = None


RECOMMENDED = Sampling(temperature=1.0, top_p=1.0)
"""OpenAI's recommendation for gpt-oss."""


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Where the turn ends, apart from where the model ends it."""

    max_tokens: int | None = None
    """The maximum number of ids; ``None``: the server's default."""
    stop: tuple[str, ...] = ()
    one_call: bool = False
    """Whether the turn ends with its first call."""
    where: str = "max_tokens"
    """The path of ``max_tokens`` in the request, for the log if the server allows fewer."""
    reasoning_tokens: int | None = None
    """The number of ids after which reasoning is cut short."""
    min_tokens: int = 0
    """The number of ids before which the turn cannot end."""
    sets_reasoning: bool = False
    """Whether the request itself sets an effort or a budget, or turns reasoning on or off."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Everything that the next turn of the assistant depends on.

    ``tools``, ``effort`` and ``response_format`` are those at the beginning of the prompt, and
    messages can change them. ``callable_tools``, ``answer_format`` and ``thinking`` apply to the
    answer.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    effort: Effort = Effort.MEDIUM
    response_format: ResponseFormat | None = None
    identity: str | None = None
    """Replaces the first line of the system message; ``None``: openai-harmony's own (A1)."""
    date: str | None = None
    """The current date in the system message, as ``YYYY-MM-DD``; ``None``: no line for it (A1)."""
    builtin_tools: tuple[str, ...] = ()
    """The built-in namespaces (``browser``, ``python``) that are enabled and the client runs."""
    prefill: str | None = None
    """The beginning of the final answer, which the model continues."""
    sampling: Sampling = Sampling()
    limits: OutputLimits = OutputLimits()
    tool_choice: ToolChoice = ToolChoice()
    thinking: bool = True
    """Whether the model may write analysis. If not, the prompt still shows an effort."""
    tenant: str = ""
    """Whoever sent the request. What is cached for one tenant is never used for another."""
    namespaces: tuple[Namespace, ...] = ()
    """The tools that the server runs."""
    max_tool_calls: int | None = None
    """The maximum number of calls that the server runs; ``None``: the server's default."""
    pauses: bool = False
    """Whether the turn ends at that maximum, to continue when the caller sends it back. If not, the
    model reads that no calls are left, and continues."""
    choices: int = 1
    """The number of answers, which are generated independently."""
    prediction: str = ""
    """Text that the answers are likely to repeat."""
    fixed_answer: str = ""
    """The answer, if the server gives it in place of the model. Nothing is generated then."""

    @property
    def builtin_namespaces(self) -> tuple[str, ...]:
        """The built-in namespaces in the prompt, whether the client or the server runs them."""
        served = (namespace.name for namespace in self.namespaces if namespace.is_builtin)
        return tuple(dict.fromkeys((*self.builtin_tools, *served)))

    @property
    def has_browser(self) -> bool:
        """Whether the server runs a browser, whose pages the answer may cite."""
        return any(namespace.name == BROWSER for namespace in self.namespaces)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the next turn of the assistant may call, as they were declared last."""
        return latest_tools(self.tools, self.messages)

    @property
    def answer_format(self) -> ResponseFormat | None:
        """The format of the next answer: that of the last ``FormatUpdate``, if any."""
        for message in reversed(self.messages):
            if isinstance(message, FormatUpdate):
                return message.response_format
        return self.response_format

    @property
    def characters(self) -> int:
        """The number of characters in the conversation, a measure of the cost of rendering."""
        total = 0
        for message in self.messages:
            if isinstance(message, (Call, ServerCall)):
                total += len(message.arguments)
            elif isinstance(message, AdditionalTools):
                total += sum(len(tool.description) for tool in message.tools)
            elif not isinstance(message, (EffortUpdate, FormatUpdate)):
                total += len(message.text)
        return total


class ReasoningField(StrEnum):
    """The field in which Chat Completions sends reasoning, for which that API has none."""

    BOTH = "both"
    REASONING = "reasoning"
    """vLLM and OpenRouter."""
    REASONING_CONTENT = "reasoning_content"
    """DeepSeek, llama.cpp and SGLang."""

    @property
    def names(self) -> tuple[str, ...]:
        both = ReasoningField.REASONING.value, ReasoningField.REASONING_CONTENT.value
        return both if self is ReasoningField.BOTH else (self.value,)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Settings of the server that a request may override (A1, A8), except for ``attachments`` and
    ``reasoning_field``.

    ``none_effort`` is the effort for the word ``none``; ``None`` turns reasoning off.
    ``namespaces`` are the tools that the server can run: for requests that ask for them, and with
    ``tools_for_all`` for all others as well.
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
    reasoning_field: ReasoningField = ReasoningField.BOTH

    def default_namespaces(
        self, tools: Sequence[Tool], requested: Sequence[Namespace] = ()
    ) -> tuple[Namespace, ...]:
        """The tools that the server runs for a request: those ``requested``, and those for all.

        A client with tools of its own does not want similar ones of the server: a namespace is left
        out if one of the request's ``tools`` has a name in it (``weather.now``), or is named like a
        built-in one (``python``). A function ``weather`` does not hide the namespace ``weather``.
        """
        own = [tool.name.partition(".") for tool in tools]
        taken = {head for head, dot, _ in own if dot or head in BUILTIN_TOOLS}
        taken |= {namespace.name for namespace in requested}
        for_all = self.namespaces if self.tools_for_all else ()
        return (
            *requested,
            *(
                namespace
                for namespace in for_all
                if namespace.tools and namespace.name not in taken
            ),
        )

    def enabled(self, requested: Sequence[str] | None) -> tuple[str, ...]:
        """The built-in namespaces of a turn: those ``requested``, or the server's."""
        return self.builtin_tools if requested is None else tuple(dict.fromkeys(requested))

    def reasoning(self, *requested: tuple[str, object]) -> tuple[Effort, bool]:
        """The ``effort`` and the ``thinking`` of a turn (A8).

        ``requested`` are paths in the request with their values; the first that is not ``None`` is
        used. Raises ``RequestError`` with its path if it is not a known effort.
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
    """Metadata of an answer: a hexadecimal ``id_seed``, the Unix time ``created``, the ``model``.

    It is passed in, so that core and protocols need neither a clock nor random numbers.
    """

    id_seed: str
    created: int
    model: str
    choice: int = 0
    """Its place among several answers to the same prompt."""

    def call_id(self, index: int) -> str:
        """The id of the call in message ``index`` of the answer, the same in every API."""
        return f"call_{self.id_seed[:20]}{self.choice or ''}{index:04x}"
