"""Responses' tools: what is declared, what the model is shown, what its calls mean."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import Defaults, Tool, Turn, User
from vllm_mlx_harmony.protocols.responses import read
from vllm_mlx_harmony.protocols.responses.body import read_body
from vllm_mlx_harmony.protocols.responses.tools import Declared, Tools, read_tools

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **fields}


def freeform(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "name": name, **fields}


def namespace(name: str, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": list(tools), **fields}


def tools(*declared: dict[str, Any], choice: Any = None) -> Tools:
    body = {"model": "m", "tools": list(declared), "tool_choice": choice}
    asked = read_body(body)
    return read_tools(asked.tools or (), asked.tool_choice)


def shown(*declared: dict[str, Any], choice: Any = None) -> list[str]:
    return [tool.name for tool in tools(*declared, choice=choice).shown]


SHOWN: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "functions": ([function("f"), function("g")], ["f", "g"]),
    "freeform": ([freeform("apply_patch")], ["apply_patch"]),
    "namespace": ([namespace("crm", function("f"), freeform("g"))], ["crm__f", "crm__g"]),
    "namespace of an MCP server": ([namespace("mcp__crm__", function("f"))], ["mcp__crm__f"]),
    "two namespaces": (
        [namespace("a", function("f")), namespace("b", function("f")), function("f")],
        ["a__f", "b__f", "f"],
    ),
    "a namespace in two places": (
        [namespace("a", function("f")), namespace("a", function("g"))],
        ["a__f", "a__g"],
    ),
    "names that would be the same": (
        [namespace("a", function("f")), namespace("a__", function("f")), function("a__f")],
        ["a__f_2", "a__f_3", "a__f"],
    ),
    "an empty namespace": ([namespace("a"), function("f")], ["f"]),
    "what the server would have to run": (
        [
            {"type": kind, "name": 5, "tools": "x", "parameters": []}
            for kind in (
                "web_search",
                "web_search_preview",
                "image_generation",
                "file_search",
                "code_interpreter",
                "mcp",
                "local_shell",
                "shell",
                "computer_use_preview",
                "tool_search",
                "something_new",
            )
        ]
        + [namespace("a", {"type": "something_new"}, function("f"))],
        ["a__f"],
    ),
}


@pytest.mark.parametrize(("declared", "expected"), SHOWN.values(), ids=SHOWN)
def test_shown(declared: list[dict[str, Any]], expected: list[str]) -> None:
    assert shown(*declared) == expected


@pytest.mark.parametrize("declared", [each for each, _ in SHOWN.values()], ids=SHOWN)
def test_every_tool_comes_back_as_it_was_declared(declared: list[dict[str, Any]]) -> None:
    read = tools(*declared)
    for tool in read.shown:
        found = read.declared(tool.name)
        assert read.name(found.name, found.namespace) == tool.name
    assert len({read.declared(tool.name) for tool in read.shown}) == len(read.shown)


def test_a_function_is_shown_as_it_is() -> None:
    declared = function("f", description="Does f.", parameters=SCHEMA, strict=True)
    assert tools(declared).shown == (Tool("f", "Does f.", SCHEMA, "tools[0]"),)
    assert tools(function("f")).shown == (Tool("f", where="tools[0]"),)


@pytest.mark.parametrize(
    ("fields", "description"),
    [
        ({}, ""),
        ({"description": "Patches."}, "Patches."),
        ({"description": "Patches.", "format": {"type": "text"}}, "Patches."),
        (
            {"description": "Patches.", "format": {"type": "grammar", "syntax": "lark",
                                                   "definition": "start: \"a\"\n"}},
            'Patches.\n\nThe input must match this lark grammar:\nstart: "a"',
        ),
        (
            {"format": {"type": "grammar", "definition": "[a-z]+"}},
            "The input must match this grammar:\n[a-z]+",
        ),
    ],
)  # fmt: skip
def test_a_freeform_tool_is_shown_with_one_string(fields: dict[str, Any], description: str) -> None:
    (tool,) = tools(freeform("apply_patch", **fields)).shown
    assert tool.description == description
    assert tool.parameters is not None
    assert tool.parameters["required"] == ["input"]
    assert tool.parameters["properties"]["input"]["type"] == "string"


def test_the_first_tool_of_a_namespace_tells_of_the_namespace() -> None:
    declared = namespace("crm", function("f", description="Finds."), function("g"),
                         description="The customers.")  # fmt: skip
    described = [tool.description for tool in tools(declared).shown]
    assert described == ["crm: The customers.\n\nFinds.", ""]


DECLARED = (
    function("f"),
    freeform("patch"),
    namespace("crm", function("find"), freeform("note"), function("shared")),
    namespace("mcp__web__", function("shared"), function("f")),
)

CALLED: list[tuple[str, Declared]] = [
    ("f", Declared("f")),
    ("patch", Declared("patch", freeform=True)),
    ("crm__find", Declared("find", "crm")),
    ("crm.find", Declared("find", "crm")),
    ("find", Declared("find", "crm")),
    ("note", Declared("note", "crm", freeform=True)),
    ("mcp__web__shared", Declared("shared", "mcp__web__")),
    ("mcp__web__f", Declared("f", "mcp__web__")),
    ("shared", Declared("shared")),  # nobody's alone: the client answers it
    ("unheard_of", Declared("unheard_of")),
]


@pytest.mark.parametrize(("called", "expected"), CALLED)
def test_whose_call_it_is(called: str, expected: Declared) -> None:
    assert tools(*DECLARED).declared(called) == expected


@pytest.mark.parametrize("called", ["to=functions.crm__find", "to=crm.find", "to=functions.find"])
def test_whatever_the_model_writes_reaches_the_tool(called: str) -> None:
    read = tools(*DECLARED)
    names = Names.of(Turn(messages=(User("Hi"),), tools=read.shown))
    assert read.declared(names.addressee(called.removeprefix("to="))) == Declared("find", "crm")


def test_names_no_header_can_carry() -> None:
    read = tools(namespace("my crm", function("find it")))
    names = Names.of(Turn(messages=(User("Hi"),), tools=read.shown))
    assert names.recipient("my crm__find it") == "functions.my_crm__find_it"
    found = read.declared(names.addressee("functions.my_crm__find_it"))
    assert found == Declared("find it", "my crm")


ALL = ["f", "patch", "crm__find", "crm__note", "crm__shared", "mcp__web__shared", "mcp__web__f"]


def only(*allowed: dict[str, Any], **mode: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "tools": list(allowed), **mode}


CHOICES: list[tuple[Any, list[str]]] = [
    (None, ALL),
    ("auto", ALL),
    ({"type": "auto"}, ALL),
    ("none", []),
    (only(function("f"), mode="auto"), ["f"]),
    (only(function("f")), ["f"]),
    (only(freeform("patch"), function("f")), ["f", "patch"]),
    (only(function("find", namespace="crm")), ["crm__find"]),
    (only({"type": "namespace", "name": "mcp__web__"}), ["mcp__web__shared", "mcp__web__f"]),
    (only({"type": "web_search"}, function("f")), ["f"]),
    (only(), []),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_tool_choice(choice: Any, expected: list[str]) -> None:
    assert shown(*DECLARED, choice=choice) == expected
    assert tools(*DECLARED, choice=choice).name("find", "crm") == "crm__find"


@pytest.mark.parametrize(
    ("declared", "param"),
    [
        ([function("f"), freeform("f")], "tools[1]"),
        ([namespace("a", function("f")), namespace("a", function("f"))], "tools[1].tools[0]"),
    ],
)
def test_a_tool_declared_twice(declared: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        tools(*declared)
    assert caught.value.param == param


class NoSeal:
    def seal(self, text: str) -> str:
        raise NotImplementedError

    def unseal(self, sealed: str) -> str | None:
        raise NotImplementedError


def test_calls_in_the_history_have_the_name_that_is_shown() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "find", "namespace": "crm"}
    body = {"model": "m", "input": [{"role": "user", "content": "Hi"}, call], "tools": [*DECLARED]}
    turn = read(body, Defaults(), NoSeal()).turn
    assert turn.messages[1].name == "crm__find"  # type: ignore[union-attr]
