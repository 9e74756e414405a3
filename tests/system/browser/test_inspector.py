"""The inspector in a real browser, on a real server and behind a gateway."""

from __future__ import annotations

import json
import re
import shlex
import threading
from typing import Any

import httpx
import pytest

pytest.importorskip("playwright")

from inspected_server import ANSWER, CALL, KEY, MARKUP, MODEL, OpenPage, Site, TakeScreenshot
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.served
expect.set_options(timeout=20_000)

QUESTION = "What is the weather in Paris?"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city, now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SYSTEM = "Answer briefly, and only what was asked. " * 80


def converse(site: Site) -> dict[str, Any]:
    """Runs a tool loop. Returns the body of its second request."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    body: dict[str, Any] = {"messages": messages, "tools": [TOOL]}
    message = site.post(body).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"celsius": 18}'}
    messages += [message, result]
    assert site.post({**body, "stream": True}).status_code == 200
    return body


def open_newest(page: Page) -> Page:
    """Opens the newest request of the list."""
    page.locator(".list tbody a").first.click()
    page.locator(".generated").first.wait_for()
    return page


def test_login_requires_the_key(site: Site, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{site.url}/harmony")
    for key, expected in (("wrong key", "Invalid API key"), (KEY, "live")):
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Log in").click()
        page.get_by_text(expected, exact=True).wait_for()
    (cookie,) = context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and KEY not in cookie["value"]
    assert page.evaluate("document.cookie") == ""
    page.reload()  # the cookie is enough
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("API key").wait_for()
    page.reload()
    page.get_by_label("API key").wait_for()
    context.close()


def test_new_request_appears_in_open_list(site: Site, open_page: OpenPage) -> None:
    page = open_page(site)
    before = site.request_count
    expect(page.locator(".list tbody tr")).to_have_count(before)
    assert site.send_message("Repair").status_code == 200
    expect(page.locator(".list tbody tr")).to_have_count(before + 1)
    row = page.locator(".list tbody tr").first
    expect(row).to_contain_text("done")
    expect(row).to_contain_text("chat completions")
    expect(row).to_contain_text(MODEL)


def test_request_is_shown_token_by_token(site: Site, open_page: OpenPage) -> None:
    body = converse(site)
    page = open_newest(open_page(site))
    kinds = page.locator(".message").evaluate_all("all => all.map((each) => each.dataset.kind)")
    history = ["system", "developer", "user", "analysis", "call", "tool"]
    assert kinds == [*history, "analysis", "final"]
    generated = page.locator(".generated").evaluate_all("all => all.map((e) => e.textContent)")
    assert "".join(generated) == ANSWER
    expect(page.locator(".message[data-kind=final] .body")).to_contain_text("漢字 👋🏽")
    # Long messages are folded until they are opened.
    folded_message = page.locator(".message[data-kind=developer]")
    assert SYSTEM.strip() not in folded_message.inner_text()
    folded_message.locator("summary").click()
    expect(folded_message.locator("details > .body")).to_contain_text(SYSTEM.strip())
    # Tokens that the first request computed are shaded, and each token has its id.
    assert page.locator(".cached").count() > 500
    expect(page.locator(".did")).to_contain_text("Reused")
    first_token = page.locator(".message[data-kind=user] .control").first
    first_token.hover()
    assert re.match(r"id 200006 · token [\d,]+ · reused", first_token.get_attribute("title") or "")
    expect(page.locator(".gaps figcaption")).to_contain_text("median")
    assert len((page.locator("polyline").get_attribute("points") or "").split()) > 5
    # Next to it are the documents of the API.
    request, response = page.locator(".wire pre").all()
    assert json.loads(request.inner_text())["messages"] == body["messages"]
    assert response.inner_text().rstrip().endswith("data: [DONE]")


def test_repaired_header_is_marked(direct: Site, open_page: OpenPage) -> None:
    direct.send_message("Repair")
    page = open_newest(open_page(direct))
    expect(page.locator(".repaired .header")).to_contain_text("analysis<|channel|>final")
    expect(page.locator(".did")).to_contain_text("not as Harmony has them")


ORIGINS: list[Any] = [
    # prompt, fields of the request, class of the tokens, their text, note
    (
        "Think",
        {"thinking_token_budget": 9},
        "forced",
        "<|end|><|start|>assistant",
        "Forced 3 tokens",
    ),
    (
        "Be brief",
        {"min_tokens": 6},
        "masked",
        None,
        "Masked the model's first choice before 1 token",
    ),
]


@pytest.mark.parametrize(("prompt", "fields", "kind", "text", "note"), ORIGINS)
def test_masked_and_forced_tokens_are_marked(
    site: Site,
    open_page: OpenPage,
    prompt: str,
    fields: Any,
    kind: str,
    text: str | None,
    note: str,
) -> None:
    assert site.send_message(prompt, **fields).status_code == 200
    page = open_newest(open_page(site))
    expect(page.locator(".did")).to_contain_text(note)
    marked_tokens = page.locator(f".message .{kind}")
    if text is not None:
        assert "".join(marked_tokens.all_inner_texts()) == text
        expect(page.locator(".did")).to_contain_text("Ended the reasoning (budget)")
    first_token = marked_tokens.first
    first_token.hover()
    expect(first_token).to_have_attribute(
        "title", re.compile("first choice" if kind == "masked" else kind)
    )
    unrestricted = site.send_message(prompt)
    page = open_newest(open_page(site))
    expect(page.locator(".facts")).to_contain_text("done")
    assert unrestricted.status_code == 200 and page.locator(f".{kind}").count() == 0


def test_copied_tokens_are_marked(direct: Site, open_page: OpenPage) -> None:
    """Whether tokens are copied depends on the machine, so the server's report is replaced."""
    direct.send_message("Repair")
    page = open_page(direct)

    def mark_as_copied(route: Any) -> None:
        response = route.fetch()
        report = response.json()
        route.fulfill(response=response, json={**report, "origins": "c" * len(report["ids"])})

    page.route("**/output?*", mark_as_copied)
    open_newest(page)
    copied_count = page.locator(".copied.generated").count()
    assert copied_count == page.locator(".generated").count()
    expect(page.locator(".did .copied")).to_contain_text(f"Guessed {copied_count} tokens")


