"""Tools that a client loads during a conversation (semantics A12), as Claude Code 2.1 sends them
with ``ENABLE_TOOL_SEARCH=true``, and the system messages that it adds to every step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from ciphers import Reverse

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar import grammar_of
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import (
    AdditionalTools,
    Defaults,
    Namespace,
    Result,
    Tool,
    ToolChoice,
    Turn,
)
from vllm_mlx_harmony.protocols.messages import read

Block = dict[str, Any]


def tool(name: str, **fields: Any) -> Block:
    schema = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
    return {"name": name, "description": f"{name} does it.", "input_schema": schema, **fields}


def deferred(name: str) -> Block:
    return tool(name, defer_loading=True)


SEARCH = tool("ToolSearch")
PLACEHOLDER = deferred("DeferredToolPlaceholder")
"""Claude Code declares it until it has loaded a tool."""

ASK = {"role": "user", "content": [{"type": "text", "text": "Read https://a"}]}


def assistant(*blocks: Block) -> Block:
    return {"role": "assistant", "content": list(blocks)}


def use(key: str, name: str, **arguments: Any) -> Block:
    return {"type": "tool_use", "id": key, "name": name, "input": arguments}


def result(key: str, *content: Block) -> Block:
    return {"type": "tool_result", "tool_use_id": key, "content": list(content)}


def user(*blocks: Block) -> Block:
    return {"role": "user", "content": list(blocks)}


def reference(name: str) -> Block:
    return {"type": "tool_reference", "tool_name": name}


def text(words: str) -> Block:
    return {"type": "text", "text": words}


def read_turn(messages: list[Block], tools: list[Block], **fields: Any) -> Turn:
    body = {"model": "m", "max_tokens": 9, "messages": messages, "tools": tools, **fields}
    return read(body, Defaults(), Reverse()).turn


def prompt_text(turn: Turn) -> str:
    return vocab.encoding().decode(list(render(turn).ids))


def tool_names(turn: Turn) -> list[str]:
    return [tool.name for tool in turn.tools]


SEARCHED = [ASK, assistant(use("c1", "ToolSearch", query="select:WebFetch"))]
FOUND = [*SEARCHED, user(result("c1", reference("WebFetch")))]
FETCHED = [*FOUND, assistant(use("c2", "WebFetch", url="https://a")), user(result("c2", text("a")))]
BEFORE, AFTER = [SEARCH, PLACEHOLDER], [SEARCH, deferred("WebFetch"), PLACEHOLDER]


def test_deferred_tool_is_declared_after_its_search() -> None:
    turn = read_turn(FOUND, AFTER)
    assert tool_names(turn) == ["ToolSearch"]
    *_, search_result, declared = turn.messages
    assert search_result == Result("c1", "WebFetch", "messages[2].content[0]")
    assert isinstance(declared, AdditionalTools)
    assert [tool.name for tool in declared.tools] == ["WebFetch"]
    assert {tool.name for tool in turn.callable_tools} == {"ToolSearch", "WebFetch"}
    front, _, rest = prompt_text(turn).partition("Read https://a")
    assert "WebFetch" not in front
    assert "DeferredToolPlaceholder" not in front + rest
    assert (
        "<|start|>functions.ToolSearch to=assistant<|channel|>commentary<|message|>WebFetch<|end|>"
        "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n"
        "// WebFetch does it.\ntype WebFetch = (_: {" in rest
    )


@pytest.mark.parametrize(
    "loaded", [AFTER, [deferred("WebFetch"), SEARCH], [SEARCH, deferred("WebFetch")]]
)
def test_loading_tool_keeps_prefix(loaded: list[Block]) -> None:
    steps = [([ASK], BEFORE), (FOUND, loaded), (FETCHED, loaded)]
    prompts = [render(read_turn(messages, tools)).ids for messages, tools in steps]
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before


@pytest.mark.parametrize(("name", "served"), [("weather.now", "weather"), ("python", "python")])
def test_loading_tool_changes_no_server_tools(name: str, served: str) -> None:
    """A client with its own ``weather.now`` gets no ``weather`` of the server, even before the tool
    is loaded: otherwise the server's tools would leave the beginning of the prompt when it is."""
    others = Namespace("files", (Tool("list"),), label="files")
    own = Namespace(served, (Tool("now"),), label=served)
    defaults = Defaults(namespaces=(own, others), tools_for_all=True)
    conversation = [*SEARCHED, user(result("c1", reference(name)))]
    body = {"model": "m", "max_tokens": 9, "tools": [SEARCH, deferred(name)]}
    before, loaded = (
        read({**body, "messages": messages}, defaults, Reverse()).turn
        for messages in ([ASK], conversation)
    )
    assert before.namespaces == loaded.namespaces == (others,)
    ids = render(before).ids
    assert render(loaded).ids[: len(ids)] == ids


def test_tools_are_declared_once_in_order_of_references() -> None:
    again = [
        *FOUND,
        assistant(use("c2", "ToolSearch", query="web")),
        user(result("c2", text("Two:"), reference("WebSearch"), reference("WebFetch"))),
        assistant(use("c3", "ToolSearch", query="all"), use("c4", "ToolSearch", query="x")),
        user(result("c3", reference("A"), reference("B")), result("c4", text("None."))),
    ]
    turn = read_turn(again, [SEARCH, *map(deferred, ("B", "A", "WebSearch", "WebFetch"))])
    declared = [
        [tool.name for tool in message.tools]
        for message in turn.messages
        if isinstance(message, AdditionalTools)
    ]
    assert declared == [["WebFetch"], ["WebSearch"], ["A", "B"]]
    results = [message.text for message in turn.messages if isinstance(message, Result)]
    assert results == ["WebFetch", "Two:\nWebSearch\nWebFetch", "A\nB", "None."]


