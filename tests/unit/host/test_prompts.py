"""The prompts of warm-ups and of raw completions, and the defaults of all prompts."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from harmony_text import ids_of

pytest.importorskip("vllm_mlx")
pytest.importorskip("mlx_lm")

from vllm_mlx import prompt_warmup, server

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import HostError, RequestError
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import Defaults, Effort
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings
from vllm_mlx_harmony.host import adapter, contract, engine_factories
from vllm_mlx_harmony.host.adapter import VllmMlx
from vllm_mlx_harmony.host.vllm_mlx_engine import HarmonyEngine
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.server import defaults, warm_prompts
from vllm_mlx_harmony.server.defaults import (
    read,
)
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.standin import Script

Run = Callable[[Coroutine[Any, Any, Any]], Any]

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Weather in Paris?"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "18 °C"}
SCRIPTS = [
    Script("<|message|>Weather in Paris?<|end|>", "<|channel|>final<|message|>Ask.<|return|>"),
]


@pytest.fixture(scope="module", autouse=True)
def _active() -> Iterator[None]:
    contract.activate(ServerSettings.read())
    yield
    contract.deactivate()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[HarmonyEngine]:
    engine = HarmonyEngine(str(standin.write(tmp_path_factory.mktemp("standin"), SCRIPTS)))
    run(engine.start())
    yield engine
    run(engine.stop())


def spelled(prompt: tuple[int, ...]) -> str:
    return vocab.encoding().decode(list(prompt))


@pytest.mark.parametrize("method", ["chat", "stream_chat"])
def test_chat_methods_of_the_engine_name_our_route(engine: Any, method: str) -> None:
    with pytest.raises(HostError, match="/v1/chat/completions"):
        getattr(engine, method)(messages=[ASK], max_tokens=50)


def test_texts_are_encoded_in_a_thread(
    engine: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte takes half a second, during which all other requests would stop."""
    threads, encode = [], vocab.encode_with_control

    def record(text: str) -> list[int]:
        threads.append(threading.current_thread())
        return encode(text)

    monkeypatch.setattr(vocab, "encode_with_control", record)
    run(engine.generate("<|start|>user<|message|>Hi.<|end|><|start|>assistant", max_tokens=3))
    assert len(threads) == 1 and threading.current_thread() not in threads


def test_tokenizer_is_read_on_first_use(engine: Any, run: Run) -> None:
    """It is a second vocabulary in memory, which no route needs."""
    run(engine.generate("Hi.", max_tokens=1))
    assert engine._tokenizer_read is None
    prompt = "<|start|>user<|message|>déjà-vu 東京<|end|>"
    assert engine.tokenizer.encode(prompt) == vocab.encode_with_control(prompt)
    assert engine.tokenizer is engine.tokenizer


async def count_cached(engine: Any, prompt: tuple[int, ...], tenant: str) -> int:
    settings = GenerationSettings(max_tokens=1, temperature=0.0, top_p=1.0)
    async with aclosing(
        engine.engine.generate(GenerationRequest(prompt, settings, tenant))
    ) as steps:
        return max([step.cached_tokens async for step in steps])


def test_warm_prompts_serve_every_tenant(engine: Any, run: Run) -> None:
    body = {"model": "m", "messages": [SYSTEM, ASK]}
    prompt = render(chat.read(body, VllmMlx(ServerSettings.read()).defaults(None)).turn).ids
    begins = vocab.encoding().decode(prompt).index("<|start|>user")
    shared = len(ids_of(vocab.encoding().decode(prompt)[:begins]))
    assert run(engine.engine.reusable_tokens(prompt, "alice")) == 0
    warmed = run(prompt_warmup.warm_prefix_cache(engine, [[SYSTEM], [{"role": "nobody"}]]))
    assert (warmed["count"], warmed["skipped"]) == (1, 1)
    assert shared < warmed["total_prompt_tokens"] < len(prompt)
    for tenant in ("alice", "bob"):
        assert run(engine.engine.reusable_tokens(prompt, tenant)) >= shared
        assert shared <= run(count_cached(engine, prompt, tenant)) < len(prompt) - 1
        assert (
            run(count_cached(engine, prompt, tenant)) == len(prompt) - 1
        )  # cached by the tenant itself
    assert shared <= run(engine.engine.reusable_tokens(prompt, "carol")) < len(prompt) - 1


@pytest.mark.parametrize(
    "messages",
    [[{"role": "nobody", "content": "x"}], [RESULT], [{"role": "assistant", "content": 5}]],
)
def test_unrenderable_warm_prompt_is_rejected(messages: list[Any]) -> None:
    with pytest.raises(RequestError):
        warm_prompts.beginning(messages, Defaults(), render)


