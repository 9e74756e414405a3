"""vllm-mlx's engine for a Harmony model: its `BaseEngine` over an engine of our own.

``engine``, an `MlxEngine`, computes; our routes use it directly. The rest of vllm-mlx calls the
methods here: raw completions, status, caches.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
from vllm_mlx.engine.base import BaseEngine, GenerationOutput

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.stops import StopStrings
from vllm_mlx_harmony.core.turn import OutputLimits, Sampling
from vllm_mlx_harmony.engine import device, exposition, loading, resources
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine, Options
from vllm_mlx_harmony.engine.mlx_lm_compat import load_tokenizer
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.engine_api.engine import GenerationRequest
from vllm_mlx_harmony.host import metrics
from vllm_mlx_harmony.model_files import TOKENIZER, is_harmony_model
from vllm_mlx_harmony.server.sampling import limited_to_context, resolve
from vllm_mlx_harmony.standin import is_standin
from vllm_mlx_harmony.tasks import in_thread, unfreeze, wait_until_done

_GB = 1e9

_Decoder = getincrementaldecoder("utf-8")


class NotHarmonyModel(HostError):
    """The model is not a Harmony model, although the flag asks for one."""

    code = "not_harmony"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is not a gpt-oss (Harmony) model: its tokenizer is not o200k_harmony; "
            "serve it without --tool-call-parser harmony"
        )


_loaded: dict[int, tuple[str, MlxEngine]] = {}


def serving() -> list[tuple[str, MlxEngine]]:
    """The engines of the models that are loaded, with their names; any thread may call it."""
    return sorted(_loaded.values(), key=lambda one: one[0])


def engine_of(engine: object) -> MlxEngine | None:
    """The `MlxEngine` in vllm-mlx's ``engine``; ``None`` if that is not Harmony, or not loaded."""
    return engine.engine if isinstance(engine, HarmonyEngine) else None


