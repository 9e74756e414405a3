"""Wire checks, which do not depend on the quality of the model."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import aclosing, suppress
from dataclasses import replace
from http import HTTPStatus
from uuid import uuid4

from httpx import Response

from vllm_mlx_harmony.verify.apis import APIS, DONE, Messages, parsed, validate
from vllm_mlx_harmony.verify.checks import ABSENT, Check, Run
from vllm_mlx_harmony.verify.trial import Trial
from vllm_mlx_harmony.verify.values import Ask, Document, ReceivedAnswer, Tool, Unsupported, require

PLAIN = Ask(("In one short sentence: why is the sea salty?",))
OTHER = Ask(("In one short sentence: why is the sky blue?",))
COUNT = Ask(("Count from 1 to 30 in digits, separated by spaces.",))
LONG = Ask(
    ("Write the numbers from one to two thousand in words, all of them, one in each line.",),
    limit=1000,
)
EMOJI = Ask(("Reply with these five characters and nothing else: 🌞 é 中 🇫🇷 ß",))
CLOCK = Tool(
    "get_time",
    "The time in a city.",
    {"type": "object", "properties": {"city": {"type": "string"}}},
)
TIME = Ask(("What time is it in Lima?",), tools=(CLOCK,))
SEARCH = Ask(("Search the web: which mountain is the highest of Norway? Name the page.",))
EDIT = Ask(("Reply with the word ready.",))
THINK = Ask(("Why does the moon have phases? Think first, then answer in one sentence.",))
REPORT = "Here is a long report. Read it, and reply with the word done."
DRAFT = "Here is a long draft. Read it, and reply with the word done."
FIRST, SECOND = "Remember this number: 4711. Reply with OK.", "Which number was it?"

MIN_OUTPUT_TOKENS = 16
"""The least that OpenAI accepts as a maximum of output tokens."""

MOST = 1_000_000
"""More output tokens than a model can write."""

PROMPT = 24_000
"""Tokens of a long prompt, if the context has twice as many."""

MAX_SILENCE_SECONDS = 15.0
"""Seconds without an event that a client may have to wait. Proxies and clients give up after some
60 seconds; prompts of agents become five times as long as ours."""

CANCEL_AFTER_SECONDS = 8.0
"""Seconds after which a prompt is cancelled."""

REUSED = 0.2
"""The least share of a cancelled prompt that is not computed again."""

MISSING = "no-such-model-9f2c"
FREED_WITHIN_SECONDS = 5.0
"""Seconds after which a cancelled request must not be running."""

EVENTS = 20
"""Events of a long answer that are read before it is cancelled."""

CONTROL = re.compile(
    r"<\|(?:start|end|message|channel|call|return|constrain|endoftext|im_start|im_end|eot_id)\|>"
    r"|assistant(?:final|commentary|analysis)"
)
"""Control tokens, and headers of Harmony messages whose control tokens were dropped."""

RUNNING = re.compile(
    r"(?m)^\w*:?\w*(?:requests_running|running_reqs|requests_processing)\S* ([\d.]+)"
)
"""What vLLM, SGLang and llama.cpp call requests that run, in Prometheus's format."""


async def whole(trial: Trial) -> None:
    answer = await trial.answer(PLAIN)
    require(answer.text, "the answer has no text")
    require(answer.finish == "stop", f"the answer ended with {answer.finish!r}")


async def stream(trial: Trial) -> None:
    events = await trial.collected(PLAIN)
    answer = trial.api.read(trial.api.assemble(events))
    require(answer.text, "the deltas have no text")
    require(answer.finish == "stop", f"the answer ended with {answer.finish!r}")
    if trial.api.name == "chat":
        chunks = [parsed(event.data) for event in events if event.data != DONE]
        for name in ("id", "model", "created"):
            values = [*dict.fromkeys(chunk[name] for chunk in chunks)]
            require(len(values) == 1, f"chunks with {len(values)} values of {name}: {values[:2]}")


async def same(trial: Trial) -> None:
    """On GPUs, rounding depends on what runs beside a request, so a second pair is tried."""
    ask, problem = replace(COUNT, extra={"temperature": 0.0}), ""
    for _ in range(2):
        one, other = await trial.answer(ask), await trial.streamed(ask)
        problem = next(
            (
                f"{name}: {getattr(one, name)!r:.200} whole, {getattr(other, name)!r:.200} streamed"
                for name in ("text", "reasoning", "finish")
                if getattr(one, name) != getattr(other, name)
            ),
            "",
        )
        if not problem:
            return
    require(not problem, problem)


