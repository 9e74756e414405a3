"""Faults for the checks of the format and the loop: only the check in question fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from faulty_server import Fault, Request, outcomes, run_faulty_server

from vllm_mlx_harmony.verify import checks, loop
from vllm_mlx_harmony.verify import format as formats
from vllm_mlx_harmony.verify.cases import CASES, SCHEMAS, SEVERAL

APIS = ("chat", "responses", "messages")
FORECAST = next(case for case in CASES if case.name == "call-forecast")
GREETING = next(case for case in CASES if case.name == "no-call-greeting")


def passed(url: str, *only: str) -> dict[str, bool]:
    return {name: outcome.state == "passed" for name, outcome in outcomes(url, *only).items()}


# --- Prompts that are swapped for others

PROMPTS = {
    **{case.name: case.prompt for case in CASES},
    **{f"calls-{case.name}": case.prompt for case in SEVERAL},
    **{f"schema-{name}": text for name, text, *_ in SCHEMAS},
    "choice-required": formats.REQUIRED,
    "choice-named": formats.NAMED,
    "reasoning-kept": formats.SECRET,
    "system-hierarchy": formats.LOWER,
    "system-beside-tools": formats.BESIDE,
}


def escape(text: str) -> str:
    return json.dumps(text)[1:-1]


def test_each_check_has_prompt() -> None:
    others = {"choice-none", "reasoning-returned", "reasoning-effort"}  # have a fault below
    assert {*PROMPTS, *others} == {name for name, *_ in formats.ROWS}


@pytest.mark.nightly(sample=6)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("api", APIS)
def test_only_checks_of_swapped_prompts_fail(api: str, half: int) -> None:
    broken = {name: text for at, (name, text) in enumerate(PROMPTS.items()) if at % 2 == half}

    def swap(body: Request) -> None:
        text = json.dumps(body)
        for name, prompt in broken.items():
            other = FORECAST.prompt if name.startswith("no-call") else GREETING.prompt
            text = text.replace(escape(prompt), escape(other))
        body.clear()
        body.update(json.loads(text))

    with run_faulty_server(Fault(lambda method, path, body: "model" in body, request=swap)) as url:
        results = passed(url, f"format.{api}")
    failing = {name.split(".")[2] for name, right in results.items() if not right}
    assert failing == set(broken)


# --- Other faults


def recursively(change: Callable[[Any], Any]) -> Callable[[Request], None]:
    """Changes every object within a request."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return change({name: walk(item) for name, item in value.items()})
        return [walk(item) for item in value] if isinstance(value, list) else value

    def changed(body: Request) -> None:
        new = walk(body)
        body.clear()
        body.update(new)

    return changed


def without(*names: str) -> Callable[[Any], Any]:
    return lambda mapping: {name: value for name, value in mapping.items() if name not in names}


def thoughtless(value: Any) -> Any:
    """Removes reasoning from a history, in any API."""
    value = without("reasoning", "reasoning_content")(value) if "role" in value else value
    for name in ("input", "content"):
        if isinstance(value.get(name), list):
            kinds = ("reasoning", "thinking")
            value[name] = [part for part in value[name] if part.get("type") not in kinds]
    for name in (
        "id",
        "call_id",
        "tool_call_id",
        "tool_use_id",
    ):  # or the server recognizes the turn
        if isinstance(value.get(name), str):
            value[name] += "0"
    return value


def ignorant(value: Any) -> Any:
    """Removes the system prompt, in any API."""
    if isinstance(value.get("messages"), list):
        value["messages"] = [
            message for message in value["messages"] if message["role"] != "system"
        ]
    return without("system", "instructions")(value)


def no_code(value: Any) -> Any:
    """Removes the code from the last page, which changes the final answer."""
    text = json.dumps(value)
    return json.loads(re.sub(rf"Page {loop.TURNS}\. ", "Nothing. ", text))


def cut(body: Request) -> None:
    """Limits the answer to fewer tokens than the call has."""
    name = "max_output_tokens" if "input" in body else "max_tokens"
    body[name] = 30


