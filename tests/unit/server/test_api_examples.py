"""The commands of docs/api.md, run against an in-process application, print what the page shows.

Ids, times, durations and token counts vary from run to run or with the prompt; everything else
must match the page.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from scripted_host import KEY, MODEL, DecidingEngine, SingleEngineHost
from starlette.testclient import TestClient

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "api.md").read_text("utf-8")
SERVER = "http://127.0.0.1:8000"
SCRIPTS = {
    "What is in Oslo?": "<|channel|>analysis<|message|>Art.<|end|><|start|>assistant"
    "<|channel|>final<|message|>A museum of Munch.<|return|>",
}
LIKELY = {
    "Which label": {"A": 0.0125, "B": 0.9781, "C": 0.0094},
    "answered today": {"A": 0.1354, "B": 0.8646},
}
_EXAMPLE = re.compile(r"^```sh\n(curl .*?)^```\n\n```json\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """Commands on the page, and the output of the last one."""

    commands: str
    printed: Any

    @property
    def requests(self) -> Iterator[tuple[str, str, str | None]]:
        """The method, path and body of each command."""
        for command in re.split(r"^(?=curl )", self.commands, flags=re.MULTILINE)[1:]:
            words = shlex.split(command.replace("\\\n", ""))
            body = words[words.index("-d") + 1] if "-d" in words else None
            method = "POST" if body else "GET"
            if "-X" in words:
                method = words[words.index("-X") + 1]
            (url,) = (word for word in words if word.startswith(SERVER))
            yield method, url.removeprefix(SERVER), body


EXAMPLES = [Example(commands, json.loads(printed)) for commands, printed in _EXAMPLE.findall(PAGE)]


def comparable(value: Any, name: str = "") -> Any:
    """``value`` without the parts that vary from run to run."""
    if isinstance(value, dict):
        return {key: comparable(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [comparable(inner, name) for inner in value]
    if _TIME.search(name) or (name == "id" and value != MODEL) or name.endswith("_count"):
        return type(value).__name__
    return round(value, 4) if isinstance(value, float) else value


_TIME = re.compile(r"_duration$|^created|_at$")


@pytest.mark.usefixtures("no_grammars")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: next(example.requests)[1])
def test_example_prints_what_page_shows(example: Example) -> None:
    engine = DecidingEngine(SCRIPTS, 3, likely=LIKELY, context_length=131_072)
    with TestClient(SingleEngineHost(engine).app, base_url="http://localhost") as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        for method, path, body in example.requests:
            response = client.request(method, path, content=body)
            assert response.status_code == 200, response.text
    assert comparable(response.json()) == comparable(example.printed)


def test_page_has_examples() -> None:
    assert EXAMPLES
