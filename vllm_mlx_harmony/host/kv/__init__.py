"""Prefix reuse: what was computed for one prompt is not computed again for the next.

`prefix` says what is remembered, for whom and where it is cut; `tree` and `layers` hold it in
memory; `simple` and `batched` are the two engines; `status` shows it. On disk: `disk` reads and
writes behind the engine, `index` and `files` are what it writes, `identity` says of which weights,
`turns` keeps generated turns beside it, `opening` opens it. docs/reuse.md is the page about it.
"""
