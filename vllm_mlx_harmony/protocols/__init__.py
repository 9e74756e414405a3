"""One package for each API, both directions: a request body into a Turn, deltas into events."""
