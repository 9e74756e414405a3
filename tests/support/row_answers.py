"""For each API, the request of a row of `rows`, and a check of the answer against the row.

Used in process for every row, and on sockets for some (`served_rows`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from anthropic_checker import prompt_tokens
from harmony_text import ids_of
from rows import ANSWER, CALL, PREAMBLE, REASONING, ROWS, Row, can_be_generated

from vllm_mlx_harmony.protocols.partial_json import INVALID_JSON

GENERATED = [row for row in ROWS if can_be_generated(row)]

FULL = os.environ.get("SERVED") == "full"

ON_SOCKETS = len(GENERATED) if FULL else 4 if os.environ.get("SERVED") == "few" else 15
"""Rows per API that are tested on sockets; all of them are tested in process."""


def served_rows(rows: list[Row]) -> list[Row]:
    """An even sample of ``rows``."""
    return rows[:: -(-len(rows) // ON_SOCKETS)]


def joined(row: Row, *kinds: str) -> str:
    """The texts of these kinds, joined as in an API with one field for them."""
    return "\n".join(part[1] for part in row.expected if part[0] in kinds)


# --- Chat Completions.


def chat_tools(*names: str) -> list[dict[str, Any]]:
    """Functions without a schema."""
    return [{"type": "function", "function": {"name": name}} for name in names]


def chat_request(row: Row, model: str) -> dict[str, Any]:
    """The request whose answer is ``row.output``."""
    limit = {"max_tokens": len(ids_of(row.output))} if row.cut else {}
    stop = {"stop": list(row.stop)} if row.stop else {}
    calls = {"parallel_tool_calls": False} if row.one_call else {}
    user = {"role": "user", "content": row.id}
    request = {"model": model, "messages": [user], "tools": chat_tools(*row.tools)}
    return {**request, **limit, **stop, **calls, "temperature": 0}


def chat_answer(completion: Any) -> dict[str, Any]:
    """The contents of a completion, whole or streamed."""
    message = completion.choices[0].message.model_dump()
    calls = message["tool_calls"] or []
    usage = completion.usage
    assert usage is not None
    assert message.get("reasoning") == message.get("reasoning_content")
    return {
        "reasoning": message.get("reasoning") or "",
        "content": message["content"] or "",
        "calls": [(c["function"]["name"], c["function"]["arguments"]) for c in calls],
        "finish": completion.choices[0].finish_reason,
        "usage": usage.model_dump(exclude={"prompt_tokens_details"}, exclude_none=True),
    }


def check_chat(row: Row, whole: Any, *streamed: Any) -> None:
    """Checks a completion, and streams that the client's own accumulator assembled."""
    answer = chat_answer(whole)
    for stream in streamed:
        assert chat_answer(stream) == answer
    assert answer["reasoning"] == joined(row, REASONING)
    assert answer["content"] == joined(row, PREAMBLE, ANSWER)
    assert answer["calls"] == [part[1:] for part in row.expected if part[0] == CALL]
    assert answer["finish"] == row.finish
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


# --- Responses.


def responses_tools(*names: str) -> list[dict[str, Any]]:
    """Functions without properties."""
    return [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in names]


def responses_request(row: Row, model: str) -> dict[str, Any]:
    """The request whose answer is ``row.output``. The API has no stop strings."""
    limit = max(1, len(ids_of(row.output))) if row.cut else 1000
    return {
        "model": model,
        "input": row.id,
        "tools": responses_tools(*row.tools),
        "max_output_tokens": limit,
        "parallel_tool_calls": not row.one_call,
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
    }


_CHANGING = ("id", "call_id", "created_at", "completed_at", "encrypted_content")


def response_document(document: dict[str, Any]) -> dict[str, Any]:
    """The document of a response without ids and times, whole or streamed."""
    stable = {key: value for key, value in document.items() if key not in _CHANGING}
    stable["usage"] = {**stable["usage"], "input_tokens_details": None}
    stable["output"] = [
        {key: value for key, value in item.items() if key not in _CHANGING}
        for item in stable["output"]
    ]
    return stable


_PHASES = {"commentary": PREAMBLE, "final_answer": ANSWER}
_ITEMS: dict[str, Callable[[dict[str, Any]], tuple[str, ...]]] = {
    "reasoning": lambda item: (REASONING, item["summary"][0]["text"]),
    "message": lambda item: (_PHASES[item["phase"]], item["content"][0]["text"]),
    "function_call": lambda item: (CALL, item["name"], item["arguments"]),
}


