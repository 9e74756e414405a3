"""Waits for the import of `vllm_mlx.cli`, which `_import_hook` then handles.

The `.pth` file runs this module at every start of Python. So it is short, because some
installations compile it each time, and imports only what is loaded already: not even `__future__`.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself would cost more than everything else here
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

HOST = "vllm_mlx.cli"
SERVER = "vllm_mlx.server"
"""Another way to start vllm-mlx, which has no flag for the tool call parser."""

SWITCH = "VLLM_MLX_HARMONY"


def register() -> None:
    """Arranges that the hook is installed when vllm-mlx's command line is imported, if it ever is.

    The `.pth` and `.start` files call it by this name. Calling it again changes nothing.
    """
    if switched_off() or registered():
        return
    sys.meta_path.insert(0, Finder())
    if HOST in sys.modules:
        from vllm_mlx_harmony import _import_hook

        _import_hook.install_hook(vars(sys.modules[HOST]))


def registered() -> bool:
    """Whether this process waits for the import of vllm-mlx's command line."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def switched_off() -> bool:
    """Whether the environment disables the plugin (`VLLM_MLX_HARMONY=0`)."""
    return os.environ.get(SWITCH, "").strip().lower() in {"0", "false", "no", "off"}


class Finder:
    """Finds one module with the other finders, and replaces its loader.

    It is never removed: a look-up does not mean that the module will be imported, and a reload
    looks it up again.
    """

    def find_spec(
        self,
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """Called by the import system. Returns at once for any module but vllm-mlx's."""
        if name != HOST and (name != SERVER or sys.orig_argv[1:3] != ["-m", SERVER]):
            return None
        if switched_off():
            return None
        from vllm_mlx_harmony import _import_hook

        if name == SERVER:
            _import_hook.warn_if_requested(sys.orig_argv)
            return None
        return _import_hook.find_spec(self, name, path, target)
