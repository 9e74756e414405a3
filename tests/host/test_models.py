"""Which models are Harmony models, and what the host's own are left with."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="needs the host")

import vllm_mlx.server

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host import contract, models, patching


class Wrapped:
    """As mlx-lm does it: an object that passes on what it does not have."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Harmony:
    """The interface of a transformers tokenizer over the real vocabulary, to be spoiled in part."""

    def __init__(self, moved: str = "", shift: int = 0) -> None:
        self._moved, self._shift = moved, shift
        self.asked = 0

    def convert_tokens_to_ids(self, token: str) -> int:
        (found,) = vocab.encoding().encode(token, allowed_special="all")
        return found + (token == self._moved)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        self.asked += 1
        return [token + self._shift for token in vocab.encode(text)]


class Slotted(Harmony):
    """Cannot be a key of a weak dictionary."""

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (None, False),
        (object(), False),
        (Harmony(), True),
        (Slotted(), True),
        (Wrapped(Harmony()), True),
        (Wrapped(Wrapped(Harmony())), True),
        (Harmony(shift=1), False),
        *[(Harmony(moved=token), False) for token in models.SPECIAL],
    ],
)
def test_is_harmony(tokenizer: Any, expected: bool) -> None:
    assert models.is_harmony(tokenizer) is expected


def test_a_tokenizer_is_asked_once() -> None:
    tokenizer = Harmony()
    assert all(models.is_harmony(tokenizer) for _ in range(5))
    assert tokenizer.asked == 1


def engine(tokenizer: Any) -> Any:
    from vllm_mlx.engine.simple import SimpleEngine

    bare = SimpleEngine.__new__(SimpleEngine)
    bare._is_mllm, bare._loaded, bare._model = False, True, SimpleNamespace(tokenizer=tokenizer)
    return bare


@pytest.mark.parametrize("value", [True, False])
def test_native_tool_format_is_on_for_harmony_engines_only(value: bool) -> None:
    row = next(row for row in contract.CHANGES if row.label.endswith("preserve_native_tool_format"))
    harmony, other = engine(Harmony()), engine(Harmony(shift=1))
    undos = patching.apply_all([row])
    for each in (harmony, other):
        each.preserve_native_tool_format = value
    assert (harmony.preserve_native_tool_format, other.preserve_native_tool_format) == (True, value)
    patching.undo_all(undos)
    assert harmony.preserve_native_tool_format is value


def test_the_tool_parser_is_ours_on_a_harmony_tokenizer_and_else_the_hosts() -> None:
    from vllm_mlx.tool_parsers import HarmonyToolParser as Theirs
    from vllm_mlx.tool_parsers import ToolParser

    class Ours(Theirs):  # type: ignore[misc]
        SUPPORTS_NATIVE_TOOL_FORMAT = True

    chosen = models.harmony_parser(Ours)(Theirs)
    assert issubclass(chosen, ToolParser)
    assert isinstance(chosen(Harmony()), Ours)
    assert isinstance(chosen(None), Ours)
    assert isinstance(chosen(), Ours)
    assert type(chosen(Harmony(shift=1))) is Theirs
    # Asked of the class for every engine: it must not change what other models get.
    assert chosen.supports_native_format() is Theirs.supports_native_format()
    assert models.harmony_parser(Ours)(None) is Ours


class _Loading:
    """`load_model` with the host's signature; `_engine` gets the tokenizer when it has run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
        self.loaded: list[str] = []
        self._patch, self._tokenizer = monkeypatch, tokenizer

    def __call__(
        self, model_name: str, use_batching: bool = False, model_path: str | None = None
    ) -> str:
        self.loaded.append(model_name)
        engine = SimpleNamespace(tokenizer=self._tokenizer)
        self._patch.setattr(vllm_mlx.server, "_engine", engine)
        return "loaded"


def test_a_model_directory_that_is_not_harmony_is_not_even_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokenizers = importlib.import_module("tokenizers")
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    other.save(str(tmp_path / "tokenizer.json"))
    load = _Loading(monkeypatch, None)
    guarded_load = models.harmony_only(load)
    with pytest.raises(models.NotHarmony, match="org/name"):
        guarded_load("org/name", model_path=str(tmp_path))
    with pytest.raises(models.NotHarmony):
        guarded_load(str(tmp_path))
    assert load.loaded == []


@pytest.mark.parametrize(
    ("tokenizer", "refused"), [(Harmony(), False), (None, False), (object(), True)]
)
def test_what_the_directory_does_not_tell_the_engine_does(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, refused: bool
) -> None:
    load = models.harmony_only(_Loading(monkeypatch, tokenizer))
    if refused:
        with pytest.raises(models.NotHarmony):
            load("org/name", use_batching=True)
    else:
        assert load("org/name", use_batching=True) == "loaded"


def test_an_unreadable_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(HostError, match=r"tokenizer\.json"):
        models.is_harmony_directory(tmp_path)
