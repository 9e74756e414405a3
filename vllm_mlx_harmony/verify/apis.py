"""The three APIs: how each writes a request, and reads an answer, whole or streamed.

Documents are validated against the types of the official SDKs, which is what clients see. The SDKs
themselves are lenient (they construct without validating), and so a wrong document shows up later,
in the client. What types cannot say, the order of events and that deltas add up, is checked here.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from httpx_sse import ServerSentEvent
from pydantic import TypeAdapter, ValidationError

from vllm_mlx_harmony.verify.values import (
    Ask,
    Call,
    Document,
    Failed,
    ReceivedAnswer,
    Result,
    Usage,
    require,
)

DONE = "[DONE]"


class Api(ABC):
    """One of the APIs. ``link`` is its reference.

    ``strict``: documents must have the SDK's types. Otherwise only what is read of them counts, so
    that a field that is missing is one failure of the wire, and not one of each check.
    """

    name: str
    path: str
    link: str

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict

    def validate(self, name: str, document: object) -> None:
        """Raises ``Failed`` if a document does not have a type of the SDK, by its name."""
        if self.strict:
            validate(name, document)

    @abstractmethod
    def body(self, model: str, ask: Ask) -> Document:
        """The body of a request, not streamed."""

    @abstractmethod
    def read(self, document: Document) -> ReceivedAnswer:
        """The answer in a response. Raises ``Failed`` if it is not of the SDK's type."""

    @abstractmethod
    def assemble(self, events: Sequence[ServerSentEvent]) -> Document:
        """The response that a stream adds up to. Raises ``Failed`` if an event is wrong."""

    def check_error(self, document: Document) -> None:
        """Raises ``Failed`` if an error does not have the API's shape."""
        error = document.get("error")
        require(isinstance(error, dict), "an error without the object `error`")
        for name in ("message", "type"):
            text = dict(error or {}).get(name)
            require(isinstance(text, str) and text, f"an error whose `{name}` is no text")


NEW = frozenset({"cache_write_tokens"})
"""Fields that only the newest SDKs require: the servers that lack them are not wrong."""


def validate(name: str, document: object) -> None:
    """Validates against a type of an SDK, by its name in ``_types``. Raises ``Failed``.

    Of a union, pydantic reports what is wrong with each member. Here, only the member that has the
    document's ``type`` counts.
    """
    try:
        _types()[name].validate_python(document)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    else:
        return
    of_type = [error for error in errors if error["loc"][-1:] == ("type",)]
    other_members = {error["loc"][:-1] for error in of_type if error["type"] == "literal_error"}
    meant = [
        error
        for error in errors
        if not any(error["loc"][:end] in other_members for end in range(len(error["loc"]) + 1))
    ]
    if not meant:  # no member has the type
        first = min(of_type, key=lambda error: len(error["loc"]))
        raise Failed(f"not the SDK's {name}: unknown type {first['input']!r:.80}")
    for problem in meant:
        if problem["type"] != "missing" or problem["loc"][-1] not in NEW:
            where = ".".join(map(str, problem["loc"]))
            raise Failed(f"not the SDK's {name}: {problem['msg']} at {where or 'the top'}")


@cache
def _types() -> dict[str, TypeAdapter[Any]]:
    """Imported late: the SDKs take seconds."""
    from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
    from openai.types import Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.conversations import Conversation
    from openai.types.responses import Response, ResponseStreamEvent

    unions = {
        "ResponseStreamEvent": ResponseStreamEvent,
        "RawMessageStreamEvent": RawMessageStreamEvent,
    }
    models = (
        *(Model, ChatCompletion, ChatCompletionChunk, Response, Conversation),
        *(Message, MessageTokensCount),
    )
    types = {**unions, **{model.__name__: model for model in models}}
    return {name: TypeAdapter(kind) for name, kind in types.items()}


