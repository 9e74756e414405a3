"""Activation: reads the flags of `vllm-mlx serve`, and changes vllm-mlx only if they ask for it.

It imports nothing of vllm-mlx until then, because most processes that install the hook do not serve
gpt-oss. `contract` has the list of changes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host.entry_points import FLAGS

if TYPE_CHECKING:
    from vllm_mlx_harmony.server.settings import ServerSettings

logger = logging.getLogger("vllm_mlx_harmony")

COMMAND_LINE = "vllm_mlx.cli"

LAST_PORT = 65_535

_REPOSITORY = re.compile(r"(?![.-])[\w.-]+(/(?![.-])[\w.-]+)?(?<![.-])")
"""The name of a repository of Hugging Face, with or without its owner."""

Namespace = dict[str, object]
Command = Callable[[argparse.Namespace], object]

_hooks: list[tuple[Namespace, Command, Command]] = []
"""Namespaces (the module's, and `__main__`'s under `python -m`), their command, and the hook."""

_undo = ExitStack()
"""Reverts what an activation has done."""


def install(namespace: Namespace | None = None) -> None:
    """Puts the hook in front of `serve_command`; a second time, nothing happens.

    `namespace` is that of vllm-mlx's command line, by default of `vllm_mlx.cli`. Raises HostError
    if it has no such command.
    """
    if namespace is None:
        namespace = vars(importlib.import_module(COMMAND_LINE))
    command = namespace.get("serve_command")
    if any(command is hook for _, _, hook in _hooks):
        return
    if not callable(command):
        raise HostError(f"{COMMAND_LINE} has no serve_command", code="host_changed")

    @functools.wraps(command)
    def serve(args: argparse.Namespace) -> object:
        remove_hooks()
        try:
            if getattr(args, "tool_call_parser", None) in FLAGS:
                _activate(args)
            return command(args)
        except HostError as error:  # ends with 2, as argparse does for an invalid flag
            print(f"vllm-mlx-harmony: error: {error.message}", file=sys.stderr)
            raise SystemExit(2) from error

    namespace["serve_command"] = serve
    _hooks.append((namespace, command, serve))


def uninstall() -> None:
    """Removes the hook, restores the very objects that were replaced in vllm-mlx, and closes the
    prefix cache."""
    _undo.close()
    remove_hooks()


def remove_hooks() -> None:
    """Restores vllm-mlx's own `serve_command` in every namespace."""
    while _hooks:
        namespace, command, hook = _hooks.pop()
        if namespace.get("serve_command") is hook:
            namespace["serve_command"] = command


def _activate(args: argparse.Namespace) -> None:
    """Changes vllm-mlx. Without the Harmony library, or after a bug of ours, it stays as it is.

    Raises HostError if it cannot serve what the flags ask for.
    """
    try:
        importlib.import_module("openai_harmony")
    except ImportError as error:
        _warn(
            f"not active: openai-harmony cannot be imported ({error}); "
            "`pip install openai-harmony` fixes it. vllm-mlx runs on its own"
        )
        return
    try:
        from vllm_mlx_harmony.host import contract
        from vllm_mlx_harmony.server import enforcement
        from vllm_mlx_harmony.server.settings import ServerSettings

        settings = ServerSettings.read()
        _reject_unusable_options(args, settings)
        several = bool(getattr(args, "models_config", None))
        _undo.callback(contract.deactivate)
        contract.activate(settings, args.tool_call_parser, several=several)
        enforcement.warm_up(settings.grammar)
        _configure_engines(args, settings)
        # Flags that belong to the given one, for vllm-mlx's own code. Not with several models:
        # there they would change the answers of those that are not Harmony models.
        if not several:
            args.reasoning_parser = args.reasoning_parser or "harmony"
            args.enable_auto_tool_choice = True
        logger.debug("requirements: %s", ", ".join(contract.changes()))
    except HostError:
        uninstall()
        raise
    except Exception as error:  # the plugin may fail, vllm-mlx may not
        logger.debug("activation failed", exc_info=True)
        uninstall()
        _warn(f"not active: {type(error).__name__}: {error}. vllm-mlx runs on its own")


