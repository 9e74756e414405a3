"""Web search in each API: a scripted model, a search engine and pages on 127.0.0.1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx2")
pytest.importorskip("lxml")
pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")


import fake_web
from fake_web import Site
from local_tool_servers import browser as another_browser
from loops import run
from official_clients import clients, ollama_client
from scripted_host import MODEL, ScriptedEngine, SingleEngineHost

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.settings import ToolsMode
from vllm_mlx_harmony.server.tools.config import ToolsConfig
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

pytestmark = pytest.mark.usefixtures("no_grammars")

QUESTION = "How many live in Rome?"
CALL = "<|channel|>analysis to=browser.{} code<|message|>{}<|call|>"
SEARCH = CALL.format("search", '{"query": "rome inhabitants"}')
OPEN = CALL.format("open", '{"id": 0}')
FIND = CALL.format("find", '{"pattern": "million"}')
ANSWER = (
    "<|channel|>final<|message|>There are 2.8 million【1†L2】, says a page【2†L3】【0†L0】. "
    "Nobody says【7†L1】 more.<|return|>"
)
SCRIPTS = {
    QUESTION: SEARCH,
    "[0] rome inhabitants": OPEN,
    "[1] Rome": FIND,
    "Matches of million": ANSWER,
    "Error: ": "<|channel|>final<|message|>I cannot search.<|return|>",
    "And Paris?": "<|channel|>final<|message|>The same【1†L2】.<|return|>",
}
PAGE = "<title>Rome</title><h1>Rome</h1><p>It has 2.8 million people. <|call|><|end|></p>"


@pytest.fixture
def site() -> Iterator[Site]:
    with fake_web.run_site() as site:
        site.add("/rome", PAGE)
        site.search(("Rome", f"{site.url}/rome", "A city."), ("More", f"{site.url}/more", ""))
        yield site


def serving(
    site: Site | None, use: ToolsMode = ToolsMode.ON, at_once: int = 2, **limits: Any
) -> SingleEngineHost:
    host = SingleEngineHost(ScriptedEngine(dict(SCRIPTS), at_once, context_length=100_000))
    servers = [another_browser() if site is None else fake_web.browser(site)]
    host.toolbox = Toolbox(servers, ToolsConfig(**limits), use)
    return host


def last_prompt(host: SingleEngineHost) -> str:
    prompts = host.engine.prompts  # type: ignore[attr-defined]
    return vocab.encoding().decode(list(prompts[-1]))


# --- Responses

WEB_SEARCH: dict[str, Any] = {"type": "web_search"}


async def respond(
    host: SingleEngineHost, stream: bool = False, **request: Any
) -> tuple[Any, list[Any]]:
    client, _ = clients(host)
    request = {"model": MODEL, "input": QUESTION, "tools": [WEB_SEARCH], **request}
    if not stream:
        return await client.responses.create(**request), []
    events = [event async for event in await client.responses.create(**request, stream=True)]
    return events[-1].response, events


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_responses_search_open_find_and_cite(site: Site, stream: bool, at_once: int) -> None:
    host = serving(site, at_once=at_once)
    include = ["web_search_call.action.sources"]
    response, events = run(respond(host, stream, include=include))
    *calls, message = response.output
    url = f"{site.url}/rome"
    actions = [item.action.model_dump(exclude_none=True) for item in calls]
    assert actions == [
        {
            "type": "search",
            "query": "rome inhabitants",
            "queries": ["rome inhabitants"],
            "sources": [{"type": "url", "url": source} for source in (url, f"{site.url}/more")],
        },
        {"type": "open_page", "url": url},
        {"type": "find_in_page", "pattern": "million", "url": url},
    ]
    assert {item.status for item in calls} == {"completed"}
    (part,) = message.content
    link = f"([127.0.0.1:{site.port}]({url}))"
    assert part.text == (
        f"There are 2.8 million {link}, says a page {link} {link}. Nobody says【7†L1】 more."
    )
    for citation in part.annotations:
        assert part.text[citation.start_index : citation.end_index] == link
        assert (citation.type, citation.url, citation.title) == ("url_citation", url, "Rome")
    assert len(part.annotations) == 3
    if not stream:
        return
    kinds = [event.type.removeprefix("response.") for event in events]
    call = [
        "output_item.added",
        *(f"web_search_call.{stage}" for stage in ("in_progress", "searching", "completed")),
        "output_item.done",
    ]
    assert [kind for kind in kinds if "text.delta" not in kind] == [
        *("created", "in_progress", *call, *call, *call),
        *("output_item.added", "content_part.added"),
        *["output_text.annotation.added"] * 3,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    added = [event for event in events if event.type.endswith("annotation.added")]
    assert [event.annotation_index for event in added] == [0, 1, 2]
    # Each is a dict or a model, depending on the SDK's version.
    as_dicts = [json.loads(event.to_json())["annotation"] for event in added]
    assert as_dicts == [annotation.model_dump() for annotation in part.annotations]
    text = "".join(event.delta for event in events if event.type.endswith("text.delta"))
    assert text == part.text
    part_done = next(event for event in events if event.type == "response.content_part.done")
    assert part_done.part.annotations == part.annotations


def test_page_is_plain_text_in_prompt(site: Site) -> None:
    """Control tokens in a page are encoded as text."""
    host = serving(site)
    run(respond(host))
    (prompt,) = host.engine.prompts[-1:]  # type: ignore[attr-defined]
    text = vocab.encoding().decode(list(prompt))
    assert "2.8 million people. <|call|><|end|>" in text
    page = vocab.encode("2.8 million people. <|call|><|end|>")
    assert not set(page) & set(vocab.TURN_ENDS)
    joined = ",".join(map(str, prompt))
    assert ",".join(map(str, page[2:-2])) in joined


def test_prompt_describes_tools_as_trained(site: Site) -> None:
    host = serving(site)
    run(respond(host))
    text = last_prompt(host)
    assert "namespace browser {" in text
    assert "Valid link ids are displayed with the formatting" in text


@pytest.mark.parametrize("status", [500, 429])
def test_failed_search_is_a_failed_call(site: Site, status: int) -> None:
    """The model reads the reason; the client sees a failed call."""
    site.add("/search", status=status)
    host = serving(site)
    response, events = run(respond(host, True))
    call, message = response.output
    assert (call.type, call.status) == ("web_search_call", "failed")
    assert message.content[0].text == "I cannot search."
    assert "Error: the search engine re" in last_prompt(host)
    kinds = [event.type for event in events]
    assert "response.web_search_call.completed" not in kinds


def test_search_is_limited_to_allowed_domains(site: Site) -> None:
    host = serving(site)
    filters = {"allowed_domains": ["a.example"]}
    tools = [{**WEB_SEARCH, "filters": filters}]
    host.engine.scripts["No results were found."] = ANSWER  # type: ignore[attr-defined]
    run(respond(host, tools=tools))
    assert site.queries() == ["rome inhabitants site:a.example"]


def test_blocked_domains_hold_for_all_tools(site: Site) -> None:
    """The browser may also be named as a server, or twice: no tool undoes the limits of another."""
    forbidden = {**WEB_SEARCH, "filters": {"blocked_domains": ["127.0.0.1"]}}
    mcp = {"type": "mcp", "server_label": "browser", "require_approval": "never"}
    for tools in ([mcp, forbidden], [forbidden, WEB_SEARCH], [WEB_SEARCH, forbidden]):
        host = serving(site)
        host.engine.scripts["No results were found."] = ANSWER  # type: ignore[attr-defined]
        run(respond(host, tools=tools))
        assert f"{site.url}/rome" not in last_prompt(host), tools


def test_browser_without_domain_limits_is_rejected() -> None:
    tools = [{**WEB_SEARCH, "filters": {"allowed_domains": ["a.example"]}}]
    with pytest.raises(Exception, match="cannot be limited to domains") as error:
        run(respond(serving(None), tools=tools))
    assert error.value.status_code == 400  # type: ignore[attr-defined]


def test_search_without_web_access_is_unavailable(site: Site) -> None:
    """There is no index to search instead."""
    tools = [{**WEB_SEARCH, "external_web_access": False}]
    response, _ = run(respond(serving(site), tools=tools))
    assert response.model_extra["unavailable_tools"] == ["web_search"]
    assert site.requests == []


@pytest.mark.parametrize("kind", ["web_search_preview", "web_search_2025_08_26"])
def test_other_types_of_web_search_are_accepted(site: Site, kind: str) -> None:
    response, _ = run(respond(serving(site), tools=[{"type": kind}]))
    assert [item.type for item in response.output] == [*["web_search_call"] * 3, "message"]


def test_continued_response_knows_earlier_pages(site: Site) -> None:
    """Pages of the stored response can be cited, and its turn is replayed as generated."""
    host = serving(site)

    async def conversation() -> tuple[Any, Any]:
        first, _ = await respond(host)
        second, _ = await respond(host, input="And Paris?", previous_response_id=first.id)
        return first, second

    first, second = run(conversation())
    (part,) = second.output[0].content
    assert [annotation.url for annotation in part.annotations] == [f"{site.url}/rome"]
    assert "million【1†L2】, says" in last_prompt(host)
    assert first.output[-1].content[0].text not in last_prompt(host)


def test_returned_items_know_earlier_pages(site: Site) -> None:
    """The items lack what the model read; the replayed turn has it, and continues its cursors."""
    host = serving(site)
    host.engine.scripts["And Paris?"] = CALL.format("open", '{"id": 0, "cursor": 0}')  # type: ignore[attr-defined]
    host.engine.scripts["[3] Rome"] = ANSWER.replace("1†", "3†")  # type: ignore[attr-defined]

    async def conversation() -> Any:
        first, _ = await respond(host, store=False)
        items = [json.loads(item.to_json()) for item in first.output]
        question = {"role": "user", "content": QUESTION}
        again = [question, *items, {"role": "user", "content": "And Paris?"}]
        second, _ = await respond(host, input=again, store=False)
        return second

    opened, answer = run(conversation()).output
    assert opened.action.url == f"{site.url}/rome"
    assert {annotation.url for annotation in answer.content[0].annotations} == {f"{site.url}/rome"}
    assert "[2] Rome (" in last_prompt(host) and "[3] Rome (" in last_prompt(host)


# --- Messages

NATIVE: dict[str, Any] = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
USER: dict[str, Any] = {"role": "user", "content": QUESTION}


async def message(
    host: SingleEngineHost, stream: bool = False, **request: Any
) -> tuple[Any, list[Any]]:
    _, client = clients(host)
    request = {"max_tokens": 2000, "model": MODEL, "messages": [USER], "tools": [NATIVE], **request}
    if not stream:
        return await client.messages.create(**request), []
    async with client.messages.stream(**request) as stream_:
        events = [event async for event in stream_]
        return await stream_.get_final_message(), events


@pytest.mark.parametrize("at_once", [1, 1000])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages_search_open_find_and_cite(site: Site, stream: bool, at_once: int) -> None:
    host = serving(site, at_once=at_once)
    answer, events = run(message(host, stream))
    kinds = [block.type for block in answer.content]
    fetch = ["server_tool_use", "web_fetch_tool_result"]
    assert kinds == ["server_tool_use", "web_search_tool_result", *fetch, *fetch, *["text"] * 3]
    search, results, opened, page, finding, matches, *texts = answer.content
    url = f"{site.url}/rome"
    assert (search.name, search.input) == ("web_search", {"query": "rome inhabitants"})
    assert search.id.startswith("srvtoolu_") and results.tool_use_id == search.id
    assert [(result.title, result.url) for result in results.content] == [
        ("Rome", url),
        ("More", f"{site.url}/more"),
    ]
    assert (opened.name, opened.input) == ("web_fetch", {"id": 0})
    assert (page.content.url, page.content.content.title) == (url, "Rome")
    assert "It has 2.8 million people." in page.content.content.source.data
    assert (finding.name, matches.content.url) == ("web_fetch", url)
    assert [block.text for block in texts] == [
        "There are 2.8 million",
        ", says a page",
        ". Nobody says【7†L1】 more.",
    ]
    cited = [
        [(citation.url, citation.cited_text) for citation in text.citations or ()] for text in texts
    ]
    people = "It has 2.8 million people. <|call|><|end|>"
    assert cited == [[(url, people)], [(url, people), (url, "Rome")], []]
    assert answer.usage.server_tool_use.model_dump() == {
        "web_search_requests": 1,
        "web_fetch_requests": 2,
    }
    if stream:
        raw = [event.type for event in events if event.type.startswith(("content_block_", "mess"))]
        assert raw.count("content_block_start") == raw.count("content_block_stop") == 9
        deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
        assert deltas.count("citations_delta") == 3


def assistant_message(answer: Any) -> dict[str, Any]:
    content = [json.loads(block.to_json()) for block in answer.content]
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize("replays", [True, False])
def test_messages_returned_blocks_know_earlier_pages(
    site: Site, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model reads what it read before; pages of earlier turns can be cited."""
    if not replays:
        monkeypatch.setenv("VLLM_MLX_HARMONY_REPLAY", "0")
    host = serving(site)

    async def conversation() -> Any:
        first, _ = await message(host)
        again = [USER, assistant_message(first), {"role": "user", "content": "And Paris?"}]
        second, _ = await message(host, messages=again)
        return second

    second = run(conversation())
    text, _ = second.content
    assert (text.text, text.citations[0].url) == ("The same", f"{site.url}/rome")
    prompt = last_prompt(host)
    assert "[0] rome inhabitants\n**viewing lines" in prompt
    assert "[1] Rome (http" in prompt and 'browser.find code<|message|>{"pattern"' in prompt
    marked = "There are 2.8 million【1†L2】, says a page【2†L3】【0†L0】. Nobody says"
    unmarked = "There are 2.8 million, says a page. Nobody says"
    assert (marked in prompt, unmarked in prompt) == (replays, not replays)


