"""Says what is installed, active and supported here, whether vllm-mlx is as expected, and why not.

Looks and changes nothing; downloads nothing. One line for each group of findings while all is well,
a line and what to do about it for everything that is not. Plain text, so that it can be pasted
anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import site
import socket
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from importlib import metadata
from pathlib import Path

from vllm_mlx_harmony import _startup
from vllm_mlx_harmony.host.versions import LIBRARIES, versions

STARTUP_FILE = "vllm_mlx_harmony_startup.pth"
PACKAGE = "vllm_mlx"
PORT = 8000
"""Where vllm-mlx listens, unless it is told otherwise."""

LAST_PORT = 65_535

GATEWAY = "vllm-mlx-harmony gateway"
"""What a gateway's ``/health`` calls itself (``gateway.app``, which is not imported here)."""

ADDRESS = "127.0.0.1"
PATIENCE = 2.0
"""Seconds for whatever listens on the port to say what it is."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``ok`` is None for what is neither right nor wrong.

    ``fix`` is what to do about it.
    """

    ok: bool | None
    what: str
    detail: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Findings that belong together; ``summary`` says in a line that all of them are well."""

    name: str
    findings: tuple[Finding, ...]
    summary: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.ok is not False for finding in self.findings)

    def lines(self, *, verbose: bool) -> Iterator[tuple[bool | None, str, str]]:
        """What is shown of it: mark, name and text of each line."""
        wrong = [finding for finding in self.findings if finding.ok is False]
        if verbose:
            wrong = list(self.findings)
        elif not wrong:
            details = (finding.detail for finding in self.findings if finding.detail)
            yield True, self.name, self.summary or ", ".join(details)
        for finding in wrong:
            yield finding.ok, finding.what, finding.detail
            if finding.fix and finding.ok is False:
                yield None, "", f"do: {finding.fix}"


@dataclass(frozen=True, slots=True)
class Report:
    """All groups, in the order in which things depend on each other."""

    groups: tuple[Group, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(group.ok for group in self.groups)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of all groups."""
        return tuple(finding for group in self.groups for finding in group.findings)

    def text(self, *, verbose: bool = False) -> str:
        """The report as it is printed."""
        rows = [row for group in self.groups for row in group.lines(verbose=verbose)]
        width = max(len(name) for _, name, _ in rows)
        lines = [f"{_MARKS[ok]}{name:<{width}}  {text}".rstrip() for ok, name, text in rows]
        return "\n".join([*lines, _CONCLUSIONS[self.ok]])


_MARKS = {True: "ok  ", False: "NO  ", None: "    "}

_CONCLUSIONS = {
    True: "Everything is in place: vllm-mlx serve MODEL --tool-call-parser harmony",
    False: "Something is missing: see the lines with NO.",
}


def doctor(
    model: str | None = None,
    port: int = PORT,
    cache: str | None = None,
    tools: str | None = None,
) -> Report:
    """Looks at this installation and a port; if named at a model, a ``--ssd-cache-dir``, and the
    tool servers of an ``--mcp-config``, each of which is started and asked for its tools."""
    groups = [_python(), _packages(), _loading(), _vocabulary(), *_host(), _port(port)]
    if cache is not None:
        groups.append(_cache(Path(cache).expanduser()))
    if tools is not None:
        groups.append(_tools(tools))
    if model is not None:
        groups.append(_model(model))
    return Report(tuple(groups))


def main(argv: list[str] | None = None) -> int:
    """Prints the report; 0 when everything is in place, 1 when something is not."""
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony doctor",
        description="Checks what is installed, active and supported, and names fixes.",
    )
    parser.add_argument("model", nargs="?", help="a model directory or a cached repository id")
    parser.add_argument(
        "--port", type=_port_number, default=PORT, help="the port to check (default: %(default)s)"
    )
    parser.add_argument(
        "--ssd-cache-dir", metavar="DIR", help="the disk cache to check, as given to vllm-mlx"
    )
    parser.add_argument("--mcp-config", metavar="FILE", help="connect to each of these MCP servers")
    parser.add_argument("--verbose", action="store_true", help="show passed checks, too")
    arguments = parser.parse_args(argv)
    report = doctor(arguments.model, arguments.port, arguments.ssd_cache_dir, arguments.mcp_config)
    print(report.text(verbose=arguments.verbose))
    return 0 if report.ok else 1


