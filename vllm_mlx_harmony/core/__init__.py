"""Harmony itself: turns, rendering, parsing.

Knows the format and nothing of any API, server or engine; imports the standard library and
`openai_harmony`, and `llguidance` for grammars.
"""
