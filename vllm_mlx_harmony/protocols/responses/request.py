"""Responses: turns a request body into a Turn, and into the fields that the response repeats.

See semantics A2 and A8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.text_limits import MAX_JSON_CHARACTERS, characters
from vllm_mlx_harmony.core.turn import (
    NO_THINKING,
    AdditionalTools,
    Call,
    Defaults,
    EffortUpdate,
    FormatUpdate,
    Instructions,
    Message,
    Namespace,
    OutputLimits,
    ResponseInfo,
    ServerResult,
    Tool,
    Turn,
    User,
)
from vllm_mlx_harmony.protocols.encryption import Cipher
from vllm_mlx_harmony.protocols.events import Document, encode
from vllm_mlx_harmony.protocols.request_body import TemplateOptions, reject_unsupported, sampling
from vllm_mlx_harmony.protocols.responses import schema
from vllm_mlx_harmony.protocols.responses.compaction import (
    CompactionEmitter,
    compacted,
    compacting,
    without_trigger,
)
from vllm_mlx_harmony.protocols.responses.emitter import Emitter
from vllm_mlx_harmony.protocols.responses.input_items import ItemReader, Stored, nothing_stored
from vllm_mlx_harmony.protocols.responses.output_items import OutputOptions
from vllm_mlx_harmony.protocols.responses.resource import SentItem, input_items
from vllm_mlx_harmony.protocols.responses.schema import (
    ResponsesBody,
    read_item,
    response_format,
)
from vllm_mlx_harmony.protocols.responses.server_tools import (
    ServerTools,
    chosen_name,
    read_server_tools,
    unavailable_tools,
    without_secrets,
)
from vllm_mlx_harmony.protocols.responses.tools import ToolReader, Tools
from vllm_mlx_harmony.protocols.server_calls import with_missing_results, with_results_moved
from vllm_mlx_harmony.protocols.unavailable import NONE, Unavailable, unavailable
from vllm_mlx_harmony.protocols.validation import invalid, required, unsupported, validate


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A parsed request: the turn for the model, and the form of the answer.

    ``compacts``: the answer is a summary of the conversation. ``notes`` names, for the log, the
    parts of the input that could not be used.
    """

    turn: Turn
    model: str
    stream: bool
    store: bool
    background: bool
    compacts: bool
    previous_response_id: str | None
    conversation_id: str | None
    notes: tuple[str, ...]
    _history: tuple[Message, ...]
    _items: tuple[SentItem, ...]
    _conversation: tuple[Message, ...]
    _to_run: frozenset[str]
    _options: OutputOptions
    _repeated: Document
    _repeated_json: str
    _cipher: Cipher

    def emitter(self, info: ResponseInfo, now: Callable[[], float] | None = None) -> Emitter:
        """Makes the emitter of the answer that ``info`` describes.

        ``now`` returns the Unix time for ``completed_at``, which is null without it.
        """
        made = partial(CompactionEmitter, self._cipher) if self.compacts else Emitter
        return made(
            info,
            self._options,
            self._repeated,
            now,
            stream=self.stream,
            repeated_json=self._repeated_json,
            queues=self.background,
        )

    def input_items(self, info: ResponseInfo) -> list[Document]:
        """The input as items, oldest first, for ``GET /v1/responses/{id}/input_items``."""
        return input_items(self._items, info)

    def compaction(self) -> ResponsesRequest:
        """This request for ``POST /v1/responses/compact``: its answer is a summary, all at once."""
        turn = self.turn if self.compacts else compacting(self.turn)
        return replace(
            self,
            turn=turn,
            compacts=True,
            stream=False,
            store=False,
            background=False,
            conversation_id=None,
        )

    def compacted(self, response: Mapping[str, object], info: ResponseInfo) -> Document:
        """The answer to ``POST /v1/responses/compact``, made of the ``response`` to this.

        It has the user's messages of the whole conversation, and the ``compaction`` item.
        """
        messages = (message.text for message in self._history if type(message) is User)
        earlier = [
            read_item({"type": "message", "role": "user", "content": text}) for text in messages
        ]
        documents = input_items([*earlier, *self._items], info)
        output = response["output"]
        assert isinstance(output, list)
        return {
            "id": response["id"],
            "object": "response.compaction",
            "created_at": response["created_at"],
            "output": [*(item for item in documents if item.get("role") == "user"), *output],
            "usage": response["usage"],
        }

    def as_sent_back(self, message: Message) -> Message:
        return self._options.tools.as_sent_back(message) if isinstance(message, Call) else message

    def conversation(
        self, messages: Iterable[Message], *, ended: bool = True
    ) -> tuple[Message, ...]:
        """The conversation that the next response continues, given the context's ``messages``.

        ``ended``: the response was completed or cut off, not cancelled, and did not fail.

        ``instructions`` are left out, because they apply to this request only. Declared tools stay,
        even with ``tool_choice: none``. A call that was not run has no result, because it may still
        be approved.
        """
        before = {m.call_id for m in self.turn.messages if isinstance(m, ServerResult)}
        run_now = self._to_run - before  # calls of the history that were run for this request
        results: list[Message] = []
        other_messages: list[Message] = []
        for message in messages:
            is_theirs = isinstance(message, ServerResult) and message.call_id in run_now
            (results if is_theirs else other_messages).append(message)
        answer = other_messages[len(self.turn.messages) :]
        if self.compacts:
            return compacted(self._conversation, answer) if ended else self._conversation
        return (
            *with_results_moved((*self._conversation, *results)),
            *map(self.as_sent_back, answer),
        )


