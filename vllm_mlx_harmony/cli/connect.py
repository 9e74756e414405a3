"""connect: a lasting configuration of a coding agent for this server.

Claude Code and opencode can load an additional file, so the user's own files stay as they are.
Codex would warn about one (with a profile or ``-c`` it cannot use its background server), so three
keys and a table are added to its own file. Every other agent gets a script that starts it with the
arguments, variables and files of `launch`. API keys are never written: the agents and the script
read them from the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import tomlkit
from tomlkit.items import Item

from vllm_mlx_harmony.cli import agents
from vllm_mlx_harmony.cli.agents import CONTEXT, KEY_VARIABLE, LOCAL_KEY, NAME, Target
from vllm_mlx_harmony.cli.editing import locked, replace_content
from vllm_mlx_harmony.cli.errors import UsageError, number
from vllm_mlx_harmony.cli.process import send

URL = "http://127.0.0.1:8000"

LEAST_CONTEXT = 4_096
"""In tokens; an agent's own instructions and tools take more."""

REQUEST_TIMEOUT = 5.0
"""Seconds within which a server must list its models."""

ANSWER_TIMEOUT = 120.0
"""Seconds within which it must answer a question."""

BACKUP = ".before-vllm-mlx"
"""Added to the name of a file: its copy, as it was before this command first changed it."""

QUESTION = "Reply with the word: ready"

_MEANINGS = {
    401: f"it requires a key: set {KEY_VARIABLE} or --key",
    403: f"it does not accept this key or this client: set {KEY_VARIABLE} or --key",
    429: "its rate limit is reached: try again in a minute",
    503: "it is starting, overloaded or shutting down: try again, or look at its log",
}


class Refused(UsageError):
    """There is a server, but it does not serve what was asked for."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The files of a configuration, by path, and the command that starts the agent with it.

    ``question`` is a request of the API that the agent uses: its path, and its body but the model.
    All files in ``directory`` are this command's own, and so are those with `NAME` in their names.
    """

    files: Mapping[Path, str]
    command: str
    question: tuple[str, Mapping[str, object]]
    directory: Path | None = None

    def owns(self, path: Path) -> bool:
        return NAME in path.name or (self.directory is not None and self.directory in path.parents)


def main(arguments: Sequence[str]) -> int:
    """Asks the server for what is not given, and for one answer before a file is changed."""
    options = parser().parse_args(arguments)
    agent = AGENTS[options.agent]
    if options.undo:
        setup = agent(Target(options.url, options.model or ""))
        for path in setup.files:
            _restore(path, owned=setup.owns(path))
        return 0
    key = options.key or os.environ.get(KEY_VARIABLE) or None
    target = look(options.url, options.model, key, options.context)
    setup, title = agent(target), agents.AGENTS[options.agent].title
    print(f"{title} with {target.model} ({target.context:,} tokens) at {target.url}\n")
    if options.write and options.check:
        print(f"{ask(target, key, *setup.question)}\n")
    for path, content in setup.files.items():
        if options.write:
            _write(path, content, owned=setup.owns(path))
        else:
            print(f"--- {_shown(path)}\n{content}")
    if options.write:
        print()
    if target.keyed:
        print(f"The agent reads the key from the environment: export {KEY_VARIABLE}=…")
    start = "Start" if options.write else "Add --write to write these files, then start"
    print(f"{start} it with\n\n  {setup.command}")
    if options.write:
        print(f"\nUndo it with\n\n  vllm-mlx-harmony connect {options.agent} --undo")
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony connect",
        description="Prints the configuration of a coding agent for a server, or writes it.",
    )
    add = parser.add_argument
    add("agent", metavar="AGENT", choices=AGENTS, help=", ".join(AGENTS))
    add("--url", default=URL, help=f"URL of the server (default: {URL})")
    add("--model", help="name of the model (default: the server's only one)")
    secret = "the server's API key (default: $VLLM_API_KEY); never written to a file"
    add("--key", help=secret)
    add(
        "--context",
        type=number(f"a number of tokens, {LEAST_CONTEXT} or more", LEAST_CONTEXT),
        metavar="TOKENS",
        help="context length (default: the server's, or 131072)",
    )
    add("--write", action="store_true", help="write the files; existing ones are backed up first")
    unchecked = "skip the test request before writing"
    add("--no-check", dest="check", action="store_false", help=unchecked)
    add("--undo", action="store_true", help="restore the files as they were before")
    return parser


# --- The server


