"""The patch table: everything relied on in vllm-mlx, changed or not, and the supported versions.

The only place where vllm-mlx's names stand in a table. What is put in place of one is written in
the file that its row names; how it is put there, in `patching` and `mount`.

**Why a table.** vllm-mlx has no interface for what this package does, so that functions of it are
replaced, and many more used. Each is a promise that nobody made. A plugin that finds out in the
middle of a request that one was broken is worse than none; one that cannot say which is no help.
So every name that is used is a row, with the parameters that it must take and what it is for, and
the whole table is checked before anything is changed: with one required row that does not fit,
nothing is patched, and one message names it (``vllm-mlx-harmony doctor --verbose`` prints all). An
optional one is left out with a warning: the server works without it.

**Kinds of rows.**

- ``Fact``: a function, class or global that is used as it is.
- ``Attribute``: an attribute of vllm-mlx's objects, which only their methods set. Their source is
  read for it: no object of the class has to be made.
- ``Patch``: an attribute of a module or class that is replaced by a function of what was there.
- ``Entry``: a key of one of vllm-mlx's dictionaries.
- ``Mounted``, ``SocketRoute``, ``Around``: routes in front of vllm-mlx's, middleware around them.

**Parts.** ``COMMAND`` is the one name that is looked at without the flag; ``USED`` are facts;
``CHANGES`` what is replaced; ``FRONT_END`` the endpoints of `server`. ``table`` puts them in order.

**Invariants.** Applied forwards, undone backwards, all or nothing; a second time nothing happens.
Undone, every attribute is the very object that it was. Without ``--tool-call-parser harmony``
nothing is applied. What is used and has no row fails a test: ``tests/host/test_contract.py`` reads
this package's source for what is imported from vllm-mlx, for the globals of its server, and for the
attributes of what is typed ``Any``, which are its objects.

The shape is that of OpenTelemetry's instrumentors
(https://opentelemetry-python-contrib.readthedocs.io): idempotent, reversible, versions as data.
A new version of vllm-mlx: docs/architecture.md says what to do.
"""

from __future__ import annotations

import importlib
import logging
import re
from dataclasses import dataclass
from importlib import metadata

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host import engine_routes, entry_points, models, patching
from vllm_mlx_harmony.host.adapter import VllmMlx
from vllm_mlx_harmony.host.entry_points import FLAGS, Extensions, find
from vllm_mlx_harmony.host.mount import Around, Installed, Route, SocketRoute
from vllm_mlx_harmony.host.patching import OTHERS, Attribute, Entry, Fact, Patch, Requirement, Undo
from vllm_mlx_harmony.server import routes

logger = logging.getLogger("vllm_mlx_harmony")

__all__ = [
    "FLAGS",
    "Installation",
    "activate",
    "active",
    "deactivate",
    "host_version",
    "table",
    "unsupported",
]

HOST = "vllm-mlx"
SUPPORTED = ((0, 6), (0, 7))
"""From the first, up to but not including the second; as `dependencies` in `pyproject.toml` say."""

COMMAND = Fact(
    "vllm_mlx.cli:serve_command",
    "the one place that sees the flags before the server runs",
    ("args",),
)

CHANGES: tuple[Requirement, ...] = (
    Patch(
        "vllm_mlx.server:load_model",
        "vllm_mlx_harmony.host.loading:load_model",
        "a single model has to be a Harmony model; what a user needs to know of it is shown",
        ("model_name", "use_batching", OTHERS),
    ),
    Patch(
        "vllm_mlx.server:BatchedEngine",
        "vllm_mlx_harmony.host.loading:batched_engine",
        "our engine is made for the server's only model",
        ("model_name", "trust_remote_code", "model_path", OTHERS),
    ),
    Patch(
        "vllm_mlx.server:_build_engine",
        "vllm_mlx_harmony.host.loading:build_engine",
        "the same where it is loaded when it is asked for, and unloaded",
        ("spec",),
    ),
    Patch(
        "vllm_mlx.model_registry:ModelManager._instantiate_model",
        "vllm_mlx_harmony.host.loading:instantiate_model",
        "the same where it is one of several models",
        ("self", "entry", "resolved_source"),
    ),
    Patch(
        "vllm_mlx.prompt_warmup:warm_prefix_cache",
        "vllm_mlx_harmony.host.warmup:warm_prefix_cache",
        "warm-up renders the model's own chat template, which no prompt of ours begins with",
        ("engine", "prompts", "max_tokens"),
        required=False,
    ),
)

_SERVER = "vllm_mlx.server"

