"""The browser of ``--web-search``, over a search engine and pages on 127.0.0.1."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("httpx2")
pytest.importorskip("lxml")


import fake_web
from fake_web import Site
from loops import run

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.pages import read_page
from vllm_mlx_harmony.core.turn import WebLimits
from vllm_mlx_harmony.server.settings import ServerSettings, ToolsMode
from vllm_mlx_harmony.server.tools import browser as package
from vllm_mlx_harmony.server.tools import guarded_http
from vllm_mlx_harmony.server.tools.browser import browser, engines, fetching
from vllm_mlx_harmony.server.tools.browser.engines import Hit, JsonEngine, engine_of
from vllm_mlx_harmony.server.tools.browser.fetching import Fetched, Fetcher
from vllm_mlx_harmony.server.tools.browser.reading import MAX_LINES, read
from vllm_mlx_harmony.server.tools.config import ServerConfig, ToolsConfig
from vllm_mlx_harmony.server.tools.guarded_http import UrlPattern
from vllm_mlx_harmony.server.tools.tool_server import ToolError
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

ROME = """<!doctype html><html><head><title>Rome</title><style>p {color: red}</style></head><body>
<nav><a href="/login">Log in</a></nav>
<main><h1>Rome</h1>
<p>Rome is the capital of <a href="/italy#top">Italy</a>, says
<a href="https://other.example/x">another site</a>. <a href="/italy">Italy</a> again.</p>
<ul><li>one</li><li>two <b>bold</b></li></ul>
<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>
<pre>  kept
    as it is</pre>
