"""Responses' tools: what is declared, what the model is shown, what its calls mean."""

from __future__ import annotations

from typing import Any

import pytest
from ciphers import Unusable

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import Call, Defaults, Tool, ToolChoice, Turn, User
from vllm_mlx_harmony.protocols.responses import read
from vllm_mlx_harmony.protocols.responses.schema import ResponsesBody
from vllm_mlx_harmony.protocols.responses.server_tools import ServerTools
from vllm_mlx_harmony.protocols.responses.tools import DeclaredTool, ToolReader, Tools
from vllm_mlx_harmony.protocols.validation import validate

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **fields}


def freeform(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "name": name, **fields}


def namespace(name: str, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": list(tools), **fields}


def search(**fields: Any) -> dict[str, Any]:
    return {"type": "tool_search", "execution": "client", **fields}


def read_tools(*declared: dict[str, Any], choice: Any = None) -> Tools:
    body = {"model": "m", "tools": list(declared), "tool_choice": choice}
    validated = validate(ResponsesBody, body)
    reader = ToolReader()
    shown = reader.declare(validated.tools or (), "tools")
    return reader.tools(shown, validated.tool_choice, ServerTools(), ())


def shown_names(*declared: dict[str, Any], choice: Any = None) -> list[str]:
    return [tool.name for tool in read_tools(*declared, choice=choice).shown]


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
    "what the client runs": (
        [
            {"type": kind, "name": 5, "tools": "x", "parameters": []}
            for kind in ("local_shell", "shell", "apply_patch", "computer")
        ],
        ["local_shell", "shell", "apply_patch", "computer"],
    ),
    "functions named like them": (
        [{"type": "shell"}, function("shell"), {"type": "apply_patch"}, freeform("apply_patch")],
        ["shell_2", "shell", "apply_patch_2", "apply_patch"],
    ),
    "two computers": (
        [{"type": "computer_use_preview"}, {"type": "computer"}, namespace("a", function("f"))],
        ["computer", "computer_2", "a__f"],
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
                "tool_search",
                "something_new",
            )
        ]
        + [{"type": "shell", "environment": {"type": "container_auto"}}]
        + [namespace("a", {"type": "something_new"}, function("f"))],
        ["a__f"],
    ),
}


@pytest.mark.parametrize(("declared", "expected"), SHOWN.values(), ids=SHOWN)
def test_tools_are_shown_under_expected_names(
    declared: list[dict[str, Any]], expected: list[str]
) -> None:
    assert shown_names(*declared) == expected


@pytest.mark.parametrize("declared", [declared for declared, _ in SHOWN.values()], ids=SHOWN)
def test_shown_names_lead_back_to_declared_tools(declared: list[dict[str, Any]]) -> None:
    tools = read_tools(*declared)
    for tool in tools.shown:
        assert tools.as_sent_back(Call("c", tool.name, "{}")).name == tool.name
    assert len({tools.tool(tool.name) for tool in tools.shown}) == len(tools.shown)


def test_function_is_shown_unchanged() -> None:
    declared = function("f", description="Does f.", parameters=SCHEMA, strict=True)
    assert read_tools(declared).shown == (Tool("f", "Does f.", SCHEMA, "tools[0]", strict=True),)
    assert read_tools(function("f", strict=False)).shown == (Tool("f", where="tools[0]"),)
    assert read_tools(function("f", strict=None)).shown == (Tool("f", where="tools[0]"),)
    assert read_tools(function("f")).shown == (Tool("f", where="tools[0]"),)


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
def test_freeform_tool_is_shown_with_one_string(fields: dict[str, Any], description: str) -> None:
    (tool,) = read_tools(freeform("apply_patch", **fields)).shown
    assert tool.description == description
    assert tool.parameters is not None
    assert tool.parameters["required"] == ["input"]
    assert tool.parameters["properties"]["input"]["type"] == "string"


def test_first_tool_describes_its_namespace() -> None:
    declared = namespace("crm", function("f", description="Finds."), function("g"),
                         description="The customers.")  # fmt: skip
    described = [tool.description for tool in read_tools(declared).shown]
    assert described == ["crm: The customers.\n\nFinds.", ""]


DECLARED = (
    function("f"),
    freeform("patch"),
    namespace("crm", function("find"), freeform("note"), function("shared")),
    namespace("mcp__web__", function("shared"), function("f")),
)

