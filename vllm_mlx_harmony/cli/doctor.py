"""doctor: checks an installation and suggests fixes.

It downloads nothing. It writes only the highest prompt rate that it has measured. Checks that pass
share lines of the report; one that fails has a line of its own, followed by the fix.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import site
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name
from rich.console import Console
from rich.text import Text

from vllm_mlx_harmony import _startup
from vllm_mlx_harmony.cli import errors, light
from vllm_mlx_harmony.cli.models import GIGABYTE, MODELS
from vllm_mlx_harmony.cli.process import LOCAL, is_free, send
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.host.entry_points import LIBRARIES, versions

if TYPE_CHECKING:
    from vllm_mlx_harmony.required_names import Requirement

STARTUP_FILE = "vllm_mlx_harmony_startup.pth"
PACKAGE = "vllm_mlx"
PORT = 8000
"""vllm-mlx's default port."""


GATEWAY = "vllm-mlx-harmony gateway"
"""The name in a gateway's ``/health`` (``gateway.app``, which is not imported here)."""

HEALTH_TIMEOUT = 2.0
"""Seconds to wait for the ``/health`` of a server on the port."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. ``ok`` is None for information; ``fix`` says how to correct it."""

    ok: bool | None
    what: str
    detail: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Findings that are one line, ``summary``, if all are ok, or none at all if ``internal``."""

    name: str
    findings: tuple[Finding, ...]
    summary: str = ""
    internal: bool = False

    @property
    def ok(self) -> bool:
        return all(finding.ok is not False for finding in self.findings)

    def lines(self, *, verbose: bool) -> Iterator[tuple[bool | None, str, str]]:
        """Mark, name and text of each line."""
        if self.ok and not verbose:
            if self.internal:
                return
            details = (finding.detail for finding in self.findings if finding.detail)
            checked = self.summary or any(finding.ok for finding in self.findings)
            yield True if checked else None, self.name, self.summary or ", ".join(details)
            return
        for finding in self.findings:
            if verbose or finding.ok is False:
                yield finding.ok, finding.what, finding.detail
            if finding.fix and finding.ok is False:
                yield None, "", f"→ {finding.fix}"


@dataclass(frozen=True, slots=True)
class Report:
    """All groups, each after those that it depends on. ``ready``: the state if no check failed."""

    groups: tuple[Group, ...]
    ready: str = "Everything is in place."

    @property
    def ok(self) -> bool:
        return all(group.ok for group in self.groups)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for group in self.groups for finding in group.findings)

    def text(self, *, verbose: bool = False) -> str:
        """The report as it is printed: problems and their fixes come first."""
        groups = sorted(self.groups, key=lambda group: group.ok)
        rows = [row for group in groups for row in group.lines(verbose=verbose)]
        width = max(len(name) for _, name, _ in rows)
        lines = [f"{_MARKS[ok]}{name:<{width}}  {text}".rstrip() for ok, name, text in rows]
        wrong = sum(finding.ok is False for finding in self.findings)
        problems = f"{wrong} problem{'s' * (wrong > 1)}: see the lines marked → for fixes."
        end = problems if wrong else f"{self.ready} Next: vllm-mlx-harmony launch codex"
        return "\n".join([*lines, "", end])


_MARKS = {True: "✓ ", False: "✗ ", None: "  "}
_STYLES = {"✓ ": "green", "✗ ": "bold red"}


def _one(name: str, ok: bool | None, detail: str, fix: str = "") -> Group:
    return Group(name, (Finding(ok, name, detail, fix),))


def doctor(
    model: str | None = None,
    port: int = PORT,
    cache: str | None = None,
    tools: str | None = None,
) -> Report:
    """Checks this installation and a port; if given, a model, a ``--ssd-cache-dir``, and the tool
    servers of an ``--mcp-config``, each of which is started and asked for its tools."""
    python = _one("python", True, f"{platform.python_version()} ({sys.executable})")
    listening = _port(port)
    mlx, settings = _mlx(), tuple(_settings())
    has_host = light.is_installed(PACKAGE)
    loading = [_loading()] if has_host else []
    groups = [python, *settings, *_machine(), _packages(), mlx, *loading, _vocabulary()]
    groups += [*(_host() if has_host and mlx.ok and not settings else ()), listening]
    if mlx.ok and listening.findings[0].ok:  # a running server would distort the measurement
        groups += _prefill()
    if cache is not None:
        groups.append(_cache(Path(cache).expanduser()))
    if tools is not None:
        groups.append(_tools(tools))
    if model is not None:
        groups.append(_model(MODELS[model].source if model in MODELS else model))
    if listening.findings[0].ok is None:
        return Report(tuple(groups), "Everything is in place, and a server is running.")
    return Report(tuple(groups))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns 1 if a check has failed."""
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony doctor",
        description="Checks this installation and suggests fixes.",
    )
    parser.add_argument(
        "model", nargs="?", help="20b, 120b, a directory, or a cached repository id"
    )
    parser.add_argument(
        "--port",
        type=errors.port,
        default=PORT,
        help="port to check (default: %(default)s)",
    )
    parser.add_argument(
        "--ssd-cache-dir", metavar="DIR", help="disk cache to check, as given to `serve`"
    )
    parser.add_argument("--mcp-config", metavar="FILE", help="MCP servers to start and connect to")
    parser.add_argument("--verbose", action="store_true", help="also show the checks that passed")
    arguments = parser.parse_args(argv)
    report = doctor(arguments.model, arguments.port, arguments.ssd_cache_dir, arguments.mcp_config)
    console = Console(highlight=False)
    for line in report.text(verbose=arguments.verbose).splitlines():
        text = Text(line)
        text.stylize(_STYLES.get(line[:2], ""), 0, 1)
        console.print(text, soft_wrap=True)
    return 0 if report.ok else 1


