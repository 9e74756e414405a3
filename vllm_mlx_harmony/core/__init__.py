"""Harmony on token ids: turns, rendering, parsing, replay, schemas and grammars.

It is independent of APIs, servers and engines. Only `vocab` and `files` perform I/O.
References such as A5, B and C1 are to docs/semantics.md.
"""
