"""Ollama's API: the models of the server, from the entries of OpenAI's list.

Sizes and the quantization are not known: the model may be behind an engine elsewhere. They are 0
and empty, and not left out, because clients read them. The digest is that of the name: to clients,
models with the same digest are one model with several names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.ollama.emitter import timestamp

VERSION = "0.14.0"
"""The version of Ollama whose API this is. Clients compare it with the one that they need: VS Code
with 0.6.4, and Codex with 0.13.4, from which on Ollama has the Responses API."""

ARCHITECTURE = "gptoss"
"""Ollama's name of the architecture of gpt-oss."""

_DETAILS: Document = {
    "parent_model": "",
    "format": "",
    "family": ARCHITECTURE,
    "families": [ARCHITECTURE],
    "parameter_size": "",
    "quantization_level": "",
}
CAPABILITIES = ("completion", "tools", "thinking")

_NEVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded."""


def tags(entries: Iterable[Document]) -> Document:
    """The response of ``GET /api/tags``. ``entries`` are those of ``GET /v1/models``."""
    return {
        "models": [
            {
                **_named(entry),
                "modified_at": timestamp(entry.get("created") or 0),
                "capabilities": [*CAPABILITIES],
            }
            for entry in entries
        ]
    }


def running(entries: Iterable[Document]) -> Document:
    """The response of ``GET /api/ps``: the entries of models that are loaded."""
    models = []
    for entry in entries:
        length = entry.get("max_model_len")
        context = {} if length is None else {"context_length": length}
        models.append({**_named(entry), "expires_at": _NEVER, "size_vram": 0, **context})
    return {"models": models}


def shown(entry: Document) -> Document:
    """The response of ``POST /api/show`` for a model."""
    information: Document = {"general.architecture": ARCHITECTURE}
    if (length := entry.get("max_model_len")) is not None:
        information[f"{ARCHITECTURE}.context_length"] = length
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _DETAILS,
        "model_info": information,
        "capabilities": [*CAPABILITIES],
        "modified_at": timestamp(entry.get("created") or 0),
    }


def model_in(body: object) -> str:
    """The model that the body of ``POST /api/show`` names. Raises ``RequestError``."""
    fields = body if isinstance(body, dict) else {}
    name = fields.get("model") or fields.get("name")
    if not isinstance(name, str):
        raise RequestError("model must be a string", param="model", code="invalid_type")
    return name


def _named(entry: Document) -> Document:
    name = entry["id"]
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return {"name": name, "model": name, "size": 0, "digest": digest, "details": _DETAILS}