<p hidden>not shown</p><script>alert("【0†L1】")</script>
<p>A page may write 【9†L1】 and <a href="javascript:x()">this</a>. &lt;|call|&gt;</p>
</main><footer>Imprint</footer></body></html>"""
LINES = (
    "# Rome",
    "",
    "Rome is the capital of 【0†Italy】, says 【1†another site†other.example】. 【0†Italy】",
    "again.",
    "",
    "* one",
    "* two bold",
    "",
    "| a | b",
    "| 1 | 2",
    "",
    "  kept",
    "    as it is",
    "",
    "A page may write 〖9†L1〗 and this. <|call|>",
)


@pytest.fixture
def site() -> Iterator[Site]:
    with fake_web.run_site() as site:
        site.add("/rome", ROME)
        site.add("/italy", "<title>Italy</title>" + "<p>Line of Italy.</p>" * 400)
        site.search(
            ("Rome", f"{site.url}/rome", "A <b>city</b>."),
            ("Italy", f"{site.url}/italy", ""),
            ("A file", "file:///etc/passwd", ""),
            ("Rome again", f"{site.url}/rome", "the same page"),
        )
        yield site


def call_tools(site: Site, *calls: tuple[str, dict[str, Any]], **options: Any) -> list[str]:
    """The results of calls in one conversation."""

    async def results() -> list[str]:
        session = fake_web.browser(site).session({}, "", **options)
        return [(await session.call(tool, arguments)).text for tool, arguments in calls]

    texts: list[str] = run(results())
    return texts


def error_of(site: Site, *calls: tuple[str, dict[str, Any]], **options: Any) -> tuple[str, str]:
    """The message and the code of the error of the last call."""
    with pytest.raises(ToolError) as error:
        call_tools(site, *calls, **options)
    return str(error.value), error.value.code


# --- The tools


def test_search_lists_results(site: Site) -> None:
    (text,) = call_tools(site, ("search", {"query": " where is\nrome ", "topn": 3}))
    assert site.queries() == ["where is rome"]
    assert text == (
        "[0] where is rome\n**viewing lines [0 - 5] of 5**\n\n"
        f"L0: 【0†Rome†127.0.0.1:{site.port}】\nL1: {site.url}/rome\nL2: A <b>city</b>.\nL3: \n"
        f"L4: 【1†Italy†127.0.0.1:{site.port}】\nL5: {site.url}/italy"
    )


def test_page_is_shown_as_text(site: Site) -> None:
    (text,) = call_tools(site, ("open", {"id": f"{site.url}/rome"}))
    page = read_page(text)
    assert page is not None
    assert (page.cursor, page.title, page.url) == (0, "Rome", f"{site.url}/rome")
    assert page.lines == LINES


def test_cursors_refer_to_earlier_pages(site: Site) -> None:
    """Cursors count up; without one, the latest page is used."""
    texts = call_tools(
        site,
        ("search", {"query": "x"}),
        ("open", {"id": 0}),
        ("open", {"id": 0}),
        ("open", {"loc": 100, "num_lines": 2}),
        ("find", {"pattern": "KEPT", "cursor": 1}),
        ("open", {"id": "0", "cursor": 4.0}),
        ("open", {"cursor": 1, "view_source": True, "num_lines": 1}),
        ("open", {"id": 1, "cursor": 0, "loc": 3, "num_lines": 1}),
    )
    pages = [read_page(text) for text in texts]
    shown = [(page.cursor, page.title, page.first, page.lines[:1]) for page in pages if page]
    assert shown == [
        (0, "x", 0, (f"【0†Rome†127.0.0.1:{site.port}】",)),
        (1, "Rome", 0, ("# Rome",)),
        (2, "Italy", 0, ("Line of Italy.",)),
        (3, "Italy", 100, ("Line of Italy.",)),
        (4, "Rome", 0, ("Matches of KEPT",)),
        (5, "Rome", 7, ("",)),
        (6, "rome", 0, ("<!doctype html><html><head><title>Rome</title><style>p {color:",)),
        (7, "Italy", 3, ("",)),
    ]
    assert pages[3] is not None and len(pages[3].lines) == 2
    # A page is fetched once, and once more for its source.
    assert [path for path, _ in site.requests[1:]] == ["/rome", "/italy", "/rome"]


def test_long_page_is_shown_in_parts(site: Site) -> None:
    first, rest = (
        read_page(text)
        for text in call_tools(site, ("open", {"id": f"{site.url}/italy"}), ("open", {"loc": 150}))
    )
    assert first is not None and rest is not None
    assert (first.total, rest.total) == (799, 799)
    assert 100 < len(first.lines) < 200
    assert rest.first == 150


def test_continued_conversation_knows_earlier_pages(site: Site) -> None:
    """They are restored from what the model read of them."""
    earlier = call_tools(site, ("search", {"query": "x"}), ("open", {"id": 0}))
    earlier += call_tools(site, ("open", {"id": f"{site.url}/rome"}), ("find", {"pattern": "two"}))[
        1:
    ]
    earlier[2] = earlier[2].replace("[1]", "[5]")
    earlier_pages = {page.cursor: page for page in map(read_page, earlier) if page}

    async def results() -> list[str]:
        session = fake_web.browser(site).session(earlier_pages, "")
        calls: list[dict[str, Any]] = [
            {"id": 0},
            {"id": 0, "cursor": 1},
            {"id": 1, "cursor": 0},
            {"cursor": 5},
        ]
        return [(await session.call("open", arguments)).text for arguments in calls]

    pages = [read_page(text) for text in run(results())]
    assert [(page.cursor, page.title, page.first) for page in pages if page] == [
        (6, "Rome", 2),
        (7, "Italy", 0),
        (8, "Italy", 0),
        (9, "Rome", 0),
    ]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (("search", {"query": " "}), "the query is empty"),
        (("search", {}), "query must be a string"),
        (("open", {}), "no page is open"),
        (("find", {"pattern": "x"}), "no page is open"),
        (("find", {"pattern": ""}), "the pattern is empty"),
        (("open", {"id": "rome"}), "only URLs with http:// or https:// can be opened"),
        (("open", {"id": True, "cursor": "x"}), "must be a number"),
        (("open", {"id": [1]}), "must be a number"),
        (("close", {}), "the browser has no tool close"),
    ],
)
def test_invalid_calls_fail(site: Site, call: tuple[str, dict[str, Any]], problem: str) -> None:
    assert problem in error_of(site, call)[0]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (("open", {"id": 7}), "there is no link 7|the results have no link 7"),
        (("open", {"cursor": 3}), "no page has the cursor 3"),
        (("find", {"pattern": "x"}), "open a result to find text in its page"),
    ],
)
def test_references_to_nothing_fail(
    site: Site, call: tuple[str, dict[str, Any]], problem: str
) -> None:
    text, code = error_of(site, ("search", {"query": "x"}), call)
    assert any(alternative in text for alternative in problem.split("|"))
    assert code == "invalid_tool_input"


def test_line_beyond_end_is_an_error(site: Site) -> None:
    text, _ = error_of(site, ("open", {"id": f"{site.url}/rome", "loc": 10**9}))
    assert text == "the page has no line 1000000000: its last line is 14"


def test_limits_of_request_are_enforced(site: Site) -> None:
    limits = WebLimits(allowed=("a.example",))
    assert call_tools(site, ("search", {"query": "x"}), limits=limits)[0].endswith(
        "L0: No results were found."
    )
    assert site.queries() == ["x site:a.example"]
    opened = ("open", {"id": f"{site.url}/rome"})
    problem = ("the request does not allow pages of this site", "url_not_allowed")
    assert error_of(site, opened, limits=limits) == problem
    assert error_of(site, opened, limits=WebLimits(blocked=("127.0.0.1",))) == problem
    search = ("search", {"query": "x"})
    assert error_of(site, search, search, limits=WebLimits(searches=1)) == (
        "the request allows no more searches",
        "max_uses_exceeded",
    )
    limits = WebLimits(fetches=1)
    assert error_of(site, search, ("open", {"id": 0}), opened, limits=limits)[1] == (
        "max_uses_exceeded"
    )


def test_pages_of_one_tenant_are_not_cached_for_another(site: Site) -> None:
    async def results() -> None:
        shared_browser = fake_web.browser(site)
        for tenant in ("a", "a", "b"):
            session = shared_browser.session({}, tenant)
            await session.call("search", {"query": "x"})
            await session.call("open", {"id": 0})

    run(results())
    assert [path for path, _ in site.requests if path == "/rome"] == ["/rome"] * 2


def test_pages_of_one_host_are_fetched_one_at_a_time(site: Site) -> None:
    def slow(write: Any) -> None:
        time.sleep(0.1)
        write.write(b"<p>x")

    for number in range(4):
        site.add(f"/slow{number}", slow)

    async def results() -> None:
        shared_browser = fake_web.browser(site)
        calls = (
            shared_browser.call("open", {"id": f"{site.url}/slow{number}"}) for number in range(4)
        )
        await asyncio.gather(*calls)

    run(results())
    assert site.most_running == 1
    headers = site.requests[-1][1]
    assert headers["User-Agent"].startswith("vllm-mlx-harmony ")
    assert "Cookie" not in headers and "Authorization" not in headers


# --- What must not happen


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("file:///etc/passwd", "url_not_allowed"),
        ("ftp://example.com/x", "url_not_allowed"),
        ("data:text/html,x", "url_not_allowed"),
        ("http://user:secret@example.com/", "url_not_allowed"),
        ("http://example.com:25/", "url_not_allowed"),
        ("http://", "url_not_allowed"),
        ("http://[::1", "invalid_tool_input"),
        ("https://example.com/" + "x" * 3000, "url_too_long"),
        # Addresses that are not public, in every spelling.
        ("http://127.0.0.1:8000/v1/models", "url_not_accessible"),
        ("http://localhost:8000/", "url_not_accessible"),
        ("http://2130706433/", "url_not_accessible"),
        ("http://0x7f.1/", "url_not_accessible"),
        ("http://[::1]/", "url_not_accessible"),
        ("http://[::ffff:127.0.0.1]/", "url_not_accessible"),
        ("http://169.254.169.254/latest/meta-data/", "url_not_accessible"),
        ("http://10.0.0.1/", "url_not_accessible"),
        ("http://192.168.0.1/", "url_not_accessible"),
        ("http://0.0.0.0/", "url_not_accessible"),
        ("http://[fe80::1]/", "url_not_accessible"),
    ],
)
def test_forbidden_addresses_are_not_opened(
    url: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connects(*_: object, **__: object) -> None:
        pytest.fail("it connects")

    monkeypatch.setattr("asyncio.BaseEventLoop.create_connection", connects)
    with pytest.raises(ToolError) as error:
        run(Fetcher().fetch(url))
    assert error.value.code == code


def test_private_address_needs_a_permitted_host(site: Site) -> None:
    url = f"{site.url}/rome"
    for pattern in ("http://*", f"http://127.0.0.1:{site.port + 1}", f"{site.url}/italy"):
        with pytest.raises(ToolError, match="no public address"):
            run(Fetcher([UrlPattern.read(pattern)]).fetch(url))
    assert site.requests == []
    assert run(Fetcher([UrlPattern.read(site.url)]).fetch(url)).content == ROME.encode()


def test_redirect_to_private_address_is_rejected(site: Site) -> None:
    """Each hop is checked like a first request."""
    with fake_web.run_site() as inner:
        inner.add("/secret", "secret")
        site.add("/away", status=302, Location=f"{inner.url}/secret")
        site.add("/file", status=302, Location="file:///etc/passwd")
        site.add("/moved", status=301, Location="/rome")
        site.add("/around", status=302, Location="/around")
        fetcher = Fetcher([UrlPattern.read(site.url)])
        with pytest.raises(ToolError, match="no public address"):
            run(fetcher.fetch(f"{site.url}/away"))
        assert inner.requests == []
    for path, problem in (("/file", "only URLs"), ("/around", "redirects too often")):
        with pytest.raises(ToolError, match=problem):
            run(fetcher.fetch(f"{site.url}{path}"))
    assert len(site.requests) == 2 + fetching.MAX_REDIRECTS + 1
    assert run(fetcher.fetch(f"{site.url}/moved")).url == f"{site.url}/rome"


def test_name_is_resolved_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second answer of the DNS, a private address, has no effect."""
    resolved: list[str] = []
    connected: list[str] = []

    async def getaddrinfo(_: object, host: str, port: int, **__: object) -> list[Any]:
        resolved.append(host)
        address = "93.184.215.14" if len(resolved) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    async def handle(self: object, request: Any) -> Any:
        connected.append(request.url.host)
        raise guarded_http.httpx2.ConnectError("no network")

    monkeypatch.setattr("asyncio.BaseEventLoop.getaddrinfo", getaddrinfo)
    monkeypatch.setattr("httpx2.AsyncHTTPTransport.handle_async_request", handle)
    with pytest.raises(ToolError, match="no network"):
        run(Fetcher().fetch("http://rebinding.example/"))
    assert (resolved, connected) == (["rebinding.example"], ["93.184.215.14"])