def _tools(path: str) -> Group:
    """Starts each tool server of the file, asks for its tools, and stops it again."""
    from vllm_mlx_harmony.server.settings import ServerSettings, ToolsMode
    from vllm_mlx_harmony.server.tools import config
    from vllm_mlx_harmony.server.tools.toolbox import Toolbox

    try:
        toolbox = Toolbox.of(config.read(path), ServerSettings(tools=ToolsMode.ON))
    except HostError as error:
        return _one("tools", False, error.message, f"see {path}")

    async def try_all() -> tuple[Finding, ...]:
        await toolbox.start()
        try:
            return tuple(
                Finding(
                    bool(namespace.tools),
                    f"tools: {namespace.label}",
                    ", ".join(tool.origin[-1] for tool in namespace.tools) or namespace.problem,
                    f"see its entry in {path}",
                )
                for namespace in toolbox.namespaces
            )
        finally:
            await toolbox.stop()

    found = asyncio.run(try_all())
    return Group("tools", found) if found else _one("tools", None, f"{path} has no servers")


def _settings() -> Iterator[Group]:
    """The first environment variable that is invalid: no server would start."""
    from vllm_mlx_harmony.server.settings import ServerSettings

    try:
        ServerSettings.read()
    except HostError as error:
        yield _one("settings", False, error.message, "correct it, or unset it")


def _configured_memory() -> int | None:
    """The memory for models without Metal, if it is configured."""
    from vllm_mlx_harmony.server.settings import ServerSettings

    with suppress(HostError):  # `_settings` reports it
        return ServerSettings.read().memory
    return None