def _port_number(text: str) -> int:
    """Raises ``ArgumentTypeError`` for what is no port."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 0 < number <= LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 1 to {LAST_PORT}")
    return number


def _tools(path: str) -> Group:
    """Each tool server of the file, started, asked for its tools and ended again."""
    from vllm_mlx_harmony.core.errors import HostError
    from vllm_mlx_harmony.server.tools import config
    from vllm_mlx_harmony.server.tools.toolbox import Toolbox

    try:
        toolbox = Toolbox.of(config.read(path), config.Use.ON)
    except HostError as error:
        return Group("tools", (Finding(False, "tools", error.message, f"see {path}"),))

    async def tried() -> list[Finding]:
        await toolbox.start()
        try:
            return [
                Finding(
                    bool(each.tools),
                    f"tools: {each.label}",
                    ", ".join(tool.origin[-1] for tool in each.tools) or each.problem,
                    "" if each.tools else f"see what {path} says of it",
                )
                for each in toolbox.namespaces
            ]
        finally:
            await toolbox.stop()

    found = asyncio.run(tried()) or [Finding(None, "tools", f"{path} has no servers")]
    return Group("tools", tuple(found))


def _python() -> Group:
    version, low = platform.python_version(), (3, 10)
    fine = sys.version_info >= low
    fix = "" if fine else "install Python 3.10 or later"
    return Group("python", (Finding(fine, "python", f"{version} ({sys.executable})", fix),))


def _packages() -> Group:
    found = versions()
    findings = [Finding(None, name, version) for name, version in found.items()]
    if "vllm-mlx" not in found:
        fix = "pip install vllm-mlx"
        findings.append(Finding(False, "vllm-mlx", f"not installed: {fix}", fix))
    if not any(name in found for name in LIBRARIES):
        fix = "pip install openai-harmony"
        findings.append(Finding(False, "openai-harmony", f"not installed: {fix}", fix))
    findings.extend(_clashes())
    return Group(
        "packages", tuple(findings), ", ".join(f"{name} {at}" for name, at in found.items())
    )


def _clashes() -> Iterator[Finding]:
    """Other distributions with a package of vllm-mlx's name: whichever came last is imported."""
    owners = metadata.packages_distributions().get(PACKAGE, ())
    normal = {owner: owner.lower().replace("_", "-").replace(".", "-") for owner in owners}
    for name in sorted(owner for owner in normal if normal[owner] != "vllm-mlx"):
        yield Finding(
            False,
            "clash",
            f"{name} {metadata.version(name)} brings a {PACKAGE} of its own",
            f"pip uninstall {name}, and then pip install --force-reinstall --no-deps vllm-mlx",
        )


def _loading() -> Group:
    explicit = "start with `vllm-mlx-harmony serve` instead of `vllm-mlx serve`"
    findings = []
    if _startup.switched_off():
        setting = f"{_startup.SWITCH}={os.environ[_startup.SWITCH]}"
        findings.append(
            Finding(False, "switch", f"{setting} keeps the plugin out", f"unset {_startup.SWITCH}")
        )
    directories = dict.fromkeys([*site.getsitepackages(), site.getusersitepackages(), *sys.path])
    paths = [path for name in directories if (path := Path(name) / STARTUP_FILE).is_file()]
    # Python does not read `.pth` files that have macOS's hidden flag.
    files = [path for path in paths if not getattr(path.stat(), "st_flags", 0) & stat.UF_HIDDEN]
    if files:
        findings.append(Finding(True, "startup file", str(files[0])))
    else:
        message = f"no {STARTUP_FILE} in a site directory"
        findings.append(Finding(False, "startup file", message, f"reinstall, or {explicit}"))
    if _startup.registered():
        findings.append(Finding(True, "import hook", f"waits for {_startup.HOST} in this process"))
    elif not _startup.switched_off():
        findings.append(
            Finding(False, "import hook", f"does not wait for {_startup.HOST}", explicit)
        )
    return Group("loading", tuple(findings), "`vllm-mlx serve` has the plugin in it")


