"""Our engine enforces requests: with random weights, and with models that want something else."""

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
"""Parts of the outputs, which several processes can share: `pytest -n 2`."""

TOGETHER = 16
WIDTH = 4
"""Of the model with random weights: most of a step is its product with 201,088 ids."""

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
    user_messages = [{"role": "user", "content": TEXT}]
    return {"model": "m", "max_tokens": 500, "messages": user_messages, **more}


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


def messages_tools() -> list[Body]:
    return [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]


FORMAT = {"name": "report", "schema": REPORT, "strict": True}
SYNTAX = {"syntax": "regex", "definition": WORD}

KINDS: dict[str, tuple[Body, Body, Body]] = {
    "plain": (chat(), responses(), messages()),
    "auto": (
        chat(tools=nested(functions())),
        responses(tools=functions()),
        messages(tools=messages_tools()),
    ),
    "required": (
        chat(tools=nested(functions()), tool_choice="required"),
        responses(tools=functions(), tool_choice="required"),
        messages(tools=messages_tools(), tool_choice={"type": "any"}),
    ),
    "named": (
        chat(
            tools=nested(functions(strict=True)),
            tool_choice={"type": "function", "function": {"name": "light"}},
        ),
        responses(tools=functions(), tool_choice={"type": "function", "name": "light"}),
        messages(tools=messages_tools(), tool_choice={"type": "tool", "name": "light"}),
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
            tools=messages_tools(),
            output_config={"format": {"type": "json_schema", "schema": REPORT}},
        ),
    ),
    "none": (
        chat(tools=nested(functions()), tool_choice="none", reasoning_effort="none"),
        responses(tools=functions(), tool_choice="none", reasoning={"effort": "none"}),
        messages(
            tools=messages_tools(), tool_choice={"type": "none"}, thinking={"type": "disabled"}
        ),
    ),
    "budget": (
        chat(tools=nested(functions()), thinking_token_budget=5),
        responses(tools=functions(), thinking_token_budget=5),
        messages(tools=messages_tools(), thinking={"type": "enabled", "budget_tokens": 1024}),
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
        messages(
            tools=messages_tools(), tool_choice={"type": "any"}, thinking={"type": "disabled"}
        ),
    ),
}
APIS = (CHAT, RESPONSES, MESSAGES)
SHARING = SingleServer(MemoryStore())
CALLER = Caller(FrontEnd(VllmMlx(ServerSettings()), SHARING), "tenant")


@dataclass(frozen=True)
class Job:
    kind: str
    seed: int
    max_tokens: int = 300

    @property
    def drawn_from(self) -> int:
        """A seed of its own: with the same one, two kinds would draw alike where they are alike."""
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
SCRIPTS = [Script(f">{name}<", text) for name, text in WANTS.items()]


@dataclass(frozen=True)
class ToolCall:
    """A valid call of a tool without ``strict``, whose order and spelling are unusual."""

    name: str
    schema: Mapping[str, Any]
    arguments: str


def tool_calls() -> Iterator[ToolCall]:
    """Calls for 100 schemas as libraries write them; for three if few outputs are drawn."""
    rng = random.Random(22)
    of_libraries = [(shape, dialect) for shape in SHAPES for dialect in DIALECTS]
    count = min(max(SEEDS, 3), 100)
    for number, (name, dialect) in enumerate(rng.sample(of_libraries, count)):
        value = fitting(SHAPES[name], dialect, rng)
        schema = schema_of(SHAPES[name], dialect)
        # Not named after the shape: the model calls a tool whose name is not ASCII by an alias.
        yield ToolCall(f"tool_{number}", schema, respelled(value, rng))


CALLS = list(tool_calls())
SCRIPTS += [
    Script(
        f">{call.name}<",
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        f"{call.arguments}<|call|>",
    )
    for call in CALLS
]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    limit = 600 + 60 * SEEDS  # so that nothing waits forever
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, limit))
    loop.close()


def start_engine(directory: Path, run: Run) -> Iterator[HarmonyEngine]:
    engine = HarmonyEngine(str(directory))
    run(engine.start())
    yield engine
    run(engine.stop())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[HarmonyEngine]:
    directory = standin.write_tiny(tmp_path_factory.mktemp("tiny"), width=WIDTH)
    yield from start_engine(directory, run)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[HarmonyEngine]:
    directory = standin.write(tmp_path_factory.mktemp("scripted"), SCRIPTS)
    yield from start_engine(directory, run)


# --- One answer.