async def usage(trial: Trial) -> None:
    document = await trial.document(PLAIN)
    one, other = trial.api.read(document), await trial.streamed(PLAIN)
    total = document.get("usage", {}).get("total_tokens")
    if trial.api.name != "messages":
        summed = one.usage.prompt + one.usage.output
        require(total == summed, f"total_tokens is {total}, the sum {summed}")
    for counts, way in ((one.usage, "whole"), (other.usage, "streamed")):
        require(counts.prompt > 0 and counts.output > 0, f"no tokens counted ({way})")
        require((counts.cached or 0) <= counts.prompt, f"more cached than prompt tokens ({way})")
        require(
            (counts.reasoning or 0) <= counts.output, f"more reasoning than output tokens ({way})"
        )
    same = one.usage.prompt == other.usage.prompt
    require(same, f"{one.usage.prompt} prompt tokens whole, {other.usage.prompt} streamed")


def refused(trial: Trial, reply: Response, *statuses: int) -> None:
    """Raises ``Failed`` unless a reply is an error in the API's shape."""
    expected = " or ".join(map(str, statuses))
    require(reply.status_code in statuses, f"status {reply.status_code}, not {expected}")
    trial.api.check_error(parsed(reply.text))


async def post(trial: Trial, body: Document | str) -> Response:
    return await trial.send("POST", trial.api.path, body)


async def missing_model(trial: Trial) -> None:
    refused(trial, await post(trial, trial.api.body(MISSING, PLAIN)), HTTPStatus.NOT_FOUND)


async def bad_json(trial: Trial) -> None:
    refused(trial, await post(trial, '{"model": '), HTTPStatus.BAD_REQUEST)


async def wrong_type(trial: Trial) -> None:
    field = "input" if trial.api.name == "responses" else "messages"
    body = {**trial.api.body(trial.server.model, PLAIN), field: 7}
    refused(trial, await post(trial, body), HTTPStatus.BAD_REQUEST)


async def unknown_parameter(trial: Trial) -> None:
    ask = replace(PLAIN, extra={"no_such_parameter": {"a": 1}})
    reply = await post(trial, trial.api.body(trial.server.model, ask))
    if reply.status_code == HTTPStatus.OK:
        trial.api.read(parsed(reply.text))
    else:
        refused(trial, reply, HTTPStatus.BAD_REQUEST)


async def too_long(trial: Trial) -> None:
    if not trial.server.context:
        raise Unsupported("/v1/models does not list the model's context length")
    ask = Ask((" a" * (trial.server.context + 1000),), limit=MIN_OUTPUT_TOKENS)
    body = trial.api.body(trial.server.model, ask)
    refused(trial, await post(trial, body), HTTPStatus.BAD_REQUEST)


async def limit(trial: Trial) -> None:
    for answer in await both(trial, replace(COUNT, limit=MIN_OUTPUT_TOKENS)):
        require(answer.finish == "length", f"the answer ended with {answer.finish!r}")
        require(
            answer.usage.output <= MIN_OUTPUT_TOKENS,
            f"{answer.usage.output} tokens, not {MIN_OUTPUT_TOKENS}",
        )


async def stop(trial: Trial) -> None:
    for answer in await both(trial, replace(COUNT, stop="7")):
        require("7" not in answer.text, f"the stop string is in the text: {answer.text!r:.80}")
        require(answer.finish == "stop", f"the answer ended with {answer.finish!r}")


async def both(trial: Trial, ask: Ask) -> tuple[ReceivedAnswer, ReceivedAnswer]:
    return await trial.answer(ask), await trial.streamed(ask)


async def cancel(trial: Trial) -> None:
    """The rest of the long answer would take as long as its first events suggest. A server that
    computes it nevertheless is still busy, or counts it among those that run."""
    began = time.monotonic()
    await trial.streamed(PLAIN)
    alone, times = time.monotonic() - began, list[float]()
    async with aclosing(trial.events(LONG)) as events:
        async for _ in events:
            times.append(time.monotonic())
            if len(times) == EVENTS:
                break
    if len(times) < EVENTS:
        raise Unsupported("the model's long answer was too short")
    rest = (times[-1] - times[0]) / (EVENTS - 1) * LONG.limit
    began = time.monotonic()
    await trial.streamed(PLAIN)
    took = time.monotonic() - began
    free = took < max(rest / 2, 3 * alone)
    require(free, f"the next answer took {took:.1f} s, {alone:.1f} s before the cancelled one")
    await _until_idle(trial)


