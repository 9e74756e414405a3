"""A model that is talked into opening what it should not, on a server that searches the web.

Each row is a URL that the model opens, as a search result or in a call of its own. A service on a
private address, as there are many in any network, counts who asks it: nobody does. Pages that are
too large, too slow or that redirect for ever end in an answer, soon.
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
import server as served
from size import size

pytest.importorskip("httpx2")
pytest.importorskip("lxml")

import web

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

pytestmark = pytest.mark.served

MAX_SECONDS = 25.0
"""A page has 20 seconds, redirects included; a busy machine some more."""

MAX_MIB = 128.0
MIB = 2**20

CALL = "<|channel|>analysis to=browser.{} code<|message|>{}<|call|>"
FINAL = "<|channel|>final<|message|>{}<|return|>"
READ, REFUSED = "I have read it.", "It was refused."

PRIVATE: dict[str, str] = {
    # PORT is that of the service
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
"""Pages, and what becomes of them: the beginning of one is enough."""


@dataclass(frozen=True)
class Web:
    """The server, a search engine whose pages may be opened, and a service that must not be."""

    server: served.Server
    model: str
    site: web.Site
    service: web.Site
    urls: dict[str, str] = field(default_factory=dict)


def _endless(write: Any) -> None:
    while True:
        write.write(b"<p>" + b"word " * 200_000)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    place = tmp_path_factory.mktemp("web")
    with web.serving() as site, web.serving() as service:
        service.add("/secret", "<p>The secret of the intranet</p>")
        secret = f"{service.url}/secret"
        site.add("/redirect", status=302, Location=secret)
        site.add("/redirect-twice", status=307, Location=f"{site.url}/redirect")
        site.add("/redirect-file", status=302, Location="file:///etc/passwd")
        site.add("/around", status=302, Location=f"{site.url}/around")
        site.add("/endless", _endless)
        site.add("/slow", web.slowly)
        site.add("/huge", "<a href=x>y</a>" * (8 * MIB // 15))
        directory = standin.write(place / "gpt-oss-standin")
        server = served.start(
            directory,
            *served.FLAG,
            home=place / "home",
            command=served.HARMONY,
            preloaded=size(False, True),
            env={
                "VLLM_MLX_HARMONY_WEB_SEARCH": f"searxng:{site.url}",
                "VLLM_MLX_HARMONY_WEB_INTRANET": site.url,
            },
        )
        try:
            found = {name: _placed(url, server, site, service) for name, url in PRIVATE.items()}
            found |= {name: f"{site.url}/{name}" for name in COSTLY}
            standin.rescript(directory, _scripts(found))
            with server.client() as client:
                model = client.get("/v1/models").json()["data"][0]["id"]
            yield Web(server, model, site, service, found)
            assert "Traceback" not in server.log
        finally:
            server.stop()


def _placed(url: str, server: served.Server, site: web.Site, service: web.Site) -> str:
    url = url.replace("SERVER", server.base_url).replace("SITE", site.url)
    return url.replace("PORT", str(service.port))


def _scripts(urls: dict[str, str]) -> list[Script]:
    """The model opens what the user names; behind a search, the first result; and is done."""
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


def _ask(attacked: Web, text: str, api: str) -> str:
    """The text of the answer, which Messages streams."""
    user: dict[str, Any] = {"role": "user", "content": text}
    with attacked.server.client(timeout=120) as client:
        if api == "responses":
            body = {"model": attacked.model, "tools": [{"type": "web_search"}], "input": [user]}
            response = client.post("/v1/responses", json=body)
            assert response.status_code == 200, response.text
            return str(response.json()["output"][-1]["content"][0]["text"])
        tool = {"type": "web_search_20250305", "name": "web_search"}
        body = {"model": attacked.model, "tools": [tool], "messages": [user], "max_tokens": 500}
        response = client.post("/v1/messages", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    events = (line.removeprefix("data: ") for line in response.text.split("\n"))
    deltas = (json.loads(each).get("delta", {}) for each in events if each.startswith("{"))
    return "".join(delta.get("text", "") for delta in deltas)


@pytest.mark.parametrize("api", ["responses", "messages"])
@pytest.mark.parametrize("name", PRIVATE)
def test_nothing_private_is_opened(attacked: Web, name: str, api: str) -> None:
    """What the model opens, and what the search engine finds for it."""
    asked = len(attacked.service.asked)
    attacked.site.search(("Found", attacked.urls[name], "A page."))
    for text in (f"Open {name}.", "Search."):
        assert _ask(attacked, text, api) == REFUSED
    assert attacked.service.asked[asked:] == []


def test_what_may_be_opened_is(attacked: Web) -> None:
    """Else nothing would be proved by what is not."""
    attacked.site.add("/page", "<p>Hello</p>")
    attacked.site.search(("Found", f"{attacked.site.url}/page", "A page."))
    for api in ("responses", "messages"):
        assert _ask(attacked, "Search.", api) == READ


@pytest.mark.parametrize("name", COSTLY)
def test_a_page_costs_no_more(attacked: Web, name: str) -> None:
    process = psutil.Process(attacked.server.pid)
    began, before = time.monotonic(), process.memory_info().rss
    assert _ask(attacked, f"Open {name}.", "responses") == COSTLY[name]
    seconds, mib = time.monotonic() - began, (process.memory_info().rss - before) / MIB
    figures.report("web", f"{name:10} {seconds:5.1f} s, {mib:4.0f} MiB")
    assert seconds <= MAX_SECONDS
    assert mib <= MAX_MIB


def test_one_page_that_never_ends_holds_nobody_else(attacked: Web) -> None:
    """While it is read, another client is answered."""
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(_ask, attacked, "Open slow.", "responses")
        while attacked.site.at_once == 0:
            assert not slow.done()
            time.sleep(0.01)
        began = time.monotonic()
        with attacked.server.client() as client:
            body = {"model": attacked.model, "messages": [{"role": "user", "content": "Hi."}]}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert time.monotonic() - began < 5
        assert not slow.done()
        slow.result(60)
