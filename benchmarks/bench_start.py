"""What it takes to start a server, and what it holds while it is idle.

Four servers of the same tiny random gpt-oss, each as a process, several times in turn: mlx-lm's
own, the light server (`gateway mlx:MODEL`), vllm-mlx, and vllm-mlx with the plugin. The first two
run on this Python, the others in an environment with vllm-mlx, which is made for it unless `--host`
names one: there, torch is installed, which mlx-lm's own server would import as well. Seconds are
counted until the first answer, on the clock and of processors, helper processes included. The first
rounds do not count: Python compiles modules, and our engine measures a model the first times that
it loads it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from statistics import median

import psutil

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.engine.measure_costs import RUNS

MLX_LM, LIGHT, HOST, PLUGIN = "mlx_lm.server", "light server", "vllm-mlx", "… with the plugin"

REPOSITORY = Path(__file__).resolve().parents[1]

COMMANDS = {
    MLX_LM: "-m mlx_lm.server --model {model}",
    LIGHT: "-m vllm_mlx_harmony gateway mlx:{model} --model {model}",
    HOST: "-m vllm_mlx.cli serve {model}",
    PLUGIN: "-m vllm_mlx.cli serve {model} --tool-call-parser harmony",
}

STARTING = 180.0
"""Seconds within which a server has to answer."""

IDLE = 3.0
"""Seconds after the answer at which its memory is measured."""

GOAL = 1.0
"""The light server's part of what mlx-lm's own takes."""

PLUGIN_SECONDS = 0.7
"""Seconds of processors that the plugin may add to vllm-mlx until the first answer."""

PLUGIN_MEMORY = 60e6
"""Bytes that it may add while idle."""


@dataclass(frozen=True)
class Start:
    """One start: seconds until the first answer, of processors too, and bytes while idle."""

    seconds: float
    processor: float
    memory: int


def main() -> int:
    """Prints the table; returns 1 if a goal is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", metavar="PYTHON", help="Python of an environment with vllm-mlx")
    parser.add_argument("--runs", type=int, default=5, metavar="NUMBER")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        host = given.host or with_vllm_mlx(Path(home) / "host")
        pythons = {MLX_LM: sys.executable, LIGHT: sys.executable, HOST: host, PLUGIN: host}
        starts: dict[str, list[Start]] = {name: [] for name in pythons}
        model = standin.write_tiny(Path(home) / "gpt-oss-tiny")
        for number in range(RUNS + given.runs):
            for name, python in pythons.items():
                found = started(name, python, model, Path(home))
                if number >= RUNS:
                    starts[name].append(found)
                    print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return table({name: typical(runs) for name, runs in starts.items()})


def with_vllm_mlx(place: Path) -> str:
    """Makes an environment with vllm-mlx and the plugin; returns its Python."""
    python = str(place / "bin" / "python")
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, place], check=True)
    install = ["uv", "pip", "install", "-q", "--python", python, "-e", f"{REPOSITORY}[cpu]"]
    subprocess.run([*install, "-e", REPOSITORY / "packaging" / "vllm-mlx-harmony"], check=True)
    return python


def typical(starts: list[Start]) -> Start:
    return Start(
        median(start.seconds for start in starts),
        median(start.processor for start in starts),
        int(median(start.memory for start in starts)),
    )


def table(starts: dict[str, Start]) -> int:
    """Prints a row for each server, with ratios to mlx-lm's own. Returns the exit code."""
    base = starts[MLX_LM]
    print(f"{'':24}{'first answer':>22}{'processor':>20}{'memory, idle':>22}")
    for name, start in starts.items():
        cells = (
            f"{start.seconds:.2f} s ({start.seconds / base.seconds:.2f})",
            f"{start.processor:.2f} s ({start.processor / base.processor:.2f})",
            f"{start.memory / 1e6:.0f} MB ({start.memory / base.memory:.2f})",
        )
        print(f"{name:24}{cells[0]:>22}{cells[1]:>20}{cells[2]:>22}")
    light = starts[LIGHT]
    ratios = light.seconds / base.seconds, light.memory / base.memory
    goals = {f"the light server takes at most what {MLX_LM} takes": max(ratios) <= GOAL}
    plugin, host = starts[PLUGIN], starts[HOST]
    seconds, memory = plugin.processor - host.processor, plugin.memory - host.memory
    print(f"the plugin adds {seconds:+.2f} s of processors and {memory / 1e6:+.0f} MB")
    goals[f"at most {PLUGIN_SECONDS} s and {PLUGIN_MEMORY / 1e6:.0f} MB"] = (
        seconds <= PLUGIN_SECONDS and memory <= PLUGIN_MEMORY
    )
    for goal, met in goals.items():
        print(f"{goal}: {'yes' if met else 'NO'}")
    return 0 if all(goals.values()) else 1


def started(name: str, python: str, model: Path, home: Path) -> Start:
    """Starts a server, asks it once, and stops it."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = COMMANDS[name].format(model=model).split()
    began = time.monotonic()
    with serving([python, *words, "--host", "127.0.0.1", "--port", str(port)], home) as process:
        answer(port, "default_model" if name == MLX_LM else str(model), process)
        seconds = time.monotonic() - began
        processor = sum(processor_time(member) for member in family(process))
        time.sleep(IDLE)
        memory = sum(member.memory_info().rss for member in family(process))
    return Start(seconds, processor, memory)


@contextmanager
def serving(command: list[str], home: Path) -> Iterator[subprocess.Popen[bytes]]:
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "HF_HUB_OFFLINE": "1"}
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=home, env={**inherited, **own}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield process
    except TimeoutError:
        print((home / "log").read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answer(port: int, model: str, process: subprocess.Popen[bytes]) -> None:
    """Sends a request until the server answers it. Raises ``TimeoutError`` if it does not."""
    messages = [{"role": "user", "content": "Hello"}]
    document = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(document).encode(),
        {"Content-Type": "application/json"},
    )
    end = time.monotonic() + STARTING
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(request, timeout=STARTING) as response:
            response.read()
            return
        time.sleep(0.02)
    raise TimeoutError(f"no answer: {process.args!r}")


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def processor_time(process: psutil.Process) -> float:
    """Seconds of a process, and of its children that have ended."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


if __name__ == "__main__":
    sys.exit(main())