CALL_NAMES: list[tuple[str, DeclaredTool]] = [
    ("f", DeclaredTool("f")),
    ("patch", DeclaredTool("patch", kind="custom")),
    ("crm__find", DeclaredTool("find", "crm")),
    ("crm.find", DeclaredTool("find", "crm")),
    ("find", DeclaredTool("find", "crm")),
    ("note", DeclaredTool("note", "crm", kind="custom")),
    ("mcp__web__shared", DeclaredTool("shared", "mcp__web__")),
    ("mcp__web__f", DeclaredTool("f", "mcp__web__")),
    ("shared", DeclaredTool("shared")),  # ambiguous: the client answers the call
    ("unheard_of", DeclaredTool("unheard_of")),
]


@pytest.mark.parametrize(("name", "expected"), CALL_NAMES)
def test_call_is_mapped_to_its_tool(name: str, expected: DeclaredTool) -> None:
    assert read_tools(*DECLARED).tool(name) == expected


@pytest.mark.parametrize(
    "recipient", ["to=functions.crm__find", "to=crm.find", "to=functions.find"]
)
def test_any_form_of_recipient_leads_to_tool(recipient: str) -> None:
    tools = read_tools(*DECLARED)
    names = Names.of(Turn(messages=(User("Hi"),), tools=tools.shown))
    assert tools.tool(names.addressee(recipient.removeprefix("to="))) == DeclaredTool("find", "crm")


def test_names_that_no_header_can_carry_are_mapped() -> None:
    tools = read_tools(namespace("my crm", function("find it")))
    names = Names.of(Turn(messages=(User("Hi"),), tools=tools.shown))
    assert names.recipient("my crm__find it") == "functions.my_crm__find_it"
    tool = tools.tool(names.addressee("functions.my_crm__find_it"))
    assert tool == DeclaredTool("find it", "my crm")


ALL = ["f", "patch", "crm__find", "crm__note", "crm__shared", "mcp__web__shared", "mcp__web__f"]


def only(*allowed: dict[str, Any], **mode: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "tools": list(allowed), **mode}


