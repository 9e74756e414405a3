"""Bodies and events of every kind of engine, without connections: values in, values out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from fake_engines import EXCHANGES, KINDS
from harmony_text import ids_of

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Progress
from vllm_mlx_harmony.core.errors import HarmonyFailure, OutputError, RequestError
from vllm_mlx_harmony.engine_api.engine import GenerationSettings, Step
from vllm_mlx_harmony.gateway.engines.detection import KINDS as DIALECTS
from vllm_mlx_harmony.gateway.engines.dialect import Dialect, EngineRequest

OUTPUT_IDS = ids_of("<|channel|>final<|message|>☀ été 👩‍🚀 你好\n<|return|>")
SETTINGS = GenerationSettings(
    max_tokens=50,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    logit_bias=((5, -3.0),),
    seed=7,
)
REQUEST = EngineRequest("m", (1, 2, 3), SETTINGS, "salt", 'start: "x"', 4)


def dialect(kind: str) -> Dialect:
    return DIALECTS[kind.removesuffix("-incremental")]


def read(kind: str, events: Iterable[str]) -> list[Step]:
    """The steps of a stream."""
    steps: list[Step] = []
    for event in events:
        steps.append(dialect(kind).read(event.encode(), sum(len(step.ids) for step in steps)))
    return steps


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_id_is_read_once(kind: str, finish: str) -> None:
    output = OUTPUT_IDS if finish == "stop" else OUTPUT_IDS[:-1]
    chunks = read(kind, EXCHANGES[kind].events([1, 2, 3], output, finish))
    assert tuple(token for chunk in chunks for token in chunk.ids) == output
    assert [chunk.finish for chunk in chunks if chunk.finish] == [finish]
    assert max(chunk.cached_tokens for chunk in chunks) == 16


REPORTED = {"total": 9000, "cache": 1000, "processed": 5000, "time_ms": 1500}
PROGRESS: dict[str, tuple[str, object, Progress | None]] = {
    "llama.cpp": ("llamacpp", REPORTED, Progress(9000, 1000, 5000, 1.5)),
    "vllm-mlx": ("vllm-mlx", REPORTED, Progress(9000, 1000, 5000, 1.5)),
    "in the queue": ("vllm-mlx", {**REPORTED, "place": 3}, Progress(9000, 1000, 5000, 1.5, 3)),
    "nothing cached": ("llamacpp", {**REPORTED, "cache": 0}, Progress(9000, 0, 5000, 1.5)),
    "no number": ("llamacpp", {**REPORTED, "cache": "much"}, Progress(9000, 0, 5000, 1.5)),
    "no total": ("llamacpp", {}, None),
    "no object": ("llamacpp", [1, 2], None),
    "none": ("vllm-mlx", None, None),
}


@pytest.mark.parametrize(("kind", "reported", "expected"), PROGRESS.values(), ids=PROGRESS)
def test_progress_is_read(kind: str, reported: object, expected: Progress | None) -> None:
    if kind == "llamacpp":
        event: dict[str, Any] = {"content": "", "tokens": [], "stop": False, "tokens_predicted": 0}
        assert DIALECTS[kind].body(REQUEST)["return_progress"] is True
    else:
        event = {"ids": [], "finish": None, "cached_tokens": 0}
    chunk = DIALECTS[kind].read(json.dumps({**event, "prompt_progress": reported}).encode(), 0)
    assert (chunk.ids, chunk.finish, chunk.progress) == ((), None, expected)


def test_recorded_stream_of_vllm_is_read() -> None:
    recorded = (Path(__file__).parent / "data" / "vllm.sse").read_text("utf-8")
    events = [line.removeprefix("data: ") for line in recorded.split("\n") if line]
    chunks = read("vllm", events)
    assert [token for chunk in chunks for token in chunk.ids] == [122047, 115648, 105475]
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["length"]


def test_ids_missing_from_llamacpp_are_read_from_the_text() -> None:
    """A character whose bytes are three ids comes in one event."""
    output = ids_of("👩‍🚀")
    pieces = [vocab.token_bytes(token) for token in output]
    assert any(not _is_text(piece) for piece in pieces), "these ids do not cut a character"
    events = list(EXCHANGES["llamacpp"].events([], [*output, vocab.RETURN], "stop"))
    assert len(events) < len(output) + 2
    steps = read("llamacpp", events)
    assert [token for step in steps for token in step.ids] == [*output, vocab.RETURN]


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_unrecoverable_id_is_a_failure() -> None:
    lost = {"content": "a", "tokens": [64], "stop": False, "tokens_predicted": 3}
    with pytest.raises(OutputError, match="every id"):
        read("llamacpp", [json.dumps(lost)])
    with pytest.raises(OutputError, match="every id"):
        read("sglang", [json.dumps({"output_ids": [5], "meta_info": {"completion_tokens": 3}})])


GARBAGE = ["", "null", "[]", "7", "{", '{"choices": 1}', '{"choices": [7]}', '{"meta_info": 1}']


@pytest.mark.parametrize("data", GARBAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_garbage_is_an_output_error(kind: str, data: str) -> None:
    if kind == "vllm-mlx" and data.startswith("{") and len(data) > 1:
        assert dialect(kind).read(data.encode(), 0).ids == ()
        return
    with pytest.raises(OutputError):
        dialect(kind).read(data.encode(), 0)


@pytest.mark.parametrize(
    ("error", "kind_of"),
    [
        ({"message": "no such grammar", "code": 400}, RequestError),
        ({"message": "CUDA error", "code": 500}, OutputError),
        ({"message": "CUDA error"}, OutputError),
        ("CUDA error", OutputError),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_error_in_a_stream_is_raised(kind: str, error: Any, kind_of: type[HarmonyFailure]) -> None:
    with pytest.raises(kind_of, match=r"no such grammar|CUDA error"):
        dialect(kind).read(json.dumps({"error": error}).encode(), 0)


def test_aborted_generation_is_an_error() -> None:
    aborted = {"choices": [{"index": 0, "token_ids": [], "finish_reason": "abort"}]}
    with pytest.raises(OutputError, match="abort"):
        read("vllm", [json.dumps(aborted)])
    reason = {"type": "abort", "message": "out of memory"}
    event = {"output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": reason}}
    with pytest.raises(OutputError, match="out of memory"):
        read("sglang", [json.dumps(event)])


def test_request_is_translated_for_vllm() -> None:
    body = DIALECTS["vllm"].body(REQUEST)
    assert body == {
        "model": "m",
        "prompt": (1, 2, 3),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "stop_token_ids": [199_999, 200_002, 200_012],
        "max_tokens": 50,
        "min_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 7,
        "logit_bias": {"5": -3.0},
        "cache_salt": "salt",
        "structured_outputs": {"grammar": 'start: "x"'},
    }


def test_request_is_translated_for_the_id_endpoint_of_vllm() -> None:
    body = DIALECTS["vllm-tokens"].body(REQUEST)
    sampling = body.pop("sampling_params")
    assert body == {
        "model": "m",
        "token_ids": (1, 2, 3),
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_ended": True,
        "cache_salt": "salt",
    }
    assert sampling["structured_outputs"] == {"grammar": 'start: "x"'}
    assert (sampling["detokenize"], sampling["max_tokens"], sampling["seed"]) == (False, 50, 7)


def test_request_is_translated_for_sglang() -> None:
    body = DIALECTS["sglang"].body(REQUEST)
    sampling = body.pop("sampling_params")
    assert body == {"input_ids": (1, 2, 3), "stream": True, "extra_key": "salt"}
    assert sampling == {
        "max_new_tokens": 50,
        "min_new_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "stop_token_ids": [199_999, 200_002, 200_012],
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "sampling_seed": 7,
        "logit_bias": {"5": -3.0},
        "ebnf": 'start: "x"',
    }


def test_request_is_translated_for_llamacpp() -> None:
    body = DIALECTS["llamacpp-llguidance"].body(REQUEST)
    assert body == {
        "prompt": (1, 2, 3),
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        "cache_prompt": True,
        "n_predict": 50,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repeat_penalty": 1.1,
        "repeat_last_n": -1,
        "seed": 7,
        "logit_bias": [[5, -3.0]],
        "grammar": '%llguidance {}\nstart: "x"',
    }
