"""Frameworks for Python, as they are, against a model that never wants what they ask for.

Each gets typed answers and calls because nothing else can be said. No test repairs, retries or
prompts for anything: where a framework would try again by itself, that is switched off.
"""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import agents
import anthropic
import instructor
import openai
import pytest
from client_page import ANSWERS, OSLO, PARIS, ROOT, sections
from jsonschema import validate
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

if TYPE_CHECKING:
    from conftest import Server

pytestmark = pytest.mark.served

MODEL = "gpt-oss-20b"
KEY = "none"

SECTIONS = sections()


class Place(BaseModel):
    """Where somebody lives."""

    model_config = ConfigDict(extra="forbid")

    city: str
    country: Literal["UK", "IT", "DE"]


class Person(BaseModel):
    """Who somebody is."""

    model_config = ConfigDict(extra="forbid")

    name: str
    age: int = Field(ge=1, le=150)
    kind: Literal["human", "robot"]
    tags: list[str]
    home: Place
    nickname: str | None


class Home(BaseModel):
    """A kind of abode."""

    kind: Literal["home"]
    rooms: int


class Road(BaseModel):
    """Another one."""

    kind: Literal["road"]
    towards: str


class Sheet(BaseModel):
    """What pydantic writes with ``propertyNames``, and with references in a ``oneOf``."""

    scores: dict[Literal["wit", "luck"], int]
    abode: Home | Road = Field(discriminator="kind")


class Note(BaseModel):
    """Any JSON object: for modes that promise no more than that."""

    title: Any = None


TREE: Mapping[str, Any] = {
    "title": "tree",
    "description": "A tree.",
    "type": "object",
    "properties": {
        "label": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3},
    },
    "required": ["label", "children"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"label": {"enum": ["leaf", "branch"]}},
            "required": ["label"],
            "additionalProperties": False,
        }
    },
}


@tool
def move(who: str, where: Place) -> str:
    """Moves somebody to another place."""
    return f"{who} lives in {where.city} now"


# --- openai ---


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0)


def user(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


def test_openai_chat_parse(client: openai.OpenAI, question: str) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=user(question), response_format=Person
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


def test_openai_chat_of_a_record_and_a_union(client: openai.OpenAI, question: str) -> None:
    schema = {"name": "sheet", "schema": Sheet.model_json_schema(), "strict": True}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=user(question),
        response_format={"type": "json_schema", "json_schema": schema},
    )
    Sheet.model_validate_json(answer.choices[0].message.content or "")


def test_openai_chat_stream(client: openai.OpenAI, question: str) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user(question), response_format=Person
    ) as stream:
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "Person"}}],
    ids=["required", "named"],
)
def test_openai_chat_parse_of_a_call(client: openai.OpenAI, question: str, choice: Any) -> None:
    tools = [openai.pydantic_function_tool(Person)]
    if choice != "required":
        tools.append(openai.pydantic_function_tool(Place))
    answer = client.chat.completions.parse(
        model=MODEL, messages=user(question), tools=tools, tool_choice=choice
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Person)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_openai_responses_parse(client: openai.OpenAI, question: str) -> None:
    answer = client.responses.parse(model=MODEL, input=question, text_format=Person)
    assert isinstance(answer.output_parsed, Person)


def test_openai_responses_stream(client: openai.OpenAI, question: str) -> None:
    with client.responses.stream(model=MODEL, input=question, text_format=Person) as stream:
        answer = stream.get_final_response()
    assert isinstance(answer.output_parsed, Person)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "Person"}], ids=["required", "named"]
)
def test_openai_responses_parse_of_a_call(
    client: openai.OpenAI, question: str, choice: Any
) -> None:
    function = openai.pydantic_function_tool(Person)["function"]
    answer = client.responses.parse(
        model=MODEL,
        input=question,
        tools=[{"type": "function", **function}],
        tool_choice=choice,
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert isinstance(Person.model_validate_json(call.arguments), Person)


# --- anthropic ---


@pytest.fixture
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.root, api_key=KEY, max_retries=0)


def test_anthropic_parse(claude: anthropic.Anthropic, question: str) -> None:
    """Of `Person` the client sends no bounds: the age is what the model likes."""
    answer = claude.messages.parse(
        model=MODEL, max_tokens=2000, messages=user(question), output_format=Person
    )
    assert isinstance(answer.parsed_output, Person)


# --- LangChain ---


def openai_model(server: Server, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=server.v1, api_key=KEY, max_retries=0, **options)


def anthropic_model(server: Server) -> ChatAnthropic:
    return ChatAnthropic(
        model=MODEL, base_url=server.root, api_key=KEY, max_retries=0, max_tokens=2000
    )


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_langchain_openai(server: Server, question: str, api: str, method: Any) -> None:
    model = openai_model(server, use_responses_api=api == "responses")
    assert isinstance(model.with_structured_output(Person, method=method).invoke(question), Person)


def test_langchain_openai_strict_function(server: Server, question: str) -> None:
    model = openai_model(server)
    typed = model.with_structured_output(Person, method="function_calling", strict=True)
    assert isinstance(typed.invoke(question), Person)