async def _until_idle(trial: Trial) -> None:
    until = time.monotonic() + FREED_WITHIN_SECONDS
    while True:
        reply = await trial.send("GET", "/metrics")
        numbers = RUNNING.findall(reply.text) if reply.status_code == HTTPStatus.OK else []
        if not any(map(float, numbers)):
            return
        require(time.monotonic() < until, f"/metrics still counts running requests: {numbers}")
        await asyncio.sleep(0.2)


async def at_once(trial: Trial) -> None:
    requests = trial.streamed(PLAIN), trial.streamed(OTHER)
    found = await asyncio.gather(*requests, return_exceptions=True)  # if one fails, the other ends
    for result in found:
        if isinstance(result, BaseException):
            raise result
    one, other = (result for result in found if isinstance(result, ReceivedAnswer))
    require(one.text and other.text, "an answer without text")
    require(one.id != other.id, f"two answers with the id {one.id}")


def lengthy(trial: Trial, task: str) -> Ask:
    """A task with a long prompt that no cache has; the limit leaves room for reasoning."""
    size = min(PROMPT, (trial.server.context or PROMPT * 2) // 2)
    text = f"{task} Its number is {uuid4().hex}.{' The sea was calm.' * (size // 5)}"
    return Ask((text,), limit=MIN_OUTPUT_TOKENS * 16)


async def waiting(trial: Trial) -> None:
    """Only what a client parses counts: comments in a stream do not reach it."""
    ask, before, longest = lengthy(trial, REPORT), time.monotonic(), 0.0
    async with aclosing(trial.events(ask)) as events:
        async for _ in events:
            now = time.monotonic()
            longest, before = max(longest, now - before), now
    require(
        longest <= MAX_SILENCE_SECONDS,
        f"no event for {longest:.1f} s while the prompt was computed",
    )


async def kept(trial: Trial) -> None:
    """Cancels a prompt before the first text, as clients do that have a timeout and try again."""
    ask = lengthy(trial, DRAFT)
    with suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_AFTER_SECONDS):
            await trial.collected(ask)
        raise Unsupported("the prompt was computed before it could be cancelled")
    used = (await trial.answer(ask)).usage
    if used.cached is None:
        raise Unsupported("usage does not count cached tokens")
    enough = used.cached >= used.prompt * REUSED
    require(enough, f"{used.cached} of {used.prompt} tokens were not computed again")


async def bound(trial: Trial) -> None:
    answer = await trial.answer(replace(OTHER, limit=MOST))
    require(answer.text, "the answer has no text")


async def thinking_once(trial: Trial) -> None:
    for answer, way in zip(await both(trial, THINK), ("whole", "streamed"), strict=True):
        thought = " ".join(answer.reasoning.split())
        if not thought:
            raise Unsupported("no reasoning is returned")
        half = len(thought) // 2
        twice = thought[:half] == thought[-half:]
        require(not twice, f"the same reasoning twice ({way}): {thought!r:.200}")
        shown = " ".join(answer.text.split())
        require(thought not in shown, f"the reasoning is in the text, too ({way}): {shown!r:.200}")


async def control_tokens(trial: Trial) -> None:
    for ask in (PLAIN, TIME):
        for answer in await both(trial, ask):
            texts = (answer.text, answer.reasoning, *(call.arguments for call in answer.calls))
            found = CONTROL.search("\n".join(texts))
            require(found is None, f"{found and found[0]!r} in a text")


async def characters(trial: Trial) -> None:
    for answer in await both(trial, EMOJI):
        broken = "\ufffd" in answer.text + answer.reasoning
        require(not broken, f"a broken character in {answer.text!r:.80}")


async def method(trial: Trial) -> None:
    reply = await trial.send("PUT", trial.api.path, "{}")
    refused(trial, reply, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_FOUND)