def uncached(text: str) -> str:
    names = "cached_tokens|cache_read_input_tokens"
    return re.sub(rf'"({names})": ?\d+', r'"\1":0', text)


def unreasoned(text: str) -> str:
    text = re.sub(r'"(reasoning|reasoning_content|thinking)": ?"(?:[^"\\]|\\.)*"', r'"\1":""', text)
    reasoning = r'("type": ?"reasoning_text",\s*"text": ?)"(?:[^"\\]|\\.)*"'
    return re.sub(reasoning, r'\1""', text)


ANY: Callable[..., bool] = lambda method, path, body: method == "POST"  # noqa: E731


def reply(change: Callable[[str], str]) -> Callable[[Any], Any]:
    return lambda response: type(response)(response.status, change(response.text))


KINDS: dict[str, tuple[Fault, set[str]]] = {
    "reasoning is not returned": (
        Fault(
            lambda method, path, body: formats.THINK in json.dumps(body),
            reply=reply(unreasoned),
        ),
        {"format.reasoning-returned"},
    ),
    "reasoning is not sent back": (
        Fault(ANY, request=recursively(thoughtless)),
        {"format.reasoning-kept"},
    ),
    "effort is ignored": (
        Fault(ANY, request=recursively(without("effort", "reasoning_effort"))),
        {"format.reasoning-effort"},
    ),
    "the system prompt is lost": (
        Fault(ANY, request=recursively(ignorant)),
        {"format.system-hierarchy", "format.system-beside-tools"},
    ),
    "tool_choice is ignored": (
        Fault(
            lambda method, path, body: formats.NONE in json.dumps(body),
            request=lambda body: body.update(
                json.loads(
                    json.dumps({**body, "tool_choice": None}).replace(formats.NONE, FORECAST.prompt)
                )
            ),
        ),
        {"format.choice-none"},
    ),
    "arguments are cut": (
        Fault(
            lambda method, path, body: FORECAST.prompt in json.dumps(body),
            request=cut,
        ),
        {"format.call-forecast"},
    ),
    "nothing is counted as cached": (Fault(ANY, reply=reply(uncached)), {"loop.cached"}),
    "the last result is lost": (Fault(ANY, request=recursively(no_code)), {"loop.remembers"}),
}


BESIDE = ("choice-*", "reasoning-*", "system-*", "call-forecast", "remembers", "cached")
"""The checks that run with each of these faults."""


@pytest.mark.nightly(sample=8)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("kind", KINDS)
def test_fault_fails_only_its_checks(kind: str, api: str) -> None:
    fault, expected = KINDS[kind]
    with run_faulty_server(fault) as url:
        results = passed(url, *(f"*.{api}.{names}" for names in BESIDE))
    failing = {name.replace(f".{api}", "") for name, right in results.items() if not right}
    assert failing == expected


# --- Repetition


def test_repeated_checks_count_each_run() -> None:
    calls = []

    def every_other(method: str, path: str, body: Request) -> bool:
        meant = FORECAST.prompt in json.dumps(body)
        calls.append(meant)
        return meant and calls.count(True) % 2 == 0

    fault = Fault(every_other, request=cut)
    with run_faulty_server(fault) as url:
        results = outcomes(url, "format.chat.call-forecast", "wire.chat.bad-json", repeat=4)
    forecast, other = results["format.chat.call-forecast"], results["wire.chat.bad-json"]
    assert (forecast.state, forecast.passed, forecast.runs) == ("failed", 2, 4)
    assert "arguments that are not JSON" in forecast.problem and forecast.received
    assert (other.state, other.passed, other.runs) == ("passed", 1, 1)


@pytest.mark.parametrize(
    ("only", "count"),
    [
        ((), None),
        (("wire.chat",), 25),
        (("*.stop",), 2),
        (("wire.chat.stop", "loop"), 7),
        (("x",), 0),
    ],
)
def test_only_selects_checks(only: tuple[str, ...], count: int | None) -> None:
    from vllm_mlx_harmony.verify.suite import CHECKS

    assert len(checks.chosen(CHECKS, only)) == (len(CHECKS) if count is None else count)
