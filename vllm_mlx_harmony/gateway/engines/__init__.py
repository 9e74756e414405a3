"""Engines over HTTP: token ids out of servers that were built for scale.

One file for each kind of server, which says what its API is called and where that is written down:
pure functions from a request to a body, and from what comes to ids (`dialect`). What all of them
share, connections, failures and the end of a turn, is in `http`; which kind a server is, in
`detection`.
"""
