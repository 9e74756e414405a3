"""The settings in environment variables: what is read, what is rejected, what is documented."""

from __future__ import annotations

import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.grammar import Policy
from vllm_mlx_harmony.core.turn import Effort, ReasoningField
from vllm_mlx_harmony.server.settings import ServerSettings, ToolsMode, variable
from vllm_mlx_harmony.sizes import format_size

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def read(name: str, text: str) -> object:
    return getattr(ServerSettings.read({variable(name): text}), name)


READ: list[tuple[str, str, object]] = [
    ("max_body", "0", 0),
    ("max_body", "32", 32),
    ("max_body", "200k", 200 << 10),
    ("max_body", "16M", 16 << 20),
    ("max_body", "16 MB", 16 << 20),
    ("max_body", "16MiB", 16 << 20),
    ("max_body", "1.5G", 3 << 29),
    ("max_body", " 1T ", 1 << 40),
    ("max_body", "", 32 << 20),
    ("max_body", "  ", 32 << 20),
    ("ping_seconds", "2.5", 2.5),
    ("ping_seconds", "0", 0),
    ("date", "2025-01-31", "2025-01-31"),
    ("date", "None", "none"),
    ("date", "today", "today"),
    ("model_names", " claude-*, ,gpt-4o,", ("claude-*", "gpt-4o")),
    ("model_names", "None", ()),
    ("none_effort", "Low", Effort.LOW),
    ("none_effort", "none", None),
    ("grammar", "Strict", Policy.STRICT),
    ("reasoning_field", "Reasoning_Content", ReasoningField.REASONING_CONTENT),
    ("reasoning_budget", "1000", 1000),
    ("reasoning_budget", "OFF", "off"),
    ("repetitions", "0", 0),
    ("speculate", "Forced", "forced"),
    ("tools", "all", ToolsMode.ALL),
    ("inspect", "1", True),
    ("status_line", "0", False),
    ("store", "~/responses.db", "~/responses.db"),
    ("store", "rediss://a:b@c/0", "rediss://a:b@c/0"),
    ("seal_key", " a secret\n", " a secret\n"),
]


@pytest.mark.parametrize(("name", "text", "expected"), READ)
def test_valid_values_are_read(name: str, text: str, expected: object) -> None:
    assert read(name, text) == expected


NO_SIZES = ["many", "-1", "0.5", "16X", "1G2", "1e6", "٣", "9" * 400]

INVALID: list[tuple[str, str, str]] = [
    *(("max_body", text, "is not a number such as 32 or 64M") for text in NO_SIZES),
    *(("ping_seconds", text, "is not a number of seconds") for text in ("5K", "-1", "nan", "inf")),
    ("queue", "0", "'0' is less than 1"),
    ("pause_ms", "0", "'0' is less than 1"),
    ("store_seconds", "0", "'0' is less than 1"),
    ("store_seconds", "1K", "'1K' is not a number"),
    ("replay", "64M", "'64M' is not a number"),
    ("reasoning_budget", "-1", "'-1' is not a number"),
    ("reasoning_budget", "many", "'many' is not a number"),
    ("repetitions", "٣", "is not a number"),
    ("date", "tomorrow", "'tomorrow' is not a date (YYYY-MM-DD)"),
    ("date", "2025-02-30", "is not a date"),
    ("date", "20250131", "is not a date"),
    ("date", "31.01.2025", "is not a date"),
    ("none_effort", "a little", "unknown effort 'a little'"),
    ("attachments", "show", "'show' is not one of omit, refuse"),
    ("grammar", "perhaps", "'perhaps' is not one of auto, strict, off"),
    ("reasoning_field", "thinking", "is not one of both, reasoning, reasoning_content"),
    ("speculate", "on", "'on' is not one of off, forced, auto"),
    ("tools", "yes", "'yes' is not one of off, on, all"),
    ("inspect", "true", "'true' is not one of 1, 0"),
    ("id_endpoint", "yes", "'yes' is not one of 1, 0"),
    ("status_line", "off", "'off' is not one of 1, 0"),
    ("store", "http://x", "'http://x' is neither a file nor the URL of a Redis"),
    ("store", "REDIS://x", "is neither a file nor"),
    ("store", "https://me:secret@x", "'https://x' is neither"),
]


@pytest.mark.parametrize(("name", "text", "expected"), INVALID)
def test_invalid_values_are_rejected(name: str, text: str, expected: str) -> None:
    with pytest.raises(HostError) as raised:
        read(name, text)
    message = raised.value.message
    assert message.startswith(f"{variable(name)}: ") and expected in message
    assert "\n" not in message and "secret" not in message


def test_empty_environment_has_the_defaults() -> None:
    assert ServerSettings.read({}) == ServerSettings()


def test_repr_hides_secret() -> None:
    assert "secret" not in repr(ServerSettings(seal_key="secret"))


# --- docs/configuration.md

ROW = re.compile(r"^\| `VLLM_MLX_HARMONY_([A-Z_]+)` \| (.+) \|$", re.MULTILINE)
ROWS = dict(ROW.findall(PAGE.read_text("utf-8")))
"""Variables on the page, without their prefix, and their descriptions."""


def test_page_lists_all_settings() -> None:
    assert {name.lower() for name in ROWS} == {field.name for field in fields(ServerSettings)}


IN_PROSE = (None, "", (), True, False)
"""Defaults that the page describes, or omits."""


@pytest.mark.parametrize(
    ("name", "default"),
    [(name, value) for name, value in asdict(ServerSettings()).items() if value not in IN_PROSE],
)
def test_page_states_defaults(name: str, default: object) -> None:
    documented = re.search(r"Default: `?([\w.-]+)`?", ROWS[name.upper()])
    assert documented is not None
    assert read(name, documented[1]) == default


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(5, "5 bytes"), (3 << 29, "1.5 GiB"), (64 << 20, "64 MiB")]
)
def test_size_is_formatted(nbytes: int, expected: str) -> None:
    assert format_size(nbytes) == expected
