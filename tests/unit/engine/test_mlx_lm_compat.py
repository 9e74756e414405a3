"""What differs between versions of mlx-lm."""

from __future__ import annotations

from functools import partial
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from tqdm import tqdm

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.cli.background import BAR
from vllm_mlx_harmony.engine import mlx_lm_compat
from vllm_mlx_harmony.engine.mlx_lm_compat import evaluate, load_model, load_tokenizer
from vllm_mlx_harmony.engine.mlx_lm_names import NAMES
from vllm_mlx_harmony.required_names import check
from vllm_mlx_harmony.standin import Script

ASKS_FOR_TRUST = metadata.version("mlx-lm").split(".")[:2] >= ["0", "32"]
"""Whether mlx-lm runs code from a model directory only with ``trust_remote_code``."""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.write(tmp_path_factory.mktemp("scripted"), [Script("", "Hello.")])


def test_required_names_exist() -> None:
    check(NAMES)


@pytest.mark.parametrize("trusted", [False, True])
def test_model_code_runs_only_if_trusted(scripted: Path, trusted: bool) -> None:
    if ASKS_FOR_TRUST and not trusted:
        with pytest.raises(ValueError, match="trust_remote_code"):
            load_model(scripted)
        return
    assert len(load_model(scripted, trust_remote_code=trusted).make_cache()) == 4


@pytest.mark.nightly
def test_weights_alone_need_no_trust(tiny: Path) -> None:
    import mlx.core as mx

    module, tokenizer = load_model(tiny), load_tokenizer(tiny)
    layers = module.make_cache()
    module(mx.array([tokenizer.encode("Hello.", add_special_tokens=False)]), cache=layers)
    evaluate(layers)
    assert {layer.offset for layer in layers} == {2}


@pytest.mark.parametrize("name", ["standin_model.py", "standin_cursor.py"])
def test_standin_is_recognized_by_its_code(scripted: Path, tiny: Path, name: str) -> None:
    assert standin.is_standin(scripted) and not standin.is_standin(tiny)
    code = (scripted / name).read_bytes()
    (scripted / name).write_bytes(code + b"# other\n")
    assert not standin.is_standin(scripted)
    (scripted / name).write_bytes(code)
    assert standin.is_standin(scripted)


def test_progress_bar_shows_loading(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`launch` looks for it in the log of a starting server."""
    monkeypatch.setattr(mlx_lm_compat, "AT_ONCE", 1)
    monkeypatch.setattr(mlx_lm_compat, "tqdm", partial(tqdm, mininterval=0.0))
    load_model(tiny)
    shown = [int(percent) for percent in BAR.findall(capsys.readouterr().err.encode())]
    assert shown == sorted(shown) and shown[0] == 0 and shown[-1] == 100 and len(set(shown)) > 2
