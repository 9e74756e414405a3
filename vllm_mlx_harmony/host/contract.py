"""The table: every name of vllm-mlx and mlx-lm that is used or replaced, and supported versions.

vllm-mlx has no interface for what this package does: functions of it are replaced, and more are
called. None of them is promised to stay. A plugin that finds out in the middle of a request that
one has changed is worse than none, so every name is a row, with the parameters it must take and
what it is for, and the whole table is checked before anything is changed. If a required row does
not fit, nothing is changed and the start ends with an error that names it. An optional row that
does not fit is left out with a warning. ``vllm-mlx-harmony doctor --verbose`` prints all rows.

- ``Name``: a function, class or global that is used as it is. Those of ``vllm_mlx.server`` are
  specified in `server_globals`, with their types.
- ``Attribute``: an attribute of instances, which their class sets when they are made.
- ``Patch``: an attribute of a module or class that is replaced by a function of the original.
- ``Entry``: an entry of a dictionary that is replaced.
- ``FrontEnd``, ``Route``: the front end in vllm-mlx's application (`mount`).

**Invariants.** Changes are made in order and reverted in reverse, all or none; activating twice
changes nothing. When they are reverted, every attribute is the very object that it was before.
Without ``--tool-call-parser harmony`` nothing is changed. A name that is used and has no row fails
a test: ``tests/host/test_contract.py`` reads the source for imports from vllm-mlx and mlx-lm, and
for attributes of what is typed ``Any``, which are their objects.

The shape is that of OpenTelemetry's instrumentors
(https://opentelemetry-python-contrib.readthedocs.io): idempotent, reversible, versions as data.
How to support a new version of vllm-mlx: docs/architecture.md.
"""

from __future__ import annotations

import importlib
import logging
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host import entry_points, patching, server_globals
from vllm_mlx_harmony.host.entry_points import FLAGS, Extensions, find
from vllm_mlx_harmony.host.patching import (
    OTHERS,
    Attribute,
    Change,
    Entry,
    Name,
    Patch,
    Requirement,
    Undo,
)

logger = logging.getLogger("vllm_mlx_harmony")

HOST = "vllm-mlx"
SUPPORTED = SpecifierSet(">=0.6,<0.7")
"""As in `dependencies` of `pyproject.toml`."""

_OURS = "vllm_mlx_harmony.host"

NAMES: tuple[Name, ...] = (
    Name("vllm_mlx.cli:serve_command", "runs the server; receives the flags first", ("args",)),
    Patch(
        "vllm_mlx.server:load_model",
        "the only model has to be a Harmony model; prints what is served",
        ("model_name", "use_batching", OTHERS),
        replacement=f"{_OURS}.loading:load_model",
    ),
    Patch(
        "vllm_mlx.server:BatchedEngine",
        "makes our engine for the only model",
        ("model_name", "trust_remote_code", "model_path", OTHERS),
        replacement=f"{_OURS}.loading:batched_engine",
    ),
    Patch(
        "vllm_mlx.server:_build_engine",
        "makes our engine for a model that is loaded on demand",
        ("spec",),
        replacement=f"{_OURS}.loading:build_engine",
    ),
    Patch(
        "vllm_mlx.model_registry:ModelManager._instantiate_model",
        "makes our engine for one of several models",
        ("self", "entry", "resolved_source"),
        replacement=f"{_OURS}.loading:instantiate_model",
    ),
    Patch(
        "vllm_mlx.server:init_mcp",
        "starts the tool servers of --mcp-config, whose tools the model can call",
        ("config_path",),
        replacement=f"{_OURS}.tools:init_mcp",
    ),
    Patch(
        "vllm_mlx.prompt_warmup:warm_prefix_cache",
        "--warm-prompts renders prompts that no request begins with",
        ("engine", "prompts", "max_tokens"),
        required=False,
        replacement=f"{_OURS}.warmup:warm_prefix_cache",
    ),
    Patch(
        "uvicorn.server:Server.shutdown",
        "running answers end in time, WebSockets with an error",
        ("self", "sockets"),
        replacement=f"{_OURS}.adapter:gracefully",
    ),
    Patch(
        "uvicorn.server:Server.handle_exit",
        "a second SIGTERM does not end the process at once",
        ("self", "sig", "frame"),
        required=False,
        replacement="vllm_mlx_harmony.server.shutdown:at_once",
    ),
    *server_globals.names(),
    Name("vllm_mlx.cli:create_parser", "tells the given flags from defaults", ()),
    Name(
        "vllm_mlx.memory_cache:MemoryCacheConfig",
        "--cache-memory-percent",
        ("max_memory_percent", OTHERS),
    ),
    Name("vllm_mlx.engine.base:BaseEngine", "the base class of our engine", ()),
    Name("vllm_mlx.engine.base:GenerationOutput", "an output as text", ("text", OTHERS)),
    Name("vllm_mlx.api.utils:clean_output_text", "cleans an output as text", ("text",)),
    Name(
        "vllm_mlx.model_registry:LoadedModel", "one of several models", ("config", "engine", OTHERS)
    ),
    Name(
        "vllm_mlx.model_registry:ModelManager._resolve_model_config",
        "the settings of one of several models",
        ("self", "entry", "resolved_source"),
    ),
    *(
        Attribute(f"vllm_mlx.model_registry:ResolvedModelConfig.{name}", "a setting of one model")
        for name in ("prefill_step_size", "stream_interval", "gpu_memory_utilization")
    ),
    *(
        Attribute(f"vllm_mlx.lifecycle:ModelSpec.{name}", "the model that is loaded on demand")
        for name in ("model_name", "model_path")
    ),
    Name("mlx_lm.utils:load", "loads a model", ("path_or_hf_repo", "tokenizer_config", OTHERS)),
    *(
        Name(f"mlx_lm.models.cache:{name}", why, parameters)
        for name, why, parameters in (
            ("make_prompt_cache", "makes the KV caches of a request", ("model", OTHERS)),
            (
                "RotatingKVCache._temporal_order",
                "a window in the order of its tokens",
                ("self", "v"),
            ),
            ("KVCache.merge", "makes a batch", ("caches",)),
            ("RotatingKVCache.merge", "makes a batch", ("caches",)),
            ("BatchKVCache.extend", "adds rows to a batch", ("self", "other")),
            ("BatchKVCache.filter", "removes rows from a batch", ("self", "batch_indices")),
            ("BatchKVCache.extract", "reads a row of a batch", ("self", "idx")),
            ("BatchRotatingKVCache.extend", "adds rows to a batch", ("self", "other")),
            ("BatchRotatingKVCache.filter", "removes rows from a batch", ("self", "batch_indices")),
            ("BatchRotatingKVCache.extract", "reads a row of a batch", ("self", "idx")),
        )
    ),
    *(
        Attribute(f"mlx_lm.models.cache:{owner}.{name}", why)
        for owner, why, names in (
            ("KVCache", "state of a layer with full attention", "keys values offset"),
            (
                "RotatingKVCache",
                "state of a layer with a sliding window",
                "keys values offset keep max_size _idx",
            ),
            ("BatchKVCache", "state of a batch", "keys values left_padding _idx"),
        )
        for name in names.split()
    ),
)
"""Names that are used as they are, and the functions that are replaced."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What is in force: the host's version, the parts, the changes and how to revert them."""

    version: str
    parts: Extensions
    requirements: tuple[str, ...]
    undos: list[Undo]