def test_other_models_are_warmed_up_by_the_host(run: Run) -> None:
    async def own(*arguments: Any, **keywords: Any) -> Any:
        return arguments, keywords

    other = SimpleNamespace()
    warmed = run(engine_factories.warm_prefix_cache(own)(other, [[ASK]], max_tokens=2))
    assert warmed == ((other, [[ASK]]), {"max_tokens": 2})


# --- Defaults.


@pytest.mark.parametrize(
    ("pinned", "date"), [("2025-01-31", "2025-01-31"), ("none", None), ("None", None)]
)
def test_date_can_be_pinned_or_omitted(
    pinned: str, date: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MLX_HARMONY_DATE", pinned)
    assert VllmMlx(ServerSettings.read()).defaults(None).date == date


def test_prompt_has_the_date_of_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_MLX_HARMONY_DATE", raising=False)
    host = VllmMlx(ServerSettings.read())
    for day in ("2026-11-24", "2026-11-24", "2026-11-25"):
        calendar = SimpleNamespace(today=lambda day=day: datetime.date.fromisoformat(day))
        clock = SimpleNamespace(date=calendar)
        monkeypatch.setattr(adapter, "datetime", clock)
        monkeypatch.setattr(defaults, "datetime", clock)
        assert host.defaults(None).date == day


def test_attachments_are_omitted_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, meant in (("", Attachments.OMIT), ("omit", Attachments.OMIT), ("Refuse", "refuse")):
        monkeypatch.setenv("VLLM_MLX_HARMONY_ATTACHMENTS", word)
        assert VllmMlx(ServerSettings.read()).defaults(None).attachments == meant
    monkeypatch.setenv("VLLM_MLX_HARMONY_ATTACHMENTS", "show")
    with pytest.raises(HostError, match="ATTACHMENTS: 'show' is not one of omit, refuse"):
        read({}, ServerSettings.read())


def test_reasoning_field_is_configurable(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, meant in (("", "both"), ("Reasoning", "reasoning"), ("both", "both")):
        monkeypatch.setenv("VLLM_MLX_HARMONY_REASONING_FIELD", word)
        assert VllmMlx(ServerSettings.read()).defaults(None).reasoning_field == meant
    monkeypatch.setenv("VLLM_MLX_HARMONY_REASONING_FIELD", "thinking")
    with pytest.raises(HostError, match="is not one of both, reasoning, reasoning_content"):
        read({}, ServerSettings.read())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"reasoning_effort": "banana"}, "banana"),
        ({"model_identity": 5}, "model_identity"),
        ({"builtin_tools": 5}, "builtin_tools"),
        ({"builtin_tools": "python"}, "builtin_tools"),
        ({"builtin_tools": ["python", ["x"]]}, "builtin_tools"),
        ({"builtin_tools": ["search"]}, "builtin_tools"),
    ],
)
def test_invalid_template_option_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(HostError, match=f"^--default-chat-template-kwargs: .*{named}"):
        read(options, ServerSettings.read())


def test_template_options_of_the_server_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"reasoning_effort": "high", "model_identity": "X", "builtin_tools": ["python"]}
    monkeypatch.setattr(server, "_default_chat_template_kwargs", options)
    monkeypatch.setenv("VLLM_MLX_HARMONY_DATE", "none")
    high = chat.read({"model": "m", "messages": [ASK]}, Defaults()).turn.effort.HIGH
    assert VllmMlx(ServerSettings.read()).defaults(None) == Defaults(high, "X", None, ("python",))


@pytest.mark.parametrize(
    ("options", "none_effort", "expected"),
    [
        ({}, "", (Effort.MEDIUM, True)),
        ({"reasoning_effort": "none"}, "", (Effort.LOW, False)),
        ({"reasoning_effort": "none"}, "low", (Effort.LOW, True)),
        ({"enable_thinking": False}, "", (Effort.LOW, False)),
        ({"enable_thinking": False}, "none", (Effort.LOW, False)),
        ({"enable_thinking": False, "reasoning_effort": "high"}, "", (Effort.HIGH, True)),
    ],
)
def test_server_can_disable_thinking(
    options: dict[str, Any],
    none_effort: str,
    expected: tuple[Effort, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_MLX_HARMONY_NONE_EFFORT", none_effort)
    server_defaults = read(options, ServerSettings.read())
    assert (server_defaults.effort, server_defaults.thinking) == expected
    word = "none" if none_effort == "low" else "high"
    assert server_defaults.reasoning(("reasoning_effort", word))[1]


def test_none_effort_must_be_an_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MLX_HARMONY_NONE_EFFORT", "a little")
    with pytest.raises(HostError, match="VLLM_MLX_HARMONY_NONE_EFFORT"):
        read({}, ServerSettings.read())
