"""bench, on a server in this process: what it measures, not the times."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from faulty_server import BookEngine, Fault, Reply, run_faulty_server
from scripted_host import KEY

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.bench import results
from vllm_mlx_harmony.bench.plan import CURVES, STORY, TURNS, plan
from vllm_mlx_harmony.standin import Script

TALE = Script(STORY, "<|channel|>final<|message|>" + "one and one\n" * 400, delay_ms=1)
SHORT = Script("", "<|channel|>final<|message|>Once<|return|>")
ANY = ("--key", KEY, "--repeat", "2")


def engine(*scripts: Script) -> BookEngine:
    book = BookEngine(scripts)
    book.context_length = 40_000
    return book


def test_bench_measures_all_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "a.html")]
    with run_faulty_server(engine=engine(TALE, SHORT)) as url:
        code = main(["bench", url, *ANY, "--json", files[0], "--html", files[1]])
    shown = capsys.readouterr().out
    assert code == 0, shown
    document = json.loads(Path(files[0]).read_text("utf-8"))
    curves = document["curves"]
    assert {name: sorted(map(int, curve)) for name, curve in curves.items()} == {
        "first token, cold": [1_000, 8_000, 32_000],
        "first token, warm": [1_000, 8_000, 32_000],
        "one stream's speed": [1, 2, 4, 8],
        "all streams' speed": [1, 2, 4, 8],
        "tool loop, first token": [*range(1, TURNS + 1)],
        "tool loop, computed": [*range(1, TURNS + 1)],
        "longest pause, undisturbed": [8_000],
        "longest pause beside a prompt": [8_000],
    }
    values = [runs for curve in curves.values() for runs in curve.values()]
    assert all(len(runs) == 2 and min(runs) >= 0 for runs in values)
    later = [max(curves["tool loop, computed"][str(turn)]) for turn in range(2, TURNS + 1)]
    assert 400 < min(later) <= max(later) < 700, "only the last result is computed"
    assert set(document["machine"]) >= {"processor", "memory", "system", "python"}
    assert not {"127.0.0.1", str(tmp_path), KEY} & set(re.split(r'["/: ]', json.dumps(document)))
    page = Path(files[1]).read_text("utf-8")
    assert page.count("<svg") == 4 and "<script" not in page and "src=" not in page
    for name in curves:
        assert name in page.replace("&#x27;", "'") and name in shown
    assert main(["bench", "--compare", files[0], files[0]]) == 0
    assert "1.00" in capsys.readouterr().out


def test_failed_measurement_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """An answer of one word has no speed; the other measurements are made."""
    with run_faulty_server(engine=engine(SHORT)) as url:
        assert main(["bench", url, *ANY, "--longest", "1000"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("✗ speed of 1 at once: an answer with fewer than two tokens") == 1
    assert "first token, cold" in shown and "speed  " not in shown


UNUSABLE = {
    "no usage": ('"usage"', '"other"', "usage does not count the tokens of prompts"),
    "no stream": ("data: ", "dato: ", "usage does not count"),
    "no JSON": ("data: {", "data: [", "not a stream of Chat Completions"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unmeasurable_server_is_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, problem = UNUSABLE[name]
    fault = Fault(
        lambda method, path, body: "messages" in body,
        reply=lambda response: Reply(response.status, response.text.replace(old, new)),
    )
    with run_faulty_server(fault, engine(SHORT)) as url:
        assert main(["bench", url, *ANY]) == 2
    assert problem in capsys.readouterr().err


ODD = {
    "nothing": ([], "give the URL of a server, or --model"),
    "no server": (["http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
    "no directory": (["--model", "/nowhere"], "/nowhere is not a model's directory"),
    "no results": (["--compare", "/dev/null", "/dev/null"], "is not a file that bench --json"),
}


@pytest.mark.parametrize("name", ODD)
def test_invalid_input_is_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, problem = ODD[name]
    assert main(["bench", *arguments]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("context", "most", "lengths"),
    [
        (None, 100_000, ["1,000", "8,000", "32,000", "100,000"]),
        (131_072, 100_000, ["1,000", "8,000", "32,000", "100,000"]),
        (8_192, 100_000, ["1,000"]),
        (131_072, 8_000, ["1,000", "8,000"]),
        (512, 100_000, []),
    ],
)
def test_prompts_fit_context(context: int | None, most: int, lengths: list[str]) -> None:
    names = [measurement.name for measurement in plan(context, most)]
    assert [name.split()[2] for name in names if name.startswith("first")] == lengths
    room = min(context or most, most)
    assert any("loop" in name for name in names) == (room > 11_000)


def test_comparison_has_ratio_of_medians_for_every_curve() -> None:
    first = {"curves": {name: {"1": [1.0, 2.0, 9.0]} for name in CURVES}}
    second = {"curves": {name: {"1": [4.0]} for name in CURVES}}
    table = results.compared(first, second)
    assert [*table.columns[-1].cells] == ["2.00"] * len(CURVES)