def test_huge_page_is_cut(site: Site) -> None:
    """Only its beginning is read; then its connection is closed."""
    sent = 0

    def endless(write: Any) -> None:
        nonlocal sent
        part = b"<p>" + b"word " * 13_000 + b"</p>"
        for _ in range(2**30 // len(part)):
            write.write(part)
            sent += len(part)

    site.add("/big", endless, Content_Length=str(2**30))
    (text,) = call_tools(site, ("open", {"id": f"{site.url}/big", "loc": 10, "num_lines": 1}))
    page = read_page(text)
    assert page is not None and 5_000 < page.total < MAX_LINES
    assert sent < 100 * 2**20


def test_slow_page_times_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "SECONDS", 0.5)
    site.add("/drops", fake_web.write_slowly)
    began = time.monotonic()
    assert error_of(site, ("open", {"id": f"{site.url}/drops"})) == (
        "the page was not sent in time",
        "url_not_accessible",
    )
    assert time.monotonic() - began < 20


def test_unexpected_compression_is_rejected(site: Site) -> None:
    site.add("/bomb", b"\x1f\x8b" + b"x" * 100, Content_Encoding="gzip")
    text, code = error_of(site, ("open", {"id": f"{site.url}/bomb"}))
    assert "compressed" in text and code == "url_not_accessible"