@dataclass
class Output:
    """The output for a request: ids, messages, and the answer as the API writes it."""

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
) -> Output:
    request = api.read(document, Defaults(), CALLER)
    info = ResponseInfo("0123456789abcdef0123456789abcdef", 0, "m")
    context = StreamingHarmonyContext(request.turn, info)
    policy = Enforcement.of(ServerSettings.read())
    if (budget := VllmMlx(ServerSettings.read()).reasoning_tokens) is not None:
        policy = replace(policy, reasoning_tokens=budget)
    constraint = await enforcement.constraint_for(request.turn, context.names, policy)
    emitter = api.emitter(request, info, context, CALLER)
    output = Output(request.turn, [], constraint=constraint)
    deltas = list(context.start())
    finish = None
    prompt = context.render_for_completion()
    generated = engine.engine.generate(GenerationRequest(prompt, settings, "tenant", constraint))
    async with aclosing(generated) as steps:
        async for step in steps:
            generation.check(constraint)
            output.ids += step.ids
            finish = step.finish
            deltas += context.append_output(step.ids)
            if context.done:
                break
    deltas += context.finish(finish or "stop")
    for delta in deltas:
        emitter.feed(delta)
        if isinstance(delta, Opened):
            output.messages.append((delta.kind, delta.name, "", False))
        elif isinstance(delta, Text):
            kind, name, text, _ = output.messages[-1]
            output.messages[-1] = kind, name, text + delta.text, False
        elif isinstance(delta, Closed):
            output.messages[-1] = (*output.messages[-1][:3], delta.complete)
        elif isinstance(delta, Finished):
            output.finished = delta
    output.result = emitter.result()
    return output


ENDS = [vocab.END, vocab.CALL, vocab.RETURN, vocab.MESSAGE]
CLOSERS = [token for text in ('"', "}", '"}', "]}", "]") for token in vocab.encoding().encode(text)]
SPACES = [
    token for token in range(vocab.CONTROL.start) if not vocab.token_bytes(token).strip(b" \t\r\n")
]
TO_AN_END = (
    *((token, 10.5) for token in dict.fromkeys([*ENDS, *CLOSERS])),
    *((token, -6.0) for token in SPACES),
)
"""Random weights rarely end a message; with this bias they do so after a few words. White space is
made unlikely: where JSON allows it, hundreds of ids are nothing else, and few others are valid."""


FILTERS: Sequence[Mapping[str, Any]] = (
    {"top_p": 0.7},
    {"min_p": 0.05, "repetition_penalty": 1.3},
    {"top_k": 3, "presence_penalty": 2.0},
)
"""Each is combined with masks in every twentieth output; ``top_p`` takes longer than the others."""


def sampling_settings(job: Job) -> GenerationSettings:
    """Sampling at random, for some jobs with a filter."""
    settings = GenerationSettings(
        job.max_tokens, 1.0, 1.0, logit_bias=TO_AN_END, seed=job.drawn_from
    )
    turn = job.seed // 3 % 20
    return replace(settings, **FILTERS[turn - 1]) if 1 <= turn <= len(FILTERS) else settings


async def generate_all(engine: Any, jobs: Sequence[Job]) -> list[Output]:
    """Runs ``TOGETHER`` jobs at a time."""
    limit = asyncio.Semaphore(TOGETHER)

    async def generate(job: Job) -> Output:
        async with limit:
            return await generate_output(engine, job.api, job.document, sampling_settings(job))

    return list(await asyncio.gather(*map(generate, jobs)))


def check(job: Job, output: Output) -> None:
    """Checks that a complete output is what was requested, and what openai-harmony reads in it."""
    assert output.finished is not None
    if not output.messages and job.kind in ("plain", "auto", "none", "budget"):
        return  # an answer may be empty: it has no messages then
    *before, (kind, name, text, complete) = output.messages
    assert complete and all(message[3] for message in before)
    assert {message[0] for message in before} <= {Kind.REASONING, Kind.PREAMBLE}
    strictly = vocab.encoding().parse_messages_from_completion_tokens(output.ids, Role.ASSISTANT)
    shown = ["".join(part.text for part in message.content) for message in strictly]
    assert [part for part in shown if part] == [
        message[2] for message in output.messages if message[2]
    ]
    wanted = job.kind
    if kind is Kind.CALL:
        assert output.finished.reason == "tool_calls"
        assert wanted not in ("plain", "none", "schema")
        arguments = json.loads(text)
        if name == "say":
            jsonschema.validate(arguments["input"], {"type": "string", "pattern": f"^{WORD}$"})
        else:
            jsonschema.validate(arguments, dict(SCHEMAS[name]))
    else:
        assert output.finished.reason == "stop"
        assert wanted not in ("required", "named", "custom")
        if kind is not Kind.ANSWER:  # an empty answer has no message
            assert not wanted.startswith("schema") and output.ids[-1] == vocab.RETURN
        if wanted.startswith("schema"):
            assert not any(message[0] is Kind.PREAMBLE for message in before)
            jsonschema.validate(json.loads(text), dict(REPORT))
    if wanted == "named":
        assert name == "light"
    if wanted == "none":
        assert not output.reasoned
    if wanted == "budget" and job.seed % 3 != 2:
        assert output.reasoned <= 5 + enforcement_grace()


