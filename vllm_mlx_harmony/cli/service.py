"""service: a server that runs whenever its user is logged in, as a service of launchd or systemd.

The service runs `vllm-mlx-harmony serve` with the arguments of `install`. It is restarted after a
failure, except by systemd after exit code 2, a usage error, which would only occur again. systemd
has a journal; on a Mac, the server itself rotates its log.
"""

from __future__ import annotations

import argparse
import os
import plistlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_mlx_harmony.cli import background, process
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.core.files import write_atomically

LABEL = "vllm-mlx-harmony"
HELP = ("-h", "--help")
ACTIONS = ("install", "start", "stop", "status", "logs", "uninstall")


def main(arguments: Sequence[str]) -> int:
    """Runs one action. Raises ``UsageError`` if the service manager is missing or fails."""
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony service",
        usage="%(prog)s [-h] ACTION [ARGUMENTS OF serve]",
        description="Runs `vllm-mlx-harmony serve` whenever you are logged in: as a service of "
        "launchd on a Mac, and of systemd on Linux.",
        epilog="example: vllm-mlx-harmony service install 20b --api-key KEY",
    )
    parser.add_argument(
        "action",
        metavar="ACTION",
        choices=ACTIONS,
        help=f"{', '.join(ACTIONS)}; install takes the arguments of serve: the model and flags",
    )
    rest = arguments[1:]
    options = parser.parse_args([*arguments[:1], *(word for word in rest if word in HELP)])
    if (options.action == "install") != bool(rest):
        raise UsageError("only `service install` takes arguments, and it needs those of serve")
    file = path()
    if options.action == "install":
        command = process.python("vllm_mlx_harmony", "serve", *rest)
        if sys.platform == "darwin":
            command += ["--log-file", str(log())]
        if file.exists():  # it may run with other arguments
            _run("stop")
        background.directory().mkdir(parents=True, exist_ok=True)
        content = plist(command, log()) if sys.platform == "darwin" else unit(command)
        write_atomically(file, content)
        print(f"wrote {file}")
    elif not file.exists():
        raise UsageError("the service is not installed: vllm-mlx-harmony service install 20b")
    codes = _run(options.action)
    if options.action == "uninstall":
        file.unlink()
        print(f"removed {file}")
        return 0
    return max(codes, default=0)


def _run(action: str) -> list[int]:
    """Runs the commands of an action. Returns their exit codes."""
    return [subprocess.run(command, check=False).returncode for command in commands(action)]


def log() -> Path:
    return background.directory() / "service.log"


def path() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "systemd" / "user" / f"{LABEL}.service"


def plist(command: Sequence[str], log: Path) -> bytes:
    """A launchd agent, which is started at login and restarted if it fails."""
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(command),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 30,
            "ExitTimeOut": int(process.STOPPED_WITHIN),  # launchd's own is 20
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
            "EnvironmentVariables": {"PATH": os.environ.get("PATH", os.defpath)},
        }
    )


def unit(command: Sequence[str]) -> bytes:
    """A systemd unit. The journal rotates its log."""
    # systemd expands % and $ in commands, and reads quotes much as a shell does
    words = (word.replace("\\", "\\\\").replace('"', '\\"') for word in command)
    started = " ".join(f'"{word}"'.replace("%", "%%").replace("$", "$$") for word in words)
    return f"""\
[Unit]
Description=gpt-oss on vllm-mlx

[Service]
ExecStart={started}
Restart=on-failure
RestartSec=30
RestartPreventExitStatus=2
TimeoutStopSec={process.STOPPED_WITHIN:.0f}

[Install]
WantedBy=default.target
""".encode()


def commands(action: str) -> list[list[str]]:
    if sys.platform == "darwin":
        domain = f"gui/{os.getuid()}"
        service = f"{domain}/{LABEL}"
        load, unload = f"launchctl bootstrap {domain} {path()}", f"launchctl bootout {service}"
        lines = {
            "install": [load],
            "start": [load],
            "stop": [unload],
            "status": [f"launchctl print {service}"],
            "logs": [f"tail -n 100 -F {log()}"],
            "uninstall": [unload],
        }
    else:
        user = "systemctl --user"
        lines = {
            "install": [f"{user} daemon-reload", f"{user} enable --now {LABEL}"],
            "start": [f"{user} start {LABEL}"],
            "stop": [f"{user} stop {LABEL}"],
            "status": [f"{user} status --no-pager {LABEL}"],
            "logs": [f"journalctl --user -u {LABEL} -n 100 -f"],
            "uninstall": [f"{user} disable --now {LABEL}"],
        }
    return [shlex.split(line) for line in lines[action]]
