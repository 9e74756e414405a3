"""The Responses API on a server: routes, WebSocket, background, storage."""