HOSTILE = {
    "deep": b"<div>" * 400_000,
    "deep lists": b"<ul><li>" * 250_000,
    "links": b"<a href=x>" * 200_000,
    "different links": b"".join(b"<a href=/%d>%d</a>" % (n, n) for n in range(80_000)),
    "attributes": b"<p " + b"a=1 " * 500_000 + b">x</p>",
    "entities": b"&amp;" * 400_000,
    "no end of a comment": b"<!--" * 500_000,
    "no end of a tag": b"<" * 2_000_000,
    "nul": b"\x00" * 2_000_000,
    "one word": b"x" * 2_000_000,
    "one line": b"x " * 1_000_000,
    "tabs": b"x" + b"\t" * 2_000_000 + b"x",
    "empty lines": b"\n" * 2_000_000,
    "tables": b"<table><tr><td>" * 130_000,
    "formatting": b"<b><i><u><p>" * 150_000,
    "a bad encoding": b"<meta charset=utf-7>+ADw-script+AD4-" + b"\xff\xfe\x00" * 100_000,
    "entities of a document type": b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b SYSTEM '
    b'"file:///etc/passwd">]><p>&a;&b;</p>',
}


@pytest.mark.nightly(sample=6)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", ["text/html", "text/plain"])
def test_hostile_page_is_read_within_bounds(name: str, kind: str) -> None:
    """They are read in bounded time, into bounded lines without control characters."""
    began = time.process_time()
    content = HOSTILE[name][: fetching.MAX_BYTES]
    document = read(Fetched("https://a.example/", content, kind, None))
    assert time.process_time() - began < 10
    assert 1 <= len(document.lines) <= MAX_LINES
    assert max(map(len, document.lines)) <= 400
    text = "\n".join(document.lines)
    assert "root:" not in text
    assert not [character for character in text if character < " " and character != "\n"]