def _vocabulary() -> Group:
    try:
        from vllm_mlx_harmony.core import vocab

        vocab.encoding()
    except Exception as error:
        fix = "pip install --force-reinstall vllm-mlx-harmony openai-harmony"
        return Group("vocabulary", (Finding(False, "vocabulary", _message(error), fix),))
    pointed, cached = os.environ.get(vocab.BASE_VARIABLE), vocab.cache_dir()
    where = f"not cached: {cached} cannot be written"
    if pointed and (Path(pointed) / vocab.FILE_NAME).is_file():
        where = f"in {pointed}"
    elif (cached / vocab.FILE_NAME).is_file():
        where = f"cached in {cached}"
    return Group("vocabulary", (Finding(True, "vocabulary", f"o200k_harmony, {where}"),))


def _host() -> Iterator[Group]:
    """Of a version that is not supported, too: that is how one finds out what has changed in it."""
    try:
        from vllm_mlx_harmony.host import contract, entry_points
        from vllm_mlx_harmony.host.mount import Route

        reason = contract.unsupported()
    except Exception as error:
        fix = "pip install --force-reinstall vllm-mlx-harmony"
        yield Group("host", (Finding(False, "supported", _message(error), fix),))
        return
    supported = f"pip install 'vllm-mlx{contract.SUPPORTED}'"
    message = reason or f"vllm-mlx {contract.host_version()} is supported"
    yield Group("host", (Finding(reason is None, "supported", message, supported),))
    if contract.host_version() is None:
        return
    try:
        found = entry_points.in_use()
        rows = contract.table(found)
    except Exception as error:
        fix = "uninstall what replaces a part, or reinstall vllm-mlx-harmony"
        yield Group("parts", (Finding(False, "parts", _message(error), fix),))
        return
    sources = tuple(Finding(True, group, source) for group, source in found.sources.items())
    yield Group("parts", sources, f"{len(sources)} found")
    fix = f"{supported}; if it stays, report it: this host is not the one that was released"
    requirements: dict[bool, list[Finding]] = {False: [], True: []}
    for row in rows:
        problem = row.problem()
        finding = Finding(problem is None, f"requirement {row.label}", problem or row.why, fix)
        requirements[isinstance(row, Route)].append(finding)
    yield Group(
        "names",
        tuple(requirements[False]),
        f"{len(requirements[False])} of vllm-mlx are as expected",
    )
    yield Group(
        "routes", tuple(requirements[True]), f"{len(requirements[True])} can be put in place"
    )


def _port(port: int) -> Group:
    if _free(port):
        return Group("port", (Finding(True, "port", f"{port} is free"),))
    if server := _server(port):
        return Group("port", (Finding(None, "port", f"{port}: {server} answers there already"),))
    other = port + 1 if port < LAST_PORT else port - 1
    fix = f"end it, or serve with --port {other}"
    return Group("port", (Finding(False, "port", f"{port} is in use by another program", fix),))


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((ADDRESS, port))
        except OSError:
            return False
    return True


def _server(port: int) -> str:
    """What of ours listens there; empty for another program."""
    connection = HTTPConnection(ADDRESS, port, timeout=PATIENCE)
    try:
        connection.request("GET", "/health")
        answer = json.loads(connection.getresponse().read())
    except (OSError, HTTPException, ValueError):
        return ""
    finally:
        connection.close()
    if not isinstance(answer, dict):
        return ""
    if answer.get("server") == GATEWAY:
        return "a gateway"
    return "a server" if "model_loaded" in answer else ""


