"""What the README says of a gateway's file."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.settings import Key, load

LIMIT = "tokens_per_day"
README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def test_the_file_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for number in range(3):
        text = text.replace("…", f"the-key-{number}", 1)
    (tmp_path / "gateway.toml").write_text(text, "utf-8")
    settings = load({}, {}, str(tmp_path / "gateway.toml"))
    assert settings.model == "openai/gpt-oss-120b"
    alice, ci = Key("alice", digest("the-key-0")), Key("ci", digest("the-key-1"), {LIMIT: 0})
    assert settings.keys == (alice, ci)
    assert settings.limits(alice).tokens_per_day == 20_000_000
    assert settings.engines == (Spec("http://gpu-1:8000", "vllm", "the-key-2"),)
