"""Speed, in one run and as ratios against the host's own functions on the same ids.

Knows what is measured and what it may cost. Needs vllm-mlx and the plugin in one environment; run
by the leg `bench`. Every number is the median of several runs.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import logging
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from bench_table import Row, printed

from vllm_mlx_harmony import __file__ as package_file
from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import render, vocab
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.turn import Defaults, ResponseInfo
from vllm_mlx_harmony.engine_api.engine import Step
from vllm_mlx_harmony.inspector.record import Log
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.protocols.events import Event, frame
from vllm_mlx_harmony.server.body import Document
from vllm_mlx_harmony.server.observer import ObservedRequest, Observer

STREAMED = (1_000, 4_000, 16_000, 64_000, 128_000)
"""Tokens of the streamed answers."""
PROMPTED = (5_000, 40_000, 115_000)
"""Tokens of the conversations, about."""
HALF = 0.5
FLAT = 1.25
"""How much dearer a token may be at the longest answer than at 4k, noise included."""
START_MS = 1.0
SEEN_US = 1.0

PROSE = Path(__file__).resolve().parents[1] / "docs" / "semantics.md"
NAME = "bench"
CORE = "vllm_mlx_harmony.core."


def main() -> int:
    """Prints the table; 1 when a goal is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs, for a look")
    parser.add_argument("--profile", action="store_true", help="where our side spends its time")
    parsed = parser.parse_args()
    if parsed.profile:
        profile()
        return 0
    runs = 3 if parsed.quick else 7
    return printed(measured(runs))


def measured(runs: int) -> Iterator[Row]:
    """All rows, each as soon as it is there."""
    yield from streaming(runs)
    yield inspected(runs)
    yield from prompting(runs)
    yield startup(runs * 15)


