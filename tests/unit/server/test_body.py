"""The body of a request: bounded in bytes and in values, and parsed off the event loop if large."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.server import body
from vllm_mlx_harmony.server.body import LARGE, Document
from vllm_mlx_harmony.server.settings import ServerSettings

DEFAULT_MAX_VALUES = ServerSettings().max_values


async def parse_body(content: bytes) -> Document:
    return await body.parse_json(content, ServerSettings.read())


async def read(incoming: Request) -> bytes:
    return (await body.read_document(incoming, ServerSettings.read()))[1].raw


def request(*chunks: bytes, **headers: str) -> tuple[Request, list[bytes]]:
    """A request whose body comes in ``chunks``, and the chunks that have not been read yet."""
    unread = list(chunks)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": unread.pop(0), "more_body": bool(unread)}

    raw_headers = [
        (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
    ]
    return Request({"type": "http", "method": "POST", "headers": raw_headers}, receive), unread


def error_of(reading: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        asyncio.run(reading)
    return caught.value


@pytest.mark.parametrize("length", [None, "3", "nonsense"])
def test_body_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch, length: str | None) -> None:
    monkeypatch.setenv(body.MAX_BODY_VARIABLE, "1K")
    incoming, unread = request(*[b"x" * 500] * 9, **({"content_length": length} if length else {}))
    error = error_of(read(incoming))
    assert (error.status, error.code, len(unread)) == (413, "request_too_large", 6)


def test_declared_large_body_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(body.MAX_BODY_VARIABLE, "1K")
    incoming, unread = request(b"{}", content_length="1025")
    error_of(read(incoming))
    assert unread == [b"{}"]


@pytest.mark.parametrize("cut", [1, 7, 10_000])
@pytest.mark.parametrize("members", [1, 3])
def test_gzip_is_decompressed(cut: int, members: int) -> None:
    text = json.dumps({"text": "é" * 3_000}).encode()
    size = -(-len(text) // members)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    data = b"".join(map(gzip.compress, parts))
    chunks = [data[at : at + cut] for at in range(0, len(data), cut)]
    incoming, _ = request(*chunks, content_encoding="gzip", content_length=str(len(data)))

    async def read_document() -> tuple[Request, Document]:
        return await body.read_document(incoming, ServerSettings.read())

    again, document = asyncio.run(read_document())
    assert document.value == json.loads(text) and document.raw == text
    assert asyncio.run(again.body()) == text  # for whoever answers instead
    assert again.headers.keys() == []


NOISE = bytes(random.Random(0).choices(range(32, 33 + 64), k=3_000_000))
BAD_GZIP = {
    "no gzip": ([b"{}"], 400, 0),
    "cut": ([gzip.compress(b"{}")[:-5]], 400, 0),
    "nothing": ([b""], 400, 0),
    "a bomb": ([gzip.compress(b" " * 30_000_000)[:10_000]] * 50, 413, 49),
    "larger than allowed": ([gzip.compress(NOISE)], 413, 0),
}


@pytest.mark.parametrize(("chunks", "status", "remaining"), BAD_GZIP.values(), ids=BAD_GZIP)
def test_invalid_gzip_is_rejected(
    chunks: list[bytes], status: int, remaining: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(body.MAX_BODY_VARIABLE, "2900K")
    incoming, unread = request(*chunks, content_encoding="gzip")
    error = error_of(read(incoming))
    assert (error.status, len(unread)) == (status, remaining), error


def test_gzip_holds_little_memory() -> None:
    incoming, _ = request(gzip.compress(b" " * 10**8), content_encoding="gzip")
    tracemalloc.start()
    try:
        assert error_of(read(incoming)).status == 413
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["zstd", "gzip, gzip", "br"])
def test_other_encoding_is_rejected_by_name(encoding: str) -> None:
    incoming, unread = request(b"{}", content_encoding=encoding)
    error = error_of(read(incoming))
    assert error.status == 415 and encoding in error.message and unread


def test_body_within_the_limit_can_be_read_again() -> None:
    incoming, _ = request(b"[1,", b"2]")
    again, document = asyncio.run(body.read_document(incoming, ServerSettings.read()))
    assert (asyncio.run(again.body()), document.value) == (b"[1,2]", [1, 2])


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", 2**25), ("64M", 2**26), ("2g", 2**31), ("10", 10), ("8 M", 2**23)],
)
def test_max_body_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: int
) -> None:
    monkeypatch.setenv(body.MAX_BODY_VARIABLE, value)
    assert ServerSettings.read().max_body == expected


TOO_MANY = {
    "lists": b"[" + b",".join([b"[]"] * DEFAULT_MAX_VALUES) + b"]",
    "numbers": b"[" + b",".join([b"1"] * (DEFAULT_MAX_VALUES + 1)) + b"]",
    "keys": json.dumps({str(at): at for at in range(DEFAULT_MAX_VALUES)}).encode(),
    "depth": b"[" * (DEFAULT_MAX_VALUES + 1),
    "white space": b"[" + b" " * (DEFAULT_MAX_VALUES * body.UNQUOTED_PER_VALUE) + b"]",
    "escapes": b'"' + b"\\n" * (DEFAULT_MAX_VALUES * body.ESCAPES_PER_VALUE + 1) + b'"',
    "a script of its own": b'"'
    + "я".encode() * (DEFAULT_MAX_VALUES * body.NON_ASCII_PER_VALUE // 2 + 1)
    + b'"',
}


@pytest.mark.parametrize("sent", TOO_MANY.values(), ids=TOO_MANY.keys())
def test_too_many_values_are_rejected(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    error = error_of(parse_body(sent))
    assert (error.status, error.code) == (413, "request_too_large")
    assert body.MAX_VALUES_VARIABLE in error.message
    if not sent.startswith(b"[[[["):  # too deep, whatever may be sent
        monkeypatch.setenv(body.MAX_VALUES_VARIABLE, "200k")
        assert asyncio.run(parse_body(sent)).large


def conversation() -> dict[str, Any]:
    """More than any agent sends: 1,000,000 characters, 100 tools, a bias for 5,000 tokens."""
    parameters = {f"p{at}": {"type": "string", "description": "What."} for at in range(20)}
    schema = {"type": "object", "properties": parameters, "required": [*parameters]}
    listed = json.dumps({"files": [{"name": "文\n", "size": 1}] * 20})
    steps: list[dict[str, Any]] = []
    for at in range(700):
        function = {"name": "f1", "arguments": json.dumps({"path": f"/{at}", "all": True})}
        call = {"id": f"call_{at}", "type": "function", "function": function}
        text = [{"type": "text", "text": "言" * 500}, {"type": "text", "text": "\n" * 400}]
        steps.append({"role": "user", "content": text})
        steps.append({"role": "assistant", "content": None, "tool_calls": [call]})
        steps.append({"role": "tool", "tool_call_id": f"call_{at}", "content": listed})
    tools = [
        {"type": "function", "function": {"name": f"f{at}", "parameters": schema}}
        for at in range(100)
    ]
    bias = {str(token): -100 for token in range(5_000)}
    return {"messages": steps, "tools": tools, "logit_bias": bias}


def test_requests_of_agents_are_far_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = json.dumps(conversation()).encode()
    assert len(sent) > 1_000_000
    monkeypatch.setenv(body.MAX_VALUES_VARIABLE, str(DEFAULT_MAX_VALUES * 3 // 4))
    assert asyncio.run(parse_body(sent)).value == conversation()


def test_large_bodies_are_not_repaired() -> None:
    half = '{"a": "\ud800"}'.encode("utf-8", "surrogatepass")
    assert asyncio.run(parse_body(half + b" " * body.LARGE)).value == {"a": "\ufffd"}
    with pytest.raises(RequestError, match="not valid JSON"):
        asyncio.run(parse_body(half.replace(b"a", b"a" * body.MAX_REPAIRED)))


FINE = {
    "text that looks like values": ["[{,]" * DEFAULT_MAX_VALUES],
    "text of quotes": ['",' * DEFAULT_MAX_VALUES],
    "text of backslashes": ["\\" * DEFAULT_MAX_VALUES, 1],
    "half a pair": ["\ud83d" + "x" * LARGE],  # read as U+FFFD, which can be encoded again
}


@pytest.mark.parametrize("value", FINE.values(), ids=FINE.keys())
def test_long_texts_do_not_count_as_values(value: list[Any]) -> None:
    for sent in (json.dumps(value).encode(), json.dumps(value, ensure_ascii=True).encode()):
        document = asyncio.run(parse_body(sent))
        assert document.large
        assert document.value == [
            item.replace("\ud83d", "\ufffd") if isinstance(item, str) else item for item in value
        ]


@given(
    st.recursive(
        st.integers() | st.text(st.sampled_from('\\",[{}]ab')),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('\\",[')), inner),
    )
)
def test_strings_do_not_count_as_values(value: Any) -> None:
    text = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_SLICE", 3)
        outside = b"".join(body._outside_strings(text))

    def count_values(node: Any) -> int:
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        return 1 + sum(map(count_values, inner))

    estimate = 1 + sum(map(outside.count, (b",", b"[", b"{")))
    assert count_values(value) <= estimate <= 2 * count_values(value) + 1
