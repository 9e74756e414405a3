"""Activation: looks at the flags of `vllm-mlx serve` and changes vllm-mlx only if they ask.

Imports nothing of vllm-mlx, and little else, until then: most processes that come by here do not
serve gpt-oss. What is changed is written in `contract`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host.entry_points import FLAGS
from vllm_mlx_harmony.host.versions import versions

logger = logging.getLogger("vllm_mlx_harmony")

COMMAND_LINE = "vllm_mlx.cli"


@dataclass(frozen=True, slots=True)
class Status:
    """What this plugin does in this process.

    `hooked`: `serve_command` waits for the flag; `active`: vllm-mlx is changed now. `parts` says,
    by entry-point group, which object is used; it is empty, as is `requirements`, when not active.
    """

    hooked: bool
    active: bool
    versions: dict[str, str]
    requirements: tuple[str, ...] = ()
    parts: dict[str, str] = field(default_factory=dict)


class _ServeHook:
    """`serve_command` of one namespace: the module's, or `__main__`'s under `python -m`."""

    def __init__(self, namespace: dict[str, Any], command: Callable[[Any], Any]) -> None:
        self._namespace = namespace
        self._command = command

        @functools.wraps(command)
        def hooked(args: Any) -> Any:
            return self._serve(args)

        self.hooked = hooked

    def put_in(self) -> None:
        self._namespace["serve_command"] = self.hooked

    def take_out(self) -> None:
        if self._namespace.get("serve_command") is self.hooked:
            self._namespace["serve_command"] = self._command

    def is_in(self, namespace: dict[str, Any]) -> bool:
        return namespace.get("serve_command") is self.hooked

    def _serve(self, args: Any) -> Any:
        """First of all the original is put back: without the flag, vllm-mlx runs as it is."""
        remove_hooks()
        if getattr(args, "tool_call_parser", None) not in FLAGS or not _open(args):
            return self._command(args)
        try:
            return self._command(args)
        except HostError as error:
            _exit(error)


_hooks: list[_ServeHook] = []


def install(namespace: dict[str, Any] | None = None) -> None:
    """Puts the hook in front of `serve_command`; a second time, nothing happens.

    `namespace` is that of vllm-mlx's command line, `vllm_mlx.cli` when not given. Raises HostError
    when there is no such command.
    """
    if namespace is None:
        namespace = vars(importlib.import_module(COMMAND_LINE))
    if any(hook.is_in(namespace) for hook in _hooks):
        return
    command = namespace.get("serve_command")
    if not callable(command):
        raise HostError(f"{COMMAND_LINE} has no serve_command", code="host_changed")
    hook = _ServeHook(namespace, command)
    hook.put_in()
    _hooks.append(hook)


def uninstall() -> None:
    """Restores every attribute and route of vllm-mlx, by identity, and takes the hook out."""
    if contract := sys.modules.get(f"{__package__}.contract"):
        contract.deactivate()
    remove_hooks()


def remove_hooks() -> None:
    """Puts vllm-mlx's own `serve_command` back wherever a hook stands."""
    while _hooks:
        _hooks.pop().take_out()


def status() -> Status:
    """What is in force in this process."""
    contract = sys.modules.get(f"{__package__}.contract")
    installation = contract.active() if contract else None
    if installation is None:
        return Status(hooked=bool(_hooks), active=False, versions=versions())
    return Status(
        hooked=bool(_hooks),
        active=True,
        versions=versions(),
        requirements=installation.requirements,
        parts=dict(installation.parts.sources),
    )


def _open(args: Any) -> bool:
    """Changes vllm-mlx. False when it runs on unchanged: no Harmony library, or a bug of ours."""
    try:
        importlib.import_module("openai_harmony")
    except ImportError as error:
        _warn(
            f"not active: openai-harmony cannot be imported ({error}); "
            "`pip install openai-harmony` fixes it. vllm-mlx runs on its own"
        )
        return False
    try:
        from vllm_mlx_harmony.host import contract
        from vllm_mlx_harmony.server import enforcement

        _check(args)
        contract.activate(args.tool_call_parser)
        _apply(args)
        enforcement.get_ready()
        # The flags that go with the one given, for those of vllm-mlx's own paths that look at them.
        # Not with several models: there, they would change how those that are not Harmony answer.
        if not getattr(args, "models_config", None):
            args.enable_auto_tool_choice = True
            args.reasoning_parser = args.reasoning_parser or "harmony"
        logger.debug("requirements: %s", ", ".join(status().requirements))
    except HostError as error:
        _exit(error)
    except Exception as error:  # the plugin may fail, vllm-mlx may not
        logger.debug("activation failed", exc_info=True)
        uninstall()
        _warn(f"not active: {type(error).__name__}: {error}. vllm-mlx runs on its own")
        return False
    return True


def _check(args: Any) -> None:
    """Raises HostError for options no request could be answered with, and for an unusable store.

    Template options are not looked at with several models: there, they may be meant for another.
    """
    from vllm_mlx_harmony.server import defaults, enforcement
    from vllm_mlx_harmony.server.responses import store

    store.server_store()
    enforcement.read()
    _check_tools(args)
    if not getattr(args, "models_config", None):
        defaults.read(getattr(args, "default_chat_template_kwargs", None) or {})
        if getattr(args, "mllm", False):
            raise HostError("--mllm: gpt-oss takes text only; leave the flag out")


def _check_tools(args: Any) -> None:
    """Raises HostError for a setting or a file of tool servers that cannot be used."""
    from vllm_mlx_harmony.server.tools import config
    from vllm_mlx_harmony.server.tools.client_servers import ClientServers

    use = config.use()
    ClientServers.of_environment(use, 0.0)
    if use is config.Use.OFF:
        return
    path = getattr(args, "mcp_config", None)
    if not path:
        raise HostError(f"{config.VARIABLE}={use.value} needs --mcp-config: which servers to run")
    if config.read(path).servers:
        from vllm_mlx_harmony.server.tools.mcp_server import check_package

        check_package()


def _apply(args: Any) -> None:
    """The flags that mean something else here, or nothing. Raises HostError."""
    from vllm_mlx_harmony.host import flags, resources, summary

    given = flags.given(args)
    resources.use(flags.of_engine(args), flags.budget(given))
    directory = getattr(args, "ssd_cache_dir", None)
    enabled = resources.budget() > 0
    if directory and enabled:
        resources.keep_on(resources.opened(directory, args.ssd_cache_max_gb))
    summary.set_flags(
        flags.without_effect(given, enabled=enabled),
        key=bool(getattr(args, "api_key", None)),
        rate=getattr(args, "rate_limit", 0),
    )
    if path := getattr(args, "models_config", None):
        summary.of_registry(path)


def _warn(message: str) -> None:
    print(f"vllm-mlx-harmony: {message}", file=sys.stderr)


def _exit(error: HostError) -> NoReturn:
    """The flag asked for what cannot be done here. 2 is what argparse exits with for a bad flag."""
    print(f"vllm-mlx-harmony: error: {error.message}", file=sys.stderr)
    raise SystemExit(2) from error
