"""gpt-oss, whose format is Harmony, served correctly by vllm-mlx.

Python imports it at every start (through `_startup`), so it imports nothing itself: the public
names below are imported when they are used, and documented where they are defined.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself would cost more than everything else here
    from vllm_mlx_harmony.core.context import StreamingHarmonyContext as StreamingHarmonyContext
    from vllm_mlx_harmony.core.parse import Parser as Parser
    from vllm_mlx_harmony.core.render import render as render
    from vllm_mlx_harmony.host.activation import install as install

__version__ = "0.2.0"

_PUBLIC = {
    "Parser": "core.parse",
    "StreamingHarmonyContext": "core.context",
    "install": "host.activation",
    "render": "core.render",
}


def __getattr__(name: str) -> object:
    """A public name, from the module it is written in."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
