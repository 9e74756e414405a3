"""Flags of ``vllm-mlx serve`` that mean something else for a Harmony model, or nothing.

Prompts go to the engine as token ids, and their keys and values are held by `engine.prefix_cache`.
So vllm-mlx's limits on the size of its cache are the budget of ours, its directory is where ours
outlives the process (`resources`), and whatever else is said of its caches has no effect; the same
is true of what works on a prompt's text, and of what gpt-oss cannot do.

A flag counts when it was *given*: its default says nothing about what anybody expects.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, fields
from io import StringIO
from typing import Any

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host.resources import Flags
from vllm_mlx_harmony.server.defaults import OPTIONS

BYTES_PER_MB = 1 << 20
"""As vllm-mlx counts the megabytes of its flags."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Flags without effect, by their names in the parsed arguments, and the reason to give.

    ``off``: only where there is no prefix cache.
    """

    names: tuple[str, ...]
    why: str
    off: bool = False


IDLE: tuple[Idle, ...] = (
    Idle(("ssd_cache_dir", "ssd_cache_max_gb"), "the prefix cache is off", off=True),
    Idle(
        ("prefix_cache_size", "no_memory_aware_cache"),
        "the prefix cache is bounded in bytes, not in entries (--cache-memory-mb)",
    ),
    Idle(
        (
            "kv_cache_quantization",
            "kv_cache_quantization_bits",
            "kv_cache_quantization_group_size",
            "kv_cache_min_quantize_tokens",
        ),
        "attention with sinks, as gpt-oss has it, takes no quantized keys and values",
    ),
    Idle(
        ("use_paged_cache", "paged_cache_block_size", "max_cache_blocks"),
        "the prefix cache shares what prompts have in common without blocks",
    ),
    Idle(
        ("prefix_trie_cache", "prefix_trie_cache_size"),
        "the prefix cache is always on (--cache-memory-mb bounds it)",
    ),
    Idle(
        (
            "specprefill",
            "specprefill_threshold",
            "specprefill_keep_pct",
            "specprefill_backbone_pct",
            "specprefill_draft_model",
        ),
        "it leaves tokens of the prompt out; the model gets the exact prompt",
    ),
    Idle(
        ("enable_mtp", "mtp_num_draft_tokens", "mtp_optimistic"),
        "gpt-oss has no heads for multi-token prediction",
    ),
    Idle(("mllm_prefill_step_size",), "gpt-oss takes text only"),
    Idle(("max_kv_size",), "gpt-oss sees its whole context; memory is admitted before it is used"),
)


def given(args: Any) -> dict[str, Any]:
    """The flags that ``args``, the parsed command line of this process, was made of, by name.

    Where ``args`` came from elsewhere: those that differ from vllm-mlx's defaults.
    """
    if sys.argv[1:2] == ["serve"]:
        found = _parsed(sys.argv[1:], argparse.SUPPRESS)
        if found and all(getattr(args, name, None) == value for name, value in found.items()):
            return found
    defaults = _parsed(["serve", "MODEL"], None)
    return {
        name: value
        for name, value in vars(args).items()
        if name in defaults and value != defaults[name]
    }


def _parsed(line: list[str], default: str | None) -> dict[str, Any]:
    """A command line, parsed by vllm-mlx; ``default`` replaces every flag's own, if it is given."""
    from vllm_mlx.cli import create_parser

    parser = create_parser()
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    if default is not None:
        for action in commands.choices["serve"]._actions:
            action.default = default
    try:
        with redirect_stderr(StringIO()):
            return dict(vars(parser.parse_args(line)))
    except SystemExit:  # not the line that vllm-mlx has parsed before
        return {}


def budget(flags: Mapping[str, Any]) -> int | None:
    """Bytes that the given flags allow the prefix cache; ``None`` when they say nothing of it.

    A share is one of the memory that is free now, as vllm-mlx takes it. Raises ``HostError``.
    """
    from vllm_mlx.memory_cache import MemoryCacheConfig

    if flags.get("disable_prefix_cache"):
        return 0
    megabytes = flags.get("cache_memory_mb", flags.get("prefix_trie_cache_memory_mb"))
    if megabytes is not None:
        return max(0, int(megabytes)) * BYTES_PER_MB
    share = flags.get("cache_memory_percent")
    if share is None:
        return None
    try:
        limit: int = MemoryCacheConfig(max_memory_percent=share).compute_memory_limit()
    except ValueError as error:
        raise HostError(f"--cache-memory-percent: {error}") from error
    return limit


def of_engine(args: Any) -> Flags:
    """What of ``args``, the parsed command line, is an engine's."""
    given = {each.name: getattr(args, each.name, None) for each in fields(Flags)}
    return Flags(**{name: value for name, value in given.items() if value is not None})


def without_effect(flags: Mapping[str, Any], *, enabled: bool) -> list[str]:
    """A sentence for each reason that given flags have no effect: which, and why.

    ``enabled``: there is a prefix cache.
    """
    sentences = []
    for row in IDLE:
        names = [] if row.off and enabled else [option(n) for n in row.names if n in flags]
        if names:
            sentences.append(f"{', '.join(names)}: {row.why}")
    options = [
        name for name in flags.get("default_chat_template_kwargs") or () if name not in OPTIONS
    ]
    if options:
        known = f"{', '.join(OPTIONS)} are what there is"
        sentences.append(f"--default-chat-template-kwargs {', '.join(options)}: {known}")
    parser = flags.get("reasoning_parser")
    if parser not in (None, "harmony", "gpt_oss", "gpt-oss"):
        sentences.append(f"--reasoning-parser {parser}: reasoning is read from token ids")
    return sentences


def option(name: str) -> str:
    """The flag as it is typed."""
    return f"--{name.replace('_', '-')}"
