"""What several tokens in one step gain: real edits, replayed, and prose with calls of tools.

    python benchmarks/bench_speculate.py [--pairs 220] [--timed 0] [--greedy 0]

Installs two neighbouring releases of each package with uv or pip. The prompt of a pair is a file
as it was, the answer is the file as it became, or a patch in the form of Codex. Measured are:

- *Tokens a step.* No model computes anything: ids are drafted as by the engine, and compared with
  those of the answer. The rows of speed are what the drafts gain if a step of 2, 4, 8 and 16 ids
  costs as much as ``--costs`` of one id, or as much as it reads (``modelled``). Prose comes from
  the descriptions of the packages, sentence by sentence, as the reasoning before
  calls of three tools: only what a grammar forces is computed ahead.
- *Seconds.* The engine generates the first ids of ``--timed`` of the answers by a random gpt-oss of
  12 layers, whose logits are computed and then overruled. Where the device is a processor, its time
  counts, which other processes do not change. mlx's package for Linux brings the reference BLAS,
  with which a step of two ids takes as long as two steps: ``LD_PRELOAD`` another one, such as
  OpenBLAS (with ``OPENBLAS_NUM_THREADS=1``), for a device on which wide steps are cheap.
- *The same answers.* Greedy answers of a random gpt-oss with drafts, however wrong, and without.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from bench_engine import ENDS, wide
from bench_table import Row, printed
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint, ConstraintSpec
from vllm_mlx_harmony.core.grammar import compile_grammar, grammar_of
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.render import expected_headers
from vllm_mlx_harmony.core.turn import VOCAB_SIZE, Tool, Turn, User
from vllm_mlx_harmony.engine import device, measure_costs
from vllm_mlx_harmony.engine.batch import EXPECTED_RIGHT, MAX_CHOICES_TO_WAIT_FOR
from vllm_mlx_harmony.engine.drafts import Drafts
from vllm_mlx_harmony.engine.masks import LogitsMask
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine, Options
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.engine.sampler import accepted_count
from vllm_mlx_harmony.engine.step_costs import ASSUMED, Costs
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings

RELEASES = {
    "click": ("8.1.3", "8.1.4"),
    "django": ("4.2.5", "4.2.6"),
    "fastapi": ("0.103.2", "0.104.0"),
    "flask": ("2.3.3", "3.0.0"),
    "httpx": ("0.25.0", "0.26.0"),
    "jinja2": ("3.1.2", "3.1.3"),
    "networkx": ("3.1", "3.2"),
    "pydantic": ("2.3.0", "2.4.0"),
    "pytest": ("7.4.2", "7.4.3"),
    "requests": ("2.31.0", "2.32.3"),
    "rich": ("13.5.3", "13.6.0"),
    "sphinx": ("7.1.0", "7.2.0"),
    "starlette": ("0.31.1", "0.32.0"),
    "urllib3": ("2.0.7", "2.1.0"),
    "werkzeug": ("2.3.8", "3.0.0"),
}
"""Packages without compiled parts, by their wheels."""

SIZES = range(1_000, 40_000)
"""Characters of the files that are replayed."""

SHORT = range(1_000, 4_000)
"""The same, of those that a model computes."""

WIDTHS = (1, 2, 4, 8, 16)

FREE = Costs(WIDTHS, (1.0, 1.01, 1.02, 1.03, 1.04))
"""Of a device on which every draft pays."""

WORDS, PROSE_GOAL = range(8, 41), 1.05
"""Words of a sentence, and the tokens a step that prose should have."""

NO_LOSS = 0.98
"""The speed with drafts where they do not help, at least."""

SAME = 0.99
"""Share of greedy answers that are the same with drafts, at least."""

CLOSE = 1e-4
"""The difference of two logits that rounding may reverse."""


def files(package: str, version: str, directory: Path) -> dict[str, str]:
    """The text of each Python file of a release, by its path, and its description."""
    options = ["-q", "--no-deps", "--only-binary", ":all:", "--no-compile", "--target"]
    install = [sys.executable, "-m", "pip", "install"]
    if uv := shutil.which("uv"):
        install = [uv, "pip", "install", "--python", sys.executable]
    command = [*install, *options, str(directory), f"{package}=={version}"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    paths = [*directory.rglob("*.py"), *directory.glob("*/METADATA")]
    return {
        path.name if path.name == "METADATA" else path.relative_to(directory).as_posix(): (
            path.read_text("utf-8", "replace")
        )
        for path in sorted(paths)
    }


def edits(most: int) -> Iterator[tuple[str, str, str]]:
    """Path, old and new text of files that both releases of a package have, and that differ."""
    found = 0
    for package, versions in RELEASES.items():
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            before, after = (
                files(package, version, Path(directory))
                for version, directory in zip(versions, (one, other), strict=True)
            )
        for path, text in after.items():
            if path == "METADATA":
                PROSE.append(text.partition("\n\n")[2])
            elif before.get(path, text) != text and len(text) in SIZES and found < most:
                found += 1
                yield path, before[path], text


PROSE: list[str] = []
"""The descriptions of the packages."""


def patch(path: str, before: str, after: str) -> str:
    """The edit as Codex's ``apply_patch`` takes it."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=3, lineterm="")
    body = ["@@" if line.startswith("@@") else line for line in list(lines)[2:]]
    head = ["*** Begin Patch", f"*** Update File: {path}"]
    return "\n".join([*head, *body, "*** End Patch\n"])


