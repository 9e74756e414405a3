"""Checks of a local server's APIs beside Chat Completions, Responses and Messages.

They cover Ollama's and LM Studio's endpoints, decisions, conversations, token ids, aliases of the
model, and reasoning that is ended by request. `CHECKS` are run on vllm-mlx with the plugin, on the
light server and on a gateway, over HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx

HELLO, THINK, URGENT = "Hello there!", "Think about it.", "It is urgent."
GREETS, GREETING = "They greet.", "Good day."
COUNTING = " ".join(str(number) for number in range(1, 400))
"""Numbers, since the server would stop a repetition."""

THINKING = "<|channel|>analysis<|message|>1"
"""The beginning of that reasoning in a prompt, wherever it was ended."""

ENOUGH = "Enough."
FINAL = "<|channel|>final<|message|>{}<|return|>"
SCRIPTS = {
    HELLO: f"<|channel|>analysis<|message|>{GREETS}<|end|><|start|>assistant"
    + FINAL.format(GREETING),
    THINK: f"<|channel|>analysis<|message|>{COUNTING}<|end|><|start|>assistant"
    + FINAL.format("After all."),
}
"""The model's output, by the end of the user's message. The answer after ended reasoning is
`ENOUGH`; the label of a decision about `URGENT` is B, true."""

USER = {"role": "user", "content": HELLO}
ALIAS = "gpt-4o"
"""An alias of the model."""

Json = dict[str, Any]


def post(http: httpx.Client, path: str, body: Json) -> Any:
    """The document of a response with status 200."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def get(http: httpx.Client, path: str) -> Any:
    response = http.get(path)
    assert response.status_code == 200, response.text
    return response.json()


def lines(http: httpx.Client, path: str, body: Json) -> list[Json]:
    """The lines of JSON of a streamed answer."""
    response = http.post(path, json=body)
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    return [json.loads(line) for line in response.text.splitlines()]


def ollama_chat_answers_whole_and_streamed(http: httpx.Client, model: str) -> None:
    body = {"model": model, "messages": [USER]}
    whole = post(http, "/api/chat", {**body, "stream": False})
    streamed = lines(http, "/api/chat", body)
    for parts in ([whole], streamed):
        messages = [part["message"] for part in parts]
        assert "".join(message.get("thinking", "") for message in messages) == GREETS
        assert "".join(message["content"] for message in messages) == GREETING
        assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1]["done_reason"] == "stop"
        assert {part["model"] for part in parts} == {model}
    counts = ("prompt_eval_count", "eval_count")
    assert [whole[name] for name in counts] == [streamed[-1][name] for name in counts]


def ollama_generate_answers_a_prompt(http: httpx.Client, model: str) -> None:
    body = {"model": model, "prompt": HELLO}
    for parts in (
        [post(http, "/api/generate", {**body, "stream": False})],
        lines(http, "/api/generate", body),
    ):
        assert "".join(part.get("thinking", "") for part in parts) == GREETS
        assert "".join(part["response"] for part in parts) == GREETING
    assert post(http, "/api/generate", {"model": model})["done_reason"] == "load"


def ollama_shows_models(http: httpx.Client, model: str) -> None:
    tags = get(http, "/api/tags")["models"]
    assert model in [tag["model"] for tag in tags]
    assert len({tag["digest"] for tag in tags}) == len(tags)
    (running,) = get(http, "/api/ps")["models"]
    shown = post(http, "/api/show", {"model": model})
    assert shown["model_info"]["gptoss.context_length"] == running["context_length"]
    assert "tools" in shown["capabilities"]
    assert get(http, "/api/version")["version"]
    missing = http.post("/api/show", json={"model": "nobody"})
    assert (missing.status_code, [*missing.json()]) == (404, ["error"])


def lm_studio_shows_models(http: httpx.Client, model: str) -> None:
    models = get(http, "/api/v0/models")["data"]
    (entry,) = (model_entry for model_entry in models if model_entry["id"] == model)
    assert get(http, f"/api/v0/models/{model}") == entry
    assert entry["loaded_context_length"] == get(http, "/v1/models")["data"][0]["max_model_len"]


def context_length_has_the_names_of_all_servers(http: httpx.Client, model: str) -> None:
    """In the fields of various servers, and in llama.cpp's ``/props``."""
    entry = get(http, "/v1/models")["data"][0]
    length = entry["max_model_len"]
    for field in ("context_length", "context_window", "max_context_length"):
        assert entry[field] == length
    properties = get(http, "/props")
    assert properties["default_generation_settings"]["n_ctx"] == entry["meta"]["n_ctx"] == length
    assert properties["model_alias"] == model