def parsed(text: str) -> Document:
    """A JSON object. Raises ``Failed``."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise Failed(f"not JSON ({error}): {text[:80]!r}") from error
    require(isinstance(document, dict), f"not a JSON object: {text[:80]!r}")
    return dict(document)


def _without_empty(fields: Document) -> Document:
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def _usage(document: Document, prompt: str, output: str) -> Usage:
    """The usage in a response of OpenAI's, by the API's words for the prompt and the output."""
    usage = document.get("usage") or {}
    return Usage(
        usage.get(f"{prompt}_tokens", 0),
        usage.get(f"{output}_tokens", 0),
        (usage.get(f"{prompt}_tokens_details") or {}).get("cached_tokens"),
        (usage.get(f"{output}_tokens_details") or {}).get("reasoning_tokens"),
    )


class Chat(Api):
    name = "chat"
    path = "/v1/chat/completions"
    link = "https://platform.openai.com/docs/api-reference/chat"

    def body(self, model: str, ask: Ask) -> Document:
        messages: list[Document] = [{"role": "system", "content": ask.system}] if ask.system else []
        for message in ask.messages:
            match message:
                case str():
                    messages.append({"role": "user", "content": message})
                case ReceivedAnswer():
                    messages.extend(message.history)
                case Result():
                    result = {"tool_call_id": message.call.id, "content": message.text}
                    messages.append({"role": "tool", **result})
        named = {"type": "function", "function": {"name": ask.choice}}
        functions = [asdict(tool) for tool in ask.tools]
        answer = {"name": "answer", "schema": ask.schema, "strict": True}
        options = {
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": ask.choice if ask.choice in ("required", "none", "") else named,
            "response_format": ask.schema and {"type": "json_schema", "json_schema": answer},
            "reasoning_effort": ask.effort,
            "stop": ask.stop,
        }
        fixed = {"model": model, "messages": messages, "max_tokens": ask.limit}
        return {**fixed, **_without_empty(options), **ask.extra}

    def read(self, document: Document) -> ReceivedAnswer:
        self.validate("ChatCompletion", document)
        require(len(document["choices"]) == 1, f"{len(document['choices'])} choices, not one")
        choice = document["choices"][0]
        message = choice["message"]
        calls = tuple(
            Call(call["function"]["name"], call["function"]["arguments"], call["id"])
            for call in message.get("tool_calls") or ()
        )
        names = {"stop": "stop", "length": "length", "tool_calls": "calls"}
        require(choice["finish_reason"] in names, f"finish_reason {choice['finish_reason']!r}")
        return ReceivedAnswer(
            id=document["id"],
            text=message.get("content") or "",
            reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
            calls=calls,
            finish=names[choice["finish_reason"]],  # type: ignore[arg-type]
            usage=_usage(document, "prompt", "completion"),
            history=({"content": None, **_without_empty(message)},),
        )

    def assemble(self, events: Sequence[ServerSentEvent]) -> Document:
        require(events and events[-1].data == DONE, "the stream does not end with [DONE]")
        chunks = [parsed(event.data) for event in events[:-1]]
        texts = dict.fromkeys(("content", "reasoning", "reasoning_content", "refusal"), "")
        calls: list[Document] = []
        role, finish, usage = None, None, None
        for chunk in chunks:
            require("error" not in chunk, f"an error in the stream: {chunk.get('error')}")
            self.validate("ChatCompletionChunk", chunk)
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                require(finish is None, "a delta after finish_reason")
                delta, finish = choice["delta"], choice.get("finish_reason")
                role = delta.get("role") or role
                for name in texts:
                    texts[name] += delta.get(name) or ""
                for call in delta.get("tool_calls") or ():
                    self._add(calls, call)
        require(finish, "no chunk has a finish_reason")
        require(role == "assistant", "no delta has the role")
        written = _without_empty({**texts, "tool_calls": calls})
        message = {"role": role, "content": None, **written}
        choice = {"index": 0, "finish_reason": finish, "logprobs": None, "message": message}
        first = {name: chunks[0][name] for name in ("id", "model", "created")}
        whole = {**first, "object": "chat.completion", "choices": [choice], "usage": usage}
        return _without_empty(whole)

    def _add(self, calls: list[Document], call: Document) -> None:
        function = call.get("function") or {}
        if call["index"] == len(calls):
            require(
                call.get("id") and function.get("name"), "a call that begins without id or name"
            )
            named = {"name": function["name"], "arguments": ""}
            calls.append({"id": call["id"], "type": "function", "function": named})
        require(call["index"] == len(calls) - 1, f"calls are out of order at index {call['index']}")
        calls[-1]["function"]["arguments"] += function.get("arguments") or ""


class Responses(Api):
    name = "responses"
    path = "/v1/responses"
    link = "https://platform.openai.com/docs/api-reference/responses"

    def body(self, model: str, ask: Ask) -> Document:
        items: list[Document] = []
        for message in ask.messages:
            match message:
                case str():
                    items.append({"type": "message", "role": "user", "content": message})
                case ReceivedAnswer():
                    items.extend(message.history)
                case Result():
                    result = {"call_id": message.call.id, "output": message.text}
                    items.append({"type": "function_call_output", **result})
        named = {"type": "function", "name": ask.choice}
        answer = {"type": "json_schema", "name": "answer", "schema": ask.schema, "strict": True}
        options = {
            "instructions": ask.system,
            "tools": [{"type": "function", **asdict(tool), "strict": False} for tool in ask.tools],
            "tool_choice": ask.choice if ask.choice in ("required", "none", "") else named,
            "text": ask.schema and {"format": answer},
            "reasoning": ask.effort and {"effort": ask.effort},
        }
        fixed = {"model": model, "input": items, "max_output_tokens": ask.limit}
        return {**fixed, **_without_empty(options), **ask.extra}

    def read(self, document: Document) -> ReceivedAnswer:
        self.validate("Response", document)
        output = document["output"]
        calls = tuple(
            Call(item["name"], item["arguments"], item["call_id"])
            for item in output
            if item["type"] == "function_call"
        )
        status, details = document["status"], document.get("incomplete_details") or {}
        cut = status == "incomplete" and details.get("reason") == "max_output_tokens"
        require(
            status == "completed" or cut, f"the status is {status!r} ({details or 'no'} details)"
        )
        return ReceivedAnswer(
            id=document["id"],
            text="\n".join(_texts(output, "message", "content")),
            reasoning="\n".join(_texts(output, "reasoning", "content", "summary")),
            calls=calls,
            finish="length" if cut else "calls" if calls else "stop",
            usage=_usage(document, "input", "output"),
            history=tuple(output),
        )

    def assemble(self, events: Sequence[ServerSentEvent]) -> Document:
        """Each ``….done`` must have the text that its ``….delta`` events add up to."""
        documents = [parsed(event.data) for event in events if event.data != DONE]
        require(documents, "a stream without events")
        texts: dict[tuple[object, ...], str] = {}
        added: list[str] = []
        done: list[Document] = []
        for number, document in enumerate(documents, documents[0].get("sequence_number") or 0):
            kind = document.get("type", "")
            if kind == "error":
                raise Failed(f"an error in the stream: {document.get('message')}")
            self.validate("ResponseStreamEvent", document)
            counted = document["sequence_number"] == number
            require(counted, f"sequence_number {document['sequence_number']}, not {number}")
            stem, _, what = kind.rpartition(".")
            place = tuple(
                document.get(name) for name in ("item_id", "content_index", "summary_index")
            )
            if kind == "response.output_item.added":
                require(document["output_index"] == len(added), "an output_index out of order")
                require(len(done) == len(added), "an item begins before the last one is done")
                added.append(document["item"]["type"])
            elif kind == "response.output_item.done":
                require(document["output_index"] == len(done), "an output_index out of order")
                require(added[len(done) :] == [document["item"]["type"]], "an item was not added")
                done.append(document["item"])
            elif what == "delta":
                require(len(added) == len(done) + 1, f"{kind} outside of an item")
                texts[stem, place] = texts.get((stem, place), "") + document["delta"]
            elif what == "done" and (stem, place) in texts:
                whole = document.get("text", document.get("arguments", document.get("input")))
                require(whole == texts[stem, place], f"{kind} is not the sum of its deltas")
        kinds = [document["type"] for document in documents]
        require(kinds[0] == "response.created", f"the first event is {kinds[0]}")
        endings = ("response.completed", "response.incomplete", "response.failed")
        require(kinds[-1] in endings, f"the last event is {kinds[-1]}")
        final: Document = documents[-1]["response"]
        require(final["output"] == done, "the final output is not the items that were done")
        return final


def _texts(output: list[Document], kind: str, *fields: str) -> list[str]:
    return [
        part["text"]
        for item in output
        if item["type"] == kind
        for field in fields
        for part in item.get(field) or ()
        if "text" in part
    ]


class _Blocks:
    """The content blocks of a stream of Messages."""

    def __init__(self) -> None:
        self.done: list[Document] = []
        self.open: Document = {}
        self._text = ""

    def add(self, kind: str, document: Document) -> None:
        """Reads the next event of a block. Raises ``Failed``."""
        require(bool(self.open) != (kind == "content_block_start"), f"{kind} out of order")
        index, expected = document["index"], len(self.done)
        require(index == expected, f"the index of {kind} is {index}, not {expected}")
        if kind == "content_block_start":
            self.open, self._text = {**document["content_block"]}, ""
        elif kind == "content_block_delta":
            delta = document["delta"]
            if delta["type"] == "signature_delta":
                self.open["signature"] = delta["signature"]
            else:
                fields = ("text", "thinking", "partial_json")
                self._text += "".join(delta.get(field, "") for field in fields)
        else:
            field = "input" if self.open["type"] == "tool_use" else self.open["type"]
            self.open[field] = parsed(self._text or "{}") if field == "input" else self._text
            self.done.append(self.open)
            self.open = {}


class Messages(Api):
    name = "messages"
    path = "/v1/messages"
    link = "https://platform.claude.com/docs/en/api/messages"

    def body(self, model: str, ask: Ask) -> Document:
        """Results of the same turn are in one message."""
        messages: list[Document] = []
        for before, message in zip((None, *ask.messages), ask.messages, strict=False):
            match message:
                case str():
                    messages.append({"role": "user", "content": message})
                case ReceivedAnswer():
                    messages.append({"role": "assistant", "content": list(message.history)})
                case Result():
                    block = {"tool_use_id": message.call.id, "content": message.text}
                    if not isinstance(before, Result):
                        messages.append({"role": "user", "content": []})
                    messages[-1]["content"].append({"type": "tool_result", **block})
        choices = {"": None, "required": {"type": "any"}, "none": {"type": "none"}}
        answer = ask.schema and {"type": "json_schema", "schema": ask.schema}
        options = {
            "system": ask.system,
            "tools": [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "input_schema": tool.parameters,
                }
                for tool in ask.tools
            ],
            "tool_choice": choices.get(ask.choice, {"type": "tool", "name": ask.choice}),
            "output_config": _without_empty({"format": answer, "effort": ask.effort}),
            "stop_sequences": [ask.stop] if ask.stop else [],
        }
        fixed = {"model": model, "messages": messages, "max_tokens": ask.limit}
        return {**fixed, **_without_empty(options), **ask.extra}

    def read(self, document: Document) -> ReceivedAnswer:
        self.validate("Message", document)
        content, usage, reason = document["content"], document["usage"], document["stop_reason"]
        calls = tuple(
            Call(block["name"], json.dumps(block["input"]), block["id"])
            for block in content
            if block["type"] == "tool_use"
        )
        names = {"max_tokens": "length", "tool_use": "calls"}
        names |= dict.fromkeys(("end_turn", "stop_sequence"), "stop")
        require(reason in names, f"stop_reason {reason!r}")
        stopped = document.get("stop_sequence") is not None
        require(stopped == (reason == "stop_sequence"), "stop_sequence does not fit stop_reason")
        cached = usage.get("cache_read_input_tokens")
        created = usage.get("cache_creation_input_tokens") or 0
        return ReceivedAnswer(
            id=document["id"],
            text="\n".join(block["text"] for block in content if block["type"] == "text"),
            reasoning="\n".join(
                block["thinking"] for block in content if block["type"] == "thinking"
            ),
            calls=calls,
            finish=names[reason],  # type: ignore[arg-type]
            usage=Usage(
                usage["input_tokens"] + (cached or 0) + created,
                usage["output_tokens"],
                cached,
                (usage.get("output_tokens_details") or {}).get("thinking_tokens"),
            ),
            history=tuple(content),
        )

    def assemble(self, events: Sequence[ServerSentEvent]) -> Document:
        message: Document = {}
        blocks = _Blocks()
        kind = ""
        for event in events:
            require(kind != "message_stop", f"{event.event} after message_stop")
            document, before = parsed(event.data), kind
            require(
                event.event == document.get("type"),
                f"{document.get('type')} is named {event.event}",
            )
            if event.event == "ping":
                continue
            kind = event.event
            require(kind != "error", f"an error in the stream: {document.get('error')}")
            self.validate("RawMessageStreamEvent", document)
            require(bool(message) != (kind == "message_start"), f"{kind} out of order")
            if kind == "message_start":
                message = {**document["message"]}
            elif kind == "message_delta":
                require(not blocks.open, "message_delta within a block")
                usage = {**message["usage"], **_without_empty(document["usage"])}
                message |= {**document["delta"], "usage": usage}
            elif kind == "message_stop":
                require(before == "message_delta", f"message_stop after {before}")
            else:
                blocks.add(kind, document)
        require(kind == "message_stop", f"the last event is {kind or 'missing'}")
        return {**message, "content": blocks.done}

    def check_error(self, document: Document) -> None:
        require(document.get("type") == "error", "an error whose `type` is not `error`")
        super().check_error(document)


APIS: tuple[Api, ...] = (Chat(), Responses(), Messages())
LENIENT: tuple[Api, ...] = tuple(type(api)(strict=False) for api in APIS)
