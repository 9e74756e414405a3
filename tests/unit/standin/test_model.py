"""The stand-in on mlx-lm's own generators and caches, without a server."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="comes with the host")

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.utils import load_model

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab

Encode = Callable[[str], list[int]]

OPEN = "<|end|><|start|>assistant"
ANSWER = (
    "<|channel|>analysis<|message|>{0}<|end|><|start|>assistant<|channel|>final<|message|>{0} 🙂"
)


def script(name: str) -> standin.Script:
    """Answers a message that names ``name``; answers of different names differ in length."""
    generated = ANSWER.format(name * (2 + len(name) % 5)) + "<|return|>"
    pattern = re.compile(rf"\A<\|start\|>system.*user {name}\.<\|end\|>", re.DOTALL)
    return standin.Script(pattern, generated, whole_prompt=True)  # sees padding that is not masked


NAMES = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg", "hhhhhhhh"]


def prompt(name: str, words: int) -> str:
    """A prompt of about ``words`` ids that names ``name`` in its last message."""
    system = f"<|start|>system<|message|>{'word ' * words}<|end|>"
    return f"{system}<|start|>user<|message|>user {name}.{OPEN}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in with a script for each name and one that fails."""
    broken = standin.Script("user broken.", "<|channel|>final<|message|>No.", fail_at=2)
    scripts = [*(script(name) for name in NAMES), broken]
    return standin.write(tmp_path_factory.mktemp("model"), scripts)


@pytest.fixture(scope="module")
def model(place: Path) -> Any:
    """The stand-in, loaded as mlx-lm loads any model."""
    return load_model(place)[0]


def run(model: Any, ids: list[int], **options: Any) -> list[int]:
    """What mlx-lm's plain generator generates, up to a `<|return|>`."""
    generated: list[int] = []
    for token, _ in generate_step(mx.array(ids), model, max_tokens=400, **options):
        generated.append(int(token))
        if generated[-1] == vocab.RETURN:
            break
    return generated


def expected(encode: Encode, name: str) -> list[int]:
    return encode(str(script(name).completion))


def test_caches_have_layout_of_gpt_oss(model: Any) -> None:
    caches = make_prompt_cache(model)
    assert [type(cache) for cache in caches] == [RotatingKVCache, KVCache] * 2
    assert caches[0].max_size == 128


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("words", [0, 100, 110, 111, 112, 113, 114, 115, 700])
@pytest.mark.parametrize("chunk", [1, 17, 2048])
def test_script_is_played_for_any_prompt_and_chunk_length(
    model: Any, encode: Encode, words: int, chunk: int
) -> None:
    ids = encode(prompt("bb", words))
    assert run(model, ids, prefill_step_size=chunk) == expected(encode, "bb")


def test_scripted_token_has_all_probability(model: Any, encode: Encode) -> None:
    logits = model(mx.array([encode(prompt("bb", 3))]))[0, -1]
    assert int(mx.argmax(logits)) == vocab.CHANNEL
    probability = mx.softmax(logits)[vocab.CHANNEL]
    assert float(probability) > 1 - 1e-6
    biased = mx.softmax(logits.at[vocab.CHANNEL].add(-100.0))[vocab.CHANNEL]
    assert float(biased) < 1e-6


def test_last_positions_have_their_own_logits(model: Any, encode: Encode) -> None:
    generated = expected(encode, "bb")
    ids = [*encode(prompt("bb", 40)), *generated[:5]]
    logits = model(mx.array([ids]))[0, -6:]
    assert mx.argmax(logits, axis=-1).tolist() == generated[:6]


def test_trimmed_cache_is_reused(model: Any, encode: Encode) -> None:
    ids, other = encode(prompt("bb", 5)), encode(prompt("ccc", 5))
    caches = make_prompt_cache(model)
    run(model, ids, prompt_cache=caches)
    same = next(at for at, pair in enumerate(zip(ids, other, strict=False)) if pair[0] != pair[1])
    trim_prompt_cache(caches, caches[1].offset - same)
    assert run(model, other[same:], prompt_cache=caches) == expected(encode, "ccc")


def test_copied_cache_can_fork(model: Any, encode: Encode) -> None:
    head, tails = encode(prompt("x", 300))[:200], ["bb", "dddd"]
    caches = make_prompt_cache(model)
    model(mx.array([head]), cache=caches)
    for name in tails:
        rest = encode(prompt(name, 300))[200:]
        assert run(model, rest, prompt_cache=copy.deepcopy(caches)) == expected(encode, name)


@pytest.mark.parametrize("chunk", [64, 2048])
def test_eight_prompts_are_batched(model: Any, encode: Encode, chunk: int) -> None:
    batch = BatchGenerator(
        model, stop_tokens=[[vocab.RETURN]], max_tokens=400, prefill_step_size=chunk
    )
    prompts = [encode(prompt(name, 40 * at)) for at, name in enumerate(NAMES)]
    uids = batch.insert(prompts[:5])
    generated: dict[int, list[int]] = {}
    for turn in range(2000):
        if turn == 7:  # the others come while the first ones are being answered
            uids += batch.insert(prompts[5:])
        waiting, responses = batch.next()
        for response in responses:
            generated.setdefault(response.uid, []).append(response.token)
        if turn > 7 and not waiting and not responses:
            break
    batch.close()
    assert [generated[uid] for uid in uids] == [expected(encode, name) for name in NAMES]


def test_failing_script_raises(model: Any, encode: Encode) -> None:
    steps = generate_step(mx.array(encode(prompt("broken", 3))), model, max_tokens=50)
    with pytest.raises(RuntimeError, match="fail here"):
        list(steps)


def test_cache_that_forgets_is_rejected(model: Any, encode: Encode) -> None:
    caches = [RotatingKVCache(64) for _ in model.layers]
    with pytest.raises(RuntimeError, match="keeps everything"):
        run(model, encode(prompt("bb", 200)), prompt_cache=caches)


def test_running_model_follows_new_scripts(encode: Encode, tmp_path: Path, place: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for path in place.iterdir():
        (own / path.name).symlink_to(path)
    (own / "standin_model.py").unlink()
    (own / "standin_model.py").write_bytes((place / "standin_model.py").read_bytes())
    model, ids = load_model(own)[0], encode(prompt("bb", 3))
    assert run(model, ids) == expected(encode, "bb")
    standin.rescript(own, [standin.Script("bb", "<|channel|>final<|message|>New.<|return|>")])
    assert run(model, ids) == encode("<|channel|>final<|message|>New.<|return|>")


@pytest.mark.nightly
def test_tiny_is_real_gpt_oss(tmp_path: Path) -> None:
    from mlx_lm.models import gpt_oss

    model = load_model(standin.write_tiny(tmp_path / "tiny"))[0]
    ids = mx.array([[(7919 * at) % 201_088 for at in range(300)]])
    whole, caches = model(ids)[0, -1], make_prompt_cache(model)
    model(ids[:, :200], cache=caches)
    parts = model(ids[:, 200:], cache=caches)[0, -1]
    assert isinstance(model, gpt_oss.Model)
    assert float(mx.std(whole)) > 1e-3
    assert mx.allclose(whole, parts, rtol=1e-3, atol=1e-3)
