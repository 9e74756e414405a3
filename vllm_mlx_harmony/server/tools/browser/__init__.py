"""A browser for the model: web search, and pages as text, in the form known to gpt-oss.

``--web-search`` enables it. `engines` asks a search engine, `fetching` reads a page through the
guard of `guarded_http`, `reading` turns it into lines and links, and `browser` is the
``ToolServer``: it shows results under cursors (`core.pages`), of which each conversation has its
own. Nothing is stored but a cache of pages.

Pages are data from strangers. They can be endless, malformed or hostile, and may try to instruct
the model. So everything is bounded: bytes, seconds, redirects, lines. Control tokens in a page are
ordinary text, as in every tool result (semantics A7), and a page cannot write the brackets of
links and citations. That a model follows what a page says cannot be excluded; what it can do then
is to search, and to open pages at public addresses.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm_mlx_harmony.core.errors import HostError

if TYPE_CHECKING:
    from vllm_mlx_harmony.server.settings import ServerSettings
    from vllm_mlx_harmony.server.tools.browser.browser import Browser

REQUIRED = ("httpx2", "lxml")
"""Packages of the extra ``browser``, besides those of a search engine."""


def of(settings: ServerSettings) -> Browser:
    """The browser of a server. Raises ``HostError`` for invalid settings, and where a package is
    missing."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        fix = "pip install 'vllm-mlx-harmony-server[browser]'"
        raise HostError(f"--web-search needs the package {missing[0]}: {fix}")
    for name in ("httpx2", "primp", "ddgs"):
        logging.getLogger(name).setLevel(logging.WARNING)  # at ``info``, they log queries and URLs
    from vllm_mlx_harmony.server.tools.browser.browser import Browser
    from vllm_mlx_harmony.server.tools.browser.engines import engine_of
    from vllm_mlx_harmony.server.tools.browser.fetching import Fetcher
    from vllm_mlx_harmony.server.tools.guarded_http import UrlPattern

    intranet = [UrlPattern.read(pattern) for pattern in settings.web_intranet]
    return Browser(engine_of(settings.web_search), Fetcher(intranet))
