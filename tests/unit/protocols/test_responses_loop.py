"""A tool loop in the shape Codex sends it: the second prompt continues the first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ciphers import Tagged
from event_checker import check
from harmony_text import ids_of

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.replay import Replay
from vllm_mlx_harmony.core.turn import Defaults, Instructions, ResponseInfo, Result
from vllm_mlx_harmony.protocols.responses import ResponsesRequest, read

DATA = Path(__file__).parents[2] / "support" / "recorded"
SERVER = Defaults(date="2025-08-05")
INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")


def recorded(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((DATA / f"responses-{name}.json").read_text())["body"]
    return body


def generate(request: ResponsesRequest, output: str) -> tuple[list[int], dict[str, Any], Any]:
    """The ids of prompt and output, the final response, and the context, of one turn."""
    context = StreamingHarmonyContext(request.turn, INFO)
    emitter = request.emitter(INFO)
    deltas = [
        *context.start(),
        *(delta for token in ids_of(output) for delta in context.append_output([token])),
        *context.finish("stop"),
    ]
    events = [event for delta in deltas for event in emitter.feed(delta)]
    assert check(events) == emitter.result()
    return list(context.render_for_completion()), emitter.result(), context


START = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>I should look.<|end|>"
PREAMBLE = "<|channel|>commentary<|message|>Let me look: é 😀.<|end|>"


def call_output(recipient: str, arguments: str) -> str:
    header = f"<|channel|>commentary to=functions.{recipient} <|constrain|>json<|message|>"
    return f"{START}{header}{arguments}<|call|>"


def opaque(item: dict[str, Any]) -> dict[str, Any]:
    """The item as sent back by a client that keeps only encrypted reasoning."""
    return {**item, "content": [], "summary": []} if item["type"] == "reasoning" else item


def result_of(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "marker-42\n"}


ECHO = '{"cmd": "echo é"}'
PATCH = '*** Begin\n+a "é"\n'

LOOPS = {
    "function": (
        "codex-turn1",
        call_output("exec_command", ECHO),
        {"type": "function_call", "name": "exec_command", "arguments": ECHO},
    ),
    "namespace": (
        "codex-turn1",
        call_output("multi_agent_v1__close_agent", "{}"),
        {"type": "function_call", "name": "close_agent", "namespace": "multi_agent_v1"},
    ),
    "freeform": (
        "codex-custom-turn1",
        call_output("apply_patch", '{"input":"*** Begin\\n+a \\"é\\"\\n"}'),
        {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
    ),
}


@pytest.mark.parametrize("sent_back", [dict, opaque], ids=["all", "opaque"])
@pytest.mark.parametrize(("name", "call", "expected"), LOOPS.values(), ids=LOOPS)
def test_second_prompt_continues_first(
    name: str, call: str, expected: dict[str, Any], sent_back: Any
) -> None:
    body = recorded(name)
    first, response, _ = generate(read(body, SERVER, Tagged()), f"{THOUGHT}{START}{PREAMBLE}{call}")
    output = response["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", expected["type"]]
    assert expected.items() <= output[-1].items()

    sent = [*body["input"], *map(sent_back, output), result_of(output[-1])]
    again = read({**body, "input": sent}, SERVER, Tagged())
    second = list(render(again.turn).ids)
    assert again.notes == ()
    assert second[: len(first)] == first
    rest = vocab.encoding().decode_utf8(second[len(first) :])
    assert rest.endswith(f"to=assistant<|channel|>commentary<|message|>marker-42\n<|end|>{START}")
    assert rest.count("<|message|>") == 1


CALENDAR = {
    "type": "namespace",
    "name": "mcp__calendar__",
    "description": "Appointments.",
    "tools": [
        {"type": "function", "name": "create", "description": "Creates one.", "strict": False,
         "defer_loading": True, "parameters": {"type": "object", "properties": {}}}
    ],
}  # fmt: skip
QUERY = '{"query":"calendar"}'


@pytest.mark.parametrize("stored", [False, True])
def test_found_tool_is_called_and_prefix_is_kept(stored: bool) -> None:
    """Search, call, answer: each prompt begins with the one before it, as far as A6 allows."""
    body = recorded("codex-custom-turn1")
    request = read(body, SERVER, Tagged())
    first, response, context = generate(request, THOUGHT + call_output("tool_search", QUERY))
    search = response["output"][-1]
    assert (search["type"], search["execution"]) == ("tool_search_call", "client")
    output = {"type": "tool_search_output", "call_id": search["call_id"], "status": "completed",
              "execution": "client", "tools": [CALENDAR]}  # fmt: skip

    history = request.conversation(context.messages) if stored else ()
    sent = [output] if stored else [*body["input"], *response["output"], output]
    request = read({**body, "input": sent}, SERVER, Tagged(), history)
    second, response, context = generate(
        request, THOUGHT + call_output("mcp__calendar__create", "{}")
    )
    assert second[: len(first)] == first
    between = vocab.encoding().decode_utf8(second[len(first) :])
    assert between.startswith("<|start|>functions.tool_search to=assistant<|channel|>commentary")
    assert "<|start|>developer<|message|># Tools\n\n## functions\n\n" in between
    assert "type mcp__calendar__create = " in between
    call = response["output"][-1]
    assert (call["name"], call["namespace"]) == ("create", "mcp__calendar__")

    history = request.conversation(context.messages) if stored else ()
    more = [result_of(call)]
    sent = more if stored else [*sent, *response["output"], *more]
    third = list(render(read({**body, "input": sent}, SERVER, Tagged(), history).turn).ids)
    assert third[: len(second)] == second


def test_later_tools_and_effort_keep_prefix() -> None:
    body = {"model": "m", "input": [{"role": "user", "content": "Hi"}], "stream": True,
            "reasoning": {"effort": "low"}}  # fmt: skip
    first = generate(read(body, SERVER, Tagged()), "<|channel|>final<|message|>Hello.<|return|>")
    more = [
        *first[1]["output"],
        {"type": "configuration_update", "reasoning": {"effort": "high"},
         "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
        {"type": "additional_tools", "role": "developer", "tools": [CALENDAR]},
        {"role": "user", "content": "More"},
    ]  # fmt: skip
    again = read({**body, "input": [*body["input"], *more]}, SERVER, Tagged())
    second = list(render(again.turn).ids)
    assert second[: len(first[0]) - 1] == first[0][:-1]  # <|return|> is <|end|> in a history
    text = vocab.encoding().decode_utf8(second[len(first[0]) :])
    order = ("Reasoning: high", "# Response Formats", "# Tools", "More")
    assert sorted(order, key=text.index) == list(order)


SPELLINGS = {
    "a bare name": ("codex-turn1", call_output("close_agent", "{}")),
    "a dotted name": ("codex-turn1", call_output("multi_agent_v1.close_agent", "{}")),
    "an unknown tool": ("codex-turn1", call_output("nobody", '{"a" : 1}')),
    "raw text": ("codex-custom-turn1", call_output("apply_patch", PATCH)),
    "line breaks": ("codex-custom-turn1", call_output("apply_patch", '{"input":"a\nb"}')),
    "quotes": ("codex-custom-turn1", call_output("apply_patch", '{"input":"f("a")"}')),
    "another field": ("codex-custom-turn1", call_output("apply_patch", '{"input":"a","why":"b"}')),
    "nothing": ("codex-custom-turn1", call_output("apply_patch", "")),
}
"""Calls whose spelling differs from the client's echo of them."""


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(("name", "call"), SPELLINGS.values(), ids=SPELLINGS)
def test_turn_is_continued_for_any_spelling_of_call(name: str, call: str, stored: bool) -> None:
    body, view = recorded(name), Replay(2**20).view("")
    request = read(body, SERVER, Tagged())
    first, response, context = generate(request, THOUGHT + call)
    for output in context.outputs:
        view.remember(replace(output, messages=tuple(map(request.as_sent_back, output.messages))))

    shown = [item for item in response["output"] if item["type"] != "reasoning"]
    new = [result_of(shown[-1])]
    history = request.conversation(context.messages) if stored else ()
    sent = new if stored else [*body["input"], *shown, *new]
    again = read({**body, "input": sent}, SERVER, Tagged(), history)
    second = list(render(again.turn, view).ids)
    assert second[: len(first)] == first