def _machine() -> Iterator[Group]:
    """Whether gpt-oss fits into memory, and onto the disk if it is not there."""
    try:
        from huggingface_hub import constants, try_to_load_from_cache

        from vllm_mlx_harmony.engine import device
    except ImportError:  # missing packages have lines of their own
        return
    memory = device.memory(_configured_memory())
    fitting = [model for model in MODELS.values() if model.needed <= memory]
    metal = "with Metal" if device.has_metal() else "without Metal: on the CPU, slowly"
    facts = f"{memory / GIGABYTE:.0f} GB for models, {metal}"
    if platform.mac_ver()[0]:
        facts = f"macOS {platform.mac_ver()[0]}, {facts}"
    if not fitting:
        least = min(MODELS.values(), key=lambda model: model.needed)
        needs = f"{least.name} needs {least.gigabytes} GB: use another machine with launch --url"
        yield _one("memory", None, f"{facts}; {needs}")
        return
    yield _one("memory", True, f"{facts}; enough for {fitting[0].name}")
    home = Path(constants.HF_HUB_CACHE)
    place = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(place).free
    here = [
        model.name
        for model in MODELS.values()
        if isinstance(try_to_load_from_cache(model.source, "config.json"), str)
    ]
    size = min(model.size for model in fitting)
    message = f"{free / GIGABYTE:.0f} GB free; {', '.join(here) or 'no gpt-oss'} in {home}"
    fix = f"free {size / GIGABYTE:.0f} GB, or set HF_HOME to a directory on another disk"
    yield _one("disk", bool(here) or free > size, message, fix)


def _packages() -> Group:
    found = versions()
    findings = [Finding(None, name, version) for name, version in found.items()]
    if "vllm-mlx" not in found and not light.replaces_host():
        findings.append(Finding(False, "vllm-mlx", "not installed", light.INSTALL))
    if found.keys().isdisjoint(LIBRARIES):
        fix = f"pip install {LIBRARIES[0]}"
        findings.append(Finding(False, LIBRARIES[0], "not installed", fix))
    findings.extend(_clashes())
    summary = ", ".join(f"{name} {version}" for name, version in found.items())
    return Group("packages", tuple(findings), summary)


