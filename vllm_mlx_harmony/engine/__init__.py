"""One `engine_api.engine.Engine` on mlx and mlx-lm, independent of the server around it."""
