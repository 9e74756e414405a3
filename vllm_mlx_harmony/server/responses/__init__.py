"""The Responses API as a server keeps it: routes, WebSocket, background, compaction, storage.

Refuses to know its bodies and events (protocols.responses) and how a request is run (serving).
"""
