"""The coding agents that `launch` starts, a row for each: `AGENTS`.

A row configures an agent for runs with a server: by arguments, environment variables and files
in a directory of this project. All other settings of the agent still apply, and none of them is
changed. Keys are not written to files: agents read them from the environment, from `VLLM_API_KEY`
or from a variable of their own. Only Cline gets its key as an argument, which other users of the
machine can see in the list of processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

NAME = "vllm-mlx"
"""The name of the provider in an agent's configuration, and of files that only we write."""

KEY_VARIABLE = "VLLM_API_KEY"
"""The environment variable that has the server's key."""

LOCAL_KEY = "local"
"""What agents that insist on a key send to a server without one."""

CONTEXT = 131_072
"""Context length of both gpt-oss models, in tokens, if the server does not report one."""

OUTPUT = 32_768
"""Maximum output tokens: the host's default for ``--max-request-tokens``."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server and its model: ``url`` without a path, ``context`` in tokens.

    ``keyed``: the server requires a key. ``searches``: it searches the web (``--web-search``).
    """

    url: str
    model: str
    context: int = CONTEXT
    keyed: bool = False
    searches: bool = False

    @property
    def output(self) -> int:
        """Tokens that an agent may ask for at once."""
        return min(OUTPUT, self.context // 4)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an agent: ``files`` by their path in a directory that is its own, arguments that
    precede the user's, and variables that are added to the environment."""

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent: its command, and the package that has it on npm, or on PyPI with ``python``.

    ``version`` of the package is the last one that `ci/leg.py agents` has passed with. ``homebrew``
    is a formula that installs the command. ``set_up`` takes a server, its key and the directory of
    the run's files.
    """

    title: str
    command: str
    package: str
    version: str
    set_up: Callable[[Target, str, Path], Run]
    python: str = ""
    homebrew: str = ""

    @property
    def install(self) -> str:
        if self.homebrew:
            return f"brew install {self.homebrew}"
        if self.python:
            return f"uv tool install --python {self.python} {self.package}"
        return f"npm install -g {self.package}"

    @property
    def installer(self) -> str:
        """The program that `installation` needs."""
        return "uv" if self.python else "npm"

    def installation(self, directory: Path, version: str) -> list[list[str]]:
        """The commands that install ``version`` of the package below ``directory``, in which they
        have to run: npm and uv read settings from the directory in which they are started."""
        if self.python:
            wanted = self.package if version == LATEST else f"{self.package}=={version}"
            uv = ["uv", "--no-config"]
            return [
                [*uv, "venv", "--quiet", "--no-project", "--python", self.python, "venv"],
                [*uv, "pip", "install", "--quiet", "--python", "venv", wanted],
            ]
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        package = f"{self.package}@{version}"
        return [["npm", "install", "--prefix", str(directory), *quiet, package]]

    def program(self, directory: Path) -> Path:
        """The command that `installation` brings."""
        programs = "venv/bin" if self.python else "node_modules/.bin"
        return directory / programs / self.command


def json_text(document: object) -> str:
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


# --- Codex

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


STREAM_IDLE_MS = 4 * 3600 * 1000
"""Silence in milliseconds after which Codex gives up on a stream, by default five minutes. Streams
of ours have an event every few seconds; what is between need not let them through."""


def codex_settings(target: Target, catalog: Path) -> dict[str, Any]:
    """The keys of `config.toml` that make a server the provider; ``catalog`` has its model."""
    provider: dict[str, Any] = {
        "name": NAME,
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "stream_idle_timeout_ms": STREAM_IDLE_MS,
    }
    if target.keyed:
        provider["env_key"] = KEY_VARIABLE
    # By default, Codex asks for results of an index without access to the web ("cached").
    search = {"web_search": "live"} if target.searches else {}
    return {
        "model": target.model,
        "model_provider": NAME,
        "model_catalog_json": str(catalog),
        **search,
        "model_providers": {NAME: provider},
    }


def codex_catalog(target: Target) -> str:
    """A catalog of models, without which Codex warns and guesses."""
    model = {
        "slug": target.model,
        "display_name": target.model,
        "description": f"gpt-oss at {target.url}",
        "base_instructions": INSTRUCTIONS,
        "default_reasoning_level": "medium",
        "supported_reasoning_levels": [
            {"effort": effort, "description": about} for effort, about in EFFORTS.items()
        ],
        "default_reasoning_summary": "auto",
        "context_window": target.context,
        "max_context_window": target.context,
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
    return json_text({"models": [model]})


def _codex(target: Target, key: str, directory: Path) -> Run:
    settings = codex_settings(target, directory / "models.json")
    provider = settings.pop("model_providers")[NAME]
    settings |= {f"model_providers.{NAME}.{name}": value for name, value in provider.items()}
    return Run(
        # JSON strings are TOML strings, too
        tuple(
            part
            for name, value in settings.items()
            for part in ("-c", f"{name}={json.dumps(value)}")
        ),
        {KEY_VARIABLE: key},
        {"models.json": codex_catalog(target)},
    )


# --- Claude Code


def claude_variables(target: Target) -> dict[str, str]:
    """Its environment without a key; all its model names are the one model."""
    models = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_DEFAULT_FABLE_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",  # what versions before 2.0 call the one above
        "CLAUDE_CODE_SUBAGENT_MODEL",
    )
    return {
        "ANTHROPIC_BASE_URL": target.url,
        **dict.fromkeys(models, target.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.output),
    }


def claude_permissions(target: Target) -> dict[str, Any]:
    """The setting ``permissions``. Claude Code's WebSearch asks its server to search, which not
    every one does. A tool that is denied is not shown to the model:
    https://code.claude.com/docs/en/permissions"""
    return {} if target.searches else {"permissions": {"deny": ["WebSearch"]}}


def _claude(target: Target, key: str, _: Path) -> Run:
    # Settings given as an argument take precedence over a user's, unlike the environment.
    settings = {"env": claude_variables(target), **claude_permissions(target)}
    token = {"ANTHROPIC_AUTH_TOKEN": key, "ANTHROPIC_API_KEY": ""}
    return Run(("--settings", json.dumps(settings)), token)


# --- opencode


def opencode_document(target: Target) -> dict[str, Any]:
    model = {
        "name": target.model,
        "reasoning": True,
        "tool_call": True,
        "interleaved": {"field": "reasoning_content"},
        "limit": {"context": target.context, "output": target.output},
    }
    options = {
        "baseURL": f"{target.url}/v1",
        "apiKey": f"{{env:{KEY_VARIABLE}}}" if target.keyed else "none",
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "gpt-oss on vllm-mlx",
        "options": options,
        "models": {target.model: model},
    }
    return {
        "$schema": "https://opencode.ai/config.json",
        "model": f"{NAME}/{target.model}",
        "small_model": f"{NAME}/{target.model}",
        "provider": {NAME: provider},
    }


def _opencode(variable: str, target: Target, key: str, _: Path) -> Run:
    return Run(variables={variable: json.dumps(opencode_document(target)), KEY_VARIABLE: key})


# --- Others


def _qwen(target: Target, key: str, _: Path) -> Run:
    variables = {
        "OPENAI_API_KEY": key,
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_MODEL": target.model,
    }
    return Run(("--auth-type", "openai", "--model", target.model), variables)


def _pi(target: Target, key: str, directory: Path) -> Run:
    model = {
        "id": target.model,
        "name": target.model,
        "reasoning": True,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": target.context,
        "maxTokens": target.output,
    }
    provider = {
        "baseUrl": f"{target.url}/v1",
        "api": "openai-completions",
        "models": [model],
    }
    config = f"{{...{json.dumps(provider)}, apiKey: process.env.{KEY_VARIABLE}}}"
    code = f"pi.registerProvider({json.dumps(NAME)}, {config})"
    return Run(
        ("--extension", str(directory / "provider.js"), "--model", f"{NAME}/{target.model}"),
        {KEY_VARIABLE: key},
        {"provider.js": f"export default function (pi) {{\n  {code};\n}}\n"},
    )


def _continue(target: Target, key: str, directory: Path) -> Run:
    model = {
        "name": target.model,
        "provider": "openai",
        "model": target.model,
        "apiBase": f"{target.url}/v1",
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}",
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {
            "contextLength": target.context,
            "maxTokens": target.output,
        },
    }
    document = {"name": NAME, "version": "1.0.0", "schema": "v1", "models": [model]}
    return Run(
        ("--config", str(directory / "config.yaml")),
        {KEY_VARIABLE: key},
        {"config.yaml": json_text(document)},  # JSON is YAML
    )


