"""A server with the inspector, and the scripts of its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from playwright.sync_api import Page

KEY = "key-of-the-server"
MODEL = "gpt-oss-20b"

CALL = (
    "<|channel|>analysis<|message|>The user wants the weather in Paris. There is a tool for that."
    "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
    '<|message|>{"city":"Paris"}<|call|>'
)
ANSWER = (
    "<|channel|>analysis<|message|>18 degrees, sunny: no umbrella.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is 18 °C and sunny in Paris. 漢字 👋🏽"
    "<|return|>"
)
REPAIRED = "<|channel|>analysis<|channel|>final<|message|>Twice a channel.<|return|>"
THOUGHT = f"<|channel|>analysis<|message|>{' .' * 12}<|channel|>final<|message|>Done.<|return|>"
"""With a budget of 9 tokens of reasoning, three forced tokens replace its last three."""
MARKUP = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
SCRIPTS = (
    Script("Tell me a long story", f"<|channel|>final<|message|>{'so ' * 400}<|return|>", 40),
    Script("Think for a long time", f"<|channel|>analysis<|message|>{'so ' * 400}<|end|>", 40),
    Script("What is the weather in Paris?", CALL, 5),
    Script("functions.get_weather to=assistant", ANSWER, 5),
    Script("Repair", REPAIRED),
    Script("Think", THOUGHT),
    Script("Be brief", "<|channel|>final<|message|>Yes.<|return|>"),
    Script("Markup", f"<|channel|>final<|message|>{MARKUP}<|return|>"),
)


@dataclass(frozen=True)
class Site:
    """A server."""

    url: str

    def post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
        """The response to a request."""
        headers = {"Authorization": f"Bearer {KEY}"}
        document = {"model": MODEL, **body}
        return httpx.post(self.url + path, json=document, headers=headers, timeout=120)

    def send_message(self, text: str, **fields: Any) -> httpx.Response:
        """The response to a message of the user."""
        return self.post({"messages": [{"role": "user", "content": text}], **fields})

    @property
    def request_count(self) -> int:
        """The number of requests that the inspector lists."""
        headers = {"Authorization": f"Bearer {KEY}"}
        response = httpx.get(f"{self.url}/harmony/inspector/requests", headers=headers, timeout=60)
        return len(response.json()["requests"])


OpenPage = Callable[..., "Page"]
TakeScreenshot = Callable[["Page", str], None]