def check_responses(row: Row, whole: dict[str, Any], *streamed: dict[str, Any]) -> None:
    """Checks the document of a response, and the final documents of streams."""
    for stream_document in streamed:
        assert response_document(stream_document) == response_document(whole)
    assert [_ITEMS[item["type"]](item) for item in whole["output"]] == list(row.expected)
    assert whole["status"] == ("incomplete" if row.finish == "length" else "completed")


# --- Messages.


def messages_tools(*names: str) -> list[dict[str, Any]]:
    """Tools without properties."""
    return [{"name": name, "input_schema": {"type": "object"}} for name in names]


def messages_request(row: Row, model: str) -> dict[str, Any]:
    """The request whose answer is ``row.output``."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": row.id}],
        "tools": messages_tools(*row.tools),
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": row.one_call},
        "max_tokens": len(ids_of(row.output)) if row.cut else 1000,
        **({"stop_sequences": list(row.stop)} if row.stop else {}),
    }


def message_document(message: Any) -> dict[str, Any]:
    """The document of a message without ids and signatures, whole or streamed."""
    document: dict[str, Any] = message.model_dump(exclude={"id"}, exclude_none=True)
    usage = document["usage"]
    usage["prompt_tokens"] = prompt_tokens(usage)
    for part in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
        usage.pop(part, None)
    for block in document["content"]:
        for changing_field in ("signature", "id", "parsed_output", "caller"):
            block.pop(changing_field, None)
    return document


_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_BLOCKS = {REASONING: "thinking", PREAMBLE: "text", ANSWER: "text"}


def check_messages(row: Row, whole: Any, *streamed: Any) -> None:
    """Checks a message, and streams that the client's own accumulator assembled."""
    document = message_document(whole)
    for stream in streamed:
        assert message_document(stream) == document
    check_message(row, document)


def check_message(row: Row, document: dict[str, Any]) -> None:
    """Checks the content of a message, and why it ended."""
    assert [_block_outline(block) for block in document["content"]] == [
        (CALL, rest[0], json.dumps(input_of(rest[1]))) if kind == CALL else (_BLOCKS[kind], *rest)
        for kind, *rest in row.expected
    ]
    stop_reason = "stop_sequence" if row.stopped_by else _STOP_REASONS[row.finish]
    assert (document["stop_reason"], document.get("stop_sequence")) == (stop_reason, row.stopped_by)


def _block_outline(block: dict[str, Any]) -> tuple[str, ...]:
    """A block in the form of rows, in which the input is JSON."""
    if block["type"] == "tool_use":
        return (CALL, block["name"], json.dumps(block["input"]))
    return (block["type"], block[block["type"]])


def input_of(arguments: str) -> dict[str, Any]:
    """A row's arguments as the client receives them; no row is cut behind a whole member."""
    try:
        parsed: dict[str, Any] = json.loads(arguments or "{}")
    except ValueError:
        return {INVALID_JSON: arguments}
    return parsed


# --- Ollama's API.


def ollama_request(row: Row, model: str) -> dict[str, Any]:
    """The request whose answer is ``row.output``. The API cannot limit a turn to one call."""
    options: dict[str, Any] = {"stop": list(row.stop), "temperature": 0}
    if row.cut:
        options["num_predict"] = len(ids_of(row.output))
    tools = [{"function": {"name": name}} for name in row.tools]
    messages = [{"role": "user", "content": row.id}]
    return {"model": model, "messages": messages, "tools": tools, "options": options}


def ollama_answer(lines: list[Any]) -> dict[str, Any]:
    """The contents of the lines of a stream, or of the only document."""
    last = lines[-1]
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert 0 <= last.prompt_eval_duration + last.eval_duration <= last.total_duration
    messages = [line.message for line in lines]
    return {
        "reasoning": "".join(message.thinking or "" for message in messages),
        "content": "".join(message.content or "" for message in messages),
        "calls": [call.function for message in messages for call in message.tool_calls or ()],
        "finish": last.done_reason,
        "usage": (last.prompt_eval_count, last.eval_count),
    }


def check_ollama(row: Row, *answers: list[Any]) -> None:
    """Checks a document, and streams."""
    answer, *others = map(ollama_answer, answers)
    for other in others:
        assert other == answer
    assert answer["reasoning"] == joined(row, REASONING)
    assert answer["content"] == joined(row, PREAMBLE, ANSWER)
    assert [(call.name, call.arguments) for call in answer["calls"]] == [
        (part[1], input_of(part[2])) for part in row.expected if part[0] == CALL
    ]
    assert answer["finish"] == ("length" if row.finish == "length" else "stop")
