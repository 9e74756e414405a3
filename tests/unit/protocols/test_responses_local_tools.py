"""Responses: tools that OpenAI defines. The client runs them, or nobody does (A13)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from ciphers import Tagged
from event_checker import check
from harmony_text import ids_of
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.render import answer_ids, render
from vllm_mlx_harmony.core.replay import Replay
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    Defaults,
    Namespace,
    ResponseInfo,
    Result,
    Tool,
    ToolChoice,
    User,
)
from vllm_mlx_harmony.core.vocab import encoding
from vllm_mlx_harmony.protocols.responses import ResponsesRequest, read
from vllm_mlx_harmony.protocols.responses.local_tools import LOCAL_TOOLS
from vllm_mlx_harmony.protocols.responses.schema import ITEMS, SEARCH, TOOLS
from vllm_mlx_harmony.protocols.responses.server_tools import HOSTED_TOOLS
from vllm_mlx_harmony.protocols.unavailable import notice

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")
HELLO = {"role": "user", "content": "Hello"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": None}
COMPUTER = {"display_width": 1024, "display_height": 768, "environment": "linux"}
DEFAULTS = Defaults(date="2025-08-05")
FINAL = "<|channel|>final<|message|>Hi.<|return|>"


def read_request(*tools: Any, defaults: Defaults = DEFAULTS, **fields: Any) -> ResponsesRequest:
    body = {"model": "m", "input": "Hello", "tools": [*tools], **fields}
    return read(json.loads(json.dumps(body)), defaults, Tagged())


def generate(
    request: ResponsesRequest, output: str, replay: Replay | None = None, end: Any = "stop"
) -> tuple[list[int], dict[str, Any], StreamingHarmonyContext]:
    """The ids of prompt and output, the response, and the context."""
    turns = None if replay is None else replay.view("m")
    context = StreamingHarmonyContext(request.turn, INFO, lambda turn: render(turn, turns))
    emitter = request.emitter(INFO)
    deltas = [
        *context.start(),
        *(delta for token in ids_of(output) for delta in context.append_output([token])),
        *context.finish(end),
    ]
    events = [event for delta in deltas for event in emitter.feed(delta)]
    if request.stream:
        assert check(events) == emitter.result()
        validate_events(events)
    for turn_output in context.outputs if turns is not None else ():
        messages = tuple(map(request.as_sent_back, turn_output.messages))
        turns.remember(type(turn_output)(turn_output.before, messages, *_rest(turn_output)))  # type: ignore[union-attr]
    return list(context.render_for_completion()), emitter.result(), context


def _rest(output: Any) -> tuple[Any, ...]:
    return output.ids, output.begins, output.ended


def validate_events(events: Any) -> None:
    """Each event, and the whole response, as strict models of the official client."""
    types = pytest.importorskip("openai.types.responses")
    from pydantic import TypeAdapter

    adapter: Any = TypeAdapter(types.ResponseStreamEvent)
    for event in events[:-1]:
        adapter.validate_python(json.loads(event.data), strict=True)
    types.Response.model_validate(json.loads(events[-2].data)["response"], strict=True)


def types_of(union: Any) -> Iterator[str]:
    for member in get_args(union):
        hint = get_type_hints(member)["type"]
        yield from (value for value in get_args(hint) if isinstance(value, str))


def test_every_type_of_official_client_is_known() -> None:
    module = pytest.importorskip("openai.types.responses.tool_param")
    listed = {*types_of(module.ToolParam)}
    assert {"function", "shell", "mcp"} <= listed
    assert listed <= {*TOOLS, *HOSTED_TOOLS, SEARCH}


def test_every_call_and_result_of_official_client_is_read() -> None:
    module = pytest.importorskip("openai.types.responses.response_input_item_param")
    for tool in LOCAL_TOOLS.values():
        assert {tool.call, f"{tool.call}_output"} <= {*types_of(module.ResponseInputItemParam)}
        assert {tool.call, f"{tool.call}_output"} <= {*ITEMS}


# --- Loops.


def declare(kind: str) -> dict[str, Any]:
    return {"type": kind, **(COMPUTER if kind == "computer_use_preview" else {})}


def call_output(name: str, arguments: str) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{header}{arguments}<|call|>"


def operation(**fields: Any) -> dict[str, Any]:
    return {"operation": fields}


LOOPS: tuple[tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any], str], ...] = (
    (
        "shell",
        "shell",
        {"commands": ["ls -l", "", "echo é"], "timeout_ms": 1.0e3},
        {
            "type": "shell_call",
            "action": {
                "commands": ["ls -l", "", "echo é"],
                "timeout_ms": 1000,
                "max_output_length": None,
            },
            "environment": {"type": "local"},
        },
        {
            "output": [
                {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "b", "outcome": {"type": "exit", "exit_code": 2}},
                {"stdout": "c", "stderr": None, "outcome": {"type": "timeout"}},
            ],
            "max_output_length": None,
        },
        "a\n[exit code 0]\n\n[stderr]\nb\n[exit code 2]\n\nc\n[timed out]",
    ),
    (
        "local_shell",
        "local_shell",
        {"command": ["bash", "-lc", "ls"], "env": {"A": "b"}, "working_directory": "/x"},
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec",
                "command": ["bash", "-lc", "ls"],
                "env": {"A": "b"},
                "working_directory": "/x",
            },
        },
        {"output": '{"output":"a"}'},
        '{"output":"a"}',
    ),
    (
        "local_shell",
        "local_shell",
        {"command": ["ls"]},
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"output": ""},
        "",
    ),
    (
        "apply_patch",
        "apply_patch",
        operation(type="update_file", path="a.py", diff="@@\n-a\n+b\n"),
        {
            "type": "apply_patch_call",
            "operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b\n"},
        },
        {"status": "failed", "output": "Invalid context"},
        "failed: Invalid context",
    ),
    (
        "apply_patch",
        "apply_patch",
        operation(type="delete_file", path="a.py"),
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a.py"}},
        {"status": "completed", "output": None},
        "completed",
    ),
    (
        "computer",
        "computer",
        {"actions": [{"type": "click", "x": 1, "y": 2, "button": "left"}, {"type": "screenshot"}]},
        {
            "type": "computer_call",
            "actions": [
                {"type": "click", "x": 1, "y": 2, "button": "left"},
                {"type": "screenshot"},
            ],
            "pending_safety_checks": [],
        },
        {"output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,x"}},
        "[image left out: this model reads text only]",
    ),
    (
        "computer_use_preview",
        "computer",
        {"action": {"type": "drag", "path": [{"x": 1, "y": 2}]}},
        {
            "type": "computer_call",
            "action": {"type": "drag", "path": [{"x": 1, "y": 2}]},
            "pending_safety_checks": [],
        },
        {"output": {"type": "computer_screenshot", "image_url": "x", "file_id": None}},
        "[image left out: this model reads text only]",
    ),
)


def with_nulls(item: dict[str, Any]) -> dict[str, Any]:
    """The item as the official client sends it back: as its model, with all of its fields."""
    types = pytest.importorskip("openai.types.responses")
    from pydantic import TypeAdapter

    adapter: Any = TypeAdapter(types.ResponseOutputItem)
    dumped: dict[str, Any] = adapter.validate_python(item).model_dump()
    return dumped


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("sent_back", [dict, with_nulls])
@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize(
    ("kind", "name", "arguments", "item", "result", "text"),
    LOOPS,
    ids=[f"{row[0]} {at}" for at, row in enumerate(LOOPS)],
)
def test_call_and_result_are_read_back(
    kind: str,
    name: str,
    arguments: dict[str, Any],
    item: dict[str, Any],
    result: dict[str, Any],
    text: str,
    stream: bool,
    sent_back: Any,
    remembers: bool,
) -> None:
    tool = declare(kind)
    request = read_request(tool, stream=stream)
    assert [shown_tool.name for shown_tool in request.turn.tools] == [name]
    replay = Replay(2**20) if remembers else None
    json_text = json.dumps(arguments, indent=1)
    first, response, context = generate(
        request,
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call_output(name, json_text)}",
        replay,
    )
    call_item = response["output"][-1]
    assert call_item == {
        "id": call_item["id"], "call_id": call_item["call_id"], "status": "completed", **item,
    }  # fmt: skip
    assert call_item["id"].startswith(f"{LOCAL_TOOLS[kind].prefix}_")
    assert "unavailable_tools" not in response

    output = {"type": f"{item['type']}_output", "call_id": call_item["call_id"], **result}
    items = [HELLO, *map(sent_back, response["output"]), output]
    again = read_request(tool, input=items)
    call, answer = again.turn.messages[-2:]
    echoed = request.as_sent_back(context.messages[-1])
    assert isinstance(call, Call) and isinstance(echoed, Call)
    assert (call.id, call.name) == (echoed.id, echoed.name) == (call_item["call_id"], name)
    assert json.loads(call.arguments) == json.loads(echoed.arguments) == arguments
    assert answer == Result(call_item["call_id"], text, f"input[{len(items) - 1}]")
    turns = None if replay is None else replay.view("m")
    second = list(render(again.turn, turns).ids)
    shown = encoding().decode_utf8(second)
    result_text = f"<|message|>{text}<|end|><|start|>assistant"
    assert shown.endswith(f"functions.{name} to=assistant<|channel|>commentary{result_text}")
    if remembers:  # the ids exactly as the model generated them
        assert second[: len(first)] == first


def test_stored_conversation_continues() -> None:
    request = read_request({"type": "shell"})
    first, response, context = generate(request, call_output("shell", '{"commands":["ls"]}'))
    key = response["output"][0]["call_id"]
    result = {"type": "shell_call_output", "call_id": key, "output": [{"stdout": "a"}]}
    body = {"model": "m", "input": [result], "tools": [{"type": "shell"}]}
    again = read(body, DEFAULTS, Tagged(), request.conversation(context.messages))
    assert again.turn.messages[-1] == Result(key, "a", "input[0]")
    assert list(render(again.turn).ids)[: len(first)] == first


@pytest.mark.parametrize("kind", LOCAL_TOOLS)
def test_prompt_shows_parameters(kind: str) -> None:
    request = read_request(declare(kind), FUNCTION)
    prompt = encoding().decode_utf8(render(request.turn).ids)
    assert f"type {LOCAL_TOOLS[kind].name} = (_: {{" in prompt
    for name in LOCAL_TOOLS[kind].parameters["properties"]:
        assert f"\n{name}:" in prompt or f"\n{name}?:" in prompt


def test_screen_is_described() -> None:
    (tool,) = read_request({"type": "computer_use_preview", **COMPUTER}).turn.tools
    assert tool.description.endswith(" The screen has 1024 x 768 pixels. It runs: linux.")
    (tool,) = read_request({"type": "computer_use_preview", **dict.fromkeys(COMPUTER)}).turn.tools
    assert tool.description.endswith("of a computer.")


INVALID = (
    "",
    "ls",
    "[]",
    '{"commands": "ls"}',
    '{"commands": ["ls", 1]}',
    '{"commands": ["ls"], "timeout_ms": "soon"}',
    '{"commands": ["ls"], "timeout_ms": true}',
    '{"commands": ["ls"], "timeout_ms": 1.5}',
    '{"commands": ["ls"], "workdir": "/"}',
    '{"commands": ["ls"]',
    '{"commands": ["ls"], "timeout_ms": 1e999}',
)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", INVALID)
def test_invalid_arguments_reach_client_unchanged(text: str, stream: bool) -> None:
    shell = {"type": "shell", "environment": {"type": "local"}}
    request = read_request(shell, stream=stream)
    first, response, context = generate(request, call_output("shell", text))
    (item,) = response["output"]
    arguments = text or "{}"  # semantics B
    assert item.items() >= {"type": "function_call", "name": "shell", "status": "completed"}.items()
    assert item["arguments"] == arguments
    refusal = {"type": "function_call_output", "call_id": item["call_id"], "output": "no"}
    again = read_request(shell, input=[HELLO, item, refusal])
    assert again.turn.messages[-2] == request.as_sent_back(context.messages[-1])
    assert list(render(again.turn).ids)[: len(first)] == first or not text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", LOCAL_TOOLS)
def test_cut_call_is_incomplete(kind: str, stream: bool) -> None:
    request = read_request(declare(kind), stream=stream)
    for text in ('{"commands": ["ls"', '{"commands": ["ls"]}', ""):
        cut = call_output(LOCAL_TOOLS[kind].name, text).removesuffix("<|call|>")
        _, response, _ = generate(request, cut, end="length")
        assert response["status"] == "incomplete"
        for item in response["output"]:
            assert (item["type"], item["status"]) == ("function_call", "incomplete")
            assert item["arguments"] == text


@given(
    st.text()
    | st.from_regex(r'\{"(commands|operation|actions?)": ?[\[\{"tn\d].*\}', fullmatch=True)
)
def test_any_arguments_make_valid_item_or_none(arguments: str) -> None:
    for tool in LOCAL_TOOLS.values():
        item = tool.item(arguments)
        if item is not None:
            json.dumps(item, allow_nan=False).encode()
            again = tool.arguments(item)
            assert again is not None
            assert tool.item(again) == item


def test_function_may_have_name_of_local_tool() -> None:
    function = {**FUNCTION, "name": "shell"}
    request = read_request({"type": "shell"}, function)
    assert [tool.name for tool in request.turn.tools] == ["shell_2", "shell"]
    kinds = {"shell": "function_call", "shell_2": "shell_call"}
    for name, kind in kinds.items():
        _, response, context = generate(request, call_output(name, '{"commands":["ls"]}'))
        (item,) = response["output"]
        assert item["type"] == kind
        items = [HELLO, item]
        again = read_request({"type": "shell"}, function, input=items).turn.messages[-1]
        assert again == request.as_sent_back(context.messages[-1])
        assert isinstance(again, Call) and again.name == name
    _, response, _ = generate(request, call_output("shell_2", "no JSON"))
    assert response["output"][0]["name"] == "shell_2"
    with pytest.raises(RequestError, match="duplicate tool name 'shell'"):
        read_request({"type": "shell"}, {"type": "shell"})


CHOICES: tuple[tuple[list[Any], Any, ToolChoice], ...] = (
    ([{"type": "shell"}, FUNCTION], {"type": "shell"}, ToolChoice(True, ("shell",))),
    ([{"type": "local_shell"}], "required", ToolChoice(True)),
    ([{"type": "apply_patch"}], {"type": "apply_patch"}, ToolChoice(True, ("apply_patch",))),
    ([{"type": "computer"}], {"type": "computer_use"}, ToolChoice(True, ("computer",))),
    (
        [{"type": "computer_use_preview"}],
        {"type": "computer_use_preview"},
        ToolChoice(True, ("computer",)),
    ),
    (
        [{"type": "shell"}, FUNCTION],
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "shell"}]},
        ToolChoice(False, ("shell",)),
    ),
)


@pytest.mark.parametrize(("tools", "choice", "expected"), CHOICES)
def test_local_tool_can_be_chosen(tools: list[Any], choice: Any, expected: ToolChoice) -> None:
    assert read_request(*tools, tool_choice=choice).turn.tool_choice == expected


def test_choice_of_undeclared_tool_is_rejected() -> None:
    with pytest.raises(RequestError, match="'shell' is not among the tools") as caught:
        read_request(FUNCTION, tool_choice={"type": "shell"})
    assert caught.value.param == "tool_choice"


# --- History.


def history(*items: Any, defaults: Defaults = DEFAULTS) -> tuple[Any, ...]:
    return read_request(input=[HELLO, *items], defaults=defaults).turn.messages[1:]


def test_codex_answers_local_shell_call_as_function() -> None:
    action = {"type": "exec", "command": ["ls"], "timeout_ms": None, "working_directory": "/x",
              "env": None, "user": None}  # fmt: skip
    call = {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": action}
    answer = {"type": "function_call_output", "call_id": "c", "output": "a"}
    assert history(call, answer) == (
        Call("c", "local_shell", '{"command":["ls"],"working_directory":"/x"}'),
        Result("c", "a", "input[2]"),
    )


@pytest.mark.parametrize("key", ["c", "lsh_1"])
def test_local_shell_output_has_only_an_id(key: str) -> None:
    call = {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "c",
        "action": {"command": ["ls"]},
    }
    answer = {"type": "local_shell_call_output", "id": key, "output": "a"}
    assert history(call, answer)[-1] == Result("c", "a", "input[2]")


def test_message_between_agents_is_read() -> None:
    """Codex's `agent_message`: https://github.com/openai/codex (codex-rs/protocol)."""
    parts = [{"type": "input_text", "text": "Done."},
             {"type": "encrypted_content", "encrypted_content": "x"}]  # fmt: skip
    sent = {"type": "agent_message", "author": "/root/a", "recipient": "/root", "content": parts}
    (message,) = history(sent)
    assert message == User(
        "Message from /root/a to /root:\nDone.\n"
        "[part of type 'encrypted_content' left out: this model reads text only]"
    )


