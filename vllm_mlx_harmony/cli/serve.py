"""serve: the host's own command in this process, with the hook put in first.

The way in where `.pth` files are not read. Knows the host's command line by name only.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from vllm_mlx_harmony import _startup, host
from vllm_mlx_harmony.cli.errors import UsageError

ID_FLAG = "--id-endpoint"
"""Switches on the endpoint of ids, for a gateway in front of this server."""


def run(arguments: Sequence[str]) -> int:
    """Runs ``vllm-mlx serve`` with these arguments until it ends. The process is the server's.

    ``--tool-call-parser harmony`` stands in front of them, so that another one given overrides it;
    ``--id-endpoint`` is not the host's.
    Raises ``UsageError`` when the plugin is switched off or the host cannot be imported.
    """
    if ID_FLAG in arguments:
        arguments = [each for each in arguments if each != ID_FLAG]
        os.environ["VLLM_MLX_HARMONY_ID_ENDPOINT"] = "1"
    if _startup.switched_off():
        raise UsageError(
            f"{_startup.SWITCH} switches the plugin off: unset it, or run `vllm-mlx serve`"
        )
    try:
        host.install()
    except ImportError as error:
        raise UsageError(f"vllm-mlx cannot be imported ({error}): pip install vllm-mlx") from error
    sys.argv = ["vllm-mlx", "serve", "--tool-call-parser", "harmony", *arguments]
    importlib.import_module(_startup.HOST).main()
    return 0