def enforcement_grace() -> int:
    from vllm_mlx_harmony.core.reasoning import GRACE

    return GRACE + 1


def count_finished(jobs: Sequence[Job], outputs: Sequence[Output]) -> int:
    """Counts the outputs that came to an end, and prints the number of each kind."""
    finished: Counter[str] = Counter()
    for job, output in zip(jobs, outputs, strict=True):
        finished[job.kind] += output.finished is not None and output.finished.reason != "length"
    totals = Counter(job.kind for job in jobs)
    print(*(f"{kind}: {finished[kind]} of {totals[kind]} ended" for kind in KINDS), sep="\n")
    print(sum(len(counted.ids) for counted in outputs), "ids")
    return finished.total()


def check_verbosely(job: Job, output: Output) -> None:
    """``check``, but a failure shows the output."""
    try:
        check(job, output)
    except Exception as error:
        raise AssertionError(f"{job}: {vocab.encoding().decode(output.ids)}") from error


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
def test_drawn_output_conforms(tiny: Any, run: Run, part: int) -> None:
    jobs = [Job(kind, seed) for seed, kind in product(range(part, SEEDS, len(PARTS)), KINDS)]
    outputs = run(generate_all(tiny, jobs))
    for job, output in zip(jobs, outputs, strict=True):
        assert output.constraint is not None and not output.constraint.failure
        if output.finished and output.finished.reason != "length":
            check_verbosely(job, output)
    assert count_finished(jobs, outputs) > 0.8 * len(jobs)


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("part", PARTS)
def test_output_is_cut_at_any_limit(tiny: Any, run: Run, part: int) -> None:
    jobs = [
        Job(kind, seed, random.Random(f"{seed} {kind}").randrange(1, 40))
        for seed, kind in product(range(part, SEEDS, len(PARTS)), KINDS)
    ]
    outputs = run(generate_all(tiny, jobs))
    count_finished(jobs, outputs)
    for job, output in zip(jobs, outputs, strict=True):
        assert len(output.ids) <= job.max_tokens
        assert output.finished is not None
        if output.finished.reason != "length":
            check_verbosely(job, output)
            continue
        assert len(output.ids) == job.max_tokens
        document = json.dumps(output.result)
        assert "<|" not in document and "functions." not in document
        if job.kind in ("plain", "none", "schema"):
            assert not any(message[0] is Kind.CALL for message in output.messages)
        if job.kind in ("required", "named", "custom"):
            assert not any(message[0] is Kind.ANSWER and message[2] for message in output.messages)


@pytest.mark.nightly
def test_output_does_not_depend_on_other_requests(tiny: Any, run: Run) -> None:
    jobs = [Job(kind, 3, 100) for kind in ("required", "schema", "plain", "custom")]
    together = run(generate_all(tiny, jobs))
    alone = [run(generate_all(tiny, [job]))[0] for job in jobs]
    assert [output.ids for output in together] == [output.ids for output in alone]


# --- A model that wants something else.

FREE = GenerationSettings(400, 1.0, 1.0, logit_bias=TO_AN_END, seed=1)


def request_of(want: str, kind: str, seed: int, **more: Any) -> tuple[Any, Body]:
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


@pytest.mark.nightly(sample=5)
@pytest.mark.parametrize(("want", "kind"), CROSSED)
def test_unwilling_model_conforms(scripted: Any, run: Run, want: str, kind: str) -> None:
    for seed in range(3):
        output = run(generate_output(scripted, *request_of(want, kind, seed), FREE))
        if output.finished.reason != "length":
            check(Job(kind, seed), output)
        assert output.constraint is not None and not output.constraint.failure