PROBLEMS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"type": "shell_call", "call_id": "c", "action": None}, "input[1].action"),
    ({"type": "shell_call", "action": {"commands": []}}, "input[1].call_id"),
    ({"type": "apply_patch_call", "call_id": "c", "operation": []}, "input[1].operation"),
    ({"type": "computer_call", "call_id": "c"}, "input[1].actions"),
    ({"type": "shell_call_output", "output": []}, "input[1].call_id"),
    ({"type": "shell_call_output", "call_id": "c", "output": 5}, "input[1].output"),
    ({"type": "agent_message", "content": 5}, "input[1].content"),
)


@pytest.mark.parametrize(("item", "param"), PROBLEMS)
def test_unreadable_item_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        history(item)
    assert caught.value.param == param


def test_result_without_call_is_named() -> None:
    answer = {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}
    with pytest.raises(RequestError) as caught:
        render(read_request(input=[HELLO, answer]).turn)
    assert caught.value.param == "input[1]"


def test_screenshot_can_be_refused() -> None:
    call = {"type": "computer_call", "call_id": "c", "actions": []}
    shot = {"type": "computer_call_output", "call_id": "c",
            "output": {"type": "computer_screenshot", "image_url": "x"}}  # fmt: skip
    with pytest.raises(RequestError) as caught:
        history(call, shot, defaults=Defaults(attachments=Attachments.REFUSE))
    assert caught.value.param == "input[2].output[0]"