def look(url: str, model: str | None, key: str | None, context: int | None) -> Target:
    """The server at ``url`` and its model; queried only for what is not passed.

    The key is used if the server requires one. Raises ``UsageError``: ``Refused`` if there is a
    server that does not list its models.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not _is_url(base):
        raise UsageError(f"--url: {url!r} is not a server's address: http://host:port")
    if model == "":
        raise UsageError("--model is empty")
    target = Target(base, model or "", context or CONTEXT, keyed=key is not None)
    if model is not None and context is not None:
        return target
    try:
        entries, keyed = _models(base, key)
    except HTTPError as error:
        raise _refused(base, error, key) from error
    except (OSError, ValueError, HTTPException) as error:
        if model is not None:
            return target
        reason = error.reason if isinstance(error, URLError) else error
        raise UsageError(
            f"no server answers at {base} ({reason}): start it, set --url, or set --model to "
            "configure the agent without it"
        ) from error
    serves = f"the server at {base} serves {', '.join(entries) or 'nothing'}"
    if model is None and len(entries) != 1:
        raise Refused(f"{serves}: choose one with --model")
    if model is not None and model not in entries:
        raise Refused(f"{serves}, not {model}")
    name = model or next(iter(entries))
    tokens = int(context or entries[name].get("max_model_len") or CONTEXT)
    searches = entries[name].get("web_search") is True
    return replace(target, model=name, context=tokens, keyed=keyed, searches=searches)


def _models(base: str, key: str | None) -> tuple[dict[str, dict[str, Any]], bool]:
    """The entries of a server's models, by name, and whether it requires the key."""
    keyed = False
    try:
        document = _json(f"{base}/v1/models", None)
    except HTTPError as error:
        if key is None or error.code not in (401, 403):
            raise
        document, keyed = _json(f"{base}/v1/models", key), True
    models = document.get("data") if isinstance(document, dict) else None
    if not isinstance(models, list):
        raise ValueError("it does not list its models at /v1/models")
    entries = (entry for entry in models if isinstance(entry, dict) and "id" in entry)
    return {str(entry["id"]): entry for entry in entries}, keyed


def ask(target: Target, key: str | None, path: str, body: Mapping[str, object]) -> str:
    """A line about the answer to a short request. Raises ``Refused`` if there is none."""
    began = time.monotonic()
    try:
        document = _json(
            f"{target.url}{path}", key, {"model": target.model, **body}, ANSWER_TIMEOUT
        )
        if not isinstance(document, dict) or "usage" not in document:
            raise Refused(f"{target.url}{path} did not return a model's answer")
    except HTTPError as error:
        raise _refused(f"{target.url}{path}", error, key) from error
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        return f"Skipped the test request: no server at {target.url} ({reason})"
    return f"✓ {target.model} has answered a test request in {time.monotonic() - began:.1f} s"


def _json(
    url: str, key: str | None, body: object = None, timeout: float = REQUEST_TIMEOUT
) -> object:
    with send(url, body, key=key, timeout=timeout) as response:
        return json.load(response)


def _refused(place: str, error: HTTPError, key: str | None) -> UsageError:
    """What an error means, in the server's own words, too; ``Refused`` if it may be ours."""
    failed = error.code >= HTTPStatus.INTERNAL_SERVER_ERROR
    meaning = _MEANINGS.get(error.code, "look at its log" if failed else "is it vllm-mlx?")
    if error.code == HTTPStatus.UNAUTHORIZED and key:
        meaning = f"it does not accept the key in {KEY_VARIABLE} or --key"
    words = ""
    with suppress(OSError, ValueError, HTTPException, TypeError, KeyError):
        words = f" ({json.loads(error.read())['error']['message']})"
    kind = Refused if error.code in _MEANINGS else UsageError
    return kind(f"the server at {place} answered {error.code}: {meaning}{words}")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


# --- The agents


def codex(target: Target) -> Setup:
    home = Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex")
    catalog = home / f"{NAME}-models.json"
    settings = agents.codex_settings(target, catalog)
    files = {  # in this order: the second names the first
        catalog: agents.codex_catalog(target),
        home / "config.toml": tomlkit.dumps(settings),
    }
    question = {"input": QUESTION, "max_output_tokens": 200}
    return Setup(files, "codex", ("/v1/responses", question))


def claude(target: Target) -> Setup:
    home = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
    path = home / f"{NAME}.json"
    variables = agents.claude_variables(target)
    if not target.keyed:
        variables["ANTHROPIC_AUTH_TOKEN"] = LOCAL_KEY
    token = f'ANTHROPIC_AUTH_TOKEN="${KEY_VARIABLE}" ' if target.keyed else ""
    command = f"{token}claude --settings {_shown(path)}"
    settings = {"env": variables, **agents.claude_permissions(target)}
    files = {path: agents.json_text(settings)}
    question = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200}
    return Setup(files, command, ("/v1/messages", question))


def opencode(target: Target) -> Setup:
    home = _config() / "opencode"
    path = home / f"{NAME}.json"
    content = agents.json_text(agents.opencode_document(target))
    command = f"OPENCODE_CONFIG={_shown(path)} opencode"
    return Setup({path: content}, command, CHAT)


