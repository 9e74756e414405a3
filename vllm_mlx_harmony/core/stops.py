"""Stop strings in text that arrives in pieces (semantics B)."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is completed first, however the text is split."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(string for string in strings if string)
        self._pending = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that can be shown now, without what may begin a stop string, and the stop string
        once one is complete."""
        text = self._pending + text
        hits = [(text.find(string), string) for string in self._strings if string in text]
        if hits:
            start, string = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._pending = ""
            return text[:start], string
        longest = max((len(string) - 1 for string in self._strings), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-size:]) for string in self._strings):
                self._pending = text[-size:]
                return text[:-size], None
        self._pending = ""
        return text, None

    def flush(self) -> str:
        """The text that was held back, when no more follows."""
        held, self._pending = self._pending, ""
        return held
