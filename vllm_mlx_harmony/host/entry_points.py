"""The replaceable parts: tool parser, prompt renderer, streaming context, found by entry point.

Knows the groups and the names. Another distribution that provides the same name wins over this one,
so that somebody can replace a part by installing a package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host.patching import locate

DISTRIBUTION = "vllm-mlx-harmony"

FLAGS = ("harmony", "gpt-oss")
"""Values of `--tool-call-parser` that ask for this plugin, and the names of its entry points."""
TOOL_PARSERS = "vllm_mlx.tool_parsers"
PROMPT_RENDERERS = "vllm_mlx.prompt_renderers"
STREAMING_CONTEXTS = "vllm_mlx.streaming_contexts"

OWN = {
    TOOL_PARSERS: "vllm_mlx_harmony.host.tool_parser:HarmonyToolParser",
    PROMPT_RENDERERS: "vllm_mlx_harmony.core.render:render",
    STREAMING_CONTEXTS: "vllm_mlx_harmony.core.context:StreamingHarmonyContext",
}
"""As in `pyproject.toml`; used by itself where nothing is installed (a checkout on the path)."""


@dataclass(frozen=True, slots=True)
class Extensions:
    """What an installation works with. `sources` says, by group, where each part is from."""

    tool_parser: type[Any]
    renderer: Any
    context: type[Any]
    sources: Mapping[str, str] = field(default_factory=dict)


def find(name: str) -> Extensions:
    """The parts that go by `name` (`harmony`, `gpt-oss`). Raises HostError as `resolve` does."""
    return Extensions(
        tool_parser=resolve(TOOL_PARSERS, name),
        renderer=resolve(PROMPT_RENDERERS, name),
        context=resolve(STREAMING_CONTEXTS, name),
        sources={group: source(group, name) for group in OWN},
    )


_in_use: Extensions | None = None


def use(parts: Extensions | None) -> None:
    """From now on ``in_use`` gives these; ``None``: the ones that would be found."""
    global _in_use
    _in_use = parts


def in_use() -> Extensions:
    """The parts of the installation; without one, those that it would have."""
    return _in_use or find(FLAGS[0])


def resolve(group: str, name: str) -> Any:
    """The object behind an entry point. Raises HostError when there is none or it cannot load."""
    entry = _choose(group, name)
    target = entry.value if entry else OWN.get(group)
    if target is None:
        raise HostError(f"no entry point {name!r} in {group}")
    try:
        return entry.load() if entry else locate(target)
    except Exception as error:
        raise HostError(f"{group} {name} = {target} cannot be loaded: {error}") from error


def source(group: str, name: str) -> str:
    """`distribution version (object)` of what `resolve` gives."""
    entry = _choose(group, name)
    if entry is None:
        return OWN.get(group, "")
    version = entry.dist.version if entry.dist else ""
    return f"{_distribution(entry)} {version} ({entry.value})"


def _choose(group: str, name: str) -> metadata.EntryPoint | None:
    entries = metadata.entry_points(group=group, name=name)
    # Sorted by name, ours last: two strangers give the same answer on every machine.
    ranked = sorted(
        entries, key=lambda entry: (_distribution(entry) == DISTRIBUTION, _distribution(entry))
    )
    return ranked[0] if ranked else None


def _distribution(entry: metadata.EntryPoint) -> str:
    name = str(entry.dist.metadata["Name"]) if entry.dist else ""
    return name.lower().replace("_", "-")