CHOICES: list[tuple[Any, ToolChoice]] = [
    (None, ToolChoice()),
    ("auto", ToolChoice()),
    ({"type": "auto"}, ToolChoice()),
    ("required", ToolChoice(required=True)),
    (function("f"), ToolChoice(True, ("f",))),
    (freeform("patch"), ToolChoice(True, ("patch",))),
    (function("find", namespace="crm"), ToolChoice(True, ("crm__find",))),
    (function("find"), ToolChoice(True, ("crm__find",))),
    (function("crm.find"), ToolChoice(True, ("crm__find",))),
    (only(function("f"), mode="auto"), ToolChoice(False, ("f",))),
    (only(function("f"), mode="required"), ToolChoice(True, ("f",))),
    (only(function("f")), ToolChoice(False, ("f",))),
    (only(freeform("patch"), function("f")), ToolChoice(False, ("f", "patch"))),
    (only(function("find", namespace="crm")), ToolChoice(False, ("crm__find",))),
    (
        only({"type": "namespace", "name": "mcp__web__"}),
        ToolChoice(False, ("mcp__web__shared", "mcp__web__f")),
    ),
    (only({"type": "web_search"}, function("f")), ToolChoice(False, ("f",))),
    (only({"type": "tool_search"}), ToolChoice(False, ())),
    (only(), ToolChoice(False, ())),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_tool_choice_keeps_all_tools_shown(choice: Any, expected: ToolChoice) -> None:
    tools = read_tools(*DECLARED, choice=choice)
    assert tools.choice == expected
    assert [tool.name for tool in tools.shown] == ALL


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
def test_tool_choice_none_shows_no_tools(choice: Any) -> None:
    tools = read_tools(*DECLARED, choice=choice)
    assert tools.shown == ()
    assert tools.as_sent_back(Call("c", "find", "{}")).name == "crm__find"


REFUSED: list[tuple[list[dict[str, Any]], Any, str]] = [
    ([], "required", "tool_choice"),
    ([{"type": "web_search"}], "required", "tool_choice"),
    ([function("f")], function("g"), "tool_choice"),
    ([function("f")], {"type": "function"}, "tool_choice.name"),
    ([function("f")], {"type": "web_search"}, "tool_choice"),
    ([function("f")], {"type": "mcp", "server_label": "s"}, "tool_choice"),
    ([function("f")], "any", "tool_choice"),
    ([function("f")], only(mode="required"), "tool_choice"),
    ([function("f")], only(function("f"), mode="x"), "tool_choice"),
    ([function("f")], only(function("g"), mode="auto"), "tool_choice.tools[0]"),
    ([search(), function("f", defer_loading=True)], function("f"), "tool_choice"),
]


@pytest.mark.parametrize(("declared", "choice", "param"), REFUSED)
def test_impossible_choice_is_rejected(
    declared: list[dict[str, Any]], choice: Any, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        read_tools(*declared, choice=choice)
    assert (caught.value.param, caught.value.status) == (param, 400)


# --- Searches and what they find.


def test_client_side_search_is_a_tool() -> None:
    (tool,) = read_tools(search(description="Finds.", parameters=SCHEMA)).shown
    assert tool == Tool("tool_search", "Finds.", SCHEMA, "tools[0]")
    (tool,) = read_tools(search()).shown
    assert tool.description
    assert list((tool.parameters or {})["properties"]) == ["paths"]
    assert read_tools(search()).tool("tool_search").kind == "tool_search"


LATER = [
    function("plain", defer_loading=True, description="A plain one."),
    namespace("crm", function("find", defer_loading=True), freeform("note", defer_loading=True),
              function("ask"), description="The customers."),
    namespace("web", function("get"), defer_loading=True),
]  # fmt: skip


def test_deferred_tools_are_only_named() -> None:
    tools = read_tools(search(description="Finds."), *LATER)
    assert [tool.name for tool in tools.shown] == ["tool_search", "crm__ask"]
    assert tools.shown[0].description == (
        "Finds.\n\nThere are:\n- plain: A plain one.\n- crm: The customers.\n- web"
    )
    assert tools.shown[1].description == "crm: The customers.\n\n"
    assert tools.tool("crm__find") == DeclaredTool("find", "crm")


def test_deferred_tool_has_its_own_name() -> None:
    """The prompt would declare it as ``python_tool``, but the client reads the arguments of the
    search as the model writes them, and knows only ``python``."""
    tools = read_tools(search(description="Finds."), function("python", defer_loading=True))
    assert tools.shown[0].description == "Finds.\n\nThere are:\n- python"


@pytest.mark.parametrize("hosted", [[], [search(execution="server")], [{"type": "tool_search"}]])
def test_all_tools_are_declared_without_client_side_search(hosted: list[dict[str, Any]]) -> None:
    names = ["plain", "crm__find", "crm__note", "crm__ask", "web__get"]
    assert shown_names(*hosted, *LATER) == names


class Later:
    """A reader of several lists of tools, one after the other."""

    def __init__(self) -> None:
        self.reader = ToolReader()

    def names(self, *declared: dict[str, Any], found: bool = True) -> list[str]:
        body = validate(ResponsesBody, {"model": "m", "tools": list(declared)})
        new = self.reader.declare(body.tools or (), "input[3].tools", found=found)
        return [tool.name for tool in new]


def test_only_new_tools_are_declared_later() -> None:
    later = Later()
    crm = namespace("crm", function("find", defer_loading=True), function("note"),
                    description="The customers.")  # fmt: skip
    assert later.names(search(), function("f"), found=False) == ["tool_search", "f"]
    assert later.names(crm) == ["crm__find", "crm__note"]
    assert later.names(crm, function("f")) == []
    assert later.names(namespace("crm", function("note", strict=True))) == ["crm__note"]
    assert later.names(function("crm__find"), freeform("g")) == ["crm__find_2", "g"]
    names = later.reader.tools((), None, ServerTools(), ())
    assert names.tool("crm__find_2") == DeclaredTool("crm__find")
    assert names.tool("crm__find") == DeclaredTool("find", "crm")


@pytest.mark.parametrize(
    ("declared", "param"),
    [
        ([function("f"), freeform("f")], "tools[1]"),
        ([namespace("a", function("f")), namespace("a", function("f"))], "tools[1].tools[0]"),
    ],
)
def test_tool_declared_twice_is_rejected(declared: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_tools(*declared)
    assert caught.value.param == param


def test_calls_in_history_have_shown_name() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "find", "namespace": "crm"}
    body = {"model": "m", "input": [{"role": "user", "content": "Hi"}, call], "tools": [*DECLARED]}
    turn = read(body, Defaults(), Unusable()).turn
    assert turn.messages[1].name == "crm__find"  # type: ignore[union-attr]