USED: tuple[Fact | Attribute, ...] = (
    Fact("vllm_mlx.cli:create_parser", "tells the flags that were given from defaults", ()),
    Fact(
        "vllm_mlx.memory_cache:MemoryCacheConfig",
        "how much --cache-memory-percent is",
        ("max_memory_percent", OTHERS),
    ),
    *(
        Fact(f"{_SERVER}:{name}", "shown at the start")
        for name in ("_api_key", "_model_name", "_model_path")
    ),
    Fact("vllm_mlx.engine.base:BaseEngine", "what every engine of its is", ()),
    Fact("vllm_mlx.engine.base:GenerationOutput", "an answer as text", ("text", OTHERS)),
    Fact(
        "vllm_mlx.model_registry:LoadedModel",
        "one of several models that is loaded",
        ("config", "engine", OTHERS),
    ),
    Fact(
        "vllm_mlx.model_registry:ModelManager._resolve_model_config",
        "what its entry says of it",
        ("self", "entry", "resolved_source"),
    ),
    *(
        Fact(f"mlx_lm.{name}", why, parameters)
        for name, why, parameters in (
            ("utils:load", "loads a model", ("path_or_hf_repo", "tokenizer_config", OTHERS)),
            ("models.cache:make_prompt_cache", "new caches of a model", ("model", OTHERS)),
            ("models.cache:KVCache.merge", "two answers become a batch", ("caches",)),
            ("models.cache:RotatingKVCache.merge", "the same", ("caches",)),
            *(
                (f"models.cache:{batch}.{name}", "rows of a batch come and go", parameters)
                for batch in ("BatchKVCache", "BatchRotatingKVCache")
                for name, parameters in (
                    ("extend", ("self", "other")),
                    ("filter", ("self", "batch_indices")),
                    ("extract", ("self", "idx")),
                )
            ),
            (
                "models.cache:RotatingKVCache._temporal_order",
                "a window, oldest id first",
                ("self", "v"),
            ),
        )
    ),
    Fact("vllm_mlx.api.utils:clean_output_text", "cleans an answer as text", ("text",)),
    *(
        Fact(f"{_SERVER}:{name}", "an engine for a request, and its time", parameters)
        for name, parameters in {
            "_engine": None,
            "_model_manager": None,
            "_validate_model_name": ("request_model",),
            "_acquire_default_engine_for_request": (
                *("raw_request", "total_timeout", "deadline", "model"),
                OTHERS,
            ),
            "_release_engine_for_request": ("raw_request", OTHERS),
            "_start_request_budget": ("timeout",),
            "_wait_with_disconnect": ("coro", "raw_request", "timeout", OTHERS),
            "_disconnect_guard": ("generator", "raw_request", "timeout", OTHERS),
            "_find_uvicorn_cycle": ("obj", OTHERS),
        }.items()
    ),
    *(
        Fact(f"{_SERVER}:_default_{name}", "what a flag says of sampling, or None")
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "repetition_penalty",
        )
    ),
    Fact(
        f"{_SERVER}:_resolve_request_max_tokens",
        "the server's limit of max_tokens",
        ("requested_value",),
    ),
    Fact(f"{_SERVER}:_default_chat_template_kwargs", "the server's rendering defaults"),
    Fact(f"{_SERVER}:_default_thinking_token_budget", "how long reasoning may be by default"),
    Fact(f"{_SERVER}:_metrics.track_inference", "its metrics", ("endpoint", "stream")),
    Fact(f"{_SERVER}:_metrics._prom", "its metrics by name, for one of ours among them"),
    *(
        Fact(
            f"vllm_mlx.metrics:InferenceTracker.{name}", "the accounting of one request", parameters
        )
        for name, parameters in {
            "observe_ttft": ("self",),
            "finish": ("self", "result", "prompt_tokens", "completion_tokens", OTHERS),
        }.items()
    ),
    Fact(f"{_SERVER}:_mcp_manager", "is asked for tool servers, and stopped at the end"),
    Fact(f"{_SERVER}:_mcp_executor", "runs one tool for /v1/mcp/execute"),
    Fact(f"{_SERVER}:_default_timeout", "how long answers may take when the server ends"),
    Fact(f"{_SERVER}:list_models", "its models", ()),
    Fact(f"{_SERVER}:security", "reads the API key from a header"),
    Fact(f"{_SERVER}:verify_api_key", "checks it, also for a WebSocket", ("credentials",)),
    Fact(f"{_SERVER}:check_rate_limit", "also for each message on a WebSocket", ("request",)),
    *(
        Attribute(f"{owner}.{name}", why)
        for owner, names in {
            "vllm_mlx.model_registry:ResolvedModelConfig": {
                "prefill_step_size": "a flag that an entry may set for itself",
                "stream_interval": "another one",
                "gpu_memory_utilization": "another one",
            },
            "vllm_mlx.lifecycle:ModelSpec": {
                "model_name": "what is to be loaded",
                "model_path": "where it is",
            },
            "mlx_lm.models.cache:KVCache": {
                "keys": "of a layer that sees all",
                "values": "of a layer that sees all",
                "offset": "the tokens it has seen",
            },
            "mlx_lm.models.cache:RotatingKVCache": {
                "keys": "of a layer that sees a window",
                "values": "of a layer that sees a window",
                "offset": "the tokens it has seen",
                "keep": "none of the first ones stay",
                "max_size": "the window, in tokens",
                "_idx": "where the next token goes",
            },
            "mlx_lm.models.cache:BatchKVCache": {
                "keys": "of a layer that sees all, rows of a batch",
                "values": "of a layer that sees all, rows of a batch",
                "left_padding": "where a row begins",
                "_idx": "where all rows end",
            },
        }.items()
        for name, why in names.items()
    ),
)