def test_unforced_output_is_unchanged(scripted: Any, run: Run) -> None:
    output = run(generate_output(scripted, *request_of("a call", "auto", 0), FREE))
    assert vocab.encoding().decode(output.ids) == WANTS["a call"]


def test_valid_calls_are_not_changed(scripted: Any, run: Run) -> None:
    for number, call in enumerate(CALLS):
        api = (CHAT, MESSAGES)[number % 2]
        user_messages = [{"role": "user", "content": f">{call.name}<"}]
        tools: list[Body] = [{"name": call.name, "input_schema": call.schema}]
        if api is CHAT:
            function = {"name": call.name, "parameters": call.schema}
            tools = [{"type": "function", "function": function}]
        document = {"model": "m", "max_tokens": 4000, "messages": user_messages, "tools": tools}
        # Without the bias of FREE, which can end a call before its last white space.
        output = run(
            generate_output(scripted, api, document, replace(FREE, max_tokens=4000, logit_bias=()))
        )
        assert output.last[1:] == (call.name, call.arguments, True)
        assert output.constraint is not None and not output.constraint.failure


@pytest.mark.parametrize("policy", ["auto", "off"])
def test_reasoning_is_ended_by_its_budget(
    scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, policy)
    api, document = request_of("no end", "plain", 0, thinking_token_budget=30)
    output = run(generate_output(scripted, api, document, replace(FREE, max_tokens=60)))
    assert output.constraint is not None and output.constraint.reasoning_ended_by == "budget"
    assert 30 <= output.reasoned <= 32
    text = vocab.encoding().decode(output.ids)
    head, _, tail = text.partition("<|end|><|start|>assistant")
    assert head.startswith("<|channel|>analysis<|message|> and then,")
    assert "analysis" not in tail[:40]


def test_looping_reasoning_is_ended(
    scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, document = request_of("a loop", "plain", 1)
    monkeypatch.setattr(reasoning, "MIN_LOOP", 20)
    for word, ends in (("4", True), ("0", False)):
        monkeypatch.setenv("VLLM_MLX_HARMONY_REPETITIONS", word)
        output = run(generate_output(scripted, api, document, replace(FREE, max_tokens=120)))
        assert output.constraint is not None
        assert output.constraint.reasoning_ended_by == ("repetition" if ends else "")
        assert (output.reasoned < 60) is ends


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_default_budget_ends_reasoning(
    scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    from vllm_mlx import server

    monkeypatch.setenv("VLLM_MLX_HARMONY_REASONING_BUDGET", "200" if by == "flag" else "20")
    if by == "flag":
        monkeypatch.setattr(server, "_default_thinking_token_budget", 20)
    output = run(
        generate_output(scripted, *request_of("no end", "plain", 1), replace(FREE, max_tokens=50))
    )
    assert 20 <= output.reasoned <= 22


@pytest.mark.parametrize("budgets", ["", "off"])
def test_small_limit_implies_a_budget(
    scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch, budgets: str
) -> None:
    monkeypatch.setenv("VLLM_MLX_HARMONY_REASONING_BUDGET", budgets)
    api, document = request_of("no end", "plain", 1, max_output_tokens=84)
    output = run(generate_output(scripted, api, document, replace(FREE, max_tokens=84)))
    if budgets:
        assert output.reasoned > 70
    else:
        assert 20 <= output.reasoned <= 22


@pytest.mark.parametrize("policy", ["auto", "off"])
def test_min_tokens_is_reached(
    scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, policy)
    for least in (0, 30):
        api, document = request_of("prose", "plain", 0, min_tokens=least)
        output = run(generate_output(scripted, api, document, FREE))
        usual = vocab.encoding().encode(PROSE, allowed_special="all")
        assert output.ids == usual if not least else len(output.ids) >= least
        assert output.finished is not None and output.finished.reason == "stop"


@pytest.mark.parametrize("policy", ["auto", "off"])
@pytest.mark.parametrize("kind", ["plain", "auto"])
def test_ignore_eos_generates_up_to_the_limit(
    scripted: Any, run: Run, monkeypatch: pytest.MonkeyPatch, policy: str, kind: str
) -> None:
    """Benchmarks measure the time of a known number of tokens."""
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, policy)
    api, document = request_of("prose", kind, 0, ignore_eos=True)
    output = run(generate_output(scripted, api, document, replace(FREE, max_tokens=80)))
    assert len(output.ids) == 80
    assert output.finished is not None and output.finished.reason == "length"


def test_min_tokens_does_not_break_a_grammar(scripted: Any, run: Run) -> None:
    api, document = request_of("prose", "schema", 0, min_tokens=200)
    output = run(generate_output(scripted, api, document, FREE))
    assert output.finished is not None and output.finished.reason == "stop"
    check(Job("schema", 0), output)


# --- Settings and errors.


def constraint_of(run: Run, kind: str, seed: int = 0, **more: Any) -> Constraint | None:
    async def build() -> Constraint | None:
        job = Job(kind, seed)
        document = {**job.document, **more}
        turn = job.api.read(document, Defaults(), CALLER).turn
        names = StreamingHarmonyContext(turn, ResponseInfo("0", 0, "m")).names
        return await enforcement.constraint_for(turn, names, Enforcement.of(ServerSettings.read()))

    constraint: Constraint | None = run(build())
    return constraint


@pytest.mark.usefixtures("no_grammars")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["plain", "auto", "none", "schema"])
def test_off_makes_no_constraint(run: Run, kind: str, seed: int) -> None:
    assert constraint_of(run, kind, seed) is None