def replay(prompt: Sequence[int], answer: Sequence[int], costs: Costs) -> tuple[int, float]:
    """The steps that ``answer`` takes, and their cost in steps of one id."""
    drafts, at, steps, cost = Drafts(prompt), 0, 0, 0.0
    while at < len(answer):
        drafts.extend(answer[at : at + 1])  # the id that is drawn in any case
        at += 1
        draft = drafts.next(costs, len(answer) - at)
        right = 0
        while right < len(draft) and draft[right] == answer[at + right]:
            right += 1
        drafts.extend(draft[:right])
        at += right
        steps += 1
        width = next(place for place, ids in enumerate(costs.ids) if ids > len(draft))
        cost += costs.seconds[width]
    return steps, cost


def modelled(layers: int, experts: int) -> Costs:
    """The costs of steps of gpt-oss, in steps of one id, by the bytes that they read.

    Everything but experts is read once per step, in 8.5 bits an element, experts in 4.25. Each id
    chooses 4 of ``experts`` in each of ``layers``, independently of the others. Nothing else costs
    anything: neither keys and values nor arithmetic nor Python.
    """
    others = (layers * WIDTH * (2 * HEADS + 2 * KEYS) + VOCAB_SIZE * WIDTH) * 8.5 / 8
    expert = 3 * WIDTH**2 * 4.25 / 8
    chosen = [experts * (1 - (1 - 4 / experts) ** ids) for ids in WIDTHS]
    read = [others + layers * count * expert for count in chosen]
    return Costs(WIDTHS, tuple(nbytes / read[0] for nbytes in read))


WIDTH, HEADS, KEYS = 2880, 64 * 64, 8 * 64
"""The width of gpt-oss, of its queries and of its keys."""

MODELS = {"20b": modelled(24, 32), "120b": modelled(36, 128)}


