"""The loop through the Responses API: over a fake engine, in process, by the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")


import openai
from fakes import KEY, MODEL, Alone, ScriptedEngine, ids
from local import Local, browser, interpreter, weather
from official_clients import in_process

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.render import Rendered, render
from vllm_mlx_harmony.core.turn import Turn
from vllm_mlx_harmony.engine_api.engine import GenerationRequest
from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.settings import Use
from vllm_mlx_harmony.server.tools.config import ToolsConfig
from vllm_mlx_harmony.server.tools.tool_server import ToolResult
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

FIRST = (
    "<|channel|>analysis<|message|>Ask.<|end|><|start|>assistant<|channel|>commentary "
    'to=weather.now <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
)
SECOND = (
    "<|channel|>analysis<|message|>Compute.<|end|><|start|>assistant<|channel|>analysis "
    "to=python code<|message|>6 * 7<|call|>"
)
THIRD = (
    "<|channel|>analysis<|message|>Search.<|end|><|start|>assistant<|channel|>analysis "
    'to=browser.search code<|message|>{"query": "Rome"}<|call|>'
)
LAST = (
    "<|channel|>analysis<|message|>Done.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is warm.<|return|>"
)
CALLED = "<|channel|>commentary to={} <|constrain|>json<|message|>{}<|call|>"
SCRIPTS = {
    "Where is it warm?": FIRST,
    "Rome: 20 °C": SECOND,
    "<|message|>42<|end|>": THIRD,
    "[0] Results for Rome": LAST,
    "Say hello.": LAST,
    "Ask something that fails.": CALLED.format("weather.fails", "{}"),
    "It is broken.": LAST,
    "Ask something that dies.": CALLED.format("weather.dies", "{}"),
    "Error: the server has died": LAST,
    "Ask something unknown.": CALLED.format("weather.later", "{}"),
    "unknown tool weather.later": LAST,
    "Ask with bad JSON.": CALLED.format("weather.now", '{"city": '),
    "not valid JSON": LAST,
    "Ask me.": CALLED.format("functions.mine", "{}"),
    "Ask it, then me.": FIRST,
    "no more tools can be called": LAST,
    "did not approve": LAST,
    "Sleep.": CALLED.format("weather.sleep", "{}"),
    "did not answer within": LAST,
    "this is mine": LAST,
}
OPENING = "<|start|>assistant"
RESULTS = (
    "<|start|>weather.now to=assistant<|channel|>commentary<|message|>Rome: 20 °C<|end|>",
    "<|start|>python to=assistant<|channel|>analysis<|message|>42<|end|>",
    "<|start|>browser.search to=assistant<|channel|>analysis<|message|>[0] Results for Rome<|end|>",
)
TOOLS: list[dict[str, Any]] = [
    {"type": "mcp", "server_label": "weather", "require_approval": "never"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "web_search"},
]
MINE = {"type": "function", "name": "mine", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(autouse=True)
def _no_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, "off")


def serving(
    *servers: Local, at_once: int = 3, scripts: dict[str, str] | None = None, **limits: Any
) -> Alone:
    host = Alone(ScriptedEngine({**SCRIPTS, **(scripts or {})}, at_once, context_length=100_000))
    chosen = servers or (weather(), interpreter(), browser())
    host.toolbox = Toolbox(chosen, ToolsConfig(**limits), Use.ON)
    return host


def client(host: Alone) -> openai.AsyncOpenAI:
    http = in_process(openai.DefaultAsyncHttpxClient, host.app)
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key=KEY, max_retries=0, http_client=http
    )


def finally_(run: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(run, 120)  # type: ignore[arg-type]

    return asyncio.run(bounded())


async def create(host: Alone, stream: bool = False, **request: Any) -> tuple[Any, list[Any]]:
    """The response, and the events if it was streamed."""
    request = {"model": MODEL, "tools": TOOLS, **request}
    if not stream:
        return await client(host).responses.create(**request), []
    events = [each async for each in await client(host).responses.create(**request, stream=True)]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    return events[-1].response, events


def outline(response: Any) -> list[tuple[Any, ...]]:
    """The items, each as what of it matters."""
    return [_item(each) for each in response.output]


def _item(item: Any) -> tuple[Any, ...]:
    if item.type in ("message", "reasoning"):
        return item.type, item.content[0].text
    if item.type == "mcp_list_tools":
        return item.type, [each.name for each in item.tools], item.error
    if item.type == "mcp_call":
        return item.type, item.name, item.arguments, item.output, item.status
    if item.type == "code_interpreter_call":
        logs = None if item.outputs is None else item.outputs[0].logs
        return item.type, item.code, logs, item.status
    if item.type == "web_search_call":
        return item.type, item.action.query, item.status
    return (item.type,)


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
def test_three_calls_and_an_answer(at_once: int, stream: bool) -> None:
    host = serving(at_once=at_once)
    include = ["code_interpreter_call.outputs"]
    request = {"input": "Where is it warm?", "include": include}
    response, events = finally_(create(host, stream, **request))
    assert outline(response) == LOOP
    assert response.status == "completed"
    # Each continuation begins with exactly the ids so far, and nothing else is generated from.
    first, *others = host.engine.prompts  # type: ignore[attr-defined]
    so_far = list(first)
    for generated, result, prompt in zip((FIRST, SECOND, THIRD), RESULTS, others, strict=True):
        so_far += ids(generated + result + OPENING)
        assert list(prompt) == so_far
    usage = response.usage
    assert usage.input_tokens == len(first)
    assert usage.output_tokens == len(ids(FIRST + SECOND + THIRD + LAST))
    details = usage.output_tokens_details.model_dump()
    assert details["tool_output_tokens"] == len(ids("".join(RESULTS)))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (host.lent, host.engine.running) == (0, 0)  # type: ignore[attr-defined]
    if stream:
        done = [each.item for each in events if each.type == "response.output_item.done"]
        assert [each.model_dump() for each in done] == [
            each.model_dump() for each in response.output
        ]


FOUND = (
    "[0] A page\nURL: https://a.example/x_(y)?q=1&r=2\n"
    "[1] Another (see http://b.example/z), and (https://c.example/d).\n"
    "[2] the first once more: https://a.example/x_(y)?q=1&r=2 【3†https://d.example†x】\n"
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("included", [True, False])
def test_the_sources_of_a_search(included: bool, stream: bool) -> None:
    async def search(query: str) -> ToolResult:
        return ToolResult(FOUND)

    found = browser()
    found.runs["search"] = (None, search)
    scripts = {"Where is it warm?": THIRD, "[2] the first once more": LAST}
    host = serving(found, scripts=scripts)
    include = ["web_search_call.action.sources"] if included else []
    request = {"input": "Where is it warm?", "tools": TOOLS[2:], "include": include}
    response, events = finally_(create(host, stream, **request))
    (call,) = [each for each in response.output if each.type == "web_search_call"]
    urls = [
        "https://a.example/x_(y)?q=1&r=2",
        "http://b.example/z",
        "https://c.example/d",
        "https://d.example",
    ]
    sources = call.action.sources
    assert (sources and [each.url for each in sources]) == (urls if included else None)
    if stream:
        done = [each.item for each in events if each.type == "response.output_item.done"]
        assert call in done


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
def test_the_order_of_events(kind: str) -> None:
    response, events = finally_(create(serving(), True, input="Where is it warm?"))
    index = next(at for at, each in enumerate(response.output) if each.type == kind)
    found: list[str] = []
    text = ""
    for event in events:
        if getattr(event, "output_index", None) != index:
            continue
        name = event.type.removeprefix("response.").removeprefix("output_item.")
        text += event.delta if name.endswith(".delta") else ""
        if not (found and found[-1] == name):
            found.append(name)
        if name not in ("added", "done"):
            assert event.item_id == response.output[index].id
    assert found == ORDERS[kind]
    item = response.output[index]
    assert text == getattr(item, "arguments", "") or getattr(item, "code", "")


FAILURES = {
    "Ask something that fails.": ("mcp_tool_execution_error", "It is broken."),
    "Ask something that dies.": ("mcp_protocol_error", "Error: the server has died"),
    "Ask something unknown.": ("mcp_protocol_error", "Error: unknown tool weather.later"),
    "Ask with bad JSON.": ("mcp_protocol_error", "Error: the arguments are not valid JSON"),
    "Sleep.": ("mcp_protocol_error", "Error: the tool did not answer within 0 seconds"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("question", FAILURES)
def test_failed_call_is_shown_to_the_model(question: str, stream: bool) -> None:
    server = weather()
    server.timeout = 0.2
    response, events = finally_(create(serving(server), stream, input=question, tools=TOOLS[:1]))
    call = next(each for each in response.output if each.type == "mcp_call")
    kind, text = FAILURES[question]
    assert (call.status, call.output, call.error.type) == ("failed", None, kind)
    content = getattr(call.error, "content", None)
    shown = call.error.message if content is None else content[0]["text"]
    assert shown.startswith(text)
    assert outline(response)[-1] == ("message", "It is warm.")
    names = [each.type for each in events]
    assert not stream or "response.mcp_call.failed" in names
    assert server.running == 0


def test_returned_calls_are_not_run_again() -> None:
    """By itself, or by the id of the response: the prompt begins with the ids as generated."""
    for by_id in (False, True):
        host = serving()
        include = ["code_interpreter_call.outputs"]
        asked = {"input": "Where is it warm?", "tools": TOOLS[:2], "include": include}
        scripts = {"<|message|>42<|end|>": LAST}
        host.engine.scripts.update(scripts)  # type: ignore[attr-defined]
        first, _ = finally_(create(host, **asked))
        again = {"role": "user", "content": "Say hello."}
        history = [{"role": "user", "content": "Where is it warm?"}]
        output = [each.model_dump(exclude_none=True) for each in first.output]
        more = (
            {"input": [again], "previous_response_id": first.id}
            if by_id
            else {"input": [*history, *output, again]}
        )
        second, _ = finally_(create(host, **{**asked, **more}))
        assert outline(second) == [("reasoning", "Done."), ("message", "It is warm.")]
        prompts = host.engine.prompts  # type: ignore[attr-defined]
        start = len(prompts[0])
        left = FIRST.partition(OPENING)[2] + RESULTS[0] + OPENING
        left += SECOND.partition(OPENING)[2] + RESULTS[1] + OPENING
        left += "<|channel|>final<|message|>It is warm.<|end|>"
        expected = ids(left + "<|start|>user<|message|>Say hello.<|end|>" + OPENING)
        assert prompts[-1][start:] == expected


def test_a_call_of_the_clients_within_the_loop() -> None:
    host = serving(scripts={"Rome: 20 °C": CALLED.format("functions.mine", "{}")})
    tools = [*TOOLS, MINE]
    first, _ = finally_(create(host, input="Ask it, then me.", tools=tools))
    assert [each[0] for each in outline(first)][1:] == ["reasoning", "mcp_call", "function_call"]
    result = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,
        "output": "this is mine",
    }
    second, _ = finally_(create(host, input=[result], previous_response_id=first.id, tools=tools))
    assert outline(second) == [("reasoning", "Done."), ("message", "It is warm.")]
    _, two, three = host.engine.prompts  # type: ignore[attr-defined]
    whole = list(two) + ids_list(CALLED.format("functions.mine", "{}"))
    assert list(three[: len(whole)]) == whole


def text_of(prompt: Sequence[int]) -> str:
    return vocab.encoding().decode(list(prompt))


def ids_list(text: str) -> list[int]:
    return list(ids(text))


@pytest.mark.parametrize("approve", [True, False])
@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_approval(approve: bool, by_id: bool, stream: bool) -> None:
    server = weather()
    host = serving(server, scripts={"Rome: 20 °C": LAST})
    tools = [{"type": "mcp", "server_label": "weather"}]  # OpenAI's default is to ask
    first, _ = finally_(create(host, stream, input="Where is it warm?", tools=tools))
    assert [each[0] for each in outline(first)] == [
        "mcp_list_tools",
        "reasoning",
        "mcp_approval_request",
    ]
    request = first.output[-1]
    assert (request.name, request.server_label) == ("now", "weather")
    assert (json.loads(request.arguments), server.called) == ({"city": "Rome"}, [])
    answer = {
        "type": "mcp_approval_response",
        "approval_request_id": request.id,
        "approve": approve,
        "reason": "too warm",
    }
    history: list[Any] = [{"role": "user", "content": "Where is it warm?"}]
    history += [each.model_dump(exclude_none=True) for each in first.output]
    more: dict[str, Any] = {"input": [*history, answer]}
    if by_id:
        more = {"input": [answer], "previous_response_id": first.id}
    second, _ = finally_(create(host, stream, tools=tools, **more))
    called = [each for each in second.output if each.type == "mcp_call"]
    if approve:
        assert server.called == [("now", {"city": "Rome"})]
        assert [(each.output, each.approval_request_id) for each in called] == [
            ("Rome: 20 °C", request.id)
        ]
    else:
        assert server.called == [] and called == []
    assert outline(second)[-1] == ("message", "It is warm.")


def asks(key: str, city: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city})
    call = {"server_label": "weather", "name": "now", "arguments": arguments}
    return {"type": "mcp_approval_request", "id": f"mcpr_{key}", **call}


def answers(key: str, approve: bool) -> dict[str, Any]:
    request = {"approval_request_id": f"mcpr_{key}", "approve": approve}
    return {"type": "mcp_approval_response", **request}


ASKED = {"role": "user", "content": "Where is it warm?"}
MORE = {"role": "user", "content": "In Celsius."}
IN_CELSIUS = "<|start|>user<|message|>In Celsius.<|end|>"
ANSWERS = "<|start|>weather.now to=assistant<|channel|>commentary<|message|>"
APPROVALS: dict[str, tuple[list[dict[str, Any]], list[str], str]] = {
    # items; the cities that are asked about; what stands at the end of the prompt
    "a user's message behind it": (
        [asks("a", "Rome"), answers("a", True), MORE],
        ["Rome"],
        f"{ANSWERS}Rome: 20 °C<|end|>{IN_CELSIUS}",
    ),
    "a user's message before it": (
        [asks("a", "Rome"), MORE, answers("a", True)],
        ["Rome"],
        f"{ANSWERS}Rome: 20 °C<|end|>{IN_CELSIUS}",
    ),
    "two": (
        [asks("a", "Rome"), asks("b", "Oslo"), answers("b", True), answers("a", True)],
        ["Rome", "Oslo"],
        f"{ANSWERS}Oslo: 20 °C<|end|>",
    ),
    "two, one after the other": (
        [asks("a", "Rome"), answers("a", True), asks("b", "Oslo"), answers("b", True), MORE],
        ["Rome", "Oslo"],
        f"{ANSWERS}Oslo: 20 °C<|end|>{IN_CELSIUS}",
    ),
    "the first of two": (
        [asks("a", "Rome"), asks("b", "Oslo"), answers("a", True), answers("b", False)],
        ["Rome"],
        f"{ANSWERS}The user did not approve this call<|end|>",
    ),
    "the second of two": (
        [asks("a", "Rome"), asks("b", "Oslo"), answers("a", False), answers("b", True)],
        ["Oslo"],
        f"{ANSWERS}Oslo: 20 °C<|end|>",
    ),
    "none of two": (
        [asks("a", "Rome"), asks("b", "Oslo"), answers("a", False), answers("b", False), MORE],
        [],
        f"{ANSWERS}The user did not approve this call<|end|>{IN_CELSIUS}",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("items", "cities", "end"), APPROVALS.values(), ids=APPROVALS)
def test_approvals_anywhere(
    items: list[dict[str, Any]], cities: list[str], end: str, stream: bool
) -> None:
    server = weather()
    tools = [{"type": "mcp", "server_label": "weather"}]
    host = serving(server, scripts={"In Celsius.": LAST, "Oslo: 20 °C": LAST})
    answer, events = finally_(create(host, stream, tools=tools, input=[ASKED, *items]))
    assert [arguments["city"] for _, arguments in server.called] == cities
    called = [each for each in answer.output if each.type == "mcp_call"]
    assert [each.output for each in called] == [f"{city}: 20 °C" for city in cities]
    keys = {"Rome": "mcpr_a", "Oslo": "mcpr_b"}
    assert [each.approval_request_id for each in called] == [keys[city] for city in cities]
    ran = [each.item for each in events if each.type == "response.output_item.done"]
    assert [each for each in ran if each.type == "mcp_call"] == (called if stream else [])
    assert len({each.id for each in answer.output}) == len(answer.output)
    assert outline(answer)[-1] == ("message", "It is warm.")
    (prompt,) = host.engine.prompts  # type: ignore[attr-defined]
    assert text_of(prompt).endswith(end + OPENING)
    assert "did not finish" not in text_of(prompt)
    details = answer.usage.output_tokens_details
    assert bool(getattr(details, "tool_output_tokens", 0)) == bool(cities)
    # The next turn begins with all of it, and runs nothing again.
    again: Any = {"input": [MORE], "previous_response_id": answer.id}
    finally_(create(host, stream, tools=tools, **again))
    echo = [each.model_dump(exclude_none=True) for each in answer.output]
    finally_(create(host, stream, tools=tools, input=[ASKED, *items, *echo, MORE]))
    assert len(server.called) == len(cities)
    _, by_id, by_echo = host.engine.prompts  # type: ignore[attr-defined]
    assert by_id[: len(prompt)] == by_echo[: len(prompt)] == prompt


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ends", [[], [{"role": "user", "content": "In Celsius."}]])
def test_approvals_beyond_the_limit_are_answered_together(ends: list[Any], stream: bool) -> None:
    """Thousands of them took minutes: the prompt was rendered again for each."""
    server, rendered = weather(), 0
    host = serving(server, scripts={"In Celsius.": LAST}, max_tool_calls=2)

    def renderer(turn: Turn, *args: Any, **keywords: Any) -> Rendered:
        nonlocal rendered
        rendered += 1
        return render(turn, *args, **keywords)

    host.renderer = renderer
    kinds = ("mcp_approval_request", "mcp_approval_response")
    call = {"server_label": "weather", "name": "now", "arguments": '{"city": "Rome"}'}
    asked, approved = (
        [{"type": kind, **fields, key: f"mcpr_{n:03}"} for n in range(50)]
        for kind, key, fields in zip(
            kinds, ("id", "approval_request_id"), (call, {"approve": True}), strict=True
        )
    )
    tools = [{"type": "mcp", "server_label": "weather"}]
    items = [{"role": "user", "content": "Weather?"}, *asked, *approved, *ends]
    answer, _ = finally_(create(host, stream, tools=tools, input=items))
    calls = [each for each in answer.output if each.type == "mcp_call"]
    assert [each.approval_request_id for each in calls] == [each["id"] for each in asked]
    assert [each.status for each in calls] == ["completed"] * 2 + ["failed"] * 48
    assert len(server.called) == 2
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
    host = serving(server, scripts={"did not finish": LAST})
    tools = [{"type": "mcp", "server_label": "weather", "require_approval": rule}]
    first, _ = finally_(create(host, input="Where is it warm?", tools=tools))
    request = first.output[-1].model_dump(exclude_none=True)
    assert request["type"] == "mcp_approval_request"
    items = [
        request if each == "request" else {"type": "mcp_approval_response", **each}
        for each in sent or ()
    ]
    more: dict[str, Any] = {"input": [{"role": "user", "content": "Where is it warm?"}]}
    more["input"] += [each.model_dump(exclude_none=True) for each in first.output]
    more["input"] += [each for each in items if each is not request]
    if by_id:
        given = {} if sent is None else {"input": items}
        more = {"previous_response_id": first.id, **given}
    second, _ = finally_(create(host, tools=tools, **more))
    assert server.called == []
    assert outline(second)[-1] == ("message", "It is warm.")


def test_cut_call_is_not_run_by_the_next_request() -> None:
    server = weather()
    host = serving(server, scripts={"did not finish": LAST})
    tools = [{"type": "mcp", "server_label": "weather"}]
    most = len(ids(FIRST)) - 1
    first, _ = finally_(
        create(host, input="Where is it warm?", tools=tools, max_output_tokens=most)
    )
    assert first.status == "incomplete"
    second, _ = finally_(create(host, input=[], previous_response_id=first.id, tools=tools))
    assert server.called == []
    assert outline(second)[-1] == ("message", "It is warm.")


def test_filters() -> None:
    for asked, shown in (
        ({"allowed_tools": ["now", "sleep"]}, ["now", "sleep"]),
        ({"allowed_tools": {"read_only": True}}, ["now"]),
        ({"allowed_tools": {"tool_names": ["dies"]}}, ["dies"]),
    ):
        host = serving()
        tool = {**TOOLS[0], **asked}
        response, _ = finally_(create(host, input="Say hello.", tools=[tool]))
        assert outline(response)[0] == ("mcp_list_tools", shown, None)


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
def test_invalid_request_is_refused(request_: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        finally_(create(serving(), input="Say hello.", **request_))
    assert refused.value.param == param


def test_failed_server_has_no_tools() -> None:
    away = Local("weather", {}, problem="it does not answer")
    response, events = finally_(create(serving(away), True, input="Say hello.", tools=TOOLS[:1]))
    assert outline(response)[0] == ("mcp_list_tools", [], "it does not answer")
    assert "response.mcp_list_tools.failed" in [each.type for each in events]


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_calls_than_may_be(most: int) -> None:
    host = serving()
    response, _ = finally_(create(host, input="Where is it warm?", max_tool_calls=most))
    kinds = [each.type for each in response.output if each.type.endswith("_call")]
    ran = [each.status for each in response.output if each.type.endswith("_call")]
    assert ran == ["completed"] * most + ["failed"]
    assert kinds == ["mcp_call", "code_interpreter_call", "web_search_call"][: most + 1]
    assert outline(response)[-1] == ("message", "It is warm.")


def test_calls_are_limited() -> None:
    call = CALLED.format("weather.now", '{"city": "Rome"}')
    host = serving(scripts={"Rome: 20 °C": call, "no more tools can be called": call})
    response, _ = finally_(create(host, input="Where is it warm?", max_tool_calls=2))
    ran = [each.status for each in response.output if each.type == "mcp_call"]
    assert ran == ["completed"] * 2 + ["failed"] * 3 + ["incomplete"]


def test_the_budget_of_tokens_is_the_whole_loops() -> None:
    for most in (len(ids(FIRST)), len(ids(FIRST)) + 5):
        host = serving()
        response, _ = finally_(create(host, input="Where is it warm?", max_output_tokens=most))
        assert response.status == "incomplete"
        assert response.usage.output_tokens == most


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_client_disconnect_cancels_the_tool(stream: bool) -> None:
    server = weather()
    host = serving(server)

    async def going() -> None:
        asked = asyncio.ensure_future(create(host, stream, input="Sleep.", tools=TOOLS[:1]))
        while not server.running:
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait({asked})
        while server.running or host.lent:  # in the loop, whose end would cancel it, too
            await asyncio.sleep(0.01)

    finally_(going())
    assert server.cancelled == 1


def test_the_engine_is_free_while_a_tool_runs() -> None:
    server = weather()
    host = serving(server)

    async def both() -> Any:
        sleeping = asyncio.ensure_future(create(host, input="Sleep.", tools=TOOLS[:1]))
        while not server.running:
            await asyncio.sleep(0.01)
        answered, _ = await create(host, input="Say hello.", tools=[])
        assert server.running == 1
        sleeping.cancel()
        await asyncio.wait({sleeping})
        return answered

    assert outline(finally_(both()))[-1] == ("message", "It is warm.")


def test_fifty_at_once() -> None:
    host = serving(max_concurrent_calls=3)

    async def many() -> Sequence[Any]:
        asked = [create(host, at % 2 == 0, input="Where is it warm?") for at in range(50)]
        return await asyncio.gather(*asked)

    found = finally_(many())
    assert {str(outline(response)) for response, _ in found} == {
        str([*LOOP[:4], ("code_interpreter_call", "6 * 7", None, "completed"), *LOOP[5:]])
    }
    assert (host.lent, host.engine.running) == (0, 0)  # type: ignore[attr-defined]


def test_the_grammar_has_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, "auto")
    grammars: list[Any] = []
    host = serving()
    generate = host.engine.generate

    def noted(request: GenerationRequest) -> Any:
        assert request.constraint is not None and request.constraint.spec.grammar is not None
        grammars.append(request.constraint.spec.grammar.grammar.text)
        return generate(request)

    host.engine.generate = noted  # type: ignore[method-assign]
    choice = {"type": "mcp", "server_label": "weather", "name": "now"}
    response, _ = finally_(
        create(host, input="Where is it warm?", tool_choice=choice, max_tool_calls=2)
    )
    required, free, *_, exhausted = grammars
    assert '"weather.now"' in required and "answer:" not in required
    assert '"weather.now"' in free and "answer:" in free
    assert "weather.now" not in exhausted and "answer:" in exhausted
    assert outline(response)[-1] == ("message", "It is warm.")


def test_off_they_are_left_out_and_named() -> None:
    host = Alone(ScriptedEngine(SCRIPTS))
    response, _ = finally_(create(host, input="Say hello.", tools=[*TOOLS, MINE]))
    assert outline(response) == [("reasoning", "Done."), ("message", "It is warm.")]
    names = ["weather", "code_interpreter", "web_search"]
    assert response.model_extra["unavailable_tools"] == names


def test_off_they_fail_without_the_model() -> None:
    host = Alone(ScriptedEngine(SCRIPTS))
    response, _ = finally_(create(host, input="Say hello."))
    assert [each[0] for each in outline(response)] == [
        *("mcp_list_tools", "code_interpreter_call", "web_search_call", "message")
    ]
    assert host.engine.prompts == []


def test_background_and_its_events_again() -> None:
    host = serving()

    async def later() -> Any:
        api = client(host)
        begun = await api.responses.create(
            model=MODEL,
            tools=TOOLS,
            input="Where is it warm?",
            background=True,  # type: ignore[arg-type]
        )
        for _ in range(500):
            found = await api.responses.retrieve(begun.id)
            if found.status == "completed":
                return found
            await asyncio.sleep(0.01)
        raise AssertionError("it does not end")

    assert [each[0] for each in outline(finally_(later()))] == [each[0] for each in LOOP]