def _mlx() -> Group:
    """Whether mlx has a backend. Without one, the host cannot be checked."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        linux = sys.platform == "linux"
        wanted = "'vllm-mlx-harmony-server[cpu]'" if linux else "--force-reinstall mlx mlx-metal"
        return _one("mlx", False, f"mlx cannot be imported ({error})", f"pip install {wanted}")
    return Group("mlx", (Finding(True, "mlx", "can be imported"),), internal=True)


def _prefill() -> Iterator[Group]:
    """Whether the GPU computes prompts as fast as it did before."""
    try:
        import mlx.core as mx

        from vllm_mlx_harmony.cli import prefill

        if mx.metal.is_available():
            now = prefill.rate()
            yield _rate(now, prefill.usual(now, str(mx.device_info()["device_name"])))
    except Exception as error:
        yield _one("prefill", None, f"not measured: {_message(error)}")


def _rate(now: float, usual: float) -> Group:
    """What a rate in tokens per second means on a machine that has reached ``usual``."""
    from vllm_mlx_harmony.cli.prefill import SLOW

    measured = f"{now:,.0f} tokens/s through two small layers"
    fix = (
        "close other programs that use the GPU, turn off Low Power Mode, and let the machine cool; "
        "if that does not help: pip install --force-reinstall mlx mlx-metal"
    )
    if now < SLOW * usual:
        return _one("prefill", False, f"{measured}, and {usual:,.0f} before on this chip", fix)
    return _one("prefill", True, measured)


def _clashes() -> Iterator[Finding]:
    """Other distributions with a package of that name: the one installed last is imported."""
    owners = set(metadata.packages_distributions().get(PACKAGE, ()))
    for name in sorted(owner for owner in owners if canonicalize_name(owner) != "vllm-mlx"):
        yield Finding(
            False,
            "clash",
            f"{name} {metadata.version(name)} contains another package {PACKAGE}",
            f"pip uninstall {name}, and then pip install --force-reinstall --no-deps vllm-mlx",
        )


def _loading() -> Group:
    explicit = "start with `vllm-mlx-harmony serve` instead of `vllm-mlx serve`"
    findings = []
    if _startup.switched_off():
        setting = f"{_startup.SWITCH}={os.environ[_startup.SWITCH]}"
        findings.append(
            Finding(False, "switch", f"{setting} disables the plugin", f"unset {_startup.SWITCH}")
        )
    directories = dict.fromkeys([*site.getsitepackages(), site.getusersitepackages(), *sys.path])
    paths = [path for name in directories if (path := Path(name) / STARTUP_FILE).is_file()]
    # Python does not read `.pth` files that have macOS's hidden flag.
    files = [path for path in paths if not getattr(path.stat(), "st_flags", 0) & stat.UF_HIDDEN]
    fix = f"pip install --force-reinstall --no-deps vllm-mlx-harmony, or {explicit}"
    file = str(files[0]) if files else f"no {STARTUP_FILE} in a site directory"
    findings.append(Finding(bool(files), "startup file", file, fix))
    waits = _startup.registered()
    if waits or not _startup.switched_off():
        message = f"{'waits' if waits else 'does not wait'} for {_startup.HOST} in this process"
        findings.append(Finding(waits, "import hook", message, explicit))
    return Group("loading", tuple(findings), "`vllm-mlx serve` loads the plugin")


def _vocabulary() -> Group:
    try:
        from vllm_mlx_harmony.core import vocab

        vocab.encoding()
    except Exception as error:
        fix = "pip install --force-reinstall vllm-mlx-harmony-server openai-harmony"
        return _one("vocabulary", False, _message(error), fix)
    pointed, cached = os.environ.get(vocab.BASE_VARIABLE), vocab.cache_dir()
    where = f"not cached: {cached} cannot be written"
    if pointed and (Path(pointed) / vocab.FILE_NAME).is_file():
        where = f"in {pointed}"
    elif (cached / vocab.FILE_NAME).is_file():
        where = f"cached in {cached}"
    return _one("vocabulary", True, f"o200k_harmony, {where}")


def _host() -> Iterator[Group]:
    """Checks the table on an unsupported host as well, to show what has changed there."""
    reinstall = "pip install --force-reinstall vllm-mlx-harmony"
    try:
        from vllm_mlx_harmony.host import contract, entry_points, patching
        from vllm_mlx_harmony.server.settings import ServerSettings

        reason = contract.unsupported()
    except Exception as error:
        yield _one("supported", False, _message(error), reinstall)
        return
    fix = f"pip install 'vllm-mlx{contract.SUPPORTED}'"
    message = reason or f"vllm-mlx {versions().get(contract.HOST)} is supported"
    yield _one("supported", reason is None, message, fix)
    if versions().get(contract.HOST) is None:
        return
    fix = f"{fix}; if that does not help, report it: this host differs from the released one"
    names = _requirements(contract.NAMES, fix)
    replaced = sum(isinstance(row, patching.Patch) for row in contract.NAMES)
    summary = f"{len(names) - replaced} used and {replaced} replaced are as expected"
    yield Group("names", names, summary, internal=True)
    try:
        found = entry_points.in_use()
        rows = contract.table(found, ServerSettings.read())[len(names) :]
    except Exception as error:
        fix = f"uninstall the package that replaces a part, or {reinstall}"
        yield _one("parts", False, _message(error), fix)
        return
    sources = tuple(Finding(True, group, source) for group, source in found.sources.items())
    yield Group("parts", sources, f"{len(sources)} found", internal=True)
    summary = f"{len(rows)} routes and entries can be added"
    yield Group("routes", _requirements(rows, fix), summary, internal=True)


def _requirements(rows: Sequence[Requirement], fix: str) -> tuple[Finding, ...]:
    problems = [(row, row.problem()) for row in rows]
    return tuple(
        Finding(problem is None, f"requirement {row.label}", problem or row.why, fix)
        for row, problem in problems
    )


def _port(port: int) -> Group:
    if is_free(port):
        return _one("port", True, f"{port} is free")
    if server := _server(port):
        return _one("port", None, f"{port}: {server} is running there")
    other = port + 1 if port < errors.LAST_PORT else port - 1
    fix = f"stop it, or serve with --port {other}"
    return _one("port", False, f"{port} is in use by another program", fix)


def _server(port: int) -> str:
    """Which of our servers listens on the port; empty for another program."""
    try:
        with send(f"{LOCAL}:{port}/health", timeout=HEALTH_TIMEOUT) as response:
            answer = json.load(response)
    except (OSError, HTTPException, ValueError):
        return ""
    if not isinstance(answer, dict):
        return ""
    if answer.get("server") == GATEWAY:
        return "a gateway"
    return "a server" if "model_loaded" in answer else ""


def _cache(directory: Path) -> Group:
    """The prefix cache on disk: its content, or why it cannot be used."""
    from vllm_mlx_harmony.engine.disk.cache import DIRECTORY, PIECES
    from vllm_mlx_harmony.engine.disk.index import NAME, contents_of
    from vllm_mlx_harmony.sizes import format_size

    home = directory / DIRECTORY
    try:
        place = next(path for path in (directory, *directory.parents) if path.exists())
        for path in (place, home, home / PIECES):
            if path.exists():  # modes do not tell root, nor that a disk is read-only
                tempfile.TemporaryFile(dir=path).close()
        if (home / NAME).exists():
            os.close(os.open(home / NAME, os.O_RDWR))
    except OSError as error:
        message = f"{error.filename or directory} cannot be used: {error.strerror or error}"
        return _one("disk cache", False, message, "use another directory, or change its mode")
    try:
        found = contents_of(home)
    except (OSError, sqlite3.Error) as error:
        return _one("disk cache", False, _message(error), f"remove {home}: it is created again")
    message = f"nothing in {directory} yet"
    if found is not None:
        message = (
            f"{format_size(found.nbytes)}, {found.pieces:,} pieces of {found.conversations:,} "
            f"conversations, {found.turns:,} turns, in {directory}"
        )
    return _one("disk cache", True, message)


def _model(name: str) -> Group:
    try:
        from vllm_mlx_harmony.model_files import is_harmony_model

        harmony = is_harmony_model(name)
    except Exception as error:
        return _one("model", False, _message(error), "download it again: vllm-mlx download")
    if harmony is None:
        message = "is not on this machine: no such directory, or no tokenizer.json in the cache"
        return _one("model", False, f"{name} {message}", f"vllm-mlx download {name}")
    if not harmony:
        message = f"{name} is not a Harmony model: its tokenizer is not o200k_harmony"
        return _one("model", False, message, "serve it without --tool-call-parser harmony")
    return Group("model", (Finding(True, "model", f"{name} is a Harmony model"), *_memory(name)))


def _memory(model: str) -> Iterator[Finding]:
    """The longest request, prompt and output together, for which there is memory."""
    from vllm_mlx_harmony.engine import device
    from vllm_mlx_harmony.engine.memory import Budget, layout_of
    from vllm_mlx_harmony.engine.mlx_engine import Options
    from vllm_mlx_harmony.model_files import CONFIG, configuration, length_of, path_of
    from vllm_mlx_harmony.sizes import format_size

    layout = layout_of(configuration(model, CONFIG))
    if layout is None:
        return
    files = path_of(model, CONFIG).parent.glob("*.safetensors")
    weights = sum(path.stat().st_size for path in files)
    limit = int(device.memory(_configured_memory()) * Options().utilization)
    longest, window = Budget(limit, layout, 0).longest(weights), length_of(model)
    beside = f"beside {format_size(weights)} of weights in {format_size(limit)}"
    if longest < 1:
        fix = "use a smaller model, or --gpu-memory-utilization 0.95"
        yield Finding(False, "memory", f"nothing fits {beside}", fix)
    elif window is not None and longest >= window:
        yield Finding(True, "memory", f"all of its {window:,} tokens fit {beside}")
    else:
        yield Finding(True, "memory", f"about {longest:,} tokens fit {beside}")


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