FRONT_END: tuple[Requirement, ...] = (
    Patch(
        "uvicorn.server:Server.shutdown",
        "vllm_mlx_harmony.host.adapter:gracefully",
        "it waits for answers without a limit, and hangs up on WebSockets without a word",
        ("self", "sockets"),
    ),
    Patch(
        "uvicorn.server:Server.handle_exit",
        "vllm_mlx_harmony.server.shutdown:at_once",
        "a second SIGTERM is not looked at",
        ("self", "sig", "frame"),
        required=False,
    ),
    Patch(
        f"{_SERVER}:init_mcp",
        "vllm_mlx_harmony.host.tools:init_mcp",
        "vllm-mlx starts tool servers that no answer of the model uses",
        ("config_path",),
    ),
    Installed(VllmMlx(), "requests find the host by it"),
    *(Around(each, why) for each, why in reversed(routes.MIDDLEWARE)),
    *map(Route.of, routes.ENDPOINTS),
    *map(SocketRoute.of, routes.SOCKETS),
    *engine_routes.ROUTES,
)
"""The endpoints of the front end among vllm-mlx's, and what is around all of them."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What is changed in vllm-mlx now: its version, the parts in use, what was changed by name."""

    version: str
    parts: Extensions
    requirements: tuple[str, ...]
    undos: list[Undo]


_active: Installation | None = None


def host_version() -> str | None:
    """Version of the installed host, from its package metadata; None when there is no host.

    Not `FastAPI(version=…)`: that one says 0.4.1 in 0.6.0.
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
    """Why this host is not one we know, or None."""
    version = host_version()
    if version is None:
        return f"{HOST} is not installed"
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    low, high = SUPPORTED
    if low <= release < high:
        return None
    return (
        f"{HOST} {version} is not supported, only {'.'.join(map(str, low))} up to, "
        f"but not including, {'.'.join(map(str, high))}"
    )


def table(found: Extensions) -> tuple[Requirement, ...]:
    """All rows of the table, in the order in which they are applied, with these parts put in."""
    parser = models.harmony_parser(found.tool_parser)
    parsers = [
        Entry(
            "vllm_mlx.tool_parsers:ToolParserManager.tool_parsers",
            name,
            parser,
            "the text-level parser, for callers in vllm-mlx that have only text",
        )
        for name in FLAGS
    ]
    return (COMMAND, *USED, *CHANGES, *parsers, *FRONT_END)


def activate(name: str = FLAGS[0]) -> Installation:
    """Applies the whole table, once: the second call gives the first one's installation.

    Raises HostError, with nothing changed, when vllm-mlx is not supported, a row is not what it
    was, or a part cannot be loaded.
    """
    global _active
    if _active is None:
        if reason := unsupported():
            raise HostError(reason, code="host_unsupported")
        patching.check(
            (COMMAND, *USED, *CHANGES)
        )  # first of all: our own parts import vllm-mlx, too
        found = find(name)
        rows = table(found)
        rows = tuple(row for row in rows if not _left_out(row))
        undos = patching.apply_all(rows)
        entry_points.use(found)
        applied = tuple(row.label for row in rows if not isinstance(row, (Fact, Attribute)))
        _active = Installation(host_version() or "", found, applied, undos)
    return _active


def _left_out(row: Requirement) -> bool:
    """Whether a row is optional and does not fit, which is warned about."""
    problem = None if row.required else row.problem()
    if problem is not None:
        logger.warning("%s: without it, %s", problem, row.why)
    return problem is not None


def deactivate() -> None:
    """Takes every change back, last first, by identity. Nothing happens when there is none."""
    global _active
    if _active is not None:
        patching.undo_all(_active.undos)
        entry_points.use(None)
        _active = None


def active() -> Installation | None:
    """The installation in force, or None."""
    return _active
