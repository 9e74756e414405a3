"""Tokens and facts about the model, as vLLM's and llama.cpp's servers give them.

https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html,
https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md. Both have the same paths;
the field with the text tells them apart. Text is encoded as in prompts: nothing that it contains
becomes a control token (semantics A7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.text_limits import CONTEXT_TOKENS
from vllm_mlx_harmony.core.turn import VOCAB_SIZE, Defaults
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.protocols.validation import RequestModel, required, validate
from vllm_mlx_harmony.server import models
from vllm_mlx_harmony.server.body import read_document
from vllm_mlx_harmony.server.endpoint import OpenAIEndpoint, json_in_thread
from vllm_mlx_harmony.server.front_end import Caller, front_end_of
from vllm_mlx_harmony.server.serving import Api, LeasedRequest, rendered_prompt, serve
from vllm_mlx_harmony.tasks import in_thread


class TokenizeBody(RequestModel):
    """``prompt`` is vLLM's field, ``content`` llama.cpp's."""

    prompt: str | None = None
    content: str | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(RequestModel):
    tokens: list[Annotated[int, Field(ge=0, lt=VOCAB_SIZE)]]


def _read(body: object, defaults: Defaults, caller: Caller) -> TokenizeBody | chat.ChatRequest:
    """The texts to encode, or a request of Chat, which may leave its model out."""
    if isinstance(body, dict) and body.get("messages") is not None:
        return chat.read({"model": "default", **body}, defaults)
    parsed = validate(TokenizeBody, body)
    if parsed.prompt is None and parsed.content is None:
        raise required("prompt")
    return parsed


TOKENIZE = Api("tokenize", _read)


async def tokenize(request: Request) -> Response:
    """``POST /tokenize``."""
    return await serve(TOKENIZE, request, _tokenize)


async def _tokenize(
    leased_request: LeasedRequest[Api[TokenizeBody | chat.ChatRequest]],
) -> Response:
    document, length = leased_request.document.value, leased_request.lease.engine.context_length
    body = document if isinstance(document, dict) else {}
    if body.get("messages") is not None:
        ids: Sequence[int] = await rendered_prompt(leased_request)
        strings = body.get("return_token_strs") is True
        return await json_in_thread(_vllm_document, ids, length, strings)
    parsed = _read(document, Defaults(), leased_request.caller)
    assert isinstance(parsed, TokenizeBody)  # there are no messages
    if parsed.prompt is not None:
        ids = await in_thread(vocab.encode, parsed.prompt)
        return await json_in_thread(_vllm_document, ids, length, bool(parsed.return_token_strs))
    ids = await in_thread(vocab.encode, parsed.content or "")
    return await json_in_thread(_llamacpp_document, ids, bool(parsed.with_pieces))


def _llamacpp_document(ids: Sequence[int], pieces: bool) -> dict[str, Any]:
    return {"tokens": [{"id": token, "piece": _piece(token)} for token in ids] if pieces else ids}


def _vllm_document(ids: Sequence[int], length: int | None, strings: bool) -> dict[str, Any]:
    return {
        "count": len(ids),
        "max_model_len": length,
        "tokens": ids,
        "token_strs": [*map(vocab.token_text, ids)] if strings else None,
    }


def _piece(token: int) -> str | list[int]:
    """The text of a token, or its bytes if they are parts of characters."""
    content = vocab.token_bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return list(content)


async def detokenize(request: Request) -> Response:
    """``POST /detokenize``."""
    settings = front_end_of(request).settings
    _, document = await read_document(request, settings, CONTEXT_TOKENS)
    tokens = (await in_thread(validate, DetokenizeBody, document.value)).tokens
    return await json_in_thread(_of_both, tokens)


def _of_both(tokens: Sequence[int]) -> dict[str, str]:
    text = _text(tokens)
    return {"prompt": text, "content": text}


def _text(tokens: Sequence[int]) -> str:
    """The text of ``tokens``, with the names of control tokens."""
    parts = (
        vocab.token_text(token).encode() if token in vocab.CONTROL else vocab.token_bytes(token)
        for token in tokens
    )
    return b"".join(parts).decode("utf-8", "replace")


async def properties(request: Request) -> Response:
    """``GET /props``: llama.cpp's, as far as they apply."""
    entry = next(iter(await models.entries(front_end_of(request))), {"id": ""})
    length = entry.get("max_model_len")
    return JSONResponse(
        {
            "default_generation_settings": {} if length is None else {"n_ctx": length},
            "model_alias": entry["id"],
            "model_path": entry["id"],
            "modalities": {"vision": False, "audio": False},
            "build_info": "vllm-mlx-harmony",
        }
    )


ENDPOINTS = (
    OpenAIEndpoint(
        "/tokenize",
        ("POST",),
        tokenize,
        "token ids of a text or a conversation",
        dependencies_of=("/v1/chat/completions", "POST"),
    ),
    OpenAIEndpoint(
        "/detokenize",
        ("POST",),
        detokenize,
        "the text of token ids",
        dependencies_of=("/v1/chat/completions", "POST"),
    ),
    OpenAIEndpoint(
        "/props",
        ("GET",),
        properties,
        "the context length where clients of llama.cpp read it",
        dependencies_of=("/v1/models", "GET"),
    ),
)
