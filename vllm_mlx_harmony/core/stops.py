"""Stop strings in content (semantics B).

Knows how to find the first of several strings in text that comes in pieces, and what to hold back.
Refuses to know which text is content.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is completed first; the same one however the text is cut."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(string for string in strings if string)
        self._pending = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that can be shown now, and the stop string when one is complete.

        What may be the beginning of a stop string is held back until that is decided.
        """
        text = self._pending + text
        found = [(text.find(string), string) for string in self._strings if string in text]
        if found:
            start, string = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._pending = ""
            return text[:start], string
        shown = len(text) - self._beginning(text)
        self._pending = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """The text held back, once nothing more can follow it."""
        held, self._pending = self._pending, ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` that is a beginning of a stop string."""
        longest = max((len(string) - 1 for string in self._strings), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-size:]) for string in self._strings):
                return size
        return 0
