"""What a prompt costs on the turns after the first, and what its making holds up meanwhile.

Needs no host. Every request is read anew from its JSON, as a server does, and only what follows is
timed: from the Turn to the ids, in processor time. Numbers are medians of several runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench_table import Row, printed

from vllm_mlx_harmony.core import render as rendering
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.replay import Output, Replay, ReplayScope
from vllm_mlx_harmony.core.turn import Call, Defaults, Message, Reasoning, ResponseInfo, Turn
from vllm_mlx_harmony.protocols import chat

TOKENS = 115_000
WARM_MS = 3.0
BLOCKED_MS = 20.0
SOURCES = sorted((Path(__file__).resolve().parents[1] / "vllm_mlx_harmony").rglob("*.py"))

OPENING = "<|start|>assistant"
Body = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A conversation: about ``TOKENS`` in results of ``result`` characters, and ``tools`` tools."""

    name: str
    result: int
    tools: int


SHAPES = (
    Shape("results of 1000 tokens, 10 tools", 4_000, 10),
    Shape("results of 1000 tokens, 40 tools", 4_000, 40),
    Shape("results of 200 tokens, 40 tools", 800, 40),
)


def main() -> int:
    """Prints the table; 1 when a goal is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs, for a look")
    runs = 5 if parser.parse_args().quick else 21
    return printed(measured(runs))


def measured(runs: int) -> Iterator[Row]:
    """All rows, each as soon as it is there."""
    for shape in SHAPES:
        yield from warm(shape, runs)
    yield row("longest wait of another thread, one text of 115k tokens", waited(), BLOCKED_MS)


def row(what: str, taken: float, limit: float | None = None) -> Row:
    """Milliseconds ``taken``, and how many it may be."""
    if limit is None:
        return Row(what, "ms", None, taken)
    return Row(what, "ms", None, taken, f"at most {limit:g}", taken <= limit)


def warm(shape: Shape, runs: int) -> Iterator[Row]:
    """A conversation that grows by a call and its result on every turn."""
    body = conversation(shape)
    tokens = len(render(read(body)).ids)
    print(f"--- {tokens:,} tokens, {len(body['messages'])} messages: {shape.name}")
    yield row("cold", timed(cold, read(body)))
    yield row("a step more", growing(body, shape, runs, None), WARM_MS)
    view = Replay(2**28).view("bench")
    for output in outputs(read(body)):
        view.remember(output)
    yield row("a step more, with replay", growing(body, shape, runs, view), WARM_MS)
    context = partial(StreamingHarmonyContext, info=ResponseInfo("0" * 32, 0, "m"))
    yield row("the same again, with its context", median_of(runs, context, partial(read, body)))


def growing(body: Body, shape: Shape, runs: int, view: ReplayScope | None) -> float:
    """Milliseconds of a turn that adds a step to all that was rendered before."""
    body = {**body, "messages": list(body["messages"])}
    render(read(body), view)
    taken = []
    for _ in range(runs):
        body["messages"] += step(len(body["messages"]), shape.result)
        taken.append(timed(partial(render, replay=view), read(body)))
    return median(taken)


def median_of(runs: int, function: Callable[[Turn], object], turn: Callable[[], Turn]) -> float:
    return median(timed(function, turn()) for _ in range(runs))


def timed(function: Callable[[Turn], object], turn: Turn) -> float:
    began = time.thread_time()
    function(turn)
    return (time.thread_time() - began) * 1e3


def cold(turn: Turn) -> None:
    """With everything that rendering remembers forgotten."""
    for value in vars(rendering).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    render(turn)


def read(body: Body) -> Turn:
    """The turn of a request, all of its values new."""
    return chat.read(json.loads(json.dumps(body)), Defaults(date="2026-01-01")).turn


def outputs(turn: Turn) -> Iterator[Output]:
    """What the server would remember of ``turn``'s calls: each behind a thought of 40 tokens."""
    thought = tuple(vocab.encode("I should look at the next file, because of this one. " * 4))
    header = written(f"{OPENING}<|channel|>analysis<|message|>")
    between = written(
        "<|end|><|start|>assistant<|channel|>commentary to=functions.tool_0<|message|>"
    )
    for at, message in enumerate(turn.messages):
        if isinstance(message, Call):
            said: tuple[Message, ...] = (Reasoning("…"), message)
            first = (*header, *thought)
            ids = (*first, *between, *vocab.encode(message.arguments), vocab.CALL)
            yield Output(turn.messages[:at], said, ids, (2, len(first) + 1), len(ids))


def written(text: str) -> Sequence[int]:
    """Ids of text with the control tokens written out."""
    return vocab.encoding().encode(text, allowed_special="all")


def waited() -> float:
    """Longest pause, in milliseconds, of a thread beside one that renders a single long text."""
    text = source() * (4 * TOKENS // len(source()) + 1)
    body = {"model": "m", "messages": [{"role": "user", "content": text[: 4 * TOKENS]}]}
    gaps: list[float] = []
    done = threading.Event()

    def beat() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append((now - last) * 1e3)
            last = now

    beating = threading.Thread(target=beat)
    turn = read(body)
    beating.start()
    cold(turn)
    done.set()
    beating.join()
    return max(gaps)


# --- Conversations


def source() -> str:
    """Code to talk about."""
    return "".join(path.read_text("utf-8") for path in SOURCES)


def conversation(shape: Shape) -> Body:
    """An agent at work, whose client sends no reasoning."""
    messages: list[Body] = [
        {"role": "developer", "content": source()[:8_000]},
        {"role": "user", "content": "Read everything and tell me what is wrong."},
    ]
    characters = 0
    while characters < 3.9 * TOKENS - 1_100 * shape.tools:
        messages += step(len(messages), shape.result)
        characters += shape.result + 200  # for call, id and headers
    tools = [tool(number) for number in range(shape.tools)]
    return {"model": "m", "messages": messages, "tools": tools}


def step(number: int, size: int) -> list[Body]:
    """A call, and a result of ``size`` characters that no other step has."""
    call = {"name": "tool_0", "arguments": json.dumps({"path": f"src/file_{number}.py"})}
    text, start = source(), number * 37 % 100_000
    return [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"call_{number}", "type": "function", "function": call}],
        },
        {
            "role": "tool",
            "tool_call_id": f"call_{number}",
            "content": f"// file {number}\n{text[start : start + size]}",
        },
    ]


def tool(number: int) -> Body:
    names = ("path", "pattern", "limit", "offset", "encoding", "flags")
    described = {
        name: {"type": "string", "description": f"The {name} of what is to be read. " * 3}
        for name in names
    }
    parameters = {"type": "object", "properties": described, "required": ["path"]}
    function = {"name": f"tool_{number}", "description": "Reads. " * 40, "parameters": parameters}
    return {"type": "function", "function": function}


if __name__ == "__main__":
    sys.exit(main())
