"""The short escapes of JSON strings (RFC 8259, section 7)."""

from __future__ import annotations

CHARACTERS = {
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    '"': '"',
    "\\": "\\",
    "/": "/",
}
"""The character that each letter after a backslash stands for."""

REQUIRED = {character: letter for letter, character in CHARACTERS.items() if letter != "/"}
"""The inverse, for characters that must be escaped."""
