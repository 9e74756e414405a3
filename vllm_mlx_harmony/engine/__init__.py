"""One engine on mlx and mlx-lm: prompts of ids in, ids out, many requests at once.

Knows nothing of the server around it: what a request is arrives as `server.engine.Engine` has it.
"""