def test_input_is_listed() -> None:
    """As the official client reads it: `test_input_items_are_read_by_client`."""
    types = pytest.importorskip("openai.types.responses")
    call = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}, "status": None}
    answer = {"type": "shell_call_output", "call_id": "c", "output": []}
    listed = read_request(input=[HELLO, call, answer]).input_items(INFO)
    assert [item["id"][:3] for item in listed] == ["msg", "sh_", "sho"]
    types.ResponseItemList.model_validate(
        {"object": "list", "data": listed, "first_id": "a", "last_id": "b", "has_more": False}
    )


# --- Tools that nobody runs.


def test_unavailable_tools_are_in_prompt_and_answer() -> None:
    container = {"type": "shell", "environment": {"type": "container_auto"}}
    request = read_request(
        FUNCTION, {"type": "web_search"}, {"type": "web_search_preview"}, container
    )
    assert request.turn.messages == (notice(["web_search", "shell"]), User("Hello"))
    assert [tool.name for tool in request.turn.tools] == ["f"]
    assert request.turn.fixed_answer == ""
    _, response, _ = generate(request, FINAL)
    assert response["unavailable_tools"] == ["web_search", "shell"]
    assert [item["type"] for item in response["output"]] == ["message"]
    assert "unavailable_tools" not in generate(read_request(FUNCTION), FINAL)[1]