def read(
    body: object,
    defaults: Defaults,
    cipher: Cipher,
    history: tuple[Message, ...] = (),
    stored: Stored = nothing_stored,
    *,
    listed_labels: frozenset[str] = frozenset(),
    earlier: Sequence[Mapping[str, object]] = (),
) -> ResponsesRequest:
    """The request in ``body``, the parsed JSON of ``POST /v1/responses``.

    ``history`` is the conversation of ``previous_response_id``; ``stored`` looks up an item of an
    earlier response, for ``item_reference``; ``listed_labels`` are those of the tool servers
    whose tools the client has already received; ``earlier`` are the items of the ``conversation``,
    which come before ``input``. Raises only ``RequestError``, naming the field, whatever ``body``
    is. Unknown fields are ignored.
    """
    request = validate(ResponsesBody, body)
    reject_unsupported(body, schema.UNSUPPORTED_FIELDS)
    if request.background and request.store is False:
        problem = "background requires store: a response that is not stored cannot be retrieved"
        raise unsupported("background", problem)
    if request.conversation and request.previous_response_id is not None:
        problem = "conversation cannot be combined with previous_response_id"
        raise invalid("conversation", problem)
    declared = ToolReader()
    shown = declared.declare(request.tools or (), "tools")
    declared.known(history)
    server_tools = read_server_tools(request.tools or (), defaults.namespaces)
    calls = {message.id for message in history if isinstance(message, Call)}
    reader = ItemReader(cipher, declared, defaults, stored, calls, server=server_tools)
    before = [*map(read_item, earlier)]
    if request.input is None and not (history or before):
        raise required("input")
    items = without_trigger(request.input or ())
    compacts = len(items) < len(request.input or ())
    if compacts and request.conversation:
        problem = "a conversation cannot be compacted in place: use /v1/responses/compact"
        raise unsupported("conversation", problem)
    messages = reader.messages([*before, *items], len(before))
    conversation = with_results_moved((*history, *messages))
    declaring = (AdditionalTools, EffortUpdate, FormatUpdate)
    if all(isinstance(message, declaring) for message in conversation):
        raise RequestError("input is empty: there is nothing to answer", param="input")
    own = list(map(Tool, declared.names))
    namespaces = defaults.default_namespaces(own, server_tools.namespaces)
    server = replace(server_tools, namespaces=namespaces)
    instructions = (Instructions(request.instructions),) if request.instructions else ()
    builtin_tools = defaults.enabled(
        (request.chat_template_kwargs or TemplateOptions()).builtin_tools
    )
    missing = NONE
    if not (request.tool_choice and request.tool_choice.type == "none"):
        has_other_tools = bool(own or server.namespaces or builtin_tools)
        missing = _unavailable(
            request, server, conversation, has_other_tools=has_other_tools or compacts
        )
    choice = None if missing.answer else request.tool_choice
    tools = declared.tools(shown, choice, server, builtin_tools)
    # A call without a result needs approval, or was cut off. It runs only if it was approved.
    runs = server.namespaces and not tools.none and not compacts
    to_run = frozenset(reader.approved if runs else ())
    turn = read_turn(
        request,
        defaults,
        missing.announced((*instructions, *with_missing_results(conversation, to_run))),
        tools,
        server,
    )
    turn = replace(turn, fixed_answer="" if compacts else missing.answer)
    include = request.include or ()
    lists = [item.raw for item in (*before, *items) if item.type == "mcp_list_tools"]
    listed_labels |= {str(document.get("server_label")) for document in lists}
    repeats = {**repeated(request, defaults), **missing.fields}
    return ResponsesRequest(
        turn=compacting(turn) if compacts else turn,
        model=request.model,
        stream=bool(request.stream),
        store=request.store is not False,
        background=bool(request.background),
        compacts=compacts,
        previous_response_id=request.previous_response_id,
        conversation_id=request.conversation.id if request.conversation else None,
        notes=tuple(reader.notes),
        _history=history,
        _items=tuple(SentItem(item.type, item.id, item.raw) for item in items),
        _conversation=tuple(conversation),
        _to_run=to_run,
        _options=OutputOptions(
            tools=tools,
            summarized=summary(request) is not None,
            cipher=cipher if "reasoning.encrypted_content" in include else None,
            server=server,
            refused=missing.refused,
            tool_lists=(
                *(namespace for namespace in server.mcp if namespace.label not in listed_labels),
                *_unavailable_servers(request, missing),
            ),
            shows_outputs="code_interpreter_call.outputs" in include,
            shows_sources="web_search_call.action.sources" in include,
        ),
        _repeated=repeats,
        _repeated_json=encode(repeats)[1:-1] if request.stream or request.background else "",
        _cipher=cipher,
    )