def rows(pairs: Sequence[tuple[str, str, str]], costs: Costs) -> Iterator[Row]:
    kinds: dict[str, tuple[Callable[[str, str, str], str], float]] = {
        "whole files": (lambda path, before, after: after, 3.0),
        "patches": (patch, 1.8),
    }
    for kind, (write, goal) in kinds.items():
        replayed = [(vocab.encode(edit[1]), vocab.encode(write(*edit))) for edit in pairs]
        ids = sum(len(answer) for _, answer in replayed)
        taken = [replay(*texts, costs) for texts in replayed]
        steps, cost = (sum(counts) for counts in zip(*taken, strict=True))
        rate = ids / steps
        yield Row(f"{kind}: {ids:,} tokens", "a step", None, rate, f">= {goal}", rate >= goal)
        yield Row(f"{kind}: speed by the costs", "times", None, ids / cost)
        for name, by_bytes in MODELS.items():
            taken = [replay(*texts, by_bytes) for texts in replayed]
            steps, cost = (sum(counts) for counts in zip(*taken, strict=True))
            yield Row(f"{kind}: modelled {name}, in one step", "tokens", None, ids / steps)
            yield Row(f"{kind}: modelled {name}, speed", "times", None, ids / cost)


def prose(costs: Costs) -> Iterator[Row]:
    """The second half of each description, after the first: there is little to copy, and the text
    that loses most must lose next to nothing."""
    for name, model_costs in {"the costs": costs, **MODELS}.items():
        speeds = []
        for text in PROSE:
            ids = vocab.encode(text)
            middle = len(ids) // 2
            _, cost = replay(ids[:middle], ids[middle:], model_costs)
            speeds.append((len(ids) - middle) / cost)
        worst = min(speeds)
        goal = f">= {NO_LOSS}"
        yield Row(f"prose: speed by {name}, worst", "times", None, worst, goal, worst >= NO_LOSS)


# --- Forced ids: prose, and calls of tools.


def tools(*, strict: bool) -> tuple[Tool, ...]:
    """Three tools of a coding agent."""
    text, number = {"type": "string"}, {"type": "integer"}
    parameters: dict[str, dict[str, Any]] = {
        "shell": {"command": {"type": "array", "items": text}, "workdir": text},
        "read_file": {"path": text, "offset": number, "limit": number},
        "search": {"pattern": text, "path": text},
    }
    closed = {"type": "object", "additionalProperties": False}
    return tuple(
        Tool(
            name, "", {**closed, "properties": properties, "required": [*properties]}, strict=strict
        )
        for name, properties in parameters.items()
    )


def prose_with_tools(paths: Sequence[str]) -> Iterator[list[int]]:
    """Answers: each thinks for a sentence, and calls a tool, or answers with the next one."""
    found = (sentence for text in PROSE for sentence in re.split(r"(?<=[.!?])\s+", text))
    sentences = [text for text in found if len(text.split()) in WORDS and "<|" not in text]
    for at, (thought, after) in enumerate(pairwise(sentences)):
        path = paths[at % len(paths)]
        calls: dict[str, dict[str, Any]] = {
            "shell": {"command": ["bash", "-lc", f"sed -n '1,200p' {path}"], "workdir": "/src"},
            "read_file": {"path": path, "offset": 1, "limit": 200},
            "search": {"pattern": path.rpartition("/")[2], "path": "."},
        }
        answer = f"<|channel|>final<|message|>{after}<|return|>"
        if at % 4:
            name = [*calls][at % 4 - 1]
            arguments = json.dumps(calls[name])
            answer = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            answer += f"{arguments}<|call|>"
        text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{answer}"
        yield vocab.encoding().encode(text, allowed_special="all")


def forced_steps(mask: LogitsMask, answer: Sequence[int]) -> int:
    """The steps that ``answer`` takes if ids that are forced, or expected in a header, are computed
    at once: as `Batch.step` does it. The prompt's last id is computed by the first of them."""
    at, steps = 0, 0
    known = True
    while at < len(answer):
        if steps:
            known = (
                known
                or mask.forced() is not None
                or mask.choices <= MAX_CHOICES_TO_WAIT_FOR
                or mask.expected(1) != []
            )
            mask.advance(answer[at])
            at += 1
        steps += 1
        if known:
            most = WIDTHS[-1] - 1
            forced = mask.follow(most)
            at += len(forced)
            draft = mask.expected(most - len(forced))
            draft = draft[: ASSUMED.best_draft_length(EXPECTED_RIGHT, len(draft))]
            draft = draft[: len(mask.after(draft)) - 1]
            right = accepted_count(draft, answer[at : at + len(draft)])
            mask.advance(*draft[:right])
            at += right
            known = bool(draft)  # the device has sampled the next id already
    return steps


