"""Checks that send requests which the inspector has saved (`verify --case`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial

from vllm_mlx_harmony.verify.apis import APIS
from vllm_mlx_harmony.verify.checks import Check
from vllm_mlx_harmony.verify.trial import Trial
from vllm_mlx_harmony.verify.values import Document, require
from vllm_mlx_harmony.verify.wire import CONTROL, HARMONY


def check(name: str, text: str) -> Check:
    """The check of a case. Raises ``ValueError`` if ``text`` is not one."""
    case = json.loads(text)
    try:
        version, path, body = case["case"], case["path"], case["body"]
        api = next((api for api in APIS if api.path == path), None)
    except (KeyError, TypeError) as error:
        raise ValueError("not a case") from error
    if version != 1 or api is None or not isinstance(body, dict):
        raise ValueError("not a case of Chat Completions, Responses or Messages")
    holds = "the answer has the SDK's types, calls only tools of the request, has no control tokens"
    return Check(
        f"case.{api.name}.{name}", api, holds, HARMONY, partial(answered, body), repeats=True
    )


async def answered(body: Document, trial: Trial) -> None:
    """Sends the request as it was saved, but to the model of this server."""
    body = {**body, "model": trial.server.model}
    if body.get("stream"):
        async with aclosing(trial.stream(body)) as events:
            document = trial.api.assemble([event async for event in events])
    else:
        document = await trial.post(body)
    answer = trial.api.read(document)
    items = {item["type"] for item in document.get("output", ())}  # some are of other kinds
    require(answer.text or answer.calls or items - {"reasoning"}, "an empty answer")
    found = CONTROL.search("\n".join((answer.text, answer.reasoning)))
    require(found is None, f"{found and found[0]!r} in a text")
    offered = set(_names(body.get("tools")))
    for call in answer.calls:
        require(call.name in offered, f"a call to {call.name!r}, which is not offered")
        json.loads(call.arguments)


def _names(tools: object) -> Iterator[object]:
    """The names of all functions, those in namespaces included."""
    for tool in tools if isinstance(tools, list) else ():
        yield tool.get("function", tool).get("name")
        yield from _names(tool.get("tools"))
