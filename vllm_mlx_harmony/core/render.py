"""Renders a turn as the token ids of its prompt (semantics A).

Text is always encoded as ordinary text (A7).
"""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, compress, takewhile
from sys import getsizeof
from typing import TypeAlias

from vllm_mlx_harmony.core import lru, typescript, vocab
from vllm_mlx_harmony.core.errors import PromptTooLong, RequestError, quoted
from vllm_mlx_harmony.core.names import FUNCTIONS, Names
from vllm_mlx_harmony.core.replay import (
    GeneratedTurn,
    ReplayScope,
    Span,
    intern_ids,
    is_self_contained,
)
from vllm_mlx_harmony.core.text_limits import (
    CONTEXT_TOKENS,
    MAX_JSON_CHARACTERS,
    MAX_PROMPT_TOKENS,
    characters,
    clean,
)
from vllm_mlx_harmony.core.turn import (
    BUILTIN_TOOLS,
    AdditionalTools,
    Answer,
    Call,
    Effort,
    EffortUpdate,
    FormatUpdate,
    Instructions,
    Message,
    Namespace,
    Preamble,
    Reasoning,
    ResponseFormat,
    Result,
    ServerCall,
    ServerResult,
    Summary,
    Tool,
    Turn,
    User,
    latest_tools,
)

# openai_harmony is imported where it is used, so that this package can be imported without it and
# report what is missing.


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt: its token ``ids``, and the ``names`` for reading the answer's recipients."""

    ids: tuple[int, ...]
    names: Names


def render(turn: Turn, replay: ReplayScope | None = None) -> Rendered:
    """The prompt of ``turn``, which ends where the model continues: ``<|start|>assistant``.

    Turns of the history that ``replay`` remembers are inserted exactly as they were generated.

    Raises ``RequestError`` naming the field at fault: no messages (A11), a result without its call
    (A5), empty or duplicate tool names (A10), parameters that do not describe an object, an unknown
    built-in tool.
    """
    if not turn.messages:
        raise RequestError(
            "no message has any content, so there is nothing to answer", param="messages"
        )
    names = Names.of(turn)
    # The leading instructions and tools become one developer message (A2, A3).
    leading = tuple(takewhile(lambda message: isinstance(message, _LEADING), turn.messages))
    rest = turn.messages[len(leading) :]
    tools = latest_tools(turn.tools, leading)
    texts = (message.text for message in leading if isinstance(message, Instructions))
    instructions = "\n\n".join(text for text in texts if text.strip())
    ids = list(_system(turn, bool(tools)))
    budget = typescript.SizeBudget()
    ids += _developer(turn, instructions, tools, names, budget)
    history = [(rest, None)] if replay is None else replay.history(rest)
    shown = _without_stale_reasoning(history)
    for message in _encode_messages(shown, names, budget, tenant=turn.tenant):
        ids += message
    ids += opening(turn.prefill)
    return Rendered(tuple(ids), names)


def render_messages(
    messages: Iterable[Message],
    names: Names,
    calls: Mapping[str, str] | None = None,
    tenant: str = "",
) -> list[int]:
    """The ids of ``messages``, as they follow the system and the leading developer message.

    ``calls`` maps the ids of calls before ``messages`` to the names of their tools. Calls in
    ``messages`` are added; the latest one with an id counts. No reasoning is dropped (A6), since
    that depends on the whole conversation. Raises ``RequestError`` naming ``Result.where`` if no
    earlier call has the id of a result (A5).
    """
    written = _encode_messages([([*messages], None)], names, typescript.SizeBudget(), calls, tenant)
    return [token for ids in written for token in ids]


# --- bodies ---

CACHE_BYTES = 64 * 2**20
"""Bytes of the cache of messages and their ids, over all conversations."""

_messages: lru.ByteLRU[tuple[str, type, str, str], tuple[int, ...]] = lru.ByteLRU(CACHE_BYTES)


def _message(tenant: str, kind: type, text: str, tool: str = "") -> tuple[int, ...]:
    """The ids of a message. They are cached, since the history is sent again with every turn.

    ``tool`` is the recipient of a call or the author of a result. Each ``tenant`` has its own
    entries, so that no timing reveals another tenant's messages.
    """
    key = tenant, kind, tool, text
    ids = _messages.get(key)
    if ids is None:
        is_builtin = tool.partition(".")[0] in BUILTIN_TOOLS
        if kind is Call:
            header = _call_header(tenant, tool)
        elif kind is Result:
            # On the channel on which the tool was called (A5).
            channel = "analysis" if is_builtin else "commentary"
            header = _header(tenant, f"{tool} to=assistant", channel)
        else:
            header = _header(tenant, *_HEADERS[kind])
        end = (vocab.CALL if kind is Call else vocab.END,)
        ids = intern_ids(chain(header, vocab.encode(text), end))
        _messages.put(key, ids, getsizeof(ids) + getsizeof(text) + _OVERHEAD)
    return ids


