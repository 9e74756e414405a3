"""Waits for `vllm_mlx.cli` to be imported; what happens then is in `_loading`.

Runs at every start of every interpreter (from the `.pth` file): it imports nothing that is not
loaded already, not even `__future__`, and is short: some installations compile it each time.
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
"""vllm-mlx's other way to be started, which knows no parser of tool calls."""

SWITCH = "VLLM_MLX_HARMONY"


def register() -> None:
    """Gets the hook installed as soon as vllm-mlx's command line is imported, if it ever is.

    Called by the `.pth` and `.start` files: the name is fixed. Calling it again changes nothing.
    """
    if switched_off() or registered():
        return
    sys.meta_path.insert(0, Finder())
    if HOST in sys.modules:
        from vllm_mlx_harmony import _loading

        _loading.install_hook(vars(sys.modules[HOST]))


arm = register
"""As `.pth` files written by earlier versions call it: an editable install keeps the old file."""


def registered() -> bool:
    """Whether this process would notice vllm-mlx's command line being imported."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def switched_off() -> bool:
    """Whether the environment (`VLLM_MLX_HARMONY=0`) says that the plugin stays out."""
    return os.environ.get(SWITCH, "").strip().lower() in {"0", "false", "no", "off"}


class Finder:
    """Finds one module, by asking everybody else, and hands it out with a loader of ours.

    It stays for good: looking a module up does not mean that it will be imported, and a reload
    looks it up again.
    """

    def find_spec(
        self,
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """The import system's question. Any name but vllm-mlx's is answered at once."""
        if name != HOST and (name != SERVER or sys.orig_argv[1:3] != ["-m", SERVER]):
            return None
        if switched_off():
            return None
        from vllm_mlx_harmony import _loading

        if name == SERVER:
            _loading.say_not_hooked(sys.orig_argv)
            return None
        return _loading.find_spec(self, name, path, target)