def test_text_is_never_markup(direct: Site, open_page: OpenPage) -> None:
    direct.send_message(f"Markup {MARKUP} <|start|>system")
    page = open_newest(open_page(direct))
    expect(page.locator(".message[data-kind=user] .body")).to_contain_text(MARKUP)
    expect(page.locator(".message[data-kind=final] .body")).to_contain_text(MARKUP)
    assert page.title() == "Harmony inspector"
    assert page.locator("main img, main script").count() == 0
    # text that looks like a control token is none
    assert page.locator(".message[data-kind=user] .control").count() == 3


def test_growing_answer_is_ended_by_button(site: Site, open_page: OpenPage) -> None:
    page = open_page(site)
    before = site.request_count
    expect(page.locator(".list tbody tr")).to_have_count(before)
    responses: list[httpx.Response] = []
    sender = threading.Thread(
        target=lambda: responses.append(site.send_message("Tell me a long story"))
    )
    sender.start()
    expect(page.locator(".list tbody tr")).to_have_count(before + 1)
    open_newest(page)
    expect(page.locator(".facts")).to_contain_text("answering")
    shown_tokens = page.locator(".generated").count()
    expect(page.locator(".generated").nth(shown_tokens + 10)).to_be_attached()
    page.get_by_role("button", name="End it").click()
    expect(page.locator(".facts")).to_contain_text("closed")
    expect(page.get_by_role("button", name="End it")).to_be_hidden()
    sender.join(60)
    assert responses[0].status_code == 499


def test_reasoning_is_ended_by_button(site: Site, open_page: OpenPage) -> None:
    page = open_page(site)
    before = site.request_count
    responses: list[httpx.Response] = []
    sender = threading.Thread(
        target=lambda: responses.append(site.send_message("Think for a long time"))
    )
    sender.start()
    expect(page.locator(".list tbody tr")).to_have_count(before + 1)
    open_newest(page)
    expect(page.locator(".facts")).to_contain_text("answering")
    page.get_by_role("button", name="Answer now").click()
    expect(page.locator(".did")).to_contain_text("Ended the reasoning (request)")
    sender.join(60)
    assert responses[0].status_code == 200