async def key(trial: Trial) -> None:
    if not trial.server.key:
        raise Unsupported("no --key is given")
    wrong = {"Authorization": "Bearer wrong", "x-api-key": "wrong"}
    body = trial.api.body(trial.server.model, PLAIN)
    reply = await trial.send("POST", trial.api.path, body, **wrong)
    refused(trial, reply, HTTPStatus.UNAUTHORIZED)


async def models(trial: Trial) -> None:
    reply = await trial.send("GET", "/v1/models")
    require(reply.status_code == HTTPStatus.OK, f"status {reply.status_code}")
    for entry in parsed(reply.text)["data"]:
        validate("Model", entry)


async def model(trial: Trial) -> None:
    reply = await trial.send("GET", f"/v1/models/{MISSING}")
    refused(trial, reply, HTTPStatus.NOT_FOUND)


async def previous(trial: Trial) -> None:
    first = await trial.document(Ask((FIRST,), extra={"store": True}))
    if first.get("store") is False:
        raise Unsupported("the server stores no responses")
    earlier = {"previous_response_id": first["id"]}
    second = await trial.document(Ask((SECOND,), extra=earlier))
    named = second.get("previous_response_id")
    require(named == first["id"], f"previous_response_id is {named!r}")
    before, after = (trial.api.read(document).usage.prompt for document in (first, second))
    require(after > before, f"{after} prompt tokens after {before}: the first turn is missing")
    stored = await trial.send("GET", f"{trial.api.path}/{first['id']}")
    require(stored.status_code == HTTPStatus.OK, f"GET of a stored response: {stored.status_code}")
    require(parsed(stored.text)["output"] == first["output"], "the stored output is another one")


async def missing_response(trial: Trial) -> None:
    body = trial.api.body(trial.server.model, PLAIN)
    reply = await post(trial, {**body, "previous_response_id": "resp_0123456789abcdef"})
    refused(trial, reply, HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND)


async def conversation(trial: Trial) -> None:
    reply = await trial.send("POST", "/v1/conversations", {})
    if reply.status_code in ABSENT:
        raise Unsupported("no /v1/conversations")
    require(reply.status_code == HTTPStatus.OK, f"status {reply.status_code}")
    created = parsed(reply.text)
    validate("Conversation", created)
    within = {"conversation": created["id"]}
    first = await trial.document(Ask((FIRST,), extra=within))
    second = await trial.document(Ask((SECOND,), extra=within))
    before, after = (trial.api.read(document).usage.prompt for document in (first, second))
    require(after > before, f"{after} prompt tokens after {before}: the first turn is missing")
    path = f"/v1/conversations/{created['id']}/items?order=asc&limit=100"
    reply = await trial.send("GET", path)
    require(reply.status_code == HTTPStatus.OK, f"GET of its items: status {reply.status_code}")
    items = parsed(reply.text)["data"]
    questions = [item for item in items if item["type"] == "message" and item["role"] == "user"]
    texts = [part["text"] for item in questions for part in item["content"]]
    require(texts == [FIRST, SECOND], f"the user's items are {texts!r:.80}")
    answers = [item["id"] for item in first["output"] + second["output"]]
    answer_ids = [item["id"] for item in items if item not in questions]
    require(answer_ids == answers, "the other items are not those of the responses")


SKY = {
    "type": "choice",
    "instructions": "Which color has the sky on a clear day?",
    "criteria": {"green": None, "blue": None},
}


async def decision(trial: Trial) -> None:
    body = {"model": trial.server.model, "state": "A sunny day.", "questions": {"sky": SKY}}
    reply = await trial.send("POST", "/v1/systemone", body)
    if reply.status_code in ABSENT:
        raise Unsupported("no /v1/systemone")
    if reply.status_code == HTTPStatus.BAD_REQUEST:
        raise Unsupported("not with this model")
    require(reply.status_code == HTTPStatus.OK, f"status {reply.status_code}")
    answer = parsed(reply.text)["answers"]["sky"]
    found = answer["probabilities"]
    require(set(found) == {"green", "blue"}, f"probabilities of {sorted(found)}")
    require(abs(sum(found.values()) - 1) < ROUNDING_ERROR, f"the probabilities are {found}")
    chosen = answer["choice"]
    require(found[chosen] == max(found.values()), f"{chosen!r} is not the likeliest of {found}")