def test_reference_to_unknown_tool_is_its_name() -> None:
    """The server of a tool may have been removed since; the session continues."""
    turn = read_turn(FOUND, [SEARCH])
    assert turn.messages[-1] == Result("c1", "WebFetch", "messages[2].content[0]")


def test_reference_to_declared_tool_is_its_name() -> None:
    turn = read_turn(FOUND, [SEARCH, tool("WebFetch")])
    assert tool_names(turn) == ["ToolSearch", "WebFetch"]
    assert not any(isinstance(message, AdditionalTools) for message in turn.messages)


def test_loaded_tool_may_be_called_and_chosen() -> None:
    chosen = {"type": "tool", "name": "WebFetch"}
    turn = read_turn(FOUND, AFTER, tool_choice=chosen)
    assert turn.tool_choice == ToolChoice(required=True, names=("WebFetch",))
    grammar = grammar_of(turn, Names.of(turn))
    assert grammar is not None
    assert "WebFetch" in grammar.text
    with pytest.raises(RequestError, match=r"tool_choice\.name"):
        read_turn([ASK], AFTER, tool_choice=chosen)


@pytest.mark.parametrize(
    "tools", [[deferred("f"), tool("f")], [deferred("f"), SEARCH, deferred("f")]]
)
def test_tools_with_equal_names_are_rejected_before_loading(tools: list[Block]) -> None:
    with pytest.raises(RequestError, match="duplicate tool name 'f'") as caught:
        read_turn([ASK], tools)
    assert caught.value.param in ("tools[0]", "tools[2]")


def test_tool_choice_none_loads_no_tools() -> None:
    turn = read_turn(FOUND, AFTER, tool_choice={"type": "none"})
    assert (turn.tools, turn.callable_tools) == ((), ())


def test_system_message_loads_tool() -> None:
    addition = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "WebFetch"}}
    messages = [ASK, {"role": "system", "content": [addition], "clear_at": "next_user_message"}]
    turn = read_turn([*messages, assistant(text("Well.")), ASK], AFTER)
    assert {tool.name for tool in turn.callable_tools} == {"ToolSearch", "WebFetch"}


SERVERS = [
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
    {"type": "tool_search_tool_bm25", "name": "tool_search_tool_bm25"},
]


@pytest.mark.parametrize("search", SERVERS)
def test_all_tools_are_declared_for_server_side_search(search: Block) -> None:
    """As in Responses."""
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [ASK],
        "tools": [search, deferred("WebFetch")],
    }
    request = read(body, Defaults(), Reverse())
    assert tool_names(request.turn) == ["WebFetch"]
    assert any("defer_loading was ignored" in note for note in request.notes)


def test_tool_found_by_anthropic_search_is_declared_after_it() -> None:
    search_result = {
        "type": "tool_search_tool_search_result",
        "tool_references": [reference("WebFetch")],
    }
    messages = [
        ASK,
        assistant(
            {"type": "server_tool_use", "id": "s", "name": "tool_search_tool_bm25", "input": {}},
            {"type": "tool_search_tool_result", "tool_use_id": "s", "content": search_result},
            use("c2", "WebFetch", url="https://a"),
        ),
        user(result("c2", text("a"))),
    ]
    turn = read_turn(messages, [SEARCH, deferred("WebFetch")])
    assert {tool.name for tool in turn.callable_tools} == {"ToolSearch", "WebFetch"}
    rest = prompt_text(turn).partition("Read https://a")[2]
    assert rest.index("type WebFetch") < rest.index("to=functions.WebFetch")


# --- Reminders of Claude Code about the remaining tokens.

TOKENS_LEFT = "<total_tokens>{} tokens left</total_tokens>"
TOKEN_USAGE = "Token usage: {}/111072; 100711 remaining"


@pytest.mark.parametrize("words", [TOKENS_LEFT, TOKEN_USAGE])
def test_token_reminders_keep_prefix(words: str) -> None:
    """Each is a system message, first sent as a list with a cache breakpoint, later as a string, in
    the same place (Claude Code 2.1.330, ``totalTokensReminder`` and
    ``CLAUDE_CODE_ENABLE_TOKEN_USAGE_ATTACHMENT``)."""
    system = [text("Be brief."), text(f"You are an agent.\n\n{TOKENS_LEFT.format(131_072)}")]
    history: list[Block] = [ASK]
    prompts = []
    for step in range(6):
        reminder = words.format(120_000 - 73 * step)
        last = {**text(reminder), "cache_control": {"type": "ephemeral"}}
        messages = [*history, {"role": "system", "content": [last]}]
        prompts.append(render(read_turn(messages, [SEARCH], system=system)).ids)
        history.append({"role": "system", "content": reminder})
        history += [assistant(use(f"c{step}", "ToolSearch", query="x"))]
        history += [user(result(f"c{step}", text("None.")))]
        if step == 3:
            history += [assistant(text("There is none.")), ASK]
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before


def test_cleared_message_keeps_prefix() -> None:
    cleared = {"role": "system", "content": TOKENS_LEFT.format(7), "clear_at": "next_user_message"}
    conversation = [
        ASK,
        assistant(use("c1", "ToolSearch", query="x")),
        user(result("c1", text("None."))),
    ]
    first = render(read_turn([*conversation, cleared], [SEARCH]))
    more = [
        *conversation,
        cleared,
        assistant(use("c2", "ToolSearch", query="y")),
        user(result("c2")),
    ]
    second = render(read_turn(more, [SEARCH])).ids
    opening_at = len(first.ids) - 2
    shared = max(at for at in range(opening_at) if first.ids[at] == vocab.START)  # the message
    assert second[:shared] == first.ids[:shared]
    assert "tokens left" not in vocab.encoding().decode(list(second))
