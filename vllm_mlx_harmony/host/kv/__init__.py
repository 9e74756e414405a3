"""Prefix reuse: what was computed for one prompt is not computed again for the next (issue 5).

`prefix` says what is remembered, for whom and where it is cut; `tree` and `layers` hold it;
`simple` and `batched` are the two engines; docs/reuse.md is the page about it.
"""
