"""Installed distributions: versions, and the parts that another package can replace.

The parts are the tool parser, the prompt renderer and the streaming context, each an entry point.
Another distribution that provides one of the same name takes precedence over this one. A part must
have what the protocol of its group has (``Renderer`` and ``ContextFactory`` in `server.host`, the
``ToolParser`` of vllm-mlx). That is checked once, when the server starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from inspect import signature
from typing import TYPE_CHECKING, Any

from vllm_mlx_harmony import __version__
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.required_names import OTHERS, find_problem, locate

if TYPE_CHECKING:
    from vllm_mlx_harmony.server.host import ContextFactory, Renderer

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
"""In the order of `Extensions`, as in the `pyproject.toml` of the plugin.

Used if this package is not installed (a checkout on the path).
"""


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
    """The parts. `sources` has the origin of each, by group: `distribution version (object)`."""

    tool_parser: type
    renderer: Renderer
    context: ContextFactory
    sources: Mapping[str, str] = field(default_factory=dict)


def find(name: str) -> Extensions:
    """The parts of this name (`harmony`, `gpt-oss`).

    Raises HostError if there is none of a group, or one cannot be loaded, or lacks something.
    """
    parts, targets, sources = zip(*(resolve(group, name) for group in OWN), strict=True)
    for group, target in zip(OWN, targets, strict=True):
        if problem := find_lack(group, target):
            raise HostError(f"{group} {name} = {target} cannot be used: {problem}")
    parser, renderer, context = parts
    return Extensions(parser, renderer, context, dict(zip(OWN, sources, strict=True)))


def find_lack(group: str, target: str) -> str | None:
    """What the object that ``target`` names lacks as a part of this ``group``."""
    from vllm_mlx_harmony.server.host import Context, ContextFactory, Renderer

    if group == TOOL_PARSERS:
        return find_problem(f"{target}.extract_tool_calls", f"self model_output {OTHERS}")
    called = Renderer if group == PROMPT_RENDERERS else ContextFactory
    if problem := find_problem(target, _parameters(called.__call__, "self")):
        return problem
    if group == PROMPT_RENDERERS:
        return None
    members = {name: member for name, member in vars(Context).items() if not name.startswith("_")}
    problems = (
        find_problem(
            f"{target}.{name}", None if isinstance(member, property) else _parameters(member)
        )
        for name, member in members.items()
    )
    return next(filter(None, problems), None)


def _parameters(function: Callable[..., object], *without: str) -> str:
    """The parameters of a protocol's method; implementations may have more, with defaults."""
    names = [name for name in signature(function).parameters if name not in without]
    return " ".join((*names, OTHERS))


_in_use: Extensions | None = None


def use(parts: Extensions | None) -> None:
    """Sets the parts that ``in_use`` returns; ``None`` for those that would be found."""
    global _in_use
    _in_use = parts


def in_use() -> Extensions:
    """The parts in use, or those that activation would find."""
    return _in_use or find(FLAGS[0])


def resolve(group: str, name: str) -> tuple[Any, str, str]:
    """The object of an entry point, its target (`package.module:object`) and its origin.

    Raises HostError if there is none, or it cannot be loaded.

    Of several distributions, the first in alphabetical order is taken, and this one last.
    """
    named = [
        (str(point.dist.metadata["Name"]).lower().replace("_", "-") if point.dist else "", point)
        for point in metadata.entry_points(group=group, name=name)
    ]
    distribution, entry = min(
        named, key=lambda one: (one[0] == DISTRIBUTION, one[0]), default=("", None)
    )
    target = f"{entry.module}:{entry.attr}" if entry else OWN.get(group)
    if target is None:
        raise HostError(f"no entry point {name!r} in {group}")
    try:
        part = entry.load() if entry else locate(target)
    except Exception as error:
        raise HostError(f"{group} {name} = {target} cannot be loaded: {error}") from error
    version = entry.dist.version if entry and entry.dist else ""
    return part, target, f"{distribution} {version} ({target})" if entry else target
