"""Answers with which the scripted stand-in passes the checks (``verify --stand-in``)."""

from __future__ import annotations

from vllm_mlx_harmony.standin import Script
from vllm_mlx_harmony.verify import checks, wire
from vllm_mlx_harmony.verify.values import Ask


def _said(text: str, reasoning: str = "") -> str:
    thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"
    return f"{thought if reasoning else ''}<|channel|>final<|message|>{text}<|return|>"


def _to(ask: Ask | str) -> str:
    """The user's message, as it is in a prompt."""
    text = ask if isinstance(ask, str) else str(ask.messages[-1])
    return f"<|start|>user<|message|>{text}<|end|>"


WIRE = (
    Script(_to(checks.PROBE), _said("Hello.")),
    Script(_to(wire.PLAIN), _said("Rivers bring salt to it.", "Salt comes from rocks.")),
    Script(_to(wire.OTHER), _said("Air scatters blue light.", "Rayleigh.")),
    Script(_to(wire.COUNT), _said(" ".join(map(str, range(1, 31))), "From 1 to 30.")),
    Script(_to(wire.LONG), _said("one and one\n" * 1000), delay_ms=3),
    Script(_to(wire.EMOJI), _said("🌞 é 中 🇫🇷 ß", "🌞 é 中 🇫🇷 ß: five.")),
    Script(
        _to(wire.TIME),
        "<|channel|>commentary to=functions.get_time <|constrain|>json"
        '<|message|>{"city":"Lima"}<|call|>',
    ),
    Script(_to(wire.FIRST), _said("OK.")),
    Script(_to(wire.SECOND), _said("4711.")),
)
SCRIPTS = WIRE