_OVERHEAD = 512
"""The approximate size of a cached message, without its ids and its text."""

# --- headers ---


_HEADERS: dict[type, tuple[str, str]] = {
    Instructions: ("developer", ""),
    AdditionalTools: ("developer", ""),
    FormatUpdate: ("developer", ""),
    EffortUpdate: ("system", ""),
    User: ("user", ""),
    Summary: ("user", ""),
    Reasoning: ("assistant", "analysis"),
    Preamble: ("assistant", "commentary"),
    Answer: ("assistant", "final"),
}
"""The role and the channel of each message that neither calls a tool nor is its result."""

_headers: lru.ByteLRU[tuple[str, ...], tuple[int, ...]] = lru.ByteLRU(CACHE_BYTES // 32)


def _header(tenant: str, role: str, channel: str = "", content_type: str = "") -> tuple[int, ...]:
    """``<|start|>ROLE<|channel|>CHANNEL<|constrain|>TYPE<|message|>``, without empty parts.

    Cached per ``tenant``, since a header may contain the name of a tool.
    """
    key = tenant, role, channel, content_type
    header = _headers.get(key)
    if header is None:
        ids = [vocab.START, *vocab.encode(role)]
        if channel:
            ids += [vocab.CHANNEL, *vocab.encode(channel)]
        if content_type:
            ids += [vocab.CONSTRAIN, *vocab.encode(content_type)]
        header = (*ids, vocab.MESSAGE)
        _headers.put(key, header, getsizeof(header) + sum(map(getsizeof, key)) + _OVERHEAD)
    return header


def _call_header(tenant: str, tool: str) -> tuple[int, ...]:
    if tool.partition(".")[0] in BUILTIN_TOOLS:
        # Built-in tools are called on the analysis channel, with the bare content type ``code``,
        # even for the browser's JSON.
        return _header(tenant, "assistant", f"analysis to={tool} code")
    # As the model writes it (A4): openai-harmony's renderer puts ``to=`` after the role.
    return _header(tenant, "assistant", f"commentary to={tool} ", "json")


def expected_headers(names: Names, tenant: str = "") -> tuple[tuple[int, ...], ...]:
    """The headers of the messages that a model may write: reasoning, an answer, and calls."""
    recipients = [*map(names.recipient, names.aliases), *names.server]
    return (
        _header(tenant, "assistant", "analysis"),
        _header(tenant, "assistant", "final"),
        *(_call_header(tenant, recipient) for recipient in recipients),
    )


def opening(prefill: str | None = None) -> list[int]:
    """``<|start|>assistant``, or with ``prefill`` the beginning of a final message."""
    if prefill is None:
        return [vocab.START, *vocab.encode("assistant")]
    return [*_header("", "assistant", "final"), *vocab.encode(prefill)]


def answer_ids(text: str) -> tuple[int, ...]:
    """The ids of a whole answer, as a model generates it after `opening`."""
    header = _header("", "assistant", "final")[len(opening()) :]
    return (*header, *vocab.encode(text), vocab.RETURN)


# --- which messages, in which order ---


_LEADING = (Instructions, AdditionalTools)

_Group: TypeAlias = tuple[Sequence[Message], Sequence[Span] | None]
"""Messages as the client sent them, and the generated spans that replace them, if any."""


def _without_stale_reasoning(
    history: Sequence[tuple[Sequence[Message], GeneratedTurn | None]],
) -> Iterator[_Group]:
    """The groups of ``history``, without reasoning that led to an earlier answer (A6).

    Spans that cannot be placed without the reasoning before them are replaced by the messages.
    """
    kinds = [turn.kinds if turn else [*map(type, sent)] for sent, turn in history]
    last = max((at for at, own in enumerate(kinds) if Answer in own), default=-1)
    for at, ((sent, turn), own) in enumerate(zip(history, kinds, strict=True)):
        spans = turn.spans if turn else None
        past_answer = len(own) if at < last else 0
        if at == last:
            past_answer = len(own) - own[::-1].index(Answer)
        if Reasoning not in own[:past_answer]:
            yield sent, spans
            continue
        stays = [kind is not Reasoning for kind in own[:past_answer]]
        stays += [True] * len(own[past_answer:])
        if spans is None:
            yield [*compress(sent, stays)], None
        elif all(map(is_self_contained, left := [*compress(spans, stays)])):
            yield sent, left
        else:
            yield [message for message in sent if not isinstance(message, Reasoning)], None


def _encode_messages(  # noqa: C901 - one case per kind of message
    groups: Iterable[_Group],
    names: Names,
    budget: typescript.SizeBudget,
    calls: Mapping[str, str] | None = None,
    tenant: str = "",
) -> list[tuple[int, ...]]:
    """The ids of each message. All tools in them share the ``budget``."""
    written: list[tuple[int, ...]] = []
    made = dict(calls or {})
    tokens = 0

    def ids(message: Message) -> tuple[int, ...]:
        kind: type[Message] = type(message)
        tool = ""
        if isinstance(message, Call):
            text, tool = message.arguments, names.recipient(message.name)
        elif isinstance(message, Result):
            called = made.get(message.call_id)
            if called is None:
                call_id = quoted(message.call_id)
                problem = f"no earlier message has a tool call with the id {call_id}"
                raise RequestError(problem, param=message.where)
            text, tool = message.text, names.recipient(called)
        elif isinstance(message, (User, Reasoning, Preamble, Answer)):
            text = message.text
        elif isinstance(message, ServerCall):
            kind, text, tool = Call, message.arguments, message.name
        elif isinstance(message, ServerResult):
            kind, text, tool = Result, message.text, message.name
        elif isinstance(message, AdditionalTools):
            text = _TOOLS + _tools(Namespace(FUNCTIONS, message.tools), names, tenant, budget)
        elif isinstance(message, EffortUpdate):
            text = f"Reasoning: {message.effort.value}"
        elif isinstance(message, FormatUpdate):
            requested = message.response_format
            text = _PLAIN if requested is None else _response_format(requested)
        else:
            text = _INSTRUCTIONS + message.text
        return _message(tenant, kind, text, tool)

    for sent, spans in groups:
        for message in sent:
            if spans is None:
                written.append(ids(message))
                tokens += len(written[-1])
                if tokens > MAX_PROMPT_TOKENS:
                    raise PromptTooLong(tokens, CONTEXT_TOKENS, at_least=True)
            if isinstance(message, Call):
                made[message.id] = message.name
        written += spans or ()
    return written


# --- the system and the developer message ---


def _system(turn: Turn, tools: bool) -> tuple[int, ...]:
    """The system message of openai-harmony, with the caller's identity and date inserted."""
    blanks = {_IDENTITY: turn.identity or "", _DATE: turn.date or ""}
    builtin = turn.builtin_namespaces
    form = _system_form(*map(bool, blanks.values()), turn.effort, builtin, tools)
    text = "".join(clean(blanks.get(part, part)) for part in _BLANKS.split(form))
    return _message(turn.tenant, EffortUpdate, text)


_IDENTITY, _DATE = "\ue000", "\ue001"
_BLANKS = re.compile(f"([{_IDENTITY}{_DATE}])")


@lru_cache(maxsize=64)
def _system_form(
    identity: bool, date: bool, effort: Effort, builtin: tuple[str, ...], tools: bool
) -> str:
    """The text of the system message, with placeholders for the identity and the date."""
    from openai_harmony import Message as HarmonyMessage
    from openai_harmony import (
        ReasoningEffort,
        RenderOptions,
        Role,
        SystemContent,
        ToolNamespaceConfig,
    )

    content = SystemContent.new().with_reasoning_effort(ReasoningEffort[effort.name])
    if identity:
        content = content.with_model_identity(_IDENTITY)
    if date:
        content = content.with_conversation_start_date(_DATE)
    for name in builtin:
        if name not in BUILTIN_TOOLS:
            known = " and ".join(BUILTIN_TOOLS)
            problem = f"there is no built-in tool {quoted(name)}: only {known}"
            raise RequestError(problem, param="builtin_tools")
        configured: ToolNamespaceConfig = getattr(
            ToolNamespaceConfig, name
        )()  # its methods are named after tools
        content = content.with_tools(configured)
    message = HarmonyMessage.from_role_and_content(Role.SYSTEM, content)
    ids = vocab.encoding().render(message, RenderOptions(conversation_has_function_tools=tools))
    return vocab.encoding().decode_utf8(ids[ids.index(vocab.MESSAGE) + 1 : -1])


def _developer(
    turn: Turn,
    instructions: str,
    tools: tuple[Tool, ...],
    names: Names,
    budget: typescript.SizeBudget,
) -> tuple[int, ...]:
    """The developer message of A2, encoded as one text, because a token may span two sections; no
    ids if it would be empty."""
    sections = []
    if instructions:
        sections.append(_INSTRUCTIONS + instructions)
    namespaces = [Namespace(FUNCTIONS, tools)] if tools else []
    namespaces += [namespace for namespace in turn.namespaces if not namespace.is_builtin]
    declared = [_tools(namespace, names, turn.tenant, budget) for namespace in namespaces]
    if declared:
        sections.append(_TOOLS + "\n\n".join(declared))
    if turn.response_format is not None:
        sections.append(_response_format(turn.response_format))
    return _message(turn.tenant, Instructions, "\n\n".join(sections)) if sections else ()


_INSTRUCTIONS = "# Instructions\n\n"
_TOOLS = "# Tools\n\n"
_FORMATS = "# Response Formats\n\n"


_sections: lru.ByteLRU[tuple[str, bytes], tuple[str, int, int]] = lru.ByteLRU(CACHE_BYTES // 8)
"""The text of a namespace, and the characters and schemas that it takes from the budget."""


def _tools(namespace: Namespace, names: Names, tenant: str, budget: typescript.SizeBudget) -> str:
    """A namespace of the ``# Tools`` section. Cached per ``tenant``, if it is plain JSON."""
    tools, description = namespace.tools, namespace.description
    alias = names.alias if namespace.name == FUNCTIONS else str
    values = [(alias(tool.name), tool.description, tool.parameters) for tool in tools]
    content = namespace.name, description, values
    try:
        # Writing a text of megabytes holds the interpreter lock. The default version takes a fifth
        # of the time, but only version 2 writes equal values as equal bytes. Both are faster than
        # ``json``.
        size = len(marshal.dumps(content))
        key = marshal.dumps(content, 2) if size <= MAX_JSON_CHARACTERS else b""
    except ValueError:
        size, key = 0, b""
    budget.tool = (budget.tool, *tools)[-1]  # which an error names, unless it is due to one tool
    if (size := max(size, len(key))) > MAX_JSON_CHARACTERS:
        budget.take(size)  # Larger than the whole budget, so this raises.
    known = _sections.get((tenant, key))
    if known is not None:
        text, *sizes = known
        budget.take(*sizes)
        return text
    before = replace(budget)
    declared: list[str] = []
    for tool in tools:
        parameters, about = typescript.parameters(tool, budget), clean(tool.description)
        declared.append(typescript.declaration(alias(tool.name), about, parameters))
        budget.take(len(declared[-1]))
    text = typescript.section(namespace.name, declared, clean(description))
    if key:
        taken = before.characters - budget.characters, before.schemas - budget.schemas
        _sections.put((tenant, key), (text, *taken), len(key) + getsizeof(text) + _OVERHEAD)
    return text


_JSON_OBJECT_FORMAT = ResponseFormat(
    schema={"type": "object"},
    name="json_object",
    description="The answer is one JSON object, without any text or code fence around it.",
)

_PLAIN = f"{_FORMATS}None any more: answer in plain text."


def _response_format(requested: ResponseFormat) -> str:
    """``# Response Formats`` as in openai-harmony's guide: name, comment, JSON Schema (or the
    grammar of a format that is not JSON)."""
    if requested.syntax is not None:
        rule = f"// The answer matches this {requested.syntax.kind} grammar, and is nothing else."
        definition = requested.syntax.definition.strip()
        return f"{_FORMATS}## {requested.name}\n\n{rule}\n{definition}"
    shown = _JSON_OBJECT_FORMAT if requested.schema is None else requested
    if characters(shown.schema) + len(shown.description) > MAX_JSON_CHARACTERS:
        problem = f"the schema is too large: more than {MAX_JSON_CHARACTERS} characters"
        raise RequestError(problem, param=requested.where)
    try:
        text = json.dumps(shown.schema, ensure_ascii=False, separators=(",", ":"))
    except (RecursionError, TypeError, ValueError) as error:
        problem = f"the schema of the response format cannot be written as JSON: {error}"
        raise RequestError(problem, param=requested.where) from error
    comment = "".join(f"// {line}\n" for line in shown.description.splitlines())
    return f"{_FORMATS}## {shown.name}\n\n{comment}{text}"
