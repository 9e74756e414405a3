"""The host's flags: those that we honour, and those that are named because they have no effect."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_mlx")

import vllm_mlx.cli

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.turn import Tool
from vllm_mlx_harmony.engine import resources
from vllm_mlx_harmony.engine.mlx_engine import Options
from vllm_mlx_harmony.engine.scheduler import BatchLimits
from vllm_mlx_harmony.host import activation, flags, startup_banner, tools
from vllm_mlx_harmony.server.settings import ServerSettings, ToolsMode
from vllm_mlx_harmony.server.tools import browser
from vllm_mlx_harmony.server.tools.config import ToolsConfig
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

MB = 1 << 20


def parse(*line: str) -> Any:
    """A command line, parsed by the host's own parser."""
    return vllm_mlx.cli.create_parser().parse_args(["serve", "MODEL", *line])


def parse_given(monkeypatch: pytest.MonkeyPatch, *line: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["vllm-mlx", "serve", "MODEL", *line])
    return flags.explicit_flags(parse(*line))


def test_flag_with_its_default_value_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse_given(monkeypatch, "--cache-memory-percent", "0.2", "--prefill-step-s=2048")
    assert options == {
        "command": "serve",
        "model": "MODEL",
        "cache_memory_percent": 0.2,
        "prefill_step_size": 2048,
    }


@pytest.mark.parametrize("argv", [["pytest"], ["vllm-mlx", "serve", "OTHER"], ["x", "serve", "-?"]])
def test_without_matching_argv_default_values_do_not_count(
    monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    options = flags.explicit_flags(parse("--use-paged-cache", "--max-cache-blocks", "1000"))
    assert options == {"use_paged_cache": True}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", None),
        ("--continuous-batching", None),
        ("--cache-memory-mb 512", 512 * MB),
        ("--cache-memory-mb 0", 0),
        ("--prefix-trie-cache-memory-mb 64", 64 * MB),
        ("--prefix-trie-cache-memory-mb 64 --cache-memory-mb 128", 128 * MB),
        ("--cache-memory-percent 0.5 --cache-memory-mb 7", 7 * MB),
        ("--cache-memory-percent 0.5", 5000 * MB),
        ("--cache-memory-percent 0.2", 2000 * MB),
        ("--disable-prefix-cache", 0),
        ("--disable-prefix-cache --cache-memory-mb 9", 0),
    ],
)
def test_size_of_cache_is_read_from_flags(
    monkeypatch: pytest.MonkeyPatch, line: str, expected: int | None
) -> None:
    monkeypatch.setattr("vllm_mlx.memory_cache._get_available_memory", lambda: 10_000 * MB)
    assert flags.cache_bytes(parse_given(monkeypatch, *line.split())) == expected


def test_invalid_percentage_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostError, match=r"--cache-memory-percent: .*1\.5"):
        flags.cache_bytes(parse_given(monkeypatch, "--cache-memory-percent", "1.5"))


NAMED = [
    ("--prefix-cache-size 5", "--prefix-cache-size: the prefix cache is bounded in bytes"),
    ("--no-memory-aware-cache", "--no-memory-aware-cache: "),
    ("--kv-cache-quantization", "--kv-cache-quantization: quantized KV caches do not"),
    ("--kv-cache-quantization-bits 8", "--kv-cache-quantization-bits: "),
    ("--kv-cache-quantization-group-size 64", "--kv-cache-quantization-group-size: "),
    ("--kv-cache-min-quantize-tokens 9", "--kv-cache-min-quantize-tokens: "),
    ("--use-paged-cache", "--use-paged-cache: "),
    ("--paged-cache-block-size 32", "--paged-cache-block-size: "),
    ("--max-cache-blocks 32", "--max-cache-blocks: "),
    ("--prefix-trie-cache", "--prefix-trie-cache: the prefix cache is always a tree"),
    ("--prefix-trie-cache-size 3", "--prefix-trie-cache-size: "),
    ("--specprefill", "--specprefill: SpecPrefill drops prompt tokens"),
    ("--specprefill-threshold 8192", "--specprefill-threshold: "),
    ("--specprefill-keep-pct 0.2", "--specprefill-keep-pct: "),
    ("--specprefill-backbone-pct 0.2", "--specprefill-backbone-pct: "),
    ("--specprefill-draft-model m", "--specprefill-draft-model: "),
    ("--enable-mtp", "--enable-mtp: gpt-oss has no heads"),
    ("--mtp-num-draft-tokens 2", "--mtp-num-draft-tokens: "),
    ("--mtp-optimistic", "--mtp-optimistic: "),
    ("--mllm-prefill-step-size 9", "--mllm-prefill-step-size: gpt-oss takes text only"),
    ("--reasoning-parser qwen3", "--reasoning-parser qwen3: reasoning is read from"),
    (
        '--default-chat-template-kwargs {"colour":1,"reasoning_effort":"low"}',
        "--default-chat-template-kwargs colour: ",
    ),
    ("--max-kv-size 4096", "--max-kv-size: the context is never truncated"),
]