def medians(
    runs: int,
    *functions: Callable[[], object],
    before: Callable[[], object] = gc.collect,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds each function takes: the median of ``runs``. ``before`` each is not counted.

    They take turns, so that both sides share whatever else the machine does.
    """
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(runs):
        for function, seconds in zip(functions, taken, strict=True):
            before()
            began = clock()
            function()
            seconds.append(clock() - began)
    return [median(seconds) for seconds in taken]


# --- Streaming: microseconds per token from ids to server-sent events


def streaming(runs: int) -> Iterator[Row]:
    """Both sides at every length; the goals are at 4k, and that the cost does not grow."""
    at_4k = 0.0
    for count in STREAMED:
        ids = answer(count)
        repeat = max(3, min(runs, 150_000 // count))
        host, ours = medians(repeat, host_stream(ids), our_stream(ids, repeat))
        host, ours = (seconds / len(ids) * 1e6 for seconds in (host, ours))
        if count == STREAMED[1]:
            at_4k = ours
        half = ours <= HALF * host
        yield Row(
            f"a streamed token, {count // 1000}k", "µs", host, ours, "half of the host's", half
        )
    flat = f"{FLAT} × that at 4k"
    yield Row("… at 128k, beside 4k", "µs", None, ours, flat, ours <= FLAT * at_4k)


def answer(count: int) -> tuple[int, ...]:
    """Ids of an answer of ``count`` tokens: half reasoning, half answer."""
    text = prose()
    half = (text * (count // len(text) + 1))[: count // 2]
    between = written("<|end|><|start|>assistant<|channel|>final<|message|>")
    return (
        *written("<|channel|>analysis<|message|>"),
        *half,
        *between,
        *half,
        vocab.RETURN,
    )


@lru_cache(maxsize=1)
def prose() -> tuple[int, ...]:
    """Ids of some text."""
    return tuple(vocab.encode(PROSE.read_text("utf-8")))


def written(text: str) -> tuple[int, ...]:
    """Ids of text with the control tokens written out."""
    return tuple(vocab.encoding().encode(text, allowed_special="all"))


BODY = {
    "model": NAME,
    "stream": True,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
}


def our_stream(ids: Sequence[int], runs: int) -> Callable[[], int]:
    """Our streaming of the ids, one at a time: through context, emitter and framing.

    The prompts of the ``runs`` turns are rendered now: the host's are not, either.
    """
    request = chat.read(BODY, Defaults())
    info = ResponseInfo("0" * 32, 0, NAME)
    turns = [StreamingHarmonyContext(request.turn, info) for _ in range(runs)]

    async def groups(turn: StreamingHarmonyContext) -> AsyncIterator[list[Any]]:
        yield turn.start()
        for token in ids:
            yield turn.append_output((token,))
        yield turn.finish("stop")

    async def frames() -> AsyncIterator[str]:
        emitter = request.emitter(info)
        async for group in groups(turns.pop()):
            for delta in group:
                for event in emitter.feed(delta):
                    yield frame(event)

    return lambda: asyncio.run(_drain(frames()))


def host_stream(ids: Sequence[int]) -> Callable[[], int]:
    """The host's own streaming of the same ids. Its engine is replaced by a list of its outputs."""
    from vllm_mlx import server
    from vllm_mlx.api.models import ChatCompletionRequest
    from vllm_mlx.engine.base import GenerationOutput

    logging.getLogger("vllm_mlx").setLevel(logging.WARNING)
    server._enable_auto_tool_choice, server._tool_call_parser = True, "harmony"
    server._reasoning_parser_name = "harmony"
    server._reasoning_parser = server.get_reasoning_parser("harmony")()
    texts = [vocab.encoding().decode([token], errors="replace") for token in ids]
    last = len(ids) - 1
    outputs = [
        GenerationOutput(
            text="",
            new_text=text,
            prompt_tokens=9,
            completion_tokens=at + 1,
            finished=at == last,
            finish_reason="stop" if at == last else None,
        )
        for at, text in enumerate(texts)
    ]

    class Engine:
        model_name = NAME
        tokenizer = None
        is_mllm = False

        async def stream_chat(self, **_: Any) -> AsyncIterator[GenerationOutput]:
            for output in outputs:
                yield output

    def run() -> int:
        request = ChatCompletionRequest(**BODY)
        return asyncio.run(_drain(server.stream_chat_completion(Engine(), [], request)))

    return run


def inspected(runs: int) -> Row:
    """What the inspector adds to a streamed token."""
    ids, event = answer(STREAMED[2]), Event("x" * 200)
    request = ObservedRequest("", "", Document(None), NAME, True, "", "", "")

    async def steps() -> AsyncIterator[Step]:
        for token in ids:
            yield Step((token,), origins=".")

    async def run(*observers: Observer) -> None:
        async for step in steps():
            events = [event]
            for observer in observers:
                observer.step(step)
                observer.events(events)

    def on() -> None:
        asyncio.run(run(Log().observe(request)))

    off, seen = medians(3 * runs, lambda: asyncio.run(run()), on, clock=time.process_time)
    cost = (seen - off) / len(ids) * 1e6
    goal = f"at most {SEEN_US:.0f} µs"
    return Row("a token in the inspector", "µs", None, cost, goal, cost <= SEEN_US)


async def _drain(frames: AsyncIterator[str]) -> int:
    return sum([len(text) async for text in frames])


# --- Prompts: milliseconds from a request to ids


def prompting(runs: int) -> Iterator[Row]:
    """Both sides on the same conversations; ours with nothing remembered."""
    with tempfile.TemporaryDirectory() as directory:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(standin.write(Path(directory)))
    for size in PROMPTED:
        repeat = max(runs, min(5 * runs, 200_000 // size))
        body = conversation(size)
        turn = chat.read(body, Defaults(date="2026-01-01")).turn
        host, ours = medians(
            repeat, host_prompt(body, tokenizer), partial(our_prompt, turn), before=forget
        )
        what = f"a prompt of {len(render.render(turn).ids):,} tokens"
        met = ours <= HALF * host
        yield Row(what, "ms", host * 1e3, ours * 1e3, "half of the host's", met)


def host_prompt(body: dict[str, Any], tokenizer: Any) -> Callable[[], int]:
    """As the host's simple engine makes it: rendered to text, and that encoded."""
    from vllm_mlx.utils import harmony_render as host

    host._harmony_encoding = vocab.encoding  # its own would be downloaded
    messages, tools = body["messages"], body["tools"]
    return lambda: len(tokenizer.encode(host.render_messages(messages, tools=tools)))


def our_prompt(turn: Any) -> int:
    """As the routes make it."""
    return len(render.render(turn).ids)


def forget() -> None:
    """Empties every cache of ``core``, so that prompts are prepared cold."""
    gc.collect()
    for name in [name for name in sys.modules if name.startswith(CORE)]:
        for value in vars(sys.modules[name]).values():
            if hasattr(value, "cache_clear") and not isinstance(value, type):
                value.cache_clear()


def conversation(size: int) -> dict[str, Any]:
    """An agent at work: about ``size`` tokens of thoughts, calls and files read."""
    text = vocab.encoding().decode(list(prose()))
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": text[:4000]},
        {"role": "user", "content": "Read everything and tell me what is wrong."},
    ]
    step, tokens = 0, 2_000
    while tokens < size:
        file = f"// file {step}\n{text[step % 1000 : step % 1000 + 4000]}"
        messages += _step(step, file)
        tokens += 1_100
        step += 1
    return {"model": NAME, "messages": messages, "tools": [_tool(n) for n in range(10)]}


def _step(step: int, file: str) -> list[dict[str, Any]]:
    call = {"name": "tool_0", "arguments": json.dumps({"path": f"src/file_{step}.py"})}
    return [
        {
            "role": "assistant",
            "reasoning_content": f"I need file {step} next.",
            "content": None,
            "tool_calls": [{"id": f"call_{step}", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": f"call_{step}", "content": file},
    ]


def _tool(number: int) -> dict[str, Any]:
    path = {"type": "string", "description": "Where it is, from the root of the project."}
    limit = {"type": "integer", "description": "Lines to read.", "default": 2000}
    parameters = {
        "type": "object",
        "properties": {"path": path, "limit": limit},
        "required": ["path"],
    }
    function = {"name": f"tool_{number}", "description": "Reads a file.", "parameters": parameters}
    return {"type": "function", "function": function}


# --- Start of the interpreter: milliseconds that the .pth adds to every `python`


def startup(runs: int) -> Row:
    """Wall time of an interpreter that reads our `.pth`, less one that reads an empty directory."""
    line = "import vllm_mlx_harmony._startup; vllm_mlx_harmony._startup.register()\n"
    package = Path(package_file).parent
    with tempfile.TemporaryDirectory() as with_it, tempfile.TemporaryDirectory() as without:
        Path(with_it, "vllm_mlx_harmony_startup.pth").write_text(line)
        Path(with_it, "vllm_mlx_harmony").symlink_to(package)
        bare, hooked = medians(runs, *(interpreter(path) for path in (without, with_it)))
    cost = (hooked - bare) * 1e3
    return Row("the start of Python", "ms", None, cost, f"under {START_MS:.0f} ms", cost < START_MS)


def interpreter(directory: str) -> Callable[[], object]:
    """Starts a Python with one directory of site packages."""
    script = f"import site; site.addsitedir({directory!r})"
    command = [sys.executable, "-I", "-S", "-c", script]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return lambda: subprocess.run(command, check=True, env=environment)


# --- Where the time goes


def profile() -> None:
    """The functions of our side that take longest, streaming and prompting."""
    ids = answer(STREAMED[2])
    turn = chat.read(conversation(PROMPTED[1]), Defaults()).turn
    sides: dict[str, Callable[[], object]] = {
        "streaming": our_stream(ids, 1),
        "prompt": partial(our_prompt, turn),
    }
    for what, function in sides.items():
        forget()
        profiler = cProfile.Profile()
        profiler.runcall(function)
        print(f"--- {what}")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


if __name__ == "__main__":
    sys.exit(main())
