"""Installed distributions: versions, and the parts that another package can replace.

The parts are the tool parser, the prompt renderer and the streaming context, each an entry point.
Another distribution that provides one of the same name takes precedence over this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from vllm_mlx_harmony import __version__
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host.patching import locate

DISTRIBUTION = "vllm-mlx-harmony"

LIBRARIES = ("openai-harmony", "oss-harmony")
"""Distributions that provide `openai_harmony`; the second is a fork of the first."""

FLAGS = ("harmony", "gpt-oss")
"""Values of `--tool-call-parser` that activate this plugin, and the names of its entry points."""
TOOL_PARSERS = "vllm_mlx.tool_parsers"
PROMPT_RENDERERS = "vllm_mlx.prompt_renderers"
STREAMING_CONTEXTS = "vllm_mlx.streaming_contexts"

OWN = {
    TOOL_PARSERS: "vllm_mlx_harmony.host.tool_parser:HarmonyToolParser",
    PROMPT_RENDERERS: "vllm_mlx_harmony.core.render:render",
    STREAMING_CONTEXTS: "vllm_mlx_harmony.core.context:StreamingHarmonyContext",
}
"""As in `pyproject.toml`; used if this package is not installed (a checkout on the path)."""


def versions() -> dict[str, str]:
    """Versions of this package, vllm-mlx and the Harmony library, if installed."""
    found = {DISTRIBUTION: __version__}
    for name in ("vllm-mlx", *LIBRARIES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Extensions:
    """The parts of an installation. `sources` describes the origin of each, by group."""

    tool_parser: type[Any]
    renderer: Any
    context: type[Any]
    sources: Mapping[str, str] = field(default_factory=dict)


def find(name: str) -> Extensions:
    """The parts of this name (`harmony`, `gpt-oss`). Raises HostError as `resolve` does."""
    return Extensions(
        tool_parser=resolve(TOOL_PARSERS, name),
        renderer=resolve(PROMPT_RENDERERS, name),
        context=resolve(STREAMING_CONTEXTS, name),
        sources={group: source(group, name) for group in OWN},
    )


_in_use: Extensions | None = None


def use(parts: Extensions | None) -> None:
    """Sets what ``in_use`` returns; with ``None``, what would be found."""
    global _in_use
    _in_use = parts


def in_use() -> Extensions:
    """The parts of the installation; without one, those that it would have."""
    return _in_use or find(FLAGS[0])


def resolve(group: str, name: str) -> Any:
    """The object of an entry point. Raises HostError if there is none, or it cannot be loaded."""
    entry = _choose(group, name)
    target = entry.value if entry else OWN.get(group)
    if target is None:
        raise HostError(f"no entry point {name!r} in {group}")
    try:
        return entry.load() if entry else locate(target)
    except Exception as error:
        raise HostError(f"{group} {name} = {target} cannot be loaded: {error}") from error


def source(group: str, name: str) -> str:
    """`distribution version (object)` of what `resolve` returns."""
    entry = _choose(group, name)
    if entry is None:
        return OWN.get(group, "")
    version = entry.dist.version if entry.dist else ""
    return f"{_distribution(entry)} {version} ({entry.value})"


def _choose(group: str, name: str) -> metadata.EntryPoint | None:
    """The first in alphabetical order of distributions, this one last: the same everywhere."""
    entries = metadata.entry_points(group=group, name=name)
    return min(entries, key=_rank, default=None)


def _rank(entry: metadata.EntryPoint) -> tuple[bool, str]:
    distribution = _distribution(entry)
    return distribution == DISTRIBUTION, distribution


def _distribution(entry: metadata.EntryPoint) -> str:
    name = str(entry.dist.metadata["Name"]) if entry.dist else ""
    return name.lower().replace("_", "-")
