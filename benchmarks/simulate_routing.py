"""Routing by prefix against round robin and least loaded, in virtual time.

    python benchmarks/simulate_routing.py                    # 64 engines, 10,000 conversations
    python benchmarks/simulate_routing.py --conversations 1000 --engines 8

Routing is `vllm_mlx_harmony.gateway.routing_policy`, the very code that the gateway runs; clients
and engines are models. The same seed gives the same conversations for every policy, and the same
figures in every run. What is modelled:

- Conversations begin at random (a Poisson process) within an hour. Each has the instructions and
  tools of one of eight agents, and a first question: 10,000 to 25,000 tokens together. A turn adds
  its answer and the tool's result. The next one comes when the tool has run, or now and then when a
  person has read and typed.
- An engine computes prompts one after the other, at ``PREFILL`` tokens a second from where its
  cache ends, and then generates at ``DECODE`` tokens a second, however many are beside it. Its
  cache has ``CACHE`` tokens, of which the least recently used go first.
- Requests come to ``--gateways`` gateways at random, which share nothing. Each counts its own
  requests and knows where it has sent conversations itself.
- One engine is lost in the middle of the hour, without a word: the next requests to it fail at
  once and are tried elsewhere, those that it was generating are repeated by their clients. Another
  engine joins after three quarters.
- With ``--silent`` that engine is not lost, but takes requests and generates nothing any more, and
  one more engine computes prompts at a twentieth of the others' speed all the time. A gateway looks
  at how long an engine has been silent as it does (`router`): it sees the ids of its own requests,
  and takes all of a prompt, and of those sent before it, for what the engine has to
  compute. Whatever it takes down that is well
  is a false alarm; a probe is answered when the engine has computed what came before.

What is not: that decoding slows down in large batches and shares its steps with prefill, networks,
and clients that give up. Waits are thus too short in a loaded engine, for every policy alike.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count, product
from typing import Protocol

from vllm_mlx_harmony.gateway.routing_policy import Health, Routing, Rule

HOUR = 3600.0

PREFILL = 32_000.0
"""Tokens of prompts a second. gpt-oss-120b on two H100 with vLLM, 32,000 tokens in and 100 out:
32,471 tokens a second (https://docs.gpustack.ai/latest/performance-lab/gpt-oss-120b/h100)."""

DECODE = 50.0
"""Tokens a second of one stream."""

CACHE = 1_000_000
"""Tokens. Keys and values of one take 36 layers x 2 x 8 heads x 64 x 2 bytes = 73,728 bytes in
16 bits; two H100 have 144 of 160 GB for vLLM (0.9), of which the weights take 65: 79 GB."""

AGENTS = 8

NEW = "engine-new"

TYPED = 0.1
"""The part of the turns that a person has to answer, not a tool."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn adds to the prompt, what is generated, and what passes before the next one."""

    added: int
    generated: int
    pause: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """``agent`` says whose instructions it begins with, which have ``shared`` tokens."""

    key: bytes
    begins: float
    agent: int
    shared: int
    turns: tuple[Turn, ...]


def conversations(number: int, seed: int, seconds: float = HOUR) -> list[Conversation]:
    """``number`` conversations, the same for the same ``seed``."""
    chance = random.Random(seed)
    instructions = [chance.randint(8_000, 18_000) for _ in range(AGENTS)]
    return [_conversation(chance, index, instructions, seconds) for index in range(number)]


def _conversation(
    chance: random.Random, index: int, instructions: list[int], seconds: float
) -> Conversation:
    agent = chance.randrange(AGENTS)
    first = max(500, min(25_000, chance.randint(10_000, 25_000)) - instructions[agent])
    length = 1 + min(100, int(chance.expovariate(1 / 24)))
    turns = []
    for place in range(length):
        added = first if not place else min(20_000, int(chance.lognormvariate(6.4, 1.2)))
        generated = min(4_000, 1 + int(chance.lognormvariate(5.4, 0.8)))
        typed = chance.random() < TYPED
        pause = chance.expovariate(1 / 60) if typed else chance.lognormvariate(1.2, 1.0)
        turns.append(Turn(added, generated, pause))
    begins = chance.uniform(0.0, seconds)
    key = index.to_bytes(16, "little")
    return Conversation(key, begins, agent, instructions[agent], tuple(turns))


# --- Engines


@dataclass(slots=True)
class Engine:
    """A cache, and a time until which prompts are computed."""

    capacity: int
    prefill: float = PREFILL
    lost: bool = False
    silent: bool = False
    last_id: dict[int, float] = field(default_factory=dict)
    """Of an answer that has ended, by gateway."""
    busy_until: float = 0.0
    cache: OrderedDict[bytes | int, int] = field(default_factory=OrderedDict)
    size: int = 0
    requests: set[Request] = field(default_factory=set)

    def cached(self, asked: Conversation) -> int:
        """Tokens of the conversation's next prompt that need not be computed."""
        if asked.agent not in self.cache:
            return 0
        return self.cache[asked.agent] + self.cache.get(asked.key, 0)

    def keep(self, key: bytes | int, tokens: int) -> None:
        """These are in the cache now, as the last used."""
        self.size += tokens - self.cache.pop(key, 0)
        self.cache[key] = tokens
        while self.size > self.capacity:
            self.size -= self.cache.popitem(last=False)[1]


@dataclass(eq=False, slots=True)
class Request:
    """A turn on its way. ``began`` is when its client sent it."""

    asked: Conversation
    place: int
    prompt: int
    began: float
    gateway: int
    engine: str = ""
    sent: float = 0.0
    first_token: float = 0.0
    end: float = 0.0
    over: bool = False
    tried: set[str] = field(default_factory=set)


# --- Policies


class Policy(Protocol):
    """What a gateway asks before it sends a turn."""

    def choose(self, asked: Conversation, loads: Mapping[str, int], tried: set[str]) -> str: ...

    def answered(self, asked: Conversation, engine: str) -> None: ...

    def failed(self, engine: str, now: float) -> None: ...

    def joined(self, engine: str) -> None: ...

    def observed(self, engine: str, seconds: float, tokens: int) -> None: ...


class ByPrefix:
    """The gateway's own routing."""

    def __init__(self, engines: list[str], rule: Rule) -> None:
        self._routing = self.routing = Routing(engines, rule)
        self.why = {"prefix": 0, "moved": 0, "new": 0}

    def choose(self, asked: Conversation, loads: Mapping[str, int], tried: set[str]) -> str:
        choice = self._routing.choose(asked.key, loads, tried)
        assert choice is not None
        self.why[choice.why] += 1
        return choice.engine

    def answered(self, asked: Conversation, engine: str) -> None:
        self._routing.record_success(engine)
        self._routing.record_turn(asked.key, engine)

    def failed(self, engine: str, now: float) -> None:
        self._routing.record_failure(engine, now)

    def joined(self, engine: str) -> None:
        self._routing.add(engine)

    def observed(self, engine: str, seconds: float, tokens: int) -> None:
        self._routing.record_latency(engine, seconds, tokens)


class _Plain:
    """Engines that are left out as soon as a request to them fails."""

    def __init__(self, engines: list[str], _: Rule) -> None:
        self._engines = list(engines)
        self._next = count()

    def answered(self, asked: Conversation, engine: str) -> None: ...

    def observed(self, engine: str, seconds: float, tokens: int) -> None: ...

    def failed(self, engine: str, now: float) -> None:
        if engine in self._engines:
            self._engines.remove(engine)

    def joined(self, engine: str) -> None:
        self._engines.append(engine)


class RoundRobin(_Plain):
    """One after the other."""

    def choose(self, asked: Conversation, loads: Mapping[str, int], tried: set[str]) -> str:
        return self._engines[next(self._next) % len(self._engines)]


class LeastLoaded(_Plain):
    """The one with the fewest requests, one after the other among equals."""

    def choose(self, asked: Conversation, loads: Mapping[str, int], tried: set[str]) -> str:
        least = min(loads.get(name, 0) for name in self._engines)
        equal = [name for name in self._engines if loads.get(name, 0) == least]
        return equal[next(self._next) % len(equal)]


POLICIES: dict[str, Callable[[list[str], Rule], Policy]] = {
    "prefix": ByPrefix,
    "least loaded": LeastLoaded,
    "round robin": RoundRobin,
}


# --- The hour


@dataclass(frozen=True, slots=True)
class Result:
    """Of one policy. Waits are seconds until a prompt begins to be computed."""

    turns: int
    prompts: int
    computed: int
    waits: list[tuple[float, float]]
    first_tokens: list[tuple[float, float]]
    computed_at: list[tuple[float, int, int]]
    repeated: int
    retried: int
    moved: int
    on_new: list[tuple[float, float]]
    """When the engine that joined got a turn (and the same once more)."""
    silences: list[tuple[float, float, bool]]
    """When an engine was taken down for its silence, how long that was, and whether it was well."""
    closest: float
    """The longest silence of an engine that was well, as a part of what it was allowed."""

    @property
    def hit_rate(self) -> float:
        """Of all tokens of prompts, the part that was not computed."""
        return 1 - self.computed / self.prompts


class Simulation:
    """The conversations, the engines and what is to happen, in the order of time."""

    def __init__(
        self,
        asked: list[Conversation],
        policy: Callable[[list[str], Rule], Policy],
        *,
        engines: int,
        gateways: int = 1,
        rule: Rule | None = None,
        seed: int = 0,
        lose_at: float | None = None,
        join_at: float | None = None,
        silent_at: float | None = None,
        slow: float = 0.0,
        cache: int = CACHE,
    ) -> None:
        names = [f"engine-{number}" for number in range(engines)]
        self._cache = cache
        self._engines = {name: Engine(cache) for name in names}
        if slow:
            self._engines[names[-1]].prefill = slow
        self.silences: list[tuple[float, float, bool]] = []
        self.closest = 0.0
        self._policies = [policy(names, rule or Rule()) for _ in range(gateways)]
        self._loads = [dict.fromkeys(names, 0) for _ in range(gateways)]
        self._chance = random.Random(seed)
        self._order = count()
        self._coming: list[tuple[float, int, Callable[[float], None]]] = []
        self.waits: list[tuple[float, float]] = []
        self.first_tokens: list[tuple[float, float]] = []
        self.computed_at: list[tuple[float, int, int]] = []
        self.repeated = self.retried = 0
        self.on_new: list[tuple[float, float]] = []
        for conversation in asked:
            self._at(
                conversation.begins,
                self._turn(conversation, 0, conversation.shared + conversation.turns[0].added),
            )
        if lose_at is not None:
            self._at(lose_at, self._lose)
        if join_at is not None:
            self._at(join_at, self._join)
        if silent_at is not None:
            self._at(silent_at, self._fall_silent)

    def run(self) -> Result:
        """Until the last conversation has ended."""
        while self._coming:
            now, _, happens = heapq.heappop(self._coming)
            happens(now)
        prompts = sum(prompt for _, prompt, _ in self.computed_at)
        computed = sum(tokens for _, _, tokens in self.computed_at)
        by_prefix = [
            policy.why["moved"] for policy in self._policies if isinstance(policy, ByPrefix)
        ]
        return Result(
            len(self.waits),
            prompts,
            computed,
            self.waits,
            self.first_tokens,
            self.computed_at,
            self.repeated,
            self.retried,
            sum(by_prefix),
            self.on_new,
            self.silences,
            self.closest,
        )

    def _at(self, time: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._coming, (time, next(self._order), happens))

    def _turn(self, asked: Conversation, place: int, prompt: int) -> Callable[[float], None]:
        def begins(now: float) -> None:
            gateway = self._chance.randrange(len(self._policies))
            self._send(Request(asked, place, prompt, now, gateway), now)

        return begins

    def _send(self, request: Request, now: float) -> None:
        policy, loads = self._policies[request.gateway], self._loads[request.gateway]
        while True:
            request.engine = policy.choose(request.asked, loads, request.tried)
            engine = self._engines[request.engine]
            if not engine.lost:
                break
            policy.failed(request.engine, now)
            request.tried.add(request.engine)
            self.retried += 1
        loads[request.engine] += 1
        engine.requests.add(request)
        request.sent = now
        rule = policy.routing.rule if isinstance(policy, ByPrefix) else Rule()
        if engine.silent:
            request.first_token = request.end = float("inf")
            self._at(now + rule.min_silence, lambda at: self._listen(request, now, at))
            return
        own = request.prompt - request.asked.shared
        computed = request.prompt - min(engine.cached(request.asked), request.prompt)
        starts = max(now, engine.busy_until)
        engine.busy_until = request.first_token = starts + computed / engine.prefill
        engine.keep(request.asked.key, own)
        engine.keep(request.asked.agent, request.asked.shared)
        policy.answered(request.asked, request.engine)
        if request.engine == NEW:
            self.on_new.append((now, now))
        self.waits.append((now, starts - request.began))
        self.first_tokens.append((now, request.first_token - request.began))
        self.computed_at.append((now, request.prompt, computed))
        turn = request.asked.turns[request.place]
        request.end = request.first_token + turn.generated / DECODE
        if request.first_token > now + rule.min_silence:
            self._at(now + rule.min_silence, lambda at: self._listen(request, now, at))
        self._at(request.first_token, lambda at: self._began(request, now, computed, at))
        self._at(request.end, lambda at: self._end(request, at))

    def _began(self, request: Request, sent: float, computed: int, now: float) -> None:
        if not request.over and request.first_token <= now:
            policy = self._policies[request.gateway]
            policy.observed(request.engine, now - sent, computed)

    def _listen(self, request: Request, sent: float, now: float) -> None:
        """What a gateway does for a request without an id: it takes a silent engine down, and tries
        another one."""
        policy, engine = self._policies[request.gateway], self._engines[request.engine]
        if request.over or request.first_token <= now or not isinstance(policy, ByPrefix):
            return
        name, rule, routing = request.engine, policy.routing.rule, policy.routing
        mine = [other for other in engine.requests if other.gateway == request.gateway]
        ids = [min(other.end, now) for other in mine if other.first_token <= now]
        silence = now - max([sent, engine.last_id.get(request.gateway, 0.0), *ids])
        before = [other for other in mine if other.first_token > now and other.sent <= sent]
        waiting = sum(other.prompt for other in before)
        allowed = max(rule.min_silence, routing.expected(name, waiting))
        if not engine.silent:
            self.closest = max(self.closest, silence / allowed)
        if silence < allowed:
            self._at(now + allowed - silence, lambda at: self._listen(request, sent, at))
            return
        if routing.health(name) is Health.UP:
            self.silences.append((now, silence, not engine.silent))
            routing.record_silence(name, now)
            answers = max(now + rule.open_seconds, engine.busy_until)
            if not engine.silent:
                self._at(answers, lambda at: routing.record_probe(name, True, at))
        routing.avoid(request.asked.key, name)
        self._loads[request.gateway][name] -= 1
        engine.requests.discard(request)
        request.over = True
        again = Request(
            request.asked, request.place, request.prompt, request.began, request.gateway
        )
        again.tried = {*request.tried, name}
        self.retried += 1
        self._send(again, now)

    def _fall_silent(self, now: float) -> None:
        """The busiest quick one. Clients repeat what it was answering."""
        quick = [name for name, engine in self._engines.items() if engine.prefill == PREFILL]
        name = max(quick, key=lambda name: len(self._engines[name].requests))
        engine = self._engines[name]
        engine.silent = True
        engine.last_id = dict.fromkeys(range(len(self._policies)), now)
        for request in sorted(engine.requests, key=lambda turn: (turn.began, turn.asked.key)):
            if request.first_token > now:
                request.first_token = request.end = float("inf")
                at = max(now, request.sent + Rule().min_silence)
                self._at(at, partial(self._listen, request, request.sent))
            else:
                request.over = True
                engine.requests.discard(request)
                self._loads[request.gateway][name] -= 1
                self.repeated += 1
                self._at(now + 600.0, self._turn(request.asked, request.place, request.prompt))

    def _end(self, request: Request, now: float) -> None:
        if request.over or request.end > now:
            return
        asked, place = request.asked, request.place
        engine = self._engines[request.engine]
        engine.last_id[request.gateway] = now
        self._loads[request.gateway][request.engine] -= 1
        engine.requests.discard(request)
        turn, prompt = asked.turns[place], request.prompt
        engine.keep(asked.key, prompt + turn.generated - asked.shared)
        if place + 1 < len(asked.turns):
            prompt += turn.generated + asked.turns[place + 1].added
            self._at(now + turn.pause, self._turn(asked, place + 1, prompt))

    def _lose(self, now: float) -> None:
        """The busiest one. What it had not begun to answer is tried elsewhere by the gateway."""
        name = max(self._engines, key=lambda name: len(self._engines[name].requests))
        engine = self._engines[name]
        engine.lost = True
        for request in sorted(engine.requests, key=lambda turn: (turn.began, turn.asked.key)):
            request.over = True
            self._loads[request.gateway][name] -= 1
            self._policies[request.gateway].failed(name, now)
            again = Request(request.asked, request.place, request.prompt, now, request.gateway)
            if request.first_token > now:
                again.began, again.tried = request.began, {name}
                self.retried += 1
                self._send(again, now)
            else:
                self.repeated += 1
                self._at(now + 1.0, self._turn(request.asked, request.place, request.prompt))
        engine.requests.clear()

    def _join(self, now: float) -> None:
        self._engines[NEW] = Engine(self._cache)
        for policy, loads in zip(self._policies, self._loads, strict=True):
            loads[NEW] = 0
            policy.joined(NEW)


def share(values: list[float], part: float) -> float:
    """The value that ``part`` of ``values`` are not above; 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def between(timed: list[tuple[float, float]], start: float, end: float) -> list[float]:
    """What happened from ``start`` on, before ``end``."""
    return [value for at, value in timed if start <= at < end]


def _hits(result: Result, start: float, end: float) -> float:
    within = [(prompt, done) for at, prompt, done in result.computed_at if start <= at < end]
    return 1 - sum(done for _, done in within) / max(1, sum(prompt for prompt, _ in within))


COLUMNS = (
    "policy                    | hit rate | computed | wait p50 | wait p99 "
    "| first token p50 | p99   | moved  "
)


def row(name: str, result: Result) -> str:
    """One line of the first table."""
    waits = [wait for _, wait in result.waits]
    firsts = [first for _, first in result.first_tokens]
    return (
        f"{name:25} | {result.hit_rate:8.1%} | {result.computed / 1e6:6.0f} M "
        f"| {share(waits, 0.5):6.2f} s | {share(waits, 0.99):6.2f} s "
        f"| {share(firsts, 0.5):13.2f} s | {share(firsts, 0.99):5.2f} | {result.moved:6,}"
    )


def faults(results: Mapping[str, Result], lose_at: float, join_at: float, engines: int) -> None:
    """Prints what becomes of an engine that is lost, and of one that joins."""
    print("\nan engine is lost        | tried elsewhere | repeated by clients")
    for name, result in results.items():
        print(f"{name:24} | {result.retried:15} | {result.repeated:10}")
    print("\nhit rate, first token p99 | minute before | minute after | five minutes later")
    for name, result in results.items():
        cells = []
        for start in (lose_at - 60, lose_at, lose_at + 300):
            first = share(between(result.first_tokens, start, start + 60), 0.99)
            cells.append(f"{_hits(result, start, start + 60):5.1%} {first:5.2f} s")
        print(f"{name:25} | {' | '.join(cells)}")
    print(f"\nthe engine that joins, of which {1 / engines:.1%} is an equal part")
    print("its turns                 | first minute |   after five |    after ten")
    for name, result in results.items():
        parts = [
            len(between(result.on_new, start, start + 60))
            / max(1, len(between(result.waits, start, start + 60)))
            for start in (join_at, join_at + 300, join_at + 600)
        ]
        print(f"{name:25} | {' | '.join(f'{part:12.1%}' for part in parts)}")


def silence(asked: list[Conversation], engines: int, silent_at: float) -> None:
    """Prints what becomes of an engine that falls silent beside one that is slow."""
    print("gateways | down after, by gateway | false alarms | longest silence of one that is well")
    for gateways in (1, 4):
        result = Simulation(
            asked,
            ByPrefix,
            engines=engines,
            gateways=gateways,
            silent_at=silent_at,
            slow=PREFILL / 20,
        ).run()
        after = ", ".join(f"{at - silent_at:.0f} s" for at, _, well in result.silences if not well)
        alarms = sum(well for *_, well in result.silences)
        print(
            f"{gateways:8} | {after:22} | {alarms:12} "
            f"| {result.closest:.0%} of what it was allowed; {result.retried} tried elsewhere"
        )


def main() -> None:
    """Prints the tables of docs/simulation.md."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--engines", type=int, default=64)
    options.add_argument("--conversations", type=int, default=10_000)
    options.add_argument("--seconds", type=float, default=HOUR)
    options.add_argument("--seed", type=int, default=14)
    options.add_argument("--rules", action="store_true", help="other numbers for the rule, too")
    options.add_argument("--silent", action="store_true", help="only an engine that falls silent")
    given = options.parse_args()
    asked = conversations(given.conversations, given.seed, given.seconds)
    lose_at, join_at = given.seconds / 2, 3 * given.seconds / 4
    if given.silent:
        silence(asked, given.engines, lose_at)
        return

    def simulate(name: str, policy: str, gateways: int, rule: Rule | None = None) -> Result:
        result = Simulation(
            asked,
            POLICIES[policy],
            engines=given.engines,
            gateways=gateways,
            rule=rule,
            lose_at=lose_at,
            join_at=join_at,
        ).run()
        print(row(name, result), flush=True)
        return result

    turns = sum(len(conversation.turns) for conversation in asked)
    print(f"{given.engines} engines, {len(asked):,} conversations, {turns:,} turns\n{COLUMNS}")
    cases = {f"{policy}, {count} gw": (policy, count) for policy in POLICIES for count in (1, 4)}
    faults(
        {name: simulate(name, *case) for name, case in cases.items()},
        lose_at,
        join_at,
        given.engines,
    )
    if given.rules:
        print(f"\n{COLUMNS}")
        for spread in (0, 2, 4, 8, 16, 32):
            simulate(f"spread {spread}, 1 gw", "prefix", 1, Rule(balance_abs_threshold=spread))
        for spread, gateways in product((0, 2, 4, 8, 16), (1, 4)):
            name = f"home spread {spread}, {gateways} gw"
            simulate(name, "prefix", gateways, Rule(home_abs_threshold=spread))


if __name__ == "__main__":
    main()