def generate_refusal(request: ResponsesRequest) -> dict[str, Any]:
    assert request.turn.fixed_answer
    text = encoding().decode(list(answer_ids(request.turn.fixed_answer)))
    return generate(request, text)[1]


UNAVAILABLE: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "web search": ({"type": "web_search"}, "web_search", "web_search_call"),
    "an old web search": (
        {"type": "web_search_preview_2025_03_11"}, "web_search", "web_search_call",
    ),
    "files": ({"type": "file_search", "vector_store_ids": []}, "file_search", "file_search_call"),
    "code": (
        {"type": "code_interpreter", "container": {"type": "auto"}},
        "code_interpreter",
        "code_interpreter_call",
    ),
    "images": ({"type": "image_generation"}, "image_generation", "image_generation_call"),
    "programs": ({"type": "programmatic_tool_calling"}, "programmatic_tool_calling", None),
    "a hosted shell": (
        {"type": "shell", "environment": {"type": "container_reference", "container_id": "c"}},
        "shell",
        None,
    ),
    "an MCP server": (
        {"type": "mcp", "server_label": "wiki", "server_url": "https://x"},
        "wiki",
        "mcp_list_tools",
    ),
    "a connector": (
        {"type": "mcp", "server_label": "drive", "connector_id": "connector_googledrive"},
        "drive",
        "mcp_list_tools",
    ),
    "a type from the future": ({"type": "holodeck"}, "holodeck", None),
}  # fmt: skip


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("tool", "name", "item"), UNAVAILABLE.values(), ids=UNAVAILABLE)
def test_every_unavailable_tool_is_named(
    tool: dict[str, Any], name: str, item: str | None, stream: bool
) -> None:
    request = read_request(FUNCTION, tool)
    assert generate(request, FINAL)[1]["unavailable_tools"] == [name]
    assert (
        "unavailable_tools"
        not in generate(read_request(FUNCTION, tool, tool_choice="none"), FINAL)[1]
    )
    stream = stream and name != "holodeck"  # the official client cannot know it
    required = {"type": "allowed_tools", "mode": "required", "tools": [tool]}
    for choice in (None, "auto", "required", required):
        request = read_request(tool, tool_choice=choice, stream=stream)
        assert request.turn.tool_choice == ToolChoice()
        response = generate_refusal(request)
        kinds = [
            (output_item["type"], output_item.get("status")) for output_item in response["output"]
        ]
        failed = [(item, None if item == "mcp_list_tools" else "failed")] if item else []
        assert kinds == [*failed, ("message", "completed")]
        (part,) = response["output"][-1]["content"]
        assert part["text"] == request.turn.fixed_answer
        assert part["text"].startswith(f"Not available on this server: {name}. No search took")
        assert (response["status"], response["unavailable_tools"]) == ("completed", [name])