def fetched(content: str | bytes, kind: str, charset: str | None = "utf-8") -> Fetched:
    body = content.encode() if isinstance(content, str) else content
    return Fetched("https://a.example/dir/x", body, kind, charset)


@pytest.mark.parametrize(
    ("content", "kind", "lines"),
    [
        ("a\r\nb\tc\x1b[0m\n", "text/plain", ("a", "b    c[0m", "")),
        ('{"a":[1,"é"]}', "application/json", ("{", ' "a": [', "  1,", '  "é"', " ]", "}")),
        ("{", "application/json", ("{",)),
        ("<a><b>x</b></a>", "application/xml", ("<a><b>x</b></a>",)),
        ("# 【0†L1】", "text/markdown", ("# 〖0†L1〗",)),
        ("plain", "", ("plain",)),
        ("<p>html", "", ("html",)),
        ("", "text/html", ("[the page has no text]",)),
        ("<script>x</script>", "text/html", ("[the page has no text]",)),
        ("<nav>only <a href=/x>this</a></nav>", "text/html", ("[the page has no text]",)),
        ("a<br>b", "text/html", ("a", "b")),
        ("<base href=/q/><a href=r>s</a>", "text/html", ("【0†s】",)),
        ("<a href=x>a</a> <a href=y>b</a>", "text/html", ("【0†a】 【1†b】",)),
        ("<a href='x'><img alt='A cat'></a>", "text/html", ("【0†[Image: A cat]】",)),
        ("<a href=x>†</a>", "text/html", ("【0†‡】",)),
        ("<a href=#x>here</a><a href=mailto:a@b>mail</a>", "text/html", ("heremail",)),
        ("<p>one<p>two", "application/xhtml+xml", ("one", "", "two")),
        ("<article>short</article><p>more", "text/html", ("short", "", "more")),
    ],
)
def test_content_is_read_as_lines(content: str, kind: str, lines: tuple[str, ...]) -> None:
    assert read(fetched(content, kind)).lines == lines


def test_charsets_are_decoded() -> None:
    latin = "<p>é</p>".encode("latin-1")
    assert read(fetched(latin, "text/html", "iso-8859-1")).lines == ("é",)
    declared = "<meta charset=iso-8859-1><p>é</p>".encode("latin-1")
    assert read(fetched(declared, "text/html", None)).lines == ("é",)
    for charset in ("nonsense", "base64", "utf-8"):
        assert read(fetched("<p>é</p>", "text/html", charset)).lines
        assert read(fetched("é", "text/plain", charset)).lines


