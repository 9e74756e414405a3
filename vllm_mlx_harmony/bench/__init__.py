"""bench: how fast a server is on this machine, seen by a client over HTTP."""
