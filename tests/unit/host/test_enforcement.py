"""What is asked for is what comes: random weights, and models that want something else, on our
engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai_harmony import Role
from spellings_of_json import respelled
from tool_shapes import DIALECTS, SHAPES, fitting, schema_of

pytest.importorskip("vllm_mlx")
pytest.importorskip("mlx_lm")

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import reasoning, vocab
from vllm_mlx_harmony.core.constraint import Constraint, ConstraintSpec
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.deltas import Closed, Finished, Kind, Opened, Text
from vllm_mlx_harmony.core.errors import HostError, OutputError, RequestError
from vllm_mlx_harmony.core.turn import Defaults, ResponseInfo, Turn, User
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings
from vllm_mlx_harmony.host import metrics
from vllm_mlx_harmony.host.adapter import VllmMlx
from vllm_mlx_harmony.host.vllm_mlx_engine import HarmonyEngine
from vllm_mlx_harmony.server import enforcement, generation
from vllm_mlx_harmony.server.chat import CHAT
from vllm_mlx_harmony.server.front_end import Caller, FrontEnd
from vllm_mlx_harmony.server.messages import MESSAGES
from vllm_mlx_harmony.server.responses.routes import RESPONSES
from vllm_mlx_harmony.server.settings import Enforcement, ServerSettings
from vllm_mlx_harmony.server.storage.single_server import SingleServer
from vllm_mlx_harmony.server.storage.store import MemoryStore
from vllm_mlx_harmony.standin import Script

SEEDS = int(os.environ.get("GRAMMAR_SEEDS", "2"))
"""Outputs of each kind and engine. The leg ``grammar`` of CI runs all 500."""

PARTS = range(min(SEEDS, 4))
"""Of the outputs, so that several processes can share them: `pytest -n 2`."""

TOGETHER = 16
WIDTH = 4
"""Of the model with random weights: a step is mostly its product with 201,088 ids, and the draw."""

WEATHER: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Köln"]},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
LIGHT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "room": {"type": ["string", "null"]}},
    "required": ["on", "room"],
    "additionalProperties": False,
}
REPORT: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/step"}, {"type": "null"}]},
    },
    "required": ["title", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "step": {
            "type": "object",
            "properties": {"what": {"type": "string"}},
            "required": ["what"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS = {"weather": WEATHER, "light": LIGHT}
WORD = "[a-z]{2,6}(-[a-z]{2,6})*"

# --- The kinds of requests, as each API writes them.

Body = dict[str, Any]
TEXT = "Hello."


def chat(**more: Any) -> Body:
    return {"model": "m", "messages": [{"role": "user", "content": TEXT}], **more}


def responses(**more: Any) -> Body:
    return {"model": "m", "input": TEXT, **more}


def messages(**more: Any) -> Body:
    asked = [{"role": "user", "content": TEXT}]
    return {"model": "m", "max_tokens": 500, "messages": asked, **more}


def functions(*, strict: bool = False) -> list[Body]:
    """As the Responses API has them; Chat nests the same under ``function``."""
    return [
        {"type": "function", "name": name, "parameters": schema, "strict": strict}
        for name, schema in SCHEMAS.items()
    ]


def nested(tools: list[Body]) -> list[Body]:
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in tools
    ]


def schemed() -> list[Body]:
    return [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]


FORMAT = {"name": "report", "schema": REPORT, "strict": True}
SYNTAX = {"syntax": "regex", "definition": WORD}

KINDS: dict[str, tuple[Body, Body, Body]] = {
    "plain": (chat(), responses(), messages()),
    "auto": (
        chat(tools=nested(functions())),
        responses(tools=functions()),
        messages(tools=schemed()),
    ),
    "required": (
        chat(tools=nested(functions()), tool_choice="required"),
        responses(tools=functions(), tool_choice="required"),
        messages(tools=schemed(), tool_choice={"type": "any"}),
    ),
    "named": (
        chat(
            tools=nested(functions(strict=True)),
            tool_choice={"type": "function", "function": {"name": "light"}},
        ),
        responses(tools=functions(), tool_choice={"type": "function", "name": "light"}),
        messages(tools=schemed(), tool_choice={"type": "tool", "name": "light"}),
    ),
    "schema": (
        chat(response_format={"type": "json_schema", "json_schema": FORMAT}),
        responses(text={"format": {"type": "json_schema", **FORMAT}}),
        messages(output_config={"format": {"type": "json_schema", "schema": REPORT}}),
    ),
    "schema with tools": (
        chat(
            tools=nested(functions()),
            response_format={"type": "json_schema", "json_schema": FORMAT},
        ),
        responses(tools=functions(), text={"format": {"type": "json_schema", **FORMAT}}),
        messages(
            tools=schemed(), output_config={"format": {"type": "json_schema", "schema": REPORT}}
        ),
    ),
    "none": (
        chat(tools=nested(functions()), tool_choice="none", reasoning_effort="none"),
        responses(tools=functions(), tool_choice="none", reasoning={"effort": "none"}),
        messages(tools=schemed(), tool_choice={"type": "none"}, thinking={"type": "disabled"}),
    ),
    "budget": (
        chat(tools=nested(functions()), thinking_token_budget=5),
        responses(tools=functions(), thinking_token_budget=5),
        messages(tools=schemed(), thinking={"type": "enabled", "budget_tokens": 1024}),
    ),
    "custom": (
        chat(
            tools=[
                {
                    "type": "custom",
                    "custom": {"name": "say", "format": {"type": "grammar", "grammar": SYNTAX}},
                }
            ],
            tool_choice="required",
        ),
        responses(
            tools=[{"type": "custom", "name": "say", "format": {"type": "grammar", **SYNTAX}}],
            tool_choice="required",
        ),
        messages(tools=schemed(), tool_choice={"type": "any"}, thinking={"type": "disabled"}),
    ),
}
APIS = (CHAT, RESPONSES, MESSAGES)
SHARING = SingleServer(MemoryStore())
CALLER = Caller(FrontEnd(VllmMlx(), ServerSettings(), SHARING), "tenant")


@dataclass(frozen=True)
class Job:
    kind: str
    seed: int
    max_tokens: int = 300

    @property
    def drawn_from(self) -> int:
        """A seed of its own: what is alike in two kinds would be drawn alike from the same one."""
        return self.seed * len(KINDS) + list(KINDS).index(self.kind)

    @property
    def document(self) -> Body:
        return KINDS[self.kind][self.seed % 3]

    @property
    def api(self) -> Any:
        return APIS[self.seed % 3]


# --- Engines.


pytestmark = pytest.mark.usefixtures("patient_checks")

Run = Callable[[Coroutine[Any, Any, Any]], Any]

PROSE = "<|channel|>final<|message|>No, I would rather talk about it.<|return|>"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
WANTS = {
    "prose": PROSE,
    "a call": f'{CALL}{{"city":"Rome","days":3}}<|call|>',
    "wrong arguments": f'{CALL}{{"days":"many","town":[1,2]}}<|call|>',
    "another tool": "<|channel|>commentary to=functions.rm<|message|>{}<|call|>",
    "no end": "<|channel|>analysis<|message|>" + " and then," * 200,
    "a loop": "<|channel|>analysis<|message|>" + " Wait, what did they ask me?" * 60,
}
SCRIPTS = [Script(f">{name}<", generate_output) for name, generate_output in WANTS.items()]


@dataclass(frozen=True)
class Written:
    """A valid call of a tool without ``strict``, in an order and a spelling of its own."""

    name: str
    schema: Mapping[str, Any]
    arguments: str


def written() -> Iterator[Written]:
    """Of 100 schemas as libraries write them; of three if few outputs are drawn."""
    chance = random.Random(22)
    of_libraries = [(shape, dialect) for shape in SHAPES for dialect in DIALECTS]
    count = min(max(SEEDS, 3), 100)
    for number, (name, dialect) in enumerate(chance.sample(of_libraries, count)):
        value = fitting(SHAPES[name], dialect, chance)
        schema = schema_of(SHAPES[name], dialect)
        # Not by the name of the shape: the model calls a tool whose name is not ASCII by an alias.
        yield Written(f"tool_{number}", schema, respelled(value, chance))


CALLS = list(written())
SCRIPTS += [
    Script(
        f">{one.name}<",
        f"<|channel|>commentary to=functions.{one.name} <|constrain|>json<|message|>"
        f"{one.arguments}<|call|>",
    )
    for one in CALLS
]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    limit = 600 + 60 * SEEDS  # so that nothing waits for ever
    yield lambda test: loop.run_until_complete(asyncio.wait_for(test, limit))
    loop.close()


def started(directory: Path, run: Run) -> Iterator[HarmonyEngine]:
    engine = HarmonyEngine(str(directory))
    run(engine.start())
    yield engine
    run(engine.stop())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[HarmonyEngine]:
    directory = standin.write_tiny(tmp_path_factory.mktemp("tiny"), width=WIDTH)
    yield from started(directory, run)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[HarmonyEngine]:
    directory = standin.write(tmp_path_factory.mktemp("scripted"), SCRIPTS)
    yield from started(directory, run)


# --- One answer.


@dataclass
class Said:
    """What came of a request: ids, messages, and its answer as the API writes it."""

    turn: Turn
    ids: list[int]
    messages: list[tuple[Kind, str, str, bool]] = field(default_factory=list)
    finished: Finished | None = None
    result: Any = None
    constraint: Constraint | None = None

    @property
    def last(self) -> tuple[Kind, str, str, bool]:
        return self.messages[-1]

    @property
    def reasoned(self) -> int:
        assert self.finished is not None
        return self.finished.usage.reasoning_tokens


async def generate_output(
    engine: Any, api: Any, document: Body, settings: GenerationSettings
) -> Said:
    asked = api.read(document, Defaults(), CALLER)
    info = ResponseInfo("0123456789abcdef0123456789abcdef", 0, "m")
    context = StreamingHarmonyContext(asked.turn, info)
    wanted = Enforcement.of(ServerSettings.read())
    if (budget := VllmMlx().reasoning_tokens) is not None:
        wanted = replace(wanted, reasoning_tokens=budget)
    constraint = await enforcement.constraint_for(asked.turn, context.names, wanted)
    emitter = api.emitter(asked, info, context, CALLER)
    found = Said(asked.turn, [], constraint=constraint)
    deltas = list(context.start())
    finish = None
    prompt = context.render_for_completion()
    generated = engine.engine.generate(GenerationRequest(prompt, settings, "tenant", constraint))
    async with aclosing(generated) as steps:
        async for step in steps:
            generation.check(constraint)
            found.ids += step.ids
            finish = step.finish
            deltas += context.append_output(step.ids)
            if context.done:
                break
    deltas += context.finish(finish or "stop")
    for delta in deltas:
        emitter.feed(delta)
        if isinstance(delta, Opened):
            found.messages.append((delta.kind, delta.name, "", False))
        elif isinstance(delta, Text):
            kind, name, text, _ = found.messages[-1]
            found.messages[-1] = kind, name, text + delta.text, False
        elif isinstance(delta, Closed):
            found.messages[-1] = (*found.messages[-1][:3], delta.complete)
        elif isinstance(delta, Finished):
            found.finished = delta
    found.result = emitter.result()
    return found


ENDS = [vocab.END, vocab.CALL, vocab.RETURN, vocab.MESSAGE]
CLOSERS = [token for text in ('"', "}", '"}', "]}", "]") for token in vocab.encoding().encode(text)]
SPACES = [
    token for token in range(vocab.CONTROL.start) if not vocab.token_bytes(token).strip(b" \t\r\n")
]
TO_AN_END = (
    *((token, 10.5) for token in dict.fromkeys([*ENDS, *CLOSERS])),
    *((token, -6.0) for token in SPACES),
)
"""Random weights rarely come to an end: it is a few words away. Where JSON may have white space,
hundreds of ids have nothing else, and there are few others: half of all output would be that."""


FILTERS: Sequence[Mapping[str, Any]] = (
    {"top_p": 0.7},
    {"min_p": 0.05, "repetition_penalty": 1.3},
    {"top_k": 3, "presence_penalty": 2.0},
)
"""What meets masks in every twentieth output each; a ``top_p`` takes longer than all the rest."""


def drawn(job: Job) -> GenerationSettings:
    """At random, as it is or filtered."""
    settings = GenerationSettings(
        job.max_tokens, 1.0, 1.0, logit_bias=TO_AN_END, seed=job.drawn_from
    )
    turn = job.seed // 3 % 20
    return replace(settings, **FILTERS[turn - 1]) if 1 <= turn <= len(FILTERS) else settings


async def all_said(engine: Any, jobs: Sequence[Job]) -> list[Said]:
    """One begins where another has ended."""
    limit = asyncio.Semaphore(TOGETHER)

    async def one(job: Job) -> Said:
        async with limit:
            return await generate_output(engine, job.api, job.document, drawn(job))

    return list(await asyncio.gather(*map(one, jobs)))


def check(job: Job, found: Said) -> None:
    """That a whole output is what was asked for, and what openai-harmony reads in it."""
    assert found.finished is not None
    if not found.messages and job.kind in ("plain", "auto", "none", "budget"):
        return  # an answer may be empty: it then says nothing at all
    *before, (kind, name, text, complete) = found.messages
    assert complete and all(each[3] for each in before)
    assert {each[0] for each in before} <= {Kind.REASONING, Kind.PREAMBLE}
    strictly = vocab.encoding().parse_messages_from_completion_tokens(found.ids, Role.ASSISTANT)
    shown = ["".join(part.text for part in message.content) for message in strictly]
    assert [each for each in shown if each] == [each[2] for each in found.messages if each[2]]
    wanted = job.kind
    if kind is Kind.CALL:
        assert found.finished.reason == "tool_calls"
        assert wanted not in ("plain", "none", "schema")
        arguments = json.loads(text)
        if name == "say":
            jsonschema.validate(arguments["input"], {"type": "string", "pattern": f"^{WORD}$"})
        else:
            jsonschema.validate(arguments, dict(SCHEMAS[name]))
    else:
        assert found.finished.reason == "stop"
        assert wanted not in ("required", "named", "custom")
        if kind is not Kind.ANSWER:  # an empty answer is not told
            assert not wanted.startswith("schema") and found.ids[-1] == vocab.RETURN
        if wanted.startswith("schema"):
            assert not any(each[0] is Kind.PREAMBLE for each in before)
            jsonschema.validate(json.loads(text), dict(REPORT))
    if wanted == "named":
        assert name == "light"
    if wanted == "none":
        assert not found.reasoned
    if wanted == "budget" and job.seed % 3 != 2:
        assert found.reasoned <= 5 + enforcement_grace()


def enforcement_grace() -> int:
    from vllm_mlx_harmony.core.reasoning import GRACE

    return GRACE + 1


def figures(jobs: Sequence[Job], outputs: Sequence[Said]) -> int:
    """How many have come to an end. Prints how many of each kind have."""
    finished: Counter[str] = Counter()
    for job, found in zip(jobs, outputs, strict=True):
        finished[job.kind] += found.finished is not None and found.finished.reason != "length"
    of_each = Counter(job.kind for job in jobs)
    print(*(f"{kind}: {finished[kind]} of {of_each[kind]} ended" for kind in KINDS), sep="\n")
    print(sum(len(found.ids) for found in outputs), "ids")
    return finished.total()


def checked(job: Job, found: Said) -> None:
    """``check``, which names the output that fails it."""
    try:
        check(job, found)
    except Exception as error:
        raise AssertionError(f"{job}: {vocab.encoding().decode(found.ids)}") from error


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("part", PARTS)
def test_drawn_output_conforms(tiny: Any, run: Run, part: int) -> None:
    jobs = [Job(kind, seed) for seed, kind in product(range(part, SEEDS, len(PARTS)), KINDS)]
    outputs = run(all_said(tiny, jobs))
    for job, found in zip(jobs, outputs, strict=True):
        assert found.constraint is not None and not found.constraint.failure
        if found.finished and found.finished.reason != "length":
            checked(job, found)
    assert figures(jobs, outputs) > 0.8 * len(jobs)


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("part", PARTS)
def test_limits_cut_anywhere(tiny: Any, run: Run, part: int) -> None:
    jobs = [
        Job(kind, seed, random.Random(f"{seed} {kind}").randrange(1, 40))
        for seed, kind in product(range(part, SEEDS, len(PARTS)), KINDS)
    ]
    outputs = run(all_said(tiny, jobs))
    figures(jobs, outputs)
    for job, found in zip(jobs, outputs, strict=True):
        assert len(found.ids) <= job.max_tokens
        assert found.finished is not None
        if found.finished.reason != "length":
            checked(job, found)
            continue
        assert len(found.ids) == job.max_tokens
        document = json.dumps(found.result)
        assert "<|" not in document and "functions." not in document
        if job.kind in ("plain", "none", "schema"):
            assert not any(each[0] is Kind.CALL for each in found.messages)
        if job.kind in ("required", "named", "custom"):
            assert not any(each[0] is Kind.ANSWER and each[2] for each in found.messages)


@pytest.mark.nightly
def test_other_requests_do_not_change_an_output(tiny: Any, run: Run) -> None:
    jobs = [Job(kind, 3, 100) for kind in ("required", "schema", "plain", "custom")]
    together = run(all_said(tiny, jobs))
    alone = [run(all_said(tiny, [job]))[0] for job in jobs]
    assert [each.ids for each in together] == [each.ids for each in alone]


# --- A model that wants something else.

FREE = GenerationSettings(400, 1.0, 1.0, logit_bias=TO_AN_END, seed=1)


def wanting(want: str, kind: str, seed: int, **more: Any) -> tuple[Any, Body]:
    job = Job(kind, seed)
    text = json.dumps({**job.document, **more}).replace(TEXT, f">{want}<")
    return job.api, json.loads(text)


CROSSED = [
    ("prose", "required"),
    ("prose", "named"),
    ("prose", "custom"),
    ("prose", "schema"),
    ("a call", "plain"),
    ("a call", "none"),
    ("a call", "named"),
    ("a call", "schema"),
    ("wrong arguments", "auto"),
    ("wrong arguments", "required"),
    ("another tool", "auto"),
    ("another tool", "none"),
]


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize(("want", "kind"), CROSSED)
def test_unwilling_model_conforms(scripted: Any, run: Run, want: str, kind: str) -> None:
    for seed in range(3):
        found = run(generate_output(scripted, *wanting(want, kind, seed), FREE))
        if found.finished.reason != "length":
            check(Job(kind, seed), found)
        assert found.constraint is not None and not found.constraint.failure


def test_unforced_output_is_unchanged(scripted: Any, run: Run) -> None:
    found = run(generate_output(scripted, *wanting("a call", "auto", 0), FREE))
    assert vocab.encoding().decode(found.ids) == WANTS["a call"]


def test_valid_calls_arrive_as_they_were_written(scripted: Any, run: Run) -> None:
    for number, one in enumerate(CALLS):
        api = (CHAT, MESSAGES)[number % 2]
        asked = [{"role": "user", "content": f">{one.name}<"}]
        tools: list[Body] = [{"name": one.name, "input_schema": one.schema}]
        if api is CHAT:
            function = {"name": one.name, "parameters": one.schema}
            tools = [{"type": "function", "function": function}]
        document = {"model": "m", "max_tokens": 4000, "messages": asked, "tools": tools}
        # Without the bias of FREE, which can end a call before its last white space.
        found = run(
            generate_output(scripted, api, document, replace(FREE, max_tokens=4000, logit_bias=()))
        )
        assert found.last[1:] == (one.name, one.arguments, True)
        assert found.constraint is not None and not found.constraint.failure


@pytest.mark.parametrize("policy", ["auto", "off"])
def test_reasoning_is_ended_by_its_budget(
    scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, policy)
    api, document = wanting("no end", "plain", 0, thinking_token_budget=30)
    found = run(generate_output(scripted, api, document, replace(FREE, max_tokens=60)))
    assert found.constraint is not None and found.constraint.reasoning_ended_by == "budget"
    assert 30 <= found.reasoned <= 32
    text = vocab.encoding().decode(found.ids)
    head, _, tail = text.partition("<|end|><|start|>assistant")
    assert head.startswith("<|channel|>analysis<|message|> and then,")
    assert "analysis" not in tail[:40]


def test_looping_reasoning_is_ended(
    scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, document = wanting("a loop", "plain", 1)
    monkeypatch.setattr(reasoning, "MIN_LOOP", 20)
    for word, ends in (("4", True), ("0", False)):
        monkeypatch.setenv("VLLM_MLX_HARMONY_REPETITIONS", word)
        found = run(generate_output(scripted, api, document, replace(FREE, max_tokens=120)))
        assert found.constraint is not None
        assert found.constraint.reasoning_ended_by == ("repetition" if ends else "")
        assert (found.reasoned < 60) is ends


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_a_default_budget(
    scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    from vllm_mlx import server

    monkeypatch.setenv("VLLM_MLX_HARMONY_REASONING_BUDGET", "200" if by == "flag" else "20")
    if by == "flag":
        monkeypatch.setattr(server, "_default_thinking_token_budget", 20)
    found = run(
        generate_output(scripted, *wanting("no end", "plain", 1), replace(FREE, max_tokens=50))
    )
    assert 20 <= found.reasoned <= 22


@pytest.mark.parametrize("budgets", ["", "off"])
def test_a_small_limit_is_a_budget(
    scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch, budgets: str
) -> None:
    monkeypatch.setenv("VLLM_MLX_HARMONY_REASONING_BUDGET", budgets)
    api, document = wanting("no end", "plain", 1, max_output_tokens=84)
    found = run(generate_output(scripted, api, document, replace(FREE, max_tokens=84)))
    if budgets:
        assert found.reasoned > 70
    else:
        assert 20 <= found.reasoned <= 22


@pytest.mark.parametrize("policy", ["auto", "off"])
def test_min_tokens(scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, policy)
    for least in (0, 30):
        api, document = wanting("prose", "plain", 0, min_tokens=least)
        found = run(generate_output(scripted, api, document, FREE))
        usual = vocab.encoding().encode(PROSE, allowed_special="all")
        assert found.ids == usual if not least else len(found.ids) >= least
        assert found.finished is not None and found.finished.reason == "stop"


@pytest.mark.parametrize("policy", ["auto", "off"])
@pytest.mark.parametrize("kind", ["plain", "auto"])
def test_ignore_eos_generates_up_to_the_limit(
    scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch, policy: str, kind: str
) -> None:
    """Benchmarks measure the time of a known number of tokens."""
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, policy)
    api, document = wanting("prose", kind, 0, ignore_eos=True)
    found = run(generate_output(scripted, api, document, replace(FREE, max_tokens=80)))
    assert len(found.ids) == 80
    assert found.finished is not None and found.finished.reason == "length"


def test_min_tokens_does_not_break_a_grammar(scripted: Any, run: Run) -> None:
    api, document = wanting("prose", "schema", 0, min_tokens=200)
    found = run(generate_output(scripted, api, document, FREE))
    assert found.finished is not None and found.finished.reason == "stop"
    check(Job("schema", 0), found)


# --- Settings and errors.


def constrained(run: Run, kind: str, seed: int = 0, **more: Any) -> Constraint | None:
    async def asked() -> Constraint | None:
        job = Job(kind, seed)
        document = {**job.document, **more}
        turn = job.api.read(document, Defaults(), CALLER).turn
        names = StreamingHarmonyContext(turn, ResponseInfo("0", 0, "m")).names
        return await enforcement.constraint_for(turn, names, Enforcement.of(ServerSettings.read()))

    found: Constraint | None = run(asked())
    return found


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, "off")


@pytest.mark.usefixtures("off")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["plain", "auto", "none", "schema"])
def test_off_is_nothing_at_all(run: Run, kind: str, seed: int) -> None:
    assert constrained(run, kind, seed) is None


@pytest.mark.usefixtures("off")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["required", "named", "custom"])
def test_off_refuses_what_only_a_grammar_can_promise(run: Run, kind: str, seed: int) -> None:
    with pytest.raises(RequestError, match="cannot be enforced") as raised:
        constrained(run, kind, seed)
    assert raised.value.param == "tool_choice"


@pytest.mark.usefixtures("off")
def test_off_refuses_strict_tools(run: Run) -> None:
    with pytest.raises(RequestError, match="strict arguments of tool 'weather'"):
        constrained(run, "auto", tools=nested(functions(strict=True)))


ODD = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}}


def odd(strict: bool) -> list[Body]:
    tool = {"type": "function", "name": "odd", "parameters": ODD, "strict": strict}
    return nested([tool])


def test_unsupported_schema_is_refused_when_strict_or_logged(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert constrained(run, "auto", tools=odd(False)) is not None
        assert constrained(run, "auto", tools=odd(False)) is not None
    (line,) = [each for each in caplog.messages if "'odd'" in each]
    assert "a $ref that leads nowhere" in line
    with pytest.raises(RequestError, match=r"'odd'.*leads nowhere cannot be enforced"):
        constrained(run, "auto", tools=odd(True))
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, "strict")
    with pytest.raises(RequestError, match="'odd'"):
        constrained(run, "auto", tools=odd(False))


@pytest.mark.parametrize(
    ("variable", "word"),
    [
        (enforcement.GRAMMAR_VARIABLE, "perhaps"),
        ("VLLM_MLX_HARMONY_REASONING_BUDGET", "-1"),
        ("VLLM_MLX_HARMONY_REASONING_BUDGET", "many"),
        ("VLLM_MLX_HARMONY_REPETITIONS", "x"),
    ],
)
def test_words_that_cannot_be(monkeypatch: pytest.MonkeyPatch, variable: str, word: str) -> None:
    monkeypatch.setenv(variable, word)
    with pytest.raises(HostError, match=variable):
        Enforcement.of(ServerSettings.read())


def test_a_grammar_is_remembered_for_its_tenant_alone(run: Run) -> None:
    turn = Turn((User("Hi."),), tenant="one")
    names = StreamingHarmonyContext(turn, ResponseInfo("0", 0, "m")).names

    async def grammar(tenant: str) -> Any:
        own, wanted = replace(turn, tenant=tenant), Enforcement.of(ServerSettings.read())
        constraint = await enforcement.constraint_for(own, names, wanted)
        return constraint and constraint.spec.grammar

    one, again, other = run(grammar("one")), run(grammar("one")), run(grammar("two"))
    assert one is again and one is not other


class Broken:
    """A grammar whose matcher fails at once."""

    grammar = None

    def matcher(self) -> Any:
        return self

    done = False
    error = ""

    def fill(self, mask: Any) -> bool:
        raise MemoryError("no room")


@pytest.mark.parametrize("binding", [True, False])
def test_failing_grammar_fails_only_its_strict_answer(
    scripted: Any, run: Run, binding: bool
) -> None:
    constraint = Constraint(ConstraintSpec(grammar=Broken(), binding=binding))  # type: ignore[arg-type]

    async def answer() -> list[int]:
        ids: list[int] = []
        prompt = vocab.encoding().encode(
            "<|start|>user<|message|>>prose<<|end|><|start|>assistant", allowed_special="all"
        )
        generated = scripted.engine.generate(GenerationRequest(tuple(prompt), FREE, "", constraint))
        async with aclosing(generated) as steps:
            async for step in steps:
                generation.check(constraint)
                ids += step.ids
        return ids

    if binding:
        with pytest.raises(OutputError, match="could not be constrained"):
            run(answer())
    else:
        assert run(answer()) == vocab.encoding().encode(PROSE, allowed_special="all")


def test_ended_reasoning_is_counted(
    scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_mlx import server
    from vllm_mlx.metrics import MetricsCollector

    collector = MetricsCollector()
    collector.configure(enabled=True)
    monkeypatch.setattr(server, "_metrics", collector)
    metrics.REASONING_ENDED.clear()
    metrics.show()
    api, document = wanting("no end", "plain", 0, thinking_token_budget=10)
    found = run(generate_output(scripted, api, document, replace(FREE, max_tokens=30)))
    with caplog.at_level(logging.INFO):
        tracker = VllmMlx().tracker("chat_completions", stream=False)
        generation.report_reasoning_ended(found.constraint, "key", tracker)
        generation.report_reasoning_ended(found.constraint, "key", tracker)
    assert any("key: reasoning cut short (budget)" in each for each in caplog.messages)
    page = collector.render_metrics(engine=None, mcp_manager=None)[0].decode()
    assert 'vllm_mlx_harmony_reasoning_ended_total{reason="budget"} 2.0' in page