class HarmonyEngine(BaseEngine):  # type: ignore[misc, unused-ignore]
    """A Harmony model in vllm-mlx.

    ``model_name`` is its served name, ``model_path`` its directory or repository (by default the
    same). ``options`` are those of the process, unless its entry in a models config sets others.
    """

    model_name = ""
    is_mllm = False

    def __init__(
        self,
        model_name: str,
        *,
        model_path: str | None = None,
        trust_remote_code: bool = False,
        options: Options | None = None,
    ) -> None:
        self.model_name = model_name
        self.path = str(model_path or model_name)
        self.engine: MlxEngine | None = None
        self._trust_remote_code = trust_remote_code
        self._options = options or resources.options
        self._since = time.time()
        self._load_lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer_read: Any = None

    # --- Loaded and unloaded

    @property
    def tokenizer(self) -> Any:
        """Of the model that is loaded; ``None`` before.

        It is read when it is asked for, which no route does while ours stand in front of
        vllm-mlx's own: it would be a second vocabulary in memory.
        """
        if self.engine is None:
            return None
        with self._tokenizer_lock:
            if self._tokenizer_read is None:
                directory, trusted = self._files()
                self._tokenizer_read = load_tokenizer(directory, trust_remote_code=trusted)
            return self._tokenizer_read

    def prepare_for_start(self) -> None:
        """Loads the model; blocks. Raises ``NotHarmonyModel`` for any other model."""
        with self._load_lock:
            if self.engine is not None:
                return
            engine = MlxEngine(self.path, self._options)
            try:
                engine.load(self._load)
            except BaseException:
                engine.close()
                raise
            self.engine = engine
            _loaded[id(self)] = self.model_name, engine
        metrics.show()

    def _load(self) -> tuple[Any, PrefixCache]:
        vocab.encoding()  # one that cannot be loaded is an error at the start
        directory, trusted = self._files()
        if (harmony := is_harmony_model(str(directory))) is None:
            raise FileNotFoundError(f"{directory} has no {TOKENIZER}")
        if not harmony:
            raise NotHarmonyModel(self.model_name)
        return loading.load(self.path, directory, trust_remote_code=trusted)

    def _files(self) -> tuple[Path, bool]:
        """The directory of the model, and whether code in it may run."""
        trusted = self._trust_remote_code
        directory = loading.directory_of(self.path, trust_remote_code=trusted)
        return directory, trusted or is_standin(directory)

    async def start(self) -> None:
        """Loads the model in a thread. If cancelled, waits for loading to finish before raising."""
        prepared = asyncio.ensure_future(asyncio.to_thread(self.prepare_for_start))
        await wait_until_done(prepared)
        prepared.result()

    async def stop(self) -> None:
        """Ends all requests and frees the model: it can be started again."""
        engine, self.engine = self.engine, None
        self._tokenizer_read = None
        _loaded.pop(id(self), None)
        if engine is not None:
            await wait_until_done(asyncio.ensure_future(asyncio.to_thread(engine.close)))
            unfreeze()
            gc.collect()

    def is_healthy(self) -> bool:
        """Whether its thread is alive, once it is loaded."""
        return self.engine is None or self.engine.healthy

    # --- As vllm-mlx generates: text in, text out

    async def stream_generate(
        self,
        prompt: str,
        max_tokens: int = 256,
        temperature: float = 0.7,
        top_p: float | None = 0.9,
        stop: list[str] | str | None = None,
        *,
        top_k: int | None = None,
        min_p: float | None = None,
        presence_penalty: float | None = None,
        repetition_penalty: float | None = None,
        **ignored: object,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """What follows ``prompt``, up to a stop string or the end of the turn.

        Control tokens are text, except those that end a turn (``TURN_ENDS``), which are left out.
        """
        if self.engine is None:
            await self.start()
        assert self.engine is not None
        ids = tuple(await in_thread(vocab.encode_with_control, prompt))
        # vllm-mlx's samplers ignore a ``top_p`` and a penalty of 0.
        penalties = presence_penalty, repetition_penalty or None
        sampling = Sampling(temperature, top_p or None, top_k, min_p, *penalties)
        settings = resolve(sampling, OutputLimits(), lambda _: max_tokens)
        settings = limited_to_context(settings, len(ids), self.engine.context_length)
        stops = StopStrings([stop] if isinstance(stop, str) else stop or [])
        decoder, text, tokens = _Decoder("replace"), "", 0
        async with aclosing(self.engine.generate(GenerationRequest(ids, settings, ""))) as steps:
            async for step in steps:
                if step.progress is not None:
                    continue
                tokens += len(step.ids)
                spelled = [token for token in step.ids if token not in vocab.TURN_ENDS]
                new = decoder.decode(b"".join(map(vocab.token_bytes, spelled)), bool(step.finish))
                new, found = stops.feed(new)
                if step.finish is not None and found is None:
                    new += stops.flush()
                finish = step.finish if found is None else "stop"
                text += new
                yield GenerationOutput(
                    text=text,
                    tokens=list(step.ids),
                    prompt_tokens=len(ids),
                    completion_tokens=tokens,
                    finish_reason=finish,
                    new_text=new,
                    finished=finish is not None,
                )
                if finish is not None:
                    return

    async def generate(self, prompt: str, *args: Any, **keywords: Any) -> GenerationOutput:
        """``stream_generate``, as one output."""
        async with aclosing(self.stream_generate(prompt, *args, **keywords)) as outputs:
            async for output in outputs:
                last = output  # there is always one: an answer ends with a finish
        return last

    def chat(self, *_: object, **__: object) -> NoReturn:
        """Never called: vllm-mlx's own chat routes are behind ours."""
        raise HostError(
            f"{self.model_name} is a Harmony model: /v1/chat/completions, /v1/responses and "
            "/v1/messages of vllm-mlx-harmony answer its chats"
        )

    stream_chat = chat

    # --- What vllm-mlx shows

    def get_stats(self) -> dict[str, object]:
        """For ``/v1/status`` and the metrics; empty unless the model is loaded."""
        if self.engine is None:
            return {}
        requests, totals = [asdict(status) for status in self.engine.status()], self.engine.totals
        running = sum(request["place"] == 0 for request in requests)
        return {
            "engine_type": "harmony",
            "uptime_seconds": time.time() - self._since,
            "running": self.engine.healthy,
            "num_running": running,
            "num_waiting": len(requests) - running,
            "metal_active_memory_gb": round(device.used() / _GB, 2),
            "metal_peak_memory_gb": round(mx.get_peak_memory() / _GB, 2),
            "metal_cache_memory_gb": round(mx.get_cache_memory() / _GB, 2),
            "requests": requests,
            "steps_executed": totals.steps,
            "num_requests_processed": totals.requests,
            "total_prompt_tokens": totals.prompt_tokens,
            "total_completion_tokens": totals.completion_tokens,
        }

    def get_cache_stats(self) -> dict[str, object]:
        return exposition.cache_counters(self.engine)

    async def clear_runtime_caches(self) -> dict[str, bool]:
        """Empties the prefix cache, in memory and on disk."""
        await resources.clear()
        return exposition.CLEARED

    clear_prefix_cache = clear_runtime_caches
    """The same, under the name that ``DELETE /v1/cache/prefix`` of vllm-mlx calls."""