def test_required_search_beside_other_tools_fails() -> None:
    tools = (FUNCTION, {"type": "web_search"}, {"type": "image_generation"})
    for kind in ("web_search", "web_search_preview"):
        response = generate_refusal(read_request(*tools, tool_choice={"type": kind}))
        assert [item["type"] for item in response["output"]] == ["web_search_call", "message"]
        assert response["unavailable_tools"] == ["web_search", "image_generation"]
    wiki = {"type": "mcp", "server_label": "wiki"}
    response = generate_refusal(read_request(FUNCTION, wiki, tool_choice={**wiki, "name": None}))
    assert response["unavailable_tools"] == ["wiki"]
    assert response["output"][0]["error"] == "this server runs no tools"


@pytest.mark.parametrize("label", ["auto", "function", "required", "allowed_tools"])
def test_server_may_have_name_of_choice_rule(label: str) -> None:
    server = {"type": "mcp", "server_label": label}
    for choice in ("auto", "required", {"type": "function", "name": "f"}):
        assert read_request(FUNCTION, server, tool_choice=choice).turn.fixed_answer == ""


def test_required_shell_in_container_fails() -> None:
    container = {"type": "shell", "environment": {"type": "container_auto"}}
    response = generate_refusal(read_request(FUNCTION, container, tool_choice={"type": "shell"}))
    assert [item["type"] for item in response["output"]] == ["message"]


