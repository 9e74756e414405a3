"""Engines over HTTP: token ids out of servers that were built for scale.

Each kind of server has a file that names the source of its API, with pure functions from a request
to a body, and from an event to ids (`dialect`). `http` has what all of them share: connections,
failures and the end of a turn. `detection` finds out which kind a server is.
"""
