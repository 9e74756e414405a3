"""What the settings and the runbook show of a gateway: files, commands, queries."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from vllm_mlx_harmony.cli import gateway, gateway_keys
from vllm_mlx_harmony.gateway.access_log import Entry
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.settings import Key, load

LIMIT = "tokens_per_day"
DOCS = Path(__file__).parents[2] / "docs"
RUNBOOK = (DOCS / "gateway.md").read_text("utf-8")
SETTINGS = (DOCS / "configuration.md").read_text("utf-8")


def test_the_file_is_one(tmp_path: Path) -> None:
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
    """The blocks of the runbook in a language."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", RUNBOOK, re.MULTILINE | re.DOTALL)


def test_files_of_the_runbook(tmp_path: Path) -> None:
    _, whole, keys = blocks("toml")
    digests = iter(f"sha256:{number:064x}" for number in range(9))
    text = re.sub("sha256:…", lambda _: next(digests), whole.replace('"…"', '"key"') + keys)
    (tmp_path / "gateway.toml").write_text(text, "utf-8")
    settings = load({}, {}, str(tmp_path / "gateway.toml"))
    alice, ci = map(settings.limits, settings.keys)
    assert (alice.tokens_per_minute, alice.concurrent_requests) == (2_000_000, 8)
    assert (ci.requests_per_minute, ci.concurrent_requests, ci.tokens_per_day) == (6000, 32, 0)


def test_commands_of_the_runbook() -> None:
    """Each is parsed by its own parser."""
    text = "".join(blocks("sh")).replace("\\\n", " ")
    commands = re.findall(r"^vllm-mlx-harmony gateway (.*)$", text, re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        words = shlex.split(command.partition(" >")[0], comments=True)
        if words[0] == "keys":
            gateway_keys.parser().parse_args(words[1:])
        else:
            flags = vars(gateway.parser().parse_args(words))
            assert flags.pop("config") or load(flags, {})


def test_who_used_how_much_yesterday() -> None:
    """The query of the runbook, over the lines of a log with noise between them."""
    jq = pytest.importorskip("jq")
    access = Entry("json", "POST", "/v1/responses", "m", 0.0, "alice", 200, "success", 100, 90, 7)
    bob = Entry("json", "POST", "/v1/responses", "m", 0.0, "bob", 429)
    lines = [
        access.line("2026-11-22T10:00:00.000+00:00", 1.0),
        "not a line of the access log",
        bob.line("2026-11-22T10:00:00.000+00:00", 1.0),
        access.line("2026-11-23T10:00:00.000+00:00", 1.0),
        access.line("2026-11-22T23:59:59.999+00:00", 1.0),
    ]
    (command,) = [each for each in blocks("sh") if each.startswith("cat gateway-")]
    words = shlex.split(command)
    assert words[:5] == ["cat", "gateway-*.log", "|", "jq", "-Rrs"]
    name, _, program = words[6:]  # `date` of yesterday
    shown = (
        jq.compile(program, args={name: "2026-11-22"}).input_value("\n".join(lines) + "\n").all()
    )
    assert shown == ["alice\t2\t200\t14", "bob\t1\t0\t0"]