def test_conversation_continues_after_refusal() -> None:
    search = {"type": "web_search"}
    first = read_request(search)
    response = generate_refusal(first)
    items = [HELLO, *response["output"], {"role": "user", "content": "From memory, then."}]
    request = read_request(search, input=items)
    assert request.turn.fixed_answer == ""
    assert Answer(first.turn.fixed_answer) in request.turn.messages
    assert request.turn.messages[0] == notice(["web_search"])
    stored = (User("Hello"), Answer(first.turn.fixed_answer))
    body = {"model": "m", "input": "And?", "tools": [search]}
    assert read(body, DEFAULTS, Tagged(), stored).turn.fixed_answer == ""


def test_compaction_is_not_refused() -> None:
    items = [HELLO, {"type": "compaction_trigger"}]
    assert read_request({"type": "web_search"}, input=items).turn.fixed_answer == ""
    assert read_request({"type": "web_search"}).compaction().turn.fixed_answer == ""


def test_server_tools_are_available() -> None:
    page = Tool("search", "", {"type": "object", "properties": {}})
    browser = Namespace("browser", (page,), label="browser")
    code = {"type": "code_interpreter", "container": {"type": "auto"}}
    defaults = Defaults(namespaces=(browser,))
    request = read_request({"type": "web_search"}, code, defaults=defaults)
    assert request.turn.fixed_answer == ""
    assert generate(request, FINAL)[1]["unavailable_tools"] == ["code_interpreter"]


