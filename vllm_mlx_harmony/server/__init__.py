"""The HTTP front end: from a request's body to the last event of its answer.

Serves all APIs on top of token ids, for any engine. It knows the engine as an `Engine` and the
server around it as a `Host` (the protocols in `engine_api` and `host`), and imports no
implementation of either.
"""