def forced(paths: Sequence[str], *, strict: bool) -> Row:
    turn = Turn((User("Go on."),), tools(strict=strict))
    grammar = grammar_of(turn, Names.of(turn))
    assert grammar is not None
    headers = expected_headers(Names.of(turn))
    spec = ConstraintSpec(grammar=compile_grammar(grammar), headers=headers)
    ids = steps = 0
    for answer in prose_with_tools(paths):
        ids += len(answer)
        steps += forced_steps(LogitsMask(Constraint(spec)), answer)
    rate = ids / steps
    what = f"prose with {'strict tools' if strict else 'tools'}, forced: {ids:,} tokens"
    return Row(what, "a step", None, rate, f">= {PROSE_GOAL}", rate >= PROSE_GOAL)


# --- A model that computes.


class Replayed(nn.Module):  # type: ignore[misc, unused-ignore]
    """A random model that writes ``script``: its logits are computed, and overruled."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.make_cache = model.make_cache
        self.script: list[int] = []

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        logits = self.model(inputs, cache=cache)
        end = cache[1].offset
        rest = self.script[end - inputs.shape[1] + 1 : end + 1]
        rest += [0] * (inputs.shape[1] - len(rest))
        return mx.put_along_axis(logits, mx.array(rest)[None, :, None], mx.array(1e4), axis=-1)


clock = time.perf_counter if device.has_metal() else time.process_time


def opened(load: Callable[[], Any], speculate: Any) -> MlxEngine:
    def loaded() -> tuple[Any, PrefixCache]:
        model = load()
        return model, PrefixCache(model, PrefixTree(1 << 30))

    engine = MlxEngine("random", Options(speculate=speculate))
    engine.load(loaded)
    return engine


async def generated(
    engine: MlxEngine, prompt: Sequence[int], most: int
) -> tuple[tuple[int, ...], float]:
    """The answer, and the seconds from its first id to its last."""
    settings = GenerationSettings(most, temperature=0.0, top_p=1.0, logit_bias=ENDS)
    ids, first = tuple[int, ...](), 0.0
    async with aclosing(engine.generate(GenerationRequest(tuple(prompt), settings, ""))) as steps:
        async for step in steps:
            ids += step.ids
            first = first or (clock() if step.ids else 0.0)
    return ids, clock() - first


def seconds(pairs: Sequence[tuple[str, str, str]], count: int, most: int) -> Iterator[Row]:
    """The time of answers with drafts and without, by turns."""
    engines = [opened(lambda: Replayed(wide()), mode) for mode in ("off", "auto")]
    try:
        module: Any = engines[1].loop.module
        layers = make_prompt_cache(module)
        measure = partial(measure_costs.measure_step_costs, module, layers, clock)
        engines[1].loop.costs = found = engines[1]._thread.call(measure).result()
        shares = [f"{seconds / found.seconds[0]:.2f}" for seconds in found.seconds]
        print(f"steps of {found.ids} ids cost {', '.join(shares)} of one")
        pairs = [pair for pair in pairs if len(pair[2]) in SHORT][:count]
        luck = random.Random(1)
        kinds: dict[str, tuple[Callable[..., Sequence[int]], float]] = {
            "whole files": (lambda path, before, after: vocab.encode(after), 1.5),
            "patches": (lambda *edit: vocab.encode(patch(*edit)), 0.98),
            "nothing to copy": (lambda *_: luck.sample(range(1000, 199_000), most), 0.98),
        }
        for kind, (write, goal) in kinds.items():
            taken = [0.0, 0.0]
            for edit in pairs:
                prompt, answer = vocab.encode(edit[1]), write(*edit)[:most]
                for at, engine in enumerate(engines):
                    engine.loop.module.script = [*prompt, *answer]
                    ids, time_taken = asyncio.run(generated(engine, prompt, len(answer)))
                    assert ids == tuple(answer)
                    taken[at] += time_taken
            speed = taken[0] / taken[1]
            yield Row(f"{kind}: speed, measured", "times", None, speed, f">= {goal}", speed >= goal)
    finally:
        for engine in engines:
            engine.close()


def small() -> Any:
    """A random gpt-oss of 12 layers that knows the first 8,192 ids only: it is faster."""
    mx.random.seed(0)
    model = wide(64)
    model.lm_head = nn.Linear(64, 8192, bias=False)
    return model


def greedy(count: int, most: int = 60) -> Iterator[Row]:
    """How many greedy answers are the same with drafts and without; and of the others, the largest
    difference between the two best logits where they part."""
    one, other = opened(small, "off"), opened(small, "forced")
    other.loop.options, other.loop.costs = Options(speculate="auto"), FREE
    same, widest = 0, 0.0
    try:
        for seed in range(count):
            luck = random.Random(seed)
            base = [luck.randrange(1000, 8000) for _ in range(luck.randrange(5, 60))]
            prompt = base * luck.randrange(1, 5)
            ids, drafted = (
                asyncio.run(generated(engine, prompt, most))[0] for engine in (one, other)
            )
            same += ids == drafted
            if ids != drafted:
                at = next(at for at in range(most) if ids[at] != drafted[at])
                gap = one._thread.call(partial(gap_after, one, [*prompt, *ids[:at]])).result()
                widest = max(widest, gap)
        tried = other.totals.drafts_accepted, other.totals.drafts_rejected
        print(f"drafts of the greedy answers: {tried[0]:,} right, {tried[1]:,} wrong")
    finally:
        one.close()
        other.close()
    share = same / count
    yield Row(
        f"{count} greedy answers: the same", "share", None, share, f">= {SAME}", share >= SAME
    )
    what = "1e6 times the gap of logits where not"
    yield Row(what, "", None, 1e6 * widest, f"< {1e6 * CLOSE:g}", widest < CLOSE)


def gap_after(engine: MlxEngine, ids: Sequence[int]) -> float:
    """The difference of the two best logits after ``ids``."""
    logits = engine.loop.module(mx.array([ids]), cache=make_prompt_cache(engine.loop.module))[0, -1]
    best = mx.sort(logits.astype(mx.float32))[-2:].tolist()
    return float(best[1] - best[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=400, help="edits, at most")
    parser.add_argument("--costs", type=float, nargs=4, default=[1.3, 1.5, 1.9, 2.6])
    parser.add_argument("--timed", type=int, default=4, help="edits that a model computes")
    parser.add_argument("--ids", type=int, default=200, help="ids of each of these answers")
    parser.add_argument("--greedy", type=int, default=200, help="answers that are compared")
    given = parser.parse_args()
    pairs = list(edits(given.pairs)) if given.pairs else []
    print(f"{len(pairs)} edits of {len(RELEASES)} packages; steps cost {given.costs}")

    def measured() -> Iterator[Row]:
        if pairs:
            yield from rows(pairs, Costs(WIDTHS, (1.0, *given.costs)))
            yield from prose(Costs(WIDTHS, (1.0, *given.costs)))
            for strict in (False, True):
                yield forced([path for path, _, _ in pairs], strict=strict)
        if pairs and given.timed:
            yield from seconds(pairs, given.timed, given.ids)
        if given.greedy:
            yield from greedy(given.greedy)

    return printed(measured())


if __name__ == "__main__":
    sys.exit(main())