def _unavailable(
    body: ResponsesBody, server: ServerTools, messages: Iterable[Message], *, has_other_tools: bool
) -> Unavailable:
    """The declared tools that nobody runs. ``has_other_tools``: the request has others as well."""
    tools = unavailable_tools(body.tools or (), server)
    choice = body.tool_choice
    if choice is not None and (name := chosen_name(choice)) in tools:
        return unavailable(tools, (name,), messages, forced=True)
    forced = choice is not None and "required" in (choice.type, choice.mode)
    return unavailable(tools, () if has_other_tools else tools, messages, forced=forced)


def _unavailable_servers(body: ResponsesBody, missing: Unavailable) -> Iterator[Namespace]:
    """The MCP servers that are refused. Their lists of tools are empty, and have an error."""
    labels = [tool.server_label for tool in body.tools or () if isinstance(tool, schema.McpTool)]
    for name in missing.refused:
        if name in labels:
            yield Namespace(name, (), label=name, problem="this server runs no tools")


def previous_response_id(body: object) -> str | None:
    """The id of the response that ``body`` continues.

    Read before ``body`` is validated, because the history is needed for that.
    """
    key = body.get("previous_response_id") if isinstance(body, dict) else None
    return key if isinstance(key, str) else None


def conversation_id(body: object) -> str | None:
    """The id of the conversation that ``body`` is a part of, read like the previous response's."""
    conversation = body.get("conversation") if isinstance(body, dict) else None
    key = conversation.get("id") if isinstance(conversation, dict) else conversation
    return key if isinstance(key, str) else None


