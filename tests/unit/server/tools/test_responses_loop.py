"""The tool loop of the Responses API, over a fake engine, in process, with the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")


import openai
from harmony_text import ids_of, text_of
from local_tool_servers import LocalServer, browser, weather
from loops import run
from scripted_host import ScriptedEngine, SingleEngineHost
from tool_loop import (
    CALLED,
    FIRST,
    LAST,
    OPENING,
    RESULTS,
    SCRIPTS,
    SECOND,
    THIRD,
    TOOLS,
    client,
    create,
    host_with_tools,
    outline,
)
from waiting import wait_until_async

from vllm_mlx_harmony.core.render import Rendered, render
from vllm_mlx_harmony.core.turn import Turn
from vllm_mlx_harmony.engine_api.engine import GenerationRequest
from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.tools.tool_server import ToolResult

pytestmark = pytest.mark.usefixtures("no_grammars")

MINE = {"type": "function", "name": "mine", "parameters": {"type": "object"}, "strict": False}


LOOP: list[tuple[Any, ...]] = [
    ("mcp_list_tools", ["now", "fails", "dies", "sleep"], None),
    ("reasoning", "Ask."),
    ("mcp_call", "now", '{"city": "Rome"}', "Rome: 20 °C", "completed"),
    ("reasoning", "Compute."),
    ("code_interpreter_call", "6 * 7", "42", "completed"),
    ("reasoning", "Search."),
    ("web_search_call", "Rome", "completed"),
    ("reasoning", "Done."),
    ("message", "It is warm."),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("at_once", [1, 4, 1000])
def test_loop_runs_three_calls_and_answers(at_once: int, stream: bool) -> None:
    host = host_with_tools(at_once=at_once)
    include = ["code_interpreter_call.outputs"]
    request = {"input": "Where is it warm?", "include": include}
    response, events = run(create(host, stream, **request))
    assert outline(response) == LOOP
    assert response.status == "completed"
    # Each further prompt has exactly the ids so far, and there are no others.
    first, *others = host.engine.prompts  # type: ignore[attr-defined]
    so_far = list(first)
    for generated, result, prompt in zip((FIRST, SECOND, THIRD), RESULTS, others, strict=True):
        so_far += ids_of(generated + result + OPENING)
        assert list(prompt) == so_far
    usage = response.usage
    assert usage.input_tokens == len(first)
    assert usage.output_tokens == len(ids_of(FIRST + SECOND + THIRD + LAST))
    details = usage.output_tokens_details.model_dump()
    assert details["tool_output_tokens"] == len(ids_of("".join(RESULTS)))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (host.leases, host.engine.running) == (0, 0)  # type: ignore[attr-defined]
    if stream:
        items = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.model_dump() for item in items] == [
            item.model_dump() for item in response.output
        ]


SEARCH_TEXT = (
    "[0] A page\nURL: https://a.example/x_(y)?q=1&r=2\n"
    "[1] Another (see http://b.example/z), and (https://c.example/d).\n"
    "[2] the first once more: https://a.example/x_(y)?q=1&r=2 【3†https://d.example†x】\n"
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("included", [True, False])
def test_search_sources_are_included_on_request(included: bool, stream: bool) -> None:
    async def search(query: str) -> ToolResult:
        return ToolResult(SEARCH_TEXT)

    search_browser = browser()
    search_browser.functions["search"] = (None, search)
    scripts = {"Where is it warm?": THIRD, "[2] the first once more": LAST}
    host = host_with_tools(search_browser, scripts=scripts)
    include = ["web_search_call.action.sources"] if included else []
    request = {"input": "Where is it warm?", "tools": TOOLS[2:], "include": include}
    response, events = run(create(host, stream, **request))
    (call,) = [item for item in response.output if item.type == "web_search_call"]
    urls = [
        "https://a.example/x_(y)?q=1&r=2",
        "http://b.example/z",
        "https://c.example/d",
        "https://d.example",
    ]
    sources = call.action.sources
    assert (sources and [source.url for source in sources]) == (urls if included else None)
    if stream:
        items = [event.item for event in events if event.type == "response.output_item.done"]
        assert call in items


ORDERS = {
    "mcp_list_tools": ["added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "done"],
    "mcp_call": [
        "added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "done",
    ],
    "code_interpreter_call": [
        "added",
        "code_interpreter_call.in_progress",
        "code_interpreter_call_code.delta",
        "code_interpreter_call_code.done",
        "code_interpreter_call.interpreting",
        "code_interpreter_call.completed",
        "done",
    ],
    "web_search_call": [
        "added",
        "web_search_call.in_progress",
        "web_search_call.searching",
        "web_search_call.completed",
        "done",
    ],
}


@pytest.mark.parametrize("kind", ORDERS)
def test_events_of_calls_are_in_order(kind: str) -> None:
    response, events = run(create(host_with_tools(), True, input="Where is it warm?"))
    index = next(at for at, output in enumerate(response.output) if output.type == kind)
    names: list[str] = []
    text = ""
    for event in events:
        if getattr(event, "output_index", None) != index:
            continue
        name = event.type.removeprefix("response.").removeprefix("output_item.")
        text += event.delta if name.endswith(".delta") else ""
        if not (names and names[-1] == name):
            names.append(name)
        if name not in ("added", "done"):
            assert event.item_id == response.output[index].id
    assert names == ORDERS[kind]
    item = response.output[index]
    assert text == getattr(item, "arguments", getattr(item, "code", ""))


FAILURES = {
    "Ask something that fails.": ("mcp_tool_execution_error", "It is broken."),
    "Ask something that dies.": ("mcp_protocol_error", "Error: the server has died"),
    "Ask something unknown.": ("mcp_protocol_error", "Error: unknown tool weather.later"),
    "Ask with bad JSON.": ("mcp_protocol_error", "Error: the arguments are not valid JSON"),
    "Sleep.": ("mcp_protocol_error", "Error: the tool did not answer within 0 seconds"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("question", FAILURES)
def test_failed_call_is_shown_to_model(question: str, stream: bool) -> None:
    server = weather()
    server.timeout = 0.2
    response, events = run(create(host_with_tools(server), stream, input=question, tools=TOOLS[:1]))
    call = next(item for item in response.output if item.type == "mcp_call")
    kind, text = FAILURES[question]
    assert (call.status, call.output, call.error.type) == ("failed", None, kind)
    content = getattr(call.error, "content", None)
    message = call.error.message if content is None else content[0]["text"]
    assert message.startswith(text)
    assert outline(response)[-1] == ("message", "It is warm.")
    names = [event.type for event in events]
    assert not stream or "response.mcp_call.failed" in names
    assert server.running == 0


def test_returned_calls_are_not_run_again() -> None:
    """Returned as items or by the id of the response, they are in the prompt as generated."""
    for by_id in (False, True):
        host = host_with_tools()
        include = ["code_interpreter_call.outputs"]
        request = {"input": "Where is it warm?", "tools": TOOLS[:2], "include": include}
        scripts = {"<|message|>42<|end|>": LAST}
        host.engine.scripts.update(scripts)  # type: ignore[attr-defined]
        first, _ = run(create(host, **request))
        again = {"role": "user", "content": "Say hello."}
        history = [{"role": "user", "content": "Where is it warm?"}]
        output = [item.model_dump(exclude_none=True) for item in first.output]
        more = (
            {"input": [again], "previous_response_id": first.id}
            if by_id
            else {"input": [*history, *output, again]}
        )
        second, _ = run(create(host, **{**request, **more}))
        assert outline(second) == [("reasoning", "Done."), ("message", "It is warm.")]
        prompts = host.engine.prompts  # type: ignore[attr-defined]
        start = len(prompts[0])
        replayed = FIRST.partition(OPENING)[2] + RESULTS[0] + OPENING
        replayed += SECOND.partition(OPENING)[2] + RESULTS[1] + OPENING
        replayed += "<|channel|>final<|message|>It is warm.<|end|>"
        expected = ids_of(replayed + "<|start|>user<|message|>Say hello.<|end|>" + OPENING)
        assert prompts[-1][start:] == expected


def test_client_call_interrupts_loop() -> None:
    host = host_with_tools(scripts={"Rome: 20 °C": CALLED.format("functions.mine", "{}")})
    tools = [*TOOLS, MINE]
    first, _ = run(create(host, input="Ask it, then me.", tools=tools))
    assert [row[0] for row in outline(first)][1:] == ["reasoning", "mcp_call", "function_call"]
    result = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,
        "output": "this is mine",
    }
    second, _ = run(create(host, input=[result], previous_response_id=first.id, tools=tools))
    assert outline(second) == [("reasoning", "Done."), ("message", "It is warm.")]
    _, two, three = host.engine.prompts  # type: ignore[attr-defined]
    whole = two + ids_of(CALLED.format("functions.mine", "{}"))
    assert three[: len(whole)] == whole


@pytest.mark.parametrize("approve", [True, False])
@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_only_approved_call_is_run(approve: bool, by_id: bool, stream: bool) -> None:
    server = weather()
    host = host_with_tools(server, scripts={"Rome: 20 °C": LAST})
    tools = [{"type": "mcp", "server_label": "weather"}]  # OpenAI's default is to ask
    first, _ = run(create(host, stream, input="Where is it warm?", tools=tools))
    assert [row[0] for row in outline(first)] == [
        "mcp_list_tools",
        "reasoning",
        "mcp_approval_request",
    ]
    request = first.output[-1]
    assert (request.name, request.server_label) == ("now", "weather")
    assert (json.loads(request.arguments), server.calls) == ({"city": "Rome"}, [])
    answer = {
        "type": "mcp_approval_response",
        "approval_request_id": request.id,
        "approve": approve,
        "reason": "too warm",
    }
    history: list[Any] = [{"role": "user", "content": "Where is it warm?"}]
    history += [item.model_dump(exclude_none=True) for item in first.output]
    more: dict[str, Any] = {"input": [*history, answer]}
    if by_id:
        more = {"input": [answer], "previous_response_id": first.id}
    second, _ = run(create(host, stream, tools=tools, **more))
    calls = [item for item in second.output if item.type == "mcp_call"]
    if approve:
        assert server.calls == [("now", {"city": "Rome"})]
        assert [(call.output, call.approval_request_id) for call in calls] == [
            ("Rome: 20 °C", request.id)
        ]
    else:
        assert server.calls == [] and calls == []
    assert outline(second)[-1] == ("message", "It is warm.")


def approval_request(key: str, city: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city})
    call = {"server_label": "weather", "name": "now", "arguments": arguments}
    return {"type": "mcp_approval_request", "id": f"mcpr_{key}", **call}


def approval_response(key: str, approve: bool) -> dict[str, Any]:
    request = {"approval_request_id": f"mcpr_{key}", "approve": approve}
    return {"type": "mcp_approval_response", **request}


QUESTION = {"role": "user", "content": "Where is it warm?"}
FOLLOW_UP = {"role": "user", "content": "In Celsius."}
IN_CELSIUS = "<|start|>user<|message|>In Celsius.<|end|>"
RESULT_HEADER = "<|start|>weather.now to=assistant<|channel|>commentary<|message|>"
APPROVALS: dict[str, tuple[list[dict[str, Any]], list[str], str]] = {
    # items, cities for which the tool is called, end of the prompt
    "a user's message behind it": (
        [approval_request("a", "Rome"), approval_response("a", True), FOLLOW_UP],
        ["Rome"],
        f"{RESULT_HEADER}Rome: 20 °C<|end|>{IN_CELSIUS}",
    ),
    "a user's message before it": (
        [approval_request("a", "Rome"), FOLLOW_UP, approval_response("a", True)],
        ["Rome"],
        f"{RESULT_HEADER}Rome: 20 °C<|end|>{IN_CELSIUS}",
    ),
    "two": (
        [
            approval_request("a", "Rome"),
            approval_request("b", "Oslo"),
            approval_response("b", True),
            approval_response("a", True),
        ],
        ["Rome", "Oslo"],
        f"{RESULT_HEADER}Oslo: 20 °C<|end|>",
    ),
    "two, one after the other": (
        [
            approval_request("a", "Rome"),
            approval_response("a", True),
            approval_request("b", "Oslo"),
            approval_response("b", True),
            FOLLOW_UP,
        ],
        ["Rome", "Oslo"],
        f"{RESULT_HEADER}Oslo: 20 °C<|end|>{IN_CELSIUS}",
    ),
    "the first of two": (
        [
            approval_request("a", "Rome"),
            approval_request("b", "Oslo"),
            approval_response("a", True),
            approval_response("b", False),
        ],
        ["Rome"],
        f"{RESULT_HEADER}The user did not approve this call<|end|>",
    ),
    "the second of two": (
        [
            approval_request("a", "Rome"),
            approval_request("b", "Oslo"),
            approval_response("a", False),
            approval_response("b", True),
        ],
        ["Oslo"],
        f"{RESULT_HEADER}Oslo: 20 °C<|end|>",
    ),
    "none of two": (
        [
            approval_request("a", "Rome"),
            approval_request("b", "Oslo"),
            approval_response("a", False),
            approval_response("b", False),
            FOLLOW_UP,
        ],
        [],
        f"{RESULT_HEADER}The user did not approve this call<|end|>{IN_CELSIUS}",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("items", "cities", "end"), APPROVALS.values(), ids=APPROVALS)
def test_approvals_are_found_anywhere_in_input(
    items: list[dict[str, Any]], cities: list[str], end: str, stream: bool
) -> None:
    server = weather()
    tools = [{"type": "mcp", "server_label": "weather"}]
    host = host_with_tools(server, scripts={"In Celsius.": LAST, "Oslo: 20 °C": LAST})
    answer, events = run(create(host, stream, tools=tools, input=[QUESTION, *items]))
    assert [arguments["city"] for _, arguments in server.calls] == cities
    calls = [item for item in answer.output if item.type == "mcp_call"]
    assert [call.output for call in calls] == [f"{city}: 20 °C" for city in cities]
    keys = {"Rome": "mcpr_a", "Oslo": "mcpr_b"}
    assert [call.approval_request_id for call in calls] == [keys[city] for city in cities]
    ran = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item for item in ran if item.type == "mcp_call"] == (calls if stream else [])
    assert len({item.id for item in answer.output}) == len(answer.output)
    assert outline(answer)[-1] == ("message", "It is warm.")
    (prompt,) = host.engine.prompts  # type: ignore[attr-defined]
    assert text_of(prompt).endswith(end + OPENING)
    assert "did not finish" not in text_of(prompt)
    details = answer.usage.output_tokens_details
    assert bool(getattr(details, "tool_output_tokens", 0)) == bool(cities)
    # The next turn begins with all of it, and runs nothing again.
    again: Any = {"input": [FOLLOW_UP], "previous_response_id": answer.id}
    run(create(host, stream, tools=tools, **again))
    echo = [item.model_dump(exclude_none=True) for item in answer.output]
    run(create(host, stream, tools=tools, input=[QUESTION, *items, *echo, FOLLOW_UP]))
    assert len(server.calls) == len(cities)
    _, by_id, by_echo = host.engine.prompts  # type: ignore[attr-defined]
    assert by_id[: len(prompt)] == by_echo[: len(prompt)] == prompt


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ends", [[], [{"role": "user", "content": "In Celsius."}]])
def test_approvals_beyond_limit_are_answered_together(ends: list[Any], stream: bool) -> None:
    """Thousands of them took minutes: the prompt was rendered again for each."""
    server, rendered = weather(), 0
    host = host_with_tools(server, scripts={"In Celsius.": LAST}, max_tool_calls=2)

    def renderer(turn: Turn, *args: Any, **keywords: Any) -> Rendered:
        nonlocal rendered
        rendered += 1
        return render(turn, *args, **keywords)

    host.renderer = renderer
    kinds = ("mcp_approval_request", "mcp_approval_response")
    call = {"server_label": "weather", "name": "now", "arguments": '{"city": "Rome"}'}
    requests, approvals = (
        [{"type": kind, **fields, key: f"mcpr_{n:03}"} for n in range(50)]
        for kind, key, fields in zip(
            kinds, ("id", "approval_request_id"), (call, {"approve": True}), strict=True
        )
    )
    tools = [{"type": "mcp", "server_label": "weather"}]
    items = [{"role": "user", "content": "Weather?"}, *requests, *approvals, *ends]
    answer, _ = run(create(host, stream, tools=tools, input=items))
    calls = [item for item in answer.output if item.type == "mcp_call"]
    assert [tool_call.approval_request_id for tool_call in calls] == [
        request["id"] for request in requests
    ]
    assert [tool_call.status for tool_call in calls] == ["completed"] * 2 + ["failed"] * 48
    assert len(server.calls) == 2
    assert outline(answer)[-1] == ("message", "It is warm.")
    (prompt,) = host.engine.prompts  # type: ignore[attr-defined]
    assert text_of(prompt).count("no more tools can be called") == 48
    assert text_of(prompt).count("<|start|>weather.now to=assistant") == 50
    assert rendered <= 4


UNAPPROVED: dict[str, Any] = {
    "no input": None,
    "nothing": [],
    "the request itself": ["request"],
    "another is approved": [{"approval_request_id": "mcpr_other", "approve": True}],
    "another is not": [{"approval_request_id": "mcpr_other", "approve": False}],
}


@pytest.mark.parametrize("rule", [None, "always"])
@pytest.mark.parametrize("sent", UNAPPROVED.values(), ids=UNAPPROVED)
@pytest.mark.parametrize("by_id", [True, False])
def test_unapproved_call_is_not_run(sent: Any, by_id: bool, rule: str | None) -> None:
    server = weather()
    host = host_with_tools(server, scripts={"did not finish": LAST})
    tools = [{"type": "mcp", "server_label": "weather", "require_approval": rule}]
    first, _ = run(create(host, input="Where is it warm?", tools=tools))
    request = first.output[-1].model_dump(exclude_none=True)
    assert request["type"] == "mcp_approval_request"
    items = [
        request if approval == "request" else {"type": "mcp_approval_response", **approval}
        for approval in sent or ()
    ]
    more: dict[str, Any] = {"input": [{"role": "user", "content": "Where is it warm?"}]}
    more["input"] += [item.model_dump(exclude_none=True) for item in first.output]
    more["input"] += [item for item in items if item is not request]
    if by_id:
        input_fields = {} if sent is None else {"input": items}
        more = {"previous_response_id": first.id, **input_fields}
    second, _ = run(create(host, tools=tools, **more))
    assert server.calls == []
    assert outline(second)[-1] == ("message", "It is warm.")


def test_cut_call_is_not_run_by_next_request() -> None:
    server = weather()
    host = host_with_tools(server, scripts={"did not finish": LAST})
    tools = [{"type": "mcp", "server_label": "weather"}]
    most = len(ids_of(FIRST)) - 1
    first, _ = run(create(host, input="Where is it warm?", tools=tools, max_output_tokens=most))
    assert first.status == "incomplete"
    second, _ = run(create(host, input=[], previous_response_id=first.id, tools=tools))
    assert server.calls == []
    assert outline(second)[-1] == ("message", "It is warm.")


def test_tools_are_filtered() -> None:
    for fields, expected in (
        ({"allowed_tools": ["now", "sleep"]}, ["now", "sleep"]),
        ({"allowed_tools": {"read_only": True}}, ["now"]),
        ({"allowed_tools": {"tool_names": ["dies"]}}, ["dies"]),
    ):
        host = host_with_tools()
        tool = {**TOOLS[0], **fields}
        response, _ = run(create(host, input="Say hello.", tools=[tool]))
        assert outline(response)[0] == ("mcp_list_tools", expected, None)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "mcp", "server_label": "nobody"}]}, "tools[0].server_label"),
    ({"tools": [{"type": "mcp"}]}, "tools[0].server_label"),
    (
        {"tools": [{**TOOLS[0], "server_url": "http://169.254.169.254/"}]},
        "tools[0].server_url",
    ),
    ({"tools": [{**TOOLS[0], "headers": {"X": "1"}}]}, "tools[0].headers"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]"),
    ({"tools": [{**TOOLS[0], "allowed_tools": ["nothing"]}]}, "tools[0].allowed_tools"),
    ({"tools": [{**TOOLS[0], "require_approval": "maybe"}]}, "tools[0].require_approval"),
    ({"tool_choice": {"type": "mcp", "server_label": "nobody"}}, "tool_choice"),
    (
        {"tools": [*TOOLS, {"type": "function", "name": "weather.now", "strict": False}]},
        "tools[3]",
    ),
]


@pytest.mark.parametrize(("request_", "param"), REFUSED)
def test_invalid_request_is_rejected(request_: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        run(create(host_with_tools(), input="Say hello.", **request_))
    assert refused.value.param == param


def test_failed_server_has_no_tools() -> None:
    away = LocalServer("weather", {}, problem="it does not answer")
    response, events = run(create(host_with_tools(away), True, input="Say hello.", tools=TOOLS[:1]))
    assert outline(response)[0] == ("mcp_list_tools", [], "it does not answer")
    assert "response.mcp_list_tools.failed" in [event.type for event in events]


@pytest.mark.parametrize("most", [1, 2])
def test_max_tool_calls_is_enforced(most: int) -> None:
    host = host_with_tools()
    response, _ = run(create(host, input="Where is it warm?", max_tool_calls=most))
    kinds = [item.type for item in response.output if item.type.endswith("_call")]
    statuses = [item.status for item in response.output if item.type.endswith("_call")]
    assert statuses == ["completed"] * most + ["failed"]
    assert kinds == ["mcp_call", "code_interpreter_call", "web_search_call"][: most + 1]
    assert outline(response)[-1] == ("message", "It is warm.")


def test_repeated_calls_beyond_limit_end_response() -> None:
    call = CALLED.format("weather.now", '{"city": "Rome"}')
    host = host_with_tools(scripts={"Rome: 20 °C": call, "no more tools can be called": call})
    response, _ = run(create(host, input="Where is it warm?", max_tool_calls=2))
    statuses = [item.status for item in response.output if item.type == "mcp_call"]
    assert statuses == ["completed"] * 2 + ["failed"] * 3 + ["incomplete"]


def test_token_budget_spans_whole_loop() -> None:
    for most in (len(ids_of(FIRST)), len(ids_of(FIRST)) + 5):
        host = host_with_tools()
        response, _ = run(create(host, input="Where is it warm?", max_output_tokens=most))
        assert response.status == "incomplete"
        assert response.usage.output_tokens == most


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_client_disconnect_cancels_tool(stream: bool) -> None:
    server = weather()
    host = host_with_tools(server)

    async def disconnect_during_call() -> None:
        request = asyncio.ensure_future(create(host, stream, input="Sleep.", tools=TOOLS[:1]))
        await wait_until_async(lambda: server.running == 1, "the call")
        request.cancel()
        await asyncio.wait({request})
        # Inside the loop, as its end would cancel the tool, too.
        await wait_until_async(
            lambda: not server.running and not host.leases, "the end of the call"
        )

    run(disconnect_during_call())
    assert server.cancelled == 1


def test_engine_is_free_while_tool_runs() -> None:
    server = weather()
    host = host_with_tools(server)

    async def both() -> Any:
        sleeping = asyncio.ensure_future(create(host, input="Sleep.", tools=TOOLS[:1]))
        await wait_until_async(lambda: server.running == 1, "the call")
        response, _ = await create(host, input="Say hello.", tools=[])
        assert server.running == 1
        sleeping.cancel()
        await asyncio.wait({sleeping})
        return response

    assert outline(run(both()))[-1] == ("message", "It is warm.")


def test_fifty_requests_run_concurrently() -> None:
    host = host_with_tools(max_concurrent_calls=3)

    async def many() -> Sequence[Any]:
        requests = [create(host, at % 2 == 0, input="Where is it warm?") for at in range(50)]
        return await asyncio.gather(*requests)

    answers = run(many())
    assert {str(outline(response)) for response, _ in answers} == {
        str([*LOOP[:4], ("code_interpreter_call", "6 * 7", None, "completed"), *LOOP[5:]])
    }
    assert (host.leases, host.engine.running) == (0, 0)  # type: ignore[attr-defined]


def test_grammar_follows_tool_choice_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, "auto")
    grammars: list[Any] = []
    host = host_with_tools()
    generate = host.engine.generate

    def record_grammar(request: GenerationRequest) -> Any:
        assert request.constraint is not None and request.constraint.spec.grammar is not None
        grammars.append(request.constraint.spec.grammar.grammar.text)
        return generate(request)

    host.engine.generate = record_grammar  # type: ignore[method-assign]
    choice = {"type": "mcp", "server_label": "weather", "name": "now"}
    response, _ = run(create(host, input="Where is it warm?", tool_choice=choice, max_tool_calls=2))
    required, free, *_, exhausted = grammars
    assert '"weather.now"' in required and "answer:" not in required
    assert '"weather.now"' in free and "answer:" in free
    assert "weather.now" not in exhausted and "answer:" in exhausted
    assert outline(response)[-1] == ("message", "It is warm.")


def test_disabled_tools_are_omitted_and_named() -> None:
    host = SingleEngineHost(ScriptedEngine(SCRIPTS))
    response, _ = run(create(host, input="Say hello.", tools=[*TOOLS, MINE]))
    assert outline(response) == [("reasoning", "Done."), ("message", "It is warm.")]
    names = ["weather", "code_interpreter", "web_search"]
    assert response.model_extra["unavailable_tools"] == names


def test_disabled_tools_fail_without_running_model() -> None:
    host = SingleEngineHost(ScriptedEngine(SCRIPTS))
    response, _ = run(create(host, input="Say hello."))
    assert [row[0] for row in outline(response)] == [
        *("mcp_list_tools", "code_interpreter_call", "web_search_call", "message")
    ]
    assert host.engine.prompts == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_background_response_and_its_events_are_retrieved(stream: bool) -> None:
    host = host_with_tools()

    async def responses() -> tuple[list[Any], list[Any], Any]:
        include = ["code_interpreter_call.outputs"]
        request = {"input": "Where is it warm?", "background": True, "include": include}
        response, events = await create(host, stream, **request)
        retrieve = client(host).responses.retrieve
        again = [event async for event in await retrieve(response.id, stream=True)]
        return events, again, await retrieve(response.id)

    events, again, stored = run(responses())
    assert outline(stored) == LOOP
    assert again[-1].response.to_dict() == stored.to_dict()
    assert not stream or [event.to_dict() for event in again] == [
        event.to_dict() for event in events
    ]