def text_becomes_ids_and_back(http: httpx.Client, model: str) -> None:
    """From a text to ids and back, and from a request to its prompt."""
    tokens = post(http, "/tokenize", {"prompt": HELLO, "model": model})["tokens"]
    assert post(http, "/tokenize", {"content": HELLO}) == {"tokens": tokens}
    assert post(http, "/detokenize", {"tokens": tokens})["content"] == HELLO
    body = {"model": model, "messages": [USER]}
    usage = post(http, "/v1/chat/completions", body)["usage"]
    assert post(http, "/tokenize", body)["count"] == usage["prompt_tokens"]


def decisions_have_probabilities(http: httpx.Client, model: str) -> None:
    statement = {"type": "noul", "instructions": URGENT}
    body = {
        "model": model,
        "state": "The checkout fails.",
        "questions": {"a": statement, "b": statement},
    }
    answers = post(http, "/v1/systemone", body)["answers"]
    assert [answer["noul"] for answer in answers.values()] == [1.0, 1.0]
    predicate = {"type": "predicate", "instructions": URGENT}
    body = {"model": model, "input": "The checkout fails.", "questions": [predicate]}
    (answer,) = post(http, "/v1/decisions", body)["answers"]
    assert answer["probability"] == 1.0


def conversation_keeps_its_items(http: httpx.Client, model: str) -> None:
    """With two responses, whole and streamed, and its items."""
    brief = {"type": "message", "role": "developer", "content": "Be brief."}
    created = post(http, "/v1/conversations", {"metadata": {"topic": "x"}, "items": [brief]})
    path = f"/v1/conversations/{created['id']}"
    body = {"model": model, "input": HELLO, "conversation": created["id"]}
    whole = post(http, "/v1/responses", body)
    streamed = http.post("/v1/responses", json={**body, "stream": True}).text
    (last,) = (
        event
        for event in map(json.loads, _event_data(streamed))
        if event["type"] == "response.completed"
    )
    items = get(http, f"{path}/items?order=asc&limit=100")["data"]
    answers = [*whole["output"], *last["response"]["output"]]
    assert [item["id"] for item in items[2:] if item.get("role") != "user"] == [
        item["id"] for item in answers
    ]
    assert [item["content"][0]["text"] for item in answers if item["type"] == "message"] == [
        GREETING
    ] * 2
    assert get(http, f"{path}/items/{items[0]['id']}") == items[0]
    added = post(http, f"{path}/items", {"items": [brief]})["data"]
    assert http.delete(f"{path}/items/{added[0]['id']}").json() == created
    assert post(http, path, {"metadata": {"topic": "y"}})["metadata"] == {"topic": "y"}
    assert http.delete(path).json()["deleted"] is True
    assert http.get(path).json()["error"]["code"] == "conversation_not_found"


def reasoning_ends_by_request(http: httpx.Client, model: str) -> None:
    """The stream names the reason and continues with an answer."""
    control = "/v1/chat/completions/control"
    messages = [{"role": "user", "content": THINK}]
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": 4_000}
    text, ended_by, control_answer = "", None, None
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "choices" in chunk, chunk
            delta = chunk["choices"][0]["delta"]
            text += delta.get("content") or ""
            ended_by = delta.get("reasoning_ended_by", ended_by)
            if control_answer is None and delta.get("reasoning_content"):
                control_answer = post(http, control, {"id": chunk["id"], "action": "reasoning_end"})
    assert control_answer == {"success": True}
    assert (text, ended_by) == (ENOUGH, "request")
    body = {"id": chunk["id"], "action": "reasoning_end"}
    assert post(http, control, body)["success"] is False, "it has ended"


def alias_is_answered_under_its_name(http: httpx.Client, model: str) -> None:
    """An answer has the requested name, whole and streamed; unknown names are rejected."""
    body: Json = {"model": ALIAS, "messages": [USER]}
    assert post(http, "/v1/chat/completions", body)["model"] == ALIAS
    streamed = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    assert {json.loads(data)["model"] for data in _event_data(streamed)} == {ALIAS}
    assert post(http, "/v1/responses", {"model": ALIAS, "input": HELLO})["model"] == ALIAS
    assert post(http, "/v1/messages", {**body, "max_tokens": 100})["model"] == ALIAS
    assert post(http, "/api/chat", {**body, "stream": False})["model"] == ALIAS
    assert get(http, f"/v1/models/{ALIAS}")["id"] == ALIAS
    response = http.post("/v1/chat/completions", json={**body, "model": "llama-3"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def _event_data(stream: str) -> list[str]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line[:6] == "data: "]
    return [text for text in lines if text != "[DONE]"]


CHECKS: Mapping[str, Callable[[httpx.Client, str], None]] = {
    check.__name__: check
    for check in (
        ollama_chat_answers_whole_and_streamed,
        ollama_generate_answers_a_prompt,
        ollama_shows_models,
        lm_studio_shows_models,
        context_length_has_the_names_of_all_servers,
        text_becomes_ids_and_back,
        decisions_have_probabilities,
        conversation_keeps_its_items,
        reasoning_ends_by_request,
        alias_is_answered_under_its_name,
    )
}
