"""The names of the model: its own, and its aliases.

Clients come with built-in model names (``claude-…``, ``gpt-5``), and users copy those that other
servers have for gpt-oss (``gpt-oss:20b``). A server with one model answers to them in all APIs, or
to those that the operator sets. On a server with several models a name always means one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from vllm_mlx_harmony.core.errors import RequestError

MAX_MODEL_NAME = 4_096
"""Maximum length of a model's name, which may be a path."""

COMMON = (
    *("claude-*", "gpt-[0-9]*", "chatgpt-*", "codex-*", "o[0-9]", "o[0-9]-*"),
    *("gpt-oss", "gpt-oss:latest", "default", "default_model", "local-model"),
)
"""Names that clients send by default: those of Anthropic's and OpenAI's models, and what the
documentation of Ollama, mlx-lm, vLLM and LM Studio calls a model. docs/agents.md has the table."""

SIZES = ("20b", "120b")
OF_SIZE = ("gpt-oss:{}", "gpt-oss-{}", "openai/gpt-oss-{}")
"""Names of gpt-oss elsewhere, for a model whose own name has the size: a client that asks for the
other size gets 404."""


def common_names(model: str) -> tuple[str, ...]:
    """The names by which clients may mean ``model`` if the operator sets none."""
    sizes = [size for size in SIZES if size in model.lower()]
    return (*COMMON, *(name.format(size) for name in OF_SIZE for size in sizes))


def check_length(name: str) -> None:
    """Raises ``RequestError`` for a name too long to be repeated in answers, logs and errors."""
    if len(name) > MAX_MODEL_NAME:
        problem = f"model must have at most {MAX_MODEL_NAME} characters"
        raise RequestError(problem, param="model", code="model_not_found", status=404)


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names that requests may use for ``model``: its own, and the ``configured`` ones, which
    may be patterns (``None``: `common_names`). ``model`` is ``None`` if the server has several;
    then there are no aliases."""

    model: str | None
    configured: tuple[str, ...] | None

    @property
    def aliases(self) -> tuple[str, ...]:
        """The configured aliases and patterns of them; empty if there are several models."""
        if not self.model or self.configured is None:
            return ()
        return tuple(dict.fromkeys(name for name in self.configured if name != self.model))

    def is_alias(self, name: str) -> bool:
        if not self.model or name == self.model:
            return False
        names = common_names(self.model) if self.configured is None else self.aliases
        return any(fnmatchcase(name, alias) for alias in names)

    def canonical_name(self, name: str) -> str:
        """The server's name for the model that a request calls ``name``."""
        return str(self.model) if self.is_alias(name) else name

    def echoed_name(self, name: str) -> str:
        """The model's name in a response: as in the request, because clients compare them."""
        return name if self.is_alias(name) else self.model or name
