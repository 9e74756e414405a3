"""Flags of ``vllm-mlx serve`` that have another meaning for a Harmony model, or no effect.

The size and directory of vllm-mlx's prefix cache apply to ours (`resources`). Its other cache flags
have no effect, nor do flags for text prompts and for features that gpt-oss does not have. Only
flags that were *given* are reported: a default is not a request.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.server.defaults import OPTIONS

Flags = Mapping[str, Any]
"""Flags and their values, by their names in the parsed arguments."""

READ = (
    "model models_config host port api_key rate_limit mcp_config mllm tool_call_parser "
    "enable_auto_tool_choice reasoning_parser default_chat_template_kwargs disable_prefix_cache "
    "cache_memory_mb cache_memory_percent prefix_trie_cache_memory_mb ssd_cache_dir "
    "ssd_cache_max_gb max_num_seqs prefill_batch_size completion_batch_size prefill_step_size "
    "chunked_prefill_tokens gpu_memory_utilization stream_interval"
)
"""Flags that this package reads, by their names in the parsed arguments."""

WITHOUT_EFFECT = {
    "the prefix cache is bounded in bytes, not in entries (--cache-memory-mb)": (
        "prefix_cache_size no_memory_aware_cache"
    ),
    "quantized KV caches do not support gpt-oss's attention sinks": (
        "kv_cache_quantization kv_cache_quantization_bits kv_cache_quantization_group_size "
        "kv_cache_min_quantize_tokens"
    ),
    "the prefix cache is not paged": "use_paged_cache paged_cache_block_size max_cache_blocks",
    "the prefix cache is always a tree (--cache-memory-mb bounds it)": (
        "prefix_trie_cache prefix_trie_cache_size"
    ),
    "SpecPrefill drops prompt tokens; the model gets the exact prompt": (
        "specprefill specprefill_threshold specprefill_keep_pct specprefill_backbone_pct "
        "specprefill_draft_model"
    ),
    "gpt-oss has no heads for multi-token prediction": (
        "enable_mtp mtp_num_draft_tokens mtp_optimistic"
    ),
    "gpt-oss takes text only": "mllm_prefill_step_size",
    "the context is never truncated; a request starts only if its memory fits": "max_kv_size",
}
"""Flags without effect, by their names in the parsed arguments, and the reasons."""


@dataclass(frozen=True, slots=True)
class FlagsRead:
    """A row of `contract`: the flags in `READ`. If vllm-mlx renamed one, it would be ignored."""

    label: str = "flags of serve"
    why: str = "they apply to Harmony models, too"
    required: bool = False

    def problem(self) -> str | None:
        try:
            known = _parsed(["serve", "MODEL"], None)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            return f"vllm-mlx serve: its flags cannot be read ({error})"
        missing = [_spelled(name) for name in READ.split() if name not in known]
        return f"vllm-mlx serve has no {', '.join(missing)}" if missing else None

    def apply(self) -> None:
        """Changes nothing."""


def explicit_flags(args: argparse.Namespace) -> Flags:
    """The flags that were given on the command line of this process, by name.

    If ``args`` was not parsed from that: those that differ from vllm-mlx's defaults.
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


def _parsed(line: list[str], default: str | None) -> Flags:
    """A command line as vllm-mlx parses it; ``default``, if given, replaces all defaults."""
    from vllm_mlx.cli import create_parser

    parser = create_parser()
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    if default is not None:
        for action in commands.choices["serve"]._actions:
            action.default = default
    try:
        with redirect_stderr(StringIO()):
            return dict(vars(parser.parse_args(line)))
    except SystemExit:  # this is not the command line that vllm-mlx parsed
        return {}


def cache_bytes(flags: Flags) -> int | None:
    """Size of the prefix cache in bytes by the given flags; ``None`` if none of them sets it.

    A percentage is of the free memory, as in vllm-mlx. Raises ``HostError`` for an invalid one.
    """
    from vllm_mlx.memory_cache import MemoryCacheConfig

    if flags.get("disable_prefix_cache"):
        return 0
    megabytes = flags.get("cache_memory_mb", flags.get("prefix_trie_cache_memory_mb"))
    if megabytes is not None:
        return max(0, int(megabytes)) << 20
    share = flags.get("cache_memory_percent")
    if share is None:
        return None
    try:
        limit: int = MemoryCacheConfig(max_memory_percent=share).compute_memory_limit()
    except ValueError as error:
        raise HostError(f"--cache-memory-percent: {error}") from error
    return limit


def without_effect(flags: Flags, *, enabled: bool) -> list[str]:
    """A sentence for each group of given flags that have no effect, with the reason.

    ``enabled``: whether there is a prefix cache.
    """
    sentences = []
    off = {} if enabled else {"the prefix cache is off": "ssd_cache_dir ssd_cache_max_gb"}
    for why, names in {**off, **WITHOUT_EFFECT}.items():
        if found := [_spelled(name) for name in names.split() if name in flags]:
            sentences.append(f"{', '.join(found)}: {why}")
    template_options = flags.get("default_chat_template_kwargs") or ()
    if options := [name for name in template_options if name not in OPTIONS]:
        known = f"the supported ones are {', '.join(OPTIONS)}"
        sentences.append(f"--default-chat-template-kwargs {', '.join(options)}: {known}")
    parser = flags.get("reasoning_parser")
    if parser not in (None, "harmony", "gpt_oss", "gpt-oss"):
        sentences.append(f"--reasoning-parser {parser}: reasoning is read from token ids")
    return sentences


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
