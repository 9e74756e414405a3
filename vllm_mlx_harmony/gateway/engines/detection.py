"""Detects the kind of a server, the model that it serves and its capabilities, once it is up.

Each kind has a route that no other has: the id endpoint of this plugin, llama.cpp's ``/props``,
SGLang's ``/get_model_info``, vLLM's ``/version``. Whether vLLM follows a grammar of ids depends on
its backend and its reasoning parser, which a trial shows: one token that only a grammar would make
it generate.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus

from aiohttp import ClientSession

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HostError, OutputError, RequestError
from vllm_mlx_harmony.core.grammar.strict import strict_schema
from vllm_mlx_harmony.engine_api.engine import Finish, GenerationSettings
from vllm_mlx_harmony.gateway.engines.dialect import Capabilities, Dialect, EngineRequest, Json
from vllm_mlx_harmony.gateway.engines.http import (
    FAILURES,
    EngineLost,
    EngineSilent,
    EngineUnavailable,
    HttpEngine,
    reason_of,
    silence,
)
from vllm_mlx_harmony.gateway.engines.llamacpp import LLAMACPP, LLAMACPP_LLGUIDANCE
from vllm_mlx_harmony.gateway.engines.plugin import PLUGIN, capabilities_of
from vllm_mlx_harmony.gateway.engines.sglang import SGLANG
from vllm_mlx_harmony.gateway.engines.vllm import VLLM, VLLM_TOKENS
from vllm_mlx_harmony.gateway.routing_policy import ASSISTANT

logger = logging.getLogger("vllm_mlx_harmony")

KINDS: dict[str, Dialect] = {
    "vllm": VLLM,
    "vllm-completions": VLLM,
    "vllm-tokens": VLLM_TOKENS,
    "sglang": SGLANG,
    "llamacpp": LLAMACPP,
    "llamacpp-llguidance": LLAMACPP_LLGUIDANCE,
    "vllm-mlx": PLUGIN,
}
"""The kinds of ``--engine KIND=URL``. ``vllm`` is detected as either of its endpoints."""

LOCAL = "mlx:"
"""What the URL of a model in the gateway's process begins with."""

PROBE_SECONDS = 5.0
"""The time limit of a request about the server itself."""

TRIAL = (vocab.START, ASSISTANT)
"""The prompt of a trial."""

NO_ENDPOINT = (
    "this vllm-mlx has no id endpoint: start it with `vllm-mlx-harmony serve --id-endpoint`, "
    "or set VLLM_MLX_HARMONY_ID_ENDPOINT=1 for it"
)

KEY_REQUIRED = (
    "the engine requires an API key: set --engine-key, or `key` of the engine in the file"
)

TRY_SECONDS = 60.0
"""The time limit of a trial: for the first grammar, an engine prepares its tokenizer."""


@dataclass(frozen=True, slots=True)
class Spec:
    """An engine as it is configured. An empty ``kind`` is detected; ``model`` is the engine's name
    for the model if it is not the gateway's. ``url`` is ``mlx:MODEL`` for a model in the gateway's
    process."""

    url: str
    kind: str = ""
    key: str = ""
    model: str = ""

    @property
    def local_model(self) -> str | None:
        """The directory or repository of a model in the gateway's process."""
        return self.url.removeprefix(LOCAL) if self.url.startswith(LOCAL) else None


async def detect(http: ClientSession, spec: Spec, model: str) -> HttpEngine:
    """The engine at a URL, for the ``model`` of the gateway.

    Raises ``EngineUnavailable`` while no engine responds there, and ``HostError`` for a server that
    is not an engine or serves only other models.
    """
    dialect, about = await _kind(http, spec)
    if dialect is SGLANG:
        _, server = await get(http, spec, "/get_server_info")
        capabilities = replace(
            dialect.capabilities,
            grammar=server.get("grammar_backend") == "llguidance",
            penalties=server.get("device") != "mps",  # hardware_backend/mlx/sampling.py
        )
        dialect = replace(dialect, capabilities=capabilities)
    elif dialect is PLUGIN:
        dialect = replace(dialect, capabilities=capabilities_of(about))
    _, models = await get(http, spec, "/v1/models")
    served_name, length = _name_and_length(models, about, spec.model or model)
    engine = HttpEngine(http, spec.url.rstrip("/"), dialect, model, served_name, length, spec.key)
    engine.dialect = await _tried(engine, spec)
    logger.info("engine %s", start_line(engine))
    return engine


