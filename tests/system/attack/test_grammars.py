"""Schemas, regular expressions and grammars that are made to be deep, large or slow.

Several connections of a client send them over all APIs, and some are gone before the answer.
Meanwhile another client, with a key of its own, has ordinary tools, new ones each time. The server
lives, and its memory grows by no more than `GROWTH_MIB`. As many connections that send harmless
requests are measured first: beside them, a hard request takes at most `CHECK` seconds longer than
the slowest harmless one. The other client waits for its first token at most `WAIT` seconds longer,
nineteen times in twenty: now and then, the attacker's largest requests arrive at the same moment,
and each is read before it waits for its turn. Then, too, it waits at most `CHECK` seconds longer.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import figures
import httpx
import psutil
import pytest
from apis import PATHS
from grammar_texts import LARK, SCHEMAS, chain, multiple_of, pattern, rules, terminals
from size import SEED, size

from vllm_mlx_harmony.server.grammar_checks import MAX_ELAPSED, REQUEST_WAIT_SECONDS

if TYPE_CHECKING:
    from target import Target

pytestmark = pytest.mark.served

SECONDS = size(100.0, 8.0)
ATTACKERS = size(8, 3)
CHECK = size(REQUEST_WAIT_SECONDS + MAX_ELAPSED, 20.0)
"""Seconds on the clock: what a request waits for its verdicts, and what a check that has begun, or
compiling in the server, may take."""

WAIT = size(0.5, 10.0)
"""Seconds. Thinned, the machine may have anything else to do."""

GROWTH_MIB = 400.0
"""The caches of grammars, checks and prompts have 150 MiB at most by their own count, and what is
allocated for it can be twice as much; it grows ever more slowly while they fill."""

SHORT = [definition for definition in LARK.values() if len(definition) < 10_000]
"""The prompt shows a definition as it is."""

SHOWN = 100
"""Values or rules that the prompts of a request show: as many tokens as harmless ones have."""

TOKENS = 8
"""Of an answer: enough for the first masks. What more of them take is the engine's time."""

PROBLEMS = 400
"""Characters of a body that is quoted."""

REQUESTS = int(25 * SECONDS)
"""Hard requests, more than a server answers. They are written before: what it takes to write them
is not to be measured."""

ATTACKER, USER = "attacker", "user"
"""Keys. Tenants take turns, the requests of one tenant come after each other."""

Body = dict[str, Any]