def _reject_unusable_options(args: argparse.Namespace, settings: ServerSettings) -> None:
    """Raises HostError for options that no request could be served with, and unusable settings of
    tool servers."""
    _check_flags(args)
    from vllm_mlx_harmony.server import defaults
    from vllm_mlx_harmony.server.settings import ToolsMode
    from vllm_mlx_harmony.server.tools import browser, config
    from vllm_mlx_harmony.server.tools.client_servers import ClientServers

    if not getattr(args, "models_config", None):  # else the options may be another model's
        defaults.read(getattr(args, "default_chat_template_kwargs", None) or {}, settings)
        if getattr(args, "mllm", False):
            raise HostError("--mllm is not supported: gpt-oss takes text only")
    ClientServers.of(settings)
    if settings.web_search:
        browser.of(settings)
    path = getattr(args, "mcp_config", None)
    if settings.tools is ToolsMode.OFF or (settings.web_search and not path):
        return
    if not path:
        raise HostError(f"{config.TOOLS_VARIABLE}={settings.tools.value} requires --mcp-config")
    if config.read(path).servers:
        from vllm_mlx_harmony.server.tools.mcp_server import check_package

        check_package()


def _check_flags(args: argparse.Namespace) -> None:
    """Raises HostError for values with which vllm-mlx would fail later, or refuse every request."""
    from vllm_mlx_harmony.model_files import CONFIG, configuration

    model, port = getattr(args, "model", None), getattr(args, "port", 0)
    if model and Path(model).is_dir():
        if not configuration(model, CONFIG):
            raise HostError(f"{model} has no {CONFIG} that can be read")
    elif model and (Path(model).exists() or not _REPOSITORY.fullmatch(model)):
        raise HostError(f"{model} is not a directory")
    if not 0 <= port <= LAST_PORT:
        raise HostError(f"--port: {port} is not a number from 0 to {LAST_PORT}")
    key = getattr(args, "api_key", None)
    if key is not None and not key.strip():
        raise HostError("--api-key is empty; omit it to serve without a key")
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise HostError("--api-key is not printable ASCII without spaces around it")


def _configure_engines(args: argparse.Namespace, settings: ServerSettings) -> None:
    """Configures engines and caches by flags and settings. Raises HostError for an invalid one."""
    from vllm_mlx_harmony.engine import resources, status_line
    from vllm_mlx_harmony.host import flags, startup_banner, tools
    from vllm_mlx_harmony.host.vllm_mlx_engine import serving

    named_flags = flags.explicit_flags(args)
    options = resources.engine_options(args, resources.configured_options(settings))
    cache_bytes, directory = flags.cache_bytes(named_flags), getattr(args, "ssd_cache_dir", None)
    _undo.callback(resources.reset)
    resources.configure(
        options,
        settings.cache if cache_bytes is None else cache_bytes,
        directory,
        getattr(args, "ssd_cache_max_gb", 0),
        settings.ssd_writes,
    )
    without_effect = flags.without_effect(named_flags, enabled=resources.cache_bytes() > 0)
    _undo.callback(setattr, tools, "running", None)
    running = tools.start_browser(settings, getattr(args, "mcp_config", None))
    startup_banner.set_flags(args, without_effect, running, inspected=settings.inspect)
    if path := getattr(args, "models_config", None):
        startup_banner.show(("models", f"{path}, loaded on demand"))
    # Last, because nothing stops it.
    status_line.start(
        lambda: [(name, engine.status()) for name, engine in serving()],
        enabled=settings.status_line,
    )


def _warn(message: str) -> None:
    print(f"vllm-mlx-harmony: {message}", file=sys.stderr)
