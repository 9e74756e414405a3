"""connect: the configuration of Codex, Claude Code or opencode for this server.

Claude Code and opencode can load an additional file, so the user's own files stay as they are.
Codex would warn about one (with a profile or ``-c`` it cannot use its background server), so three
keys and a table are added to its own file. API keys are never written: the agents read them from
the environment.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import tomlkit
from tomlkit.items import Item

from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.core.files import write_atomically

NAME = "vllm-mlx"
"""The name of the provider, and of files that only this command writes."""

URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "VLLM_API_KEY"
"""The environment variable from which Codex and opencode read the server's key."""

CONTEXT = 131_072
"""Context length of both gpt-oss models, in tokens, if the server does not report one."""

LEAST_CONTEXT = 4_096
"""In tokens; an agent's own instructions and tools take more."""

OUTPUT = 32_768
"""Maximum output tokens: the host's default for ``--max-request-tokens``."""

PATIENCE = 5.0
"""Seconds within which a server must list its models."""

EFFORTS = {
    "low": "Answers quickly",
    "medium": "Thinks before it answers",
    "high": "Thinks long, for hard problems",
}

INSTRUCTIONS = """\
You are Codex, a coding agent. You share a terminal and a workspace with the user.

Work
- Look before you change anything: read what matters, search with `rg`, run what shows the state.
- Do the whole task before you end your turn. Ask only what you cannot find out yourself.
- Change only what the task needs, in the style of the code around it. Fix causes, not symptoms.
- Edit files with `apply_patch`. Move and inspect them with the shell.
- Check your work: run the tests or the program when there is a way to. Say so when there is none.
- Leave alone what others have changed. Never delete work or rewrite history unless asked to.

Words
- Before a group of commands, say in one short sentence what you are about to do.
- End with a short answer: what you did, where (`path/file.py:12`), and what is left to do.
"""
"""The start of every Codex prompt; an entry of its catalog requires one."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server and its model: ``url`` without a path, ``context`` in tokens.

    ``keyed``: the server requires a key.
    """

    url: str
    model: str
    context: int = CONTEXT
    keyed: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """The files of a configuration, by path, and the command that starts the agent with it."""

    agent: str
    files: Mapping[Path, str]
    command: str


def run(
    agent: str, *, url: str, model: str | None, key: str | None, context: int | None, write: bool
) -> int:
    """Prints the configuration of an agent for a server, or writes it.

    The server is queried for ``model`` and ``context`` unless they are given. Raises ``UsageError``
    if it does not report them, and for files that cannot be written.
    """
    served = look(url, model, key, context)
    setup = AGENTS[agent](served)
    print(f"{setup.agent} with {served.model} ({served.context:,} tokens) at {served.url}\n")
    for path, content in setup.files.items():
        if write:
            _write(path, content)
        else:
            print(f"--- {_shown(path)}\n{content}")
    if write:
        print()
    if served.keyed:
        print(f"The agent reads the key from the environment: export {KEY_VARIABLE}=…")
    print(f"{'Start' if write else 'Add --write to write these files, then start'} it with\n")
    print(f"  {setup.command}")
    return 0


# --- The server


