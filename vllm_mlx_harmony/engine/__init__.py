"""One engine on mlx and mlx-lm: prompts of ids in, ids out, many requests at once.

It is independent of the server around it, and implements `server.engine.Engine`.
"""
