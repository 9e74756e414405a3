"""The HTTP front end: from a request's body to the last event of its answer.

Three APIs over token ids, for any engine: it sees an `Engine` and its surroundings, a `Host`,
through the protocols in `engine` and `host`, and imports nothing of what implements them.
"""