def look(url: str, model: str | None, key: str | None, context: int | None) -> Served:
    """The server at ``url`` and its model; queried only for what is not given.

    Raises ``UsageError``.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not _is_url(base):
        raise UsageError(f"--url: {url!r} is not a server's address: http://host:port")
    if model == "":
        raise UsageError("--model is empty")
    served = Served(base, model or "", context or CONTEXT, keyed=key is not None)
    if model is not None and context is not None:
        return served
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(f"{base}/v1/models", headers=headers), timeout=PATIENCE) as response:
            document = json.loads(response.read())
        listed = document.get("data") if isinstance(document, dict) else None
        if not isinstance(listed, list):
            raise ValueError("it does not list its models at /v1/models")
    except HTTPError as error:
        fix = "set --key" if error.code in (401, 403) else "is it vllm-mlx?"
        raise UsageError(f"the server at {base} answered {error.code}: {fix}") from error
    except (OSError, ValueError, HTTPException) as error:
        if model is not None:
            return served
        reason = error.reason if isinstance(error, URLError) else error
        raise UsageError(
            f"no server answers at {base} ({reason}): start it, set --url, or set --model to "
            "configure the agent without it"
        ) from error
    lengths = {
        str(entry["id"]): entry.get("max_model_len")
        for entry in listed
        if isinstance(entry, dict) and "id" in entry
    }
    serves = f"the server at {base} serves {', '.join(lengths) or 'nothing'}"
    if model is None and len(lengths) != 1:
        raise UsageError(f"{serves}: choose one with --model")
    if model is not None and model not in lengths:
        raise UsageError(f"{serves}, not {model}")
    name = model or next(iter(lengths))
    return replace(served, model=name, context=int(context or lengths[name] or CONTEXT))


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


# --- The agents


def codex(served: Served) -> Setup:
    """A provider and a catalog of models, without which Codex warns and guesses."""
    home = Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex")
    catalog = home / f"{NAME}-models.json"
    lines = [
        f"model = {json.dumps(served.model)}",
        f"model_provider = {json.dumps(NAME)}",
        f"model_catalog_json = {json.dumps(str(catalog))}",
        "",
        f"[model_providers.{NAME}]",
        f"name = {json.dumps(NAME)}",
        f"base_url = {json.dumps(f'{served.url}/v1')}",
        'wire_api = "responses"',
        *([f"env_key = {json.dumps(KEY_VARIABLE)}"] if served.keyed else []),
    ]
    model = {
        "slug": served.model,
        "display_name": served.model,
        "description": f"gpt-oss at {served.url}",
        "base_instructions": INSTRUCTIONS,
        "default_reasoning_level": "medium",
        "supported_reasoning_levels": [
            {"effort": effort, "description": about} for effort, about in EFFORTS.items()
        ],
        "default_reasoning_summary": "auto",
        "context_window": served.context,
        "max_context_window": served.context,
        "effective_context_window_percent": 95,
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "apply_patch_tool_type": "freeform",
        "shell_type": "unified_exec",
        "input_modalities": ["text"],
        "experimental_supported_tools": [],
        "support_verbosity": False,
        "supported_in_api": True,
        "visibility": "list",
        "priority": 1,
    }
    files = {  # in this order: the second names the first
        catalog: _json({"models": [model]}),
        home / "config.toml": "\n".join(lines) + "\n",
    }
    return Setup("Codex", files, "codex")


def claude(served: Served) -> Setup:
    """Settings that set its environment variables; all its model names are the one model."""
    home = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
    path = home / f"{NAME}.json"
    models = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_DEFAULT_FABLE_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",  # what versions before 2.0 call the one above
        "CLAUDE_CODE_SUBAGENT_MODEL",
    )
    environment = {
        "ANTHROPIC_BASE_URL": served.url,
        **({} if served.keyed else {"ANTHROPIC_AUTH_TOKEN": "local"}),
        **dict.fromkeys(models, served.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(OUTPUT, served.context // 4)),
    }
    token = f'ANTHROPIC_AUTH_TOKEN="${KEY_VARIABLE}" ' if served.keyed else ""
    command = f"{token}claude --settings {_shown(path)}"
    return Setup("Claude Code", {path: _json({"env": environment})}, command)


def opencode(served: Served) -> Setup:
    """A provider, through the package for OpenAI-compatible servers."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "opencode"
    path = home / f"{NAME}.json"
    model = {
        "name": served.model,
        "reasoning": True,
        "tool_call": True,
        "interleaved": {"field": "reasoning_content"},
        "limit": {"context": served.context, "output": min(OUTPUT, served.context // 4)},
    }
    document = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"{NAME}/{served.model}",
        "small_model": f"{NAME}/{served.model}",
        "provider": {
            NAME: {
                "npm": "@ai-sdk/openai-compatible",
                "name": "gpt-oss on vllm-mlx",
                "options": {
                    "baseURL": f"{served.url}/v1",
                    "apiKey": f"{{env:{KEY_VARIABLE}}}" if served.keyed else "none",
                },
                "models": {served.model: model},
            }
        },
    }
    return Setup("opencode", {path: _json(document)}, f"OPENCODE_CONFIG={_shown(path)} opencode")


AGENTS: Mapping[str, Callable[[Served], Setup]] = {
    "codex": codex,
    "claude": claude,
    "opencode": opencode,
}


def _json(document: object) -> str:
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def _shown(path: Path) -> str:
    """``path`` with ``~`` for the home directory."""
    home = str(Path.home())
    return f"~{str(path)[len(home) :]}" if str(path).startswith(f"{home}/") else str(path)


# --- Writing


def _write(path: Path, content: str) -> None:
    """Writes a file, after a backup of an existing one. Raises ``UsageError``."""
    try:
        before = path.read_text("utf-8") if path.exists() else None
        if before is not None and path.suffix == ".toml":
            content = merged(before, content)
        if before == content:
            print(f"{_shown(path)} is up to date")
            return
        place = path.resolve()  # a link stays one
        mode = place.stat().st_mode if before is not None else None
        if before is not None:
            print(f"{_shown(path)} is backed up as {_shown(_copy(path))}")
        write_atomically(place, content.encode())
        if mode is not None:
            place.chmod(mode)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(
            f"{path} cannot be changed safely ({error}): run without --write and edit it by hand"
        ) from error
    print(f"{_shown(path)} written")


def _copy(path: Path) -> Path:
    number = 1
    while (copy := path.with_name(f"{path.name}.{number}.bak")).exists():
        number += 1
    shutil.copy2(path, copy)
    return copy


def merged(before: str, ours: str) -> str:
    """The TOML document ``before`` with the keys and tables of ``ours``, and otherwise unchanged.

    A replaced value remains as a comment. Merging again changes nothing. Raises ``ValueError`` for
    invalid TOML, and for tables that cannot be extended: inline ones, or those of dotted keys.
    """
    document, added = tomlkit.parse(before), tomlkit.parse(ours)
    wanted = document.unwrap()
    for key, value in added.items():
        old = document.get(key)
        if not isinstance(value, Mapping):
            wanted[key] = value
            if old == value:
                continue
            if isinstance(old, Item) and "\n" not in old.as_string():
                comment = old.trivia.comment.lstrip("# ")
                value.comment(f"was {old.as_string()}{comment and f'; {comment}'}")
            document[key] = value
        elif old is None:
            wanted[key] = document[key] = value
        else:
            wanted[key].update(value)
            for name, table in value.items():
                _fill(old.setdefault(name, tomlkit.table()), table)
    text = tomlkit.dumps(document)
    if tomlkit.parse(text).unwrap() != wanted:
        raise ValueError("other settings in it would change")
    return text


def _fill(table: MutableMapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Makes ``table`` equal to ``ours``, keeping its comments."""
    for key in table.keys() - ours.keys():
        del table[key]
    for key, value in ours.items():
        if table.get(key) != value:
            table[key] = value
