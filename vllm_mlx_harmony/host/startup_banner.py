"""The lines that a server prints at startup: version, engine, settings and access.

Printed after the model is known and before the server listens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from vllm_mlx_harmony import inspector
from vllm_mlx_harmony.engine import startup_lines
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine
from vllm_mlx_harmony.host.entry_points import versions
from vllm_mlx_harmony.host.server_globals import server
from vllm_mlx_harmony.model_files import length_of

WIDTH = 14

_LOCAL = ("127.0.0.1", "localhost", "::1")
_PORT = 8000

_flag_lines: list[tuple[str, str]] = []


def set_flags(
    args: argparse.Namespace,
    without_effect: Iterable[str],
    tools: Iterable[str] = (),
    *,
    inspected: bool = False,
) -> None:
    """Sets what the flags say: the sentences about those ``without_effect``, and about the
    ``tools`` that they enable. ``inspected``: the server has an inspector."""
    host, port = getattr(args, "host", _LOCAL[0]), getattr(args, "port", _PORT)
    rate = getattr(args, "rate_limit", 0)
    local = host in _LOCAL
    access = "local only" if local else f"reachable from the network ({host})"
    if getattr(args, "api_key", None):
        access += ", API key required"
    else:
        access += f"; no API key: any {'local client' if local else 'client'} has access"
    if rate > 0:
        access += f", {rate} requests a minute"
    address = _LOCAL[0] if host in (*_LOCAL[:2], "0.0.0.0", "::") else host
    address = f"[{address}]" if ":" in address else address
    default = (address, port) == (_LOCAL[0], _PORT)
    url = "" if default else f" --url http://{address}:{port}"
    page = f"{inspector.PAGE} shows prompts and answers to anyone with access"
    _flag_lines[:] = [
        ("access", access),
        *([("inspector", page)] if inspected else ()),
        *(("tools", line) for line in tools),
        *(("no effect", sentence) for sentence in without_effect),
        ("next", f"vllm-mlx-harmony launch codex{url}"),
    ]


def show_model(path: str, engine: MlxEngine | None) -> None:
    """Prints the only model, in ``path``, and its ``engine``, None if it is loaded on demand."""
    name, source = server()._model_name, server()._model_path
    window = length_of(path)
    facts = [("model", str(name) if name == source else f"{name} ({source})")]
    if engine is None:
        facts.append(("engine", "loaded on demand"))
    else:
        limits = engine.options.limits
        facts += [
            ("engine", f"up to {min(limits.answers, limits.sequences)} concurrent answers"),
            ("memory", startup_lines.memory(engine)),
        ]
    show(*facts, ("context", startup_lines.context(engine, window)))


def show(*facts: tuple[str, str]) -> None:
    """Prints ``facts``, then those that do not depend on a model."""
    found = versions()
    ours = f"vllm-mlx-harmony {found.pop('vllm-mlx-harmony')}"
    dependencies = ", ".join(f"{name} {version}" for name, version in found.items())
    print(f"{ours} ({dependencies})")
    for name, value in (*facts, *_common()):
        print(f"  {name:<{WIDTH}}{value}")


def _common() -> Iterator[tuple[str, str]]:
    for at, part in enumerate(startup_lines.prefix_cache()):
        yield "" if at else "prefix cache", part
    yield from _flag_lines
