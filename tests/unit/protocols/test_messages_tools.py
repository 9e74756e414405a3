"""The Messages API: tools that Anthropic defines. The client runs them, or nobody does (A13)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from anthropic_checker import check_stream
from ciphers import Tagged
from harmony_text import ids_of

from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.render import answer_ids, render
from vllm_mlx_harmony.core.turn import (
    Answer,
    Defaults,
    Instructions,
    Namespace,
    ResponseInfo,
    Tool,
    ToolChoice,
    User,
)
from vllm_mlx_harmony.core.vocab import encoding
from vllm_mlx_harmony.protocols.messages import MessagesRequest, read
from vllm_mlx_harmony.protocols.messages.schema import CUSTOM, TOOL_SEARCH, TOOLSET
from vllm_mlx_harmony.protocols.messages.tool_types import (
    CLIENT_TOOLS,
    CLIENT_TOOLSETS,
    SERVER_TOOLS,
)
from vllm_mlx_harmony.protocols.parameters import fits
from vllm_mlx_harmony.protocols.unavailable import notice

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
FUNCTION = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
HELLO = [{"role": "user", "content": "Hello"}]
PINNED = {"type": "tool", "name": "web_search"}
REFUSAL = (
    "Not available on this server: web_search. "
    "No search took place, nothing was fetched, and nothing was run."
)


def read_request(*tools: Any, **fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 99, "messages": HELLO, "tools": [*tools], **fields}
    return read(json.loads(json.dumps(body)), Defaults(date="2025-08-05"), Tagged())


def types_of(union: Any) -> Iterator[str]:
    """The values of the field ``type`` in a union of the official client's typed dicts."""
    for member in get_args(union):
        hint = get_type_hints(member).get("type")
        assert hint is not None, member
        yield from (value for value in get_args(hint) if isinstance(value, str))


def test_every_type_of_official_client_is_known() -> None:
    types = pytest.importorskip("anthropic.types")
    beta = pytest.importorskip("anthropic.types.beta")
    known_types = {*CLIENT_TOOLS, *CLIENT_TOOLSETS, *SERVER_TOOLS, CUSTOM, TOOLSET}
    for union in (types.ToolUnionParam, beta.BetaToolUnionParam):
        listed = {kind for kind in types_of(union) if not kind.startswith(TOOL_SEARCH)}
        assert listed
        assert listed <= known_types


# --- Tools that the client runs.


@pytest.mark.parametrize("kind", CLIENT_TOOLS)
@pytest.mark.parametrize("null", [None, "absent"])
def test_client_tool_is_shown_as_function(kind: str, null: object) -> None:
    declared = {"type": kind, "name": CLIENT_TOOLS[kind].name}
    if null is None:
        declared |= dict.fromkeys(
            ("cache_control", "strict", "defer_loading", "display_number", "max_characters"), None
        )
    request = read_request(declared, {**FUNCTION})
    assert request.unavailable.tools == ()
    assert [tool.name for tool in request.turn.tools] == [CLIENT_TOOLS[kind].name, "f"]
    prompt = encoding().decode_utf8(render(request.turn).ids)
    for name in request.turn.tools[0].parameters["properties"]:  # type: ignore[index]
        assert f"{name}?: " in prompt or f"{name}: " in prompt


def test_screen_is_described() -> None:
    screen = {"display_width_px": 1024, "display_height_px": 768, "name": "computer"}
    (tool,) = read_request({"type": "computer_20251124", **screen, "enable_zoom": True}).turn.tools
    assert tool.description.endswith(" The screen has 1024 x 768 pixels.")
    assert "zoom" in tool.parameters["properties"]["action"]["enum"]  # type: ignore[index]
    for kind in ("computer_20241022", "computer_20250124", "computer_20251124"):
        (tool,) = read_request({"type": kind, "name": "computer", "enable_zoom": None}).turn.tools
        assert tool.description.endswith("of a computer.")
        assert "zoom" not in tool.parameters["properties"]["action"]["enum"]  # type: ignore[index]


INPUTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bash_20250124", {"command": "ls -l"}),
    ("bash_20250124", {"restart": True}),
    ("text_editor_20250728", {"command": "view", "path": "/a", "view_range": [1, -1]}),
    ("text_editor_20250728", {"command": "create", "path": "/a", "file_text": "x\n"}),
    (
        "text_editor_20250728",
        {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"},
    ),
    ("text_editor_20250124", {"command": "undo_edit", "path": "/a"}),
    (
        "text_editor_20250124",
        {"command": "insert", "path": "/a", "insert_line": 2, "new_str": "x"},
    ),
    ("memory_20250818", {"command": "view", "path": "/memories", "view_range": [1, 2]}),
    ("memory_20250818", {"command": "create", "path": "/memories/a", "file_text": "x"}),
    (
        "memory_20250818",
        {"command": "str_replace", "path": "/memories/a", "old_str": "x", "new_str": "y"},
    ),
    (
        "memory_20250818",
        {"command": "insert", "path": "/memories/a", "insert_line": 1, "insert_text": "y"},
    ),
    ("memory_20250818", {"command": "delete", "path": "/memories/a"}),
    (
        "memory_20250818",
        {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
    ),
    ("computer_20241022", {"action": "left_click", "coordinate": [1, 2]}),
    ("computer_20250124", {"action": "wait", "duration": 0.5}),
    (
        "computer_20251124",
        {"action": "scroll", "coordinate": [1, 2], "scroll_direction": "up", "scroll_amount": 3},
    ),
)
"""Calls as Anthropic documents them."""


def generate(request: MessagesRequest, output: str, *, stream: bool) -> tuple[dict[str, Any], Any]:
    context = StreamingHarmonyContext(request.turn, INFO)
    emitter = request.emitter(INFO)
    deltas = [
        *context.start(),
        *(delta for token in ids_of(output) for delta in context.append_output([token])),
        *context.finish("stop"),
    ]
    events = [event for delta in deltas for event in emitter.feed(delta)]
    if not stream:
        return emitter.result(), context
    return check_stream((event.name, event.data) for event in events).message, context


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("kind", "arguments"), INPUTS)
def test_call_and_result_are_read_back(kind: str, arguments: dict[str, Any], stream: bool) -> None:
    tool = {"type": kind, "name": CLIENT_TOOLS[kind].name}
    request = read_request(tool, stream=stream)
    (declared,) = request.turn.tools
    assert fits(arguments, declared.parameters)
    shown = {"bash": "bash_tool"}.get(declared.name, declared.name)
    message, context = generate(
        request,
        f"<|channel|>commentary to=functions.{shown} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>",
        stream=stream,
    )
    (block,) = message["content"]
    assert block.items() >= {"type": "tool_use", "name": declared.name, "input": arguments}.items()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [image]}
    history = [
        *HELLO,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    again = read_request(tool, messages=history)
    before, after = context.messages, again.turn.messages
    assert json.loads(after[-2].arguments) == json.loads(before[-1].arguments)  # type: ignore[union-attr]
    prompt = encoding().decode_utf8(render(again.turn).ids)
    assert (
        f"functions.{shown} to=assistant<|channel|>commentary<|message|>[image left out" in prompt
    )


@pytest.mark.parametrize(("kind", "arguments"), INPUTS)
def test_grammar_enforces_documented_calls(kind: str, arguments: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    from vllm_mlx_harmony.core.grammar import compile_grammar, grammar_of
    from vllm_mlx_harmony.core.names import Names

    turn = read_request({"type": kind, "name": "f"}).turn
    grammar = grammar_of(turn, Names.of(turn))
    assert grammar is not None
    assert grammar.notes == ()
    for variant, permitted in ((arguments, True), ({**arguments, "undocumented": 1}, False)):
        matcher = compile_grammar(grammar).matcher()
        header = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        output = f"{header}{json.dumps(variant)}<|call|>"
        assert all(map(matcher.consume, ids_of(output))) == permitted


def test_function_with_name_of_client_tool_is_rejected() -> None:
    with pytest.raises(RequestError, match="duplicate tool name 'bash'"):
        render(
            read_request(
                {**FUNCTION, "name": "bash"}, {"type": "bash_20250124", "name": "bash"}
            ).turn
        )


def test_client_tool_can_be_chosen() -> None:
    request = read_request(
        {"type": "bash_20250124", "name": "bash"}, tool_choice={**PINNED, "name": "bash"}
    )
    assert request.turn.tool_choice == ToolChoice(required=True, names=("bash",))


def test_deferred_client_tool_is_not_declared_at_start() -> None:
    bash = {"type": "bash_20250124", "name": "bash", "defer_loading": True}
    assert read_request(FUNCTION, bash).turn.tools[-1].name == "f"


# --- Tools that nobody runs.


def test_unavailable_tools_are_in_prompt_and_answer() -> None:
    request = read_request(FUNCTION, SEARCH, {**SEARCH, "type": "web_search_20260318"})
    assert request.turn.messages == (notice(["web_search"]), User("Hello"))
    assert [tool.name for tool in request.turn.tools] == ["f"]
    assert request.turn.fixed_answer == ""
    message, _ = generate(request, "<|channel|>final<|message|>Hi.<|return|>", stream=False)
    assert message["unavailable_tools"] == ["web_search"]
    assert message["content"] == [{"type": "text", "text": "Hi."}]
    message, _ = generate(
        read_request(FUNCTION), "<|channel|>final<|message|>Hi.<|return|>", stream=False
    )
    assert "unavailable_tools" not in message


UNAVAILABLE: dict[str, tuple[dict[str, Any], str]] = {
    **{kind: ({"type": kind, "name": name}, name) for kind, name in SERVER_TOOLS.items()},
    **{kind: ({"type": kind}, kind) for kind in CLIENT_TOOLSETS},
    "an MCP server": ({"type": "mcp_toolset", "mcp_server_name": "wiki"}, "wiki"),
    "an unknown type": ({"type": "holodeck_20990101", "name": 3}, "holodeck_20990101"),
}


@pytest.mark.parametrize(("tool", "name"), UNAVAILABLE.values(), ids=UNAVAILABLE)
def test_every_unavailable_tool_is_named(tool: dict[str, Any], name: str) -> None:
    assert read_request(FUNCTION, tool).unavailable.tools == (name,)
    assert read_request(FUNCTION, tool, tool_choice={"type": "none"}).unavailable.tools == ()
    request = read_request(tool)
    assert request.turn.fixed_answer.startswith(
        f"Not available on this server: {name}. No search took"
    )
    message, _ = generate_refusal(request)
    assert message["content"][-1] == {"type": "text", "text": request.turn.fixed_answer}
    kinds = [block["type"] for block in message["content"]]
    calls = ["server_tool_use", f"{name}_tool_result"] if name in SERVER_TOOLS.values() else []
    assert kinds == [*calls, "text"]
    official = pytest.importorskip("anthropic.types.beta").BetaMessage
    official.model_validate(message, strict=True)


def generate_refusal(request: MessagesRequest) -> tuple[dict[str, Any], Any]:
    assert request.turn.fixed_answer
    text = encoding().decode(list(answer_ids(request.turn.fixed_answer)))
    return generate(request, text, stream=request.stream)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "choice", [None, {"type": "auto"}, {"type": "any"}, PINNED, {**PINNED, "x": None}]
)
def test_search_alone_fails_as_in_anthropic_api(choice: Any, stream: bool) -> None:
    """Claude Code's WebSearch: its request has this tool alone, and may require it."""
    request = read_request(SEARCH, tool_choice=choice, stream=stream, stop_sequences=["search"])
    assert request.turn.fixed_answer == REFUSAL
    assert request.turn.tool_choice == ToolChoice()
    message, _ = generate_refusal(request)
    call, result, text = message["content"]
    assert call == {"type": "server_tool_use", "id": call["id"], "name": "web_search", "input": {}}
    assert call["id"].startswith("srvtoolu_")
    assert result == {
        "type": "web_search_tool_result",
        "tool_use_id": call["id"],
        "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
    }
    assert text == {"type": "text", "text": REFUSAL}
    assert message["stop_reason"] == "end_turn"
    assert message["unavailable_tools"] == ["web_search"]
    official = pytest.importorskip("anthropic.types").Message.model_validate(message, strict=True)
    assert official.content[1].content.error_code == "unavailable"  # type: ignore[union-attr]


def test_required_search_beside_other_tools_fails() -> None:
    request = read_request(
        FUNCTION, SEARCH, {"type": "code_execution_20250825"}, tool_choice=PINNED
    )
    assert request.unavailable.tools == ("web_search", "code_execution")
    assert request.turn.fixed_answer == REFUSAL
    assert len(generate_refusal(request)[0]["content"]) == 3
    choice = {"type": "any"}
    assert read_request(FUNCTION, SEARCH, tool_choice=choice).turn.tool_choice == ToolChoice(True)


def test_function_may_have_name_of_search() -> None:
    function = {**FUNCTION, "name": "web_search"}
    request = read_request(function, SEARCH, tool_choice=PINNED)
    assert request.turn.fixed_answer == ""
    assert request.turn.tool_choice == ToolChoice(required=True, names=("web_search",))
    assert (
        read_request(FUNCTION, SEARCH, tool_choice={**PINNED, "type": "auto"}).turn.fixed_answer
        == ""
    )


def test_conversation_continues_after_refusal() -> None:
    """A client with a switch for web search sends the tool with every message of its user."""
    message, _ = generate_refusal(read_request(SEARCH))
    history = [
        *HELLO,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": "From memory, then."},
    ]
    request = read_request(SEARCH, messages=history)
    assert request.turn.fixed_answer == ""
    assert request.turn.messages[0] == notice(["web_search"])
    assert Answer(REFUSAL) in request.turn.messages
    assert request.unavailable.tools == ("web_search",)
    assert read_request(SEARCH, messages=history, tool_choice=PINNED).turn.fixed_answer == REFUSAL


def test_unavailable_tool_added_later_is_named_there() -> None:
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": SEARCH}}
    request = read_request(FUNCTION, messages=[*HELLO, {"role": "system", "content": [added]}])
    assert request.turn.messages == (User("Hello"), notice(["web_search"]))


def test_similar_server_tool_replaces_unavailable_tool() -> None:
    page = Tool("search", "", {"type": "object", "properties": {}})
    browser = Namespace("browser", (page,), label="browser")
    defaults = Defaults(namespaces=(browser,), tools_for_all=True)
    body = {"model": "m", "max_tokens": 9, "messages": HELLO, "tools": [SEARCH]}
    request = read(body, defaults, Tagged())
    assert (request.unavailable.tools, request.turn.fixed_answer) == ((), "")
    request = read({**body, "tools": [{"type": "code_execution_20250825"}]}, defaults, Tagged())
    assert (request.unavailable.tools, request.turn.fixed_answer) == (("code_execution",), "")


def test_notice_is_one_line() -> None:
    line = notice(["a", "b"])
    assert isinstance(line, Instructions)
    assert "\n" not in line.text
    assert "a, b" in line.text
