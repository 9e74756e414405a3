"""``/tokenize``, ``/detokenize``, ``/props``, and the context length in lists of models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("starlette")

from harmony_text import ids_of
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient

from vllm_mlx_harmony.core import text_limits, vocab
from vllm_mlx_harmony.core.turn import VOCAB_SIZE

LENGTH = 4096


@pytest.fixture
def host() -> SingleEngineHost:
    scripts = {"Hi.": "<|channel|>final<|message|>Hello.<|return|>"}
    return SingleEngineHost(ScriptedEngine(scripts, context_length=LENGTH))


@pytest.fixture
def wire(host: SingleEngineHost) -> Iterator[TestClient]:
    with TestClient(host.app, base_url="http://localhost") as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


TEXTS: dict[str, list[int]] = {
    "What is in Oslo?": [4827, 382, 306, 44865, 30],
    "": [],
    "<|start|>system": vocab.encode("<|start|>system"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_tokenized_and_restored(wire: TestClient, text: str) -> None:
    """In vLLM's and in llama.cpp's format. Text that looks like a control token remains text."""
    tokens = TEXTS[text]
    assert not vocab.TURN_ENDS.union((vocab.START,)).intersection(tokens)
    expected = {"count": len(tokens), "max_model_len": LENGTH, "tokens": tokens, "token_strs": None}
    assert wire.post("/tokenize", json={"prompt": text, "model": MODEL}).json() == expected
    assert wire.post("/tokenize", json={"content": text}).json() == {"tokens": tokens}
    assert wire.post("/detokenize", json={"tokens": tokens}).json() == {
        "prompt": text,
        "content": text,
    }


def test_tokens_are_returned_with_their_texts(wire: TestClient) -> None:
    """llama.cpp returns the bytes of partial characters."""
    tokens = vocab.encode("ก 👍🏽")
    body = {"prompt": "ก 👍🏽", "return_token_strs": True}
    assert wire.post("/tokenize", json=body).json()["token_strs"] == ["ก", " 👍", "�", "�"]
    pieces = wire.post("/tokenize", json={"content": "ก 👍🏽", "with_pieces": True}).json()
    assert pieces["tokens"] == [
        {"id": tokens[0], "piece": "ก"},
        {"id": tokens[1], "piece": " 👍"},
        *({"id": token, "piece": list(vocab.token_bytes(token))} for token in tokens[2:]),
    ]


def test_tokens_of_messages_match_prompt(host: SingleEngineHost, wire: TestClient) -> None:
    """The model may be omitted."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "Hi."}], "tools": tools}
    tokens = wire.post("/tokenize", json=body).json()
    wire.post("/v1/chat/completions", json={**body, "model": MODEL}).raise_for_status()
    (prompt,) = host.engine.prompts  # type: ignore[attr-defined]
    assert tokens["tokens"] == list(prompt)
    assert tokens["count"] == len(prompt)
    text = wire.post("/detokenize", json={"tokens": prompt}).json()["prompt"]
    assert ids_of(text) == prompt
    assert host.leases == 0


ERRORS: list[tuple[str, object, str | None]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 1}, "prompt"),
    ("/tokenize", {"content": ["a"]}, "content"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", [], None),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1, VOCAB_SIZE]}, "tokens[1]"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
]


@pytest.mark.parametrize(("path", "body", "param"), ERRORS)
def test_error_names_field(
    host: SingleEngineHost, wire: TestClient, path: str, body: object, param: str | None
) -> None:
    response = wire.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert host.leases == 0


def test_long_texts_are_limited(wire: TestClient) -> None:
    """A text may have as many tokens as a prompt; ids may be as many as the context."""
    tokens = [220] * text_limits.CONTEXT_TOKENS
    assert wire.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == " " * len(tokens)
    response = wire.post("/tokenize", json={"prompt": "a b " * 2**20})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert wire.post("/tokenize", json={"prompt": "x", "model": "nobody"}).status_code == 404


def test_props_describe_model(wire: TestClient) -> None:
    properties = wire.get("/props").json()
    assert properties.pop("build_info") == "vllm-mlx-harmony"
    assert properties == {
        "default_generation_settings": {"n_ctx": LENGTH},
        "model_alias": MODEL,
        "model_path": MODEL,
        "modalities": {"vision": False, "audio": False},
    }


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/props"])
def test_key_is_required(wire: TestClient, path: str) -> None:
    method = "GET" if path == "/props" else "POST"
    refused = wire.request(method, path, headers={"Authorization": "Bearer wrong"}, json={})
    assert refused.status_code == 401


def test_models_have_context_length_where_clients_look(wire: TestClient) -> None:
    (entry,) = wire.get("/v1/models").json()["data"]
    assert wire.get(f"/v1/models/{MODEL}").json() == entry
    fields = ("max_model_len", "context_length", "context_window", "max_context_length")
    assert {entry[field] for field in fields} == {LENGTH}
    assert entry["meta"] == {"n_ctx": LENGTH}


def test_unknown_context_length_is_omitted() -> None:
    host = SingleEngineHost(ScriptedEngine({}, context_length=None))
    client = TestClient(host.app, base_url="http://localhost")
    client.headers["Authorization"] = f"Bearer {KEY}"
    (entry,) = client.get("/v1/models").json()["data"]
    assert {*entry} == {"id", "object", "created", "owned_by"}
    assert client.get("/props").json()["default_generation_settings"] == {}
