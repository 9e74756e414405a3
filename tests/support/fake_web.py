"""A search engine and web pages on 127.0.0.1, and a browser that may open them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vllm_mlx_harmony.server.tools.browser.browser import Browser
from vllm_mlx_harmony.server.tools.browser.engines import engine_of
from vllm_mlx_harmony.server.tools.browser.fetching import Fetcher
from vllm_mlx_harmony.server.tools.guarded_http import UrlPattern

HTML = "text/html; charset=utf-8"


@dataclass
class Site:
    """Responses to GET requests by path: a status, headers, and a body or a function writing it."""

    pages: dict[str, tuple[int, dict[str, str], bytes | Callable[[Any], None]]] = field(
        default_factory=dict
    )
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    port: int = 0
    running: int = 0
    most_running: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(
        self,
        path: str,
        body: str | bytes | Callable[[Any], None] = b"",
        status: int = 200,
        **headers: str,
    ) -> str:
        """Adds a page; returns its URL."""
        content = body.encode() if isinstance(body, str) else body
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.pages[path] = status, {"Content-Type": HTML, **named}, content
        return f"{self.url}{path}"

    def search(self, *results: tuple[str, str, str]) -> None:
        """Sets the search results (titles, URLs, extracts) in SearXNG's format."""
        entries = [
            {
                "url": url,
                "title": title,
                "content": extract,
                "engine": "wikipedia",
                "engines": ["wikipedia"],
                "parsed_url": ["http", "127.0.0.1", "/", "", "", ""],
                "positions": [1],
                "score": 1.0,
                "category": "general",
            }
            for title, url, extract in results
        ]
        document = {
            "query": "x",
            "number_of_results": 0,
            "results": entries,
            "answers": [],
            "corrections": [],
            "infoboxes": [],
            "suggestions": [],
            "unresponsive_engines": [["brave", "timeout"]],
        }
        self.add("/search", json.dumps(document), Content_Type="application/json")

    def queries(self) -> list[str]:
        searches = (urlsplit(path) for path, _ in self.requests)
        return [parse_qs(url.query)["q"][0] for url in searches if url.path == "/search"]


@contextmanager
def run_site(*, host: str = "127.0.0.1") -> Iterator[Site]:
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.requests.append((self.path, dict(self.headers)))
            site.running += 1
            site.most_running = max(site.most_running, site.running)
            try:
                missing: tuple[int, dict[str, str], bytes] = (404, {}, b"")
                status, headers, body = site.pages.get(urlsplit(self.path).path, missing)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if not callable(body):
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(OSError):
                    if callable(body):
                        body(self.wfile)
                    else:
                        self.wfile.write(body)
            finally:
                site.running -= 1

        def log_message(self, *_: object) -> None:
            """Prints nothing; tests read ``requests``."""

    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    site.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def browser(site: Site, *, intranet: bool = True) -> Browser:
    """A browser that searches with ``site``, and may open its pages."""
    patterns = [UrlPattern.read(site.url)] if intranet else []
    return Browser(engine_of(f"searxng:{site.url}"), Fetcher(patterns))


def write_slowly(write: Any) -> None:
    """A page that arrives slowly and takes a minute."""
    for _ in range(600):
        write.write(b"<p>drop</p>")
        write.flush()
        time.sleep(0.1)
