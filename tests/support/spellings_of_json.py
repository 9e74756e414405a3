"""Other spellings of a JSON value: order of keys, white space, escapes, numbers."""

from __future__ import annotations

import json
import random
from typing import Any

SPACES = ("", "", "", " ", "\n", "\n    ", "\t", " \r\n ", "\n\n")


def respelled(value: Any, chance: random.Random) -> str:
    """``value`` as JSON in an unusual spelling that a JSON parser reads as the same value."""
    text = chance.choice(SPACES) + _spell(value, chance) + chance.choice(SPACES)
    assert json.loads(text) == value, text
    return text


def _spell(value: Any, chance: random.Random) -> str:
    def space() -> str:
        return chance.choice(SPACES)

    if isinstance(value, dict):
        members = [
            f"{space()}{_string(name, chance)}{space()}:{space()}{_spell(member, chance)}{space()}"
            for name, member in value.items()
        ]
        chance.shuffle(members)
        return "{" + (",".join(members) or space()) + "}"
    if isinstance(value, list):
        items = (f"{space()}{_spell(member, chance)}{space()}" for member in value)
        return "[" + (",".join(items) or space()) + "]"
    if isinstance(value, str):
        return _string(value, chance)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number(value, chance)
    return json.dumps(value)


def _string(text: str, chance: random.Random) -> str:
    return '"' + "".join(_character(character, chance) for character in text) + '"'


def _character(character: str, chance: random.Random) -> str:
    plain = json.dumps(character, ensure_ascii=False)[1:-1]
    escaped = "".join(
        f"\\u{part}" for part in character.encode("utf-16-be", "surrogatepass").hex(" ", -2).split()
    )
    if "\ud800" <= character < "\ue000":
        return escaped
    others = [
        escaped,
        escaped.upper().replace("\\U", "\\u"),
        *(["\\/"] if character == "/" else []),
    ]
    return plain if chance.random() < 0.8 else chance.choice(others)


def _number(value: float, chance: random.Random) -> str:
    plain = json.dumps(value)
    if "e" in plain or abs(value) > 1e15:
        return plain
    forms = [plain, plain, plain + "e0"]
    if isinstance(value, int):
        forms += [f"{value}.0", f"{value}.00E+0"]
        digits = str(abs(value))
        if len(digits) > 1:
            sign = "-" if value < 0 else ""
            forms.append(f"{sign}{digits[0]}.{digits[1:]}e{len(digits) - 1}")
        if value and value % 1000 == 0:
            forms.append(f"{value // 1000}e3")
    return chance.choice(forms)
