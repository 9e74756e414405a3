"""A real server with the inspector, a gateway in front of it, and a Chromium from npm.

``CHROMIUM_DIR`` is a directory with an unpacked Chromium. ``PICTURES`` is the directory for the
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

import pytest
import server_process
from app_server import run_server
from inspected_server import KEY, MODEL, SCRIPTS, OpenPage, Site, TakeScreenshot

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.settings import load

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE = Path(__file__).parent


PICTURE_NAMES = {
    "list-light-1200": "list",
    "request-light-1200": "request",
    "request-dark-1200": "request-dark",
    "request-light-390": "narrow",
}

ENFORCEMENT = {"VLLM_MLX_HARMONY_GRAMMAR": "off", "VLLM_MLX_HARMONY_REPETITIONS": "1000"}
"""A script has a header that a grammar would forbid. Only reasoning that is limited can be ended,
and one script repeats a word 400 times."""


@pytest.fixture(scope="session")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """vllm-mlx with the plugin."""
    directory = tmp_path_factory.mktemp("server")
    model = standin.write(directory / "model", SCRIPTS)
    flags = ("--served-model-name", MODEL, "--api-key", KEY)
    variables = {
        "VLLM_MLX_HARMONY_INSPECT": "1",
        "VLLM_MLX_HARMONY_ID_ENDPOINT": "1",
        **ENFORCEMENT,
    }
    command = server_process.HARMONY
    server = server_process.start(
        model, *server_process.FLAG, *flags, home=directory / "home", command=command, env=variables
    )
    yield Site(server.base_url)
    server.stop()


@pytest.fixture(scope="session")
def behind_gateway(direct: Site) -> Iterator[Site]:
    """A gateway in front of that server."""
    engine = {"url": direct.url, "kind": "vllm-mlx", "key": KEY}
    settings = {"engines": [engine], "model": MODEL, "keys": [KEY], "inspect": True}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in ENFORCEMENT.items():
            monkeypatch.setenv(name, value)
        with run_server(gateway(load(settings, {}))) as url:
            yield Site(url)


@pytest.fixture(scope="session", params=["direct", "behind_gateway"])
def site(request: pytest.FixtureRequest) -> Site:
    """The server and the gateway in turn."""
    site: Site = request.getfixturevalue(request.param)
    return site


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with Chromium, its libraries and a font."""
    if prepared := os.environ.get("CHROMIUM_DIR"):
        return Path(prepared)
    packages, directory = tmp_path_factory.mktemp("npm"), tmp_path_factory.mktemp("chromium")
    shutil.copy(HERE / "package.json", packages)
    install_command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run(install_command, cwd=packages, check=True, timeout=300)
    package = packages / "node_modules/@sparticuz/chromium"
    subprocess.run(["node", HERE / "unpack.mjs", package, directory], check=True, timeout=120)
    for archive in directory.glob("*.tar"):
        with tarfile.open(archive) as tar:
            tar.extractall(directory, filter="data")
        archive.unlink()
    shutil.rmtree(packages)
    return directory


@pytest.fixture(scope="session")
def browser(chromium: Path) -> Iterator[Browser]:
    """Headless Chromium. Its sandbox needs rights that containers lack."""
    from playwright.sync_api import sync_playwright

    libraries = ":".join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), str(chromium / "lib")]))
    with sync_playwright() as playwright:
        chromium_browser = playwright.chromium.launch(
            executable_path=chromium / "chromium",
            args=["--no-sandbox", "--headless=shell"],
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
        )
        yield chromium_browser
        chromium_browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens the inspector of a site and logs in; ``options`` are those of a browser's context.

    Fails at the end if a page had an error or loaded anything from another site.
    """
    contexts, problems = [], []

    def open_inspector(site: Site, path: str = "", **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: line.type == "error" and problems.append(line.text))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((site.url, "blob:")) or problems.append(request.url)
            ),
        )
        page.goto(f"{site.url}/harmony{path}")
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        page.get_by_text("live", exact=True).wait_for()
        return page

    yield open_inspector
    for context in contexts:
        context.close()
    assert [problem for problem in problems if "401" not in problem] == []


@pytest.fixture
def take_screenshot() -> TakeScreenshot:
    """Takes a screenshot if ``PICTURES`` is set."""

    def take(page: Page, name: str) -> None:
        directory, picture_name = os.environ.get("PICTURES"), PICTURE_NAMES.get(name)
        if directory and picture_name:
            page.screenshot(path=Path(directory) / f"inspector-{picture_name}.png")

    return take