ROUNDING_ERROR = 0.01
"""The most that rounded probabilities may add up to more, or less, than 1."""


async def ollama(trial: Trial) -> None:
    messages = [{"role": "user", "content": PLAIN.messages[0]}]
    body = {"model": trial.server.model, "messages": messages}
    reply = await trial.send("POST", "/api/chat", {**body, "stream": False})
    if reply.status_code in ABSENT:
        raise Unsupported("no /api/chat")
    require(reply.status_code == HTTPStatus.OK, f"status {reply.status_code}")
    reply_streamed = await trial.send("POST", "/api/chat", body)  # as it is by default
    lines = [parsed(line) for line in reply_streamed.text.splitlines()]
    for way, parts in (("whole", [parsed(reply.text)]), ("streamed", lines)):
        text = "".join(part["message"].get("content") or "" for part in parts)
        require(text, f"the answer has no text ({way})")
        last = parts[-1]
        require(last["done"] is True, f"the last line is not done ({way})")
        require(last.get("done_reason") == "stop", f"done_reason {last.get('done_reason')!r}")
        require(last["prompt_eval_count"] > 0 and last["eval_count"] > 0, f"no tokens ({way})")
        require(not any(part["done"] for part in parts[:-1]), f"a line after the last ({way})")


async def count_tokens(trial: Trial) -> None:
    body = trial.api.body(trial.server.model, TIME)
    del body["max_tokens"]
    reply = await trial.send("POST", f"{Messages.path}/count_tokens", body)
    if reply.status_code in ABSENT:
        raise Unsupported("no /v1/messages/count_tokens")
    require(reply.status_code == HTTPStatus.OK, f"status {reply.status_code}")
    validate("MessageTokensCount", parsed(reply.text))
    counted, prompt = parsed(reply.text)["input_tokens"], (await trial.answer(TIME)).usage.prompt
    require(counted == prompt, f"{counted} tokens counted, {prompt} in usage")


HOSTED: dict[str, Document] = {
    "responses": {"type": "web_search"},
    "messages": {"type": "web_search_20250305", "name": "web_search"},
}
"""Tools that the servers of OpenAI and Anthropic run."""

PREDEFINED: dict[str, Document] = {
    "responses": {"type": "apply_patch"},
    "messages": {"type": "bash_20250124", "name": "bash"},
}
"""Tools that they define, and that the client runs."""

SEARCHED = frozenset({"web_search_call", "web_search_tool_result"})


async def search(trial: Trial) -> None:
    body = trial.api.body(trial.server.model, SEARCH)
    reply = await post(trial, {**body, "tools": [HOSTED[trial.api.name]]})
    if reply.status_code in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        return
    require(reply.status_code == HTTPStatus.OK, f"status {reply.status_code}")
    document = parsed(reply.text)
    text = trial.api.read(document).text
    kinds = {part["type"] for name in ("content", "output") for part in document.get(name, ())}
    require(SEARCHED & kinds, f"no search, and no error, but {text!r:.80}")


async def predefined(trial: Trial) -> None:
    body = trial.api.body(trial.server.model, EDIT)
    reply = await post(trial, {**body, "tools": [PREDEFINED[trial.api.name]]})
    if reply.status_code in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        raise Unsupported("no tools of this type")
    require(reply.status_code == HTTPStatus.OK, f"status {reply.status_code}")
    shown = trial.api.read(parsed(reply.text)).usage.prompt
    plain = (await trial.answer(EDIT)).usage.prompt
    require(shown > plain, f"{shown} prompt tokens with the tool, {plain} without")


ERRORS = {
    "chat": "https://platform.openai.com/docs/guides/error-codes",
    "responses": "https://platform.openai.com/docs/guides/error-codes",
    "messages": "https://platform.claude.com/docs/en/api/errors",
}
STREAMS = {
    "chat": "https://platform.openai.com/docs/api-reference/chat-streaming",
    "responses": "https://platform.openai.com/docs/api-reference/responses-streaming",
    "messages": "https://platform.claude.com/docs/en/build-with-claude/streaming",
}
OPENAI = "https://platform.openai.com/docs"
STATE = f"{OPENAI}/guides/conversation-state"
ANTHROPIC = "https://platform.claude.com/docs/en"
TOOLS = {
    "responses": f"{OPENAI}/guides/tools",
    "messages": f"{ANTHROPIC}/agents-and-tools/tool-use/overview",
}
HARMONY = "https://cookbook.openai.com/articles/openai-harmony"
RAW_COT = "https://cookbook.openai.com/articles/gpt-oss/handle-raw-cot"
CACHING = f"{OPENAI}/guides/prompt-caching"
ALL = tuple(api.name for api in APIS)