async def _tried(engine: HttpEngine, spec: Spec) -> Dialect:
    """The engine's dialect, with the capabilities that a trial has shown.

    vLLM always has the route of its endpoint for ids, and rejects requests there (403) unless it
    was started with it. Raises ``EngineUnavailable`` for an inconclusive trial: an engine that is
    taken for one without grammars remains so for as long as it is up.
    """
    found = engine.dialect
    if found not in (VLLM, VLLM_TOKENS):
        try:
            await first_id(engine, TRY_SECONDS)
        except EngineUnavailable as error:
            if found.path == PLUGIN.path and error.engine_status == HTTPStatus.NOT_FOUND:
                raise HostError(NO_ENDPOINT) from error
            raise
        return found
    if spec.kind not in ("vllm-completions", "vllm-tokens"):
        engine.dialect = VLLM_TOKENS
        try:
            return replace(VLLM_TOKENS, capabilities=await _grammars(engine))
        except EngineUnavailable as error:
            if not _is_absent(error.engine_status):
                raise
        found = engine.dialect = VLLM
    return replace(found, capabilities=await _grammars(engine))


def _is_absent(status: int) -> bool:
    """Whether a status means that there is no such endpoint, or that it does not stream (200)."""
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return status == HTTPStatus.NOT_IMPLEMENTED
    return status not in (0, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


_PARAMETRIC = f"""\
start: <[{vocab.RETURN}]> | <[{vocab.RETURN}]> never::0x1
never::_: "x" %if bit_clear(0)
"""
"""Allows only the end, in the notation of schemas that are not strict (llguidance 0.7.30)."""


async def _grammars(engine: HttpEngine) -> Capabilities:
    """The capabilities of an engine that may follow grammars. Raises ``EngineUnavailable``."""
    can = replace(engine.capabilities, grammar=False)
    try:
        if await _first_id(engine, _PARAMETRIC) != vocab.RETURN:
            return can
    except EngineUnavailable as error:
        if error.engine_status != HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        await _first_id(engine, None)  # raises unless the grammar is the cause
        return can
    any_object = strict_schema({"type": "object"})
    spaced = await _first_id(engine, f"start: %json {any_object.text}") is not None
    return replace(can, grammar=True, grammar_white_space=spaced)


async def first_id(engine: HttpEngine, seconds: float) -> None:
    """Makes the engine generate an id. Raises ``EngineUnavailable`` if it does not."""
    try:
        async with asyncio.timeout(seconds):
            await _first_id(engine, None, refused=False)
    except TimeoutError as error:
        problem = f"it generates nothing: no id came within {seconds:.0f} seconds of a trial"
        raise EngineSilent(problem) from error


async def _first_id(engine: HttpEngine, grammar: str | None, *, refused: bool = True) -> int | None:
    """The first id that the engine generates, with a grammar if there is one.

    ``None`` if it refuses the request, and may (``refused``). Raises ``EngineUnavailable`` if it
    accepts no request, or loses it.
    """
    settings = GenerationSettings(max_tokens=1, temperature=1.0, top_p=1.0)
    trial = EngineRequest(engine.served_name, TRIAL, settings, grammar=grammar)
    first: int | None = None
    finish: Finish | None = None
    try:
        async with aclosing(engine.stream(trial, seconds=TRY_SECONDS)) as steps:
            async for step in steps:
                first = step.ids[0] if step.ids else first
                finish = step.finish or finish
    except EngineLost as error:
        raise EngineUnavailable(error.message) from error
    except (OutputError, RequestError) as error:
        if not refused:
            raise EngineUnavailable(f"it generates nothing: {error.message}") from error
        return None
    if first is None and finish is None and not refused:
        raise EngineUnavailable("it generates nothing: the answer to a trial is empty")
    return first


def same_model(one: str, other: str) -> bool:
    """Whether two names may belong to one model: the last parts of the paths or repositories are
    the same, except for the format at the end of one of them."""
    first, second = (
        name.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf") for name in (one, other)
    )
    return first.startswith(second) or second.startswith(first)


def start_line(engine: HttpEngine) -> str:
    """The description of a detected engine for the log."""
    missing = ", ".join(engine.capabilities.missing)
    length = engine.context_length
    return (
        f"{engine.url}: {engine.dialect.name} serves {engine.served_name!r}, "
        f"{f'{length} tokens of context' if length else 'context length unknown'}; "
        f"missing: {missing or 'nothing'}"
    )


async def get(http: ClientSession, spec: Spec, path: str) -> tuple[int, Json]:
    """The status at ``path`` and the JSON object there; an empty one if there is none.

    Raises ``EngineUnavailable`` if the server cannot be reached, or fails.
    """
    headers = {"Authorization": f"Bearer {spec.key}"} if spec.key else {}
    url = spec.url.rstrip("/") + path
    try:
        async with http.get(url, headers=headers, timeout=silence(PROBE_SECONDS)) as response:
            content = await response.read()
    except FAILURES as error:
        raise EngineUnavailable(f"its {path} cannot be reached ({reason_of(error)})") from error
    if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise EngineUnavailable(f"its {path} answered {response.status}")
    document: object = None
    if response.status == HTTPStatus.OK:
        with suppress(ValueError):
            document = json.loads(content)
    return response.status, document if isinstance(document, dict) else {}


_SIGNS: tuple[tuple[str, str, str], ...] = (
    ("vllm-mlx", "/harmony/v1/generate", "harmony"),
    ("llamacpp", "/props", "default_generation_settings"),
    ("sglang", "/get_model_info", "is_generation"),
    ("vllm", "/version", "version"),
)
"""Kind, path, and a field that no other kind has there. A kind that begins with the name of another
comes before it."""


async def _kind(http: ClientSession, spec: Spec) -> tuple[Dialect, Json]:
    """The kind of a server, and its answer to the request that identifies the kind."""
    if spec.kind:
        if spec.kind not in KINDS:
            raise HostError(
                f"{spec.kind!r} is not a kind of engine: {', '.join(KINDS)}", status=500
            )
        path = next(path for kind, path, _ in _SIGNS if spec.kind.startswith(kind))
        return KINDS[spec.kind], (await get(http, spec, path))[1]
    statuses = set()
    for kind, path, field in _SIGNS:
        status, about = await get(http, spec, path)
        if str(about.get("build_info")).startswith("vllm-mlx-harmony"):
            raise HostError(NO_ENDPOINT)
        if field in about:
            return KINDS[kind], about
        statuses.add(status)
    status, models = await get(http, spec, "/v1/models")
    if any(str(entry.get("owned_by")).startswith("vllm-mlx") for entry in _entries(models)):
        raise HostError(NO_ENDPOINT)
    if HTTPStatus.UNAUTHORIZED in (*statuses, status):
        raise HostError(f"{KEY_REQUIRED}, or name its kind: --engine KIND=URL")
    raise HostError(
        f"this server is not recognized as any of {', '.join(KINDS)}: check the URL, "
        "or name its kind: --engine KIND=URL"
    )


def _entries(models: Json) -> list[Json]:
    """The models in the response of ``/v1/models``."""
    return [entry for entry in models.get("data") or () if isinstance(entry, dict)]


def _name_and_length(models: Json, about: Json, model: str) -> tuple[str, int | None]:
    """The engine's name for the model, and its context length if it reports one.

    Raises ``HostError`` if it serves other models only: their answers would pass for this one's.
    """
    entries = _entries(models)
    exact = [entry for entry in entries if entry.get("id") == model]
    similar = [entry for entry in entries if same_model(str(entry.get("id")), model)]
    if entries and not (exact or len(similar) == 1):
        names = ", ".join(str(entry.get("id")) for entry in entries)
        raise HostError(
            f"the engine serves {names}, not {model}: set --model to its name, or --engine-model "
            "(`model` of the engine in the file) if clients are to use another name"
        )
    entry = next(iter(exact or similar), {})
    settings = about.get("default_generation_settings")
    lengths = (
        entry.get("max_model_len"),
        about.get("context_length"),
        settings.get("n_ctx") if isinstance(settings, dict) else None,
    )
    length = next((length for length in lengths if type(length) is int and length > 0), None)
    return str(entry.get("id") or model), length
