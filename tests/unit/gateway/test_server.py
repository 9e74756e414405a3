"""What a gateway does besides answering: detection of engines, keys, limits, reasoning budgets,
grammars, settings, and its own process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sse import arriving

pytest.importorskip("prometheus_client")

import httpx
import psutil
from app_server import run_server
from fake_engines import KINDS, METADATA, EngineFault, FakeEngine
from gateway_in_process import MODEL, CountingGateway
from harmony_text import ids_of
from starlette.applications import Starlette
from waiting import wait_until

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.cli.gateway import parser
from vllm_mlx_harmony.cli.process import free_port
from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.gateway import access_log, app, workers
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines import detection, http
from vllm_mlx_harmony.gateway.engines.detection import Spec, detect, same_model, start_line
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.settings import PREFIX, GatewaySettings, Key, load
from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.tools import config

CHAT = "/v1/chat/completions"
SCRIPTS = {"Hello": "<|channel|>final<|message|>Good day to you.<|return|>"}
USER = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


# --- Detection


def detect_engine(url: str, kind: str = "", model: str = MODEL) -> http.HttpEngine:
    async def run_detection() -> http.HttpEngine:
        async with http.client() as client:
            return await detect(client, Spec(url, kind), model)

    return asyncio.run(run_detection())


MISSING = {
    "vllm": "nothing",
    "vllm-tokens": "nothing",
    "sglang": "grammar, logprobs",
    "sglang-incremental": "grammar, logprobs",
    "llamacpp": "grammar, min tokens, tenant salt, logprobs",
    "vllm-mlx": "nothing",
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind_of_engine_is_detected(kind: str) -> None:
    with run_server(FakeEngine(kind, SCRIPTS).app) as url:
        engine = detect_engine(url)
        line = start_line(engine)
    assert engine.dialect.name == kind.removesuffix("-incremental")
    assert (engine.served_name, engine.context_length) == (MODEL, 4096)
    assert line.startswith(
        f"{url}: {engine.dialect.name} serves '{MODEL}', 4096 tokens of context; "
    )
    assert line.endswith(f"missing: {MISSING[kind]}")


SPACE = ("grammar white space",)


@pytest.mark.parametrize(
    ("kind", "path", "about", "missing"),
    [
        (
            "sglang",
            "/get_server_info",
            {"grammar_backend": "llguidance", "device": "cuda"},
            (*SPACE, "logprobs"),
        ),
        (  # SGLang's MLX backend
            "sglang",
            "/get_server_info",
            {"grammar_backend": "llguidance", "device": "mps"},
            (*SPACE, "penalties", "logprobs"),
        ),
        ("vllm", "/version", {"version": "0.27.1"}, ()),  # as of vllm-metal
        ("vllm-mlx", "/harmony/v1/generate", {"harmony": 1}, ("logprobs",)),  # 0.2.0
    ],
)
def test_missing_capabilities_are_reported(
    kind: str,
    path: str,
    about: dict[str, Any],
    missing: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(METADATA[kind], path, about)
    with run_server(FakeEngine(kind, SCRIPTS).app) as url:
        engine = detect_engine(url)
        assert (engine.dialect.name, engine.capabilities.missing) == (kind, missing)


def test_vllm_without_grammar_enforcement_is_detected() -> None:
    with run_server(FakeEngine("vllm", SCRIPTS, grammar=False).app) as url:
        assert detect_engine(url).capabilities.missing == ("grammar",)


BUSY = (("Retry-After", "1"),)
TRIALS: dict[str, tuple[EngineFault, str]] = {
    "503": (EngineFault(status=503, headers=BUSY), ""),
    "429": (EngineFault(status=429), ""),
    "500": (EngineFault(status=500), ""),
    "breaks off before a status": (EngineFault(then="die", after=None), ""),
    "breaks off": (EngineFault(then="die", after=0), ""),
    "is silent before a status": (EngineFault(then="hang", after=None), ""),
    "is silent": (EngineFault(then="hang", after=0), ""),
    "400": (EngineFault(status=400), "grammar"),
    "says so in the stream": (EngineFault(then="error", after=0), "grammar"),
    "ends": (EngineFault(then="close", after=0), "grammar"),
}
"""The fault of a trial, and what the engine then lacks; if empty, it is not known yet."""


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize(("fault", "missing"), TRIALS.values(), ids=TRIALS)
@pytest.mark.parametrize("kind", ["vllm", "vllm-tokens"])
def test_busy_engine_keeps_its_grammars(
    kind: str, fault: EngineFault, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "TRY_SECONDS", 0.5)
    # After a 500 it is tried without a grammar, too, which fails as well.
    trials = [fault, fault] if fault.status == 500 else [fault]
    engine = FakeEngine(kind, SCRIPTS, trial_faults=trials)
    with run_server(engine.app) as url:
        if missing:
            assert detect_engine(url).capabilities.missing == (missing,)
        else:
            with pytest.raises(http.EngineUnavailable):
                detect_engine(url)
            assert detect_engine(url).capabilities.missing == ()


def test_engine_that_fails_on_a_grammar_has_none() -> None:
    engine = FakeEngine("vllm", SCRIPTS, trial_faults=[EngineFault(status=500)])
    with run_server(engine.app) as url:
        assert detect_engine(url).capabilities.missing == ("grammar",)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The errors of the gateway, without those of asyncio, which other tests may cause."""
    logged = [record for record in caplog.records if record.levelname == "ERROR"]
    return [record.getMessage() for record in logged if record.name == "vllm_mlx_harmony"]


