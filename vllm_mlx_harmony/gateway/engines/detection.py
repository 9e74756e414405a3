"""Which kind of server a URL is, what it serves, and what it can do: asked once, when it is there.

Each kind answers a question that no other does: the id endpoint of this plugin, llama.cpp's
``/props``, SGLang's ``/get_model_info``, vLLM's ``/version``. Whether vLLM keeps to a grammar of
ids depends on its backend and its reasoning parser, so it is tried: one token, which only a
grammar would make it write.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, TypeAlias

from aiohttp import ClientSession

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HostError, OutputError, RequestError
from vllm_mlx_harmony.core.grammar.json_schema import ANY_OBJECT
from vllm_mlx_harmony.gateway.engines.dialect import Capabilities, Dialect, EngineRequest
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
from vllm_mlx_harmony.gateway.engines.plugin import PLUGIN
from vllm_mlx_harmony.gateway.engines.sglang import SGLANG
from vllm_mlx_harmony.gateway.engines.vllm import VLLM, VLLM_TOKENS
from vllm_mlx_harmony.server.engine import Finish
from vllm_mlx_harmony.server.sampling import Settings

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

ASK_SECONDS = 5.0
TRIAL = (vocab.START, *vocab.encode("assistant"))
"""The prompt of a trial."""

NO_ENDPOINT = (
    "this vllm-mlx has no id endpoint: start it with `vllm-mlx-harmony serve --id-endpoint`, "
    "or set VLLM_MLX_HARMONY_ID_ENDPOINT=1 for it"
)

KEY_REQUIRED = (
    "the engine requires an API key: set --engine-key, or `key` of the engine in the file"
)

TRY_SECONDS = 60.0
"""For the first grammar, which an engine prepares its tokenizer for."""


@dataclass(frozen=True, slots=True)
class Spec:
    """An engine as it is configured. ``kind`` is empty where it is to be found out."""

    url: str
    kind: str = ""
    key: str = ""


_Json: TypeAlias = "dict[str, Any]"


async def detect(http: ClientSession, spec: Spec, model: str) -> HttpEngine:
    """The engine at a URL, for the ``model`` of the gateway.

    Raises ``EngineUnavailable`` as long as nobody answers there, ``HostError`` for what is no
    engine, or serves other models only.
    """
    ask = _Asking(http, spec)
    dialect, about = await _kind(ask, spec)
    served_name, context_length = _served(await ask("/v1/models") or {}, about, model)
    engine = HttpEngine(
        http,
        spec.url,
        await _able(dialect, ask),
        model=model,
        served_name=served_name,
        context_length=context_length,
        key=spec.key,
    )
    engine.dialect = await _tried(engine, spec)
    return engine


async def _tried(engine: HttpEngine, spec: Spec) -> Dialect:
    """The engine's dialect, with what a trial has shown of it.

    vLLM has the route of its endpoint of ids always, and refuses (403) what is posted to it unless
    it was started with it. Raises ``EngineUnavailable`` where a trial shows nothing: what is taken
    for an engine without grammars stays one for as long as it is up.
    """
    found = engine.dialect
    if found not in (VLLM, VLLM_TOKENS):
        try:
            await first_id(engine, TRY_SECONDS)
        except EngineUnavailable as error:
            if found is PLUGIN and error.answered == HTTPStatus.NOT_FOUND:
                raise HostError(NO_ENDPOINT) from error
            raise
        return found
    if spec.kind not in _ENDPOINTS:
        engine.dialect = VLLM_TOKENS
        try:
            return replace(VLLM_TOKENS, capabilities=await _grammars(engine))
        except EngineUnavailable as error:
            if not _is_absent(error.answered):
                raise
        found = engine.dialect = VLLM
    return replace(found, capabilities=await _grammars(engine))


_ENDPOINTS = ("vllm-completions", "vllm-tokens")


def _is_absent(answered: int) -> bool:
    """Whether a status says that there is no such endpoint, or none that streams (200)."""
    if answered >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return answered == HTTPStatus.NOT_IMPLEMENTED
    return answered not in (0, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


_PARAMETRIC = f"""\
start: <[{vocab.RETURN}]> | <[{vocab.RETURN}]> never::0x1
never::_: "x" %if bit_clear(0)
"""
"""Nothing but the end, in the notation of schemas that are not strict (llguidance 0.7.30)."""


async def _grammars(engine: HttpEngine) -> Capabilities:
    """Whether the engine writes what a grammar says. Raises ``EngineUnavailable``."""
    can = replace(engine.capabilities, grammar=False)
    try:
        if await _first_id(engine, _PARAMETRIC) != vocab.RETURN:
            return can
    except EngineUnavailable as error:
        if error.answered != HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        await _first_id(engine, None)  # is it the grammar?
        return can
    spaced = await _first_id(engine, f"start: %json {ANY_OBJECT.text}") is not None
    return replace(can, grammar=True, grammar_white_space=spaced)


async def first_id(engine: HttpEngine, seconds: float) -> None:
    """Has the engine generate an id. Raises ``EngineUnavailable`` where it does not."""
    try:
        await asyncio.wait_for(_first_id(engine, None, refused=False), seconds)
    except asyncio.TimeoutError as error:
        problem = f"it generates nothing: no id of a trial came in {seconds:.0f} seconds"
        raise EngineSilent(problem) from error


async def _first_id(engine: HttpEngine, grammar: str | None, *, refused: bool = True) -> int | None:
    """What the engine writes first under a grammar; ``None`` where it refuses that, and ``refused``
    says that it may.

    Raises ``EngineUnavailable`` when it takes no request, or breaks off.
    """
    settings = Settings(max_tokens=1, temperature=1.0, top_p=1.0)
    trial = EngineRequest(engine.served_name, TRIAL, settings, grammar=grammar)
    first: int | None = None
    finish: Finish | None = None
    try:
        async with aclosing(engine.chunks(trial, seconds=TRY_SECONDS)) as chunks:
            async for chunk in chunks:
                first = chunk.ids[0] if chunk.ids else first
                finish = chunk.finish or finish
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
    """Whether two names may well be of one model: the last parts of paths and repositories are the
    same, but for what one of them says of its format."""
    first, second = (
        name.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf") for name in (one, other)
    )
    return first.startswith(second) or second.startswith(first)


def start_line(engine: HttpEngine) -> str:
    """What a log says of an engine that was found."""
    missing = ", ".join(engine.capabilities.missing)
    length = engine.context_length
    return (
        f"{engine.url}: {engine.dialect.name} serves {engine.served_name!r}, "
        f"{f'{length} tokens of context' if length else 'context length not known'}; "
        f"missing: {missing or 'nothing'}"
    )


class _Asking:
    """GETs JSON from an engine."""

    def __init__(self, http: ClientSession, spec: Spec) -> None:
        self._http = http
        self._url = spec.url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {spec.key}"} if spec.key else {}
        self.unauthorized = False
        """Whether the engine rejected the key, or the lack of one."""

    async def __call__(self, path: str) -> _Json | None:
        """The object at ``path``; ``None`` where there is none. Raises ``EngineUnavailable``."""
        try:
            asked = self._http.get(
                self._url + path, headers=self._headers, timeout=silence(ASK_SECONDS)
            )
            async with asked as response:
                content = await response.read()
        except FAILURES as error:
            problem = f"{self._url} cannot be reached ({reason_of(error)})"
            raise EngineUnavailable(problem) from error
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise EngineUnavailable(f"{self._url}{path} answered {response.status}")
        if response.status != HTTPStatus.OK:
            self.unauthorized |= response.status == HTTPStatus.UNAUTHORIZED
            return None
        try:
            found = json.loads(content)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


_SIGNS: tuple[tuple[str, str, str], ...] = (
    ("vllm-mlx", "/harmony/v1/generate", "harmony"),
    ("llamacpp", "/props", "default_generation_settings"),
    ("sglang", "/get_model_info", "is_generation"),
    ("vllm", "/version", "version"),
)
"""Kind, question, and a field that no other kind's answer has."""