def test_stored_conversation_continues_from_its_messages() -> None:
    body = {"model": "m", "input": "Hi", "stream": True, "instructions": "Be brief.",
            "tools": [{"type": "function", "name": "look"}]}  # fmt: skip
    # Arguments that no JSON writer would produce: the stored messages are continued.
    request = read(body, SERVER, Tagged())
    first, response, context = generate(
        request, THOUGHT + call_output("look", ' {"a" : "\\u00e9"} ')
    )
    history = request.conversation(context.messages)
    assert Instructions("Be brief.") not in history
    again = read(
        {**body, "input": [result_of(response["output"][-1])], "previous_response_id": "resp_1"},
        SERVER,
        Tagged(),
        history,
    )
    second = list(render(again.turn).ids)
    assert second[: len(first)] == first
    assert again.turn.messages[-1] == Result(
        response["output"][-1]["call_id"], "marker-42\n", "input[0]"
    )


def test_new_instructions_replace_old_ones() -> None:
    body = {"model": "m", "input": "Hi", "stream": True, "instructions": "Be brief."}
    request = read(body, SERVER, Tagged())
    _, _, context = generate(request, "<|channel|>final<|message|>Hello.<|return|>")
    history = request.conversation(context.messages)
    again = read({**body, "input": "More", "instructions": "Be kind."}, SERVER, Tagged(), history)
    text = vocab.encoding().decode_utf8(list(render(again.turn).ids))
    assert "Be kind." in text
    assert "Be brief." not in text
    assert text.index("Hi") < text.index("Hello.") < text.index("More")
