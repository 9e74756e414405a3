"""Official clients of an application in this process, without sockets."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
import httpx
import ollama
import openai
from scripted_host import KEY, SingleEngineHost


def clients(
    host: SingleEngineHost, key: str = KEY
) -> tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]:
    """OpenAI's and Anthropic's clients for the front end on ``host``."""
    return (
        openai.AsyncOpenAI(
            base_url="http://localhost/v1",
            api_key=key,
            max_retries=0,
            http_client=in_process(openai.DefaultAsyncHttpxClient, host.app),
        ),
        anthropic.AsyncAnthropic(
            base_url="http://localhost",
            auth_token=key,
            max_retries=0,
            http_client=in_process(anthropic.DefaultAsyncHttpxClient, host.app),
        ),
    )


def in_process(client: type[Any], app: Any) -> Any:
    """An HTTP client of the library an SDK is built on (httpx, or httpx2), without a socket."""
    library = sys.modules[client.__mro__[1].__module__.partition(".")[0]]
    return client(transport=library.ASGITransport(app))


def ollama_client(host: SingleEngineHost, key: str = KEY) -> ollama.AsyncClient:
    """Ollama's client for the front end on ``host``."""
    transport = httpx.ASGITransport(host.app)
    headers = {"Authorization": f"Bearer {key}"}
    return ollama.AsyncClient("http://localhost", headers=headers, transport=transport)
