"""Harmony on token ids: turns, rendering, parsing, replay, schemas and grammars.

It performs no I/O, and is independent of APIs, servers and engines.
"""