_active: Installation | None = None


def host_version() -> str | None:
    """Version of the installed host, from its package metadata; None when there is no host.

    Not `FastAPI(version=…)`, which is 0.4.1 in 0.6.0.
    """
    try:
        return metadata.version(HOST)
    except metadata.PackageNotFoundError:
        pass
    try:
        return str(importlib.import_module("vllm_mlx").__version__)
    except (ImportError, AttributeError):
        return None


def unsupported() -> str | None:
    """Why the installed host is not supported, or None."""
    version = host_version()
    if version is None:
        return f"{HOST} is not installed"
    with suppress(InvalidVersion):
        if SUPPORTED.contains(version, prereleases=True):
            return None
    return f"{HOST} {version} is not supported: this package needs {HOST}{SUPPORTED}"


def table(found: Extensions) -> tuple[Requirement, ...]:
    """All rows in the order in which they are applied, with the parts that were `found`.

    Imports modules that need `NAMES`: check those first.
    """
    from vllm_mlx_harmony.host import engine_routes, models
    from vllm_mlx_harmony.host.adapter import VllmMlx
    from vllm_mlx_harmony.host.mount import FrontEnd, Route
    from vllm_mlx_harmony.server.app import ENDPOINTS

    parsers = (
        Entry(
            "vllm_mlx.tool_parsers:ToolParserManager.tool_parsers",
            "parses tool calls for callers in vllm-mlx that have only text",
            key=name,
            replacement=models.harmony_parser(found.tool_parser),
        )
        for name in FLAGS
    )
    front_end: tuple[Requirement, ...] = (
        FrontEnd(VllmMlx()),
        *map(Route, ENDPOINTS),
        *engine_routes.ROUTES,
    )
    return (*NAMES, *parsers, *front_end)


def activate(name: str = FLAGS[0]) -> Installation:
    """Makes all changes; if they are in force already, returns that installation.

    Raises HostError, with nothing changed, if vllm-mlx is not supported, a required row does not
    fit, or a part cannot be loaded.
    """
    global _active
    if _active is None:
        if reason := unsupported():
            raise HostError(reason, code="host_unsupported")
        patching.check(NAMES)
        found = find(name)
        rows = [row for row in table(found) if row.required or _fits(row)]
        undos = patching.apply_all(rows)
        entry_points.use(found)
        changed = tuple(row.label for row in rows if isinstance(row, Change))
        _active = Installation(host_version() or "", found, changed, undos)
    return _active


def _fits(row: Requirement) -> bool:
    """Whether an optional row fits; logs a warning if it does not."""
    problem = row.problem()
    if problem is not None:
        logger.warning("%s; continuing without it: %s", problem, row.why)
    return problem is None


def deactivate() -> None:
    """Reverts all changes, the last one first; nothing happens if there are none."""
    global _active
    if _active is not None:
        patching.undo_all(_active.undos)
        entry_points.use(None)
        _active = None


def active() -> Installation | None:
    """The installation in force, or None."""
    return _active