def _cline(target: Target, key: str, directory: Path) -> Run:
    provider = "openai-compatible"
    settings = {"provider": provider, "model": target.model, "baseUrl": f"{target.url}/v1"}
    document = {
        "version": 1,
        "lastUsedProvider": provider,
        "modes": {},
        "providers": {
            provider: {
                "settings": settings,
                "updatedAt": "2026-01-01T00:00:00.000Z",
                "tokenSource": "manual",
            }
        },
    }
    return Run(
        ("--data-dir", str(directory), "--key", key),
        {},
        {"settings/providers.json": json_text(document)},
    )


def _copilot(target: Target, key: str, _: Path) -> Run:
    return Run(
        variables={
            "COPILOT_PROVIDER_BASE_URL": f"{target.url}/v1",
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_WIRE_API": "responses",
            "COPILOT_PROVIDER_API_KEY": key,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(target.context - target.output),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(target.output),
            "COPILOT_MODEL": target.model,
        }
    )


def _goose(target: Target, key: str, _: Path) -> Run:
    return Run(
        variables={
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": target.model,
            "GOOSE_CONTEXT_LIMIT": str(target.context),
            "GOOSE_MAX_TOKENS": str(target.output),
            "OPENAI_HOST": target.url,
            "OPENAI_API_KEY": key,
        }
    )


