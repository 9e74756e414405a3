"""Harmony on token ids: turns, rendering, parsing, replay, schemas and grammars.

It is independent of APIs, servers and engines. Only `vocab` performs I/O: it reads the vocabulary,
and caches it on disk. References such as A5, B and C1 are to docs/semantics.md.
"""