def _cache(directory: Path) -> Group:
    """The prefix cache on disk: what is in it, or why there can be none."""
    from vllm_mlx_harmony.engine.disk.cache import DIRECTORY, PIECES
    from vllm_mlx_harmony.engine.disk.index import NAME, looked_at
    from vllm_mlx_harmony.host.units import size

    try:
        home = directory / DIRECTORY
        _writable(directory, home, home / PIECES)
        if (home / NAME).exists():
            os.close(os.open(home / NAME, os.O_RDWR))
    except OSError as error:
        message = f"{error.filename or directory} cannot be used: {error.strerror or error}"
        fix = "name another directory, or change its mode"
        return Group("disk cache", (Finding(False, "disk cache", message, fix),))
    try:
        found = looked_at(directory / DIRECTORY)
    except (OSError, sqlite3.Error) as error:
        fix = f"remove {directory / DIRECTORY}: it is made anew"
        return Group("disk cache", (Finding(False, "disk cache", _message(error), fix),))
    message = f"nothing in {directory} yet"
    if found is not None:
        message = (
            f"{size(found.nbytes)}, {found.pieces:,} pieces of {found.conversations:,} "
            f"conversations, {found.turns:,} turns, in {directory}"
        )
    return Group("disk cache", (Finding(True, "disk cache", message),))


def _writable(directory: Path, *below: Path) -> None:
    """Raises ``OSError`` where a server could not make files in ``directory``, or in what is below.

    Tried with a file that has no name: modes say nothing to root, nor of a disk that is read-only.
    """
    place = next(path for path in (directory, *directory.parents) if path.exists())
    for path in (place, *below):
        if path.exists():
            with tempfile.TemporaryFile(dir=path):
                pass


def _model(name: str) -> Group:
    try:
        from vllm_mlx_harmony.host.models import is_harmony_directory

        directory = _directory(name)
        harmony = None if directory is None else is_harmony_directory(directory)
    except Exception as error:
        fix = "download it again: vllm-mlx download"
        return Group("model", (Finding(False, "model", _message(error), fix),))
    details = {
        True: (f"{name} is a Harmony model", ""),
        False: (
            f"{name} is not a Harmony model: its tokenizer is not o200k_harmony",
            "serve it without --tool-call-parser harmony",
        ),
        None: (
            f"{name} is not here: no such directory, or no tokenizer.json in the cache",
            f"vllm-mlx download {name}",
        ),
    }
    findings = [Finding(harmony is True, "model", *details[harmony])]
    if harmony and directory is not None:
        findings += _memory(directory)
    return Group("model", tuple(findings))


UTILIZATION = 0.9
"""What ``--gpu-memory-utilization`` is by default."""


def _memory(directory: Path) -> Iterator[Finding]:
    """How long a request may be, prompt and answer together, as far as memory allows."""
    from vllm_mlx_harmony.engine import device
    from vllm_mlx_harmony.engine.memory import Budget, layout_of
    from vllm_mlx_harmony.host.units import size
    from vllm_mlx_harmony.server.model_files import CONFIG, configuration, length_of

    layout = layout_of(configuration(str(directory), CONFIG))
    if layout is None:
        return
    weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    limit = int(device.memory() * UTILIZATION)
    longest, window = Budget(limit, layout, 0).longest(weights), length_of(str(directory))
    beside = f"beside {size(weights)} of weights in {size(limit)}"
    if longest < 1:
        fix = "take a smaller model, or --gpu-memory-utilization 0.95"
        yield Finding(False, "memory", f"nothing fits {beside}", fix)
    elif window is not None and longest >= window:
        yield Finding(True, "memory", f"all of its {window:,} tokens fit {beside}")
    else:
        yield Finding(True, "memory", f"about {longest:,} tokens fit {beside}")


def _directory(name: str) -> Path | None:
    """Of a model that is on this machine."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
    except ValueError:  # a path that does not exist is no repository id either
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
