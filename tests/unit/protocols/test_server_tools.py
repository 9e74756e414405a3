"""Calls of tools that the server runs, in each API: deltas on the left, the wire format on the
right; and how clients request these tools and send their calls back. The tests that run them are
in `tests/unit/server/tools`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from ciphers import Reverse

from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.deltas import (
    Closed,
    Delta,
    Failed,
    Finished,
    Kind,
    Opened,
    Started,
    Text,
    ToolFailure,
    ToolFinished,
    ToolStarted,
    Usage,
)
from vllm_mlx_harmony.core.errors import OutputError, RequestError
from vllm_mlx_harmony.core.grammar import grammar_of
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    Defaults,
    Message,
    Namespace,
    Preamble,
    ResponseInfo,
    ServerCall,
    ServerResult,
    Tool,
    ToolChoice,
    Turn,
    User,
)
from vllm_mlx_harmony.protocols.chat import read as read_chat
from vllm_mlx_harmony.protocols.events import DONE
from vllm_mlx_harmony.protocols.messages import read as read_messages
from vllm_mlx_harmony.protocols.messages import server_tools as messages_tools
from vllm_mlx_harmony.protocols.responses import read
from vllm_mlx_harmony.protocols.responses.server_items import (
    CodeInterpreterCall,
    McpCall,
    WebSearchCall,
)
from vllm_mlx_harmony.protocols.responses.server_tools import client_servers, without_secrets
from vllm_mlx_harmony.protocols.server_calls import CodeArguments, as_arguments, code_in

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")
KEY = INFO.id_seed[:20]
NOW = Tool("now", "Tells it.", {"type": "object"}, origin=("weather", "now"), read_only=True)
LATER = Tool("later_1", origin=("weather", "later?"))  # a header cannot carry its own name
SERVERS = (
    Namespace("weather", (NOW, LATER), "Of anywhere.", label="weather"),
    Namespace("python", (Tool("python", origin=("python", "python")),), label="python"),
    Namespace(
        "browser",
        tuple(Tool(name, origin=("browser", name)) for name in ("search", "open", "find")),
        label="browser",
    ),
    Namespace("away", (), label="away", problem="it does not answer"),
)
DEFAULTS = Defaults(namespaces=SERVERS)
WEATHER: dict[str, Any] = {
    "type": "mcp",
    "server_label": "weather",
    "require_approval": "never",
}
PYTHON = {"type": "code_interpreter", "container": {"type": "auto"}}
SEARCH = {"type": "web_search"}
TOOLS = [WEATHER, PYTHON, SEARCH]
USAGE = Usage(prompt_tokens=80, completion_tokens=20, reasoning_tokens=7, tool_tokens=5)
STOP, CUT = Finished("stop", None, USAGE), Finished("length", None, USAGE)


def call_deltas(recipient: str, *arguments: str) -> list[Delta]:
    return [Opened(0, Kind.SERVER_CALL, recipient), *map(Text, arguments), Closed()]


def result_deltas(text: str, failure: ToolFailure | None = None) -> list[Delta]:
    return [ToolStarted(), ToolFinished(text, failure)]


ANSWER: list[Delta] = [Opened(1, Kind.ANSWER), Text("Warm."), Closed()]


def turn_deltas(*deltas: Delta, end: Delta = STOP) -> list[Delta]:
    return [Started(80), *deltas, *ANSWER, end]


# --- Responses: answers.


def responses_events(
    deltas: Iterable[Delta], **fields: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events between the first two and the last, without numbers, and the final response."""
    body = {"model": "m", "input": "Hi", "tools": TOOLS, "stream": True, **fields}
    request = read(body, DEFAULTS, Reverse(), listed_labels=frozenset({"weather"}))
    emitter = request.emitter(INFO)
    events = [event for delta in deltas for event in emitter.feed(delta)]
    assert events.pop() == DONE
    documents = [json.loads(event.data) for event in events]
    assert [event.name for event in events] == [document["type"] for document in documents]
    assert [document.pop("sequence_number") for document in documents] == list(
        range(len(documents))
    )
    final = documents[-1]["response"]

    unstreamed = read(
        {**body, "stream": False}, DEFAULTS, Reverse(), listed_labels=frozenset({"weather"})
    )
    collecting = unstreamed.emitter(INFO)
    assert [event for delta in deltas for event in collecting.feed(delta)] == []
    if documents[-1]["type"] != "response.failed":
        assert collecting.result() == final
    assert [
        document["item"] for document in documents if document["type"].endswith("item.done")
    ] == (final["output"])
    return documents[2:-1], final


def events_of_item(events: Iterable[dict[str, Any]], index: int) -> list[tuple[Any, ...]]:
    """The events of one item: their types, and their fields without those that locate the item."""
    summaries: list[tuple[Any, ...]] = []
    for event in events:
        if event.pop("output_index") != index:
            continue
        kind = event.pop("type").removeprefix("response.")
        if kind.startswith("output_item."):
            summaries.append((kind.removeprefix("output_item."), event["item"]["status"]))
            continue
        assert event.pop("item_id").endswith(f"{KEY}{index:04x}")
        summaries.append((kind, *event.values()))
    return summaries


MCP: dict[str, Any] = {
    "id": f"mcp_{KEY}0000",
    "type": "mcp_call",
    "status": "completed",
    "approval_request_id": None,
    "arguments": '{"city": "Rome"}',
    "error": None,
    "name": "now",
    "output": "20 °C",
    "server_label": "weather",
}
CODE = {
    "id": f"ci_{KEY}0000",
    "type": "code_interpreter_call",
    "status": "completed",
    "code": "6 * 7",
    "container_id": "python",
    "outputs": None,
}


