"""Pictures, audio and files in the requests of all three APIs (semantics A11).

On the left a request; on the right the text of the message that has the part, which the model reads
by default, and the path of the part, which the error of a server that refuses attachments names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ciphers import Tagged

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import Defaults, Turn
from vllm_mlx_harmony.protocols import chat, messages, responses

IMAGE = "[image left out: this model reads text only]"
AUDIO = "[audio left out: this model reads text only]"
VIDEO = "[video left out: this model reads text only]"
FILE = "[file left out: this model reads text only]"

PNG = "data:image/png;base64,AAAA"
BASE64 = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def by_chat(body: Any, defaults: Defaults) -> Turn:
    return chat.read({"model": "m", **body}, defaults).turn


def by_responses(body: Any, defaults: Defaults) -> Turn:
    return responses.read({"model": "m", **body}, defaults, Tagged()).turn


def by_messages(body: Any, defaults: Defaults) -> Turn:
    return messages.read({"model": "m", "max_tokens": 9, **body}, defaults, Tagged()).turn


Read = Callable[[Any, Defaults], Turn]
Row = tuple[Read, Any, str, str]


def text_part(text: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


CHAT_CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": "{}"}}],
}
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
USE = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
USE_MESSAGE = {"role": "assistant", "content": [USE]}


def chat_row(part: dict[str, Any], line: str) -> Row:
    body = {"messages": [user(text_part("Look:"), part, text_part("Well?"))]}
    return by_chat, body, f"Look:\n{line}\nWell?", "messages[0].content[1]"


def responses_row(part: dict[str, Any], line: str) -> Row:
    content = [text_part("Look:", "input_text"), part, text_part("Well?", "input_text")]
    return by_responses, {"input": [user(*content)]}, f"Look:\n{line}\nWell?", "input[0].content[1]"


def messages_row(block: dict[str, Any], line: str, inner: str = "") -> Row:
    body = {"messages": [user(text_part("Look:"), block, text_part("Well?"))]}
    return by_messages, body, f"Look:\n{line}\nWell?", f"messages[0].content[1]{inner}"


ROWS: dict[str, Row] = {
    "chat, a picture": chat_row({"type": "image_url", "image_url": {"url": PNG}}, IMAGE),
    "chat, a picture's URL alone": chat_row({"type": "image_url", "image_url": PNG}, IMAGE),
    "chat, audio": chat_row({"type": "input_audio", "input_audio": {"data": "AA"}}, AUDIO),
    "chat, vLLM's audio": chat_row({"type": "audio_url", "audio_url": {"url": "x"}}, AUDIO),
    "chat, vLLM's video": chat_row({"type": "video_url", "video_url": {"url": "x"}}, VIDEO),
    "chat, a file": chat_row({"type": "file", "file": {"file_id": "f"}}, FILE),
    "chat, a word of Anthropic's": chat_row({"type": "image", "source": BASE64}, IMAGE),
    "chat, nothing but a picture": (
        by_chat,
        {"messages": [user({"type": "image_url"})]},
        IMAGE,
        "messages[0].content[0]",
    ),
    "chat, a picture in the instructions": (
        by_chat,
        {
            "messages": [
                {"role": "system", "content": [{"type": "image_url"}]},
                user(text_part("Hi")),
            ]
        },
        f"# Instructions\n\n{IMAGE}",
        "messages[0].content[0]",
    ),
    "chat, a picture from the assistant": (
        by_chat,
        {"messages": [{**user({"type": "image_url"}), "role": "assistant"}, user(text_part("Hi"))]},
        IMAGE,
        "messages[0].content[0]",
    ),
    "chat, an answer that was spoken": (
        by_chat,
        {"messages": [{"role": "assistant", "audio": {"id": "a"}}, user(text_part("Hi"))]},
        AUDIO,
        "messages[0].audio",
    ),
    "chat, an answer that was spoken and written": (
        by_chat,
        {"messages": [{"role": "assistant", "audio": {"id": "a"}, "content": "Hi"}, user()]},
        f"Hi\n{AUDIO}",
        "messages[0].audio",
    ),
    "chat, a picture from a tool": (
        by_chat,
        {
            "messages": [
                user(text_part("Look")),
                CHAT_CALL,
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url"}]},
            ]
        },
        IMAGE,
        "messages[2].content[0]",
    ),
    "responses, a picture": responses_row({"type": "input_image", "image_url": PNG}, IMAGE),
    "responses, a file": responses_row({"type": "input_file", "file_data": "AA"}, FILE),
    "responses, audio": responses_row({"type": "input_audio", "input_audio": {}}, AUDIO),
    "responses, a screenshot": responses_row({"type": "computer_screenshot"}, IMAGE),
    "responses, a picture that code has drawn": (
        by_responses,
        {
            "input": [
                user(),
                {
                    "type": "code_interpreter_call",
                    "id": "ci_1",
                    "code": "plot()",
                    "outputs": [{"type": "logs", "logs": "Done."}, {"type": "image", "url": PNG}],
                },
            ]
        },
        f"Done.\n{IMAGE}",
        "input[1].outputs[1]",
    ),
    "responses, a picture in the instructions": (
        by_responses,
        {"input": [{"role": "developer", "content": [{"type": "input_image"}]}, user()]},
        f"# Instructions\n\n{IMAGE}",
        "input[0].content[0]",
    ),
    "responses, a picture from a tool": (
        by_responses,
        {
            "input": [
                user(),
                CALL,
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": PNG}],
                },
            ]
        },
        IMAGE,
        "input[2].output[0]",
    ),
    "messages, a picture": messages_row({"type": "image", "source": BASE64}, IMAGE),
    "messages, a PDF": messages_row({"type": "document", "source": BASE64}, FILE),
    "messages, a PDF with a title": messages_row(
        {"type": "document", "source": BASE64, "title": "Report", "context": "2025"},
        f"Title: Report\nContext: 2025\n{FILE}",
    ),
    "messages, the URL of a document": messages_row(
        {"type": "document", "source": {"type": "url", "url": "https://a"}}, FILE
    ),
    "messages, an uploaded document": messages_row(
        {"type": "document", "source": {"type": "file", "file_id": "f"}}, FILE
    ),
    "messages, an upload": messages_row({"type": "container_upload", "file_id": "f"}, FILE),
    "messages, a picture in a document": messages_row(
        {
            "type": "document",
            "title": "A",
            "source": {"type": "content", "content": [text_part("a"), {"type": "image"}]},
        },
        f"Title: A\na\n{IMAGE}",
        ".source.content[1]",
    ),
    "messages, a picture in what was found": messages_row(
        {
            "type": "search_result",
            "title": "A",
            "source": "https://a",
            "content": [text_part("a"), {"type": "image"}],
        },
        f"Title: A\nSource: https://a\na\n{IMAGE}",
        ".content[1]",
    ),
    "messages, a picture in front of a prefill": (
        by_messages,
        {"messages": [user({"type": "image"}), {"role": "assistant", "content": "It is"}]},
        IMAGE,
        "messages[0].content[0]",
    ),
    "messages, a picture in the instructions": (
        by_messages,
        {"system": [{"type": "image"}], "messages": [user(text_part("Hi"))]},
        f"# Instructions\n\n{IMAGE}",
        "system[0]",
    ),
    "messages, a picture in later instructions": (
        by_messages,
        {"messages": [user(text_part("Hi")), {"role": "system", "content": [{"type": "image"}]}]},
        f"# Instructions\n\n{IMAGE}",
        "messages[1].content[0]",
    ),
    "messages, a picture from the assistant": (
        by_messages,
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "image"}]},
                user(text_part("Hi")),
            ]
        },
        IMAGE,
        "messages[0].content[0]",
    ),
    "messages, a picture from a tool": (
        by_messages,
        {
            "messages": [
                user(text_part("Look")),
                USE_MESSAGE,
                user({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}),
            ]
        },
        IMAGE,
        "messages[2].content[0].content[0]",
    ),
    "messages, a picture beside a result": (
        by_messages,
        {
            "messages": [
                user(text_part("Look")),
                USE_MESSAGE,
                user(
                    {"type": "tool_result", "tool_use_id": "c", "content": "ok"}, {"type": "image"}
                ),
            ]
        },
        IMAGE,
        "messages[2].content[1]",
    ),
    "messages, a PDF that Anthropic fetched": (
        by_messages,
        {
            "messages": [
                user(text_part("Read https://a")),
                {
                    "role": "assistant",
                    "content": [
                        {
                            "type": "server_tool_use",
                            "id": "s",
                            "name": "web_fetch",
                            "input": {"url": "https://a"},
                        },
                        {
                            "type": "web_fetch_tool_result",
                            "tool_use_id": "s",
                            "content": {
                                "type": "web_fetch_result",
                                "url": "https://a",
                                "content": {
                                    "type": "document",
                                    "title": "A",
                                    "source": {"type": "base64", "data": "AAAA"},
                                },
                            },
                        },
                        text_part("It is empty."),
                    ],
                },
                user(text_part("Hm")),
            ]
        },
        f"Source: https://a\nTitle: A\n{FILE}",
        "messages[1].content[1].content",
    ),
}


@pytest.mark.parametrize(("read", "body", "text", "where"), ROWS.values(), ids=ROWS)
def test_line_replaces_attachment(read: Read, body: Any, text: str, where: str) -> None:
    prompt = vocab.encoding().decode(list(render(read(body, Defaults())).ids))
    assert f"<|message|>{text}<|end|>" in prompt


@pytest.mark.parametrize(("read", "body", "text", "where"), ROWS.values(), ids=ROWS)
def test_server_may_refuse_attachments(read: Read, body: Any, text: str, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(body, Defaults(attachments=Attachments.REFUSE))
    error = caught.value
    assert (error.param, error.code, error.status) == (where, "unsupported_value", 400)
    assert error.message.startswith(f"{where} is of type ")
    assert error.message.endswith(": this model reads text only")


TEXTS: dict[str, tuple[Read, Any]] = {
    "a document of plain text": (
        by_messages,
        {
            "messages": [
                user(
                    {
                        "type": "document",
                        "title": "A",
                        "source": {"type": "text", "media_type": "text/plain", "data": "plain"},
                    }
                )
            ]
        },
    ),
    "what a search found": (
        by_messages,
        {
            "messages": [
                user(
                    {
                        "type": "search_result",
                        "title": "A",
                        "source": "https://a",
                        "content": [text_part("plain")],
                    }
                )
            ]
        },
    ),
    "a refusal": (
        by_chat,
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "plain"}]},
                user(text_part("Why?")),
            ]
        },
    ),
    "a result of a tool": (
        by_responses,
        {
            "input": [
                user(),
                CALL,
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [text_part("plain", "input_text")],
                },
            ]
        },
    ),
}


@pytest.mark.parametrize(("read", "body"), TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("setting", Attachments)
def test_text_is_read_under_every_attachment_setting(
    read: Read, body: Any, setting: Attachments
) -> None:
    turn = read(body, Defaults(attachments=setting))
    assert "plain" in vocab.encoding().decode(list(render(turn).ids))


def test_session_with_picture_keeps_prefix() -> None:
    """Claude Code sends a message without an answer once more, together with the next one."""
    picture = {"type": "image", "source": BASE64}
    conversation = [user(text_part("Look:"), picture)]
    first = by_messages({"messages": conversation}, Defaults())
    again = by_messages(
        {"messages": [user(text_part("Look:"), picture, text_part("Well?"))]}, Defaults()
    )
    assert IMAGE in vocab.encoding().decode(list(render(again).ids))
    later = [
        *conversation,
        {"role": "assistant", "content": "I cannot see it."},
        user(text_part("Why?")),
    ]
    later_ids = render(by_messages({"messages": later}, Defaults())).ids
    assert later_ids[: len(render(first).ids)] == render(first).ids
