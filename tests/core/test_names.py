"""Tool names both ways (semantics A10; B, "Recipient")."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx_harmony.core import names as module
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.names import Names, carryable
from vllm_mlx_harmony.core.turn import Call, Tool, Turn, User


def names(*tools: str, called: tuple[str, ...] = (), builtin: tuple[str, ...] = ()) -> Names:
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
    ],
)
def test_alias(tools: tuple[str, ...], name: str, alias: str) -> None:
    found = names(*tools)
    assert found.alias(name) == alias
    assert found.recipient(name) == f"functions.{alias}"
    assert found.addressee(f"functions.{alias}") == name


def test_an_alias_never_changes_by_a_later_call() -> None:
    before = names("a b")
    after = names("a b", called=("a_b", "c d"))
    assert after.alias("a b") == before.alias("a b") == "a_b"
    assert after.alias("a_b") == "a_b_2"
    assert after.addressee("functions.a_b_2") == "a_b"


@pytest.mark.parametrize(
    ("builtin", "tools", "called", "recipient"),
    [
        (("python",), (), "python", "python"),
        (("browser",), (), "browser.open", "browser.open"),
        (("browser",), ("browser.open",), "browser.open", "functions.browser.open"),
        ((), (), "python", "functions.python"),
    ],
)
def test_built_in_tools_are_addressed_by_their_own_name(
    builtin: tuple[str, ...], tools: tuple[str, ...], called: str, recipient: str
) -> None:
    found = names(*tools, called=(called,), builtin=builtin)
    assert found.recipient(called) == recipient
    assert found.addressee(recipient) == called


def test_a_client_knows_a_declared_tool_and_a_built_in_one_by_the_same_name() -> None:
    found = names("python", builtin=("python",))
    assert found.recipient("python") == "functions.python"
    assert found.addressee("python") == found.addressee("functions.python") == "python"


@pytest.mark.parametrize(
    ("name", "taken", "carried"),
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
def test_a_name_that_a_header_can_carry(name: str, taken: tuple[str, ...], carried: str) -> None:
    known = set(taken)
    assert carryable(name, known) == carried
    assert known == {*taken, carried}


@pytest.mark.parametrize("tools", [("x", "x"), ("",)])
def test_names_that_cannot_be_told_apart(tools: tuple[str, ...]) -> None:
    declared = tuple(Tool(name, where=f"tools[{at}]") for at, name in enumerate(tools))
    with pytest.raises(RequestError) as caught:
        Names.of(Turn((User("?"),), declared))
    assert caught.value.param == f"tools[{len(tools) - 1}]"


@given(tools=st.lists(st.text(min_size=1), unique=True, max_size=8))
def test_every_declared_name_comes_back(tools: list[str]) -> None:
    found = names(*tools)
    recipients = [found.recipient(name) for name in tools]
    assert [found.addressee(recipient) for recipient in recipients] == tools
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
def test_thousands_of_names_that_are_alike_take_as_many_tries(tools: list[str]) -> None:
    tried = 0

    class Counting(set[str]):
        def __contains__(self, name: object) -> bool:
            nonlocal tried
            tried += 1
            return super().__contains__(name)

    taken, numbers = Counting(), dict[str, int]()
    aliases = [module._alias(name, taken, numbers) for name in tools]
    assert len(set(aliases)) == len(tools)
    assert tried <= 2 * len(tools)
