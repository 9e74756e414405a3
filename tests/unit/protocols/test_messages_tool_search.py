"""Tools that a client loads while it talks (semantics A12), as Claude Code 2.1 sends them with
``ENABLE_TOOL_SEARCH=true``, and the system messages that it adds to every step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from reverse_cipher import Reverse

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


def later(name: str) -> Block:
    return tool(name, defer_loading=True)


SEARCH = tool("ToolSearch")
PLACEHOLDER = later("DeferredToolPlaceholder")
"""What Claude Code declares as long as it has loaded nothing."""

ASK = {"role": "user", "content": [{"type": "text", "text": "Read https://a"}]}


def assistant(*blocks: Block) -> Block:
    return {"role": "assistant", "content": list(blocks)}


def use(key: str, name: str, **given: Any) -> Block:
    return {"type": "tool_use", "id": key, "name": name, "input": given}


def result(key: str, *content: Block) -> Block:
    return {"type": "tool_result", "tool_use_id": key, "content": list(content)}


def user(*blocks: Block) -> Block:
    return {"role": "user", "content": list(blocks)}


def reference(name: str) -> Block:
    return {"type": "tool_reference", "tool_name": name}


def text(words: str) -> Block:
    return {"type": "text", "text": words}


def turn(messages: list[Block], tools: list[Block], **fields: Any) -> Turn:
    body = {"model": "m", "max_tokens": 9, "messages": messages, "tools": tools, **fields}
    return read(body, Defaults(), Reverse()).turn


def prompt(asked: Turn) -> str:
    return vocab.encoding().decode(list(render(asked).ids))


def names(asked: Turn) -> list[str]:
    return [each.name for each in asked.tools]


SEARCHED = [ASK, assistant(use("c1", "ToolSearch", query="select:WebFetch"))]
FOUND = [*SEARCHED, user(result("c1", reference("WebFetch")))]
FETCHED = [*FOUND, assistant(use("c2", "WebFetch", url="https://a")), user(result("c2", text("a")))]
BEFORE, AFTER = [SEARCH, PLACEHOLDER], [SEARCH, later("WebFetch"), PLACEHOLDER]


def test_a_deferred_tool_is_declared_where_it_was_found() -> None:
    asked = turn(FOUND, AFTER)
    assert names(asked) == ["ToolSearch"]
    *_, found, declared = asked.messages
    assert found == Result("c1", "WebFetch", "messages[2].content[0]")
    assert isinstance(declared, AdditionalTools)
    assert [each.name for each in declared.tools] == ["WebFetch"]
    assert {each.name for each in asked.callable_tools} == {"ToolSearch", "WebFetch"}
    front, _, behind = prompt(asked).partition("Read https://a")
    assert "WebFetch" not in front
    assert "DeferredToolPlaceholder" not in front + behind
    assert (
        "<|start|>functions.ToolSearch to=assistant<|channel|>commentary<|message|>WebFetch<|end|>"
        "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n"
        "// WebFetch does it.\ntype WebFetch = (_: {" in behind
    )


@pytest.mark.parametrize(
    "loaded", [AFTER, [later("WebFetch"), SEARCH], [SEARCH, later("WebFetch")]]
)
def test_loading_a_tool_keeps_the_prefix(loaded: list[Block]) -> None:
    steps = [([ASK], BEFORE), (FOUND, loaded), (FETCHED, loaded)]
    prompts = [render(turn(messages, tools)).ids for messages, tools in steps]
    for before, now in pairwise(prompts):
        assert now[: len(before)] == before


@pytest.mark.parametrize(("name", "served"), [("weather.now", "weather"), ("python", "python")])
def test_loading_a_tool_changes_no_tool_of_the_server(name: str, served: str) -> None:
    """A client that brings its own ``weather.now`` is shown no server ``weather``, whether the tool
    is loaded yet or not: its tools would stand in front of the prompt, and go when it is."""
    others = Namespace("files", (Tool("list"),), label="files")
    own = Namespace(served, (Tool("now"),), label=served)
    defaults = Defaults(namespaces=(own, others), tools_for_all=True)
    found = [*SEARCHED, user(result("c1", reference(name)))]
    body = {"model": "m", "max_tokens": 9, "tools": [SEARCH, later(name)]}
    before, loaded = (
        read({**body, "messages": messages}, defaults, Reverse()).turn
        for messages in ([ASK], found)
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
    asked = turn(again, [SEARCH, *map(later, ("B", "A", "WebSearch", "WebFetch"))])
    declared = [
        [each.name for each in message.tools]
        for message in asked.messages
        if isinstance(message, AdditionalTools)
    ]
    assert declared == [["WebFetch"], ["WebSearch"], ["A", "B"]]
    results = [each.text for each in asked.messages if isinstance(each, Result)]
    assert results == ["WebFetch", "Two:\nWebSearch\nWebFetch", "A\nB", "None."]


def test_reference_to_unknown_tool_is_its_name() -> None:
    """The server of a tool may have been closed since: the session goes on."""
    asked = turn(FOUND, [SEARCH])
    assert asked.messages[-1] == Result("c1", "WebFetch", "messages[2].content[0]")


def test_reference_to_declared_tool_is_its_name() -> None:
    asked = turn(FOUND, [SEARCH, tool("WebFetch")])
    assert names(asked) == ["ToolSearch", "WebFetch"]
    assert not any(isinstance(each, AdditionalTools) for each in asked.messages)


def test_loaded_tool_may_be_called_and_chosen() -> None:
    chosen = {"type": "tool", "name": "WebFetch"}
    asked = turn(FOUND, AFTER, tool_choice=chosen)
    assert asked.tool_choice == ToolChoice(required=True, names=("WebFetch",))
    grammar = grammar_of(asked, Names.of(asked))
    assert grammar is not None
    assert "WebFetch" in grammar.text
    with pytest.raises(RequestError, match=r"tool_choice\.name"):
        turn([ASK], AFTER, tool_choice=chosen)


@pytest.mark.parametrize("tools", [[later("f"), tool("f")], [later("f"), SEARCH, later("f")]])
def test_tools_with_equal_names_are_refused_before_loading(tools: list[Block]) -> None:
    with pytest.raises(RequestError, match="duplicate tool name 'f'") as caught:
        turn([ASK], tools)
    assert caught.value.param in ("tools[0]", "tools[2]")


def test_without_tools_none_is_loaded() -> None:
    asked = turn(FOUND, AFTER, tool_choice={"type": "none"})
    assert (asked.tools, asked.callable_tools) == ((), ())


def test_a_system_message_loads_a_tool_too() -> None:
    addition = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "WebFetch"}}
    messages = [ASK, {"role": "system", "content": [addition], "clear_at": "next_user_message"}]
    asked = turn([*messages, assistant(text("Well.")), ASK], AFTER)
    assert {each.name for each in asked.callable_tools} == {"ToolSearch", "WebFetch"}


SERVERS = [
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
    {"type": "tool_search_tool_bm25", "name": "tool_search_tool_bm25"},
]


@pytest.mark.parametrize("search", SERVERS)
def test_all_tools_are_declared_for_a_server_side_search(search: Block) -> None:
    """As in Responses."""
    body = {"model": "m", "max_tokens": 9, "messages": [ASK], "tools": [search, later("WebFetch")]}
    asked = read(body, Defaults(), Reverse())
    assert names(asked.turn) == ["WebFetch"]
    assert any("defer_loading was ignored" in note for note in asked.notes)


def test_tool_found_by_anthropic_search_is_declared_there() -> None:
    found = {"type": "tool_search_tool_search_result", "tool_references": [reference("WebFetch")]}
    messages = [
        ASK,
        assistant(
            {"type": "server_tool_use", "id": "s", "name": "tool_search_tool_bm25", "input": {}},
            {"type": "tool_search_tool_result", "tool_use_id": "s", "content": found},
            use("c2", "WebFetch", url="https://a"),
        ),
        user(result("c2", text("a"))),
    ]
    asked = turn(messages, [SEARCH, later("WebFetch")])
    assert {each.name for each in asked.callable_tools} == {"ToolSearch", "WebFetch"}
    behind = prompt(asked).partition("Read https://a")[2]
    assert behind.index("type WebFetch") < behind.index("to=functions.WebFetch")


# --- What Claude Code says of the tokens that are left.

LEFT = "<total_tokens>{} tokens left</total_tokens>"
USED = "Token usage: {}/111072; 100711 remaining"


@pytest.mark.parametrize("words", [LEFT, USED])
def test_a_message_about_tokens_with_every_step_breaks_no_prefix(words: str) -> None:
    """Each is one of the system's, a list with a cache breakpoint first and a string from then on;
    it stays where it was (Claude Code 2.1.330, ``totalTokensReminder`` and
    ``CLAUDE_CODE_ENABLE_TOKEN_USAGE_ATTACHMENT``)."""
    system = [text("Be brief."), text(f"You are an agent.\n\n{LEFT.format(131_072)}")]
    history: list[Block] = [ASK]
    prompts = []
    for step in range(6):
        now = words.format(120_000 - 73 * step)
        last = {**text(now), "cache_control": {"type": "ephemeral"}}
        messages = [*history, {"role": "system", "content": [last]}]
        prompts.append(render(turn(messages, [SEARCH], system=system)).ids)
        history.append({"role": "system", "content": now})
        history += [assistant(use(f"c{step}", "ToolSearch", query="x"))]
        history += [user(result(f"c{step}", text("None.")))]
        if step == 3:
            history += [assistant(text("There is none.")), ASK]
    for before, now_ids in pairwise(prompts):
        assert now_ids[: len(before)] == before


def test_cleared_message_keeps_the_prefix() -> None:
    cleared = {"role": "system", "content": LEFT.format(7), "clear_at": "next_user_message"}
    called = [ASK, assistant(use("c1", "ToolSearch", query="x")), user(result("c1", text("None.")))]
    first = render(turn([*called, cleared], [SEARCH]))
    more = [*called, cleared, assistant(use("c2", "ToolSearch", query="y")), user(result("c2"))]
    second = render(turn(more, [SEARCH])).ids
    opening_at = len(first.ids) - 2
    shared = max(at for at in range(opening_at) if first.ids[at] == vocab.START)  # the message
    assert second[:shared] == first.ids[:shared]
    assert "tokens left" not in vocab.encoding().decode(list(second))