def script(name: str, target: Target) -> Setup:
    """A script that starts an agent as `launch` does, with its files beside it."""
    agent, directory = agents.AGENTS[name], _config() / NAME / name
    run = agent.set_up(replace(target, keyed=True), _KEY, directory)
    key = f'"${{{KEY_VARIABLE}:?}}"' if target.keyed else f'"${{{KEY_VARIABLE}:-{LOCAL_KEY}}}"'
    quoted = {_KEY: key}
    title = f"# Starts {agent.title} ({agent.install}) with {target.model} at {target.url}."
    lines = [
        " ".join(title.split()),  # a comment, whatever a server calls its model
        *(
            f"export {variable}={quoted.get(value) or shlex.quote(value)}"
            for variable, value in run.variables.items()
        ),
        " ".join(
            [
                *("exec", agent.command),
                *(quoted.get(argument) or shlex.quote(argument) for argument in run.arguments),
                '"$@"',
            ]
        ),
    ]
    path = directory / "start.sh"
    files = {directory / file: content for file, content in run.files.items()}
    text = "\n".join(lines) + "\n"
    return Setup({**files, path: text}, f"sh {_shown(path)}", CHAT, directory)


_KEY = "the server's key"
"""Stands for a key that the script reads from the environment."""

CHAT = (
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": QUESTION}], "max_completion_tokens": 200},
)

AGENTS: Mapping[str, Callable[[Target], Setup]] = {
    **{name: partial(script, name) for name in agents.AGENTS},
    "codex": codex,
    "claude": claude,
    "opencode": opencode,
}


def _config() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _shown(path: Path) -> str:
    """``path`` with ``~`` for the home directory."""
    home = str(Path.home())
    return f"~{str(path)[len(home) :]}" if str(path).startswith(f"{home}/") else str(path)


# --- Writing


def _write(path: Path, content: str, *, owned: bool) -> None:
    """Writes a file, after a backup of an existing one that is a user's. Raises ``UsageError``."""
    try:
        with locked(path):
            # Not as text: lines that end with CRLF stay as they are.
            before = path.read_bytes().decode() if path.exists() else None
            if before is not None and path.suffix == ".toml":
                content = merged(before, content)
            if before == content:
                print(f"{_shown(path)} is up to date")
                return
            backup = _backup(path)
            if not owned and (NAME not in (before or "") or not backup.exists()):
                if before is None:
                    backup.touch()
                else:
                    replace_content(backup, before.encode(), path.stat())
                    print(f"{_shown(path)} is backed up as {_shown(backup)}")
            replace_content(path, content.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(
            f"{path} cannot be changed safely ({error}): run without --write and edit it by hand"
        ) from error
    print(f"wrote {_shown(path)}")


def _backup(path: Path) -> Path:
    """The copy of a user's file as it was without this command's settings; empty if there was none.

    Files that are this command's own have none.
    """
    return path.with_name(path.name + BACKUP)


def _restore(path: Path, *, owned: bool) -> None:
    """Puts the backup of a file back, or removes what this command alone writes.

    A file that is replaced stays beside it, because a user may have added to it. Raises
    ``UsageError``.
    """
    backup, place, undone = _backup(path), path.resolve(), path.with_name(f"{path.name}.undone")
    try:
        with locked(path):
            if backup.exists():
                if place.exists():
                    replace_content(undone, place.read_bytes(), place.stat())
                if backup.stat().st_size:
                    replace_content(path, backup.read_bytes(), backup.stat())
                else:
                    place.unlink(missing_ok=True)
                backup.unlink()
                print(f"restored {_shown(path)}; the replaced version is {undone.name}")
            elif path.exists() and owned:
                path.unlink()
                print(f"removed {_shown(path)}")
            else:
                print(f"{_shown(path)} has nothing to undo")
    except OSError as error:
        raise UsageError(f"{path} cannot be restored: {error.strerror or error}") from error


def merged(before: str, ours: str) -> str:
    """The TOML document ``before`` with the keys and tables of ``ours``, and otherwise unchanged.

    A replaced value remains as a comment. Merging again changes nothing. Raises ``ValueError`` for
    invalid TOML, and for tables that cannot be extended: inline ones, those of dotted keys, and
    values that should be tables.
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
        elif not isinstance(old, MutableMapping):
            raise ValueError(f"{key} is not a table")
        else:
            wanted[key].update(value)
            for name, table in value.items():
                _fill(old.setdefault(name, tomlkit.table()), table)
    text = tomlkit.dumps(document)
    if tomlkit.parse(text).unwrap() != wanted:
        raise ValueError("other settings in it would change")
    return text


def _fill(table: MutableMapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Makes ``table`` equal to ``ours``, keeping its comments. Raises ``ValueError`` unless it is a
    table."""
    if not isinstance(table, MutableMapping):
        raise ValueError(f"{NAME} is not a table")
    for key in table.keys() - ours.keys():
        del table[key]
    for key, value in ours.items():
        if table.get(key) != value:
            table[key] = value