def search_item(action: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    return {"id": f"ws_{KEY}0000", "type": "web_search_call", "status": status, "action": action}


ROME = call_deltas("weather.now", '{"city":', ' "Rome"}')
CALL_EVENTS = [
    ("added", "in_progress"),
    ("mcp_call.in_progress",),
    ("mcp_call_arguments.delta", '{"city":'),
    ("mcp_call_arguments.delta", ' "Rome"}'),
    ("mcp_call_arguments.done", '{"city": "Rome"}'),
]
CODE_EVENTS = [
    ("added", "in_progress"),
    ("code_interpreter_call.in_progress",),
    ("code_interpreter_call_code.delta", "6 *"),
    ("code_interpreter_call_code.delta", " 7"),
    ("code_interpreter_call_code.done", "6 * 7"),
    ("code_interpreter_call.interpreting",),
]
SEARCH_EVENTS = [
    ("added", "in_progress"),
    ("web_search_call.in_progress",),
    ("web_search_call.searching",),
    ("web_search_call.completed",),
    ("done", "completed"),
]
BROKEN = ToolFailure("It is broken.", by_tool=True)
DIED = ToolFailure("the server has died")

RESPONSES: dict[str, tuple[list[Delta], list[tuple[Any, ...]], dict[str, Any]]] = {
    "a call": (
        [*ROME, *result_deltas("20 °C")],
        [*CALL_EVENTS, ("mcp_call.completed",), ("done", "completed")],
        MCP,
    ),
    "the tool says that it failed": (
        [*ROME, *result_deltas("It is broken.", BROKEN)],
        [*CALL_EVENTS, ("mcp_call.failed",), ("done", "failed")],
        {
            **MCP,
            "status": "failed",
            "output": None,
            "error": {
                "type": "mcp_tool_execution_error",
                "content": [{"type": "text", "text": "It is broken."}],
            },
        },
    ),
    "there is no answer": (
        [*ROME, *result_deltas("Error: the server has died", DIED)],
        [*CALL_EVENTS, ("mcp_call.failed",), ("done", "failed")],
        {
            **MCP,
            "status": "failed",
            "output": None,
            "error": {
                "type": "mcp_protocol_error",
                "code": -32000,
                "message": "Error: the server has died",
            },
        },
    ),
    "not run to its end": (
        [*ROME, ToolStarted()],
        [*CALL_EVENTS, ("done", "incomplete")],
        {**MCP, "status": "incomplete", "output": None},
    ),
    "code": (
        [*call_deltas("python", "6 *", " 7"), *result_deltas("42")],
        [*CODE_EVENTS, ("code_interpreter_call.completed",), ("done", "completed")],
        CODE,
    ),
    "code that fails": (
        [*call_deltas("python", "6 *", " 7"), *result_deltas("Error", BROKEN)],
        [*CODE_EVENTS, ("done", "failed")],
        {**CODE, "status": "failed"},
    ),
    "a search": (
        [*call_deltas("browser.search", '{"query": "Rome"}'), *result_deltas("[0]")],
        SEARCH_EVENTS,
        search_item({"type": "search", "query": "Rome", "queries": ["Rome"]}),
    ),
    "a search that is no JSON": (
        [*call_deltas("browser.search", "Rome"), *result_deltas("Error", DIED)],
        [*SEARCH_EVENTS[:3], ("done", "failed")],
        search_item({"type": "search", "query": "", "queries": [""]}, "failed"),
    ),
    "a search that is no object": (
        [*call_deltas("browser.search", "[]"), *result_deltas("[0]")],
        SEARCH_EVENTS,
        search_item({"type": "search", "query": "", "queries": [""]}),
    ),
    "a search with half a surrogate pair": (
        [*call_deltas("browser.search", '{"query": "\\ud83d"}'), *result_deltas("[0]")],
        SEARCH_EVENTS,
        search_item({"type": "search", "query": "\ufffd", "queries": ["\ufffd"]}),
    ),
    "a search that cannot be sent": (
        [
            *call_deltas("browser.search", '{"query": "a", "n": 1e999}'),
            *result_deltas("Error", DIED),
        ],
        [*SEARCH_EVENTS[:3], ("done", "failed")],
        search_item({"type": "search", "query": "", "queries": [""]}, "failed"),
    ),
    "a page": (
        [*call_deltas("browser.open", '{"id": "http://a"}'), *result_deltas("[1]")],
        SEARCH_EVENTS,
        search_item({"type": "open_page", "url": "http://a"}),
    ),
    "a page by its number": (
        [*call_deltas("browser.open", '{"id": 1}'), *result_deltas("[1]")],
        SEARCH_EVENTS,
        search_item({"type": "open_page", "url": None}),
    ),
    "a place": (
        [*call_deltas("browser.find", '{"pattern": "Rome"}'), *result_deltas("[1]")],
        SEARCH_EVENTS,
        search_item({"type": "find_in_page", "pattern": "Rome", "url": ""}),
    ),
    "a tool that there is not": (
        [*call_deltas("weather.never", "{}"), *result_deltas("Error: no", DIED)],
        [
            *CALL_EVENTS[:2],
            ("mcp_call_arguments.delta", "{}"),
            ("mcp_call_arguments.done", "{}"),
            ("mcp_call.failed",),
            ("done", "failed"),
        ],
        {
            **MCP,
            "status": "failed",
            "name": "never",
            "arguments": "{}",
            "output": None,
            "error": {"type": "mcp_protocol_error", "code": -32000, "message": "Error: no"},
        },
    ),
    "a server that there is not": (
        [*call_deltas("nobody", "{}"), *result_deltas("")],
        [
            *CALL_EVENTS[:2],
            ("mcp_call_arguments.delta", "{}"),
            ("mcp_call_arguments.done", "{}"),
            ("mcp_call.completed",),
            ("done", "completed"),
        ],
        {**MCP, "name": "nobody", "server_label": "nobody", "arguments": "{}", "output": ""},
    ),
    "a name that the model is shown another for": (
        [*call_deltas("weather.later_1", "{}"), *result_deltas("")],
        [
            *CALL_EVENTS[:2],
            ("mcp_call_arguments.delta", "{}"),
            ("mcp_call_arguments.done", "{}"),
            ("mcp_call.completed",),
            ("done", "completed"),
        ],
        {**MCP, "name": "later?", "arguments": "{}", "output": ""},
    ),
}


@pytest.mark.parametrize(("deltas", "wire", "item"), RESPONSES.values(), ids=RESPONSES)
def test_responses_has_events_and_item_of_call(
    deltas: list[Delta], wire: list[tuple[Any, ...]], item: dict[str, Any]
) -> None:
    whole = deltas if deltas[-1] == ToolStarted() else [*deltas, *ANSWER]
    events, final = responses_events([Started(80), *whole, STOP])
    assert events_of_item(events, 0) == wire
    assert final["output"][0] == item
    assert final["usage"]["output_tokens_details"]["tool_output_tokens"] == USAGE.tool_tokens


def test_responses_code_of_mcp_call_is_json() -> None:
    """Requested by its label, code is a field of an object, in whatever pieces it comes."""
    tools = [{"type": "mcp", "server_label": "python", "require_approval": "never"}]
    deltas = turn_deltas(*call_deltas("python", 'print("é")', "\n"), *result_deltas("é"))
    events, final = responses_events(deltas, tools=tools)
    pieces = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert len(pieces) == 3
    (item, *_) = [listed for listed in final["output"] if listed["type"] == "mcp_call"]
    assert item["arguments"] == "".join(pieces)
    assert json.loads(item["arguments"]) == {"code": 'print("é")\n'}


@pytest.mark.parametrize("pieces", [["a"], ["", 'print("é")', "\n😀\\"], ["x" * 9] * 9, [""], []])
def test_code_in_pieces_gives_same_json(pieces: list[str]) -> None:
    writer = CodeArguments()
    written = "".join(map(writer.feed, pieces)) + writer.close()
    assert written == (as_arguments("".join(pieces)) if pieces else "")
    assert code_in(written) == "".join(pieces)


def test_responses_code_output_is_sent_on_request() -> None:
    deltas = turn_deltas(*call_deltas("python", "6 * 7"), *result_deltas("42"))
    _, final = responses_events(deltas, include=["code_interpreter_call.outputs"])
    assert final["output"][0]["outputs"] == [{"type": "logs", "logs": "42"}]


URLS = {
    "": [],
    "http://a": ["http://a"],
    "http://a. http://a, https://b?": ["http://a", "https://b"],
    "(http://a). (see http://b/x_(y)), http://c/(": ["http://a", "http://b/x_(y)", "http://c/("],
    "http://a/(b).)!): http://c/)(": ["http://a/(b)", "http://c/)("],
    f"http://a{')' * 99_999}.": ["http://a"],
    "http://). http://": ["http://"],
}


@pytest.mark.parametrize(("text", "urls"), URLS.items(), ids=[text[:40] for text in URLS])
def test_responses_sources_are_urls_in_search_result(text: str, urls: list[str]) -> None:
    deltas = turn_deltas(*call_deltas("browser.search", '{"query": "a"}'), *result_deltas(text))
    _, final = responses_events(deltas, include=["web_search_call.action.sources"])
    action = final["output"][0]["action"]
    assert action["sources"] == [{"type": "url", "url": url} for url in urls]


@pytest.mark.parametrize("recipient", ["weather.now", "python", "browser.search"])
def test_responses_cost_of_delta_does_not_grow_with_call(
    recipient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: how often the document of the item is built."""
    kind = {"weather.now": McpCall, "python": CodeInterpreterCall, "browser.search": WebSearchCall}
    calls: list[int] = []
    document = kind[recipient].document

    def counting(self: Any) -> Any:
        calls.append(1)
        return document(self)

    monkeypatch.setattr(kind[recipient], "document", counting)
    counts = set()
    for pieces in (1, 300):
        calls.clear()
        responses_events(turn_deltas(*call_deltas(recipient, *["a"] * pieces), *result_deltas("b")))
        counts.add(len(calls))
    assert len(counts) == 1


@pytest.mark.parametrize("end", [STOP, CUT, Failed(OutputError("no"))])
def test_responses_cut_call_is_incomplete(end: Delta) -> None:
    cut: list[Delta] = [Started(80), Opened(0, Kind.SERVER_CALL, "weather.now"), Text("{")]
    closed = cut if isinstance(end, Failed) else [*cut, Closed(complete=False)]
    events, final = responses_events([*closed, end])
    assert events_of_item(events, 0)[-1] == ("done", "incomplete")
    assert final["output"] == [{**MCP, "status": "incomplete", "arguments": "{", "output": None}]


@pytest.mark.parametrize(
    ("recipient", "arguments", "shown"),
    [
        ("weather.now", '{"city": "Rome"}', '{"city": "Rome"}'),
        ("python", "6 * 7", '{"code":"6 * 7"}'),
    ],
)
def test_responses_call_to_approve_ends_response(
    recipient: str, arguments: str, shown: str
) -> None:
    """It ends the response, as an item that is added complete."""
    label = recipient.partition(".")[0]
    tools = [{"type": "mcp", "server_label": label}]
    events, final = responses_events(
        [Started(80), *call_deltas(recipient, arguments), STOP], tools=tools
    )
    item = {
        "id": f"mcpr_{KEY}0000",
        "type": "mcp_approval_request",
        "arguments": shown,
        "name": recipient.rpartition(".")[2],
        "server_label": label,
    }
    assert final["output"][-1] == item
    assert [(event["type"], event["item"]) for event in events[-2:]] == [
        ("response.output_item.added", item),
        ("response.output_item.done", item),
    ]


@pytest.mark.parametrize("end", [STOP, CUT, Failed(OutputError("no"))])
def test_responses_cut_call_needs_no_approval(end: Delta) -> None:
    cut: list[Delta] = [Started(80), Opened(0, Kind.SERVER_CALL, "weather.now"), Text('{"a":')]
    closed = cut if isinstance(end, Failed) else [*cut, Closed(complete=False)]
    events, final = responses_events([*closed, end], tools=[{**WEATHER, "require_approval": None}])
    assert (events, final["output"]) == ([], [])


def test_responses_call_awaiting_approval_is_no_item() -> None:
    body = {"model": "m", "input": "Hi", "tools": [{**WEATHER, "require_approval": "always"}]}
    emitter = read(body, DEFAULTS, Reverse(), listed_labels=frozenset({"weather"})).emitter(INFO)
    snapshots = []
    for delta in [Started(80), *call_deltas("weather.now", "{}"), STOP]:
        emitter.feed(delta)
        snapshots.append([item["type"] for item in emitter.document()["output"]])
    assert snapshots == [[], [], [], ["mcp_approval_request"], ["mcp_approval_request"]]


def test_responses_call_approved_earlier_is_first_item() -> None:
    """No message of this turn contains it: the item is sent when the call runs."""
    call = ServerCall("call_ab12", "weather.now", '{"city": "Rome"}')
    deltas = turn_deltas(ToolStarted(call), ToolFinished("20 °C"))
    events, final = responses_events(deltas)
    item = {**MCP, "id": f"mcp_{KEY}7fff", "approval_request_id": "mcpr_ab12"}
    assert final["output"][0] == item
    kinds = [
        event["type"].removeprefix("response.") for event in events if not event["output_index"]
    ]
    assert kinds == [
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
    ]


def test_responses_call_can_be_read_while_generated() -> None:
    request = read({"model": "m", "input": "Hi", "tools": TOOLS}, DEFAULTS, Reverse())
    emitter = request.emitter(INFO)
    snapshots = []
    for delta in [Started(80), *call_deltas("python", "6 * 7"), *result_deltas("42")]:
        emitter.feed(delta)
        snapshots.append(
            [(item["type"], item.get("status")) for item in emitter.document()["output"]]
        )
    listed = ("mcp_list_tools", None)
    code = "code_interpreter_call"
    assert snapshots == [
        [listed],
        *[[listed, (code, "in_progress")]] * 3,
        [listed, (code, "interpreting")],
        [listed, (code, "completed")],
    ]


LISTS: dict[str, tuple[list[dict[str, Any]], list[str], list[tuple[Any, ...]]]] = {
    "what was asked for as mcp is listed, once": (
        TOOLS,
        [],
        [("weather", ["now", "later?"], None, "completed")],
    ),
    "what the client was told before is not": (TOOLS, ["weather"], []),
    "one that is away has a reason": (
        [{"type": "mcp", "server_label": "away"}],
        [],
        [("away", [], "it does not answer", "failed")],
    ),
}


@pytest.mark.parametrize(("tools", "announced", "expected"), LISTS.values(), ids=LISTS)
def test_responses_lists_new_servers_once(
    tools: list[dict[str, Any]], announced: list[str], expected: list[tuple[Any, ...]]
) -> None:
    before = [{"type": "mcp_list_tools", "server_label": label, "tools": []} for label in announced]
    body = {"model": "m", "input": [*before, {"role": "user", "content": "Hi"}], "tools": tools}
    emitter = read({**body, "stream": True}, DEFAULTS, Reverse()).emitter(INFO)
    events = [json.loads(event.data) for event in emitter.feed(Started(80))][2:]
    items = emitter.document()["output"]
    outcomes = [event["type"].rpartition(".")[2] for event in events[2::4]]
    assert [
        (
            listed["server_label"],
            [tool["name"] for tool in listed["tools"]],
            listed["error"],
            outcome,
        )
        for listed, outcome in zip(items, outcomes, strict=True)
    ] == expected
    for item in items:
        assert item["id"] == f"mcpl_{KEY}7f00"
        if item["tools"]:
            assert item["tools"][0] == {
                "name": "now",
                "description": "Tells it.",
                "input_schema": {"type": "object"},
                "annotations": {"read_only": True},
            }
            assert item["tools"][1]["annotations"] is None


# --- Responses: calls in the input.

ROMES = ServerCall("call_ab12", "weather.now", '{"city": "Rome"}')
ECHO = {"type": "mcp_call", "id": "mcp_ab12", "server_label": "weather", "name": "now",
        "arguments": '{"city": "Rome"}'}  # fmt: skip
ASKS = {**ECHO, "type": "mcp_approval_request", "id": "mcpr_ab12"}
APPROVED = {"type": "mcp_approval_response", "approval_request_id": "mcpr_ab12", "approve": True}
SANDBOX = {"type": "code_interpreter_call", "id": "ci_ab12", "code": "6 * 7"}
COMPUTES = ServerCall("call_ab12", "python", "6 * 7")


def result(text: str, name: str = "weather.now") -> ServerResult:
    return ServerResult("call_ab12", name, text)


NOT_RUN = result("[this call did not finish]")

DENIED = result("The user did not approve this call")
ASKS_MORE = {**ASKS, "id": "mcpr_cd34", "arguments": '{"city": "Oslo"}'}
APPROVED_MORE = {**APPROVED, "approval_request_id": "mcpr_cd34"}
OSLOS = ServerCall("call_cd34", "weather.now", '{"city": "Oslo"}')
OSLOS_NOT_RUN = replace(NOT_RUN, call_id="call_cd34")

ITEMS: dict[str, tuple[list[dict[str, Any]], list[Message]]] = {
    "what was run": ([{**ECHO, "output": "20 °C"}], [ROMES, result("20 °C")]),
    "what the tool said had failed": (
        [{**ECHO, "error": {"content": [{"type": "text", "text": "It is"}, {"text": "broken."}]}}],
        [ROMES, result("It is\nbroken.")],
    ),
    "what had no answer": (
        [{**ECHO, "error": {"type": "mcp_protocol_error", "message": "died"}}],
        [ROMES, result("died")],
    ),
    "an error in words": ([{**ECHO, "error": "died"}], [ROMES, result("died")]),
    "neither answer nor error": (
        [{**ECHO, "output": None, "error": None}],
        [ROMES, NOT_RUN],
    ),
    "without an id": (
        [{**ECHO, "id": None, "output": "20 °C"}],
        [replace(ROMES, id="call_input[1]"), ServerResult("call_input[1]", "weather.now", "20 °C")],
    ),
    "by its own name": (
        [{**ECHO, "name": "later?", "output": "x"}],
        [replace(ROMES, name="weather.later_1"), result("x", "weather.later_1")],
    ),
    "of a tool that has gone": (
        [{**ECHO, "name": "never", "output": "x"}],
        [replace(ROMES, name="weather.never"), result("x", "weather.never")],
    ),
    "of a server that has gone": (
        [{**ECHO, "server_label": "gone", "output": "x"}],
        [replace(ROMES, name="gone.now"), result("x", "gone.now")],
    ),
    "code": (
        [{**ECHO, "server_label": "python", "name": "python", "arguments": '{"code":"6 * 7"}',
          "output": "42"}],
        [COMPUTES, result("42", "python")],
    ),
    "code that is no JSON": (
        [{**ECHO, "server_label": "python", "name": "python", "arguments": "6 * 7",
          "output": "42"}],
        [COMPUTES, result("42", "python")],
    ),
    "code with its outputs": (
        [{**SANDBOX, "outputs": [{"type": "logs", "logs": "4"}, {"type": "image", "url": "x"},
                                 {"type": "logs", "logs": None},
                                 {"type": "logs", "logs": "2"}]}],
        [COMPUTES, result("4\n[image left out: this model reads text only]\n\n2", "python")],
    ),
    "code without them says nothing": ([{**SANDBOX, "outputs": None}], []),
    "a search says nothing": ([{"type": "web_search_call", "id": "ws_1"}], []),
    "approved, and run before anything else": ([ASKS, APPROVED], [ROMES]),
    "approved, and the user says more": (
        [ASKS, APPROVED, {"role": "user", "content": "In Celsius."}],
        [ROMES, User("In Celsius.")],
    ),
    "approved behind what the user says": (
        [ASKS, {"role": "user", "content": "In Celsius."}, APPROVED],
        [ROMES, User("In Celsius.")],
    ),
    "approved late": (
        [ASKS, {"role": "user", "content": "Wait."}, {"role": "assistant", "content": "I wait."},
         APPROVED],
        [ROMES, User("Wait."), Answer("I wait."), ],
    ),
    "approved before what the model has said since": (
        [ASKS, APPROVED, {"role": "assistant", "content": "It is warm."},
         {"role": "user", "content": "Thanks."}],
        [ROMES, NOT_RUN, Answer("It is warm."), User("Thanks.")],
    ),
    "approved twice": ([ASKS, APPROVED, APPROVED], [ROMES]),
    "not approved, and approved behind that": (
        [ASKS, {**APPROVED, "approve": False}, APPROVED],
        [ROMES, result("The user did not approve this call")],
    ),
    "two, both approved": ([ASKS, ASKS_MORE, APPROVED, APPROVED_MORE], [ROMES, OSLOS]),
    "two, each approved behind its request": (
        [ASKS, APPROVED, ASKS_MORE, APPROVED_MORE],
        [ROMES, OSLOS],
    ),
    "two, the first is approved": (
        [ASKS, ASKS_MORE, {**APPROVED_MORE, "approve": False}, APPROVED],
        [ROMES, OSLOS, replace(DENIED, call_id="call_cd34")],
    ),
    "two, the second is approved": (
        [ASKS, ASKS_MORE, {**APPROVED, "approve": False}, APPROVED_MORE],
        [ROMES, DENIED, OSLOS],
    ),
    "two, and a word of one": ([ASKS, ASKS_MORE, APPROVED], [ROMES, OSLOS, OSLOS_NOT_RUN]),
    "two requests with one id are one": (
        [ASKS, ASKS, APPROVED],
        [ROMES, NOT_RUN, ROMES],
    ),
    "a list of tools behind the approval": (
        [ASKS, APPROVED, {"type": "mcp_list_tools", "server_label": "weather", "tools": []}],
        [ROMES],
    ),
    "not approved": (
        [ASKS, {**APPROVED, "approve": False}],
        [ROMES, result("The user did not approve this call")],
    ),
    "not approved, and why": (
        [ASKS, {**APPROVED, "approve": False, "reason": "too warm"}],
        [ROMES, result("The user did not approve this call: too warm")],
    ),
    "no word of it": (
        [ASKS, {"role": "user", "content": "Never mind."}],
        [ROMES, NOT_RUN, User("Never mind.")],
    ),
    "a word of another": (
        [ASKS, {**APPROVED, "approval_request_id": "mcpr_no", "approve": False}],
        [ROMES, NOT_RUN],
    ),
    "another is approved": (
        [ASKS, {**APPROVED, "approval_request_id": "mcpr_no"}],
        [ROMES, NOT_RUN],
    ),
    "no word at all": ([ASKS], [ROMES, NOT_RUN]),
    "approved, and run since": (
        [ASKS, APPROVED, {**ECHO, "id": "mcp_cd34", "approval_request_id": "mcpr_ab12",
                          "output": "20 °C"}],
        [ROMES, result("20 °C")],
    ),
    "run since, without the request": (
        [{**ECHO, "approval_request_id": "mcpr_cd34", "output": "20 °C"}],
        [ROMES, result("20 °C")],
    ),
    "approved and not": (
        [ASKS, APPROVED, {**APPROVED, "approve": False}],
        [ROMES, result("The user did not approve this call")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("items", "expected"), ITEMS.values(), ids=ITEMS)
def test_calls_in_input_are_read(items: list[dict[str, Any]], expected: list[Message]) -> None:
    body = {"model": "m", "input": [{"role": "user", "content": "Hi"}, *items], "tools": TOOLS}
    messages = read(body, DEFAULTS, Reverse()).turn.messages
    assert messages == (User("Hi"), *expected)


STORED: dict[str, tuple[dict[str, Any], list[Message]]] = {
    "approved": ({"input": [APPROVED]}, []),
    "not approved": (
        {"input": [{**APPROVED, "approve": False}]},
        [result("The user did not approve this call")],
    ),
    "approved, and the user says more": (
        {"input": [APPROVED, {"role": "user", "content": "In Celsius."}]},
        [User("In Celsius.")],
    ),
    "no input": ({}, [NOT_RUN]),
    "an empty one": ({"input": []}, [NOT_RUN]),
    "another is approved": (
        {"input": [{**APPROVED, "approval_request_id": "mcpr_no"}]},
        [NOT_RUN],
    ),
    "approved, without the tool": ({"input": [APPROVED], "tools": []}, [NOT_RUN]),
    "approved, and no tool wanted": ({"input": [APPROVED], "tool_choice": "none"}, [NOT_RUN]),
}


@pytest.mark.parametrize(("fields", "expected"), STORED.values(), ids=STORED)
def test_last_call_of_stored_response_runs_only_if_approved(
    fields: dict[str, Any], expected: list[Message]
) -> None:
    """It awaits approval, or was cut: without approval it is not run."""
    body = {"model": "m", "tools": TOOLS, "previous_response_id": "resp_1", **fields}
    request = read(body, DEFAULTS, Reverse(), (User("Hi"), ROMES))
    assert request.turn.messages == (User("Hi"), ROMES, *expected)
    # That it was not run is not stored: it may be approved later.
    stored = tuple(message for message in request.turn.messages if message != NOT_RUN)
    assert request.conversation(request.turn.messages) == stored


def test_results_of_approved_calls_are_stored_after_them() -> None:
    items = [ASKS, ASKS_MORE, APPROVED_MORE, APPROVED, {"role": "user", "content": "In Celsius."}]
    body = {"model": "m", "instructions": "Be brief.", "input": items, "tools": TOOLS}
    request = read(body, DEFAULTS, Reverse())
    instructions, romes, oslos, user = request.turn.messages
    oslo_result = replace(result("9 °C"), call_id="call_cd34")
    messages = (instructions, romes, result("20 °C"), oslos, oslo_result, user, Answer("Warm."))
    assert request.conversation(messages) == messages[1:]


def test_late_approval_runs_the_call() -> None:
    body = {"model": "m", "tools": TOOLS, "previous_response_id": "resp_1"}
    wait = {**body, "input": [{"role": "user", "content": "Wait."}]}
    first = read(wait, DEFAULTS, Reverse(), (User("Hi"), ROMES))
    assert first.turn.messages == (User("Hi"), ROMES, NOT_RUN, User("Wait."))
    stored = first.conversation((*first.turn.messages, Answer("I wait.")))
    later = read({**body, "input": [APPROVED]}, DEFAULTS, Reverse(), stored)
    assert later.turn.messages == (User("Hi"), ROMES, User("Wait."), Answer("I wait."))


REQUIRED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({**ECHO, "server_label": None}, "input[0].server_label"),
    ({**ECHO, "name": None}, "input[0].name"),
    ({**APPROVED, "approval_request_id": None}, "input[0].approval_request_id"),
    ({**APPROVED, "approve": None}, "input[0].approve"),
]


@pytest.mark.parametrize(("item", "param"), REQUIRED_FIELDS)
def test_missing_field_of_item_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read({"model": "m", "input": [item], "tools": TOOLS}, DEFAULTS, Reverse())
    assert caught.value.param == param


# --- Responses: requested tools.

ALL = ("weather.now", "weather.later_1")
BROWSER = ("browser.search", "browser.open", "browser.find")

NAMESPACES: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    # the request, the recipients in the prompt, those to be approved
    "nothing": ({"tools": []}, (), ()),
    "each of its type": ({"tools": TOOLS}, (*ALL, "python", *BROWSER), ()),
    "one that is away": ({"tools": [{"type": "mcp", "server_label": "away"}]}, (), ()),
    "some by name": ({"tools": [{**WEATHER, "allowed_tools": ["later?"]}]}, ALL[1:], ()),
    "what only reads": (
        {"tools": [{**WEATHER, "allowed_tools": {"read_only": True}}]}, ALL[:1], ()
    ),
    "some by a filter": (
        {"tools": [{**WEATHER, "allowed_tools": {"tool_names": ["now"]}}]}, ALL[:1], ()
    ),
    "all to be approved": ({"tools": [{"type": "mcp", "server_label": "weather"}]}, ALL, ALL),
    "always": ({"tools": [{**WEATHER, "require_approval": "always"}]}, ALL, ALL),
    "all but some": (
        {"tools": [{**WEATHER, "require_approval": {"never": {"tool_names": ["now"]}}}]},
        ALL, ALL[1:],
    ),
    "some alone": (
        {"tools": [{**WEATHER, "require_approval": {"always": {"tool_names": ["now"]}}}]},
        ALL, ALL[:1],
    ),
    "some never, all others": (
        {"tools": [{**WEATHER, "require_approval": {
            "never": {"read_only": True}, "always": {"tool_names": ["later?"]}}}]},
        ALL, ALL[1:],
    ),
    "a tool in both": (
        {"tools": [{**WEATHER, "require_approval": {
            "never": ["now", "later?"], "always": {"tool_names": ["later?"]}}}]},
        ALL, ALL[1:],
    ),
    "never those that write, of which none is known": (
        {"tools": [{**WEATHER, "require_approval": {"never": {"read_only": False}}}]}, ALL, ALL
    ),
    "filters of null": (
        {"tools": [{**WEATHER, "require_approval": {"never": None, "always": None}}]}, ALL, ALL
    ),
    "a filter with a null": (
        {"tools": [{**WEATHER, "require_approval": {
            "never": {"tool_names": ["now"], "read_only": None}}}]},
        ALL, ALL[1:],
    ),
    "none": ({"tools": TOOLS, "tool_choice": "none"}, (), ()),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "shown", "approval"), NAMESPACES.values(), ids=NAMESPACES)
def test_requested_tools_and_approvals_are_read(
    fields: dict[str, Any], shown: tuple[str, ...], approval: tuple[str, ...]
) -> None:
    namespaces = read({"model": "m", "input": "Hi", **fields}, DEFAULTS, Reverse()).turn.namespaces
    assert tuple(name for namespace in namespaces for name in namespace.recipients) == shown
    asks = [
        name
        for namespace in namespaces
        for name, tool in zip(namespace.recipients, namespace.tools, strict=True)
        if tool.name in namespace.approval
    ]
    assert tuple(asks) == approval


def test_tools_for_all_are_in_every_turn() -> None:
    everybody = replace(DEFAULTS, tools_for_all=True)
    body = {"model": "m", "input": "Hi", "max_tool_calls": 3}
    turn = read(body, everybody, Reverse()).turn
    assert [namespace.name for namespace in turn.namespaces] == ["weather", "python", "browser"]
    assert turn.max_tool_calls == 3
    assert read(body, Defaults(), Reverse()).turn.max_tool_calls is None  # there are none


OWN = {"type": "function", "name": "weather"}
DOTTED = {**OWN, "name": "weather.x"}
LATER_ON = {"type": "additional_tools", "role": "developer", "tools": [OWN]}
FINDS = {"type": "tool_search", "execution": "client"}

OWN_NAMES: dict[str, tuple[dict[str, Any], list[str] | None]] = {
    # the request; the namespaces in the prompt, None where the function is refused
    "a function": ({"tools": [OWN]}, ["weather", "python", "browser"]),
    "one named like a built-in": (
        {"tools": [{**OWN, "name": "python"}]},
        ["weather", "browser"],
    ),
    "one with a dot": ({"tools": [DOTTED]}, ["python", "browser"]),
    "one in a namespace": (
        {"tools": [{"type": "namespace", "name": "mine", "tools": [OWN]}]},
        ["weather", "python", "browser"],
    ),
    "one of later": (
        {"input": [{"role": "user", "content": "Hi"}, LATER_ON]},
        ["weather", "python", "browser"],
    ),
    "one of later with a dot": (
        {"input": [{"role": "user", "content": "Hi"}, {**LATER_ON, "tools": [DOTTED]}]},
        ["python", "browser"],
    ),
    "one that is to be found": (
        {"tools": [FINDS, {**DOTTED, "defer_loading": True}]},
        ["python", "browser"],
    ),
    "the server was asked for": ({"tools": [WEATHER, OWN]}, ["weather", "python", "browser"]),
    "the server was asked for, and it has a dot": ({"tools": [WEATHER, DOTTED]}, None),
}


@pytest.mark.parametrize(("fields", "names"), OWN_NAMES.values(), ids=OWN_NAMES)
def test_server_with_name_of_function_is_left_out(
    fields: dict[str, Any], names: list[str] | None
) -> None:
    body = {"model": "m", "input": "Hi", **fields}
    turn = read(body, replace(DEFAULTS, tools_for_all=True), Reverse()).turn
    if names is None:
        with pytest.raises(RequestError) as caught:
            render(turn)
        assert caught.value.param == "tools[1]"
        return
    assert [namespace.name for namespace in turn.namespaces] == names
    render(turn)


CHOICES: dict[str, tuple[Any, ToolChoice]] = {
    "a server": ({"type": "mcp", "server_label": "weather"}, ToolChoice(True, ALL)),
    "a tool of it": (
        {"type": "mcp", "server_label": "weather", "name": "later?"},
        ToolChoice(True, ALL[1:]),
    ),
    "code": ({"type": "code_interpreter"}, ToolChoice(True, ("python",))),
    "the web": ({"type": "web_search"}, ToolChoice(True, BROWSER)),
    "any": ("required", ToolChoice(True)),
    "some": (
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [
                {"type": "mcp", "server_label": "weather", "name": "now"},
                {"type": "web_search"},
            ],
        },
        ToolChoice(False, (ALL[0], *BROWSER)),
    ),
}


@pytest.mark.parametrize(("choice", "expected"), CHOICES.values(), ids=CHOICES)
def test_server_tools_can_be_chosen(choice: Any, expected: ToolChoice) -> None:
    body = {"model": "m", "input": "Hi", "tools": TOOLS, "tool_choice": choice}
    assert read(body, DEFAULTS, Reverse()).turn.tool_choice == expected


def read_by(api: str, defaults: Defaults, **fields: Any) -> Turn:
    body: dict[str, Any] = {"model": "m", **fields}
    if api == "responses":
        return read({**body, "input": "Hi"}, defaults, Reverse()).turn
    body["messages"] = [{"role": "user", "content": "Hi"}]
    if api == "chat":
        return read_chat(body, defaults).turn
    return read_messages({**body, "max_tokens": 9}, defaults, Reverse()).turn


def choice(api: str, word: str) -> Any:
    if api != "messages":
        return word
    return {"type": "any" if word == "required" else word}


APIS = ("chat", "responses", "messages")
BUILTIN = Defaults(builtin_tools=("python",))


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("server", [BUILTIN, replace(DEFAULTS, tools_for_all=True)])
def test_tool_choice_none_removes_all_tools(server: Defaults, api: str) -> None:
    """A9: neither in the prompt nor in the grammar."""
    turn = read_by(api, server, tool_choice=choice(api, "none"))
    assert (turn.tools, turn.builtin_tools, turn.namespaces) == ((), (), ())


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("server", [BUILTIN, replace(DEFAULTS, tools_for_all=True)])
def test_call_of_server_tools_can_be_required(server: Defaults, api: str) -> None:
    turn = read_by(api, server, tool_choice=choice(api, "required"))
    assert turn.tool_choice == ToolChoice(required=True)
    assert grammar_of(turn, Names.of(turn)) is not None


@pytest.mark.parametrize("api", APIS)
def test_required_call_without_tools_is_rejected(api: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_by(api, DEFAULTS, tool_choice=choice(api, "required"))
    assert caught.value.param == "tool_choice"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nobody": ({"tools": [{**WEATHER, "server_label": "nobody"}]}, "tools[0].server_label"),
    "no label": ({"tools": [{"type": "mcp"}]}, "tools[0].server_label"),
    "one elsewhere": ({"tools": [{**WEATHER, "server_url": "http://a"}]}, "tools[0].server_url"),
    "twice": ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
    "no such tool": ({"tools": [{**WEATHER, "allowed_tools": ["x"]}]}, "tools[0].allowed_tools"),
    "a rule": ({"tools": [{**WEATHER, "require_approval": "maybe"}]}, "tools[0].require_approval"),
    "a rule for a server without tools": (
        {"tools": [{"type": "mcp", "server_label": "away", "require_approval": "maybe"}]},
        "tools[0].require_approval",
    ),
    "a number for a rule": (
        {"tools": [{**WEATHER, "require_approval": 3}]}, "tools[0].require_approval"
    ),
    "an empty filter": (
        {"tools": [{**WEATHER, "require_approval": {"never": {}}}]},
        "tools[0].require_approval.never",
    ),
    "a filter of nulls": (
        {"tools": [{**WEATHER, "require_approval": {"never": {"tool_names": None}}}]},
        "tools[0].require_approval.never",
    ),
    "a misspelt filter": (
        {"tools": [{**WEATHER, "require_approval": {"never": {"tools": ["now"]}}}]},
        "tools[0].require_approval.never.tools",
    ),
    "a filter with more": (
        {"tools": [{**WEATHER, "require_approval": {"never": {"read_only": True, "x": 1}}}]},
        "tools[0].require_approval.never.x",
    ),
    "misspelt names": (
        {"tools": [{**WEATHER, "allowed_tools": {"tools": ["now"]}}]},
        "tools[0].allowed_tools.tools",
    ),
    "another server": ({"tool_choice": {"type": "mcp", "server_label": "browser"}}, "tool_choice"),
    "another tool": (
        {"tool_choice": {"type": "mcp", "server_label": "weather", "name": "x"}}, "tool_choice"
    ),
    "not declared": ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    "among others": (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto",
                         "tools": [{"type": "mcp", "server_label": "no"}]}},
        "tool_choice.tools[0]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
def test_invalid_tools_are_rejected(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "input": "Hi", "tools": [WEATHER, PYTHON], **fields}
    with pytest.raises(RequestError) as caught:
        read(body, DEFAULTS, Reverse())
    assert caught.value.param == param


# --- Chat Completions.


def chat_call(name: str, arguments: str, output: str, error: str | None) -> dict[str, Any]:
    return {"id": INFO.call_id(0), "name": name, "arguments": arguments, "output": output,
            "error": error}  # fmt: skip


CHAT: dict[str, tuple[list[Delta], dict[str, Any]]] = {
    "a call": (
        [*ROME, *result_deltas("20 °C")],
        chat_call("weather.now", '{"city": "Rome"}', "20 °C", None),
    ),
    "one that fails": (
        [*call_deltas("python", "6 *", " 7"), *result_deltas("Error: the server has died", DIED)],
        chat_call("python", "6 * 7", "Error: the server has died", "the server has died"),
    ),
}


@pytest.mark.parametrize(("deltas", "expected"), CHAT.values(), ids=CHAT)
def test_chat_has_server_tool_calls(deltas: list[Delta], expected: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    everybody = replace(DEFAULTS, tools_for_all=True)
    request = read_chat({**body, "stream": True}, everybody)
    assert [namespace.name for namespace in request.turn.namespaces] == [
        "weather",
        "python",
        "browser",
    ]
    emitter = request.emitter(INFO)
    sent = [[event.data for event in emitter.feed(delta)] for delta in turn_deltas(*deltas)]
    at = next(n for n, delta in enumerate(turn_deltas(*deltas)) if isinstance(delta, ToolFinished))
    assert [len(events) for events in sent[1:at]] == [0] * (at - 1)  # the client does not run it
    (chunk,) = map(json.loads, sent[at])
    assert chunk["choices"][0]["delta"] == {"server_tool_calls": [{"index": 0, **expected}]}
    last = json.loads(sent[-1][0])
    assert last["choices"][0]["finish_reason"] == "stop"

    emitter = read_chat(body, everybody).emitter(INFO)
    assert [event for delta in turn_deltas(*deltas) for event in emitter.feed(delta)] == []
    document = emitter.result()
    assert document["choices"][0]["message"] == {
        "role": "assistant", "content": "Warm.", "refusal": None, "server_tool_calls": [expected]
    }  # fmt: skip
    details = document["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 7, "tool_output_tokens": 5}


@pytest.mark.parametrize(
    "last",
    [
        [Opened(1, Kind.SERVER_CALL, "python"), Text("6 *"), Closed(complete=False), CUT],
        [Opened(1, Kind.SERVER_CALL, "python"), Text("6 * 7"), Closed(), ToolStarted(), STOP],
    ],
    ids=["cut", "not run to its end"],
)
@pytest.mark.parametrize(
    "before", [[], [*ROME, *result_deltas("20 °C")]], ids=["alone", "behind another"]
)
def test_chat_omits_call_without_result(before: list[Delta], last: list[Delta]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    everybody = replace(DEFAULTS, tools_for_all=True)
    streamed: list[dict[str, Any]] = []
    emitter = read_chat({**body, "stream": True}, everybody).emitter(INFO)
    for delta in (Started(80), *before, *last):
        for event in emitter.feed(delta):
            if event != DONE:
                part = json.loads(event.data)["choices"][0]["delta"]
                streamed += part.get("server_tool_calls", [])
    emitter = read_chat(body, everybody).emitter(INFO)
    for delta in (Started(80), *before, *last):
        emitter.feed(delta)
    message = emitter.result()["choices"][0]["message"]
    shown = [{"index": at, **call} for at, call in enumerate(message.get("server_tool_calls", []))]
    assert shown == streamed
    assert len(shown) == bool(before)
    assert ("server_tool_calls" in message) == bool(before)


# --- Messages.


def mcp_use(name: str, label: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "mcp_tool_use", "id": f"mcptoolu_{KEY}0000", "name": name,
            "server_name": label, "input": arguments}  # fmt: skip


def mcp_result(text: str, *, failed: bool = False) -> dict[str, Any]:
    return {"type": "mcp_tool_result", "tool_use_id": f"mcptoolu_{KEY}0000", "is_error": failed,
            "content": [{"type": "text", "text": text, "citations": None}]}  # fmt: skip


MESSAGES: dict[str, tuple[list[Delta], list[dict[str, Any]]]] = {
    "a call": (
        [*ROME, *result_deltas("20 °C")],
        [mcp_use("now", "weather", {"city": "Rome"}), mcp_result("20 °C")],
    ),
    "its own name": (
        [*call_deltas("weather.later_1", "{}"), *result_deltas("")],
        [mcp_use("later?", "weather", {}), mcp_result("")],
    ),
    "no such tool": (
        [*call_deltas("weather.never", "{}"), *result_deltas("Error: no", DIED)],
        [mcp_use("never", "weather", {}), mcp_result("Error: no", failed=True)],
    ),
    "code": (
        [*call_deltas("python", 'print("é")', "\n"), *result_deltas("é")],
        [mcp_use("python", "python", {"code": 'print("é")\n'}), mcp_result("é")],
    ),
    "code that is cut before it begins": (
        [Opened(0, Kind.SERVER_CALL, "python"), Closed(complete=False)],
        [mcp_use("python", "python", {})],
    ),
}


@pytest.mark.parametrize(("deltas", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_messages_has_use_and_result_blocks(
    deltas: list[Delta], expected: list[dict[str, Any]]
) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    everybody = replace(DEFAULTS, tools_for_all=True)
    emitter = read_messages(body, everybody, Reverse()).emitter(INFO)
    assert [event for delta in turn_deltas(*deltas) for event in emitter.feed(delta)] == []
    message = emitter.result()
    assert message["content"] == [*expected, {"type": "text", "text": "Warm."}]
    assert message["usage"]["output_tokens_details"]["tool_output_tokens"] == 5

    emitter = read_messages({**body, "stream": True}, everybody, Reverse()).emitter(INFO)
    events = [
        json.loads(event.data) for delta in turn_deltas(*deltas) for event in emitter.feed(delta)
    ]
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            pieces = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            pieces += event["delta"].get("partial_json", "")
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "mcp_tool_use":
            assert blocks[-1]["input"] == {}
            blocks[-1]["input"] = json.loads(pieces or "{}")
    assert blocks[:-1] == expected


def test_client_call_after_server_call_is_read_back() -> None:
    """It has the id of its message, and the client runs it."""
    tools = [{"type": "function", "name": "mine", "parameters": None, "strict": False}]
    mine: list[Delta] = [Opened(1, Kind.CALL, "mine"), Text("{}"), Closed()]
    _, final = responses_events(
        [Started(80), *ROME, *result_deltas("20 °C"), *mine, Finished("tool_calls", None, USAGE)],
        tools=[*TOOLS, *tools],
    )
    assert [item["type"] for item in final["output"]] == ["mcp_call", "function_call"]
    assert final["output"][1]["call_id"] == INFO.call_id(1)
    sent = [*final["output"], {"type": "function_call_output",
                               "call_id": INFO.call_id(1), "output": "3"}]  # fmt: skip
    body = {
        "model": "m",
        "input": [{"role": "user", "content": "Hi"}, *sent],
        "tools": [*TOOLS, *tools],
    }
    _, call, answer, client_call, client_result = read(body, DEFAULTS, Reverse()).turn.messages
    assert call == ServerCall(INFO.call_id(0), "weather.now", '{"city": "Rome"}')
    assert answer == ServerResult(INFO.call_id(0), "weather.now", "20 °C")
    assert client_call == Call(INFO.call_id(1), "mine", "{}")
    assert (client_result.call_id, client_result.text) == (INFO.call_id(1), "3")  # type: ignore[union-attr]


# --- Servers that a request names by URL, and their credentials.


def of_responses(**fields: Any) -> Any:
    tool = {"type": "mcp", "server_label": "mine", "server_url": "https://mine", **fields}
    return client_servers({"tools": [SEARCH, tool, 3]}, {"weather"})


def of_messages(**fields: Any) -> Any:
    server = {"type": "url", "name": "mine", "url": "https://mine", **fields}
    return messages_tools.client_servers({"mcp_servers": [3, server]}, {"weather"})


TOKEN = ("authorization", "Bearer t")
CLIENT_SERVERS: dict[str, tuple[Any, list[tuple[Any, ...]]]] = {
    "a tool": (of_responses, [("mine", "https://mine", "tools[1].server_url", ())]),
    "with a token": (
        lambda: of_responses(authorization="t"),
        [("mine", "https://mine", "tools[1].server_url", (TOKEN,))],
    ),
    "with headers, and a token": (
        lambda: of_responses(headers={"X-A": "1"}, authorization="t"),
        [("mine", "https://mine", "tools[1].server_url", (("x-a", "1"), TOKEN))],
    ),
    "malformed, for who reads it all": (lambda: of_responses(server_label=3), []),
    "no tools": (lambda: client_servers({"tools": 3}, set()), []),
    "no body": (lambda: client_servers([], set()), []),
    "a server": (of_messages, [("mine", "https://mine", "mcp_servers[1].url", ())]),
    "a server with a token": (
        lambda: of_messages(authorization_token="t"),
        [("mine", "https://mine", "mcp_servers[1].url", (TOKEN,))],
    ),
    "the operator's": (lambda: of_messages(name="weather"), []),
    "no servers": (lambda: messages_tools.client_servers(3, set()), []),
}


@pytest.mark.parametrize(("read_servers", "expected"), CLIENT_SERVERS.values(), ids=CLIENT_SERVERS)
def test_servers_of_request_are_read(read_servers: Any, expected: list[tuple[Any, ...]]) -> None:
    servers = read_servers()
    assert [
        (server.label, server.url, server.where, server.headers) for server in servers
    ] == expected
    for server in servers:
        assert "Bearer" not in repr(server)
        error = server.unreachable("it is away")
        assert "'mine'" in error.message and "it is away" in error.message


INVALID_SERVERS: dict[str, tuple[Any, str]] = {
    "the operator's": (lambda: of_responses(server_label="weather"), "tools[1].server_url"),
    "headers that are none": (lambda: of_responses(headers=[]), "tools[1].headers"),
    "a name": (lambda: of_responses(headers={"a b": "1"}), "tools[1].headers"),
    "a value": (lambda: of_responses(headers={"a": "1\n2"}), "tools[1].headers"),
    "the connection's": (lambda: of_responses(headers={"Host": "x"}), "tools[1].headers"),
    "too many": (
        lambda: of_responses(headers={f"x{at}": "1" for at in range(65)}),
        "tools[1].headers",
    ),
    "a token": (lambda: of_responses(authorization="\n"), "tools[1].authorization"),
    "another token": (
        lambda: of_messages(authorization_token=3),
        "mcp_servers[1].authorization_token",
    ),
}


@pytest.mark.parametrize(("read_servers", "param"), INVALID_SERVERS.values(), ids=INVALID_SERVERS)
def test_invalid_servers_are_rejected(read_servers: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_servers()
    assert caught.value.param == param


def test_response_repeats_no_credentials() -> None:
    tool = {"type": "mcp", "server_label": "a", "server_url": "https://me:pw@a.example/x?key=1",
            "authorization": "t", "headers": {"X": "1"}}  # fmt: skip
    assert without_secrets(tool) == {
        "type": "mcp",
        "server_label": "a",
        "server_url": "https://a.example/<redacted>",
        "headers": None,
    }
    assert without_secrets(WEATHER) == WEATHER


@pytest.mark.parametrize(
    "url",
    [
        "a.example/sse?token=SECRET",
        "https:/me:SECRET@a.example/x",
        "https://me:SECRET@a.example\\x",
        "https://a.example\\SECRET",
        "me:SECRET@a.example://b",
        ["https://a.example/SECRET"],
    ],
)
def test_response_repeats_no_secret_of_invalid_url(url: object) -> None:
    assert "SECRET" not in str(without_secrets({"type": "mcp", "server_url": url}))


# --- Messages: requested tools, and calls in the messages.

ONE = {"type": "url", "name": "weather", "url": "https://a"}
SET = {"type": "mcp_toolset", "mcp_server_name": "weather"}
MESSAGES_NAMESPACES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a server": ({"mcp_servers": [ONE]}, ALL),
    "some of it": (
        {"mcp_servers": [{**ONE, "tool_configuration": {"allowed_tools": ["later?"]}}]},
        ALL[1:],
    ),
    "none of it": ({"mcp_servers": [{**ONE, "tool_configuration": {"enabled": False}}]}, ()),
    "a set of tools": ({"tools": [SET]}, ALL),
    "but one": ({"tools": [{**SET, "configs": {"now": {"enabled": False}}}]}, ALL[1:]),
    "one alone": (
        {
            "tools": [
                {**SET, "default_config": {"enabled": False}, "configs": {"now": {"enabled": True}}}
            ]
        },
        ALL[:1],
    ),
}


@pytest.mark.parametrize(("fields", "shown"), MESSAGES_NAMESPACES.values(), ids=MESSAGES_NAMESPACES)
def test_messages_requested_tools_are_read(fields: dict[str, Any], shown: tuple[str, ...]) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    namespaces = read_messages({**body, **fields}, DEFAULTS, Reverse()).turn.namespaces
    assert tuple(name for namespace in namespaces for name in namespace.recipients) == shown


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mcp_servers": [{**ONE, "name": "no"}]}, "mcp_servers[0].name"),
        ({"tools": [{**SET, "mcp_server_name": "no"}]}, "tools[0].mcp_server_name"),
        ({"tools": [{"type": "mcp_toolset"}]}, "tools[0].mcp_server_name"),
    ],
)
def test_messages_unknown_server_is_rejected(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    with pytest.raises(RequestError) as caught:
        read_messages({**body, **fields}, DEFAULTS, Reverse())
    assert caught.value.param == param


def history_result(key: str, text: str) -> dict[str, Any]:
    return {"type": "mcp_tool_result", "tool_use_id": key,
            "content": [{"type": "text", "text": text}]}  # fmt: skip


USE_1, USE_2 = ({**mcp_use("now", "weather", {}), "id": f"mcptoolu_{key}"} for key in "12")
CALL_1, CALL_2 = (ServerCall(f"mcptoolu_{key}", "weather.now", "{}") for key in "12")
OUTPUT_1, OUTPUT_2 = history_result("mcptoolu_1", "20 °C"), history_result("mcptoolu_2", "30 °C")
RESULT_1, RESULT_2 = (
    ServerResult(f"mcptoolu_{key}", "weather.now", text)
    for key, text in (("1", "20 °C"), ("2", "30 °C"))
)
UNANSWERED = ServerResult("mcptoolu_1", "weather.now", NOT_RUN.text)
WARM = {"type": "text", "text": "Warm."}
PARALLEL: dict[str, tuple[list[dict[str, Any]], list[Message]]] = {
    "answered in order": (
        [USE_1, USE_2, OUTPUT_1, OUTPUT_2, WARM],
        [CALL_1, RESULT_1, CALL_2, RESULT_2, Answer("Warm.")],
    ),
    "answered in another order": (
        [USE_1, USE_2, OUTPUT_2, OUTPUT_1, WARM],
        [CALL_1, RESULT_1, CALL_2, RESULT_2, Answer("Warm.")],
    ),
    "one is not": (
        [USE_1, USE_2, OUTPUT_2, WARM],
        [CALL_1, UNANSWERED, CALL_2, RESULT_2, Answer("Warm.")],
    ),
    "something is said before the answer": (
        [USE_1, WARM, OUTPUT_1, WARM], [CALL_1, RESULT_1, Preamble("Warm."), Answer("Warm.")]
    ),
    "answered twice": ([USE_1, OUTPUT_1, OUTPUT_1, WARM], [CALL_1, RESULT_1, Answer("Warm.")]),
    "an id comes twice": (
        [USE_1, OUTPUT_1, USE_1, OUTPUT_1, WARM],
        [CALL_1, RESULT_1, CALL_1, RESULT_1, Answer("Warm.")],
    ),
    "before its call": (
        [OUTPUT_1, USE_1, WARM],
        [CALL_1, UNANSWERED, Answer("Warm.")],
    ),
    "the last is still to be run": ([USE_1, USE_2, OUTPUT_1], [CALL_1, RESULT_1, CALL_2]),
}  # fmt: skip


@pytest.mark.parametrize(("blocks", "expected"), PARALLEL.values(), ids=PARALLEL)
def test_messages_each_call_has_its_own_result(
    blocks: list[dict[str, Any]], expected: list[Message]
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": blocks}]
    if blocks[-1] is WARM:
        messages.append({"role": "user", "content": "Bye"})
        expected = [*expected, User("Bye")]
    body = {"model": "m", "max_tokens": 9, "messages": messages, "mcp_servers": [ONE]}
    turn_messages = read_messages(body, DEFAULTS, Reverse()).turn.messages
    assert turn_messages == (User("Hi"), *expected)


PAST: list[tuple[str | None, str, dict[str, Any], tuple[str, str] | None]] = [
    ("weather", "later?", {"a": 1}, ("weather.later_1", '{"a": 1}')),
    ("python", "python", {"code": "6 * 7"}, ("python", "6 * 7")),
    (None, "web_search", {"query": "é"}, ("browser.search", '{"query":"é"}')),
    (None, "web_fetch", {"url": "http://a"}, ("browser.open", '{"id":"http://a"}')),
    (None, "code_execution", {"code": "6 * 7"}, ("python", "6 * 7")),
    (None, "code_execution", {"files": []}, ("python", '{"files": []}')),
    (None, "something else", {}, ("something_else", "{}")),
    (None, "tool_search_tool_regex", {}, None),
]


@pytest.mark.parametrize(("label", "name", "given", "expected"), PAST)
def test_messages_calls_in_history_are_translated(
    label: str | None, name: str, given: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    arguments = json.dumps(given)
    assert messages_tools.translated_call(SERVERS, label, name, given, arguments) == expected


SHOWN: list[tuple[Any, str]] = [
    ("text", "text"),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": ""}, "b"], "a\nb"),
    ({"type": "web_search_tool_result_error", "error_code": "busy"}, "Error: busy"),
    ({"stdout": "42", "stderr": "warned", "return_code": 0}, "42\nwarned"),
    ({"content": {"source": {"data": "page"}}}, "page"),
    (3, ""),
]


@pytest.mark.parametrize(("found", "expected"), SHOWN)
def test_messages_results_in_history_are_texts(found: Any, expected: str) -> None:
    assert messages_tools.result_text(found, "messages[0]", Attachments.OMIT) == expected


def test_responses_search_sources_are_sent_on_request() -> None:
    result = "[0] Rome (https://a.example/x). See https://b.example/(y), https://a.example/x"
    deltas = turn_deltas(
        *call_deltas("browser.search", '{"query": "Rome"}'), *result_deltas(result)
    )
    _, final = responses_events(deltas, include=["web_search_call.action.sources"])
    assert final["output"][0]["action"]["sources"] == [
        {"type": "url", "url": "https://a.example/x"},
        {"type": "url", "url": "https://b.example/(y)"},
    ]
