"""Decisions: typed questions, answered with probabilities, through the clients that have them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

import ollama
from official_clients import clients
from scripted_host import KEY, MODEL, DecidingEngine, SingleEngineHost
from starlette.testclient import TestClient

from vllm_mlx_harmony.core import vocab

STATE = "Our checkout has returned 500 errors since 9am."
LABEL = {
    "type": "choice",
    "instructions": "Which label fits?",
    "criteria": {"billing": "Payments", "bug": None, "account": "Logins"},
}
URGENT = {"type": "noul", "instructions": "The ticket is urgent.", "criteria": {"true": "Today"}}
ANGER = {"type": "score", "instructions": {"rate": "Zörn"}, "criteria": ["calm", "cross", "mad"]}

LIKELY = {
    "label fits": {"A": 0.1, "B": 0.3},
    "urgent": {"A": 0.1, "B": 0.4},
    "Zörn": {"A": 0.2, "B": 0.2, "C": 0.1},
}
"""Probabilities of labels, by a part of the question."""


@pytest.fixture
def engine() -> DecidingEngine:
    return DecidingEngine({}, likely=LIKELY)


@pytest.fixture
def wire(engine: DecidingEngine) -> Iterator[TestClient]:
    with TestClient(SingleEngineHost(engine).app, base_url="http://localhost") as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


def systemone(**questions: Any) -> dict[str, Any]:
    return {"model": MODEL, "state": STATE, "questions": questions}


def decisions(*questions: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": STATE, "questions": questions, **fields}


ONE = systemone(label=LABEL, urgent=URGENT, anger=ANGER)


def test_systemone_answers_questions(wire: TestClient, engine: DecidingEngine) -> None:
    answer = wire.post("/v1/systemone", json=ONE)
    assert answer.status_code == 200, answer.text
    parsed = ollama.SystemOneResponse.model_validate(
        answer.json()
    )  # as the official client reads it
    label, urgent, anger = (parsed.answers[name] for name in ("label", "urgent", "anger"))
    assert (label.type, label.choice) == ("choice", "bug")
    assert label.probabilities == pytest.approx({"billing": 0.25, "bug": 0.75, "account": 0})
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert label.confidence == pytest.approx(1 - entropy / math.log(3))
    assert (urgent.type, urgent.noul) == ("noul", pytest.approx(0.8))
    assert anger.score == pytest.approx(0.8)
    assert anger.legend == {"0": "calm", "1": "cross", "2": "mad"}
    assert anger.probabilities == pytest.approx({"0": 0.4, "1": 0.4, "2": 0.2})
    assert parsed.usage.input_tokens == sum(map(len, engine.prompts))


def test_prompts_begin_with_input(wire: TestClient, engine: DecidingEngine) -> None:
    """It is computed only once. Prompts end where the answer begins."""
    wire.post("/v1/systemone", json=ONE).raise_for_status()
    texts = [vocab.encoding().decode([*prompt]) for prompt in engine.prompts]
    begin, end = texts[0].split(STATE)
    for text in texts:
        assert text.startswith(f"{begin}{STATE}<|end|><|start|>user<|message|>")
        assert text.endswith("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert "Which label fits?\n\nOptions:\nA. billing: Payments\nB. bug\nC. account: Logins<" in end
    assert '{"rate": "Zörn"}' in texts[2] and "ordered, from the lowest to the highest" in texts[2]


CHOICE = {
    "type": "choice",
    "name": "label",
    "instructions": [{"type": "input_text", "text": "Which label fits?"}],
    "choices": [{"value": "true"}, {"value": True, "description": "Payments"}],
}
PREDICATE = {"type": "predicate", "instructions": "It is urgent."}
SCORE = {
    "type": "score",
    "name": "anger",
    "instructions": "Rate the Zörn.",
    "levels": [{"label": "calm"}, {"label": "cross", "description": "Loud"}],
}
UNKNOWN = {"type": "predicate", "name": "other", "instructions": "It rains."}


def test_decisions_answer_questions(engine: DecidingEngine) -> None:
    client, _ = clients(SingleEngineHost(engine))
    body: Any = decisions(CHOICE, PREDICATE, SCORE, UNKNOWN)
    response: Any = asyncio.run(client.decisions.create(**body))
    label, urgent, anger, refused = response.answers
    assert (label.name, label.choice) == ("label", True)
    assert [option.value for option in label.probabilities] == ["true", True]
    assert [option.probability for option in label.probabilities] == pytest.approx([0.25, 0.75])
    assert (urgent.name, urgent.probability) == (None, pytest.approx(0.8))
    assert (anger.score, anger.confidence) == (pytest.approx(0.5), pytest.approx(0))
    assert [level.label for level in anger.probabilities] == ["calm", "cross"]
    assert (refused.type, refused.name) == ("refusal", "other")
    assert response.usage.total_tokens == sum(map(len, engine.prompts))


INPUT = [
    {"role": "developer", "content": "Be fair."},
    {"role": "user", "content": [{"type": "input_json", "data": {"text": STATE}}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "It is down."},
]


def test_decisions_accept_messages_and_calls(wire: TestClient, engine: DecidingEngine) -> None:
    """In the format of the Responses API."""
    wire.post("/v1/decisions", json=decisions(PREDICATE, input=INPUT)).raise_for_status()
    text = vocab.encoding().decode([*engine.prompts[0]])
    for part in ("Be fair.", f'{{"text": "{STATE}"}}', "functions.look", "It is down."):
        assert part in text


LONG = {**LABEL, "criteria": {f"c{at}": None for at in range(256)}}
INVALID = [
    ("systemone", {"model": MODEL, "state": STATE, "questions": {}}, "questions"),
    ("systemone", systemone(x={"type": "noul"}), "questions.x.instructions"),
    ("systemone", systemone(x={**URGENT, "type": "guess"}), "questions.x.type"),
    ("systemone", systemone(x={**ANGER, "criteria": ["calm"]}), "questions.x.criteria"),
    ("systemone", systemone(x=LONG), "questions.x.criteria"),
    ("systemone", systemone(**{f"q{at}": URGENT for at in range(65)}), "questions"),
    ("systemone", {**ONE, "images": ["aGk="]}, "images"),
    ("decisions", decisions(), "questions"),
    ("decisions", decisions(PREDICATE, input=7), "input"),
    ("decisions", decisions(PREDICATE, input=[{"role": "robot", "content": "x"}]), "input[0].role"),
    ("decisions", decisions({**CHOICE, "choices": [{"value": "a"}] * 2}), "questions[0].choices"),
    (
        "decisions",
        decisions({**PREDICATE, "instructions": [{"type": "input_image", "image_url": "x"}]}),
        "questions[0].instructions[0]",
    ),
]


@pytest.mark.parametrize(("path", "body", "param"), INVALID)
def test_invalid_requests_name_the_field(
    wire: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = wire.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error["message"]


def test_question_without_answer_fails(wire: TestClient) -> None:
    rains = systemone(rain={"type": "noul", "instructions": "It rains."})
    answer = wire.post("/v1/systemone", json=rains)
    assert answer.status_code == 500 and "none of its options" in answer.json()["error"]["message"]


def test_input_beyond_context_is_rejected(wire: TestClient, engine: DecidingEngine) -> None:
    answer = wire.post("/v1/systemone", json={**ONE, "state": " a" * 5_000})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not engine.prompts


def test_engine_without_log_probabilities_is_rejected(
    wire: TestClient, engine: DecidingEngine
) -> None:
    engine.has_logprobs = False
    answer = wire.post("/v1/systemone", json=ONE)
    assert answer.status_code == 400 and "log probabilities" in answer.json()["error"]["message"]


def test_option_labels_are_single_tokens(wire: TestClient, engine: DecidingEngine) -> None:
    many = {**LABEL, "criteria": {f"c{at}": None for at in range(255)}}
    wire.post("/v1/systemone", json=systemone(label=many)).raise_for_status()
    text = vocab.encoding().decode([*engine.prompts[0]])
    labels = [line.partition(". c")[0] for line in text.splitlines() if ". c" in line]
    assert len({*labels}) == 255 and all(len(vocab.encode(label)) == 1 for label in labels)


def test_other_method_and_missing_key_are_rejected(wire: TestClient) -> None:
    assert wire.get("/v1/decisions").status_code == 405
    del wire.headers["Authorization"]
    assert wire.post("/v1/systemone", json=ONE).status_code == 401