@pytest.mark.parametrize(("line", "expected"), NAMED, ids=[row[0] for row in NAMED])
def test_flags_without_effect_are_named(
    monkeypatch: pytest.MonkeyPatch, line: str, expected: str
) -> None:
    options = parse_given(monkeypatch, *line.split())
    (sentence,) = flags.without_effect(options, enabled=True)
    assert sentence.startswith(expected)
    assert sentence.partition(": ")[2]


HONOURED = (
    "--max-num-seqs 256 --prefill-batch-size 4 --completion-batch-size 4 --stream-interval 4 "
    "--chunked-prefill-tokens 512 --gpu-memory-utilization 0.5 --continuous-batching "
    "--prefill-step-size 64 --cache-memory-mb 5 --cache-memory-percent 0.1 --enable-prefix-cache "
    "--ssd-cache-dir d --ssd-cache-max-gb 10 "
    "--prefix-trie-cache-memory-mb 4 --max-tokens 9 --max-request-tokens 9 --timeout 5 "
    "--reasoning-parser harmony --api-key k --rate-limit 3 --default-temperature 1 --host h"
)


def test_flags_with_effect_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse_given(monkeypatch, *HONOURED.split())
    assert flags.without_effect(options, enabled=True) == []


@pytest.mark.parametrize("line", ["--ssd-cache-dir d", "--ssd-cache-dir d --ssd-cache-max-gb 9"])
def test_disk_flags_without_prefix_cache_are_named(
    monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    options = parse_given(monkeypatch, "--disable-prefix-cache", *line.split())
    (sentence,) = flags.without_effect(options, enabled=False)
    assert sentence.startswith("--ssd-cache-dir") and sentence.endswith("the prefix cache is off")


def test_disabled_prefix_cache_is_not_called_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = "--disable-prefix-cache --prefix-trie-cache --ssd-cache-dir d"
    off, tree = flags.without_effect(parse_given(monkeypatch, *line.split()), enabled=False)
    assert off == "--ssd-cache-dir: the prefix cache is off"
    assert (
        tree
        == "--prefix-trie-cache: the prefix cache is always a tree (--cache-memory-mb bounds it)"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "up to 7 MiB in memory"),
        ("--cache-memory-mb 64", "up to 64 MiB in memory"),
        ("--cache-memory-mb 64 --continuous-batching", "up to 64 MiB in memory"),
        ("--cache-memory-mb 0", "off"),
        ("--disable-prefix-cache", "off"),
    ],
)
def test_startup_log_has_the_size_of_the_prefix_cache(line: str, expected: str) -> None:
    try:
        activation._configure_engines(parse(*line.split()), ServerSettings(cache=7 * MB))
        assert dict(startup_banner._common())["prefix cache"] == expected
    finally:
        activation._configure_engines(parse(), ServerSettings())


@pytest.mark.parametrize("line", ["", "--continuous-batching"])
def test_engine_flags_reach_the_engine(line: str) -> None:
    batching = (
        "--max-num-seqs 9 --prefill-batch-size 4 --completion-batch-size 5 --stream-interval 3"
    )
    more = "--chunked-prefill-tokens 64 --prefill-step-size 96 --gpu-memory-utilization 0.5"
    options = resources.engine_options(parse(*f"{batching} {more} {line}".split()), Options())
    expected = BatchLimits(sequences=9, prompts=4, answers=5, chunk=96, chunk_beside=64)
    assert options == Options(expected, utilization=0.5, interval=3)
    assert resources.engine_options(parse(), Options()) == Options()
    namespace = SimpleNamespace(stream_interval=0, prefill_step_size=64, gpu_memory_utilization=0.4)
    limits = replace(options.limits, chunk=64)
    assert resources.engine_options(namespace, options) == Options(
        limits, utilization=0.4, interval=1
    )


def test_engine_settings_reach_the_engine() -> None:
    assert resources.configured_options(ServerSettings()) == Options()
    settings = ServerSettings(pause_ms=100, speculate="forced", queue=3, memory=4, wired=5)
    options = resources.configured_options(settings)
    assert options == Options(
        BatchLimits(pause=0.1), speculate="forced", queue=3, memory=4, wired=5
    )
    assert resources.engine_options(parse(), options) == options


