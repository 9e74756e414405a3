"""One file per API, both directions: a request body into a Turn, deltas into events."""