async def _kind(ask: _Asking, spec: Spec) -> tuple[Dialect, _Json]:
    if spec.kind:
        if spec.kind not in KINDS:
            raise HostError(
                f"{spec.kind!r} is not a kind of engine: {', '.join(KINDS)}", status=500
            )
        # The longest: `vllm-mlx` begins with `vllm`.
        signs = [sign for sign in _SIGNS if spec.kind.startswith(sign[0])]
        path = max(signs, key=lambda sign: len(sign[0]))[1] if signs else ""
        return KINDS[spec.kind], (await ask(path) if path else None) or {}
    for kind, path, field in _SIGNS:
        about = await ask(path)
        if about is not None and field in about:
            return KINDS[kind], about
    models = await ask("/v1/models")
    if any(str(each.get("owned_by")).startswith("vllm-mlx") for each in _entries(models or {})):
        raise HostError(NO_ENDPOINT)
    if ask.unauthorized:
        raise HostError(f"{KEY_REQUIRED}, or name its kind: --engine KIND=URL")
    raise HostError(
        f"this server is not recognized as any of {', '.join(KINDS)}: check the URL, "
        "or name its kind: --engine KIND=URL"
    )


def _entries(listed: _Json) -> list[_Json]:
    """The models in an answer of ``/v1/models``."""
    return [each for each in listed.get("data") or () if isinstance(each, dict)]


def _served(listed: _Json, about: _Json, model: str) -> tuple[str, int | None]:
    """The engine's name for the model, and its context length if it says one."""
    entries = _entries(listed)
    names = [str(each.get("id")) for each in entries]
    if entries and model not in names and len(entries) > 1:
        raise HostError(f"the engine serves {', '.join(names)}, and none of them is {model}")
    entry = next((each for each in entries if each.get("id") == model), (entries or [{}])[0])
    settings = about.get("default_generation_settings")
    lengths = (
        entry.get("max_model_len"),
        about.get("context_length"),
        settings.get("n_ctx") if isinstance(settings, dict) else None,
    )
    length = next((each for each in lengths if type(each) is int and each > 0), None)
    return str(entry.get("id") or model), length


async def _able(dialect: Dialect, ask: _Asking) -> Dialect:
    """``dialect`` with what this server of its kind can do."""
    if dialect is SGLANG:
        about = await ask("/get_server_info") or {}
        grammar = about.get("grammar_backend") == "llguidance"
        return replace(dialect, capabilities=replace(dialect.capabilities, grammar=grammar))
    return dialect