def read_turn(
    body: ResponsesBody,
    defaults: Defaults,
    messages: tuple[Message, ...],
    tools: Tools,
    server: ServerTools,
) -> Turn:
    """The turn that a validated body asks for. Raises only ``RequestError``."""
    template = body.chat_template_kwargs or TemplateOptions()
    effort, thinking = defaults.reasoning(*_effort(body))
    for message in messages:
        if isinstance(message, EffortUpdate):
            thinking = message.thinking
    budget = None if body.thinking_token_budget == -1 else body.thinking_token_budget
    if tools.none:
        messages = tuple(
            message for message in messages if not isinstance(message, AdditionalTools)
        )
    format_ = body.text.format if body.text else None
    has_logprobs = body.top_logprobs or "message.output_text.logprobs" in (body.include or ())
    return Turn(
        messages=messages,
        tools=tools.shown,
        effort=effort,
        response_format=response_format(format_, "text.format") if format_ else None,
        identity=template.model_identity or defaults.identity,
        date=defaults.date,
        builtin_tools=tools.builtin_tools,
        sampling=sampling(body, top_logprobs=(body.top_logprobs or 0) if has_logprobs else None),
        limits=OutputLimits(
            max_tokens=body.max_output_tokens,
            one_call=body.parallel_tool_calls is False,
            where="max_output_tokens",
            reasoning_tokens=budget,
            min_tokens=body.fewest_tokens,
            sets_reasoning=body.thinking_token_budget is not None
            or any(word is not None for _, word in _effort(body))
            or any(isinstance(message, EffortUpdate) for message in messages),
        ),
        tool_choice=tools.choice,
        thinking=thinking and budget != 0,
        namespaces=() if tools.none else server.namespaces,
        max_tool_calls=body.max_tool_calls if server.namespaces else None,
    )


def _effort(body: ResponsesBody) -> tuple[tuple[str, object], ...]:
    """The fields that may set the effort, in order of precedence, and their values (A8)."""
    template = body.chat_template_kwargs or TemplateOptions()
    return (
        ("reasoning.effort", body.reasoning.effort if body.reasoning else None),
        ("reasoning_effort", body.reasoning_effort),
        ("chat_template_kwargs.reasoning_effort", template.reasoning_effort),
    )


# --- Fields of the request that the response repeats.


def summary(body: ResponsesBody) -> str | None:
    """The kind of summary of the reasoning that the request asks for, if any."""
    requested = body.reasoning and (body.reasoning.summary or body.reasoning.generate_summary)
    return requested if requested in ("auto", "concise", "detailed") else None


def repeated(body: ResponsesBody, defaults: Defaults) -> Document:
    """The fields of the request that a response repeats: all that the public schema has.

    Sampling fields have the values that are used, the server's defaults included.
    """

    def used(field: str, neutral: float) -> float:
        value = getattr(body, field)
        if value is None:
            value = getattr(defaults.sampling, field)
        return neutral if value is None else float(value)

    words = (str(word).lower() for _, word in _effort(body) if word is not None)
    effort = next(words, defaults.effort.value if defaults.thinking else NO_THINKING)
    if body.thinking_token_budget == 0:
        effort = NO_THINKING
    text = body.text or schema.TextOptions()
    echoed = {
        "background": bool(body.background),
        "conversation": {"id": body.conversation.id} if body.conversation else None,
        "frequency_penalty": used("frequency_penalty", 0.0),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": used("presence_penalty", 0.0),
        "previous_response_id": body.previous_response_id,
        "prompt": None,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": None,
        "reasoning": {"effort": effort, "summary": summary(body)},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": used("temperature", 1.0),
        "text": {"format": _format(text.format), "verbosity": text.verbosity or "medium"},
        "tool_choice": body.tool_choice.raw if body.tool_choice else "auto",
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": used("top_p", 1.0),
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    sizes = {field: characters(value) for field, value in echoed.items()}
    if sum(sizes.values()) > MAX_JSON_CHARACTERS:
        longest = max(sizes, key=sizes.__getitem__)
        problem = (
            f"{longest} is too long: a response echoes at most "
            f"{MAX_JSON_CHARACTERS} characters of its request"
        )
        raise RequestError(problem, param=longest, code="string_above_max_length")
    return echoed


def _format(requested: schema.TextFormat | None) -> Document:
    if requested is None or requested.type != "json_schema":
        return {"type": requested.type if requested else "text"}
    fields = requested.model_dump(by_alias=True)
    return {**fields, "name": requested.name or "response", "strict": bool(requested.strict)}


def _tool(tool: schema.ResponsesTool) -> Document:
    """The tool as it was sent, with every field that clients require of it."""
    match tool:
        case schema.FunctionTool():
            return {"description": None, "parameters": None, "strict": None, **tool.raw}
        case schema.NamespaceTool():
            inner = [_tool(function) for function in tool.tools]
            return {**tool.raw, "description": tool.description or "", "tools": inner}
        case schema.McpTool():
            return without_secrets(tool.raw)
        case _:
            return dict(tool.raw)
