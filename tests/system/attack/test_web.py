"""A model that is tricked into opening private URLs, on a server with web search.

Each row is a URL that the model opens, as a search result or by itself. A service on a private
address counts its requests, and must have none. Pages that are too large, too slow or redirect
for ever end in an answer soon.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import figures
import psutil
import pytest
import server_process
from size import size
from sse import documents

pytest.importorskip("httpx2")
pytest.importorskip("lxml")

import fake_web

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

pytestmark = pytest.mark.served

MAX_SECONDS = 25.0
"""The limit of a page is 20 seconds with redirects, and a busy machine takes longer."""

MAX_MIB = 128.0
MIB = 2**20

CALL = "<|channel|>analysis to=browser.{} code<|message|>{}<|call|>"
FINAL = "<|channel|>final<|message|>{}<|return|>"
READ, REFUSED = "I have read it.", "It was refused."

PRIVATE: dict[str, str] = {
    # PORT is the service's port
    "an address": "http://127.0.0.1:PORT/secret",
    "a name": "http://localhost:PORT/secret",
    "a number": "http://2130706433:PORT/secret",
    "hexadecimal": "http://0x7f.1:PORT/secret",
    "octal": "http://0177.0.0.1:PORT/secret",
    "all addresses": "http://0.0.0.0:PORT/secret",
    "IPv6": "http://[::1]:PORT/secret",
    "IPv4 in IPv6": "http://[::ffff:127.0.0.1]:PORT/secret",
    "a user's name": "http://a.example@127.0.0.1:PORT/secret",
    "the metadata of a cloud": "http://169.254.169.254/latest/meta-data/",
    "the server itself": "SERVER/v1/models",
    "a file": "file:///etc/passwd",
    "another protocol": "gopher://127.0.0.1:PORT/_GET%20/secret",
    "a redirect": "SITE/redirect",
    "a redirect of a redirect": "SITE/redirect-twice",
    "a redirect to a file": "SITE/redirect-file",
}
COSTLY = {"endless": READ, "slow": REFUSED, "huge": READ, "around": REFUSED}
"""The answer after each page. The beginning of a page is enough to read it."""


@dataclass(frozen=True)
class WebSetup:
    """A server, a search engine whose pages may be opened, and a private service."""

    server: server_process.Server
    model: str
    site: fake_web.Site
    service: fake_web.Site
    urls: dict[str, str] = field(default_factory=dict)


def _endless(write: Any) -> None:
    while True:
        write.write(b"<p>" + b"word " * 200_000)


@pytest.fixture(scope="module")
def web_setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebSetup]:
    root = tmp_path_factory.mktemp("web")
    with fake_web.run_site() as site, fake_web.run_site() as service:
        service.add("/secret", "<p>The secret of the intranet</p>")
        secret = f"{service.url}/secret"
        site.add("/redirect", status=302, Location=secret)
        site.add("/redirect-twice", status=307, Location=f"{site.url}/redirect")
        site.add("/redirect-file", status=302, Location="file:///etc/passwd")
        site.add("/around", status=302, Location=f"{site.url}/around")
        site.add("/endless", _endless)
        site.add("/slow", fake_web.write_slowly)
        site.add("/huge", "<a href=x>y</a>" * (8 * MIB // 15))
        directory = standin.write(root / "gpt-oss-standin")
        server = server_process.start(
            directory,
            *server_process.FLAG,
            home=root / "home",
            command=server_process.HARMONY,
            preloaded=size(False, True),
            env={
                "VLLM_MLX_HARMONY_WEB_SEARCH": f"searxng:{site.url}",
                "VLLM_MLX_HARMONY_WEB_INTRANET": site.url,
            },
        )
        try:
            urls = {name: _fill_url(url, server, site, service) for name, url in PRIVATE.items()}
            urls |= {name: f"{site.url}/{name}" for name in COSTLY}
            standin.rescript(directory, _scripts(urls))
            with server.client() as client:
                model = client.get("/v1/models").json()["data"][0]["id"]
            yield WebSetup(server, model, site, service, urls)
            assert "Traceback" not in server.log
        finally:
            server.stop()


def _fill_url(
    url: str, server: server_process.Server, site: fake_web.Site, service: fake_web.Site
) -> str:
    url = url.replace("SERVER", server.base_url).replace("SITE", site.url)
    return url.replace("PORT", str(service.port))


def _scripts(urls: dict[str, str]) -> list[Script]:
    """The model opens the URL that the user names, or the first search result, and answers."""
    return [
        *(
            Script(f"Open {name}.<|end|>", CALL.format("open", json.dumps({"id": url})))
            for name, url in urls.items()
        ),
        Script("Search.<|end|>", CALL.format("search", '{"query":"needle"}')),
        Script("] needle", CALL.format("open", '{"id":0}')),
        Script("Error: ", FINAL.format(REFUSED)),
        Script("to=assistant", FINAL.format(READ)),
        Script("", FINAL.format("Hi.")),
    ]


def answer_text(web_setup: WebSetup, text: str, api: str) -> str:
    """The text of the answer, streamed in Messages."""
    user: dict[str, Any] = {"role": "user", "content": text}
    with web_setup.server.client(timeout=120) as client:
        if api == "responses":
            body = {"model": web_setup.model, "tools": [{"type": "web_search"}], "input": [user]}
            response = client.post("/v1/responses", json=body)
            assert response.status_code == 200, response.text
            return str(response.json()["output"][-1]["content"][0]["text"])
        tool = {"type": "web_search_20250305", "name": "web_search"}
        body = {"model": web_setup.model, "tools": [tool], "messages": [user], "max_tokens": 500}
        response = client.post("/v1/messages", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    deltas = (event.get("delta", {}) for event in documents(response.text))
    return "".join(delta.get("text", "") for delta in deltas)


@pytest.mark.parametrize("api", ["responses", "messages"])
@pytest.mark.parametrize("name", PRIVATE)
def test_private_urls_are_not_opened(web_setup: WebSetup, name: str, api: str) -> None:
    """Neither by the model itself nor as a search result."""
    requests_before = len(web_setup.service.requests)
    web_setup.site.search(("Found", web_setup.urls[name], "A page."))
    for text in (f"Open {name}.", "Search."):
        assert answer_text(web_setup, text, api) == REFUSED
    assert web_setup.service.requests[requests_before:] == []


def test_permitted_page_is_opened(web_setup: WebSetup) -> None:
    """Without this, the refusals above would prove nothing."""
    web_setup.site.add("/page", "<p>Hello</p>")
    web_setup.site.search(("Found", f"{web_setup.site.url}/page", "A page."))
    for api in ("responses", "messages"):
        assert answer_text(web_setup, "Search.", api) == READ


@pytest.mark.parametrize("name", COSTLY)
def test_costly_page_is_bounded(web_setup: WebSetup, name: str) -> None:
    process = psutil.Process(web_setup.server.pid)
    started, rss_before = time.monotonic(), process.memory_info().rss
    assert answer_text(web_setup, f"Open {name}.", "responses") == COSTLY[name]
    seconds, mib = time.monotonic() - started, (process.memory_info().rss - rss_before) / MIB
    figures.report("web", f"{name:10} {seconds:5.1f} s, {mib:4.0f} MiB")
    assert seconds <= MAX_SECONDS
    assert mib <= MAX_MIB


def test_endless_page_does_not_delay_others(web_setup: WebSetup) -> None:
    """Another client is answered while the page is read."""
    with ThreadPoolExecutor(1) as pool:
        slow_answer = pool.submit(answer_text, web_setup, "Open slow.", "responses")
        while web_setup.site.running == 0:
            assert not slow_answer.done()
            time.sleep(0.01)
        started = time.monotonic()
        with web_setup.server.client() as client:
            body = {"model": web_setup.model, "messages": [{"role": "user", "content": "Hi."}]}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert time.monotonic() - started < 5
        assert not slow_answer.done()
        slow_answer.result(60)