def test_unavailable_tool_added_later_is_named_there() -> None:
    added = {"type": "additional_tools", "role": "developer",
             "tools": [{"type": "shell"}, {"type": "image_generation"}]}  # fmt: skip
    user, tools, line = read_request(FUNCTION, input=[HELLO, added]).turn.messages
    assert [tool.name for tool in tools.tools] == ["shell"]  # type: ignore[union-attr]
    assert (user, line) == (User("Hello"), notice(["image_generation"]))


# --- What the model may write.


def accepts(request: ResponsesRequest, output: str) -> bool:
    """Whether the grammar of the turn accepts ``output``."""
    pytest.importorskip("llguidance")
    from vllm_mlx_harmony.core.grammar import compile_grammar, grammar_of
    from vllm_mlx_harmony.core.names import Names

    grammar = grammar_of(request.turn, Names.of(request.turn))
    assert grammar is not None
    assert grammar.notes == ()
    matcher = compile_grammar(grammar).matcher()
    return all(map(matcher.consume, ids_of(output)))


@pytest.mark.parametrize("kind", LOCAL_TOOLS)
def test_grammar_accepts_every_valid_call(kind: str) -> None:
    """With a function beside the tool, so that one grammar cannot stand for the other."""
    request = read_request(declare(kind), FUNCTION)
    name = LOCAL_TOOLS[kind].name
    for row in LOOPS:
        text = json.dumps(row[2], indent=1)
        fits = LOCAL_TOOLS[kind].item(text) is not None
        assert accepts(request, call_output(name, text)) == fits
        assert fits or row[0] != kind


@pytest.mark.parametrize("text", [text for text in INVALID if "1e999" not in text and text])
def test_grammar_rejects_every_invalid_call(text: str) -> None:
    assert not accepts(read_request({"type": "shell"}), call_output("shell", text))