def random_pattern(chance: random.Random, depth: int = 4) -> str:
    """A regular expression of nested quantifiers and unions."""
    if depth == 0:
        return chance.choice(["a", ".", r"\d", r"\s*", r"\S+", "[a-z]", "[^x]", r"\p{L}", "x?"])
    parts = [random_pattern(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    inner = chance.choice(["", "|"]).join(parts)
    most = chance.choice([1, 3, 30, 300, 3_000, 10**6])
    counted = f"{{{chance.randint(0, most)},{most}}}"
    return f"({inner}){chance.choice(['*', '+', '?', '', counted, counted])}"


def random_schema(chance: random.Random, shown: int = SHOWN) -> Body:  # noqa: C901
    """A schema of one of the kinds that are known to be hard, of any size.

    What the prompt shows has at most ``shown`` parts: others would wait for the engine to compute a
    long prompt, whatever becomes of its grammar.
    """
    number = int(10 ** chance.uniform(0.5, 3))
    kind = chance.randrange(10)
    if kind == 0:
        divisors = (chance.randint(2, 2**31 - 1), 2 ** chance.randint(1, 30), 10 ** (number % 10))
        return multiple_of(chance.choice(divisors))
    if kind == 1:
        keyword = chance.choice(["oneOf", "anyOf", "allOf"])
        also = chance.choice([[], [{"type": "null"}], [{"type": "object"}]])
        return chain(6 * number, lambda ref: {keyword: [ref, *also]})
    if kind == 2:
        return chain(6 * number, lambda ref: {"type": "array", "items": ref})
    if kind == 3:
        return pattern(f"^{random_pattern(chance)}$")
    if kind == 4:
        values = [f"{chance.randrange(16**4):x}" for _ in range(min(number, shown))]
        return {"type": "object", "properties": {"x": {"enum": values}}}
    if kind == 5:
        patterns = {f"^{random_pattern(chance, 2)}": {"type": "string"} for _ in range(8)}
        return {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    if kind == 6:
        branches = [pattern(random_pattern(chance, 2)) for _ in range(min(number, 200))]
        return {"type": "object", "properties": {"x": {"anyOf": branches}}}
    if kind == 7:
        both = [{"pattern": random_pattern(chance, 2)} for _ in range(chance.randint(2, 12))]
        return {"type": "object", "properties": {"x": {"type": "string", "allOf": both}}}
    if kind == 8:
        many = {"minItems": number, "maxItems": 10 * number, "items": {"type": "integer"}}
        counts = {"minLength": number, "maxLength": 10**6}
        properties = {"x": {"type": "array", **many}, "y": {"type": "string", **counts}}
        return {"type": "object", "properties": properties, "minProperties": chance.randint(0, 9)}
    nested: Body = chance.choice([{}, multiple_of(7), pattern(random_pattern(chance, 1))])
    for level in range(min(number, 300)):
        nested = {"type": "object", "properties": {f"p{level}": nested}, "required": [f"p{level}"]}
    return nested


def random_lark(chance: random.Random, shown: int = SHOWN) -> str:
    """A grammar of one of the kinds that are known to be hard, of at most ``shown`` rules."""
    kind = chance.randrange(4)
    if kind == 0:
        return rules(chance.randint(1, shown), chance.choice(["", '"a" ', '"a"? ']))
    if kind == 1:
        return terminals(chance.randint(1, 12), chance.randint(1, 9))
    if kind == 2:
        written = random_pattern(chance).replace("/", r"\/")
        return f"start: A+\nA: /{written}/"
    count = chance.choice([3, 300, 100_000])
    written = random_pattern(chance, 2)
    return f"start: (a | b)*\na: (A b?){{1,{count}}}\nb: a A | A a? b\nA: /{written}/"


def random_request(seed: int, index: int, model: str) -> tuple[str, Body]:
    """The path and the body of request ``index``: the known ones are among them."""
    chance = random.Random(f"{seed} {index}")
    api = chance.choice([*PATHS])
    is_lark = api != "messages" and chance.random() < 0.3
    tools: list[Body] = []
    count = chance.choice([1, 1, 1, 8])
    for at in range(count):
        known = chance.random() < 0.2
        name = f"f{at}"
        if is_lark:
            definition = chance.choice(SHORT) if known else random_lark(chance, SHOWN // count)
            grammar = {"syntax": "lark", "definition": definition}
            if api == "chat":
                custom = {"name": name, "format": {"type": "grammar", "grammar": grammar}}
                tools.append({"type": "custom", "custom": custom})
            else:
                format_ = {"type": "grammar", **grammar}
                tools.append({"type": "custom", "name": name, "format": format_})
            continue
        schema = (
            chance.choice([*SCHEMAS.values()]) if known else random_schema(chance, SHOWN // count)
        )
        strict = chance.random() < 0.2
        if api == "chat":
            function = {"name": name, "parameters": schema, "strict": strict}
            tools.append({"type": "function", "function": function})
        elif api == "responses":
            given = {"type": "function", "name": name, "parameters": schema, "strict": strict}
            tools.append(given)
        else:
            tools.append({"name": name, "input_schema": schema, "strict": strict})
    return PATHS[api], _asking(api, model, tools)


def _asking(api: str, model: str, tools: list[Body]) -> Body:
    message = [{"role": "user", "content": "Twelve words."}]
    if api == "responses":
        fields: Body = {"input": message, "max_output_tokens": TOKENS, "store": False}
    else:
        fields = {"messages": message, "max_tokens": TOKENS}
    return {"model": model, **fields, "tools": tools}


class Client:
    """Sends requests, and has what came of them."""

    def __init__(self, target: Target, key: str) -> None:
        self.target = target
        self.headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self.statuses: Counter[int] = Counter()
        self.longest, self.slowest = 0.0, ""
        self.problems: list[str] = []

    def send(self, http: httpx.Client, path: str, body: bytes, label: str) -> float:
        """Sends one, and is gone when ``http`` has no more patience.

        Returns the seconds to the first token, or to the end of an answer that is not streamed.
        """
        first, text = 0.0, ""
        began = time.monotonic()
        try:
            with http.stream("POST", path, content=body, headers=self.headers) as answer:
                for line in answer.iter_lines():
                    text += line
                    if not first and '"content_block_delta"' in line:
                        first = time.monotonic() - began
        except httpx.ReadTimeout:
            self.statuses[0] += 1
            return time.monotonic() - began
        seconds = time.monotonic() - began
        if seconds > self.longest:
            self.longest, self.slowest = seconds, label
        self.statuses[answer.status_code] += 1
        busy = answer.status_code == 503 and "retry-after" in answer.headers
        if answer.status_code not in (200, 400, 413) and not busy:
            self.problems.append(f"{label}: {answer.status_code} {text[:PROBLEMS]}")
        if "panic" in text:
            self.problems.append(f"{label}: {text[:PROBLEMS]}")
        return first or seconds


def ordinary(client: Client, http: httpx.Client, number: int) -> float:
    """Seconds to the first token of a request with ten ordinary tools, which are new."""
    tools = [
        {
            "name": f"tool_{number}_{at}",
            "description": "Does something.",
            "input_schema": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "limit": {"type": "integer", "minimum": 0},
                    "mode": {"enum": ["fast", "slow"]},
                    "lines": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["path"],
                "additionalProperties": False,
            },
        }
        for at in range(10)
    ]
    body = {**_asking("messages", client.target.model, tools), "stream": True}
    content = json.dumps(body).encode()
    return client.send(http, PATHS["messages"], content, f"ordinary request {number}")


def computing(pid: int) -> float:
    """Seconds of a processor that the helper processes of ``pid`` have used, dead ones not."""
    total = 0.0
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


def test_no_small_request_ends_the_server(  # noqa: C901, PLR0915 - one story
    target: Target,
) -> None:
    process = psutil.Process(target.server.pid)
    url = target.server.base_url
    user = Client(target, USER)
    attackers = [Client(target, ATTACKER) for _ in range(ATTACKERS)]
    memory = most = process.memory_info().rss
    numbers = count()
    slowest_harmless = 0.0
    written = (random_request(SEED, index, target.model) for index in range(REQUESTS))
    requests = [(path, json.dumps(body).encode()) for path, body in written]

    def waits_beside(busy: Callable[[int], None]) -> list[float]:
        """What the user waits while as many clients as attack are ``busy`` until they return."""
        nonlocal most
        threads = [threading.Thread(target=busy, args=(number,)) for number in range(ATTACKERS)]
        for thread in threads:
            thread.start()
        waits = []
        while any(thread.is_alive() for thread in threads):
            waits.append(ordinary(user, http, next(numbers)))
            most = max(most, process.memory_info().rss)
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        return waits

    def harmless(number: int) -> None:
        nonlocal slowest_harmless
        ends = time.monotonic() + SECONDS / 4
        one = Client(target, ATTACKER)
        with httpx.Client(base_url=url, timeout=120) as own:
            while time.monotonic() < ends:
                ordinary(one, own, next(numbers))
        assert [*one.statuses] == [200], number
        slowest_harmless = max(slowest_harmless, one.longest)

    def attack(number: int) -> None:
        ends = time.monotonic() + SECONDS
        for index in range(number, REQUESTS, ATTACKERS):
            if time.monotonic() > ends or target.server.process.poll() is not None:
                return
            path, body = requests[index]
            leaves = index % 5 == 4
            patience = 0.2 if leaves else 120
            with httpx.Client(base_url=url, timeout=patience) as own:
                label = f"seed {SEED}, request {index}"
                try:
                    attackers[number].send(own, path, body, label)
                except httpx.HTTPError as error:
                    attackers[number].problems.append(f"{label}: {error!r}")

    with httpx.Client(base_url=url, timeout=120) as http:
        before = waits_beside(harmless)
        waits = waits_beside(attack)
        after = ordinary(user, http, next(numbers))
    until = time.monotonic() + 15  # nobody is there any more: what was tried ends soon
    used = -1.0
    while used != (used := computing(target.server.pid)) and time.monotonic() < until:
        time.sleep(0.5)
    statuses = sum((one.statuses for one in attackers), Counter())
    worst = max(attackers, key=lambda one: one.longest)
    usual = quantiles(waits, n=20)[-1]
    grown = (most - memory) / 2**20
    figures.report(
        "grammar",
        f"{sum(statuses.values())} hard requests of {ATTACKERS} clients (seed {SEED}), the last "
        f"answer after {worst.longest:.1f} s ({worst.slowest}; {slowest_harmless:.1f} s at most "
        f"for harmless ones); {len(waits)} requests with new tools meanwhile, "
        f"the first token after {usual:.2f} s, nineteen times in twenty, and after "
        f"{max(waits):.2f} s at most ({max(before):.2f} s beside harmless requests, {after:.2f} s "
        f"afterwards), all 8 after {user.longest:.2f} s; "
        f"memory +{grown:.0f} MiB; by status (0: gone): "
        + ", ".join(f"{status} {count}" for status, count in sorted(statuses.items())),
    )
    problems = [problem for one in (user, *attackers) for problem in one.problems]
    assert not problems, "\n".join(problems[:20])
    assert target.server.process.poll() is None
    assert user.statuses == Counter({200: sum(user.statuses.values())})
    assert worst.longest <= slowest_harmless + CHECK, worst.slowest
    assert usual <= max(before) + WAIT
    assert max(waits) <= max(before) + CHECK
    assert grown <= GROWTH_MIB
    assert time.monotonic() < until, "helper processes go on when all clients have gone"
    left = target.inspection.quiet()
    assert not left.objects["Job"], left.objects