@pytest.mark.usefixtures("no_grammars")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["required", "named", "custom"])
def test_off_rejects_requests_that_need_a_grammar(run: Run, kind: str, seed: int) -> None:
    with pytest.raises(RequestError, match="cannot be enforced") as raised:
        constraint_of(run, kind, seed)
    assert raised.value.param == "tool_choice"


@pytest.mark.usefixtures("no_grammars")
def test_off_rejects_strict_tools(run: Run) -> None:
    with pytest.raises(RequestError, match="strict arguments of tool 'weather'"):
        constraint_of(run, "auto", tools=nested(functions(strict=True)))


ODD = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}}


def odd(strict: bool) -> list[Body]:
    tool = {"type": "function", "name": "odd", "parameters": ODD, "strict": strict}
    return nested([tool])


def test_unsupported_schema_is_rejected_when_strict_or_logged(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert constraint_of(run, "auto", tools=odd(False)) is not None
        assert constraint_of(run, "auto", tools=odd(False)) is not None
    (line,) = [message for message in caplog.messages if "'odd'" in message]
    assert "a $ref that leads nowhere" in line
    with pytest.raises(RequestError, match=r"'odd'.*leads nowhere cannot be enforced"):
        constraint_of(run, "auto", tools=odd(True))
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, "strict")
    with pytest.raises(RequestError, match="'odd'"):
        constraint_of(run, "auto", tools=odd(False))


@pytest.mark.parametrize(
    ("variable", "word"),
    [
        (enforcement.GRAMMAR_VARIABLE, "perhaps"),
        ("VLLM_MLX_HARMONY_REASONING_BUDGET", "-1"),
        ("VLLM_MLX_HARMONY_REASONING_BUDGET", "many"),
        ("VLLM_MLX_HARMONY_REPETITIONS", "x"),
    ],
)
def test_invalid_setting_is_rejected(
    monkeypatch: pytest.MonkeyPatch, variable: str, word: str
) -> None:
    monkeypatch.setenv(variable, word)
    with pytest.raises(HostError, match=variable):
        Enforcement.of(ServerSettings.read())


def test_grammar_is_cached_per_tenant(run: Run) -> None:
    turn = Turn((User("Hi."),), tenant="one")
    names = StreamingHarmonyContext(turn, ResponseInfo("0", 0, "m")).names

    async def grammar(tenant: str) -> Any:
        own, wanted = replace(turn, tenant=tenant), Enforcement.of(ServerSettings.read())
        constraint = await enforcement.constraint_for(own, names, wanted)
        return constraint and constraint.spec.grammar

    first, again, other = run(grammar("one")), run(grammar("one")), run(grammar("two"))
    assert first is again and first is not other


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
    api, document = request_of("no end", "plain", 0, thinking_token_budget=10)
    output = run(generate_output(scripted, api, document, replace(FREE, max_tokens=30)))
    with caplog.at_level(logging.INFO):
        tracker = VllmMlx(ServerSettings.read()).tracker("chat_completions", stream=False)
        generation.report_reasoning_ended(output.constraint, "key", tracker)
        generation.report_reasoning_ended(output.constraint, "key", tracker)
    assert any("key: reasoning cut short (budget)" in message for message in caplog.messages)
    page = collector.render_metrics(engine=None, mcp_manager=None)[0].decode()
    assert 'vllm_mlx_harmony_reasoning_ended_total{reason="budget"} 2.0' in page