def test_langchain_openai_schema_of_its_own(server: Server, question: str) -> None:
    typed = openai_model(server).with_structured_output(dict(TREE), method="json_schema")
    validate(typed.invoke(question), TREE)


def test_langchain_openai_json_mode(server: Server, question: str) -> None:
    typed = openai_model(server).with_structured_output(Note, method="json_mode")
    assert isinstance(typed.invoke(question), Note)


@pytest.mark.parametrize("choice", ["any", "move"])
def test_langchain_openai_forced_call(server: Server, question: str, choice: str) -> None:
    model = openai_model(server).bind_tools([move, Person], tool_choice=choice)
    assert_called(model.invoke(question), choice)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_anthropic(server: Server, question: str, method: Any) -> None:
    typed = anthropic_model(server).with_structured_output(Person, method=method)
    assert isinstance(typed.invoke(question), Person)


@pytest.mark.parametrize("choice", ["any", "move"])
def test_langchain_anthropic_forced_call(server: Server, question: str, choice: str) -> None:
    model = anthropic_model(server).bind_tools([move, Person], tool_choice=choice)
    assert_called(model.invoke(question), choice)


def assert_called(answer: AIMessage, choice: str) -> None:
    """One call, of the tool that was chosen, with arguments that the tool takes."""
    assert not answer.invalid_tool_calls
    (call,) = answer.tool_calls
    assert call["name"] in ({"move", "Person"} if choice == "any" else {choice})
    if call["name"] == "move":
        assert "lives in" in move.invoke(call["args"])
    else:
        assert isinstance(Person.model_validate(call["args"]), Person)


# --- Instructor ---


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        (instructor.Mode.TOOLS, Person),
        (instructor.Mode.TOOLS_STRICT, Person),
        (instructor.Mode.JSON_SCHEMA, Person),
        (instructor.Mode.JSON, Note),
        (instructor.Mode.RESPONSES_TOOLS, Person),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_instructor_openai(
    client: openai.OpenAI, question: str, mode: Any, wanted: type[BaseModel]
) -> None:
    typed = instructor.from_openai(client, mode=mode)
    # Where nothing strict was asked for, 30.0 is an integer, as JSON Schema has it.
    answer = typed.chat.completions.create(
        model=MODEL, messages=user(question), response_model=wanted, max_retries=0, strict=False
    )
    assert isinstance(answer, wanted)


def test_instructor_anthropic(claude: anthropic.Anthropic, question: str) -> None:
    typed = instructor.from_anthropic(claude, mode=instructor.Mode.ANTHROPIC_TOOLS)
    answer = typed.messages.create(
        model=MODEL,
        max_tokens=2000,
        messages=user(question),
        response_model=Person,
        max_retries=0,
        strict=False,
    )
    assert isinstance(answer, Person)


# --- pydantic-ai ---


@pytest.mark.parametrize("wanted", [Person, Sheet])
@pytest.mark.parametrize("output", [ToolOutput, NativeOutput])
@pytest.mark.parametrize("api", [OpenAIChatModel, OpenAIResponsesModel])
def test_pydantic_ai(
    server: Server, question: str, api: Any, output: Any, wanted: type[BaseModel]
) -> None:
    provider = OpenAIProvider(base_url=server.v1, api_key=KEY)
    agent = Agent(api(MODEL, provider=provider), output_type=output(wanted), retries=0)
    assert isinstance(agent.run_sync(question).output, wanted)


# --- Agents SDK ---


@pytest.fixture(params=[agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
def agent_model(server: Server, request: pytest.FixtureRequest) -> Any:
    client = openai.AsyncOpenAI(base_url=server.v1, api_key=KEY, max_retries=0)
    return request.param(MODEL, openai_client=client)


def test_agents_output_type(agent_model: Any, question: str) -> None:
    agent = agents.Agent(name="Typist", model=agent_model, output_type=Person)
    assert isinstance(run(agent, question).final_output, Person)


def test_agents_required_call_and_output_type(agent_model: Any, question: str) -> None:
    moved = []

    @agents.function_tool
    def move(who: str, where: Place) -> str:
        """Moves somebody to another place."""
        moved.append((who, where))
        return "done"

    agent = agents.Agent(
        name="Mover",
        model=agent_model,
        tools=[move],
        model_settings=agents.ModelSettings(tool_choice="required"),
        output_type=Person,
    )
    assert isinstance(run(agent, question).final_output, Person)
    ((_, where),) = moved
    assert isinstance(where, Place)


def run(agent: Any, question: str) -> Any:
    return asyncio.run(agents.Runner.run(agent, question, max_turns=3))


# --- docs/clients.md: the others are in tests/system/clients ---


@pytest.mark.parametrize("name", ["OpenAI", "Anthropic", "OpenAI Agents SDK", "LangChain"])
def test_the_examples_of_the_page(
    server: Server,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in SECTIONS[name]:
        if block.language == "python":
            path = tmp_path / (block.file or "example.py")
            path.write_text(block.code.replace(ROOT, server.root), "utf-8")
            if not block.file:
                runpy.run_path(str(path), run_name="__main__")
                question = OSLO if OSLO in block.code else PARIS
                assert capsys.readouterr().out == f"{ANSWERS[question]}\n"
