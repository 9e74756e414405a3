"""The table: every name of vllm-mlx that is used or replaced, and supported versions.

vllm-mlx has no interface for what this package does, and none of these names is promised to stay. A
change must not be noticed in the middle of a request, so every name is a row, with the parameters
it must take and what it is for (all flags together are one row), and the whole table is checked
before anything is changed. If a required row does not fit, nothing is changed and the start ends
with an error that names it. An optional row that does not fit is left out with a warning.
``vllm-mlx-harmony doctor --verbose`` prints all rows. Those of mlx-lm are the engine's
(`engine.mlx_lm_names`).

**Invariants.** Changes are made in order and reverted in reverse, all or none; activating twice
changes nothing. When they are reverted, every attribute is the very object that it was before.
Without ``--tool-call-parser harmony`` nothing is changed. ``tests/unit/host/test_contract.py``
reads the source: it fails for imports from vllm-mlx and mlx-lm without a row, for arguments that
the row of a class or function does not list, for flags that are not in `flags.READ`, and for
attributes of mlx-lm's caches without a row (found by the names that variables for caches have in
`engine`). mypy knows no other names of `vllm_mlx.server` than those of `server_globals`. How to
support a new version of vllm-mlx: docs/architecture.md.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from vllm_mlx_harmony import inspector
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine import mlx_lm_names
from vllm_mlx_harmony.host import entry_points, patching, server_globals
from vllm_mlx_harmony.host.entry_points import FLAGS, Extensions, find
from vllm_mlx_harmony.host.patching import Patch
from vllm_mlx_harmony.required_names import Name, Requirement, Undo, check
from vllm_mlx_harmony.server.settings import ServerSettings

HOST = "vllm-mlx"
SUPPORTED = SpecifierSet(">=0.6,<0.7")
"""As in `dependencies` of `pyproject.toml`."""

_OURS = "vllm_mlx_harmony.host"

NAMES: tuple[Name, ...] = (
    Name("vllm_mlx.cli:serve_command", "runs the server; receives the flags first", "args"),
    Patch(
        "vllm_mlx.server:load_model",
        "makes our engine for the only model, a Harmony model; prints what is served",
        "model_name use_batching ...",
        replacement=f"{_OURS}.engine_factories:load_model",
    ),
    Patch(
        "vllm_mlx.server:_build_engine",
        "makes our engine for a model that is loaded on demand",
        "spec",
        replacement=f"{_OURS}.engine_factories:build_engine",
    ),
    Patch(
        "vllm_mlx.model_registry:ModelManager._instantiate_model",
        "makes our engine for one of several models",
        "self entry resolved_source",
        replacement=f"{_OURS}.engine_factories:instantiate_model",
    ),
    Patch(
        "vllm_mlx.server:init_mcp",
        "starts the tool servers of --mcp-config, whose tools the model can call",
        "config_path",
        replacement=f"{_OURS}.tools:init_mcp",
    ),
    Patch(
        "vllm_mlx.prompt_warmup:warm_prefix_cache",
        "computes --warm-prompts as requests render them",
        "engine prompts max_tokens",
        required=False,
        replacement=f"{_OURS}.engine_factories:warm_prefix_cache",
    ),
    Patch(
        "uvicorn.main:Server",
        "lets running answers finish at shutdown; closes WebSockets with an error",
        "config",
        replacement=f"{_OURS}.adapter:with_graceful_shutdown",
    ),
    Name("uvicorn.server:Server.shutdown", "running answers end first", "self sockets"),
    Name(
        "uvicorn.server:Server.handle_exit",
        "notes when SIGTERM came; a second one ends the process",
        "self sig frame",
        required=False,
    ),
    *server_globals.names(),
    Name("vllm_mlx.cli:create_parser", "distinguishes flags that were given from defaults", ""),
    Name(
        "vllm_mlx.memory_cache:MemoryCacheConfig",
        "--cache-memory-percent",
        "max_memory_percent ...",
    ),
    Name("vllm_mlx.engine.base:BaseEngine", "the base class of our engine", ""),
    Name(
        "vllm_mlx.engine.base:GenerationOutput",
        "an output in text form",
        "text tokens prompt_tokens completion_tokens finish_reason new_text finished ...",
    ),
    Name(
        "vllm_mlx.tool_parsers.abstract_tool_parser:ToolParser",
        "the base class of our tool parser",
        "tokenizer ...",
    ),
    Name(
        "vllm_mlx.tool_parsers.abstract_tool_parser:ExtractedToolCallInformation",
        "the tool calls and the content of an answer",
        "tools_called tool_calls content",
    ),
    *(
        Name(f"vllm_mlx.model_registry:ResolvedModelConfig.{name}", "a setting of one model")
        for name in ("prefill_step_size", "stream_interval", "gpu_memory_utilization")
    ),
    *mlx_lm_names.NAMES,
)
"""Names that are used as they are, and functions that are replaced. `table` adds what needs these
to be checked first: tool parsers, the front end, routes."""


_changes: list[tuple[str, Undo]] = []
"""The names of what is changed now, each with the function that reverts it."""


def unsupported() -> str | None:
    """Why the installed host is not supported, or None."""
    version = entry_points.versions().get(HOST)
    if version is None:
        return f"{HOST} is not installed"
    with suppress(InvalidVersion):
        if SUPPORTED.contains(version, prereleases=True):
            return None
    return f"{HOST} {version} is not supported: this package needs {HOST}{SUPPORTED}"


def table(
    found: Extensions, settings: ServerSettings, *, several: bool = False
) -> tuple[Requirement, ...]:
    """All rows in the order in which they are applied, with the parts that were `found`.

    With `several` models, the tool parsers stay those of vllm-mlx: they are looked up by name, for
    any of the models. Imports modules that need `NAMES`: check those first.
    """
    from vllm_mlx_harmony.host import engine_routes
    from vllm_mlx_harmony.host.adapter import VllmMlx
    from vllm_mlx_harmony.host.flags import FlagsRead
    from vllm_mlx_harmony.host.mount import Addition, Route, front_end
    from vllm_mlx_harmony.server.app import ENDPOINTS

    parsers = Patch(
        "vllm_mlx.tool_parsers:ToolParserManager.tool_parsers",
        "parses tool calls for callers in vllm-mlx that have only text",
        replacement=lambda theirs: {**theirs, **dict.fromkeys(FLAGS, found.tool_parser)},
    )
    pages = Addition(
        f"GET {inspector.PAGE}",
        "shows the inspector, which was switched on",
        partial(inspector.install, status=engine_routes.inspected),
    )
    downloads = Patch(
        "vllm_mlx.utils.download:ensure_model_downloaded",
        "reports in one line why the only model cannot be downloaded",
        "model_name config is_mllm",
        required=False,
        replacement=f"{_OURS}.engine_factories:ensure_model_downloaded",
    )
    return (
        *NAMES,
        *(() if several else (parsers, downloads)),
        FlagsRead(),
        front_end(VllmMlx(settings)),
        *map(Route, ENDPOINTS),
        *engine_routes.ROUTES,
        *((pages,) if settings.inspect else ()),
    )


def activate(settings: ServerSettings, name: str = FLAGS[0], *, several: bool = False) -> None:
    """Makes all changes; nothing happens if they are in force already.

    Raises HostError, with nothing changed, if vllm-mlx is not supported, a required row does not
    fit, or a part cannot be loaded.
    """
    if _changes:
        return
    if reason := unsupported():
        raise HostError(reason, code="host_unsupported")
    check(NAMES)
    found = find(name)
    _changes.extend(patching.apply_all(table(found, settings, several=several)))
    entry_points.use(found)


def deactivate() -> None:
    """Reverts all changes, the last one first; nothing happens if there are none."""
    patching.undo_all(_changes)
    entry_points.use(None)


def changes() -> tuple[str, ...]:
    return tuple(name for name, _ in _changes)
