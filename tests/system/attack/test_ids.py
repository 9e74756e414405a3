"""Random ids in random pieces through the parser: no exceptions, no control tokens in texts."""

from __future__ import annotations

import random
import re
import time

import figures
from size import SEED, size

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Finished, Opened, Text
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.turn import VOCAB_SIZE, Tool, Turn

STREAMS = size(300_000, 6_000)
LONGEST = 40

WORDS = (
    *("assistant", "user", "system", "developer", "tool", "functions", "functions.step", "python"),
    *("final", "analysis", "commentary", " to", "=", " to=functions.step", "json", " code", " "),
    *('{"a"', ":1}", "\n", "!", "é", "\N{GRINNING FACE}", "browser.search", "all"),
)


def test_random_ids_are_parsed_without_errors() -> None:
    controls = sorted(vocab.encoding().encode(text, allowed_special="all")[0] for text in CONTROLS)
    words = [vocab.encode(word) for word in WORDS]
    names = Names.of(Turn((), (Tool("step"),)))
    started = time.monotonic()
    id_count = 0
    for number in range(STREAMS):
        stream = random_stream(random.Random(f"{SEED} {number}"), controls, words)
        id_count += len(stream)
        try:
            assert_no_control_token_shown(stream, names, random.Random(number))
        except Exception as error:
            raise AssertionError(f"seed {SEED}, stream {number}: {stream}") from error
    seconds = time.monotonic() - started
    figures.report(
        "ids", f"{STREAMS} streams, {id_count} ids at random, in {seconds:.0f} s: none raised"
    )


CONTROL = re.compile(r"<\|\w+\|>")
CONTROLS = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
    *("<|return|>", "<|call|>", "<|endoftext|>"),
)


def random_stream(chance: random.Random, controls: list[int], words: list[list[int]]) -> list[int]:
    """Control tokens, words of headers and random ids, in shares that differ by stream."""
    shares = [chance.random() for _ in range(3)]
    stream: list[int] = []
    for kind in chance.choices(range(3), shares, k=chance.randint(0, LONGEST)):
        if kind == 0:
            stream.append(chance.choice(controls))
        elif kind == 1:
            stream += chance.choice(words)
        else:
            stream.append(chance.randrange(VOCAB_SIZE))
    return stream


def assert_no_control_token_shown(stream: list[int], names: Names, chance: random.Random) -> None:
    """Parses ``stream`` in pieces. Raises ``AssertionError`` if a text has a control token."""
    parser = Parser(names)
    deltas = []
    at = 0
    while at < len(stream):
        end = at + chance.randint(1, 8)
        deltas += parser.feed(stream[at:end])
        at = end
    deltas += parser.close("stop")
    assert isinstance(deltas[-1], Finished)
    shown = "".join(delta.text for delta in deltas if isinstance(delta, Text))
    shown += "".join(delta.name or "" for delta in deltas if isinstance(delta, Opened))
    assert not CONTROL.search(shown), shown
