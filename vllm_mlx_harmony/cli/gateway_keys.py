"""gateway keys: adds, lists and revokes API keys in the gateway's TOML file.

Only digests are written to the file, so a key is shown once, when it is generated. Comments and
everything else in the file stay as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError

from vllm_mlx_harmony.cli.editing import locked, replace_content
from vllm_mlx_harmony.cli.errors import UsageError, read_text
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.settings import DIGEST, PREFIX

EXAMPLES = """\
examples:
  vllm-mlx-harmony gateway keys add alice bob --config gateway.toml
  vllm-mlx-harmony gateway keys revoke bob --config gateway.toml && kill -HUP GATEWAY_PID

A running gateway reads the file again when it gets SIGHUP. Limits are set in the file:
  alice = { key = "sha256:…", tokens_per_day = 2_000_000 }
"""

NAME = re.compile(r"[A-Za-z0-9_.-]+")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony gateway keys",
        description="Adds, lists and revokes API keys in the gateway's TOML file, as digests.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    config = os.environ.get(f"{PREFIX}CONFIG")
    for action, command, about in (
        ("add", _add, "generate a key for each name, and print it"),
        ("list", _list, "print the names, the beginnings of the digests, and the limits"),
        ("revoke", _revoke, "remove the keys with these names"),
    ):
        subparser = actions.add_parser(action, help=about, description=f"{about.capitalize()}.")
        subparser.set_defaults(command=command, names=[])
        if action != "list":
            subparser.add_argument("names", nargs="+", metavar="NAME")
        file = f"TOML file with settings (also: {PREFIX}CONFIG)"
        subparser.add_argument(
            "--config", metavar="FILE", default=config, required=config is None, help=file
        )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Raises ``UsageError``, without changing the file."""
    parsed = parser().parse_args(arguments)
    path = Path(parsed.config).resolve()
    try:
        with locked(path) if parsed.names else nullcontext():
            lines = _run(path, parsed)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    for line in lines:
        print(line)
    return 0


def _run(path: Path, parsed: argparse.Namespace) -> list[str]:
    """Reads the file and runs the action, which may change it; returns what to print."""
    try:
        document = tomlkit.parse(read_text(str(path)))
    except TOMLKitError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    if not isinstance(document.get("keys", {}), MutableMapping):
        raise UsageError(f"{path}: keys is not a table of names")
    lines: list[str] = parsed.command(document, parsed.names)
    if parsed.names:  # its owner and mode stay, so that the gateway can still read it
        replace_content(path, tomlkit.dumps(document).encode())
    return lines


def _add(document: tomlkit.TOMLDocument, names: Sequence[str]) -> list[str]:
    keys = document.setdefault("keys", tomlkit.table())
    lines = []
    for name in names:
        if name in keys:
            raise UsageError(f"there is already a key for {name}")
        if not NAME.fullmatch(name):
            raise UsageError(f"{name!r} is not a name: letters, digits, `.`, `_` and `-`")
        key = f"sk-{secrets.token_urlsafe(32)}"
        keys[name] = DIGEST + digest(key).hex()
        lines.append(f"{name} {key}")
    return lines


def _revoke(document: tomlkit.TOMLDocument, names: Sequence[str]) -> list[str]:
    keys = document.get("keys", {})
    for name in names:
        if name not in keys:
            raise UsageError(f"there is no key for {name}")
        del keys[name]
    if not keys:
        raise UsageError(
            "the last key cannot be revoked: without keys, a gateway is open to everyone"
        )
    return []


def _list(document: tomlkit.TOMLDocument, _: Sequence[str]) -> list[str]:
    lines = []
    for name, value in document.get("keys", {}).items():
        table = value if isinstance(value, Mapping) else {"key": value}
        key = str(table.get("key", ""))
        shown = f"{key[: len(DIGEST) + 12]}…" if key.startswith(DIGEST) else "in plain text"
        limits = (f"{limit} = {number}" for limit, number in table.items() if limit != "key")
        lines.append("  ".join((name, shown, *limits)))
    return lines