def _hermes(target: Target, key: str, directory: Path) -> Run:
    provider = {"base_url": f"{target.url}/v1", "key_env": KEY_VARIABLE}
    model = {
        "default": target.model,
        "provider": NAME,
        "context_length": target.context,
    }
    document = {"model": model, "providers": {NAME: provider}}
    variables = {"HERMES_HOME": str(directory), KEY_VARIABLE: key}
    return Run((), variables, {"config.yaml": json_text(document)})


def _grok(target: Target, key: str, _: Path) -> Run:
    # It reads the context length from the server's list of models.
    return Run(
        variables={
            "GROK_MODELS_BASE_URL": f"{target.url}/v1",
            "GROK_DEFAULT_MODEL": target.model,
            "GROK_SESSION_SUMMARY_MODEL": target.model,
            "XAI_API_KEY": key,
        }
    )


def _kimi(target: Target, key: str, _: Path) -> Run:
    return Run(
        variables={
            "KIMI_MODEL_NAME": target.model,
            "KIMI_MODEL_PROVIDER_TYPE": "openai_responses",
            "KIMI_MODEL_BASE_URL": f"{target.url}/v1",
            "KIMI_MODEL_API_KEY": key,
            "KIMI_MODEL_CAPABILITIES": "thinking,tool_use",
            "KIMI_MODEL_MAX_CONTEXT_SIZE": str(target.context),
            "KIMI_MODEL_MAX_OUTPUT_SIZE": str(target.output),
        }
    )


def _vibe(target: Target, key: str, _: Path) -> Run:
    provider = {
        "name": NAME,
        "api_base": f"{target.url}/v1",
        "api_key_env_var": KEY_VARIABLE,
    }
    model = {
        "name": target.model,
        "provider": NAME,
        "alias": NAME,
        "temperature": 1.0,
        "thinking": "medium",
        "thinking_levels": list(EFFORTS),
        "max_context_length": target.context,
        "max_output_tokens": target.output,
    }
    variables = {
        "VIBE_PROVIDERS": json.dumps([provider]),
        "VIBE_MODELS": json.dumps([model]),
        "VIBE_ACTIVE_MODEL": NAME,
        KEY_VARIABLE: key,
    }
    return Run(variables=variables)


def _droid(target: Target, key: str, directory: Path) -> Run:
    name = f"custom:{NAME}"
    model = {
        "id": name,
        "model": target.model,
        "displayName": target.model,
        "provider": "openai",
        "baseUrl": f"{target.url}/v1",
        "apiKey": f"${{{KEY_VARIABLE}}}",
        "maxContextLimit": target.context,
        "maxOutputTokens": target.output,
    }
    document = {"customModels": [model], "sessionDefaultSettings": {"model": name}}
    return Run(
        ("--settings", str(directory / "settings.json")),
        {KEY_VARIABLE: key},
        {"settings.json": json_text(document)},
    )


