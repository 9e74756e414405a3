"""The patch table: everything relied on in vllm-mlx, changed or not, and the supported versions.

The only place where vllm-mlx's names stand in a table. What is put in place of one is written in
the file that its row names; how it is put there, in `patching` and `mount`.

**Why a table.** vllm-mlx has no interface for what this package does, so that functions of it are
replaced, and many more used. Each is a promise that nobody made. A plugin that finds out in the
middle of a request that one was broken is worse than none; one that cannot say which is no help.
So every name that is used is a row, with the parameters that it must take and what it is for, and
the whole table is checked before anything is changed: with one row that does not fit, nothing is
patched, and one message names it (``vllm-mlx-harmony doctor --verbose`` prints all).

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
import re
from dataclasses import dataclass
from importlib import metadata

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host import entry_points, models, patching
from vllm_mlx_harmony.host.adapter import VllmMlx
from vllm_mlx_harmony.host.entry_points import FLAGS, Extensions, find
from vllm_mlx_harmony.host.kv import status
from vllm_mlx_harmony.host.mount import Around, Installed, Route, SocketRoute
from vllm_mlx_harmony.host.patching import OTHERS, Attribute, Entry, Fact, Patch, Requirement, Undo
from vllm_mlx_harmony.server import routes

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

_CHAT = ("self", "messages", "max_tokens", "temperature", "top_p", "tools", "images", "videos")

_STREAM_GENERATE = (
    "self",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "logits_processors",
    "prompt_cache",
    "kwargs",
)

CHANGES: tuple[Requirement, ...] = (
    Patch(
        "vllm_mlx.server:load_model",
        models.harmony_only,
        "a single model that is not Harmony is refused before it is loaded",
        ("model_name", "model_path", OTHERS),
    ),
    Patch(
        "vllm_mlx.server:load_model",
        "vllm_mlx_harmony.host.summary:of_model",
        "one line for each fact that a user needs, when the model is there",
    ),
    Patch(
        "vllm_mlx.server:load_model_registry",
        "vllm_mlx_harmony.host.summary:of_registry",
        "the same, of several models",
    ),
    *(
        Patch(
            f"vllm_mlx.server:{name}",
            "vllm_mlx_harmony.host.collector:before_serving",
            "a collection of garbage that looks at all of it holds up everybody for 200 ms",
        )
        for name in ("load_model", "load_model_registry")
    ),
    Patch(
        "vllm_mlx.mlx_streams:importlib",
        "vllm_mlx_harmony.host.collector:only_loaded",
        "an engine's first step imports mlx_vlm, for seconds in which everybody is held up",
    ),
    *(
        Patch(
            target,
            "vllm_mlx_harmony.host.collector:giving_back",
            "an engine that is stopped is garbage, and collected: nothing of it may be set aside",
            ("self",),
        )
        for target in (
            "vllm_mlx.engine.simple:SimpleEngine.stop",
            "vllm_mlx.engine.batched:BatchedEngine.stop",
        )
    ),
    Patch(
        "vllm_mlx.engine.base:BaseEngine.preserve_native_tool_format",
        models.native_tool_format,
        "tool calls of a Harmony engine stay structured: no `[Calling tool:` reaches a prompt",
    ),
    Patch(
        "vllm_mlx.engine.simple:SimpleEngine._render_chat_prompt",
        "vllm_mlx_harmony.host.prompts:simple_render_chat_prompt",
        "whatever else in vllm-mlx builds a prompt for a Harmony engine renders as we do",
        ("self", "messages", "template_tools", "chat_template_kwargs", "enable_thinking"),
    ),
    Patch(
        "vllm_mlx.engine.simple:SimpleEngine.chat",
        "vllm_mlx_harmony.host.prompts:simple_chat",
        "its path without tools applies the model's own chat template",
        (*_CHAT, "kwargs"),
    ),
    Patch(
        "vllm_mlx.engine.batched:BatchedEngine._apply_chat_template",
        "vllm_mlx_harmony.host.prompts:batched_apply_chat_template",
        "as above, in the batched engine",
        (
            "self",
            "messages",
            "tools",
            "num_images",
            "num_audios",
            "chat_template_kwargs",
            "enable_thinking",
        ),
    ),
    *(
        Patch(
            f"vllm_mlx.engine.{name}.prepare_for_start",
            "vllm_mlx_harmony.host.kv.opening:identified",
            "the disk knows a model by its files as they are when it is loaded",
            ("self",),
        )
        for name in ("simple:SimpleEngine", "batched:BatchedEngine")
    ),
    Patch(
        "vllm_mlx.models.llm:MLXLanguageModel.stream_generate",
        "vllm_mlx_harmony.host.kv.simple:reuse_prefix",
        "a prompt that continues a known one is computed from where it leaves it",
        _STREAM_GENERATE,
    ),
    Patch(
        "vllm_mlx.models.llm:MLXLanguageModel.stream_generate",
        "vllm_mlx_harmony.host.engine:hand_on_ids",
        "the engine drops the token ids of its chunks (drop when vllm-mlx hands on token ids)",
        _STREAM_GENERATE,
    ),
    Patch(
        "vllm_mlx.prompt_warmup:warm_prefix_cache",
        "vllm_mlx_harmony.host.warmup:warm_prefix_cache",
        "warm-up goes past the engines' own prompt building, and is nobody's",
        ("engine", "prompts", "max_tokens"),
    ),
    Patch(
        "vllm_mlx.scheduler:Scheduler._do_abort_request",
        "vllm_mlx_harmony.host.engine:forget_waiting",
        "who goes while a request waits leaves it in the queue, to be generated for nobody",
        ("self", "request_id"),
    ),
    Patch(
        "vllm_mlx.scheduler:Scheduler.__init__",
        "vllm_mlx_harmony.host.kv.batched:ours_instead",
        "vllm-mlx's prefix cache seldom stores after a hit, and writes to the user's disk",
        ("self", "model", "tokenizer", "config"),
    ),
    Patch(
        "vllm_mlx.scheduler:Scheduler.add_request",
        "vllm_mlx_harmony.host.kv.batched:keep_known",
        "the prompt of a request reaches the batch generator as it is",
        ("self", "request"),
    ),
    Patch(
        "vllm_mlx.scheduler:Scheduler.add_request",
        "vllm_mlx_harmony.host.kv.batched:own_sampler",
        "all requests that run together are drawn by the settings of the first",
        ("self", "request"),
    ),
    Patch(
        "vllm_mlx.scheduler:BatchGenerator",
        "vllm_mlx_harmony.host.kv.batched:reusing",
        "sequences start where the known ends, are drawn by their own settings, and remembered",
        (
            *("model", "prefill_batch_size", "completion_batch_size", "prefill_step_size"),
            *("stream", OTHERS),
        ),
    ),
    *(
        Patch(target, f"vllm_mlx_harmony.host.kv.status:{name}", why, ("self",))
        for name, why, targets in (
            (
                "with_counters",
                "the counters of prefix reuse, where vllm-mlx shows its own",
                (
                    "vllm_mlx.engine.simple:SimpleEngine.get_cache_stats",
                    "vllm_mlx.engine.batched:BatchedEngine.get_cache_stats",
                ),
            ),
            (
                "with_ours",
                "who empties vllm-mlx's caches empties ours",
                (
                    "vllm_mlx.engine.simple:SimpleEngine.clear_runtime_caches",
                    "vllm_mlx.scheduler:Scheduler.clear_runtime_caches",
                    "vllm_mlx.engine.batched:BatchedEngine._clear_prefix_cache_on_owner",
                ),
            ),
        )
        for target in targets
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
        for name in ("_api_key", "_rate_limiter", "_model_name", "_model_path")
    ),
    Fact(
        "vllm_mlx.engine.simple:SimpleEngine.stream_generate",
        "takes a prompt of token ids",
        ("self", "prompt", "max_tokens", "temperature", "top_p", "stop", "kwargs"),
    ),
    Fact("vllm_mlx.engine.simple:SimpleEngine.start", "loads the model", ("self",)),
    Fact(
        "vllm_mlx.engine.simple:SimpleEngine.stream_chat",
        "answers chats, also those that are not streamed",
        ("self", "messages", OTHERS),
    ),
    Fact(
        "vllm_mlx.engine.batched:BatchedEngine._clear_runtime_caches_on_owner",
        "empties its caches on the thread that has them",
        ("self",),
    ),
    Fact("vllm_mlx.engine.base:EngineBusy", "the simple engine runs one request at a time"),
    Fact(
        "vllm_mlx.engine_core:EngineCore.add_request",
        "takes a prompt of token ids",
        ("self", "prompt", "sampling_params", OTHERS),
    ),
    Fact(
        "vllm_mlx.engine_core:EngineCore.stream_outputs",
        "its outputs carry new_token_ids",
        ("self", "request_id", OTHERS),
    ),
    Fact(
        "vllm_mlx.request:SamplingParams",
        "what a batched request is generated with",
        (
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "stop_token_ids",
            "logits_processors",
            OTHERS,
        ),
    ),
    Fact(
        "vllm_mlx.models.llm:StreamingOutput",
        "what the simple engine is handed for each id",
        ("text", "token", "finished", "finish_reason", "prompt_tokens"),
    ),
    Fact(
        "vllm_mlx.scheduler:Scheduler._get_detokenizer",
        "looks into _detokenizer_pool first",
        ("self", "request_id"),
    ),
    Fact("vllm_mlx.request:RequestOutput", "ids", ("new_token_ids", "finish_reason", OTHERS)),
    Fact("vllm_mlx.engine.base:GenerationOutput", "an answer as text", ("text", OTHERS)),
    Fact(
        "vllm_mlx.scheduler:SchedulerConfig",
        "turns vllm-mlx's prefix cache off where ours takes its place",
        ("enable_prefix_cache", "max_kv_size", OTHERS),
    ),
    *(
        Fact(f"mlx_lm.{name}", "prefix reuse cuts and joins caches", parameters)
        for name, parameters in {
            "generate:BatchGenerator.insert_segments": (
                *("self", "segments", "max_tokens", "caches", "all_tokens", "samplers"),
                *("logits_processors", "state_machines"),
            ),
            "generate:BatchGenerator._make_batch": ("self", "n"),
            "generate:BatchGenerator._next": ("self",),
            "generate:GenerationBatch": (
                *("model", "uids", "inputs", "prompt_cache", "tokens", "samplers"),
                *("fallback_sampler", "logits_processors", "state_machines", "max_tokens"),
            ),
            "generate:GenerationBatch._step": ("self",),
            "generate:GenerationBatch.extract_cache": ("self", "idx"),
            "generate:GenerationBatch.filter": ("self", "keep"),
            "generate:PromptProcessingBatch.extend": ("self", "batch"),
            "generate:PromptProcessingBatch.generate": ("self", "tokens"),
            "generate:wired_limit": ("model", "streams"),
            "models.cache:make_prompt_cache": ("model", OTHERS),
            "models.cache:RotatingKVCache._temporal_order": ("self", "v"),
            "models.cache:BatchRotatingKVCache.extract": ("self", "idx"),
        }.items()
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
            "vllm_mlx.engine.simple:SimpleEngine": {
                "_generation_lock": "one request at a time; nobody else holds the engine",
                "_prefill_step_size": "what --prefill-step-size says",
                "_model_path": "where the files of its model are",
                "_model": "the model, once it is loaded",
                "_loaded": "whether it is",
                "is_mllm": "a multimodal model takes no ids",
                "tokenizer": "says whether a model is Harmony",
            },
            "vllm_mlx.engine.batched:BatchedEngine": {
                "_engine": "the engine within, asynchronous",
                "_model": "the model, once it is loaded",
                "_model_path": "where the files of its model are",
                "_loaded": "whether it is loaded",
                "is_mllm": "a multimodal model takes no ids",
                "tokenizer": "says whether a model is Harmony",
            },
            "vllm_mlx.engine_core:AsyncEngineCore": {"engine": "the engine within that one"},
            "vllm_mlx.engine_core:EngineCore": {"scheduler": "has the model"},
            "vllm_mlx.scheduler:Scheduler": {
                "model": "what prefixes are remembered of",
                "waiting": "a request that is aborted while it waits stays there",
                "_detokenizer_pool": "a request of ids needs no text",
            },
            "mlx_lm.generate:BatchGenerator": {
                "_unprocessed_sequences": "what has not begun: it is where a prefix is put in",
                "_prompt_batch": "rows that are prefilled",
                "_generation_batch": "rows that are generated",
                "_make_new_cache": "an empty cache in the model's layout",
            },
            "vllm_mlx.request:Request": {
                "request_id": "what its detokenizer is found by",
                "prompt": "its ids, and whose they are",
                "prompt_token_ids": "the same ones, when they need not be made of text",
                "num_prompt_tokens": "how many",
                "remaining_tokens": "those that are still to be computed",
                "prompt_cache": "vllm-mlx's own prefix cache has something of them",
                "sampling_params": "how its ids are drawn",
            },
            "mlx_lm.generate:PromptProcessingBatch": {
                "uids": "whose its rows are",
                "tokens": "the ids of each row so far",
                "prompt_cache": "what has been computed of them",
            },
            "mlx_lm.generate:PromptProcessingBatch.Response": {
                "uid": "whose it is",
                "end_of_segment": "a place where a prefix is remembered",
                "end_of_prompt": "the whole prompt is computed",
            },
            "mlx_lm.generate:GenerationBatch.Response": {
                "uid": "whose it is",
                "token": "the id that was drawn",
                "finish_reason": "why the row ended, or None",
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
            "mlx_lm.generate:GenerationBatch": {
                "uids": "whose its rows are",
                "tokens": "the ids of each row so far",
                "prompt_cache": "what has been computed of them",
                "_current_tokens": "the ids that were drawn last",
                "_next_tokens": "the ids that are being drawn",
                "_next_logprobs": "what they are drawn from",
                "_token_context": "the ids of each row so far",
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
    *status.ROUTES,
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
        undos = patching.apply_all(rows)
        entry_points.use(found)
        applied = tuple(row.label for row in rows if not isinstance(row, (Fact, Attribute)))
        _active = Installation(host_version() or "", found, applied, undos)
    return _active


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
