"""The same JSON value in other words: another order of keys, white space, escapes, numbers."""

from __future__ import annotations

import json
import random
from typing import Any

SPACES = ("", "", "", " ", "\n", "\n    ", "\t", " \r\n ", "\n\n")


def respelled(value: Any, chance: random.Random) -> str:
    """``value`` as JSON, in a way that nobody writes it. A JSON parser reads the same."""
    text = chance.choice(SPACES) + _written(value, chance) + chance.choice(SPACES)
    assert json.loads(text) == value, text
    return text


def _written(value: Any, chance: random.Random) -> str:
    def space() -> str:
        return chance.choice(SPACES)

    if isinstance(value, dict):
        members = [
            f"{space()}{_string(name, chance)}{space()}:{space()}{_written(one, chance)}{space()}"
            for name, one in value.items()
        ]
        chance.shuffle(members)
        return "{" + (",".join(members) or space()) + "}"
    if isinstance(value, list):
        items = (f"{space()}{_written(one, chance)}{space()}" for one in value)
        return "[" + (",".join(items) or space()) + "]"
    if isinstance(value, str):
        return _string(value, chance)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number(value, chance)
    return json.dumps(value)


def _string(text: str, chance: random.Random) -> str:
    return '"' + "".join(_character(one, chance) for one in text) + '"'


def _character(one: str, chance: random.Random) -> str:
    plain = json.dumps(one, ensure_ascii=False)[1:-1]
    escaped = "".join(
        f"\\u{part}" for part in one.encode("utf-16-be", "surrogatepass").hex(" ", -2).split()
    )
    if "\ud800" <= one < "\ue000":
        return escaped
    others = [escaped, escaped.upper().replace("\\U", "\\u"), *(["\\/"] if one == "/" else [])]
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