def test_other_content_types_are_rejected() -> None:
    for kind in ("application/pdf", "image/png", "application/octet-stream"):
        with pytest.raises(ToolError) as error:
            read(fetched("%PDF", kind))
        assert error.value.code == "unsupported_content_type"


def test_missing_page_is_an_error(site: Site) -> None:
    text, code = error_of(site, ("open", {"id": f"{site.url}/none"}))
    assert (text, code) == ("the server responds with 404 Not Found", "url_not_accessible")


# --- Search engines


@pytest.mark.parametrize(
    ("status", "body", "problem", "code"),
    [
        (500, "", "responds with 500", "unavailable"),
        (403, "", "responds with 403", "unavailable"),
        (429, "", "refuses further searches", "too_many_requests"),
        (302, "", "responds with 302", "unavailable"),
        (200, "<html>", "malformed", "unavailable"),
        (200, "[1]", "malformed", "unavailable"),
        (200, '{"results": 1}', "malformed", "unavailable"),
        (200, "[" * 100_000, "malformed", "unavailable"),
        (200, "x" * 3 * 2**20, "too long", "unavailable"),
    ],
)
def test_failing_search_engine_is_an_error(
    site: Site, status: int, body: str, problem: str, code: str
) -> None:
    site.add("/search", body, status, Location="/rome")
    text, actual_code = error_of(site, ("search", {"query": "x"}))
    assert problem in text and actual_code == code
    assert [path for path, _ in site.requests if path == "/rome"] == []


def test_silent_search_engine_times_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "SECONDS", 0.3)
    site.add("/search", fake_web.write_slowly)
    assert error_of(site, ("search", {"query": "x"})) == (
        "the search engine does not respond",
        "unavailable",
    )


def test_unreachable_search_engine_is_an_error() -> None:
    with fake_web.run_site() as gone:
        pass
    text, code = error_of(gone, ("search", {"query": "x"}))
    assert "cannot be reached" in text and code == "unavailable"


@pytest.mark.parametrize("result", [None, 1, {}, {"url": 1}, {"url": "x", "title": 1}])
def test_malformed_results_are_left_out(site: Site, result: object) -> None:
    body = json.dumps({"results": [result, {"url": f"{site.url}/rome", "title": None}]})
    site.add("/search", body)
    (text,) = call_tools(site, ("search", {"query": "x"}))
    page = read_page(text)
    assert page is not None and [hit.url for hit in page.found] == [f"{site.url}/rome"]


BRAVE = {
    "type": "search",
    "query": {"original": "rome", "more_results_available": True},
    "mixed": {"type": "mixed", "main": [{"type": "web", "index": 0, "all": False}]},
    "web": {
        "type": "search",
        "family_friendly": True,
        "results": [
            {
                "title": "Rome",
                "url": "https://a.example/",
                "is_source_local": False,
                "description": "A city.",
                "page_age": "2025-01-01T00:00:00",
                "profile": {"name": "A", "url": "https://a.example/", "img": "https://i.example/"},
                "language": "en",
                "meta_url": {"scheme": "https", "netloc": "a.example", "path": ""},
            }
        ],
    },
}
TAVILY = {
    "query": "rome",
    "answer": None,
    "images": [],
    "results": [
        {
            "title": "Rome",
            "url": "https://a.example/",
            "content": "A city.",
            "score": 0.9,
            "raw_content": None,
        }
    ],
    "response_time": 1.2,
    "request_id": "r",
}


