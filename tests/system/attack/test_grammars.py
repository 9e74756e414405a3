"""Schemas, regular expressions and grammars that are deep, large or slow on purpose.

Several connections of one client send them to all APIs, and some disconnect before the answer.
Meanwhile another client, with a key of its own, sends ordinary tools, new ones each time. The
server survives, and its memory grows by at most `GROWTH_MIB`. The same number of connections with
harmless requests is measured first. Compared to that, a hard request takes at most `CHECK` seconds
longer than the slowest harmless one, and the other client waits at most `WAIT` seconds longer for
its first token, in 95 % of its requests. In the others, when the attacker's largest requests arrive
together and are all read before they are queued, it waits at most `CHECK` seconds longer.
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
"""Seconds on the clock: the wait for verdicts, and the duration of a running check or of compiling
in the server."""

WAIT = size(0.5, 10.0)
"""Seconds. Thinned runs share the machine with other work."""

GROWTH_MIB = 400.0
"""The caches of grammars, checks and prompts have at most 150 MiB by their own count, for which
twice as much may be allocated. Growth slows down while they fill."""

SHORT_LARK = [definition for definition in LARK.values() if len(definition) < 10_000]
"""Definitions that fit into a prompt, which shows them unchanged."""

SHOWN_PARTS = 100
"""Values or rules in the prompt of a request, so that it is as long as a harmless one."""

TOKENS = 8
"""Tokens of an answer: enough for the first masks. More would measure the engine."""

QUOTED_CHARACTERS = 400
"""Characters of a body to quote."""

REQUESTS = int(25 * SECONDS)
"""Hard requests, more than a server can answer. They are generated beforehand, so that this is not
measured."""

ATTACKER, USER = "attacker", "user"
"""API keys. Tenants take turns; requests of one tenant are served in order."""

Body = dict[str, Any]


def random_pattern(chance: random.Random, depth: int = 4) -> str:
    """A regular expression of nested quantifiers and unions."""
    if depth == 0:
        return chance.choice(["a", ".", r"\d", r"\s*", r"\S+", "[a-z]", "[^x]", r"\p{L}", "x?"])
    parts = [random_pattern(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    inner = chance.choice(["", "|"]).join(parts)
    maximum = chance.choice([1, 3, 30, 300, 3_000, 10**6])
    repetition = f"{{{chance.randint(0, maximum)},{maximum}}}"
    return f"({inner}){chance.choice(['*', '+', '?', '', repetition, repetition])}"


def random_schema(chance: random.Random, shown_parts: int = SHOWN_PARTS) -> Body:  # noqa: C901
    """A schema of a kind known to be hard, of any size.

    The prompt shows at most ``shown_parts`` parts: otherwise other clients would wait for the
    engine to compute a long prompt, whatever its grammar.
    """
    number = int(10 ** chance.uniform(0.5, 3))
    kind = chance.randrange(10)
    if kind == 0:
        divisors = (chance.randint(2, 2**31 - 1), 2 ** chance.randint(1, 30), 10 ** (number % 10))
        return multiple_of(chance.choice(divisors))
    if kind == 1:
        keyword = chance.choice(["oneOf", "anyOf", "allOf"])
        alternatives = chance.choice([[], [{"type": "null"}], [{"type": "object"}]])
        return chain(6 * number, lambda ref: {keyword: [ref, *alternatives]})
    if kind == 2:
        return chain(6 * number, lambda ref: {"type": "array", "items": ref})
    if kind == 3:
        return pattern(f"^{random_pattern(chance)}$")
    if kind == 4:
        values = [f"{chance.randrange(16**4):x}" for _ in range(min(number, shown_parts))]
        return {"type": "object", "properties": {"x": {"enum": values}}}
    if kind == 5:
        patterns = {f"^{random_pattern(chance, 2)}": {"type": "string"} for _ in range(8)}
        return {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    if kind == 6:
        branches = [pattern(random_pattern(chance, 2)) for _ in range(min(number, 200))]
        return {"type": "object", "properties": {"x": {"anyOf": branches}}}
    if kind == 7:
        patterns_of_x = [
            {"pattern": random_pattern(chance, 2)} for _ in range(chance.randint(2, 12))
        ]
        return {"type": "object", "properties": {"x": {"type": "string", "allOf": patterns_of_x}}}
    if kind == 8:
        bounds = {"minItems": number, "maxItems": 10 * number, "items": {"type": "integer"}}
        counts = {"minLength": number, "maxLength": 10**6}
        properties = {"x": {"type": "array", **bounds}, "y": {"type": "string", **counts}}
        return {"type": "object", "properties": properties, "minProperties": chance.randint(0, 9)}
    nested: Body = chance.choice([{}, multiple_of(7), pattern(random_pattern(chance, 1))])
    for level in range(min(number, 300)):
        nested = {"type": "object", "properties": {f"p{level}": nested}, "required": [f"p{level}"]}
    return nested


def random_lark(chance: random.Random, shown_parts: int = SHOWN_PARTS) -> str:
    """A grammar of a kind known to be hard, with at most ``shown_parts`` rules."""
    kind = chance.randrange(4)
    if kind == 0:
        return rules(chance.randint(1, shown_parts), chance.choice(["", '"a" ', '"a"? ']))
    if kind == 1:
        return terminals(chance.randint(1, 12), chance.randint(1, 9))
    if kind == 2:
        regex = random_pattern(chance).replace("/", r"\/")
        return f"start: A+\nA: /{regex}/"
    count = chance.choice([3, 300, 100_000])
    regex = random_pattern(chance, 2)
    return f"start: (a | b)*\na: (A b?){{1,{count}}}\nb: a A | A a? b\nA: /{regex}/"


def random_request(seed: int, index: int, model: str) -> tuple[str, Body]:
    """The path and the body of request ``index``. Some have a known hard grammar."""
    chance = random.Random(f"{seed} {index}")
    api = chance.choice([*PATHS])
    is_lark = api != "messages" and chance.random() < 0.3
    tools: list[Body] = []
    count = chance.choice([1, 1, 1, 8])
    for at in range(count):
        is_known = chance.random() < 0.2
        name = f"f{at}"
        if is_lark:
            definition = (
                chance.choice(SHORT_LARK) if is_known else random_lark(chance, SHOWN_PARTS // count)
            )
            grammar = {"syntax": "lark", "definition": definition}
            if api == "chat":
                custom = {"name": name, "format": {"type": "grammar", "grammar": grammar}}
                tools.append({"type": "custom", "custom": custom})
            else:
                format_ = {"type": "grammar", **grammar}
                tools.append({"type": "custom", "name": name, "format": format_})
            continue
        schema = (
            chance.choice([*SCHEMAS.values()])
            if is_known
            else random_schema(chance, SHOWN_PARTS // count)
        )
        strict = chance.random() < 0.2
        if api == "chat":
            function = {"name": name, "parameters": schema, "strict": strict}
            tools.append({"type": "function", "function": function})
        elif api == "responses":
            tool = {"type": "function", "name": name, "parameters": schema, "strict": strict}
            tools.append(tool)
        else:
            tools.append({"name": name, "input_schema": schema, "strict": strict})
    return PATHS[api], _request_body(api, model, tools)


def _request_body(api: str, model: str, tools: list[Body]) -> Body:
    message = [{"role": "user", "content": "Twelve words."}]
    if api == "responses":
        fields: Body = {"input": message, "max_output_tokens": TOKENS, "store": False}
    else:
        fields = {"messages": message, "max_tokens": TOKENS}
    return {"model": model, **fields, "tools": tools}


class Client:
    """Sends requests, and keeps statuses, times and problems."""

    def __init__(self, target: Target, key: str) -> None:
        self.target = target
        self.headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self.statuses: Counter[int] = Counter()
        self.longest, self.slowest = 0.0, ""
        self.problems: list[str] = []

    def send(self, http: httpx.Client, path: str, body: bytes, label: str) -> float:
        """Sends a request, and disconnects after the timeout of ``http``.

        Returns the seconds to the first token, or to the end of an answer that is not streamed.
        """
        first_token, text = 0.0, ""
        started = time.monotonic()
        try:
            with http.stream("POST", path, content=body, headers=self.headers) as response:
                for line in response.iter_lines():
                    text += line
                    if not first_token and '"content_block_delta"' in line:
                        first_token = time.monotonic() - started
        except httpx.ReadTimeout:
            self.statuses[0] += 1
            return time.monotonic() - started
        seconds = time.monotonic() - started
        if seconds > self.longest:
            self.longest, self.slowest = seconds, label
        self.statuses[response.status_code] += 1
        busy = response.status_code == 503 and "retry-after" in response.headers
        if response.status_code not in (200, 400, 413) and not busy:
            self.problems.append(f"{label}: {response.status_code} {text[:QUOTED_CHARACTERS]}")
        if "panic" in text:
            self.problems.append(f"{label}: {text[:QUOTED_CHARACTERS]}")
        return first_token or seconds


def send_ordinary(client: Client, http: httpx.Client, number: int) -> float:
    """Sends a request with ten new ordinary tools. Returns the seconds to the first token."""
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
    body = {**_request_body("messages", client.target.model, tools), "stream": True}
    content = json.dumps(body).encode()
    return client.send(http, PATHS["messages"], content, f"ordinary request {number}")


def helper_cpu_seconds(pid: int) -> float:
    """Processor seconds of the living helper processes of ``pid``."""
    total = 0.0
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


def test_server_survives_hard_grammars(  # noqa: C901, PLR0915 - one story
    target: Target,
) -> None:
    process = psutil.Process(target.server.pid)
    url = target.server.base_url
    user = Client(target, USER)
    attackers = [Client(target, ATTACKER) for _ in range(ATTACKERS)]
    memory_before = most_memory = process.memory_info().rss
    numbers = count()
    slowest_harmless = 0.0
    generated = (random_request(SEED, index, target.model) for index in range(REQUESTS))
    requests = [(path, json.dumps(body).encode()) for path, body in generated]

    def waits_beside(behaviour: Callable[[int], None]) -> list[float]:
        """The user's waits while ``ATTACKERS`` threads run ``behaviour``."""
        nonlocal most_memory
        threads = [
            threading.Thread(target=behaviour, args=(number,)) for number in range(ATTACKERS)
        ]
        for thread in threads:
            thread.start()
        waits = []
        while any(thread.is_alive() for thread in threads):
            waits.append(send_ordinary(user, http, next(numbers)))
            most_memory = max(most_memory, process.memory_info().rss)
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        return waits

    def send_harmless(number: int) -> None:
        nonlocal slowest_harmless
        deadline = time.monotonic() + SECONDS / 4
        client = Client(target, ATTACKER)
        with httpx.Client(base_url=url, timeout=120) as http_client:
            while time.monotonic() < deadline:
                send_ordinary(client, http_client, next(numbers))
        assert [*client.statuses] == [200], number
        slowest_harmless = max(slowest_harmless, client.longest)

    def attack(number: int) -> None:
        deadline = time.monotonic() + SECONDS
        for index in range(number, REQUESTS, ATTACKERS):
            if time.monotonic() > deadline or target.server.process.poll() is not None:
                return
            path, body = requests[index]
            disconnects = index % 5 == 4
            patience = 0.2 if disconnects else 120
            with httpx.Client(base_url=url, timeout=patience) as http_client:
                label = f"seed {SEED}, request {index}"
                try:
                    attackers[number].send(http_client, path, body, label)
                except httpx.HTTPError as error:
                    attackers[number].problems.append(f"{label}: {error!r}")

    with httpx.Client(base_url=url, timeout=120) as http:
        before = waits_beside(send_harmless)
        waits = waits_beside(attack)
        after = send_ordinary(user, http, next(numbers))
    deadline_of_helpers = time.monotonic() + 15  # all clients are gone, so checks end soon
    cpu_seconds = -1.0
    while (
        cpu_seconds != (cpu_seconds := helper_cpu_seconds(target.server.pid))
        and time.monotonic() < deadline_of_helpers
    ):
        time.sleep(0.5)
    statuses = sum((client.statuses for client in attackers), Counter())
    worst = max(attackers, key=lambda client: client.longest)
    usual_wait = quantiles(waits, n=20)[-1]
    growth = (most_memory - memory_before) / 2**20
    figures.report(
        "grammar",
        f"{sum(statuses.values())} hard requests of {ATTACKERS} clients (seed {SEED}), the last "
        f"answer after {worst.longest:.1f} s ({worst.slowest}; {slowest_harmless:.1f} s at most "
        f"for harmless ones); {len(waits)} requests with new tools meanwhile, "
        f"the first token after {usual_wait:.2f} s, nineteen times in twenty, and after "
        f"{max(waits):.2f} s at most ({max(before):.2f} s beside harmless requests, {after:.2f} s "
        f"afterwards), all 8 after {user.longest:.2f} s; "
        f"memory +{growth:.0f} MiB; by status (0: gone): "
        + ", ".join(f"{status} {count}" for status, count in sorted(statuses.items())),
    )
    problems = [problem for client in (user, *attackers) for problem in client.problems]
    assert not problems, "\n".join(problems[:20])
    assert target.server.process.poll() is None
    assert user.statuses == Counter({200: sum(user.statuses.values())})
    assert worst.longest <= slowest_harmless + CHECK, worst.slowest
    assert usual_wait <= max(before) + WAIT
    assert max(waits) <= max(before) + CHECK
    assert growth <= GROWTH_MIB
    assert time.monotonic() < deadline_of_helpers, (
        "helper processes go on when all clients have gone"
    )
    snapshot = target.inspection.wait_until_idle()
    assert not snapshot.objects["Job"], snapshot.objects
