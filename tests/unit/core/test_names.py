"""Tool names as recipients, and recipients as tool names (semantics A10; B, "Recipient")."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.names import Names, valid_name
from vllm_mlx_harmony.core.turn import (
    AdditionalTools,
    Call,
    Namespace,
    Tool,
    ToolChoice,
    Turn,
    User,
)


def names_of(*tools: str, called: tuple[str, ...] = (), builtin: tuple[str, ...] = ()) -> Names:
    calls = tuple(Call(str(at), name, "{}") for at, name in enumerate(called))
    return Names.of(Turn((User("?"), *calls), tuple(map(Tool, tools)), builtin_tools=builtin))


@pytest.mark.parametrize(
    ("tools", "name", "alias"),
    [
        (("get_weather",), "get_weather", "get_weather"),
        (("get-weather.v2",), "get-weather.v2", "get-weather.v2"),
        (("mcp__fs__read",), "mcp__fs__read", "mcp__fs__read"),
        (("get the weather",), "get the weather", "get_the_weather"),
        (("get the weather", "get_the_weather"), "get the weather", "get_the_weather_2"),
        (("a b", "a<b", "a=b"), "a=b", "a_b_3"),
        (("天気",), "天気", "tool"),
        (("天気", "晴れ"), "晴れ", "tool_2"),
        ((".x.",), ".x.", "x"),
        (("a..b",), "a..b", "a_b"),
        (("<|call|>",), "<|call|>", "call"),
        ((" ",), " ", "tool"),
        (("n" * 242,), "n" * 242, "n" * 242),
        (("n" * 243,), "n" * 243, "n" * 242),
        (("n" * 243, "n" * 244), "n" * 244, "n" * 240 + "_2"),
        # Names of gpt-oss's trained tools are reserved for those.
        (("python",), "python", "python_tool"),
        (("browser",), "browser", "browser_tool"),
        (("browser.search",), "browser.search", "browser_search"),
        (("browser.open", "browser_open"), "browser.open", "browser_open_2"),
        (("container",), "container", "container_tool"),
        (("container.exec",), "container.exec", "container_exec"),
        (("bash",), "bash", "bash_tool"),
        (("python_tool", "python"), "python", "python_tool_2"),
        (("python.run it",), "python.run it", "python_run_it"),
        (("Python",), "Python", "Python"),
        (("Bash",), "Bash", "Bash"),
        (("bash.run",), "bash.run", "bash.run"),
        (("python3",), "python3", "python3"),
        (("browser_use",), "browser_use", "browser_use"),
    ],
)
def test_name_has_alias_that_fits_header(tools: tuple[str, ...], name: str, alias: str) -> None:
    names = names_of(*tools)
    assert names.alias(name) == alias
    assert names.recipient(name) == f"functions.{alias}"
    assert names.addressee(f"functions.{alias}") == name


def test_later_call_does_not_change_alias() -> None:
    before = names_of("a b")
    after = names_of("a b", called=("a_b", "c d"))
    assert after.alias("a b") == before.alias("a b") == "a_b"
    assert after.alias("a_b") == "a_b_2"
    assert after.addressee("functions.a_b_2") == "a_b"


@pytest.mark.parametrize(
    ("builtin", "tools", "called", "recipient"),
    [
        (("python",), (), "python", "python"),
        (("browser",), (), "browser.open", "browser.open"),
        (("browser",), ("browser.open",), "browser.open", "functions.browser_open"),
        ((), (), "python", "functions.python"),
        ((), (), "container.exec", "functions.container.exec"),
    ],
)
def test_built_in_tools_are_addressed_by_their_own_name(
    builtin: tuple[str, ...], tools: tuple[str, ...], called: str, recipient: str
) -> None:
    names = names_of(*tools, called=(called,), builtin=builtin)
    assert names.recipient(called) == recipient
    assert names.addressee(recipient) == called


@pytest.mark.parametrize("builtin", [(), ("python",)], ids=["alone", "beside the built-in"])
@pytest.mark.parametrize("recipient", ["functions.python_tool", "python_tool", "functions.python"])
def test_declared_and_built_in_tools_keep_their_names(
    builtin: tuple[str, ...], recipient: str
) -> None:
    names = names_of("python", builtin=builtin)
    assert names.recipient("python") == "functions.python_tool"
    assert names.addressee(recipient) == names.addressee("python") == "python"
    assert names.is_tool(recipient)
    assert not names.is_server_tool(recipient)


SEARCH = Namespace("browser", (Tool("search"),))
CODE = Namespace("python", (Tool("python"),))
MAIN = Namespace("main", (Tool("run"),))

BESIDE_SERVERS = [
    # a function; a recipient; the name of the tool; whether the server runs it
    ("main", "functions.main", "main", False),
    ("main", "main", "main", False),
    ("main", "main.run", "main.run", True),
    ("main", "functions.main.run", "main.run", True),
    ("main", "functions.run", "main.run", True),
    ("python", "python", "python", True),
    ("python", "functions.python_tool", "python", False),
    ("python", "python_tool", "python", False),
    ("python", "functions.python", "python", False),
    ("browser.search", "browser.search", "browser.search", True),
    ("browser.search", "functions.browser_search", "browser.search", False),
    ("browser.search", "functions.browser.search", "browser.search", False),
    ("browser", "browser.search", "browser.search", True),
    ("browser", "functions.browser_tool", "browser", False),
]


@pytest.mark.parametrize(("function", "recipient", "name", "is_server_tool"), BESIDE_SERVERS)
def test_function_and_server_of_same_name_are_told_apart(
    function: str, recipient: str, name: str, is_server_tool: bool
) -> None:
    turn = Turn((User("?"),), (Tool(function),), namespaces=(SEARCH, CODE, MAIN))
    names = Names.of(turn)
    assert names.addressee(recipient) == name
    assert names.is_server_tool(recipient) is is_server_tool
    assert names.is_tool(recipient)


def test_client_call_in_history_does_not_hide_server() -> None:
    names = Names.of(Turn((User("?"), Call("1", "python", "{}")), namespaces=(CODE,)))
    assert (names.addressee("python"), names.is_server_tool("python")) == ("python", True)


def test_later_declared_function_has_an_alias() -> None:
    later = AdditionalTools((Tool("python"), Tool("later")))
    names = Names.of(Turn((User("?"), Call("1", "python", "{}"), later)))
    assert names.recipient("python") == "functions.python_tool"
    assert names.addressee("functions.python_tool") == "python"


def test_ambiguous_choice_is_rejected() -> None:
    turn = Turn((User("?"),), (Tool("python"),), namespaces=(CODE,))
    Names.of(turn)
    with pytest.raises(RequestError) as caught:
        Names.of(replace(turn, tool_choice=ToolChoice(True, ("python",))))
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("name", "used", "expected"),
    [
        ("now", (), "now"),
        ("get-now.v2", (), "get-now.v2"),
        ("later?", (), "later"),
        ("später heute", (), "sp_ter_heute"),
        ("?", (), "tool"),
        ("now", ("now",), "now_2"),
        ("later?", ("later", "later_2"), "later_3"),
    ],
)
def test_valid_name_fits_header(name: str, used: tuple[str, ...], expected: str) -> None:
    used_names = set(used)
    assert valid_name(name, used_names) == expected
    assert used_names == {*used, expected}


@pytest.mark.parametrize("tools", [("x", "x"), ("",)])
def test_indistinguishable_names_are_rejected(tools: tuple[str, ...]) -> None:
    declared = tuple(Tool(name, where=f"tools[{at}]") for at, name in enumerate(tools))
    with pytest.raises(RequestError) as caught:
        Names.of(Turn((User("?"),), declared))
    assert caught.value.param == f"tools[{len(tools) - 1}]"


@given(tools=st.lists(st.text(min_size=1), unique=True, max_size=8))
def test_recipient_of_declared_name_leads_back_to_it(tools: list[str]) -> None:
    names = names_of(*tools)
    recipients = [names.recipient(name) for name in tools]
    assert [names.addressee(recipient) for recipient in recipients] == tools
    assert all(recipient.isascii() and " " not in recipient for recipient in recipients)


@pytest.mark.parametrize(
    "tools",
    [
        [f"a{'!' * at}b" for at in range(1, 8_001)],
        ["é" * at for at in range(1, 8_001)],
        [f"{'n' * 240}{chr(65 + at // 64 % 26)}{chr(97 + at % 26)}{at}" for at in range(8_000)],
    ],
    ids=["alike", "nothing left", "longer than a header can carry"],
)
def test_similar_names_take_linear_time(tools: list[str]) -> None:
    lookups = 0

    class Counting(set[str]):
        def __contains__(self, name: object) -> bool:
            nonlocal lookups
            lookups += 1
            return super().__contains__(name)

    used, numbers = Counting(), dict[str, int]()
    aliases = [valid_name(name, used, numbers) for name in tools]
    assert len(set(aliases)) == len(tools)
    assert lookups <= 2 * len(tools)
