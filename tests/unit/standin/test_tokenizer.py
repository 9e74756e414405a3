"""The `tokenizer.json` encodes and decodes text exactly as openai-harmony does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import examples

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.turn import VOCAB_SIZE
from vllm_mlx_harmony.standin import cursor
from vllm_mlx_harmony.standin.tokenizer import control_name, parse_ranks, spell

Encode = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    """The file as the host reads it."""
    tokenizers = pytest.importorskip("tokenizers", reason="comes with the host")
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


TEXTS = {
    "prose": "Don't worry, it's I'LL we've THEY'RE fine—really…",
    "code": 'def f(x: int) -> str:\r\n\treturn f"{x!r:>10}"  # ünïcode\n\n\n',
    "json": '{"city":"Zürich","n":[1,22,333,4444,55555],"ok":true,"e":"\\u00e9"}',
    "white space": "a  b   c\t\td \n \n\n  e\u00a0\u2003\u3000f   \n   ",
    "cjk": "日本語のテスト、漢字とカタカナ。한국어 문장입니다。中文分词测试",
    "emoji": "🙂🤖👩‍👩‍👧‍👦🇫🇷👍🏽 ok ☺️",
    "scripts": "Ωμέγα नमस्ते مرحبا שלום ภาษาไทย Привет ǅ ﬁ İstanbul",
    "combining": "e\u0301 n\u0303 \u200d\u200b\ufeff\u0000\u0007",
    "paths": "/usr/local/lib//x.py https://example.org/?q=1&r=%20#x ///\n\n//",
    "control tokens": "<|start|>assistant<|channel|>final<|message|>x<|return|><|reserved_201087|>",
    "nearly control tokens": "<|start |> <|end <|nothing|> |>",
    "empty": "",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_text_encodes_to_same_ids(tokenizer: Any, encode: Encode, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=examples(300), deadline=None)
def test_any_text_encodes_to_same_ids(tokenizer: Any, encode: Encode, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=False).ids == encode(text)


def test_every_id_has_its_name(tokenizer: Any) -> None:
    names = {token: tokenizer.id_to_token(token) for token in range(vocab.STARTOFTEXT, VOCAB_SIZE)}
    assert names == {token: control_name(token) for token in names}
    assert tokenizer.get_vocab_size() == VOCAB_SIZE


def test_control_names_are_those_of_openai_harmony() -> None:
    decode = vocab.encoding().decode
    tokens = range(vocab.STARTOFTEXT, VOCAB_SIZE)
    assert [decode([token]) for token in tokens] == [control_name(token) for token in tokens]


def test_table_holds_bytes_of_every_id(directory: Path) -> None:
    table = cursor.read_table((directory / cursor.TABLE).read_bytes())
    assert len(table) == VOCAB_SIZE
    sample = [*range(0, vocab.STARTOFTEXT, 997), vocab.STARTOFTEXT - 1]
    assert [table[token] for token in sample] == [vocab.token_bytes(token) for token in sample]
    assert table[vocab.CALL] == b"<|call|>"


def test_ranks_are_read_from_tiktoken_file() -> None:
    assert parse_ranks(b"IQ== 0\nIg== 1\n\nw6k= 2\n") == {b"!": 0, b'"': 1, "é".encode(): 2}


def test_bytes_are_spelt_as_printable_characters() -> None:
    spelt = spell(bytes(range(256)))
    assert len(set(spelt)) == 256
    assert all(character.isprintable() and not character.isspace() for character in spelt)
    assert spell(b" a\n") == "ĠaĊ"
