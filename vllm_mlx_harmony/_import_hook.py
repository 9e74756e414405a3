"""Loads vllm-mlx's command line with its own loader, and then installs the hook in it.

A failure here is one line on standard error, and vllm-mlx starts without the plugin.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType


def install_hook(namespace: dict[str, Any]) -> None:
    """Installs the hook in vllm-mlx's command line, the module with this namespace."""
    try:
        from vllm_mlx_harmony import host

        host.install(namespace)
    except Exception as error:
        warn(f"not installed ({type(error).__name__}: {error}); vllm-mlx runs without it")


def warn_if_requested(arguments: Sequence[str]) -> None:
    """Warns if `python -m vllm_mlx.server` gets a flag that only `vllm-mlx serve` has."""
    line = " ".join(arguments).replace("=", " ")
    if any(f"--tool-call-parser {name}" in line for name in ("harmony", "gpt-oss")):
        module = arguments[2]
        warn(f"not active: `python -m {module}` has no such flag; use `vllm-mlx serve`")


def warn(message: str) -> None:
    """Prints a line on standard error, because logging is not configured during imports."""
    print(f"vllm-mlx-harmony: {message}", file=sys.stderr)


def find_spec(
    own: object, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """The module as the other finders find it, but with a loader that calls `install_hook`."""
    if get_ident() in _searching_threads:  # another finder also calls all finders
        return None
    _searching_threads.add(get_ident())
    try:
        finders = [
            finder for finder in sys.meta_path if finder is not own and hasattr(finder, "find_spec")
        ]
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
    finally:
        _searching_threads.discard(get_ident())
    if spec is not None and hasattr(spec.loader, "exec_module"):
        spec.loader = Loader(spec.loader)  # type: ignore[assignment]
    return spec


_searching_threads: set[int] = set()


class Loader:
    """Runs the real loader and then installs the hook. The loaded module never sees this object."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name == "_real":  # an instance without __init__, as copy makes it
            raise AttributeError(name)
        return getattr(self._real, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        install_hook(vars(module))

    def get_code(self, name: str) -> CodeType | None:
        """The code of the module, which `python -m` runs as `__main__` without `exec_module`."""
        code: CodeType | None = self._real.get_code(name)
        try:
            return _hooked(self._real.get_source(name), code) or code
        except Exception as error:
            warn(f"not installed ({type(error).__name__}: {error}); vllm-mlx runs without it")
            return code


def _hooked(source: str | None, code: CodeType | None) -> CodeType | None:
    """The module with `install_hook` called first in its `if __name__ == "__main__":` block."""
    import ast

    if source is None or code is None:
        return None
    tree = ast.parse(source)
    hook = install_hook.__name__
    call = ast.parse(f"__import__({__name__!r}, fromlist=[{hook!r}]).{hook}(globals())").body[0]
    for node in reversed(tree.body):
        if isinstance(node, ast.If) and "'__main__'" in ast.dump(node.test):
            for part in ast.walk(call):
                ast.copy_location(part, node.body[0])
            node.body.insert(0, call)
            return compile(tree, code.co_filename, "exec", dont_inherit=True)
    return None
