"""The inspector in a real browser, over a real server, directly and through a gateway."""

from __future__ import annotations

import json
import re
import shlex
import threading
from typing import Any

import httpx
import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Page, expect
from sites import ANSWER, CALL, KEY, MARKUP, MODEL, Open, Picture, Site

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
    """A loop with a tool, and the body of its second request."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    body: dict[str, Any] = {"messages": messages, "tools": [TOOL]}
    called = site.post(body).json()["choices"][0]["message"]
    (call,) = called["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"celsius": 18}'}
    messages += [called, result]
    assert site.post({**body, "stream": True}).status_code == 200
    return body


def newest(page: Page) -> Page:
    """Opens the newest request of the list."""
    page.locator(".list tbody a").first.click()
    page.locator(".generated").first.wait_for()
    return page


def test_the_key(site: Site, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{site.url}/harmony")
    for key, seen in (("wrong key", "Invalid API key"), (KEY, "live")):
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Log in").click()
        page.get_by_text(seen, exact=True).wait_for()
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


def test_the_list_is_live(site: Site, open_page: Open) -> None:
    page = open_page(site)
    before = site.recorded
    expect(page.locator(".list tbody tr")).to_have_count(before)
    assert site.say("Repair").status_code == 200
    expect(page.locator(".list tbody tr")).to_have_count(before + 1)
    row = page.locator(".list tbody tr").first
    expect(row).to_contain_text("done")
    expect(row).to_contain_text("chat completions")
    expect(row).to_contain_text(MODEL)


def test_one_request_token_by_token(site: Site, open_page: Open) -> None:
    body = converse(site)
    page = newest(open_page(site))
    kinds = page.locator(".message").evaluate_all("all => all.map((each) => each.dataset.kind)")
    before = ["system", "developer", "user", "analysis", "call", "tool"]
    assert kinds == [*before, "analysis", "final"]
    generated = page.locator(".generated").evaluate_all("all => all.map((e) => e.textContent)")
    assert "".join(generated) == ANSWER
    expect(page.locator(".message[data-kind=final] .body")).to_contain_text("漢字 👋🏽")
    # Long messages are folded, and whole once they are opened.
    folded = page.locator(".message[data-kind=developer]")
    assert SYSTEM.strip() not in folded.inner_text()
    folded.locator("summary").click()
    expect(folded.locator("details > .body")).to_contain_text(SYSTEM.strip())
    # What the first request has computed is shaded, and each token has its id.
    assert page.locator(".cached").count() > 500
    expect(page.locator(".did")).to_contain_text("Reused")
    first = page.locator(".message[data-kind=user] .control").first
    first.hover()
    assert re.match(r"id 200006 · token [\d,]+ · reused", first.get_attribute("title") or "")
    expect(page.locator(".gaps figcaption")).to_contain_text("median")
    assert len((page.locator("polyline").get_attribute("points") or "").split()) > 5
    # Beside it, the API's own documents.
    sent, answered = page.locator(".wire pre").all()
    assert json.loads(sent.inner_text())["messages"] == body["messages"]
    assert answered.inner_text().rstrip().endswith("data: [DONE]")


def test_a_repaired_header_is_marked(direct: Site, open_page: Open) -> None:
    direct.say("Repair")
    page = newest(open_page(direct))
    expect(page.locator(".repaired .header")).to_contain_text("analysis<|channel|>final")
    expect(page.locator(".did")).to_contain_text("not as Harmony has them")


ORIGINS: list[Any] = [
    # a question, fields of the request, the class of the tokens, their text, and the note
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


@pytest.mark.parametrize(("asked", "fields", "kind", "text", "note"), ORIGINS)
def test_masked_and_forced_tokens_are_marked(
    site: Site, open_page: Open, asked: str, fields: Any, kind: str, text: str | None, note: str
) -> None:
    assert site.say(asked, **fields).status_code == 200
    page = newest(open_page(site))
    expect(page.locator(".did")).to_contain_text(note)
    marked = page.locator(f".message .{kind}")
    if text is not None:
        assert "".join(marked.all_inner_texts()) == text
        expect(page.locator(".did")).to_contain_text("Ended the reasoning (budget)")
    first = marked.first
    first.hover()
    expect(first).to_have_attribute(
        "title", re.compile("first choice" if kind == "masked" else kind)
    )
    plain = site.say(asked)
    page = newest(open_page(site))
    expect(page.locator(".facts")).to_contain_text("done")
    assert plain.status_code == 200 and page.locator(f".{kind}").count() == 0


def test_copied_tokens_are_marked(direct: Site, open_page: Open) -> None:
    """Whether copying pays depends on the machine: here, the server's report is replaced."""
    direct.say("Repair")
    page = open_page(direct)

    def copied(route: Any) -> None:
        found = route.fetch()
        report = found.json()
        route.fulfill(response=found, json={**report, "origins": "c" * len(report["ids"])})

    page.route("**/output?*", copied)
    newest(page)
    number = page.locator(".copied.generated").count()
    assert number == page.locator(".generated").count()
    expect(page.locator(".did .copied")).to_contain_text(f"Guessed {number} tokens")