def _openclaw(target: Target, key: str, directory: Path) -> Run:
    model = {
        "id": target.model,
        "name": target.model,
        "reasoning": True,
        "input": ["text"],
        "contextWindow": target.context,
        "maxTokens": target.output,
    }
    provider = {
        "baseUrl": f"{target.url}/v1",
        "apiKey": f"${{{KEY_VARIABLE}}}",
        "api": "openai-responses",
        "models": [model],
    }
    document = {
        # Its own name for such servers: with a key in the environment and no such provider, it
        # looks for one on port 8000.
        "models": {"providers": {"vllm": provider}},
        "agents": {"defaults": {"model": {"primary": f"vllm/{target.model}"}}},
    }
    variables = {
        "OPENCLAW_CONFIG_PATH": str(directory / "openclaw.json"),
        "OPENCLAW_STATE_DIR": str(directory),
        KEY_VARIABLE: key,
    }
    return Run((), variables, {"openclaw.json": json_text(document)})


def _nanocoder(target: Target, key: str, _: Path) -> Run:
    provider = {
        "name": NAME,
        "baseUrl": f"{target.url}/v1",
        "apiKey": f"${{{KEY_VARIABLE}}}",
        "models": [target.model],
        "contextWindow": target.context,
    }
    return Run(
        ("--provider", NAME, "--model", target.model),
        {"NANOCODER_PROVIDERS": json.dumps([provider]), KEY_VARIABLE: key},
    )


def _aider(target: Target, key: str, directory: Path) -> Run:
    name = f"openai/{target.model}"
    metadata = {
        "max_input_tokens": target.context,
        "max_output_tokens": target.output,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    settings = {"name": name, "use_temperature": 1.0}  # by default, 0
    return Run(
        variables={
            "AIDER_MODEL": name,
            "AIDER_MODEL_METADATA_FILE": str(directory / "metadata.json"),
            "AIDER_MODEL_SETTINGS_FILE": str(directory / "settings.yml"),
            "OPENAI_API_BASE": f"{target.url}/v1",
            "OPENAI_API_KEY": key,
        },
        files={
            "metadata.json": json_text({name: metadata}),
            "settings.yml": json_text([settings]),  # JSON is YAML
        },
    )


AGENTS: Mapping[str, Agent] = {
    "codex": Agent("Codex", "codex", "@openai/codex", "0.171.0", _codex),
    "claude": Agent("Claude Code", "claude", "@anthropic-ai/claude-code", "2.1.332", _claude),
    "opencode": Agent(
        "opencode",
        "opencode",
        "opencode-ai",
        "1.18.33",
        partial(_opencode, "OPENCODE_CONFIG_CONTENT"),
    ),
    "qwen": Agent("Qwen Code", "qwen", "@qwen-code/qwen-code", "0.24.4", _qwen),
    "pi": Agent("pi", "pi", "@mariozechner/pi-coding-agent", "0.73.1", _pi),
    "cn": Agent("Continue", "cn", "@continuedev/cli", "1.5.47", _continue),
    "cline": Agent("Cline", "cline", "cline", "3.0.65", _cline),
    "copilot": Agent("Copilot CLI", "copilot", "@github/copilot", "1.0.102", _copilot),
    # a fork of opencode
    "kilo": Agent(
        "Kilo", "kilo", "@kilocode/cli", "7.7.7", partial(_opencode, "KILO_CONFIG_CONTENT")
    ),
    "goose": Agent("goose", "goose", "@aaif/goose", "0.20.1", _goose, homebrew="block-goose-cli"),
    "hermes": Agent("Hermes", "hermes", "hermes-agent", "0.19.0", _hermes, python="3.11"),
    "grok": Agent("Grok Build", "grok", "@xai-official/grok", "1.0.41", _grok),
    "kimi": Agent("Kimi Code", "kimi", "@moonshot-ai/kimi-code", "2.1.0", _kimi),
    "vibe": Agent("Mistral Vibe", "vibe", "mistral-vibe", "3.0.2", _vibe, python="3.12"),
    "droid": Agent("Droid", "droid", "droid", "0.215.0", _droid),
    "openclaw": Agent("OpenClaw", "openclaw", "openclaw", "2026.9.6", _openclaw),
    "nanocoder": Agent("Nanocoder", "nanocoder", "@nanocollective/nanocoder", "1.30.0", _nanocoder),
    "aider": Agent("aider", "aider", "aider-chat", "0.86.2", _aider, python="3.11"),
}