ROWS: tuple[tuple[str, tuple[str, ...], str, dict[str, str] | str, Run], ...] = (
    ("whole", ALL, "an answer has the SDK's type, contains text and ends", "", whole),
    ("stream", ALL, "events have the SDK's types and the right order, and add up", STREAMS, stream),
    ("same", ALL, "a request has the same answer, streamed and not", STREAMS, same),
    ("usage", ALL, "usage counts tokens and adds up, the same when streamed", "", usage),
    ("limit", ALL, "an answer ends at the limit of output tokens and says so", "", limit),
    ("limit-above", ALL, "a limit beyond the context is an upper bound, not an error", "", bound),
    ("stop", ("chat", "messages"), "an answer ends before a stop string", "", stop),
    ("cancel", ALL, "closing the connection ends the answer and frees the server", STREAMS, cancel),
    ("waiting", ALL, "while a prompt is computed, events come at intervals", STREAMS, waiting),
    ("kept", ALL, "what was computed of a cancelled prompt is not computed again", CACHING, kept),
    (
        "thinking-once",
        ALL,
        "reasoning is returned once, not in the text",
        RAW_COT,
        thinking_once,
    ),
    ("at-once", ALL, "two requests at once each get their own answer", "", at_once),
    ("control-tokens", ALL, "no text contains control tokens or headers", HARMONY, control_tokens),
    ("characters", ALL, "characters that span several tokens arrive whole", STREAMS, characters),
    ("missing-model", ALL, "an unknown model gets 404 in the API's format", ERRORS, missing_model),
    ("bad-json", ALL, "a body that is not JSON gets 400 in the API's format", ERRORS, bad_json),
    ("wrong-type", ALL, "a field of a wrong type gets 400 in the API's format", ERRORS, wrong_type),
    (
        "unknown-parameter",
        ALL,
        "an unknown field is ignored or gets 400",
        ERRORS,
        unknown_parameter,
    ),
    ("too-long", ALL, "a prompt beyond the context gets 400 in the API's format", ERRORS, too_long),
    ("method", ALL, "a wrong method gets 405 or 404 in the API's format", ERRORS, method),
    ("key", ALL, "a wrong key gets 401 in the API's format", ERRORS, key),
    ("models", ("chat",), "models have the SDK's type", f"{OPENAI}/api-reference/models", models),
    ("model", ("chat",), "an unknown model gets 404", f"{OPENAI}/api-reference/models", model),
    ("previous", ("responses",), "a response continues a stored one", STATE, previous),
    (
        *("missing-response", ("responses",), "an unknown previous response gets 400 or 404"),
        *(STATE, missing_response),
    ),
    ("conversation", ("responses",), "responses continue a conversation", STATE, conversation),
    (
        *("decision", ("chat",), "a decision has probabilities, and the likeliest is chosen"),
        *("https://docs.ollama.com/api/systemone", decision),
    ),
    (
        *("ollama", ("chat",), "Ollama's chat answers, whole and as lines"),
        *("https://docs.ollama.com/api/chat", ollama),
    ),
    (
        "search",
        ("responses", "messages"),
        "a web search is run or fails, and is not invented",
        TOOLS,
        search,
    ),
    (
        "predefined",
        ("responses", "messages"),
        "tools that the API defines and the client runs are in the prompt",
        TOOLS,
        predefined,
    ),
    (
        *("count-tokens", ("messages",), "count_tokens returns the same number as usage"),
        *(f"{ANTHROPIC}/build-with-claude/token-counting", count_tokens),
    ),
)
"""Name, APIs, what must hold, link to its source (by API; otherwise the API's reference), check."""

CHECKS = tuple(
    Check(
        name=f"wire.{api.name}.{name}",
        api=api,
        holds=holds,
        link=(link if isinstance(link, str) else link[api.name]) or api.link,
        run=run,
    )
    for api in APIS
    for name, apis, holds, link, run in ROWS
    if api.name in apis
)
