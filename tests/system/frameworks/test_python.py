"""Unmodified Python frameworks, with a model whose scripts never conform to their requests.

They get typed answers and calls because the grammar permits nothing else. No test repairs, retries
or prompts, and the frameworks' own retries are switched off.
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


def test_openai_chat_parse_returns_typed_answer(client: openai.OpenAI, question: str) -> None:
    completion = client.chat.completions.parse(
        model=MODEL, messages=user(question), response_format=Person
    )
    assert isinstance(completion.choices[0].message.parsed, Person)
    assert completion.choices[0].finish_reason == "stop"


def test_openai_chat_enforces_schema_with_record_and_union(
    client: openai.OpenAI, question: str
) -> None:
    schema = {"name": "sheet", "schema": Sheet.model_json_schema(), "strict": True}
    completion = client.chat.completions.create(
        model=MODEL,
        messages=user(question),
        response_format={"type": "json_schema", "json_schema": schema},
    )
    Sheet.model_validate_json(completion.choices[0].message.content or "")


def test_openai_chat_stream_returns_typed_answer(client: openai.OpenAI, question: str) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user(question), response_format=Person
    ) as stream:
        completion = stream.get_final_completion()
    assert isinstance(completion.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "Person"}}],
    ids=["required", "named"],
)
def test_openai_chat_parse_returns_forced_call(
    client: openai.OpenAI, question: str, choice: Any
) -> None:
    tools = [openai.pydantic_function_tool(Person)]
    if choice != "required":
        tools.append(openai.pydantic_function_tool(Place))
    completion = client.chat.completions.parse(
        model=MODEL, messages=user(question), tools=tools, tool_choice=choice
    )
    (call,) = completion.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Person)
    assert completion.choices[0].finish_reason == "tool_calls"


def test_openai_responses_parse_returns_typed_answer(client: openai.OpenAI, question: str) -> None:
    response = client.responses.parse(model=MODEL, input=question, text_format=Person)
    assert isinstance(response.output_parsed, Person)


def test_openai_responses_stream_returns_typed_answer(client: openai.OpenAI, question: str) -> None:
    with client.responses.stream(model=MODEL, input=question, text_format=Person) as stream:
        response = stream.get_final_response()
    assert isinstance(response.output_parsed, Person)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "Person"}], ids=["required", "named"]
)
def test_openai_responses_parse_returns_forced_call(
    client: openai.OpenAI, question: str, choice: Any
) -> None:
    function = openai.pydantic_function_tool(Person)["function"]
    response = client.responses.parse(
        model=MODEL,
        input=question,
        tools=[{"type": "function", **function}],
        tool_choice=choice,
    )
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert isinstance(Person.model_validate_json(call.arguments), Person)


# --- anthropic ---


@pytest.fixture
def anthropic_client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.root, api_key=KEY, max_retries=0)


def test_anthropic_parse_returns_typed_answer(
    anthropic_client: anthropic.Anthropic, question: str
) -> None:
    """The client sends no bounds of `Person`, so any age is possible."""
    message = anthropic_client.messages.parse(
        model=MODEL, max_tokens=2000, messages=user(question), output_format=Person
    )
    assert isinstance(message.parsed_output, Person)


# --- LangChain ---


def openai_model(server: Server, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=server.v1, api_key=KEY, max_retries=0, **options)


def anthropic_model(server: Server) -> ChatAnthropic:
    return ChatAnthropic(
        model=MODEL, base_url=server.root, api_key=KEY, max_retries=0, max_tokens=2000
    )


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_langchain_openai_returns_typed_answer(
    server: Server, question: str, api: str, method: Any
) -> None:
    model = openai_model(server, use_responses_api=api == "responses")
    assert isinstance(model.with_structured_output(Person, method=method).invoke(question), Person)


def test_langchain_openai_strict_function_returns_typed_answer(
    server: Server, question: str
) -> None:
    model = openai_model(server)
    structured = model.with_structured_output(Person, method="function_calling", strict=True)
    assert isinstance(structured.invoke(question), Person)


def test_langchain_openai_obeys_json_schema(server: Server, question: str) -> None:
    structured = openai_model(server).with_structured_output(dict(TREE), method="json_schema")
    validate(structured.invoke(question), TREE)


def test_langchain_openai_json_mode_returns_typed_answer(server: Server, question: str) -> None:
    structured = openai_model(server).with_structured_output(Note, method="json_mode")
    assert isinstance(structured.invoke(question), Note)


@pytest.mark.parametrize("choice", ["any", "move"])
def test_langchain_openai_returns_forced_call(server: Server, question: str, choice: str) -> None:
    model = openai_model(server).bind_tools([move, Person], tool_choice=choice)
    assert_called(model.invoke(question), choice)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_anthropic_returns_typed_answer(
    server: Server, question: str, method: Any
) -> None:
    structured = anthropic_model(server).with_structured_output(Person, method=method)
    assert isinstance(structured.invoke(question), Person)


@pytest.mark.parametrize("choice", ["any", "move"])
def test_langchain_anthropic_returns_forced_call(
    server: Server, question: str, choice: str
) -> None:
    model = anthropic_model(server).bind_tools([move, Person], tool_choice=choice)
    assert_called(model.invoke(question), choice)


def assert_called(message: AIMessage, choice: str) -> None:
    """Asserts one call of the chosen tool, with valid arguments."""
    assert not message.invalid_tool_calls
    (call,) = message.tool_calls
    assert call["name"] in ({"move", "Person"} if choice == "any" else {choice})
    if call["name"] == "move":
        assert "lives in" in move.invoke(call["args"])
    else:
        assert isinstance(Person.model_validate(call["args"]), Person)


# --- Instructor ---


@pytest.mark.parametrize(
    ("mode", "output_type"),
    [
        (instructor.Mode.TOOLS, Person),
        (instructor.Mode.TOOLS_STRICT, Person),
        (instructor.Mode.JSON_SCHEMA, Person),
        (instructor.Mode.JSON, Note),
        (instructor.Mode.RESPONSES_TOOLS, Person),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_instructor_openai_returns_output_type(
    client: openai.OpenAI, question: str, mode: Any, output_type: type[BaseModel]
) -> None:
    patched = instructor.from_openai(client, mode=mode)
    # Without strict, 30.0 is an integer, as in JSON Schema.
    output = patched.chat.completions.create(
        model=MODEL,
        messages=user(question),
        response_model=output_type,
        max_retries=0,
        strict=False,
    )
    assert isinstance(output, output_type)


def test_instructor_anthropic_returns_typed_answer(
    anthropic_client: anthropic.Anthropic, question: str
) -> None:
    patched = instructor.from_anthropic(anthropic_client, mode=instructor.Mode.ANTHROPIC_TOOLS)
    person = patched.messages.create(
        model=MODEL,
        max_tokens=2000,
        messages=user(question),
        response_model=Person,
        max_retries=0,
        strict=False,
    )
    assert isinstance(person, Person)


# --- pydantic-ai ---


@pytest.mark.parametrize("output_type", [Person, Sheet])
@pytest.mark.parametrize("output_mode", [ToolOutput, NativeOutput])
@pytest.mark.parametrize("api", [OpenAIChatModel, OpenAIResponsesModel])
def test_pydantic_ai_returns_output_type(
    server: Server, question: str, api: Any, output_mode: Any, output_type: type[BaseModel]
) -> None:
    provider = OpenAIProvider(base_url=server.v1, api_key=KEY)
    agent = Agent(api(MODEL, provider=provider), output_type=output_mode(output_type), retries=0)
    assert isinstance(agent.run_sync(question).output, output_type)


# --- Agents SDK ---


@pytest.fixture(params=[agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
def agent_model(server: Server, request: pytest.FixtureRequest) -> Any:
    client = openai.AsyncOpenAI(base_url=server.v1, api_key=KEY, max_retries=0)
    return request.param(MODEL, openai_client=client)


def test_agents_sdk_returns_output_type(agent_model: Any, question: str) -> None:
    agent = agents.Agent(name="Typist", model=agent_model, output_type=Person)
    assert isinstance(run(agent, question).final_output, Person)


def test_agents_sdk_runs_required_call_and_returns_output_type(
    agent_model: Any, question: str
) -> None:
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
def test_examples_of_page_print_answers(
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
