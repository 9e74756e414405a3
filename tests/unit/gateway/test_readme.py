"""What the settings and the runbook show of a gateway: files and commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from vllm_mlx_harmony.cli import gateway, gateway_keys, gateway_usage
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.settings import Key, load

LIMIT = "tokens_per_day"
DOCS = Path(__file__).parents[3] / "docs"
RUNBOOK = (DOCS / "gateway.md").read_text("utf-8")
SETTINGS = (DOCS / "configuration.md").read_text("utf-8")


def test_documented_file_can_be_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", SETTINGS, re.MULTILINE | re.DOTALL)
    for number in range(3):
        text = text.replace("…", f"the-key-{number}", 1)
    (tmp_path / "gateway.toml").write_text(text, "utf-8")
    settings = load({}, {}, str(tmp_path / "gateway.toml"))
    assert settings.model == "openai/gpt-oss-120b"
    alice, ci = Key("alice", digest("the-key-0")), Key("ci", digest("the-key-1"), {LIMIT: 0})
    assert settings.keys == (alice, ci)
    assert settings.limits(alice).tokens_per_day == 20_000_000
    assert settings.engines == (Spec("http://gpu-1:8000", "vllm", "the-key-2"),)


def blocks(kind: str) -> list[str]:
    """The blocks of the runbook in one language."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", RUNBOOK, re.MULTILINE | re.DOTALL)


def test_files_of_the_runbook_can_be_read(tmp_path: Path) -> None:
    _, whole, keys = blocks("toml")
    digests = iter(f"sha256:{number:064x}" for number in range(9))
    text = re.sub("sha256:…", lambda _: next(digests), whole.replace('"…"', '"key"') + keys)
    (tmp_path / "gateway.toml").write_text(text, "utf-8")
    settings = load({}, {}, str(tmp_path / "gateway.toml"))
    alice, ci = map(settings.limits, settings.keys)
    assert (alice.tokens_per_minute, alice.concurrent_requests) == (2_000_000, 8)
    assert (ci.requests_per_minute, ci.concurrent_requests, ci.tokens_per_day) == (6000, 32, 0)


def test_commands_of_the_runbook_can_be_parsed() -> None:
    """Each is parsed by its own parser."""
    text = "".join(blocks("sh")).replace("\\\n", " ")
    commands = re.findall(r"^vllm-mlx-harmony gateway (.*)$", text, re.MULTILINE)
    assert len(commands) == 9
    for command in commands:
        words = shlex.split(command.partition(" >")[0], comments=True)
        if words[0] in ("keys", "usage"):
            (gateway_keys if words[0] == "keys" else gateway_usage).parser().parse_args(words[1:])
        else:
            flags = vars(gateway.parser().parse_args(words))
            assert flags.pop("config") or load(flags, {})
