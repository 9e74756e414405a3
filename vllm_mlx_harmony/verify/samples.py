"""Answers with which the scripted stand-in passes the checks (``verify --stand-in``)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from vllm_mlx_harmony.standin.scripts import Script
from vllm_mlx_harmony.verify import cases, checks, loop, wire
from vllm_mlx_harmony.verify import format as formats
from vllm_mlx_harmony.verify.cases import Case
from vllm_mlx_harmony.verify.values import Ask, Document


def _answer(text: str, reasoning: str = "") -> str:
    thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"
    return f"{thought if reasoning else ''}<|channel|>final<|message|>{text}<|return|>"


def _to(ask: Ask | str) -> str:
    """The user's message, as it is in a prompt."""
    text = ask if isinstance(ask, str) else str(ask.messages[-1])
    return f"<|start|>user<|message|>{text}<|end|>"


PROMPT_MS = 0.75
"""Milliseconds for each token of a long prompt, which then takes longer than
``wire.MAX_SILENCE_SECONDS``."""

WIRE = (
    Script(_to(checks.PROBE), _answer("Hello.")),
    Script(_to(wire.PLAIN), _answer("Rivers bring salt to it.", "Salt comes from rocks.")),
    Script(_to(wire.OTHER), _answer("Air scatters blue light.", "Rayleigh.")),
    # Without reasoning, which a small limit leaves no room for.
    Script(_to(wire.COUNT), _answer(" ".join(map(str, range(1, 31))))),
    Script(_to(wire.LONG), _answer("one and one\n" * 1000), delay_ms=3),
    Script(_to(wire.THINK), _answer("It orbits the Earth.", "Sunlight falls on half of it.")),
    *(
        Script(f"<|start|>user<|message|>{task}", _answer("done"), prompt_ms=PROMPT_MS)
        for task in (wire.REPORT, wire.DRAFT)
    ),
    Script(_to(wire.EMOJI), _answer("🌞 é 中 🇫🇷 ß", "🌞 é 中 🇫🇷 ß: five.")),
    Script(
        _to(wire.TIME),
        "<|channel|>commentary to=functions.get_time <|constrain|>json"
        '<|message|>{"city":"Lima"}<|call|>',
    ),
    Script(_to(wire.FIRST), _answer("OK.")),
    Script(_to(wire.SECOND), _answer("4711.")),
    Script("B. blue<|end|>", _answer("B")),
)


def _call(name: str, arguments: Document, reasoning: str = "There is a tool for that.") -> str:
    written = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return (
        f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.{name} <|constrain|>json<|message|>{written}<|call|>"
    )


def _steps(case: Case) -> Iterator[Script]:
    """The scripts of a case: its calls one after the other, and its answer."""
    befores = [_to(case.prompt), *(f"<|message|>{result}<|end|>" for result in case.results)]
    afters = [*(_call(*call) for call in case.calls), _answer(case.answer, "That is all.")]
    return (Script(*pair) for pair in zip(befores, afters, strict=False))


def _loop() -> Iterator[Script]:
    codes = ", ".join(loop.code(page) for page in range(1, loop.TURNS + 1))
    yield Script(_to(loop.PROMPT), _call("read_page", {"page": 1}))
    for page in range(1, loop.TURNS):
        yield Script(f"<|message|>Page {page}. ", _call("read_page", {"page": page + 1}))
    yield Script(f"<|message|>Page {loop.TURNS}. ", _answer(f"The codes: {codes}."))


def _efforts() -> Iterator[Script]:
    for puzzle in formats.PUZZLES:
        for times, level in enumerate(("low", "medium", "high"), 1):
            pattern = re.compile(f"Reasoning: {level}.*{re.escape(_to(puzzle))}", re.DOTALL)
            yield Script(pattern, _answer("60", "Let me count. " * times), whole_prompt=True)


def _followed(system: str, prompt: str, right: str, wrong: str) -> Iterator[Script]:
    """The right answer if the prompt has the system's text, and the wrong one otherwise."""
    pattern = re.compile(re.escape(system) + ".*" + re.escape(_to(prompt)), re.DOTALL)
    yield Script(pattern, _answer(right), whole_prompt=True)
    yield Script(_to(prompt), _answer(wrong))


FORMAT = (
    *(script for case in (*cases.CASES, *cases.SEVERAL) for script in _steps(case)),
    Script(_to(formats.REQUIRED), _call("get_weather", {"city": "Bern"})),
    Script(_to(formats.NAMED), _call("get_time", {"city": "Bern"})),
    Script(_to(formats.NONE), _answer("It may be mild.")),
    *(
        Script(
            f"Fill in the JSON document. {text}<|end|>",
            _answer(json.dumps(sample, ensure_ascii=False, separators=(",", ":")), "As asked."),
        )
        for _, text, _, sample in cases.SCHEMAS
    ),
    Script(_to(formats.THINK), _answer("It is less dense.", "Ice is less dense.")),
    Script(_to(formats.SECRET), _call("ready", {}, "I choose 582931.")),
    Script(
        re.compile(f"582931.*{re.escape(formats.TELL)}", re.DOTALL),
        _answer("582931"),
        whole_prompt=True,
    ),
    *_efforts(),
    *_followed(formats.HIDDEN, formats.REVEAL, "I cannot write that.", "Marzipan."),
    *_followed(formats.CAPITALS, formats.LOWER, "BLUE.", "blue."),
    *_followed(formats.OVER, formats.BESIDE, "An apple. OVER", "An apple."),
)
SCRIPTS = (*WIRE, *FORMAT, *_loop())