ELSEWHERE = {
    *("help", "model", "models_config", "memory_budget_gb", "served_model_name", "host", "port"),
    *("max_tokens", "max_request_tokens", "continuous_batching", "warm_prompts", "mcp_config"),
    *("api_key", "rate_limit", "timeout", "enable_metrics", "auto_unload_idle_seconds"),
    *("lazy_load_model", "max_audio_upload_mb", "max_tts_input_chars", "trust_remote_code"),
    *("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "mllm"),
    *("mllm_draft_model", "mllm_draft_kind", "mllm_draft_block_size", "default_mllm_draft"),
    *("default_temperature", "default_top_p", "default_top_k", "default_min_p"),
    "default_thinking_token_budget",
    *("default_presence_penalty", "default_repetition_penalty", "default_chat_template_kwargs"),
    *("embedding_model", "embedding_max_length", "embedding_overflow_policy", "rerank_model"),
    *("download_timeout", "download_retries", "offline", "prefill_step_size"),
    *("enable_prefix_cache", "disable_prefix_cache", "cache_memory_mb", "cache_memory_percent"),
    "prefix_trie_cache_memory_mb",
    *("max_num_seqs", "prefill_batch_size", "completion_batch_size", "chunked_prefill_tokens"),
    *("stream_interval", "gpu_memory_utilization"),
}
"""Flags that do what the host documents; they are tested where they act."""


def test_every_flag_of_the_host_is_classified() -> None:
    """A new flag of the host belongs in one of the two lists."""
    idle = {"ssd_cache_dir", "ssd_cache_max_gb"}
    idle |= {name for names in flags.WITHOUT_EFFECT.values() for name in names.split()}
    assert idle & ELSEWHERE == set()
    assert set(vars(parse())) - {"command"} == (idle | ELSEWHERE) - {"help"}


def test_mllm_flag_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HostError, match="--mllm is not supported: gpt-oss takes text only"):
        activation._reject_unusable_options(parse("--mllm"), ServerSettings())


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("127.0.0.1", 8000, ""),
        ("localhost", 8000, ""),
        ("0.0.0.0", 8000, ""),
        ("::", 9, " --url http://127.0.0.1:9"),
        ("127.0.0.1", 9, " --url http://127.0.0.1:9"),
        ("::1", 8000, " --url http://[::1]:8000"),
        ("192.168.1.5", 8000, " --url http://192.168.1.5:8000"),
        ("192.168.1.5", 9, " --url http://192.168.1.5:9"),
    ],
)
def test_next_command_has_the_address_of_the_server(host: str, port: int, url: str) -> None:
    startup_banner.set_flags(argparse.Namespace(host=host, port=port), ())
    assert dict(startup_banner._common())["next"] == f"vllm-mlx-harmony launch codex{url}"


def test_stopped_tools_are_no_longer_running(monkeypatch: pytest.MonkeyPatch) -> None:
    toolbox = Toolbox.of(ToolsConfig(), ServerSettings())
    monkeypatch.setattr(tools, "running", toolbox)
    asyncio.run(tools.Tools(toolbox).stop())
    assert tools.running is None


def test_startup_log_has_web_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no configuration file; if one is used, `init_mcp` creates the browser."""
    fake_browser = SimpleNamespace(
        label="browser",
        description="",
        timeout=1.0,
        problem="",
        tools=tuple(map(Tool, ("search", "open", "find"))),
        engine=SimpleNamespace(name="ddgs"),
    )
    monkeypatch.setattr(browser, "of", lambda settings: fake_browser)
    monkeypatch.setattr(tools, "running", None)
    settings = ServerSettings(web_search="ddgs")
    activation._reject_unusable_options(parse(), settings)
    activation._reject_unusable_options(parse(), replace(settings, tools=ToolsMode.ALL))
    lines = tools.start_browser(settings, None)
    assert tools.running is not None and tools.running.use is ToolsMode.ON
    startup_banner.set_flags(argparse.Namespace(), (), lines)
    assert [value for name, value in startup_banner._common() if name == "tools"] == [
        "browser: search, open, find",
        "the web is searched with ddgs, and pages are opened from here",
    ]
    assert tools.start_browser(settings, "mcp.json") == lines
    assert tools.start_browser(replace(settings, tools=ToolsMode.ON), "mcp.json") == []
    assert tools.start_browser(ServerSettings(), None) == []