@pytest.mark.parametrize("choice", [None, {"type": "tool", "name": "web_search"}])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_claude_code_search_is_answered(
    site: Site,
    stream: bool,
    choice: dict[str, Any] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its WebSearch sends a request with this tool only."""
    monkeypatch.delenv(enforcement.GRAMMAR_VARIABLE)
    request: dict[str, Any] = {
        "system": "You are an assistant for performing a web search tool use",
        "messages": [
            {"role": "user", "content": f"Perform a web search for the query: {QUESTION}"}
        ],
        **({"tool_choice": choice} if choice else {}),
    }
    answer, _ = run(message(serving(site), stream, **request))
    results = next(block for block in answer.content if block.type == "web_search_tool_result")
    assert [result.url for result in results.content] == [f"{site.url}/rome", f"{site.url}/more"]
    assert answer.stop_reason == "end_turn"
    assert not hasattr(answer, "unavailable_tools")


ERRORS = {
    500: "unavailable",
    429: "too_many_requests",
}


@pytest.mark.parametrize("status", ERRORS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_failed_search_is_an_error_block(site: Site, stream: bool, status: int) -> None:
    site.add("/search", status=status)
    answer, _ = run(message(serving(site), stream))
    use, result, text = answer.content
    assert result.tool_use_id == use.id
    assert result.content.type == "web_search_tool_result_error"
    assert result.content.error_code == ERRORS[status]
    assert text.text == "I cannot search."


def test_unavailable_page_is_an_error_block(site: Site) -> None:
    del site.pages["/rome"]
    answer, _ = run(message(serving(site)))
    result = answer.content[3]
    assert result.content.type == "web_fetch_tool_result_error"
    assert result.content.error_code == "url_not_accessible"


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        ({"allowed_domains": ["a"], "blocked_domains": ["b"]}, "cannot both be set"),
        ({"max_uses": 0}, "max_uses"),
        ({"allowed_domains": "a"}, "allowed_domains"),
    ],
)
def test_malformed_messages_tools_are_rejected(
    site: Site, tool: dict[str, Any], problem: str
) -> None:
    with pytest.raises(Exception, match=problem) as error:
        run(message(serving(site), tools=[{**NATIVE, **tool}]))
    assert error.value.status_code == 400  # type: ignore[attr-defined]


def test_messages_limit_domains_and_uses(site: Site) -> None:
    host = serving(site)
    host.engine.scripts["No results were found."] = SEARCH  # type: ignore[attr-defined]
    tool = {**NATIVE, "max_uses": 1, "blocked_domains": ["127.0.0.1"]}
    answer, _ = run(message(host, tools=[tool]))
    assert answer.content[1].content == []
    assert answer.content[3].content.error_code == "max_uses_exceeded"
    with pytest.raises(Exception, match="cannot be limited to domains"):
        run(message(serving(None), tools=[tool]))


def test_blocked_domains_hold_beside_toolset(site: Site) -> None:
    host = serving(site)
    host.engine.scripts["No results were found."] = ANSWER  # type: ignore[attr-defined]
    toolset = {"type": "mcp_toolset", "mcp_server_name": "browser"}
    run(message(host, tools=[toolset, {**NATIVE, "blocked_domains": ["127.0.0.1"]}]))
    assert f"{site.url}/rome" not in last_prompt(host)


def test_undeclared_tools_are_shown_as_mcp_server(site: Site) -> None:
    """A request that does not declare Anthropic's tools gets none of their blocks."""
    answer, _ = run(message(serving(site, ToolsMode.ALL), tools=[]))
    kinds = [block.type for block in answer.content[:2]]
    assert kinds == ["mcp_tool_use", "mcp_tool_result"]
    assert answer.content[-2].citations[0].url == f"{site.url}/rome"


# --- Chat Completions, and Ollama's API


async def complete(
    host: SingleEngineHost, stream: bool = False, **request: Any
) -> tuple[Any, str, list[Any]]:
    """The message or the last chunk, the content, and the annotations."""
    client, _ = clients(host)
    options: Any = {"model": MODEL, "messages": [USER], "web_search_options": {}, **request}
    if not stream:
        answer = (await client.chat.completions.create(**options)).choices[0].message
        return (
            answer,
            answer.content,
            [annotation.model_dump() for annotation in answer.annotations or ()],
        )
    chunks = [chunk async for chunk in await client.chat.completions.create(**options, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    citations = [
        annotation
        for delta in deltas
        for annotation in (delta.model_extra or {}).get("annotations", ())
    ]
    return deltas[-1], "".join(delta.content or "" for delta in deltas), citations


@pytest.mark.parametrize("on_request", [True, False], ids=["web_search_options", "tools for all"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chat_has_links_and_annotations(site: Site, stream: bool, on_request: bool) -> None:
    host = serving(site, ToolsMode.ON if on_request else ToolsMode.ALL)
    options = {} if on_request else {"web_search_options": None}
    _, content, annotations = run(complete(host, stream, **options))
    url = f"{site.url}/rome"
    link = f"([127.0.0.1:{site.port}]({url}))"
    assert content == (
        f"There are 2.8 million {link}, says a page {link} {link}. Nobody says【7†L1】 more."
    )
    assert len(annotations) == 3
    for annotation in annotations:
        cited = annotation["url_citation"]
        assert (annotation["type"], cited["url"], cited["title"]) == ("url_citation", url, "Rome")
        assert content[cited["start_index"] : cited["end_index"]] == link


def test_chat_continued_turn_is_replayed(site: Site) -> None:
    """As generated, whatever the client was shown instead."""
    host = serving(site)

    async def conversation() -> None:
        answer, *_ = await complete(host)
        sent = {"role": "assistant", "content": answer.content}
        await complete(host, messages=[USER, sent, {"role": "user", "content": "And Paris?"}])

    run(conversation())
    assert "million【1†L2】, says" in last_prompt(host)


def test_chat_rejects_unavailable_web_search() -> None:
    host = SingleEngineHost(ScriptedEngine(dict(SCRIPTS), 2))
    with pytest.raises(Exception, match="web search is not available") as error:
        run(complete(host))
    assert error.value.status_code == 400  # type: ignore[attr-defined]


def test_ollama_answer_has_links(site: Site) -> None:
    host = serving(site, ToolsMode.ALL)

    async def chat() -> Any:
        return await ollama_client(host).chat(model=MODEL, messages=[USER])

    answer = run(chat())
    assert f"2.8 million ([127.0.0.1:{site.port}]({site.url}/rome)), says" in answer.message.content


def test_models_report_web_search(site: Site) -> None:
    async def first_model(host: SingleEngineHost) -> Any:
        client, _ = clients(host)
        return (await client.models.list()).data[0].model_extra

    assert run(first_model(serving(site)))["web_search"] is True
    assert "web_search" not in run(first_model(SingleEngineHost(ScriptedEngine({}, 1))))