@pytest.mark.parametrize("kind", ["", "vllm-mlx"])
def test_plugin_without_id_endpoint_is_rejected(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a Harmony server, and every request would fail."""
    monkeypatch.delenv("VLLM_MLX_HARMONY_ID_ENDPOINT", raising=False)
    other = CountingGateway("", (FakeEngine("vllm", SCRIPTS), "http://127.0.0.1:9"))
    with run_server(application(other)) as url:
        expected = "no id endpoint: start it with `vllm-mlx-harmony serve --id-endpoint`"
        with pytest.raises(HostError, match=expected):
            detect_engine(url, kind)
        settings = GatewaySettings(engines=(Spec(url, kind),), model=MODEL)
        with run_server(gateway(settings)) as base:
            ready = httpx.get(f"{base}/ready", timeout=180)
            assert ready.status_code == 503
            assert expected in ready.json()["engines"][0]["problem"]
            refused = httpx.post(base + CHAT, json=USER, timeout=180)
            assert refused.status_code == 503
            assert "/ready" in refused.json()["error"]["message"]
    (error,) = errors(caplog)
    assert error.startswith("no engine can be used; until one can, requests get 503:")
    assert f"{url}: this vllm-mlx has {expected}" in error


def test_rejected_engine_key_is_reported_with_a_remedy() -> None:
    other = CountingGateway("the-right-key", (FakeEngine("vllm", SCRIPTS), "http://127.0.0.1:9"))
    with run_server(application(other)) as url, pytest.raises(HostError, match="set --engine-key"):
        detect_engine(url)


def test_usable_engine_is_no_error_at_startup(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with run_server(FakeEngine("vllm", SCRIPTS).app) as url:
        specs = (Spec(url), Spec("http://127.0.0.1:9"))  # nobody answers at the second
        with run_server(gateway(GatewaySettings(engines=specs, model=MODEL))):
            pass
    assert not errors(caplog)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("openai/gpt-oss-120b", "openai/gpt-oss-120b", True),
        ("openai/gpt-oss-120b", "gpt-oss-120b", True),
        ("/models/gpt-oss-20b/", "openai/gpt-oss-20b", True),
        ("gpt-oss-20b", "mlx-community/gpt-oss-20b-MXFP4-Q8", True),
        ("gpt-oss-20b", "/srv/gpt-oss-20b-mxfp4.gguf", True),
        ("openai/gpt-oss-120b", "openai/gpt-oss-20b", False),
        ("gpt-oss-20b", "meta-llama/Llama-3.3-70B", False),
    ],
)
def test_names_of_one_model_are_recognized(first: str, second: str, same: bool) -> None:
    assert same_model(first, second) is same is same_model(second, first)


@pytest.mark.parametrize(
    ("serves", "model", "engine_model"),
    [
        (MODEL, MODEL, ""),
        (f"openai/{MODEL}", MODEL, ""),
        ("m", "gpt-4.1", "m"),
        ("m", MODEL, None),
        ("gpt-oss-120b", MODEL, None),
        (MODEL, "gpt-4.1", None),
        ("m", MODEL, "n"),
    ],
)
def test_engine_with_another_model_is_rejected(
    serves: str, model: str, engine_model: str | None
) -> None:
    """Unless its name is set: clients would take its answers for those of the gateway's model."""
    with run_server(FakeEngine("sglang", SCRIPTS, name=serves).app) as url:
        flags = {"engines": [url], "model": model, "engine_model": engine_model}
        settings = load(flags, {})
        with run_server(gateway(settings)) as base:
            ready = httpx.get(f"{base}/ready", timeout=180)
            answer = httpx.post(base + CHAT, json={**USER, "model": model}, timeout=180)
        if engine_model is None or engine_model == "n":
            assert (ready.status_code, answer.status_code) == (503, 503)
            problem = ready.json()["engines"][0]["problem"]
            assert (
                f"the engine serves {serves}, not {engine_model or model}: set --model" in problem
            )
        else:
            assert (ready.status_code, answer.status_code) == (200, 200)
            assert answer.json()["model"] == model


@pytest.mark.parametrize(
    ("host", "keys", "is_open"),
    [
        ("127.0.0.1", (), False),
        ("::1", (), False),
        ("localhost", (), False),
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("10.0.0.7", (), True),
        ("gateway.example", (), True),
        ("0.0.0.0", (Key("a", digest("key-of-a")),), False),
    ],
)
def test_gateway_without_keys_is_open(host: str, keys: tuple[Key, ...], is_open: bool) -> None:
    settings = GatewaySettings(engines=(), model=MODEL, host=host, keys=keys)
    assert settings.open is is_open


def test_reload_changes_keys_and_limits() -> None:
    """Running requests are answered to their end."""
    engine = FakeEngine("sglang", LONG, held=True)
    with ExitStack() as stack:
        url = stack.enter_context(run_server(engine.app))
        old = GatewaySettings(
            engines=(Spec(url),), model=MODEL, keys=(Key("a", digest("key-of-a")),)
        )
        host = app.Gateway(old)
        base = stack.enter_context(run_server(app._GatewayApp(host, application(host))))

        def ask(key: str, stream: bool = False) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            body = {**USER, "stream": stream}
            return httpx.post(base + CHAT, json=body, headers=headers, timeout=180)

        running = ThreadPoolExecutor(1).submit(ask, "key-of-a", True)
        wait_until(lambda: engine.running == 1, "a request to run")
        new = replace(
            old, keys=(Key("b", digest("key-of-b")),), requests_per_minute=1, port=old.port + 1
        )
        host.reload(new)
        assert ask("key-of-a").status_code == 401
        engine.held = False
        assert ask("key-of-b").status_code == 200
        assert ask("key-of-b").status_code == 429
        assert running.result().text.rstrip().endswith("[DONE]")
        assert host.settings.port == old.port
        with pytest.raises(HostError, match="all keys were removed"):
            host.reload(replace(new, keys=()))
        assert ask("key-of-c").status_code == 401


def test_unrecognized_server_is_rejected() -> None:
    with run_server(Starlette()) as url:
        pattern = r"not recognized as any of vllm, .* --engine KIND=URL"
        with pytest.raises(HostError, match=pattern):
            detect_engine(url)
        with pytest.raises(HostError, match="not a kind of engine"):
            detect_engine(url, kind="nonsense")
    with pytest.raises(http.EngineUnavailable, match="cannot be reached"):
        detect_engine("http://127.0.0.1:9")


# --- Counting


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("kind", KINDS)
def test_cached_tokens_are_counted_wherever_engines_report_them(kind: str) -> None:
    """llama.cpp and vllm-mlx report them after the last id."""
    engine = FakeEngine(kind, SCRIPTS, pause=0.02)
    with ExitStack() as stack:
        url = stack.enter_context(run_server(engine.app))
        base = stack.enter_context(run_server(application(CountingGateway("", (engine, url)))))
        answer = httpx.post(base + CHAT, json=USER, timeout=180).json()
        assert answer["choices"][0]["message"]["content"] == "Good day to you."
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        wait_until(lambda: engine.running == 0, "the engine to end")
        assert engine.aborted == 0


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("kind", KINDS)
def test_engine_is_stopped_after_a_stop_string(kind: str) -> None:
    """It knows no stop strings: it would go on to its own end, and the answer would wait for it."""
    script = "<|channel|>final<|message|>One two" + " three" * 900 + "<|return|>"
    engine = FakeEngine(kind, {"Hello": script}, pause=0.1)
    with ExitStack() as stack:
        url = stack.enter_context(run_server(engine.app))
        base = stack.enter_context(run_server(application(CountingGateway("", (engine, url)))))
        answer = httpx.post(base + CHAT, json={**USER, "stop": [" two"]}, timeout=180).json()
        assert answer["choices"][0]["message"]["content"] == "One"
        wait_until(lambda: engine.running == 0, "the engine to be stopped")
        assert engine.aborted == 1


# --- Keys, tenants, limits


def test_keys_are_tenants_and_limited() -> None:
    engine = FakeEngine("vllm", SCRIPTS)
    with ExitStack() as stack:
        url = stack.enter_context(run_server(engine.app))
        keys = (Key("one", digest("key-1")), Key("two", digest("key-2")))
        settings = GatewaySettings(
            engines=(Spec(url),), model=MODEL, keys=keys, requests_per_minute=3
        )
        base = stack.enter_context(run_server(gateway(settings)))

        def ask(key: str, path: str = "/v1/responses", **options: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}".encode("latin-1")} if key else {}
            method = options.pop("method", "POST")
            return httpx.request(method, base + path, headers=headers, timeout=30, **options)

        body = {"model": MODEL, "input": "Hello"}
        wrong = ("", "wrong", "ké", "key-1\xa0", "\xa0key-1", "key-1\x85")
        assert [ask(key, json=body).status_code for key in wrong] == [401] * 6
        mine = ask("key-1", json=body).json()
        path = f"/v1/responses/{mine['id']}"
        assert ask("key-1", path, method="GET").status_code == 200
        assert ask("key-2", path, method="GET").status_code == 404
        assert ask(" key-1", json=body).status_code == 200
        refused = ask("\tkey-1", json=body)
        assert refused.status_code == 429
        assert 0 < int(refused.headers["retry-after"]) <= 60
        assert ask("key-2", json=body).status_code == 200
        salts = [sent["cache_salt"] for sent in engine.bodies]
        assert salts[0] == salts[1] != salts[2]
        metrics = httpx.get(f"{base}/metrics", timeout=180).text
        assert 'vllm_mlx_harmony_refused_total{reason="key"} 6.0' in metrics
        assert 'vllm_mlx_harmony_refused_total{reason="rate limit"} 1.0' in metrics
        assert "key-1" not in metrics
        assert httpx.get(f"{base}/ready", timeout=180).json()["status"] == "ready"


# --- Tools that the gateway runs

WEATHER_CALL = (
    '<|channel|>commentary to=weather.now <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
)


def test_configured_tools_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp")
    servers = Path(__file__).parents[2] / "support" / "mcp_servers.py"
    file = tmp_path / "tools.json"
    server = {"command": sys.executable, "args": [str(servers), "weather"], "timeout": 60}
    file.write_text(json.dumps({"servers": {"weather": server}}))
    monkeypatch.setenv(config.TOOLS_VARIABLE, "all")
    flags = {"model": MODEL, "mcp_config": str(file)}
    engine = FakeEngine("vllm", {**SCRIPTS, "Is it warm in Rome?": WEATHER_CALL, "20 °C": BEHIND})
    before = set(psutil.Process().children())
    with ExitStack() as stack:
        url = stack.enter_context(run_server(engine.app))
        base = stack.enter_context(run_server(gateway(load({**flags, "engines": [url]}, {}))))
        body = {"model": MODEL, "input": "Is it warm in Rome?"}
        answer = httpx.post(f"{base}/v1/responses", json=body, timeout=120).json()
        assert [item["type"] for item in answer["output"]] == ["mcp_call", "message"]
        assert answer["output"][0]["output"].startswith("Rome: 20 °C")
        assert answer["output"][1]["content"][0]["text"] == "Enough."
        assert 'vllm_mlx_harmony_tool_calls_total{server="weather",tool="now"} 1.0' in (
            httpx.get(f"{base}/metrics", timeout=180).text
        )
    assert set(psutil.Process().children()) <= before


SEARCH_CALL = '<|channel|>analysis to=browser.search code<|message|>{"query": "Rome"}<|call|>'


def test_front_end_has_the_settings_of_its_gateway() -> None:
    flags = {"engines": ["http://127.0.0.1:9"], "web_search": "searxng:http://127.0.0.1:9"}
    served = gateway(load({"model": MODEL, **flags}, {}))
    assert served.front_end.settings is served.host.server_settings
    assert served.front_end.settings.web_search == flags["web_search"]


def test_web_search_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The flag is enough; the search engine is a server on 127.0.0.1."""
    pytest.importorskip("httpx2")
    pytest.importorskip("lxml")
    import fake_web

    with fake_web.run_site() as site, ExitStack() as stack:
        site.search(("Rome", "https://a.example/rome", "It has 20 °C."))
        flags = {"model": MODEL, "web_search": f"searxng:{site.url}"}
        engine = FakeEngine(
            "vllm", {**SCRIPTS, "Is it warm in Rome?": SEARCH_CALL, "20 °C": BEHIND}
        )
        url = stack.enter_context(run_server(engine.app))
        base = stack.enter_context(run_server(gateway(load({**flags, "engines": [url]}, {}))))
        body = {"model": MODEL, "input": "Is it warm in Rome?", "tools": [{"type": "web_search"}]}
        answer = httpx.post(f"{base}/v1/responses", json=body, timeout=120).json()
        assert [item["type"] for item in answer["output"]] == ["web_search_call", "message"]
        assert answer["output"][0]["action"]["query"] == "Rome"
        listed = httpx.get(f"{base}/v1/models", timeout=120).json()["data"]
        assert listed[0]["web_search"] is True
        del body["tools"]
        answer = httpx.post(f"{base}/v1/responses", json=body, timeout=120).json()
        assert answer["output"][0]["type"] != "web_search_call"
    flags = {"--engine": "http://127.0.0.1:9", "--model": "m", "--web-search": "google"}
    assert main(["gateway", *(part for item in flags.items() for part in item)]) == 2
    assert "--web-search: 'google' is not one of ddgs" in capsys.readouterr().err


def test_invalid_tools_configuration_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "tools.json"
    monkeypatch.setenv(config.TOOLS_VARIABLE, "on")
    flags = ["--engine", "http://127.0.0.1:9", "--model", "m", "--mcp-config", str(missing)]
    assert main(["gateway", *flags]) == 2
    assert str(missing) in capsys.readouterr().err
    monkeypatch.delenv(config.TOOLS_VARIABLE)
    assert main(["gateway", *flags]) == 2
    assert "--mcp-config has no effect without" in capsys.readouterr().err


# --- What is enforced


THINKING = "<|channel|>analysis<|message|>" + "On and on it goes. " * 50
BEHIND = "<|channel|>final<|message|>Enough.<|return|>"


class EndlessThinker(FakeEngine):
    """Thinks until its prompt ends with ``stops_after``."""

    stops_after, answer = "<|end|><|start|>assistant", BEHIND

    def output_ids(self, prompt: Any) -> tuple[int, ...]:
        opened = ids_of(self.stops_after)
        continued = tuple(prompt[-len(opened) :]) == opened and len(self.prompts) > 1
        return ids_of(self.answer if continued else THINKING)


class StubbornThinker(EndlessThinker):
    """Begins another analysis wherever it may."""

    stops_after, answer = (
        "<|end|><|start|>assistant<|channel|>final",
        "<|message|>Enough.<|return|>",
    )


@pytest.mark.nightly(sample=5)
@pytest.mark.parametrize("thinker", [EndlessThinker, StubbornThinker])
@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_ends_at_its_budget(kind: str, thinker: type[EndlessThinker]) -> None:
    with ExitStack() as stack:
        engine = thinker(kind, {})
        url = stack.enter_context(run_server(engine.app))
        host = CountingGateway("", (engine, url))
        base = stack.enter_context(run_server(application(host)))
        request = {**USER, "thinking_token_budget": 10, "max_tokens": 500}
        answer = httpx.post(base + CHAT, json=request, timeout=180).json()
    assert answer["choices"][0]["message"]["content"] == "Enough."
    assert 10 <= answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 50
    first, *continued = engine.prompts
    assert len(continued) == [EndlessThinker, StubbornThinker].index(thinker) + 1
    assert all(prompt[: len(first)] == first for prompt in continued)


ORDER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "order", "parameters": ORDER, "strict": True}}


def test_unenforceable_request_is_rejected() -> None:
    with ExitStack() as stack:
        engine = FakeEngine("llamacpp", SCRIPTS)
        url = stack.enter_context(run_server(engine.app))
        host = CountingGateway("", (engine, url))
        base = stack.enter_context(run_server(application(host)))
        for fields in (
            {"tools": [TOOL]},
            {"tools": [{**TOOL, "function": {"name": "f"}}], "tool_choice": "required"},
        ):
            for stream in (False, True):
                request = {**USER, **fields, "stream": stream}
                refused = httpx.post(base + CHAT, json=request, timeout=180)
                assert refused.status_code == 400, fields
                assert "cannot enforce grammars" in refused.json()["error"]["message"]
        assert engine.bodies == []
        for fields in ({}, {"response_format": {"type": "json_object"}}):  # only shown, not strict
            request = {**USER, **fields}
            assert httpx.post(base + CHAT, json=request, timeout=180).status_code == 200, fields
        assert not any("grammar" in body for body in engine.bodies)


def test_engine_with_grammars_gets_them() -> None:
    with ExitStack() as stack:
        engine = FakeEngine("vllm-mlx", SCRIPTS)
        url = stack.enter_context(run_server(engine.app))
        base = stack.enter_context(run_server(application(CountingGateway("", (engine, url)))))
        request = {**USER, "response_format": {"type": "json_object"}}
        assert httpx.post(base + CHAT, json=request, timeout=180).status_code == 200
    assert engine.bodies[0]["grammar"].startswith("start: ")


# --- Settings


def test_flags_override_environment_overrides_file(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(
        'model = "of the file"\nport = 1\ntokens_per_day = 5\nkeys = { alice = " alice-key " }\n'
        '[[engines]]\nurl = "http://one:1"\nkind = "vllm"\nkey = "k"\n'
        '[[engines]]\nurl = "http://two:2"\n'
    )
    environment = {f"{PREFIX}PORT": "2", f"{PREFIX}TOKENS_PER_DAY": "6", f"{PREFIX}ENGINE_KEY": "e"}
    read = load({"port": "3"}, environment, str(file))
    assert (read.model, read.port, read.tokens_per_day) == ("of the file", 3, 6)
    assert read.engines == (Spec("http://one:1", "vllm", "k"), Spec("http://two:2", "", "e"))
    assert read.keys == (Key("alice", digest("alice-key")),)
    other_environment = {
        f"{PREFIX}ENGINES": "http://a, vllm=http://b",
        f"{PREFIX}KEYS": "key-of-any,bob=bobs-key",
    }
    other = load({"model": "m"}, other_environment)
    assert other.engines == (Spec("http://a"), Spec("http://b", "vllm"))
    assert other.keys == (Key("key-1", digest("key-of-any")), Key("bob", digest("bobs-key")))


@pytest.mark.parametrize("source", ["/models/gpt=oss-20b", "mlx-community/gpt=oss-20b"])
def test_local_model_has_the_name_of_its_directory(source: str) -> None:
    read = load({"engines": [f"mlx:{source}"]}, {})
    assert (read.local_model, read.model, read.http_engines) == (source, "gpt=oss-20b", ())
    with pytest.raises(HostError, match="changes only with a restart"):
        read.reloaded(load(REQUIRED, {}))
    with pytest.raises(HostError, match="requires --workers 1"):
        workers.check(replace(read, workers=2))


def test_local_model_requires_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_mlx_harmony.gateway.local", None)
    with pytest.raises(HostError, match=re.escape("pip install 'vllm-mlx-harmony-server[mlx]'")):
        gateway(load({"engines": ["mlx:/models/gpt-oss-20b"]}, {}))


REQUIRED = {"engines": ["http://a"], "model": "m"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "--engine is required"),
        ({"engines": ["http://a"]}, "--model is required"),
        ({**REQUIRED, "engines": ["a:8000"]}, "is not a valid URL"),
        ({**REQUIRED, "engines": ["tgi=http://a"]}, "is not one of vllm"),
        ({**REQUIRED, "engines": ["mlx:"]}, "mlx: must be followed by a directory or a repository"),
        ({**REQUIRED, "engines": ["mlx:a", "http://b"]}, "mlx:a must be the only engine"),
        ({**REQUIRED, "engines": ["http://a", "vllm=http://a/"]}, "duplicate engine URL http://a"),
        ({**REQUIRED, "port": "many"}, "--port: 'many' should be a valid integer"),
        ({**REQUIRED, "port": "70000"}, "--port: '70000' should be less than or equal to 65535"),
        ({**REQUIRED, "tokens_per_day": True}, "--tokens-per-day: True should be a number"),
        ({**REQUIRED, "temperature": "hot"}, "--temperature: 'hot' should be a valid number"),
        ({**REQUIRED, "top_p": "1.5"}, "--top-p: '1.5' should be less than or equal to 1"),
        ({**REQUIRED, "top_p": float("nan")}, "--top-p: nan should be"),
        (
            {**REQUIRED, "access_log": "xml"},
            "--access-log: 'xml' should be 'off', 'text' or 'json'",
        ),
        ({**REQUIRED, "model": 5}, "--model: 5 should be a valid string"),
        ({**REQUIRED, "builtin_tools": "python"}, "--builtin-tool: 'python' should be a list"),
        (
            {**REQUIRED, "shutdown_grace": "-1"},
            "--shutdown-grace: '-1' should be greater than or equal to 0",
        ),
        ({**REQUIRED, "reasoning_effort": "much"}, "--reasoning-effort: 'much' is not one of"),
        ({**REQUIRED, "builtin_tools": ["shell"]}, "--builtin-tool: 'shell' is not one of"),
        ({**REQUIRED, "keys": ["a=12345678", "b= 12345678"]}, "two names have the same key"),
        ({**REQUIRED, "keys": ["ké345678"]}, "key 1 is not printable ASCII"),
        ({**REQUIRED, "keys": {"a": 12345678}}, "the key of 'a' is not printable ASCII"),
        ({**REQUIRED, "keys": ["12345678", "1234567"]}, "key 2 is shorter than 8 characters"),
        ({**REQUIRED, "keys": ["a========"]}, "key 1 is shorter than 8 characters"),
        ({**REQUIRED, "keys": ["production="]}, "key 1 has a name but no key"),
        (
            {**REQUIRED, "keys": {"a": {"tokens_per_day": 5}}},
            "the key of 'a' is not printable ASCII",
        ),
        ({**REQUIRED, "keys": {"a": "sha256:12"}}, "the key of 'a' is not sha256: and 64 hexa"),
        ({**REQUIRED, "keys": {"a": f"sha256:{'é' * 64}"}}, "the key of 'a' is not printable"),
        (
            {**REQUIRED, "keys": {"a": {"key": "12345678", "tokens": 5}}},
            "unknown field 'tokens' of the key of 'a'; expected key, requests_per_minute, tok",
        ),
        *(
            (
                {**REQUIRED, "keys": {"a": {"key": "12345678", "tokens_per_day": wrong}}},
                "tokens_per_day of the key of 'a' is not an integer from 0",
            )
            for wrong in (-1, True, "5", 1.5)
        ),
        ({**REQUIRED, "keys": []}, "empty list"),
        ({**REQUIRED, "keys": {}}, "empty list"),
        ({**REQUIRED, "keys": ""}, "--key: the value should be a list"),
    ],
)
def test_invalid_setting_is_named(flags: dict[str, Any], expected: str) -> None:
    with pytest.raises(HostError, match=expected):
        load(flags, {})


BASE64 = "MDEyMzQ1Njc4OWFiY2RlZg=="


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BASE64, ("key-1", BASE64)),
        ("MDEyMzQ1Njc4OWFiY2RlZjA=", ("key-1", "MDEyMzQ1Njc4OWFiY2RlZjA=")),
        (f"team={BASE64}", ("team", BASE64)),
        ("a+b/c=defgh", ("key-1", "a+b/c=defgh")),  # no name
        (" 12345678\n", ("key-1", "12345678")),
    ],
)
def test_key_may_end_in_an_equals_sign(text: str, expected: tuple[str, str]) -> None:
    assert load({**REQUIRED, "keys": [text]}, {}).keys == (Key(expected[0], digest(expected[1])),)


SECRET = "s3cret-9f2e"


@pytest.mark.parametrize("name", ["inspect", "metrics_by_key"])
def test_boolean_flags_need_no_value(name: str) -> None:
    word = name.replace("_", "-")
    for flag, value in ((f"--{word}", True), (f"--no-{word}", False)):
        flags = vars(parser().parse_args(["--model", "m", "--engine", "http://a", flag]))
        assert flags.pop("config") is None and getattr(load(flags, {}), name) is value


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"keys": SECRET}, "--key: the value should be a list"),
        ({"keys": [f"a-{SECRET}="]}, "key 1 has a name but no key"),
        ({"keys": {"a": [SECRET]}}, "the key of 'a'"),
        ({"engine_key": [SECRET]}, "--engine-key: the value should be a valid string"),
        (
            {"engines": {"url": "http://a", "key": SECRET}},
            "--engine: the value should be a list",
        ),
        (
            {"engines": [{"url": "http://a", "key": SECRET, "knd": "vllm"}]},
            "--engine: unknown field 'knd' of an engine; expected url, kind, key, model",
        ),
        (
            {"engines": [{"url": "http://a", "key": [SECRET]}]},
            "the key of an engine must be a string",
        ),
        ({"engines": [f"http://me:{SECRET}@a:8000"]}, "must have no user, query or fragment"),
        ({"engines": [f"http://a:8000/?key={SECRET}"]}, "must have no user, query or fragment"),
        ({"engines": [f"me:{SECRET}@a:8000"]}, "'a:8000' is not a valid URL"),
        ({"engines": [f"http://me:{SECRET}@a:many"]}, "'a:many' is not a valid URL"),
    ],
)
def test_messages_contain_no_key(flags: dict[str, Any], expected: str) -> None:
    """Messages go to logs, on SIGHUP for instance."""
    with pytest.raises(HostError, match=expected) as caught:
        load({**REQUIRED, **flags}, {})
    assert SECRET not in caught.value.message


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("KEY", SECRET, rf"^{PREFIX}KEY is not a setting; did you mean {PREFIX}KEYS\?$"),
        ("ENGINE", "http://a", f"did you mean {PREFIX}ENGINES"),
        ("BUILTIN_TOOL", "python", f"did you mean {PREFIX}BUILTIN_TOOLS"),
        ("TOKENSPERDAY", "5", f"did you mean {PREFIX}TOKENS_PER_DAY"),
        ("CONFG", "gateway.toml", f"did you mean {PREFIX}CONFIG"),
        ("COLOUR", "red", f"^{PREFIX}COLOUR is not a setting$"),
        ("KEYS", "", "--key: empty list"),
        ("KEYS", " ,", "--key: empty list"),
    ],
)
def test_variable_without_effect_is_rejected(name: str, value: str, expected: str) -> None:
    """A gateway whose keys are not read is open to everybody."""
    with pytest.raises(HostError, match=expected):
        load(REQUIRED, {PREFIX + name: value})


def test_variables_of_kubernetes_services_are_ignored() -> None:
    service = {
        "SERVICE_HOST": "10.0.0.11",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP": "8000",
        "PORT": "tcp://10.0.0.11:8000",
        "PORT_8000_TCP": "tcp://10.0.0.11:8000",
        "PORT_8000_TCP_PROTO": "tcp",
        "PORT_8000_TCP_PORT": "8000",
        "PORT_8000_TCP_ADDR": "10.0.0.11",
    }
    environment = {PREFIX + name: value for name, value in service.items()}
    assert load(REQUIRED, environment) == load(REQUIRED, {})


def test_invalid_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    for content, expected in (
        ("model = ", "is not TOML"),
        ('modle = "m"', "modle is not a setting; did you mean model"),
    ):
        file.write_text(content)
        with pytest.raises(HostError, match=expected):
            load({}, {}, str(file))
    with pytest.raises(HostError, match="cannot be read"):
        load({}, {}, str(tmp_path / "nowhere"))


def test_variables_of_the_front_end_apply_to_a_gateway(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_MLX_HARMONY_ATTACHMENTS", "refuse")
    assert app.Gateway(load(REQUIRED, {})).defaults(None).attachments is Attachments.REFUSE
    for variable in ("VLLM_MLX_HARMONY_ATTACHMENTS", enforcement.GRAMMAR_VARIABLE):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "show")
            assert main(["gateway", "--model", MODEL, "--engine", "http://127.0.0.1:9"]) == 2
        assert f"{variable}: 'show' is not one of" in capsys.readouterr().err


# --- The process


@contextmanager
def process(engine: str, port: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """The gateway's own process, once it is ready."""
    command = [sys.executable, "-m", "vllm_mlx_harmony", "gateway", "--model", MODEL]
    command += ["--engine", engine, "--port", str(port), *flags]
    environment = {**os.environ, "VLLM_MLX_HARMONY_GRAMMAR": "off"}
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        wait_until(lambda: status(port, "/ready") == 200, "the gateway", 120)
        yield started
    finally:
        started.kill()
        started.communicate()


def test_invalid_port_causes_no_traceback() -> None:
    command = [sys.executable, "-m", "vllm_mlx_harmony", "gateway", "--model", "m"]
    command += ["--engine", "http://a", "--port", "99999"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "should be less than or equal to 65535" in result.stderr
    assert "Traceback" not in result.stderr


def status(port: int, path: str) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=180).status_code
    except httpx.HTTPError:
        return 0


LONG = {"Hello": "<|channel|>final<|message|>" + "word " * 60 + "<|return|>"}


def test_sigterm_lets_streams_end_and_rejects_requests() -> None:
    engine = FakeEngine("vllm", LONG, held=True)
    port = free_port()
    flags = ("--shutdown-grace", "300")
    with run_server(engine.app) as url, process(url, port, *flags) as running:
        base = f"http://127.0.0.1:{port}"
        with httpx.stream(
            "POST", base + CHAT, json={**USER, "stream": True}, timeout=180
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.send_signal(signal.SIGTERM)
            wait_until(lambda: status(port, "/ready") == 503, "the drain to begin")
            assert status(port, "/health") == 200
            refused = httpx.post(base + CHAT, json=USER, timeout=180)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert refused.headers["retry-after"] == "5"
            engine.held = False
            events = list(arriving(lines))
        text = "".join(
            choice["delta"].get("content") or ""
            for event in events
            for choice in event.get("choices", ())
        )
        assert text == "word " * 60
        assert running.wait(180) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


@pytest.mark.nightly
def test_drain_has_a_limit() -> None:
    engine = FakeEngine("vllm", LONG, held=True)
    port = free_port()
    flags = ("--shutdown-grace", "2", "--host", "0.0.0.0")
    with run_server(engine.app) as url, process(url, port, *flags) as running:
        base = f"http://127.0.0.1:{port}"
        with httpx.stream(
            "POST", base + CHAT, json={**USER, "stream": True}, timeout=180
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.send_signal(signal.SIGTERM)
            *_, last = arriving(lines)
        assert last["error"]["code"] == "shutting_down"
        running.wait(180)
        assert running.stderr is not None
        assert "no keys are set: everyone who can reach 0.0.0.0" in running.stderr.read()
        wait_until(lambda: engine.running == 0, "the engine to be freed")


@pytest.mark.nightly
def test_kill_9_frees_the_engine_and_another_takes_the_port() -> None:
    engine = FakeEngine("vllm", LONG, held=True)
    port = free_port()
    with run_server(engine.app) as url:
        with process(url, port) as running:
            base = f"http://127.0.0.1:{port}"
            request = {**USER, "stream": True}
            with (
                suppress(httpx.HTTPError),
                httpx.stream("POST", base + CHAT, json=request, timeout=180) as answer,
            ):
                for _ in answer.iter_lines():
                    running.kill()
            wait_until(lambda: engine.running == 0, "the engine to be freed")
            assert engine.aborted == 1
        engine.held = False
        with process(url, port):
            assert httpx.post(base + CHAT, json=USER, timeout=180).status_code == 200


# --- The access log


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("form", ["json", "text", "off"])
def test_each_request_is_logged(form: Any, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    thinks = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    engine = FakeEngine("sglang", {"Hello": thinks + SCRIPTS["Hello"]})
    keys = (Key("alice", digest("key-of-alice")),)
    with ExitStack() as stack:
        url = stack.enter_context(run_server(engine.app))
        settings = GatewaySettings(
            engines=(Spec(url),), model=MODEL, keys=keys, access_log=form, requests_per_minute=1
        )
        base = stack.enter_context(run_server(gateway(settings)))
        caplog.set_level("INFO", access_log.logger.name)

        def ask(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            body = {**USER, "stream": stream}
            return httpx.post(base + CHAT, json=body, headers=headers, timeout=180).status_code

        assert [ask(key) for key in ("key-of-alice", "wrong-key", "key-of-alice")] == [
            200,
            401,
            429,
        ]

        def lines() -> list[str]:
            name = access_log.logger.name
            return [record.getMessage() for record in caplog.records if record.name == name]

        wait_until(lambda: form == "off" or len(lines()) == 3, "the lines")
        written = lines()
    assert "key-of-alice" not in "".join(written)
    if form == "off":
        assert written == []
        return
    if form == "text":
        assert (
            " key=alice method=POST path=/v1/chat/completions status=200 result=success "
            in (written[0])
        )
        assert " key=- " in written[1] and " status=401 result=- " in written[1]
        return
    answered, refused, limited = map(json.loads, written)
    assert (answered["key"], answered["status"], answered["result"]) == ("alice", 200, "success")
    assert answered["input"] > answered["cached"] == 16
    assert answered["output"] > answered["reasoning"] > 0
    assert 0 < answered["first"] <= answered["seconds"]
    assert (refused["key"], refused["status"], refused["output"]) == (None, 401, 0)
    assert (limited["key"], limited["status"], limited["first"]) == ("alice", 429, None)


def test_client_cannot_forge_a_line() -> None:
    path = '/v1/x y\nkey=root "'
    access = access_log.Entry("text", "POST", path, "m", 0.0, status=404)
    line = access.line("t", 0.5)
    assert line.splitlines() == [line]
    assert ' path="/v1/x y\\nkey=root \\"" status=404 ' in line
    access.form = "json"
    assert json.loads(access.line("t", 0.5))["path"] == path