def test_curl_command_repeats_the_request(direct: Site, open_page: OpenPage) -> None:
    direct.send_message("Repair what's broken")
    page = open_newest(open_page(direct, permissions=["clipboard-read", "clipboard-write"]))
    page.get_by_role("button", name="Copy as curl").click()
    page.locator(".request[data-done]").wait_for()
    words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    values = {words[at]: words[at + 1] for at in range(len(words) - 1) if words[at][:1] == "-"}
    assert words[0] == "curl" and values["-H"] == "Authorization: Bearer $API_KEY"
    assert KEY not in " ".join(words)
    (url,) = (word for word in words if word.startswith("http"))
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    completion = httpx.post(url, content=values["-d"], headers=headers, timeout=60).json()
    assert completion["choices"][0]["message"]["content"] == "Twice a channel."


@pytest.mark.parametrize("redacted", [False, True])
def test_request_is_saved_as_a_case(direct: Site, open_page: OpenPage, redacted: bool) -> None:
    converse(direct)
    page = open_newest(open_page(direct))
    if redacted:
        page.get_by_label("without texts").check()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as a case").click()
    text = download.value.path().read_text("utf-8")
    case = json.loads(text)
    roles = [message["role"] for message in case["body"]["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert (case["api"], case["path"]) == ("chat_completions", "/v1/chat/completions")
    if redacted:
        assert not re.search("paris|weather|brief|celsius", text, re.IGNORECASE)
        assert case["body"]["messages"][1]["content"] == "xxxx xx xxx xxxxxxx xx xxxxx?"
        assert not {"answer", "prompt_ids", "output_ids"} & case.keys()
    else:
        assert case["body"]["messages"][1]["content"] == QUESTION
        assert len(case["output_ids"]) == case["summary"]["generated"]
        assert len(case["prompt_ids"]) == case["summary"]["prompt"]


def test_server_page_shows_cache_speed_and_errors(site: Site, open_page: OpenPage) -> None:
    site.send_message("Repair")
    error = site.post({"messages": "none"}).json()["error"]["message"]
    page = open_page(site, "#/server")
    expect(page.locator(".card").first).to_contain_text("hit rate")
    expect(page.locator(".chart")).to_have_attribute("aria-label", re.compile("tokens/s"))
    expect(page.locator(".card").last).to_contain_text(error)


def test_keyboard_opens_request_and_server_page(direct: Site, open_page: OpenPage) -> None:
    direct.send_message("Repair")
    direct.send_message("Markup")
    page = open_page(direct)
    page.locator(".list tbody a").nth(1).wait_for()
    for key in ("ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    second = page.locator(".list tbody a").nth(1)
    expect(second).to_be_focused()
    page.keyboard.press("Enter")
    page.locator(".repaired").wait_for()
    page.keyboard.press("s")
    page.locator(".chart").wait_for()
    page.keyboard.press("Escape")
    page.locator(".list").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390, 320])
def test_pages_fit_the_window(
    direct: Site, open_page: OpenPage, take_screenshot: TakeScreenshot, scheme: Any, width: int
) -> None:
    converse(direct)
    page = open_page(direct, color_scheme=scheme, viewport={"width": width, "height": 760})
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60

    def assert_fits(name: str) -> None:
        size = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert size[0] <= size[1], name
        take_screenshot(page, f"{name}-{scheme}-{width}")

    page.locator(".list tbody a").first.wait_for()
    assert_fits("list")
    open_newest(page)
    expect(page.locator(".facts")).to_contain_text("done")
    assert_fits("request")
    page.get_by_role("link", name="Server").click()
    page.locator(".chart").wait_for()
    assert_fits("server")


def test_generated_ids_match_the_script(direct: Site, open_page: OpenPage) -> None:
    """In the first of two answers, which is a call."""
    converse(direct)
    page = open_page(direct)
    page.locator(".list tbody a").nth(1).click()
    page.locator(".generated").first.wait_for()
    generated = page.locator(".generated").evaluate_all("all => all.map((e) => e.textContent)")
    assert "".join(generated) == CALL
    expect(page.locator(".message").last).to_have_attribute("data-kind", "call")