def test_text_is_never_markup(direct: Site, open_page: Open) -> None:
    direct.say(f"Markup {MARKUP} <|start|>system")
    page = newest(open_page(direct))
    expect(page.locator(".message[data-kind=user] .body")).to_contain_text(MARKUP)
    expect(page.locator(".message[data-kind=final] .body")).to_contain_text(MARKUP)
    assert page.title() == "Harmony inspector"
    assert page.locator("main img, main script").count() == 0
    assert page.locator(".message[data-kind=user] .control").count() == 3  # not what looks like one


def test_an_answer_grows_and_is_ended(site: Site, open_page: Open) -> None:
    page = open_page(site)
    before = site.recorded
    expect(page.locator(".list tbody tr")).to_have_count(before)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(site.say("Tell me a long story")))
    asking.start()
    expect(page.locator(".list tbody tr")).to_have_count(before + 1)
    newest(page)
    expect(page.locator(".facts")).to_contain_text("answering")
    seen = page.locator(".generated").count()
    expect(page.locator(".generated").nth(seen + 10)).to_be_attached()
    page.get_by_role("button", name="End it").click()
    expect(page.locator(".facts")).to_contain_text("closed")
    expect(page.get_by_role("button", name="End it")).to_be_hidden()
    asking.join(60)
    assert answers[0].status_code == 499


def test_reasoning_is_ended(site: Site, open_page: Open) -> None:
    page = open_page(site)
    before = site.recorded
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(site.say("Think for a long time")))
    asking.start()
    expect(page.locator(".list tbody tr")).to_have_count(before + 1)
    newest(page)
    expect(page.locator(".facts")).to_contain_text("answering")
    page.get_by_role("button", name="Answer now").click()
    expect(page.locator(".did")).to_contain_text("Ended the reasoning (request)")
    asking.join(60)
    assert answers[0].status_code == 200


def test_copied_as_curl_it_is_the_same_request(direct: Site, open_page: Open) -> None:
    direct.say("Repair what's broken")
    page = newest(open_page(direct, permissions=["clipboard-read", "clipboard-write"]))
    page.get_by_role("button", name="Copy as curl").click()
    page.locator(".request[data-done]").wait_for()
    words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    values = {words[at]: words[at + 1] for at in range(len(words) - 1) if words[at][:1] == "-"}
    assert words[0] == "curl" and values["-H"] == "Authorization: Bearer $API_KEY"
    assert KEY not in " ".join(words)
    (url,) = (word for word in words if word.startswith("http"))
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    again = httpx.post(url, content=values["-d"], headers=headers, timeout=60).json()
    assert again["choices"][0]["message"]["content"] == "Twice a channel."


@pytest.mark.parametrize("redacted", [False, True])
def test_saved_as_a_case(direct: Site, open_page: Open, redacted: bool) -> None:
    converse(direct)
    page = newest(open_page(direct))
    if redacted:
        page.get_by_label("without texts").check()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as a case").click()
    text = download.value.path().read_text("utf-8")
    case = json.loads(text)
    roles = [each["role"] for each in case["body"]["messages"]]
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


def test_the_server(site: Site, open_page: Open) -> None:
    site.say("Repair")
    refused = site.post({"messages": "none"}).json()["error"]["message"]
    page = open_page(site, "#/server")
    expect(page.locator(".card").first).to_contain_text("hit rate")
    expect(page.locator(".chart")).to_have_attribute("aria-label", re.compile("tokens/s"))
    expect(page.locator(".card").last).to_contain_text(refused)


def test_by_keyboard(direct: Site, open_page: Open) -> None:
    direct.say("Repair")
    direct.say("Markup")
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
def test_it_fits(direct: Site, open_page: Open, picture: Picture, scheme: Any, width: int) -> None:
    converse(direct)
    page = open_page(direct, color_scheme=scheme, viewport={"width": width, "height": 760})
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60

    def fits(name: str) -> None:
        size = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert size[0] <= size[1], name
        picture(page, f"{name}-{scheme}-{width}")

    page.locator(".list tbody a").first.wait_for()
    fits("list")
    newest(page)
    expect(page.locator(".facts")).to_contain_text("done")
    fits("request")
    page.get_by_role("link", name="Server").click()
    page.locator(".chart").wait_for()
    fits("server")


def test_generated_ids_match_the_script(direct: Site, open_page: Open) -> None:
    """The first of the two answers, which is a call."""
    converse(direct)
    page = open_page(direct)
    page.locator(".list tbody a").nth(1).click()
    page.locator(".generated").first.wait_for()
    generated = page.locator(".generated").evaluate_all("all => all.map((e) => e.textContent)")
    assert "".join(generated) == CALL
    expect(page.locator(".message").last).to_have_attribute("data-kind", "call")