@pytest.mark.parametrize(
    ("name", "document", "sent"),
    [
        (
            "brave",
            BRAVE,
            (
                "GET https://api.search.brave.com/res/v1/web/search?q=rome+%26+x&count=5"
                "&text_decorations=false",
                "x-subscription-token: s3cret",
                None,
            ),
        ),
        (
            "tavily",
            TAVILY,
            (
                "POST https://api.tavily.com/search",
                "authorization: Bearer s3cret",
                {"query": "rome & x", "max_results": 5},
            ),
        ),
    ],
)
def test_engine_sends_its_key(
    name: str, document: object, sent: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    httpx2 = guarded_http.httpx2
    requests: list[Any] = []

    def answer(request: Any) -> Any:
        requests.append(request)
        return httpx2.Response(200, json=document)

    def client(url: Any, headers: Any, *, private: bool) -> Any:
        assert not private
        return httpx2.AsyncClient(headers=list(headers), transport=httpx2.MockTransport(answer))

    monkeypatch.setattr(guarded_http, "client", client)
    engine = engine_of(name, {f"{name.upper()}_API_KEY": " s3cret "})
    assert "s3cret" not in repr(engine) and engine.name == name
    assert run(engine.search("rome & x", 5)) == [Hit("Rome", "https://a.example/", "A city.")]
    (request,) = requests
    where, header, body = sent
    assert f"{request.method} {request.url}" == where
    field, _, value = header.partition(": ")
    assert request.headers[field] == value
    assert (json.loads(request.content) if request.content else None) == body


def test_ddgs_results_and_errors_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    ddgs = pytest.importorskip("ddgs.ddgs")
    from ddgs.exceptions import DDGSException, RatelimitException

    def text(self: object, query: str, **options: Any) -> list[dict[str, str]]:
        if query == "busy":
            raise RatelimitException("202")
        if query in ("nothing", "broken"):
            raise DDGSException("No results found." if query == "nothing" else "oops")
        assert (query, options) == ("rome", {"max_results": 5})
        return [{"title": "Rome", "href": "https://a.example/", "body": "A city."}]

    monkeypatch.setattr(ddgs.DDGS, "text", text)
    engine = engine_of("ddgs")
    assert run(engine.search("rome", 5)) == [Hit("Rome", "https://a.example/", "A city.")]
    assert run(engine.search("nothing", 5)) == []
    for query, code in (("busy", "too_many_requests"), ("broken", "unavailable")):
        with pytest.raises(ToolError) as error:
            run(engine.search(query, 5))
        assert error.value.code == code


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("google", "'google' is not one of ddgs, searxng:URL, brave, tavily"),
        ("searxng", "'searxng' is not one of"),
        ("searxng:localhost", "is not one of"),
        ("searxng:file:///x", "is not one of"),
        ("ddgs:x", "is not one of"),
        ("brave", "--web-search brave requires BRAVE_API_KEY"),
        ("tavily:x", "is not one of"),
    ],
)
def test_invalid_engines_are_rejected(text: str, problem: str) -> None:
    with pytest.raises(HostError, match=problem.replace("?", r"\?")):
        engine_of(text, {})


def test_settings_configure_browser() -> None:
    url = "http://127.0.0.1:8888/"
    settings = ServerSettings(web_search=f"searxng:{url}", web_intranet=("http://wiki.lan",))
    web_browser = package.of(settings)
    assert (
        isinstance(web_browser.engine, JsonEngine)
        and web_browser.engine.name == f"searxng at {url}"
    )
    assert isinstance(web_browser, browser.Browser)
    with pytest.raises(HostError, match="not a URL pattern"):
        package.of(ServerSettings(web_search="ddgs", web_intranet=("wiki",)))


def test_web_search_adds_browser_to_toolbox() -> None:
    """Without tools it has only the browser; with tool servers, none may be named like it."""
    settings = ServerSettings(web_search="searxng:http://127.0.0.1:9")
    server = ServerConfig(transport="streamable-http", url="http://127.0.0.1:9/mcp")
    config = ToolsConfig(servers={"weather": server})
    toolbox = Toolbox.of(config, settings)
    assert (toolbox.labels, toolbox.use) == (["browser"], ToolsMode.ON)
    assert toolbox.lines == [
        "browser: search, open, find",
        "the web is searched with searxng at http://127.0.0.1:9, and pages are opened from here",
    ]
    toolbox = Toolbox.of(config, replace(settings, tools=ToolsMode.ALL))
    assert (toolbox.labels, toolbox.use) == (["browser", "weather"], ToolsMode.ALL)
    with pytest.raises(HostError, match="are both named 'browser'"):
        Toolbox.of(ToolsConfig(servers={"browser": server}), replace(settings, tools=ToolsMode.ON))
