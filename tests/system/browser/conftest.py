"""A real server with the inspector, a gateway in front of it, and a Chromium from npm.

``CHROMIUM_DIR`` is a directory in which Chromium is unpacked already. ``PICTURES`` is one for the
pictures of docs/inspector.md: ``PICTURES=docs/pictures python3 ci/leg.py browser``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_engines
import pytest
import server as served
from sites import KEY, MODEL, SCRIPTS, Open, Picture, Site

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.settings import load

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE = Path(__file__).parent


SHOWN = {
    "list-light-1200": "list",
    "request-light-1200": "request",
    "request-dark-1200": "request-dark",
    "request-light-390": "narrow",
}

OWN_WORDS = ("VLLM_MLX_HARMONY_GRAMMAR", "off")
"""A script may have a header that no grammar lets through."""


@pytest.fixture(scope="session")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """vllm-mlx with the plugin."""
    place = tmp_path_factory.mktemp("server")
    model = standin.write(place / "model", SCRIPTS)
    flags = ("--served-model-name", MODEL, "--api-key", KEY)
    variables = {
        "VLLM_MLX_HARMONY_INSPECT": "1",
        "VLLM_MLX_HARMONY_ID_ENDPOINT": "1",
        OWN_WORDS[0]: OWN_WORDS[1],
    }
    command = served.HARMONY
    running = served.start(
        model, *served.FLAG, *flags, home=place / "home", command=command, env=variables
    )
    yield Site(running.base_url)
    running.stop()


@pytest.fixture(scope="session")
def behind_gateway(direct: Site) -> Iterator[Site]:
    """A gateway in front of it."""
    engine = {"url": direct.url, "kind": "vllm-mlx", "key": KEY}
    given = {"engines": [engine], "model": MODEL, "keys": [KEY], "inspect": True}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(*OWN_WORDS)
        with fake_engines.served(gateway(load(given, {}))) as url:
            yield Site(url)


@pytest.fixture(scope="session", params=["direct", "behind_gateway"])
def site(request: pytest.FixtureRequest) -> Site:
    """Each of the two."""
    found: Site = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with Chromium, its libraries and a font."""
    if given := os.environ.get("CHROMIUM_DIR"):
        return Path(given)
    packages, place = tmp_path_factory.mktemp("npm"), tmp_path_factory.mktemp("chromium")
    shutil.copy(HERE / "package.json", packages)
    installing = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run(installing, cwd=packages, check=True, timeout=300)
    package = packages / "node_modules/@sparticuz/chromium"
    subprocess.run(["node", HERE / "unpack.mjs", package, place], check=True, timeout=120)
    for archive in place.glob("*.tar"):
        with tarfile.open(archive) as opened:
            opened.extractall(place, filter="data")
        archive.unlink()
    shutil.rmtree(packages)
    return place


@pytest.fixture(scope="session")
def browser(chromium: Path) -> Iterator[Browser]:
    """Chromium without a window. Its sandbox needs rights that containers do not give."""
    from playwright.sync_api import sync_playwright

    libraries = ":".join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), str(chromium / "lib")]))
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=chromium / "chromium",
            args=["--no-sandbox", "--headless=shell"],
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
        )
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens the inspector of a site and logs in; ``options`` are those of a browser's context.

    Afterwards, no page may have had an error, and none may have loaded anything from elsewhere.
    """
    contexts, problems = [], []

    def opened(site: Site, path: str = "", **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: line.type == "error" and problems.append(line.text))
        page.on(
            "request",
            lambda each: each.url.startswith((site.url, "blob:")) or problems.append(each.url),
        )
        page.goto(f"{site.url}/harmony{path}")
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        page.get_by_text("live", exact=True).wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [each for each in problems if "401" not in each] == []


@pytest.fixture
def picture() -> Picture:
    """Takes a screenshot, if it is wanted."""

    def take(page: Page, name: str) -> None:
        directory, shown = os.environ.get("PICTURES"), SHOWN.get(name)
        if directory and shown:
            page.screenshot(path=Path(directory) / f"inspector-{shown}.png")

    return take
